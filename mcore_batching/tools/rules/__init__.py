"""The packing rules of other frameworks, written from their description, to compare plans with.

Guarantees: a peer's plan covers every sample once and has the same count on all ranks; whether it
keeps the cap is its own affair (`StepPlan.validate` tells); where the peer would crash, a
`PeerFailureError` says why, and no plan is made up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_batching.planning.checks import check_lengths
from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.cost import CostModel
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.plan import StepPlan
from mcore_batching.planning.tokens import padded_sample_tokens, row_capacity_tokens
from mcore_batching.tools.rules import areal, in_order, nemo_rl, slime, verl
from mcore_batching.tools.rules.problem import PeerFailureError, Problem, Rule

__all__ = ["PEERS", "Peer", "PeerFailureError", "peer_plan"]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A framework's rule."""

    name: str
    """Framework, and which of its rules."""
    rule: Rule
    """The rule."""
    keeps_cap: bool
    """Whether it never puts more into a micro-batch than the cap, oversize samples apart."""


PEERS: tuple[Peer, ...] = (
    Peer(name="first-fit in order", rule=in_order.first_fit_in_order, keeps_cap=True),
    Peer(name="slime (PR 1860)", rule=slime.first_fit_then_parted, keeps_cap=False),
    Peer(name="slime (pack first)", rule=slime.packed_then_dealt, keeps_cap=True),
    Peer(name="verl (tokens)", rule=verl.by_tokens, keeps_cap=False),
    Peer(name="verl (cost)", rule=verl.by_cost, keeps_cap=False),
    Peer(name="verl 0.9", rule=verl.by_cost_under_cap, keeps_cap=True),
    Peer(name="NeMo-RL", rule=nemo_rl.modified_first_fit_decreasing, keeps_cap=True),
    Peer(name="AReaL (dealt)", rule=areal.dealt, keeps_cap=True),
    Peer(name="AReaL (balanced)", rule=areal.balanced, keeps_cap=True),
    Peer(name="Megatron dp_balanced", rule=in_order.next_fit, keeps_cap=True),
    Peer(name="TRL best-fit", rule=in_order.best_fit_decreasing, keeps_cap=True),
)
"""All rules that there are."""


def peer_plan(
    peer: Peer,
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
) -> StepPlan:
    """One step as a peer plans it.

    Args:
        peer: whose rule.
        lengths: total length of each sample [samples], in tokens.
        dims: sizes of the parallel groups.
        config: cap and padding; the peer has policies of its own.
        cost_model: what the plan is weighed by afterwards; the default one if None.

    Raises:
        PeerFailureError: the peer crashes on this input, or its count is none that the layout's
            schedule runs.
        LengthError: a length is out of range.
        ConfigError: the cap leaves no room for a single token.
    """
    lengths = check_lengths(lengths)
    if not lengths:
        raise PeerFailureError("none of the peers plans a step without samples; pass one or more")
    problem = Problem(
        sizes=tuple(padded_sample_tokens(length, dims, config) for length in lengths),
        lengths=tuple(lengths),
        capacity=row_capacity_tokens(dims, config),
        ranks=dims.data_parallel,
        stages=dims.pipeline_parallel,
        group=dims.group_size if dims.virtual_pipeline > 1 else None,
    )
    ranks = peer.rule(problem)
    count = len(ranks[0])
    if not dims.is_legal_num_microbatches(count):
        raise PeerFailureError(
            f"{count} micro-batches a rank cannot be run by the interleaved schedule with groups "
            f"of {dims.group_size}; the next count that can is "
            f"{dims.round_up_num_microbatches(count)}"
        )
    return StepPlan(
        micro_batches=tuple(tuple(tuple(samples) for samples in rank) for rank in ranks),
        num_microbatches=count,
        sample_indices=tuple(range(len(lengths))),
        dims=dims,
        config=config,
        cost_model=cost_model or CostModel(),
    )
