"""Jobs that compare log-probabilities and entropies of responses with plain float64 ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from bootstrap import build_model, pipeline_config
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.utils import get_model_config
from torch import Tensor

from kit.exactness import arguments, log_probs_of
from kit.model import MAX_SEQUENCE_LENGTH, model_options, transformer_config
from kit.objective import packed_objective
from kit.packing import pack
from kit.samples import VOCABULARY, make_samples, take
from mcore_batching.batch import PackedMicroBatch, StepTotals
from mcore_batching.batch.row_index import Slice
from mcore_batching.megatron import (
    forward_only,
    get_data_iterator,
    response_log_probs,
    response_log_probs_and_entropy,
    train_step,
)
from mcore_batching.planning import ParallelDims


def compare(
    temperature: float, chunk_tokens: int, dtype: str = "float32", banned: float | None = None
) -> dict[str, float]:
    """Largest differences, relative to the largest entry of the reference.

    The loss weighs log-probabilities and entropies of all response tokens at random.

    Args:
        temperature: divides the logits.
        chunk_tokens: of which copies are held at a time.
        dtype: of the logits.
        banned: logits of the last half of the vocabulary; None: it may be chosen as well.
    """
    options: dict[str, Any] = {"temperature": temperature, "chunk_tokens": chunk_tokens}
    allowed = VOCABULARY if banned is None else VOCABULARY // 2
    row = _row(allowed)
    whole = _whole_logits(row)
    whole[:, allowed:] = banned or 0.0
    if dtype != "float32":  # the reference is of the very numbers that are given
        whole = whole.to(getattr(torch, dtype)).double()
    found = {}
    for with_entropy in (False, True):
        expected, gradient = _reference(whole, row, temperature, with_entropy)
        leaf = _own_part(whole, row).to(getattr(torch, dtype)).requires_grad_()
        log_probs, entropy = response_log_probs_and_entropy(leaf * 1.0, row, **options)
        if not with_entropy:
            log_probs = response_log_probs(leaf * 1.0, row, **options)
        _loss(row, log_probs, entropy if with_entropy else None).backward()
        assert leaf.grad is not None
        # A rank that holds banned entries alone has a gradient of 0.
        error = (leaf.grad.double().cpu() - _own_part(gradient, row).cpu()).abs().max()
        found |= {
            f"log-probabilities {with_entropy}": _difference(log_probs, expected[0]),
            f"entropies {with_entropy}": _difference(entropy, expected[1]),
            f"gradient {with_entropy}": float(error / gradient.abs().max()),
        }
    return found


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


def _small_model(dims: ParallelDims, ddp: dict[str, Any], **settings: Any) -> list[Any]:
    """A dense model of random weights on a layout, in Megatron's data-parallel wrapper."""
    model = build_model(
        transformer_config("dense", **pipeline_config(dims) | settings),
        vocab_size=VOCABULARY,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp),
        **model_options("dense", dims.pipeline_parallel * dims.virtual_pipeline),
    )
    get_model_config(model[0]).finalize_model_grads_func = finalize_model_grads
    return model


class _Job:
    """A model and a step over its samples, without an update."""

    def __init__(self, dims: dict[str, Any], dtype: torch.dtype, **options: Any) -> None:
        self.dims = ParallelDims(**dims)
        half: dict[str, Any] = {}
        if dtype is torch.bfloat16:
            half = {"bf16": True, "params_dtype": dtype, "pipeline_dtype": dtype}
        ddp = {"overlap_grad_reduce": True}
        self.model = _small_model(self.dims, ddp, init_method_std=0.2, **half, **options)
        self.touched: set[str] = set()
        for name, parameter in self.model[0].named_parameters():
            parameter.register_hook(lambda grad, name=name: self.touched.add(name))

    def step(self, loss: Any = packed_objective, **settings: Any) -> tuple[set[str], Tensor]:
        """Types of the logits in a step, and its gradients."""
        dtypes = set()

        def watched(logits: Any, row: PackedMicroBatch, totals: StepTotals) -> Any:
            if isinstance(logits, torch.Tensor):
                dtypes.add(str(logits.dtype))
            return loss(logits, row, totals)

        self.touched.clear()
        args = arguments(self.dims, **settings)
        iterators, counts = get_data_iterator(args, self.model, make_samples())
        optimizer = SimpleNamespace(
            zero_grad=lambda: None, scale_loss=lambda x: x, step=lambda: (True, 0.0, 0)
        )
        train_step(watched, args, self.model, iterators, counts, optimizer)
        gradients = [parameter.main_grad.flatten() for parameter in self.model[0].parameters()]
        return dtypes, torch.cat(gradients).clone()

    def log_probs(self, **settings: Any) -> Tensor:
        args = arguments(self.dims, **settings)
        iterators, counts = get_data_iterator(args, self.model, make_samples())
        made = forward_only(log_probs_of, args, self.model, iterators, counts)
        return torch.cat(made["log_probs"]) if made else torch.ones(1)


def settings_of_a_step() -> dict[str, Any]:
    """What the flags of log-probs, and a loss that does not depend on them, do to a step."""
    job = _Job({}, torch.bfloat16)
    usual, gradients = job.step()
    every = set(job.touched)
    narrow, same = job.step(dynamic_batch_logits_in_model_dtype=True)
    plain, narrow_log_probs = (
        job.log_probs(),
        job.log_probs(dynamic_batch_logits_in_model_dtype=True),
    )
    found: dict[str, Any] = {
        "dtypes": [*usual, *narrow],
        "same gradients": bool(torch.equal(gradients, same)),
        "same log-probabilities": bool(torch.equal(plain, narrow_log_probs)),
    }
    types: set[str] = set()

    def fused(logits: Any, row: PackedMicroBatch, totals: StepTotals) -> Any:
        types.add(type(logits).__name__)
        return torch.zeros((), device=row.tokens.device), {}

    job.step(fused, dynamic_batch_fuse_output_layer=True)
    found |= {"types": [*types], "fused constant touches all": job.touched == every}
    return found


def _row(vocabulary: int = VOCABULARY) -> PackedMicroBatch:
    """Responses of none, one and all tokens among others; padded samples and a padded row."""
    samples = make_samples()
    samples["tokens"] = [tokens % vocabulary for tokens in samples["tokens"]]
    chosen = [0, 1, 2, 4, 5, 9, 11]
    size = parallel_state.get_context_parallel_world_size()
    return pack(
        take(samples, chosen),
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
    size, rank = row.context_parallel_size, row.context_parallel_rank
    local = whole[Slice(row.host_cu_seqlens_padded, size, rank).positions]
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
    owned = row.responses.owned
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
            possible = lines[lines > -torch.inf]  # an entry of probability 0 adds 0
            own_entropies[number] = -(possible.exp() * possible).sum()
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
