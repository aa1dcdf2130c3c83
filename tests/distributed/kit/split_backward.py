"""Jobs that compare steps of split backward passes with the same steps of whole ones."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.utils import get_model_config

from kit.exactness import arguments
from kit.model import (
    HYBRID,
    MAX_SEQUENCE_LENGTH,
    adam,
    layer_spec,
    model_options,
    named_parameters,
    transformer_config,
)
from kit.objective import packed_objective
from kit.samples import VOCABULARY, make_samples, share, take
from mcore_batching.megatron import get_data_iterator, packed_layer_spec, train_step
from mcore_batching.megatron.job.job import job_of
from mcore_batching.megatron.split_backward.plan import LastStep
from mcore_batching.megatron.standalone.bootstrap import build_model, pipeline_config
from mcore_batching.planning import ParallelDims

SPLIT = "dynamic_batch_split_backward"
STEPS = 3


def small_model(
    dims: dict[str, Any],
    kind: str = "dense",
    ddp: dict[str, Any] | None = None,
    tied: bool = False,
    **settings: Any,
) -> list[Any]:
    """A model of random weights on a layout, in Megatron's data-parallel wrapper."""
    shape = ParallelDims(**dims)
    config = transformer_config(kind, **pipeline_config(shape) | settings)
    options = model_options(kind, shape.pipeline_parallel * shape.virtual_pipeline)
    if kind not in HYBRID:
        options["spec"] = lambda config: layer_spec(kind, packed_layer_spec(config), config)
    return build_model(
        config,
        vocab_size=VOCABULARY,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True, **(ddp or {})),
        **({"share_embeddings_and_output_weights": True} if tied else {}),
        **options,
    )


def compare_steps(
    dims: dict[str, Any],
    planner: dict[str, Any] | None = None,
    spread: str = "uneven",
    **model_settings: Any,
) -> dict[str, Any]:
    """Some steps with split backward passes and the same with whole ones, from the same weights.

    Returns:
        ``gradients`` and ``weights``, the largest differences after any step, relative to the
        tensor's largest entry: 0.0 means equal to the bit; ``peak_bytes`` that waited.
    """
    shape = ParallelDims(**dims)
    model = small_model(dims, **model_settings)
    before = [parameter.detach().clone() for _, parameter in named_parameters(model)]
    distributed = bool((model_settings.get("ddp") or {}).get("use_distributed_optimizer"))
    rank, ranks = parallel_state.get_data_parallel_rank(), shape.data_parallel
    samples = make_samples()
    data = take(samples, share(samples, spread, rank, ranks))
    outcomes: dict[bool, list[list[torch.Tensor]]] = {}
    report: dict[str, Any] = {}
    # Split first: in the first batch of all the wrapper counts its calls.
    for splits in (True, False):
        with torch.no_grad():
            for (_, parameter), value in zip(named_parameters(model), before, strict=True):
                parameter.copy_(value)
        args = arguments(shape, **{SPLIT: "all" if splits else None} | (planner or {}))
        optimizer = adam(model, distributed)
        get_model_config(model[0]).grad_scale_func = optimizer.scale_loss
        outcomes[splits] = []
        for _ in range(STEPS):
            iterators, counts = get_data_iterator(args, model, data)
            train_step(packed_objective, args, model, iterators, counts, optimizer)
            found = [parameter for _, parameter in named_parameters(model)]
            outcomes[splits].append([p.main_grad.clone() for p in found])
            outcomes[splits].append([p.detach().clone() for p in found])
            if splits:
                weights = job_of().memory.only(LastStep).weights
                report["peak_bytes"] = 0 if weights is None else weights.peak_bytes
    pairs = list(zip(outcomes[True], outcomes[False], strict=True))
    report["gradients"] = max(_difference(*pair) for pair in pairs[::2])
    report["weights"] = max(_difference(*pair) for pair in pairs[1::2])
    return report


def _difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(
        0.0 if torch.equal(a, b) else float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
        for a, b in zip(ours, theirs, strict=True)
    )
