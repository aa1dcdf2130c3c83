"""Multi-token prediction of packed rows.

At depth k a position predicts the token k places after the next one. Megatron rolls a row's ids,
labels and masks by one place for each depth, between context-parallel ranks by messages, and
divides each row's loss by that row's tokens, whatever the step's. Here rows are laid out for every
depth when they are packed (`PackedMicroBatch.later`), and a loss is a share of the mean over the
tokens of the whole step that are trained at that depth:

    loss + scaling factor / depths * (sum over rows of shares at depth 1 + at depth 2 + ...)

Forward passes alone leave these layers out.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from mcore_batching.batch import PackedMicroBatch
from mcore_batching.megatron import compat
from mcore_batching.megatron.log_probs import log_probs_of_all
from mcore_batching.megatron.logits import whole_hidden
from mcore_batching.megatron.topology import prediction_depths


@dataclasses.dataclass(eq=False)
class LaterLosses:
    """The losses of one row at all depths, made where Megatron would make its own."""

    row: PackedMicroBatch
    token_weights: Sequence[float]  # of the step, by depth from 0 on
    undo: float  # the number that Megatron will divide these losses by
    is_fused: bool = False  # the output layer hands its input on, as for `FusedLogits`
    counts_hits: bool = False  # of tokens that were guessed, for Megatron's log from 0.19 on
    # Shares of the step's mean at each depth, without a gradient; none on other chunks.
    shares: list[Tensor] = dataclasses.field(default_factory=list)
    # At each depth how many trained tokens were guessed, and how many there are.
    hits: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)

    def named_shares(self) -> dict[str, Tensor]:
        """`shares` by Megatron's names for them."""
        return {f"mtp_{depth} loss": share for depth, share in enumerate(self.shares, 1)}

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        output_layer: Any,
        output_weight: Tensor | None,
        runtime_gather_output: bool | None,
        compute_language_model_loss: Callable[[Tensor, Tensor], Tensor],
        config: Any,
        scale_logits_fn: Callable[[Tensor], Tensor] | None = None,
        tp_group: Any = None,
        **unused: Any,
    ) -> Tensor:
        """Megatron's ``process_mtp_loss``: the next token's hidden states, losses attached."""
        made, *deeper = torch.chunk(hidden_states, 1 + len(self.row.later))
        weight, gathers = output_weight, runtime_gather_output
        if getattr(config, "mtp_detach_heads", False):
            weight = (output_layer.weight if weight is None else weight).detach()
        factor = config.mtp_loss_scaling_factor / len(deeper) * self.undo
        for depth, (hidden, later) in enumerate(zip(deeper, self.row.later, strict=True), 1):
            if self.is_fused:
                is_cut = output_layer.sequence_parallel
                whole = whole_hidden(hidden.transpose(0, 1), sequence_parallel=is_cut)
                by = output_layer.weight if weight is None else weight
                losses = -log_probs_of_all(whole, by, later.labels)
            else:
                logits, _ = output_layer(hidden, weight=weight, runtime_gather_output=gathers)
                if scale_logits_fn is not None:
                    logits = scale_logits_fn(logits)
                if self.counts_hits:
                    targets = later.labels, later.loss_mask, output_layer
                    self.hits.append(compat.multi_token_hits(logits, *targets, gathers, tp_group))
                losses = compute_language_model_loss(later.labels, logits)
            # torch.where, since 0 · inf is NaN.
            losses = torch.where(later.loss_mask != 0, losses, 0.0) * later.loss_mask
            losses = losses / (self.token_weights[depth] or 1.0)
            self.shares.append(losses.detach().sum())
            made = multi_token_prediction.MTPLossAutoScaler.apply(made, factor * losses)
        return made


@dataclasses.dataclass(eq=False)
class LossesOfRows:
    """The `LaterLosses` of a step's rows, for the log of a stock script."""

    token_weights: Sequence[float]
    undo: float
    _made: list[LaterLosses] = dataclasses.field(default_factory=list)

    def of(self, row: PackedMicroBatch) -> LaterLosses | None:
        """Those of a row; None if it is not trained."""
        if not row.later:
            return None
        self._made.append(LaterLosses(row, self.token_weights, self.undo, counts_hits=True))
        return self._made[-1]

    def log(self, num_microbatches: int) -> None:
        """Hand Megatron's log the sums over this rank's rows, which it divides by this number."""
        # None of chunks without these layers.
        by_depth = list(zip(*(each.shares for each in self._made if each.shares), strict=True))
        hits = list(zip(*(each.hits for each in self._made if each.hits), strict=True))
        for depth, shares in enumerate(by_depth):
            guessed, trained = (torch.stack(each).sum() for each in zip(*hits[depth], strict=True))
            share = torch.stack(shares).sum() * num_microbatches
            compat.log_multi_token_loss(share, guessed, trained, depth, len(by_depth))


def predict_later_tokens(
    params: Any, config: Any, row: PackedMicroBatch, losses: LaterLosses | None
) -> None:
    """Set on a row's packed-sequence parameters what multi-token prediction is to do with it.

    Without ``losses`` these layers are left out.
    """
    if not prediction_depths(config):
        return
    _follow_parameters()
    params.later_losses = losses
    for before, after in itertools.pairwise((row, *row.later)):
        before.tokens.of_next_depth = after.tokens  # type: ignore[attr-defined]
        before.position_ids.of_next_depth = after.position_ids  # type: ignore[attr-defined]


@functools.cache
def _follow_parameters() -> None:
    """Let Megatron's multi-token prediction follow a row's parameters, where they are set."""
    roll = multi_token_prediction.roll_tensor
    block = multi_token_prediction.MultiTokenPredictionBlock
    forward = block.forward

    @functools.wraps(roll)
    def of_next_depth(tensor: Any, *rest: Any, packed_seq_params: Any = None, **named: Any) -> Any:
        if tensor is None or not hasattr(packed_seq_params, "later_losses"):
            return roll(tensor, *rest, packed_seq_params=packed_seq_params, **named)
        # Padding is padding at every depth: a mask that is rolled takes its last token for real.
        return (tensor if tensor.dtype == torch.bool else tensor.of_next_depth), None

    @functools.wraps(forward)
    def run(self: Any, *rest: Any, packed_seq_params: Any = None, **named: Any) -> Any:
        if getattr(packed_seq_params, "later_losses", self) is None:
            return named["hidden_states"]
        return forward(self, *rest, packed_seq_params=packed_seq_params, **named)

    multi_token_prediction.roll_tensor, block.forward = of_next_depth, run
    for module in compat.modules_with_multi_token_losses():
        module.process_mtp_loss = functools.partial(_with_losses, module.process_mtp_loss)


def _with_losses(
    process: Callable[..., Tensor],
    hidden_states: Tensor,
    *,
    packed_seq_params: Any = None,
    **named: Any,
) -> Tensor:
    """The row's own losses in place of Megatron's ``process``, where it has some."""
    if not hasattr(packed_seq_params, "later_losses"):
        return process(hidden_states, packed_seq_params=packed_seq_params, **named)
    losses = packed_seq_params.later_losses
    return hidden_states if losses is None else losses(hidden_states, **named)
