"""Packing rules of other frameworks, written from their description, to compare plans with.

A rule's plan covers every sample once, with equally many micro-batches on all ranks. It may break
the cap, which `validate_plan` reports. Where the framework would crash, `rule_plan` raises
`RuleFailureError` and makes no plan up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    Problem,
    StepPlan,
)
from mcore_batching.tools.rules import areal, in_order, megatron_dynamic, nemo_rl, slime, verl
from mcore_batching.tools.rules.packing_input import (
    PackingFunction,
    PackingInput,
    RuleFailureError,
)

__all__ = ["RULES", "Rule", "RuleFailureError", "megatron_dynamic_plan", "rule_plan"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A framework's packing rule."""

    name: str
    """Framework, and which of its rules."""
    pack: PackingFunction
    """From one step to the micro-batches of each rank."""
    keeps_cap: bool
    """No micro-batch of several samples exceeds the cap."""


RULES: tuple[Rule, ...] = (
    Rule(name="first-fit in order", pack=in_order.first_fit_in_order, keeps_cap=True),
    Rule(name="slime (PR 1860)", pack=slime.first_fit_then_parted, keeps_cap=False),
    Rule(name="slime (pack first)", pack=slime.packed_then_dealt, keeps_cap=True),
    Rule(name="verl (tokens)", pack=verl.by_tokens, keeps_cap=False),
    Rule(name="verl (cost)", pack=verl.by_cost, keeps_cap=False),
    Rule(name="verl 0.9", pack=verl.by_cost_under_cap, keeps_cap=True),
    Rule(name="NeMo-RL", pack=nemo_rl.modified_first_fit_decreasing, keeps_cap=True),
    Rule(name="AReaL (dealt)", pack=areal.dealt, keeps_cap=True),
    Rule(name="AReaL (balanced)", pack=areal.balanced, keeps_cap=True),
    Rule(name="Megatron dp_balanced", pack=in_order.next_fit, keeps_cap=True),
    Rule(name="TRL best-fit", pack=in_order.best_fit_decreasing, keeps_cap=True),
)
"""All rules, in the order in which tables list them."""


def rule_plan(
    rule: Rule,
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
) -> StepPlan:
    """One step as another framework's rule plans it.

    Args:
        rule: one of `RULES`.
        lengths: total length of each sample [samples], in tokens.
        dims: sizes of the parallel groups.
        config: gives cap and padding; the rule has policies of its own.
        cost_model: what the plan is weighed by afterwards; the default one if None.

    Raises:
        RuleFailureError: the framework crashes on this input, or the rule's count of micro-batches
            is not one that the interleaved schedule can run.
        LengthError: a length is out of range.
        ConfigError: the cap leaves no room for a single token.
    """
    own_bin = dataclasses.replace(config, on_oversize="own-bin")
    problem = Problem.of(lengths, dims, own_bin, cost_model)
    if not problem.num_samples:
        raise RuleFailureError("no rule plans a step without samples; pass one or more")
    ranks = rule.pack(
        PackingInput(
            sizes=tuple(problem.tokens),
            lengths=problem.lengths,
            capacity=problem.capacity,
            ranks=dims.data_parallel,
            stages=dims.pipeline_parallel,
            group=dims.group_size if dims.virtual_pipeline > 1 else None,
        )
    )
    count = len(ranks[0])
    if not dims.is_legal_num_microbatches(count):
        raise RuleFailureError(
            f"the interleaved schedule with groups of {dims.group_size} cannot run {count} "
            f"micro-batches per rank; the next count that it can is "
            f"{dims.round_up_num_microbatches(count)}"
        )
    return StepPlan(
        micro_batches=tuple(tuple(tuple(samples) for samples in rank) for rank in ranks),
        num_microbatches=count,
        sample_indices=tuple(range(problem.num_samples)),
        dims=dims,
        config=config,
        cost_model=problem.cost_model,
    )


def megatron_dynamic_plan(
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
) -> StepPlan:
    """One step as Megatron's rule for dynamic CP plans it, in blocks that begin at a multiple of
    their size: a slot's larger groups come before its smaller ones.

    Args:
        lengths: total length of each sample [samples], in tokens; each counts as one at least.
        dims: sizes of the parallel groups.
        config: under dynamic CP; gives the cap. The rule knows no largest size.
        cost_model: what the plan is weighed by afterwards; the default one if None.

    Raises:
        RuleFailureError: the rule raises on this input, there are no samples, or slots would have
            to be split for the interleaved schedule, which is not written here.
    """
    ranks = dims.data_context_parallel
    if not lengths:
        raise RuleFailureError("no rule plans a step without samples; pass one or more")
    slots = megatron_dynamic.dynamic_slots(
        [max(1, length) for length in lengths], ranks, config.max_tokens_per_gpu
    )
    if not dims.is_legal_num_microbatches(len(slots)):
        raise RuleFailureError(
            f"the interleaved schedule with groups of {dims.group_size} cannot run {len(slots)} "
            "micro-batches per rank, and the rule's way to split some is not written here"
        )
    rows: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    sizes: list[list[int]] = [[] for _ in range(ranks)]
    for groups in slots:
        rank = 0
        for size, samples in sorted(groups, key=lambda group: -group[0]):
            for each in range(rank, rank + size):
                rows[each].append(tuple(sorted(samples)))
                sizes[each].append(size)
            rank += size
    return StepPlan(
        micro_batches=tuple(map(tuple, rows)),
        num_microbatches=len(slots),
        sample_indices=tuple(range(len(lengths))),
        dims=dims,
        config=dataclasses.replace(config, max_context_parallel=ranks),
        context_parallel=tuple(map(tuple, sizes)),
        cost_model=cost_model or CostModel(),
    )
