"""Jobs that compare log-probabilities and entropies of responses with plain float64 ones."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from kit.samples import make_samples, take
from mcore_batching.batch import DEFAULT_SCHEMA, PackedMicroBatch, owned_response_mask
from mcore_batching.batch.pack import pack
from mcore_batching.batch.row_layout import Row
from mcore_batching.megatron import (
    response_entropy,
    response_log_probs,
    response_log_probs_and_entropy,
)

VOCABULARY = 64


def compare(temperature: float, chunk_tokens: int, dtype: str) -> dict[str, float]:
    """Largest differences, relative to the largest entry of the reference.

    The loss weighs log-probabilities and entropies of all response tokens at random.
    """
    row = _row()
    whole = _whole_logits(row)
    logits = _own_part(whole, row).to(getattr(torch, dtype))
    if dtype != "float32":  # the reference is of the very numbers that are given
        whole = whole.to(getattr(torch, dtype)).double()
    expected, gradient = _reference(whole, row, temperature)
    options: dict[str, Any] = {"temperature": temperature, "chunk_tokens": chunk_tokens}

    leaf = logits.clone().requires_grad_()
    log_probs, entropy = response_log_probs_and_entropy(leaf * 1.0, row, **options)
    _loss(row, log_probs, entropy).backward()
    alone = logits.clone().requires_grad_()
    log_probs_alone = response_log_probs(alone * 1.0, row, **options)
    _loss(row, log_probs_alone, None).backward()
    assert leaf.grad is not None
    assert alone.grad is not None
    _, gradient_alone = _reference(whole, row, temperature, with_entropy=False)
    return {
        "log-probabilities": _difference(log_probs, expected[0]),
        "entropies": _difference(entropy, expected[1]),
        "gradient": _relative(leaf.grad, _own_part(gradient, row)),
        "log-probabilities alone": _difference(log_probs_alone, expected[0]),
        "gradient alone": _relative(alone.grad, _own_part(gradient_alone, row)),
        "entropies alone": _difference(response_entropy(logits, row, **options), expected[1]),
    }


def memory_is_shared() -> dict[str, Any]:
    """Where the gradient goes, and what may still read the logits."""
    row = _row()
    logits = _own_part(_whole_logits(row), row).float()
    found: dict[str, Any] = {}

    def outcome(name: str, calls: int, as_leaf: bool = False, **options: Any) -> None:
        leaf = logits.clone().requires_grad_()
        given = leaf if as_leaf else leaf * 1.0
        storage = given.untyped_storage().data_ptr()
        seen: list[int] = []
        given.register_hook(lambda grad: seen.append(grad.untyped_storage().data_ptr()))
        loss = sum(
            _loss(row, response_log_probs(given, row, **options), None) for _ in range(calls)
        )
        loss.backward()
        assert leaf.grad is not None
        found[name] = {
            "in place": storage in seen,
            "logits are whole": bool(torch.equal(given.detach(), logits)),
            "gradient": leaf.grad.double() / calls,
        }

    outcome("once", 1)
    outcome("twice", 2)
    outcome("leaf", 1, as_leaf=True)
    outcome("kept", 1, overwrite_logits=False)
    _, gradient = _reference(_whole_logits(row), row, 1.0, with_entropy=False)
    expected = _own_part(gradient, row)
    for each in found.values():
        each["gradient"] = _relative(each["gradient"], expected)
    leaf = logits.clone().requires_grad_()
    given = leaf * 1.0
    squared = (given * given).sum()  # its backward pass reads the logits
    loss = _loss(row, response_log_probs(given, row), None)
    try:
        (loss + squared).backward()
        found["another reader"] = ""
    except RuntimeError as error:
        found["another reader"] = str(error)
    return found


def _row() -> PackedMicroBatch:
    """Responses of none, one and all tokens among others; padded samples and a padded row."""
    samples = make_samples()
    chosen = [0, 1, 2, 4, 5, 9, 11]
    size = parallel_state.get_context_parallel_world_size()
    return pack(
        take(samples, chosen),
        schema=DEFAULT_SCHEMA,
        sample_indices=tuple(chosen),
        sample_alignment_tokens=2 * size,
        row_alignment_tokens=16 * size,
        context_parallel_size=size,
        context_parallel_rank=parallel_state.get_context_parallel_rank(),
    )


def _whole_logits(row: PackedMicroBatch) -> Tensor:
    """Float64 ``[tokens of the full row, vocabulary]``, the same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(
        row.host_cu_seqlens_padded[-1], VOCABULARY, generator=generator, dtype=torch.float64
    ).mul_(4)


def _own_part(whole: Tensor, row: PackedMicroBatch) -> Tensor:
    """``[1, local tokens, local vocabulary]``."""
    layout = Row(row.total_lengths, row.host_cu_seqlens_padded)
    local = layout.local(whole, row.context_parallel_size, row.context_parallel_rank)
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    return local.chunk(size, dim=-1)[rank][None].to(row.tokens.device)


def _weights(row: PackedMicroBatch) -> Tensor:
    """``[2, response tokens]``."""
    generator = torch.Generator().manual_seed(6)
    count = sum(row.response_lengths)
    return torch.randn(2, count, generator=generator, dtype=torch.float64) + 0.5


def _loss(row: PackedMicroBatch, log_probs: list[Tensor], entropy: list[Tensor] | None) -> Tensor:
    """This rank's share: gathered values count on the rank that predicts them."""
    owned = torch.cat(owned_response_mask(row))
    weights = _weights(row).to(owned.device)
    total = (torch.cat(log_probs).double() * weights[0] * owned).sum()
    if entropy is not None:
        total = total + (torch.cat(entropy).double() * weights[1] * owned).sum()
    return total


def _reference(
    whole: Tensor, row: PackedMicroBatch, temperature: float, with_entropy: bool = True
) -> tuple[tuple[list[Tensor], list[Tensor]], Tensor]:
    """Log-probabilities and entropies of each sample, and the gradient by the whole logits."""
    whole = whole.clone().requires_grad_()
    table = torch.log_softmax(whole / temperature, -1)
    log_probs, entropies = [], []
    for start, total, response, tokens in zip(
        row.host_cu_seqlens_padded,
        row.total_lengths,
        row.response_lengths,
        row["tokens"],
        strict=False,
    ):
        own_log_probs, own_entropies = whole.new_zeros(response), whole.new_zeros(response)
        for number in range(response):
            place = total - response + number
            if place == 0:
                continue
            lines = table[start + place - 1]
            own_log_probs[number] = lines[tokens[place]]
            own_entropies[number] = -(lines.exp() * lines).sum()
        log_probs.append(own_log_probs)
        entropies.append(own_entropies)
    weights = _weights(row)
    loss = (torch.cat(log_probs) * weights[0]).sum()
    if with_entropy:
        loss = loss + (torch.cat(entropies) * weights[1]).sum()
    loss.backward()
    assert whole.grad is not None
    return (log_probs, entropies), whole.grad


def _difference(ours: list[Tensor], expected: list[Tensor]) -> float:
    assert [len(each) for each in ours] == [len(each) for each in expected]
    return _relative(torch.cat(ours), torch.cat(expected))


def _relative(ours: Tensor, expected: Tensor) -> float:
    ours, expected = ours.detach().double().cpu(), expected.detach().double().cpu()
    return float((ours - expected).abs().max() / expected.abs().max())
