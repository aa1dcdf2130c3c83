"""`mcore-batching check`: check a plan against its lengths."""

from __future__ import annotations

import argparse

from mcore_batching.planning import InvariantError, Plan, validate_plan
from mcore_batching.planning.errors import printable
from mcore_batching.planning.plans.plan_document import lengths_digest, load
from mcore_batching.tools import report
from mcore_batching.tools.lengths_file import read_lengths
from mcore_batching.tools.options import CommandParser, add_lengths, complain, read


def add_arguments(parser: CommandParser) -> None:
    """The command's arguments."""
    parser.description = "Check a plan against its lengths, and name the invariant that it breaks."
    parser.add_argument("plan", metavar="PLAN.json", help="a plan, as --out writes it")
    add_lengths(parser)


def run(options: argparse.Namespace) -> int:
    """Check; status 1 if an invariant is broken."""
    text = read(options.plan)
    lengths = read_lengths(options.lengths, options.column)
    # Digests come last: a broken invariant is a better answer than "changed after it was written".
    parts = load(text)
    plan = Plan.of_parts(parts, verify_digest=False)
    recorded, of_lengths = parts["digest"], parts["lengths_digest"]
    fault, found = None, plan.digest()
    try:
        validate_plan(plan, lengths)
    except InvariantError as error:
        fault = str(error)
    else:
        # Other lengths may satisfy every invariant by chance, so their digest has the last word.
        if of_lengths not in (None, lengths_digest(lengths)):
            fault = f"invariants hold, but it was made from other lengths than {options.lengths}"
        elif recorded not in (None, found):
            fault = f"invariants hold, but its digest is {recorded}, the content's {found}: changed"
    if fault is not None:
        complain(f"{options.plan}: {fault}")
        return 1
    digest = "digest matches" if recorded else "no digest recorded"
    if of_lengths is None:
        digest += "; the plan does not record the lengths it was made from"
    name, heading = printable(options.plan), report.plan_heading(plan)
    print(f"{name}: {heading}: every invariant holds; {digest}")
    return 0
