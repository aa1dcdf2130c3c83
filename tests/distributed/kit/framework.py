"""A framework that batches by functions of its own, for `mcore_batching.hook` to replace.

Signatures, layout and conventions are those of RL frameworks on Megatron: log-probs are found by
the samples' lengths, each context-parallel rank keeps its own part of them, and a sample counts at
least one token. Its batching knows no placeholders, so it refuses to be called at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.utils import get_model_config
from torch import Tensor


def get_data_iterator(args: Any, model: Any, rollout_data: Any) -> Any:
    raise AssertionError("the framework's own get_data_iterator was called")


def forward_only(
    f: Callable[..., Any],
    args: Any,
    model: Any,
    data_iterator: Sequence[Any],
    num_microbatches: Sequence[int],
    store_prefix: str = "",
) -> dict[str, list[Tensor]]:
    raise AssertionError("the framework's own forward_only was called")


def get_batch(
    data_iterator: Any,
    keys: Sequence[str],
    pad_multiplier: int = 128,
    qkv_format: str = "thd",
    allgather_cp: bool = False,
) -> dict[str, Any]:
    raise AssertionError("the framework's own get_batch was called")


def log_probs(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    with_entropy: bool = False,
) -> dict[str, list[Tensor]]:
    """Log-probs of the response tokens that this context-parallel rank predicts."""
    del args, with_entropy
    targets = torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device)
    samples = list(zip(unconcat_tokens, total_lengths, response_lengths, strict=True))
    places = list(predicted(total_lengths, response_lengths))
    for (tokens, _, _), pieces in zip(samples, places, strict=True):
        for first, start, end in pieces:
            targets[0, first : first + end - start] = tokens[start + 1 : end + 1]
    flat = -vocab_parallel_cross_entropy(logits.float().clone(), targets)[0]
    return {
        "log_probs": [
            torch.cat([flat[first : first + end - start] for first, start, end in pieces])
            for pieces in places
        ]
    }


def predicted(
    total_lengths: list[int], response_lengths: list[int]
) -> Iterator[list[tuple[int, int, int]]]:
    """For each sample the positions whose next token is one of its response, as pieces of this
    rank's row: where a piece begins there, and its first and last-but-one position in the sample.
    """
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    begin = 0
    for total, response in zip(total_lengths, response_lengths, strict=True):
        chunk = total if size == 1 else -(-total // (2 * size))
        pieces = []
        for number in [0] if size == 1 else [rank, 2 * size - 1 - rank]:
            start = max(number * chunk, total - response - 1)
            end = max(min((number + 1) * chunk, total - 1), start)
            pieces.append((begin + start - number * chunk, start, end))
            begin += chunk
        yield [(first if end > start else 0, start, end) for first, start, end in pieces]


def own_part(values: Tensor, total_length: int, response_length: int) -> Tensor:
    """Of one value a response token, those that this context-parallel rank predicts."""
    (pieces,) = predicted([total_length], [response_length])
    first = total_length - response_length - 1
    return torch.cat([values[start - first : end - first] for _, start, end in pieces])


def loss_function(
    args: Any, batch: dict[str, Any], num_microbatches: int, logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum over tokens, tokens, report; or the mean over samples, which Megatron divides."""
    lengths = batch["total_lengths"], batch["response_lengths"]
    masks = [
        own_part(mask, *each) for mask, *each in zip(batch["loss_masks"], *lengths, strict=True)
    ]
    counts = [torch.clamp_min(mask.sum(), 1) for mask in batch["loss_masks"]]
    new = log_probs(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=lengths[0],
        response_lengths=lengths[1],
    )["log_probs"]
    terms = [
        (-(n - old).exp() * advantage * mask).sum()
        for n, old, advantage, mask in zip(
            new, batch["log_probs"], batch["advantages"], masks, strict=True
        )
    ]
    context_parallel = parallel_state.get_context_parallel_world_size()
    if args.calculate_per_token_loss:
        loss, number = sum(terms), sum(counts)
        return loss * context_parallel, number, {"loss": torch.stack([loss.detach(), number])}
    loss = sum(term / count for term, count in zip(terms, counts, strict=True))
    replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    scaled = loss * num_microbatches / args.global_batch_size * replicas
    return scaled, torch.tensor(1, device=logits.device), {"loss": loss.detach()}


def train_one_step(
    args: Any, data_iterator: Sequence[Any], model: list[Any], num_microbatches: int
) -> list[dict[str, Tensor]]:
    """Gradients of one step in the model's buffers; the report of every micro-batch."""
    config = get_model_config(model[0])
    config.finalize_model_grads_func = finalize_model_grads
    for chunk in model:
        chunk.zero_grad_buffer()
    for iterator in data_iterator:
        iterator.reset()

    def forward_step(iterator: Any, chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        keys = ["tokens", "total_lengths", "response_lengths", "loss_masks"]
        keys += ["log_probs", "advantages", "values", "multimodal_train_inputs"]
        batch = get_batch(iterator, keys, args.data_pad_size_multiplier, args.qkv_format)
        assert batch["tokens"].shape == batch["full_loss_masks"].shape
        output = chunk(
            input_ids=batch["tokens"],
            position_ids=None,
            attention_mask=None,
            packed_seq_params=batch["packed_seq_params"],
            loss_mask=batch["full_loss_masks"],
        )
        return output, functools.partial(loss_function, args, batch, num_microbatches)

    reports: list[dict[str, Tensor]] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=list(data_iterator),
        model=model,
        num_microbatches=num_microbatches,
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    return reports
