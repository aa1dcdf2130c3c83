"""slime's, verl's and SkyRL's own planning functions, and the same with this package in place.

    python tests/benchmarks/bench_integrations.py LENGTHS... [--slime DIR] [--verl DIR]...
        [--skyrl DIR]

LENGTHS are files of one length a line; DIR a checkout (slime since its pull request 1926) or a
folder with verl (an unpacked wheel, a checkout). The frameworks' own functions plan every step;
verl's all-reduces over ranks are carried out by a loop. slime is hooked; hooked verl plans on its
ranks by `planning/local.py` (`test_verl_micro_batches.py`), of samples that verl's own balancing
dealt out; SkyRL likewise, of samples in the order in which it deals them.

Figures: the predicted end of the step under the framework's own plan over that under ours, a
mean over the steps that both planned; steps with a micro-batch of several samples over the cap;
steps that raised; milliseconds of one core, of all ranks together.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planning_cases import plan_locally
from verl_original import verl_original

from mcore_batching.integrations.slime import hook_schedule
from mcore_batching.planning import (
    MicroBatches,
    ParallelDims,
    PlannerConfig,
    Problem,
    StepPlan,
    predicted_step_time,
)
from mcore_batching.tools.lengths_file import read_lengths
from mcore_batching.tools.report import Table
from mcore_batching.tools.rules import karmarkar_karp, verl_work

Ranks = Sequence[MicroBatches]
Planner = Callable[[list[int], ParallelDims, int], Ranks]

LAYOUTS = {
    "DP8×PP1": ParallelDims(data_parallel=8),
    "DP8×PP4": ParallelDims(data_parallel=8, pipeline_parallel=4),
    "DP8×PP4×VPP2": ParallelDims(data_parallel=8, pipeline_parallel=4, virtual_pipeline=2),
}
SAMPLES = (512, 128, 24)


def slime_planner(source: str, *, ours: bool, by_flops: bool = False) -> Planner:
    """slime's ``build_dp_schedule``, its own or hooked."""
    if source not in sys.path:
        sys.path.insert(0, source)
    module = importlib.import_module("slime.utils.dp_schedule")

    def plan(lengths: list[int], dims: ParallelDims, cap: int) -> Ranks:
        args = SimpleNamespace(
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=cap,
            balance_data=True,
            balance_by_flops=by_flops,
            pipeline_model_parallel_size=dims.pipeline_parallel,
            # For slime's estimate of work: a dense model of 7B.
            hidden_size=4096,
            num_attention_heads=32,
            num_query_groups=32,
            kv_channels=128,
            vocab_size=32000,
            ffn_hidden_size=11008,
            num_experts=None,
            num_layers=32,
        )
        config = {
            "dp_size": dims.data_parallel,
            "cp_size": 1,
            "vpp_size": dims.virtual_pipeline,
            "microbatch_group_size_per_vp_stage": dims.group_size,
        }
        partitions, slots, _, _ = module.build_dp_schedule(
            args,
            config,
            lengths,
            global_batch_size=len(lengths),
            rollout_indices=list(range(len(lengths))),
        )
        return [
            tuple(tuple(part[i] for i in samples) for samples in rank)
            for part, rank in zip(partitions, slots, strict=True)
        ]

    def hooked(lengths: list[int], dims: ParallelDims, cap: int) -> Ranks:
        with contextlib.redirect_stdout(io.StringIO()):
            hook = hook_schedule()
        assert hook is not None
        with hook:
            return plan(lengths, dims, cap)

    return hooked if ours else plan


def verl_planner(source: str) -> Planner:
    """verl's ``rearrange_micro_batches`` on every rank."""
    original = verl_original(Path(source))

    def plan(lengths: list[int], dims: ParallelDims, cap: int) -> Ranks:
        ranks = original(Problem.of(lengths, dims, PlannerConfig(max_tokens_per_gpu=cap)))
        return [tuple(map(tuple, rank)) for rank in ranks]

    return plan


def on_verls_ranks(lengths: list[int], dims: ParallelDims, cap: int) -> Ranks:
    """This package's micro-batches of the samples that verl deals to each rank."""
    work = [verl_work(length) for length in lengths]
    shards = karmarkar_karp(work, dims.data_parallel, equal_count=True)
    owners = [0] * len(lengths)
    for rank, shard in enumerate(shards):
        for sample in shard:
            owners[sample] = rank
    config = PlannerConfig(max_tokens_per_gpu=cap)
    return plan_locally(lengths, dims, config, owners).micro_batches


def skyrl_planner(source: str) -> Planner:
    """SkyRL's packer on every rank, and its padding micro-batches, always last."""
    path = Path(source) / "skyrl/train/dataset/bin_packing.py"
    spec = importlib.util.spec_from_file_location("skyrl_packing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["skyrl_packing"] = module
    spec.loader.exec_module(module)

    def plan(lengths: list[int], dims: ParallelDims, cap: int) -> Ranks:
        owners = skyrl_owners(lengths, dims)
        ranks = []
        for rank in range(dims.data_parallel):
            own = [sample for sample, owner in enumerate(owners) if owner == rank]
            packed = module.make_seq_packer("balanced", bin_capacity=cap).pack(
                [lengths[sample] for sample in own]
            )
            ranks.append([tuple(own[place] for place in places) for places in packed])
        most = max(map(len, ranks))
        if dims.virtual_pipeline > 1 and most % dims.group_size:
            raise ValueError("Megatron's interleaved schedule cannot run this count")
        return [(*rank, *[()] * (most - len(rank))) for rank in ranks]

    return plan


def skyrl_owners(lengths: list[int], dims: ParallelDims) -> list[int]:
    """Rank of each sample: SkyRL deals consecutive ones."""
    return [sample * dims.data_parallel // len(lengths) for sample in range(len(lengths))]


def on_skyrls_ranks(lengths: list[int], dims: ParallelDims, cap: int) -> Ranks:
    """This package's micro-batches of the samples that SkyRL deals to each rank."""
    config = PlannerConfig(max_tokens_per_gpu=cap)
    return plan_locally(lengths, dims, config, skyrl_owners(lengths, dims)).micro_batches


def end_of(ranks: Ranks, lengths: list[int], dims: ParallelDims, cap: int) -> float:
    """Predicted end of the step."""
    step = StepPlan(
        micro_batches=tuple(ranks),
        num_microbatches=len(ranks[0]),
        sample_indices=tuple(range(len(lengths))),
        dims=dims,
        config=PlannerConfig(max_tokens_per_gpu=cap),
    )
    return predicted_step_time(step, lengths)


def compare(steps: list[list[int]], dims: ParallelDims, cap: int, both: Sequence[Planner]) -> Any:
    """Both planners on the same steps."""
    over, refused = [0, 0], [0, 0]
    taken: list[list[float]] = [[], []]
    ratios: list[float] = []
    for lengths in steps:
        ends: list[float | None] = []
        for place, planner in enumerate(both):
            started = time.process_time()
            try:
                ranks = planner(lengths, dims, cap)
            except (AssertionError, ValueError, RuntimeError):
                refused[place] += 1
                ends.append(None)
                continue
            taken[place].append(1000 * (time.process_time() - started))
            sums = [
                sum(lengths[i] for i in samples)
                for rank in ranks
                for samples in rank
                if len(samples) > 1
            ]
            over[place] += any(total > cap for total in sums)
            ends.append(end_of(ranks, lengths, dims, cap))
        theirs, ours = ends
        if theirs is not None and ours is not None:
            ratios.append(theirs / ours)
    return {
        "time_over_ours": _mean(ratios),
        "over_cap": over,
        "refused": refused,
        "steps": len(steps),
        "milliseconds": [_mean(each) for each in taken],
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def row_of(record: dict[str, Any]) -> tuple[str, ...]:
    def shown(value: float | None, text: str) -> str:
        return "-" if value is None else text.format(value)

    return (
        record["framework"],
        record["case"],
        shown(record["time_over_ours"], "{:.2f}"),
        *(f"{each}/{record['steps']}" for each in (*record["over_cap"], *record["refused"])),
        *(shown(each, "{:.0f} ms") for each in record["milliseconds"]),
    )


COLUMNS = (
    *("framework", "case", "time/ours", "over cap", "ours", "refused", "ours", "planning", "ours"),
)


def main() -> int:
    """Plan every case by every framework given, with its own functions and with ours."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("lengths", nargs="+", type=Path)
    parser.add_argument("--slime", help="a checkout of slime")
    parser.add_argument("--verl", action="append", default=[], help="a folder with verl")
    parser.add_argument("--skyrl", help="a checkout of SkyRL")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the records here")
    options = parser.parse_args()
    frameworks: dict[str, tuple[Planner, Planner]] = {}
    if options.slime:
        hooked = slime_planner(options.slime, ours=True)
        frameworks["slime"] = (slime_planner(options.slime, ours=False), hooked)
        by_flops = slime_planner(options.slime, ours=False, by_flops=True)
        frameworks["slime --balance-by-flops"] = (by_flops, hooked)
    for source in options.verl:
        frameworks[f"verl in {Path(source).name}"] = (verl_planner(source), on_verls_ranks)
    if options.skyrl:
        frameworks["SkyRL"] = (skyrl_planner(options.skyrl), on_skyrls_ranks)
    records = []
    for path in options.lengths:
        whole = read_lengths(str(path))
        cap = 16384 if max(whole) <= 16384 else 131072
        for layout, dims in LAYOUTS.items():
            for samples in SAMPLES:
                steps = [random.Random(i).sample(whole, samples) for i in range(options.steps)]
                for framework, both in frameworks.items():
                    record = compare(steps, dims, cap, both)
                    case = f"{path.stem.partition('_')[0]}, {samples}, {layout}"
                    records.append({"framework": framework, "case": case, **record})
    print(Table(columns=COLUMNS, rows=tuple(map(row_of, records))))
    if options.json:
        options.json.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
