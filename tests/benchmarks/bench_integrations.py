"""Plans of the hooked frameworks, over this package's in their place.

    python tests/benchmarks/bench_integrations.py [--data ../shared/data] [--skyrl DIR]

slime plans all samples of a step, and so does this package there. verl and SkyRL deal samples to
ranks, where each plans its own by `planning/local.py`: verl by its balancing, SkyRL consecutive
ones. slime's and verl's rules are those that test_rules.py holds against the originals; SkyRL's
packer is read from DIR, a checkout. Figures are the predicted end under the framework's plan over
that under ours, means of the steps that both planned, and the steps that one of them refused.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_cases import PP1, PP4, VPP2, layout_name, mean, parser_of, traces
from other_rules import ALL_RULES
from planning_cases import plan_locally

from mcore_batching.planning import (
    MicroBatches,
    ParallelDims,
    PlannerConfig,
    PlanningError,
    StepPlan,
    plan_step,
    predicted_step_time,
)
from mcore_batching.tools.report import Table
from mcore_batching.tools.rules import karmarkar_karp, rule_plan, verl_work

PlanFunction = Callable[[list[int], ParallelDims, PlannerConfig], StepPlan]
Owners = Callable[[list[int], int], list[int]]
NAMES = ("azure_conv", "mooncake_conv")
SAMPLES = (512, 128)


def by_rule(name: str, lengths: list[int], dims: ParallelDims, config: PlannerConfig) -> StepPlan:
    return rule_plan(ALL_RULES[name], lengths, dims, config)


def on_their_ranks(
    owners: Owners, lengths: list[int], dims: ParallelDims, config: PlannerConfig
) -> StepPlan:
    """This package's micro-batches of the samples that a framework deals to each rank."""
    return plan_locally(lengths, dims, config, owners(lengths, dims.data_parallel))


def verl_owners(lengths: list[int], ranks: int) -> list[int]:
    """Rank of each sample by verl's balancing."""
    owners = [0] * len(lengths)
    shards = karmarkar_karp([verl_work(length) for length in lengths], ranks, equal_count=True)
    for rank, shard in enumerate(shards):
        for sample in shard:
            owners[sample] = rank
    return owners


def skyrl_owners(lengths: list[int], ranks: int) -> list[int]:
    """Rank of each sample: SkyRL deals consecutive ones."""
    return [sample * ranks // len(lengths) for sample in range(len(lengths))]


def skyrl_plan(source: str) -> PlanFunction:
    """SkyRL's packer on every rank, and its padding micro-batches, always last."""
    path = Path(source) / "skyrl/train/dataset/bin_packing.py"
    spec = importlib.util.spec_from_file_location("skyrl_packing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["skyrl_packing"] = module
    spec.loader.exec_module(module)

    def plan(lengths: list[int], dims: ParallelDims, config: PlannerConfig) -> StepPlan:
        ranks: list[MicroBatches] = []
        owners = skyrl_owners(lengths, dims.data_parallel)
        for rank in range(dims.data_parallel):
            own = [sample for sample, owner in enumerate(owners) if owner == rank]
            packer = module.make_seq_packer("balanced", bin_capacity=config.max_tokens_per_gpu)
            packed = packer.pack([lengths[sample] for sample in own])
            ranks.append(tuple(tuple(own[place] for place in places) for places in packed))
        most = max(map(len, ranks))
        if dims.round_up_num_microbatches(most) != most:
            raise PlanningError(f"Megatron's interleaved schedule cannot run {most} micro-batches")
        return StepPlan(
            micro_batches=tuple((*rank, *[()] * (most - len(rank))) for rank in ranks),
            num_microbatches=most,
            sample_indices=tuple(range(len(lengths))),
            dims=dims,
            config=config,
        )

    return plan


def cell(
    steps: Sequence[list[int]],
    dims: ParallelDims,
    config: PlannerConfig,
    theirs: PlanFunction,
    ours: PlanFunction,
) -> str:
    """Their time over ours, and how many steps they or we refused."""
    ratios = []
    for lengths in steps:
        try:
            ends = [predicted_step_time(f(lengths, dims, config), lengths) for f in (theirs, ours)]
        except PlanningError:
            continue
        ratios.append(ends[0] / ends[1])
    refused = len(steps) - len(ratios)
    return (f"{mean(ratios):.2f}" if ratios else "-") + (f", {refused} refused" if refused else "")


def main() -> None:
    """Plan every case by every framework, by its own rule and by ours."""
    parser = parser_of(__doc__)
    parser.add_argument("--skyrl", metavar="DIR", help="a checkout of SkyRL")
    parser.add_argument("--draws", type=int, default=5)
    options = parser.parse_args()
    pairs: dict[str, tuple[PlanFunction, PlanFunction]] = {
        "slime": (partial(by_rule, "slime"), plan_step),
        "verl": (partial(by_rule, "verl 0.9"), partial(on_their_ranks, verl_owners)),
    }
    if options.skyrl:
        pairs["SkyRL"] = (skyrl_plan(options.skyrl), partial(on_their_ranks, skyrl_owners))
    rows = []
    for name, source in traces(options.data).items():
        if name not in NAMES or options.only not in name:
            continue
        config = PlannerConfig(max_tokens_per_gpu=source.cap)
        for samples in SAMPLES:
            steps = [source.draw(samples, seed)[0] for seed in range(options.draws)]
            for dims in (PP1, PP4, VPP2):
                cells = [cell(steps, dims, config, *pair) for pair in pairs.values()]
                rows.append((f"{name}, {samples}, {layout_name(dims)}", *cells))
    print(Table(columns=("lengths, samples, layout", *pairs), rows=tuple(rows)))


if __name__ == "__main__":
    main()
