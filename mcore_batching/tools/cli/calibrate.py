"""`mcore-batching calibrate`: time a real Megatron layer stack, write the planner's cost model."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from mcore_batching.planning import ConfigError, CostModel
from mcore_batching.planning.cost_fit import CostFit, Timing
from mcore_batching.planning.errors import printable
from mcore_batching.tools import report
from mcore_batching.tools.cli.options import (
    CommandParser,
    UsageError,
    check_at_least,
    complain,
    write,
)

_FEWEST_TOKENS = 64
"""Of the longest row, for as many different rows as a fit needs."""
_MOST_GROUPS = 8
_POOR_FIT = 0.2
"""Relative error of the worst row beyond which a fit is not to be trusted."""


def add_arguments(parser: CommandParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Time a layer stack of megatron-core on the present device over rows of several sizes, and "
        "fit what a micro-batch costs. Needs mcore_batching[megatron]. Under torchrun, with a "
        "process for each GPU, also what it costs to cut a micro-batch over several of them "
        "(dynamic CP): torchrun --nproc-per-node 8 -m mcore_batching calibrate."
    )
    for flag, default, help_text in (
        ("--num-layers", 4, "layers of a pipeline stage"),
        ("--hidden-size", 1024, "size of the residual stream"),
        ("--ffn-hidden-size", 4096, "inner size of the feed-forward layers"),
        ("--num-attention-heads", 16, "query heads"),
        ("--max-tokens", 16384, "tokens of the longest row"),
        ("--repeats", 5, "timed runs of each row, of which the median counts"),
    ):
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{help_text} (default: %(default)s)"
        )
    parser.add_argument(
        "--num-query-groups",
        type=int,
        metavar="N",
        help="key-value heads, a divisor of the query heads (default: the largest up to "
        f"{_MOST_GROUPS})",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of weights and activations (default: bfloat16 on a GPU, float32 on the CPU)",
    )
    parser.add_argument("--cpu", action="store_true", help="on the CPU, though there is a GPU")
    parser.add_argument("--out", metavar="FILE", help="write the cost model to this file, as JSON")


def run(options: argparse.Namespace) -> int:
    """Time, fit, print and write."""
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "repeats"):
        check_at_least(options, name, 1)
    check_at_least(options, "max_tokens", _FEWEST_TOKENS)
    fit, timings, dtype, device = _measure(options, _query_groups(options))
    if os.environ.get("RANK", "0") != "0":
        return 0
    _print(fit, timings, f"{options.num_layers} layers in {dtype} on {device}")
    if fit.max_relative_error > _POOR_FIT:
        complain(
            f"the cost model is poor: it is {fit.max_relative_error:.0%} off for one of the rows; "
            "raise --max-tokens or --repeats, and keep the device free of other work"
        )
    if device == "CPU":
        print("measured on the CPU: these figures say nothing of a GPU or of its network")
    if options.out:
        document = json.loads(fit.cost_model.to_json()) | {
            "seconds_per_unit": fit.seconds_per_unit,
            "mean_relative_error": fit.mean_relative_error,
            "max_relative_error": fit.max_relative_error,
            "measured_on": device,
        }
        write(options.out, json.dumps(document, indent=1))
        print(f"wrote {printable(options.out)}")
    return 0


def _measure(
    options: argparse.Namespace, num_query_groups: int
) -> tuple[CostFit, Sequence[Timing], str, str]:
    """The fit, the rows that were timed, and the names of the dtype and the device."""
    # megatron-core warns of every optional package that is absent.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    try:
        import torch

        if options.cpu or not torch.cuda.is_available():
            # Importing the engine turns the stand-in on.
            os.environ["MCORE_BATCHING_CPU"] = "force" if options.cpu else "1"
        from mcore_batching.megatron import cpu_emulation
    except ImportError as error:
        raise UsageError(
            f"calibrate needs PyTorch and megatron-core ({error}): pip install "
            "'mcore_batching[megatron]'"
        ) from None
    from mcore_batching.megatron.standalone.calibration import LayerStack, calibrate

    on_cpu = cpu_emulation.is_enabled()
    if not on_cpu and "LOCAL_RANK" not in os.environ:
        torch.cuda.set_device(0)
    dtype = options.dtype or ("float32" if on_cpu else "bfloat16")
    stack = LayerStack(
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        ffn_hidden_size=options.ffn_hidden_size,
        num_attention_heads=options.num_attention_heads,
        num_query_groups=num_query_groups,
        dtype=getattr(torch, dtype),
    )
    try:
        fit, timings = calibrate(stack, max_tokens=options.max_tokens, repeats=options.repeats)
    except ConfigError as error:
        raise UsageError(f"{error}; raise --max-tokens or --repeats") from None
    return fit, timings, dtype, "CPU" if on_cpu else torch.cuda.get_device_name()


def _print(fit: CostFit, timings: Sequence[Timing], measured: str) -> None:
    model = fit.cost_model
    rows = [
        (
            f"{len(timing.lengths)} x {timing.lengths[0]}",
            str(timing.context_parallel),
            f"{1e3 * timing.forward_seconds:.2f}",
            f"{1e3 * timing.backward_seconds:.2f}",
            f"{1e3 * fit.seconds_per_unit * _cost(model, timing):.2f}",
        )
        for timing in timings
    ]
    columns = ("sequences x tokens", "ranks", "forward ms", "backward ms", "fitted forward ms")
    report.print_table(report.Table(columns=columns, rows=tuple(rows)), sys.stdout)
    print(
        f"{measured}: a token takes {1e6 * fit.seconds_per_unit:.3g} µs, attention as much at "
        f"{1 / model.quadratic if model.quadratic else float('inf'):.0f} tokens, a micro-batch as "
        f"much as {model.per_micro_batch:.0f} tokens, backward {model.backward_ratio:.2f} x forward"
    )
    most = max((timing.context_parallel for timing in timings), default=1)
    if most > 1:
        print(
            f"rows on up to {most} ranks: a doubling of them adds "
            f"{model.context_parallel_overhead:.1%} to a micro-batch's work over all of them, and "
            f"as much as {model.context_parallel_fixed:.0f} tokens"
        )
    else:
        print(
            "rows on several ranks were not timed, context_parallel_overhead and "
            "context_parallel_fixed are defaults: start calibrate with torchrun on several GPUs"
        )
    print(
        f"error of the fit: {fit.mean_relative_error:.1%} on average, "
        f"{fit.max_relative_error:.1%} at worst"
    )


def _cost(model: CostModel, timing: Timing) -> float:
    return model.on_ranks(timing.context_parallel).micro_batch(timing.lengths)


def _query_groups(options: argparse.Namespace) -> int:
    """Key-value heads of the stack, after a check that all heads' sizes fit together."""
    hidden, heads, groups = (
        options.hidden_size,
        options.num_attention_heads,
        options.num_query_groups,
    )
    if hidden % (2 * heads):
        raise UsageError(
            f"--hidden-size must be a multiple of twice --num-attention-heads, for heads of one "
            f"even size, got {hidden} and {heads}; set --hidden-size to a multiple of {2 * heads}, "
            "or --num-attention-heads accordingly"
        )
    divisors = [size for size in range(1, heads + 1) if heads % size == 0]
    if groups is None:
        return max(size for size in divisors if size <= _MOST_GROUPS)
    if groups not in divisors:
        raise UsageError(
            f"--num-query-groups must divide --num-attention-heads, got {groups} and {heads}; set "
            f"--num-query-groups to one of {', '.join(map(str, divisors))}"
        )
    return int(groups)
