"""Metrics of an iteration, written to and read from ``metrics.jsonl``.

Sums over an iteration are over all ranks; seconds are rank 0's.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import TypeVar


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step.

    Attributes:
        loss: policy loss and weighted KL term, mean over trainable tokens of the step.
        policy_loss: the clipped policy loss alone.
        kl: estimate of the KL divergence to the reference policy, nats per token.
        clipped: share of trainable tokens whose ratio was clipped.
        entropy: of the distributions that trainable tokens are drawn from, nats per token.
        grad_norm: of all gradients, before clipping.
        learning_rate: of the update.
        num_microbatches: of each rank.
        seconds: forward, backward and update.
    """

    loss: float
    policy_loss: float
    kl: float
    clipped: float
    entropy: float
    grad_norm: float
    learning_rate: float
    num_microbatches: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class IterationMetrics:
    """One iteration: forward-only passes, then several optimizer steps.

    Attributes:
        iteration: from 0.
        samples: over all ranks.
        tokens: real tokens of all samples, those that share a segment of a row counted once.
        reward: mean over the samples.
        num_microbatches: of each rank, over the iteration's steps.
        placeholders: micro-batches without a sample, over all ranks.
        fill: real tokens over the room of all micro-batches (the cap times their number).
        padding: share of the padded tokens that is padding.
        rank_balance: cost of the heaviest rank over the mean, 1 at best.
        plan_seconds: planning, all ranks together.
        forward_only_seconds: old and reference log-probabilities.
        steps: in order.
    """

    iteration: int
    samples: int
    tokens: int
    reward: float
    num_microbatches: int
    placeholders: int
    fill: float
    padding: float
    rank_balance: float
    plan_seconds: float
    forward_only_seconds: float
    steps: tuple[StepMetrics, ...]

    def mean(self, name: str) -> float:
        """Mean over the iteration's steps of a `StepMetrics` attribute."""
        return statistics.fmean(getattr(step, name) for step in self.steps)

    @property
    def step_seconds(self) -> float:
        """All optimizer steps of the iteration."""
        return sum(step.seconds for step in self.steps)

    @property
    def seconds(self) -> float:
        """The whole iteration."""
        return self.plan_seconds + self.forward_only_seconds + self.step_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnlineMetrics(IterationMetrics):
    """One iteration in which the policy played, too; ``reward`` is the mean over its games.

    Attributes:
        games: over all ranks.
        games_won: without a wrong answer.
        turns: of all games.
        sampling_passes: forward passes in which tokens were drawn, one token an open game.
        sampling_placeholders: micro-batches of these passes without a game, over all ranks.
        sampling_seconds: all of them.
        log_prob_gap: largest difference between a token's log-probability as it was drawn and the
            old log-probability that training starts from; rounding, if all is well.
    """

    games: int
    games_won: int
    turns: int
    sampling_passes: int
    sampling_placeholders: int
    sampling_seconds: float
    log_prob_gap: float

    @property
    def seconds(self) -> float:
        """The whole iteration, play included."""
        return super().seconds + self.sampling_seconds


Metrics = TypeVar("Metrics", bound=IterationMetrics)


def append(path: Path, metrics: IterationMetrics) -> None:
    """Add one line to a metrics file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(metrics)) + "\n")


def read(path: Path, kind: type[Metrics]) -> list[Metrics]:
    """All iterations of a metrics file.

    Args:
        path: the file.
        kind: of the metrics that were written.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        kind(**row | {"steps": tuple(StepMetrics(**step) for step in row["steps"])}) for row in rows
    ]
