"""Games as tokens while they are played, and as samples afterwards.

    tokens      ^ 7 + 1 = | 8 ⏎ | - 1 = | 7 ⏎        ^ is the begin mark
    whole       prompt ^7+1=    response 8⏎-1=7⏎    mask 1 1 0 0 0 1 1
    step-wise   prompt ^7+1=    response 8⏎         mask 1 1
                prompt ^7+1=8⏎-1=    response 7⏎    mask 1 1

Samples hold the tokens that were drawn; nothing is decoded and encoded again. Step-wise or whole,
the tokens that are trained are the same, each behind the same history; the program's never are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from byte_tokens import BEGIN, text_of
from number_chain import MAX_ROUNDS, NumberChain, new_game, scripted_answers

LINE_END = ord("\n")
MAX_TURN_TOKENS = 3
"""A turn without a line end is over, and lost, after so many tokens."""
MAX_TOKENS = 1 + len("0+1=") + MAX_ROUNDS * (MAX_TURN_TOKENS + len("+1="))
"""No trajectory is longer."""


@dataclasses.dataclass
class Trajectory:
    """One game, over or not.

    Attributes:
        uid: names the game, and with it the group of trajectories that play it.
        number: which of the group.
        game: the game.
        tokens: all so far, the program's and the player's.
        turns: where in `tokens` the player's finished turns stand.
        log_probs: of each of the player's tokens, as it was drawn.
        is_over: the game has ended.
    """

    uid: str
    number: int
    game: NumberChain
    tokens: list[int]
    turns: list[range] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    is_over: bool = False
    _answers: list[str] = dataclasses.field(default_factory=list)
    _turn_length: int = 0

    @classmethod
    def begin(cls, uid: str, number: int) -> Trajectory:
        """The game of the name ``uid``, with the player to move."""
        game = new_game(uid)
        return cls(uid, number, game, [BEGIN, *game.opening().encode()])

    @property
    def reward(self) -> float:
        """Share of the game's rounds won so far."""
        return self.game.reward(self._answers)

    @property
    def drawn(self) -> str:
        """Names the token that the player draws next; no two tokens of a job share a name."""
        return f"{self.uid}/{self.number}/{len(self.tokens)}"

    def play(self, token: int, log_prob: float) -> None:
        """Append a token of the player, and the program's reply if the turn is over.

        Args:
            token: that was drawn.
            log_prob: of that token.

        Raises:
            ValueError: the game is over.
        """
        if self.is_over:
            raise ValueError(f"game {self.uid} is over; play only games with is_over False")
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self._turn_length += 1
        if token != LINE_END and self._turn_length < MAX_TURN_TOKENS:
            return
        turn = range(len(self.tokens) - self._turn_length, len(self.tokens))
        self.turns.append(turn)
        self._turn_length = 0
        self._answers.append(text_of(self.tokens[turn.start :]))
        reply = self.game.reply(self._answers)
        self.is_over = reply is None
        self.tokens += (reply or "").encode()


def scripted_trajectory(uid: str, number: int, slip: float) -> Trajectory:
    """A whole game of the scripted player (see `scripted_answers`)."""
    trajectory = Trajectory.begin(uid, number)
    for answer in scripted_answers(trajectory.game, f"{uid}/{number}", slip):
        for token in answer.encode():
            trajectory.play(token, 0.0)
    return trajectory


def samples_of(trajectories: Sequence[Trajectory], *, step_wise: bool) -> dict[str, list[Any]]:
    """The fields of finished games' samples, one value per sample; empty lists for no games.

    Args:
        trajectories: of this rank.
        step_wise: a sample is one turn behind its history, not a whole game behind its opening.

    Returns:
        ``tokens``, ``total_lengths``, ``response_lengths``, ``loss_masks``, ``rewards`` (of the
        trajectory), ``rollout_log_probs`` (0 where the program wrote), ``uids``,
        ``trajectory_ids``, ``round_number``.
    """
    rows = [
        row
        for trajectory in trajectories
        for row in (_turns(trajectory) if step_wise else [_whole(trajectory)])
    ]
    return {name: [row[name] for row in rows] for name in _FIELDS}


_FIELDS = (
    "tokens",
    "total_lengths",
    "response_lengths",
    "loss_masks",
    "rewards",
    "rollout_log_probs",
    "uids",
    "trajectory_ids",
    "round_number",
)


def _turns(trajectory: Trajectory) -> list[dict[str, Any]]:
    return [
        _sample(trajectory, turn.start, turn.stop, index)
        for index, turn in enumerate(trajectory.turns)
    ]


def _whole(trajectory: Trajectory) -> dict[str, Any]:
    return _sample(trajectory, trajectory.turns[0].start, trajectory.turns[-1].stop, 0)


def _sample(trajectory: Trajectory, start: int, end: int, index: int) -> dict[str, Any]:
    """The response ``tokens[start:end]`` and what comes before it."""
    mask = torch.zeros(end)
    log_probs = torch.zeros(end)
    players = [position for turn in trajectory.turns for position in turn]
    for position, log_prob in zip(players, trajectory.log_probs, strict=True):
        if position < end:
            mask[position] = 1.0
            log_probs[position] = log_prob
    return {
        "tokens": torch.tensor(trajectory.tokens[:end]),
        "total_lengths": end,
        "response_lengths": end - start,
        "loss_masks": mask[start:],
        "rewards": trajectory.reward,
        "rollout_log_probs": log_probs[start:],
        "uids": trajectory.uid,
        "trajectory_ids": trajectory.number,
        "round_number": index,
    }
