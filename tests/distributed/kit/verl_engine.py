"""Jobs that run the micro-batch loop of verl's Megatron engine, with its rearrangement hooked.

`forward_backward_batch`, `prepare_micro_batches`, `postprocess_micro_batch_func`,
`postprocess_batch_func` and `sft_loss` are verl's own, and so is Megatron's schedule. The engine's
forward step is not: it runs the kit's model over packed rows. Packages that are not installed and
modules of verl that the loop does not need (`STAND_INS`) are stand-ins; packages of verl whose
start-up imports other engines (`BARE`) are empty.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.utils import get_model_config

from kit.exactness import difference
from kit.model import named_parameters, sharded_model
from kit.samples import make_samples
from kit.stand_ins import StandIns
from mcore_batching.integrations.verl import hook
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.planning import ParallelDims

STAND_INS = StandIns(
    (
        *("datasets", "omegaconf", "pandas", "ray", "transformers"),
        *("verl.models", "verl.trainer.config", "verl.workers.config"),
        *("verl.utils.checkpoint", "verl.utils.debug", "verl.utils.dynamic_cp_scheduler"),
        *("verl.utils.megatron.router_replay_patch", "verl.utils.megatron.router_replay_utils"),
        *("verl.utils.megatron_peft_utils", "verl.utils.megatron_utils", "verl.utils.model"),
        "verl.workers.engine.megatron.utils",
    )
)
BARE = ("verl.workers", "verl.workers.engine", "verl.workers.engine.megatron", "verl.workers.utils")

CAP_TOKENS = 64
SAMPLES = [12, 2, 9, 0, 11, 7, 10, 5, 1, 8]
"""Longest first, of 40 to 3 tokens: the first half is the first data-parallel rank's."""


def compare(
    dims: dict[str, Any], reference: str, source: str, num_samples: int = 10, group: int = 0
) -> dict[str, Any]:
    """One mini-batch through verl's engine with its own micro-batches, and with the hooked.

    Args:
        dims: arguments of `ParallelDims`.
        reference: file of the weights.
        source: folder with verl.
        num_samples: of all data-parallel ranks.
        group: micro-batches that a model chunk runs before the next, under the hook alone.

    Returns:
        largest relative differences of ``outputs`` and ``gradients``; both ``losses`` and
        ``counts`` of micro-batches; and how many samples ran ``twice``.
    """
    shape = ParallelDims(**dims)
    engine_class, tensors, loss = _import_verl(source)
    replica = parallel_state.get_data_parallel_rank()
    share = num_samples // shape.data_parallel
    mine = SAMPLES[:num_samples][replica * share : (replica + 1) * share]
    run = functools.partial(_step, engine_class, tensors, loss, shape, reference, mine)
    own = run(0)
    with hook() as hooked:
        assert len(hooked.hooked) == 5, hooked
        ours = run(group)
    outputs = zip(own["outputs"], ours["outputs"], strict=True)
    return {
        "outputs": max((difference(b, a) for a, b in outputs), default=0.0),
        "num_outputs": len(ours["outputs"]),
        "gradients": max(
            difference(b, a) for a, b in zip(own["gradients"], ours["gradients"], strict=True)
        ),
        "losses": [own["loss"], ours["loss"]],
        "counts": [own["count"], ours["count"]],
        "samples": len(mine),
        "last_stage": is_last_stage(),
    }


def _import_verl(source: str) -> tuple[Any, Any, Any]:
    """The engine's class with the kit's forward step, the tensor utilities and the loss."""
    torch.compiler.set_stance("force_eager")
    if STAND_INS not in sys.meta_path:
        sys.meta_path.insert(0, STAND_INS)  # before the modules that verl has
        sys.path.insert(0, source)
        for name in BARE:
            package = ModuleType(name)
            package.__path__ = [str(Path(source, *name.split(".")))]
            sys.modules[name] = package
    engine = importlib.import_module("verl.workers.engine.megatron.transformer_impl")
    balancing = importlib.import_module("verl.utils.seqlen_balancing")
    devices = importlib.import_module("verl.utils.device")
    device = torch.device(torch.cuda.current_device())  # verl does not know the CPU stand-in
    vars(engine)["get_device_id"] = lambda: device
    vars(balancing)["get_device_name"] = vars(devices)["get_device_name"] = lambda: device.type
    engine.RouterReplayHelper.is_r2_record_action.return_value = False

    class Engine(engine.MegatronEngineWithLMHead):  # type: ignore[misc, name-defined]
        def __init__(self, **attributes: Any) -> None:  # its own builds a model
            vars(self).update(attributes)

        def forward_step(
            self,
            batch_iter: Any,
            model: Any,
            logits_processor_func: Any,
            postprocess_micro_batch_func: Callable[..., Any],
        ) -> Any:
            del logits_processor_func
            batch = next(batch_iter)
            logits, labels, lengths = _forward(model, list(batch["input_ids"].unbind()))

            def loss_function(logits: torch.Tensor) -> Any:
                losses = vocab_parallel_cross_entropy(logits.float(), labels)
                log_probs = [-each for each in losses[0, : sum(lengths)].split(lengths)]
                nested = torch.nested.as_nested_tensor(log_probs, layout=torch.jagged)
                return postprocess_micro_batch_func({"log_probs": nested}, data=batch)

            return logits, loss_function

    tensors = importlib.import_module("verl.utils.tensordict_utils")
    losses = importlib.import_module("verl.workers.utils.losses")
    return Engine, tensors, functools.partial(losses.sft_loss, None)


def _forward(model: Any, rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The model over one packed row; its output, each token's successor and the lengths."""
    multiple = parallel_state.get_tensor_model_parallel_world_size()
    lengths = [len(row) for row in rows]
    tail = -sum(lengths) % multiple
    padded = [*rows, *([rows[0].new_zeros(tail)] if tail else [])]
    ends = [0, *torch.tensor([len(row) for row in padded]).cumsum(0).tolist()]
    places = torch.tensor(ends, dtype=torch.int32, device=rows[0].device)
    longest = max(map(len, padded))
    output = model(
        input_ids=torch.cat(padded)[None],
        position_ids=None,
        attention_mask=None,
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=places,
            cu_seqlens_kv=places,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
    )
    labels = torch.cat([row.roll(-1) for row in padded])[None]
    return output, labels, lengths


def _step(
    engine_class: Any,
    tensors: Any,
    loss: Any,
    shape: ParallelDims,
    reference: str,
    mine: list[int],
    group: int,
) -> dict[str, Any]:
    weights = torch.load(reference, weights_only=True)["weights"]
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    chunks = sharded_model(shape, "dense", weights, ddp, calculate_per_token_loss=False)
    config = get_model_config(chunks[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.variable_seq_lengths = True
    if group:
        config.microbatch_group_size_per_vp_stage = group
    engine = engine_class(
        engine_config=SimpleNamespace(
            context_parallel_size=1,
            dynamic_context_parallel=False,
            pad_bshd_to_minibatch_max=False,
            use_remove_padding=True,
        ),
        model_config=SimpleNamespace(mtp=SimpleNamespace(enable=False)),
        tf_config=config,
        module=chunks,
        enable_routing_replay=False,
    )
    data = tensors.get_tensordict(_batch(mine))
    tensors.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=CAP_TOKENS)
    output = engine.forward_backward_batch(data, loss)
    made = output.get("model_output", {})
    return {
        "outputs": list(made["log_probs"].unbind()) if made else [],
        "gradients": [each.main_grad.clone() for _, each in named_parameters(chunks)],
        "loss": sum(output.get("loss", [])),
        "count": tensors.get_non_tensor_data(data, key="num_micro_batch", default=None),
    }


def _batch(samples: list[int]) -> dict[str, torch.Tensor]:
    """These of the kit's samples, nested; the first token of each is a prompt's."""
    whole = make_samples()
    device = torch.device(torch.cuda.current_device())
    tokens = [whole["tokens"][i].to(device) for i in samples]
    masks = [
        torch.arange(len(row), device=device) * (i + 3) % 7 > 1 for i, row in enumerate(tokens)
    ]
    return {
        "input_ids": torch.nested.as_nested_tensor(tokens, layout=torch.jagged),
        "loss_mask": torch.nested.as_nested_tensor(masks, layout=torch.jagged),
    }
