"""Advantages of every response token of a batch, one sequence or one sample a turn.

    trajectory_ids  [7, 7, 8]    uids  [a, a, a]    rewards  [0, 1, 0]
    loss_masks  [[1], [1, 0], [1]]
    compute_advantages(batch, "dr_grpo", step_wise=True)    [[0.5], [0.5, 0.0], [-0.5]]

With `step_wise`, a sample is one turn. The outcome of a trajectory is compared with those of its
group, and the advantage goes to all of its turns, to each through that turn's own mask.

Guarantees
- Every trajectory counts once in its group, whatever its number of turns; padding samples never.
- No turn is lost: early turns have the advantage of their trajectory's outcome.
- Estimators that pass from token to token are refused where the tokens of a trajectory are spread
  over samples.
- Normalisation is by optimizer step, over its unmasked tokens of all ranks. The same collectives
  run on every rank; what is wrong on one is an error on all.
- A group that is split over the ranks of ``group`` is an error on all, naming it and them.
- Where the mask is 0 the advantage is 0.0.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_batching.batch.checks import read_lengths
from mcore_batching.batch.errors import BatchError, SchemaError
from mcore_batching.batch.select import step_batches
from mcore_batching.rl.group_locality import (
    gather_notes,
    groups_held,
    raise_together,
    require_local,
)
from mcore_batching.rl.masked import masked_zscore
from mcore_batching.rl.metrics import real_indices
from mcore_batching.rl.outcome import OUTCOME_ESTIMATORS, outcome_advantages
from mcore_batching.rl.temporal import (
    discounted_returns,
    generalized_advantages,
    last_token_rewards,
)
from mcore_batching.rl.trajectories import Outcome, outcome_of, trajectories_of, values_of

TEMPORAL_ESTIMATORS = ("gae", "reinforce_plus_plus")
"""Estimators in which a token's advantage depends on the tokens after it."""

_NORMALIZED = ("reinforce_baseline", *TEMPORAL_ESTIMATORS)


def compute_advantages(
    batch: Mapping[str, Any],
    estimator: str = "grpo",
    *,
    step_wise: bool = False,
    outcome: Outcome = "last",
    steps: Sequence[Sequence[int]] | None = None,
    normalize: bool | None = None,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """The advantage of every response token.

    A collective over ``group``.

    Args:
        batch: field name to one value a sample: ``response_lengths``, ``rewards``, ``uids``,
            ``loss_masks`` (all ones if absent), ``is_padding`` (none if absent), ``values`` for
            "gae", ``trajectory_ids`` with ``step_wise``. Every group is whole on this rank; that
            is checked where ``group`` is given and an outcome estimator compares rewards.
        estimator: one of `OUTCOME_ESTIMATORS` or `TEMPORAL_ESTIMATORS`.
        step_wise: a sample is one turn; those with the same ``trajectory_ids`` entry within a group
            are one trajectory.
        outcome: the reward of a trajectory: that of its "last" turn (by ``round_number`` where the
            batch has it, else the last in the batch), or the "sum" over its turns.
        steps: sample indices of each optimizer step, as from `group_steps`; one step of all if
            None. As many on every rank. What is in no step is not normalised.
        normalize: to mean 0 and variance 1 over the unmasked tokens of each step; None leaves it
            to the estimator: "reinforce_baseline" and temporal ones are, the others not.
        gamma: discount an action, for temporal estimators.
        gae_lambda: as in `generalized_advantages`.
        group: the data-parallel ranks, each with samples of its own; None for this process alone.

    Returns:
        float32 ``[response_length]`` for each sample.

    Raises:
        BatchError: on every rank, if on any: an unknown estimator, a temporal one with
            ``step_wise``, several samples of a trajectory without it, a reward that is not finite,
            a field that is absent or does not fit, or arguments that differ between ranks.
        SplitGroupError: on every rank: samples of a group are on several of them.
    """
    normalize = estimator in _NORMALIZED if normalize is None else normalize
    held: list[Hashable] = []
    fault: Exception | None = None
    masks: list[Tensor] = []
    advantages: list[Tensor] = []
    try:
        masks = _masks(batch)
        _require_known(estimator)
        if estimator in TEMPORAL_ESTIMATORS:
            _refuse_step_wise(estimator, step_wise)
            advantages = _temporal(batch, estimator, masks, gamma, gae_lambda)
        else:
            advantages = _broadcast(batch, estimator, masks, step_wise, outcome)
            held = groups_held(batch) if group is not None else []
        steps = [range(len(masks))] if steps is None else steps
        parts = step_batches({"masks": masks, "advantages": advantages}, steps)
    except Exception as error:
        # Whatever it is: the other ranks must learn of it.
        fault, parts = error, []
    settings = {"number of steps": len(parts), "estimator": estimator, "normalize": normalize}
    _agree(settings, held, fault, group)
    if not normalize:
        return advantages
    for step, part in zip(steps or [], parts, strict=True):
        scores = masked_zscore(part["advantages"], part["masks"], group=group)
        for index, score in zip(step, scores, strict=True):
            advantages[index] = score
    return advantages


def _agree(
    settings: Mapping[str, object],
    held: Sequence[Hashable],
    fault: Exception | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Raise on all ranks what is wrong on one, before a collective that it would not join."""
    if group is None:
        if fault is not None:
            raise fault
        return
    notes = gather_notes((settings, held, None if fault is None else str(fault)), group)
    raise_together(fault, {rank: text for rank, (_, _, text) in notes.items()})
    first = next(iter(notes))
    for rank, (theirs, _, _) in notes.items():
        for name, value in notes[first][0].items():
            if theirs[name] != value:
                raise BatchError(
                    f"expected the same {name} on every rank of the group, got {value!r} on rank "
                    f"{first} and {theirs[name]!r} on rank {rank}; pass the same arguments "
                    "everywhere, with a step that is empty where a rank has no sample of it"
                )
    require_local({rank: held for rank, (_, held, _) in notes.items()})


def _masks(batch: Mapping[str, Any]) -> list[Tensor]:
    """bool ``[response_length]`` for each sample, False throughout for a padding sample."""
    _, responses = read_lengths(batch)
    given = batch.get("loss_masks")
    if given is not None and len(given) != len(responses):
        raise SchemaError(
            "loss_masks", expected=f"{len(responses)} values", found=f"{len(given)} values"
        )
    real = set(real_indices(batch))
    masks = []
    for index, length in enumerate(responses):
        mask = torch.ones(length) if given is None else torch.as_tensor(given[index])
        if mask.shape != (length,):
            raise SchemaError(
                "loss_masks",
                sample_index=index,
                expected=f"shape [{length}], one number a response token",
                found=f"shape {list(mask.shape)}",
            )
        masks.append((mask != 0) if index in real else torch.zeros_like(mask, dtype=torch.bool))
    return masks


def _broadcast(
    batch: Mapping[str, Any],
    estimator: str,
    masks: Sequence[Tensor],
    step_wise: bool,
    outcome: Outcome,
) -> list[Tensor]:
    uids, rewards = values_of(batch, "uids"), values_of(batch, "rewards")
    trajectories = trajectories_of(batch, uids, step_wise)
    found = outcome_advantages(
        [outcome_of(batch, rewards, turns, outcome) for turns in trajectories],
        [uids[turns[0]] for turns in trajectories],
        estimator=estimator,
        lengths=[sum(int(masks[turn].sum()) for turn in turns) for turns in trajectories],
    )
    of_sample = [0.0] * len(masks)
    for turns, advantage in zip(trajectories, found, strict=True):
        for turn in turns:
            of_sample[turn] = advantage
    return [mask.float() * advantage for mask, advantage in zip(masks, of_sample, strict=True)]


def _temporal(
    batch: Mapping[str, Any],
    estimator: str,
    masks: Sequence[Tensor],
    gamma: float,
    gae_lambda: float,
) -> list[Tensor]:
    rewards = values_of(batch, "rewards")
    # Refuses several samples of a trajectory.
    uids = [0] * len(masks) if batch.get("uids") is None else values_of(batch, "uids")
    trajectories_of(batch, uids, step_wise=False)
    token_rewards = last_token_rewards(rewards, masks)
    if estimator == "gae":
        values = [
            torch.as_tensor(value).to(token_rewards[i])
            for i, value in enumerate(values_of(batch, "values"))
        ]
        advantages, _ = generalized_advantages(
            token_rewards, values, masks, gamma=gamma, gae_lambda=gae_lambda
        )
        return advantages
    return discounted_returns(token_rewards, masks, gamma=gamma)


def _require_known(estimator: str) -> None:
    known = (*OUTCOME_ESTIMATORS, *TEMPORAL_ESTIMATORS)
    if estimator not in known:
        raise BatchError(
            f"unknown estimator {estimator!r}; set estimator to one of {', '.join(known)}"
        )


def _refuse_step_wise(estimator: str, step_wise: bool) -> None:
    if step_wise:
        raise BatchError(
            f"estimator={estimator!r} passes advantages from token to token, but with "
            "step_wise=True the tokens of a trajectory are spread over samples: each turn would "
            "end as if the trajectory did, and its tokens would never see later rewards. Set "
            f"estimator to one of {', '.join(OUTCOME_ESTIMATORS)}, or keep a trajectory in one "
            "sample"
        )
