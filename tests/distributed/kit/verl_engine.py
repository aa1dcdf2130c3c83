"""Jobs that run the micro-batch loop of verl's Megatron engine, with its rearrangement hooked.

`forward_backward_batch`, `prepare_micro_batches`, `postprocess_micro_batch_func`,
`postprocess_batch_func`, the forward function with its packed rows and `sft_loss` are verl's own,
and so is Megatron's schedule. The engine's forward step around the forward function is not, nor the
model. Packages that are not installed and modules of verl that the loop does not need (`STAND_INS`)
are stand-ins; packages of verl that import other engines at their start (`BARE`) are empty.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.utils import get_model_config, unwrap_model

from kit.calls import on_all_ranks
from kit.model import named_parameters, small_model
from kit.objective import difference
from kit.samples import make_samples
from kit.stand_ins import StandIns, bare_packages
from mcore_batching.integrations.verl import hook
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.planning import ParallelDims

STAND_INS = StandIns(
    (
        *("datasets", "omegaconf", "pandas", "ray", "transformers"),
        *("verl.trainer.config", "verl.workers.config", "verl.utils.kernel"),
        *("verl.utils.checkpoint", "verl.utils.debug"),
        *("verl.utils.megatron.router_replay_patch", "verl.utils.megatron.router_replay_utils"),
        *("verl.utils.megatron_peft_utils", "verl.utils.megatron_utils", "verl.utils.model"),
        "verl.workers.engine.megatron.utils",
    )
)
BARE = (
    *("verl.models", "verl.models.mcore", "verl.workers", "verl.workers.engine"),
    *("verl.workers.engine.megatron", "verl.workers.utils"),
)

OUTPUTS = 2e-6
"""Both sides compute in float32 over rows of other contents, as in `test_exactness`; gradients may
be off by ten times as much."""
CAP_TOKENS = 64
SAMPLES = [12, 2, 9, 0, 11, 7, 10, 5, 1, 8]
"""Longest first, of 40 to 3 tokens: the first half is the first data-parallel rank's."""


def compare(dims: ParallelDims, source: str, num_samples: int = 10, group: int = 0) -> None:
    """One mini-batch through verl's engine with its own micro-batches, and with the hooked.

    A model chunk runs ``group`` micro-batches before the next, under the hook alone.
    """
    engine_class, tensors, loss = _import_verl(source)
    replica = parallel_state.get_data_parallel_rank()
    share = num_samples // dims.data_parallel
    mine = SAMPLES[:num_samples][replica * share : (replica + 1) * share]
    data = _batch(mine)
    lengths = data["input_ids"].offsets().diff().tolist()
    run = functools.partial(_step, engine_class, tensors, loss, dims, data)
    own = run(0)
    with hook() as hooked:
        names = ("rearrange_micro_batches", "restore_dynamic_batch")
        assert sum(name.endswith(names) for name in hooked.hooked) == 5, hooked
        ours = run(group)
    outputs = [*zip(own["outputs"], ours["outputs"], strict=True)]
    assert len(outputs) == (len(lengths) if is_last_stage() else 0)
    off = {
        "outputs": max((difference(b, a) for a, b in outputs if len(a)), default=0.0),
        "gradients": max(map(difference, ours["gradients"], own["gradients"])) / 10,
        "loss": abs(ours["loss"] - own["loss"]) / (abs(own["loss"]) or 1.0),
    }
    assert max(off.values()) < OUTPUTS, off
    assert {*on_all_ranks(ours["count"])} == {ours["count"]}
    if group:
        assert ours["count"] == 4 > len(lengths)
    elif is_last_stage():
        assert own["tokens"] == ours["tokens"] == sum(lengths)


def _import_verl(source: str) -> tuple[Any, Any, Any]:
    """The engine's class with the kit's forward step, the tensor utilities and the loss."""
    torch.compiler.set_stance("force_eager")
    if STAND_INS not in sys.meta_path:
        sys.meta_path.insert(0, STAND_INS)  # before the modules that verl has
        sys.path.insert(0, source)
        sys.modules |= bare_packages(source, BARE)
        vars(sys.modules["verl.models.mcore"])["get_mcore_weight_converter"] = None
        vars(importlib.import_module("verl.utils.megatron_utils"))["unwrap_model"] = unwrap_model
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
            self, batch_iter: Any, model: Any, postprocess_micro_batch_func: Any, **unused: Any
        ) -> Any:
            batch = next(batch_iter)
            own = importlib.import_module("verl.models.mcore.model_forward")
            input_ids = batch["input_ids"]

            def logits_processor(logits: torch.Tensor, *, label: Any, temperature: Any) -> Any:
                self.tokens += int((temperature > 0).sum())
                temperature[temperature <= 0] = 1e-8  # of padding, as in verl
                logits = logits.float() / temperature[..., None]
                return {"log_probs": -vocab_parallel_cross_entropy(logits, label)}

            pairs = zip(batch["temperature"], input_ids.unbind(), strict=True)
            temperature = [value.expand(len(row)) for value, row in pairs]
            output = own.gptmodel_forward_model_engine(
                model,
                input_ids,
                {},
                logits_processor=logits_processor,
                logits_processor_args={
                    "label": input_ids.clone(),
                    "temperature": torch.nested.as_nested_tensor(temperature, layout=torch.jagged),
                    "loss_mask": batch["loss_mask"],
                    "response_attention_mask": None,
                },
            )
            return output, functools.partial(postprocess_micro_batch_func, data=batch)

    tensors = importlib.import_module("verl.utils.tensordict_utils")
    losses = importlib.import_module("verl.workers.utils.losses")
    return Engine, tensors, functools.partial(losses.sft_loss, None)


def _step(
    engine_class: Any, tensors: Any, loss: Any, dims: ParallelDims, batch: Any, group: int
) -> dict[str, Any]:
    chunks = small_model(dims, calculate_per_token_loss=False)
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
        tokens=0,
    )
    data = tensors.get_tensordict(batch)
    tensors.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=CAP_TOKENS)
    output = engine.forward_backward_batch(data, loss)
    made = output.get("model_output", {})
    return {
        # A sample's last label is the first token behind it in verl's row; nothing uses it.
        "outputs": [each[:-1] for each in made["log_probs"].unbind()] if made else [],
        "gradients": [each.main_grad.clone() for _, each in named_parameters(chunks)],
        "loss": sum(output.get("loss", [])),
        "tokens": engine.tokens,
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
        "temperature": torch.ones(len(tokens), device=device),
    }
