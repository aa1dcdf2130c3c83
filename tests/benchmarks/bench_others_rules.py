"""Others' packing rules as this package writes them, against the originals, where installed.

    python tests/benchmarks/bench_others_rules.py [--cases 60] [--json OUT]

    pip install trl pyarrow && pip install --no-deps verl areal numba   # whichever are wanted
    export MCORE_BATCHING_MEGATRON_DEV=DIR   # a checkout of Megatron-LM's dev branch

Random problems (lengths, cap, ranks, stages, group of the interleaved schedule) are planned by
both; plans must agree sample by sample, and where the original raises, the rule here must refuse.
Of verl and AReaL one module is loaded, with empty stand-ins for what it imports and these functions
do not use; their all-reduces over ranks are carried out by a loop here. For Megatron's dynamic CP
samples need up to all of the ranks. A framework that is not there is reported as not compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import logging
import random
import sys
import time
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_dev import CHECKOUT, scheduling_file, scheduling_module

from mcore_batching.tools.report import Table, print_table
from mcore_batching.tools.rules import RuleFailureError, areal, in_order, verl
from mcore_batching.tools.rules.megatron_dynamic import dynamic_slots
from mcore_batching.tools.rules.packing_input import MicroBatches, PackingFunction, PackingInput

Original = Callable[[PackingInput], list[MicroBatches]]
REFUSALS = (RuleFailureError, AssertionError, ValueError, RuntimeError, IndexError)


def random_problem(seed: int) -> PackingInput:
    """Log-normal lengths under a cap, mostly a multiple of the ranks."""
    generator = random.Random(seed)
    cap = generator.choice([64, 1000, 16384])
    ranks, stages = generator.choice([1, 2, 4, 8]), generator.choice([1, 2, 4])
    count = generator.choice([5, 16, 64, 200])
    if generator.random() < 0.8:
        count = -(-count // ranks) * ranks
    longest = generator.choice([cap // 8, cap // 2, cap])
    lengths = tuple(
        max(1, min(longest, int(generator.lognormvariate(0, 1) * longest / 4)))
        for _ in range(count)
    )
    return PackingInput(
        sizes=lengths,
        lengths=lengths,
        capacity=cap,
        ranks=ranks,
        stages=stages,
        group=generator.choice([None, None, 4]),
    )


def verl_original() -> Original:
    """verl's micro-batches of every rank, by its own functions."""
    import torch

    def stand_in(name: str, **names: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        vars(module).update(names)
        return module

    selecting = stand_in("tensordict_utils", index_select_tensor_dict=lambda batch, part: None)
    module = _load_alone(
        "verl",
        "utils/seqlen_balancing.py",
        {
            "verl.protocol": stand_in("protocol", DataProto=object),
            "verl.utils": stand_in("utils", tensordict_utils=selecting),
            "verl.utils.tensordict_utils": selecting,
            "verl.utils.device": stand_in("device", get_device_name=lambda: "cpu"),
        },
    )

    def rank_parts(problem: PackingInput, shard: list[int], least: int) -> MicroBatches:
        width = max(problem.sizes)
        mask = torch.zeros(len(shard), width, dtype=torch.long)
        for row, sample in enumerate(shard):
            mask[row, : problem.sizes[sample]] = 1
        _, parts = module.rearrange_micro_batches(
            {"input_ids": mask, "attention_mask": mask},
            problem.capacity,
            num_batches_divided_by=problem.group,
            min_num_micro_batch=least,
        )
        return [[shard[i] for i in part] for part in parts]

    def plan(problem: PackingInput) -> list[MicroBatches]:
        work = [int(w) for w in module.calculate_workload(torch.tensor(problem.lengths)).tolist()]
        shards = module.get_seqlen_balanced_partitions(work, problem.ranks, equal_size=True)
        for shard in shards:
            shard.sort(key=lambda i: (work[i], i))
            shard[:] = shard[::2] + shard[1::2][::-1]
        least = 1
        while True:
            ranks = [rank_parts(problem, shard, least) for shard in shards]
            most = max(map(len, ranks))
            if all(len(rank) == most for rank in ranks):
                return ranks
            least = most

    return plan


def trl_original() -> Original:
    """TRL's packed rows, told apart by tokens that are the samples' numbers, dealt out in turn."""
    import pyarrow
    from trl.data_utils import _pack_bfd

    def plan(problem: PackingInput) -> list[MicroBatches]:
        tokens = [[sample] * size for sample, size in enumerate(problem.sizes)]
        rows = _pack_bfd(pyarrow.table({"tokens": tokens}), problem.capacity)["tokens"].to_pylist()
        # A row's samples come in the order in which they were put there.
        bins = [list(dict.fromkeys(row)) for row in rows]
        count = -(-len(bins) // problem.ranks)
        return [
            (bins[rank :: problem.ranks] + [[]] * count)[:count] for rank in range(problem.ranks)
        ]

    return plan


def areal_original(*, deal: bool) -> Original:
    """AReaL's packer on every rank, its synchronised counts carried out by a loop."""
    utilities = types.ModuleType("areal.utils")
    vars(utilities)["logging"] = logging
    module = _load_alone("areal", "utils/seqpack.py", {"areal.utils": utilities})
    # NumPy's default sort leaves the order of equal lengths open; the rule here keeps input order.
    argsort = module.np.argsort
    module.np = types.SimpleNamespace(
        array=module.np.array,
        argmin=module.np.argmin,
        argsort=lambda values: argsort(values, kind="stable"),
        ndarray=module.np.ndarray,
    )

    def plan(problem: PackingInput) -> list[MicroBatches]:
        sizes = problem.sizes
        if deal:
            shards = problem.shards()
        else:
            shards = module.balanced_greedy_partition(list(sizes), problem.ranks)
        least = 2 * problem.stages if problem.stages > 1 else 1
        while True:
            ranks = []
            for shard in shards:
                groups = module.ffd_allocate(
                    [sizes[i] for i in shard], problem.capacity, least, problem.stages
                )
                # Rank-local order is that of sample numbers here and of dispatch there.
                ranks.append(sorted(sorted(shard[int(i)] for i in group) for group in groups))
            most = max(map(len, ranks))
            if all(len(rank) == most for rank in ranks):
                return ranks
            least = most

    return plan


def on_part_of_the_ranks(problem: PackingInput) -> PackingInput:
    """The problem with a cap so low that its longest sample may need all ranks."""
    return dataclasses.replace(problem, capacity=max(1, problem.capacity // problem.ranks))


def megatron_dynamic(problem: PackingInput) -> list[MicroBatches]:
    """The rule as this package writes it: each rank's part of every slot's groups."""
    problem = on_part_of_the_ranks(problem)
    slots = dynamic_slots(problem.lengths, problem.ranks, problem.capacity)
    of_ranks = [[samples for size, samples in groups for _ in range(size)] for groups in slots]
    return [list(rank) for rank in zip(*of_ranks, strict=True)]


def megatron_original() -> Original:
    """Megatron's dynamic CP, one slot after the other as its scheduler asks for them."""
    path = scheduling_file()
    if path is None:
        raise ImportError(f"{CHECKOUT} names no checkout of Megatron-LM's dev branch")
    module = scheduling_module(path)

    def plan(problem: PackingInput) -> list[MicroBatches]:
        problem = on_part_of_the_ranks(problem)
        left = sorted(enumerate(problem.lengths), key=lambda sample: -sample[1])
        slots = []
        while left:
            _, left, _, of_ranks = module.next_hdp_group_packing_aware(
                left, problem.ranks, problem.capacity
            )
            slots.append(of_ranks)
        return [list(rank) for rank in zip(*slots, strict=True)]

    return plan


def _version(package: str) -> str:
    """Of an installed package; of Megatron's file the object that git knows it by."""
    path = scheduling_file()
    if package != "Megatron-LM" or path is None:
        return metadata.version(package)
    text = path.read_bytes()
    blob = b"blob %d\0" % len(text) + text
    return f"dev, blob {hashlib.sha1(blob, usedforsecurity=False).hexdigest()[:9]}"


def _load_alone(package: str, file: str, stand_ins: dict[str, types.ModuleType]) -> Any:
    """One module of an installed package, without running the package's own start-up."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"{package} is not installed")
    path = Path(next(iter(found.submodule_search_locations))) / file
    spec = importlib.util.spec_from_file_location(f"alone_{package}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    stand_ins = {package: types.ModuleType(package), **stand_ins}
    sys.modules.update(stand_ins)
    try:
        spec.loader.exec_module(module)
    finally:
        for name in stand_ins:
            del sys.modules[name]
    return module


def compare(
    name: str, package: str, rule: PackingFunction, original: Callable[[], Original], cases: int
) -> dict[str, Any]:
    """Both plans of every case: how many agree, how many both refuse, and the time of each."""
    record: dict[str, Any] = {"rule": name, "package": package, "version": None}
    try:
        theirs = original()
        record["version"] = _version(package)
    except ImportError as error:
        return {**record, "not_compared": str(error)}
    record |= {"cases": cases, "equal": 0, "both_refuse": 0, "different": []}
    seconds = [0.0, 0.0]
    for seed in range(cases):
        problem = random_problem(seed)
        plans = []
        for index, plan in enumerate((rule, theirs)):
            started = time.perf_counter()
            try:
                plans.append(plan(problem))
            except REFUSALS:
                plans.append(None)
            seconds[index] += time.perf_counter() - started
        if plans[0] != plans[1]:
            record["different"].append(seed)
        elif plans[0] is None:
            record["both_refuse"] += 1
        else:
            record["equal"] += 1
    return {**record, "seconds": seconds[0], "seconds_original": seconds[1]}


def main() -> int:
    """Compare; the exit status is 1 if any plan differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the records here")
    options = parser.parse_args()
    records = [
        compare(name, package, rule, original, options.cases)
        for name, package, rule, original in (
            ("verl 0.9", "verl", verl.by_cost_under_cap, verl_original),
            ("TRL best-fit", "trl", in_order.best_fit_decreasing, trl_original),
            ("AReaL (dealt)", "areal", areal.dealt, lambda: areal_original(deal=True)),
            ("AReaL (balanced)", "areal", areal.balanced, lambda: areal_original(deal=False)),
            ("Megatron dynamic CP", "Megatron-LM", megatron_dynamic, megatron_original),
        )
    ]
    rows = []
    for record in records:
        if "not_compared" in record:
            rows.append((record["rule"], record["not_compared"], *["-"] * 5))
            continue
        rows.append(
            (
                record["rule"],
                f"{record['package']} {record['version']}",
                str(record["equal"]),
                str(record["both_refuse"]),
                str(len(record["different"])),
                f"{record['seconds']:.2f} s",
                f"{record['seconds_original']:.2f} s",
            )
        )
    columns = ("rule", "original", "equal", "both refuse", "different", "time", "original's time")
    print_table(Table(columns=columns, rows=tuple(rows)), sys.stdout)
    if options.json:
        options.json.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    return int(any(record.get("different") for record in records))


if __name__ == "__main__":
    sys.exit(main())
