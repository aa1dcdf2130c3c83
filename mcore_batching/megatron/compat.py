"""Differences between Megatron-LM versions, and nothing else.

The rest of the package calls these functions and never asks for a version. Run on megatron-core
0.16.1 and 0.19.2.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import ColumnParallelLinear, layers
from megatron.core.transformer import multi_token_prediction, transformer_block
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

try:
    import transformer_engine  # noqa: F401

    HAVE_TRANSFORMER_ENGINE = True
except ImportError:
    HAVE_TRANSFORMER_ENGINE = False


def is_engines_attention(module: Any) -> bool:
    """True if a module is Megatron's wrapper of Transformer Engine's attention."""
    if not HAVE_TRANSFORMER_ENGINE:
        return False
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return isinstance(module, TEDotProductAttention)


def engine_linears(chunk: Any) -> dict[str, Any]:
    """Of a model chunk, by name, linear modules of Transformer Engine with one weight."""
    return {
        name: module
        for name, module in chunk.named_modules()
        if hasattr(module, "fuse_wgrad_accumulation")
        and isinstance(getattr(module, "weight", None), torch.nn.Parameter)
    }


def debugs_engine() -> bool:
    """True if Transformer Engine's modules are looked into by its debugging tools."""
    debugging = sys.modules.get("transformer_engine.debug.pytorch.debug_state")
    return debugging is not None and bool(debugging.TEDebugState.debug_enabled)


def why_no_plain_product(layer: Any) -> str:
    """Differences of an output layer from the product with its weight; empty if there are none."""
    if type(layer) is not ColumnParallelLinear:
        return f"is a {type(layer).__name__}"
    if layer.bias is not None:
        return "has a bias"
    if layer.gather_output:
        return "gathers its output (parallel_output=False)"
    if getattr(layer, "gtp_remat_size", 1) > 1:  # from 0.19 on
        return "gathers its weight (generalized tensor parallelism)"
    return ""


def attention_groups(pg_collection: Any) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Tensor- and context-parallel groups for a core attention.

    0.16 may give a core attention no collection at all, later versions always do.
    """
    tp_group = getattr(pg_collection, "tp", None)
    cp_group = getattr(pg_collection, "cp", None)
    return (
        parallel_state.get_tensor_model_parallel_group() if tp_group is None else tp_group,
        parallel_state.get_context_parallel_group() if cp_group is None else cp_group,
    )


def packed_seq_params(
    cu_seqlens: Tensor,
    max_seqlen: int,
    host_cu_seqlens: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> PackedSeqParams:
    """Megatron's THD parameters for a row of padded sequences.

    As stock Megatron does, the offsets of the *padded* sequences are given as the real ones
    (Transformer Engine's context-parallel attention wants it so): trailing padding attends to its
    own sequence, which causal masking hides from every real token.

    Args:
        cu_seqlens: int32 ``[sequences + 1]`` offsets in the full row, before context-parallel
            slicing.
        max_seqlen: longest padded sequence, in tokens.
        host_cu_seqlens: the same offsets as Python ints, for attentions that need them on the
            host.
        group: ranks that share the row, where rows differ in it; None: the model's own.
    """
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
    )
    give_offsets(params, host_cu_seqlens)
    set_row_group(params, group)
    return params


def give_offsets(params: Any, host_cu_seqlens: Sequence[int]) -> None:
    """Let a row's packed-sequence parameters know its offsets on the host, and whose each token is.

    From 0.17 on Mamba layers begin anew with every sample by ``seq_idx`` alone: without it, state
    flows from sample to sample. Megatron makes it where ``total_tokens`` is given from the start,
    but then the host waits for the device.
    """
    params.host_cu_seqlens = tuple(host_cu_seqlens)
    if hasattr(params, "seq_idx"):
        params.total_tokens = host_cu_seqlens[-1]
        params.seq_idx = _sequence_of_tokens(params, host_cu_seqlens[-1])


def end_states_with_samples() -> None:
    """Let Mamba layers begin anew with every sample, whoever makes a row's parameters.

    For frameworks that make them without ``total_tokens``, once the model is built. Patches
    Megatron once, if any model may have such layers.
    """
    mixer = sys.modules.get("megatron.core.ssm.mamba_mixer")
    if mixer is None or not hasattr(PackedSeqParams, "seq_idx"):
        return
    if hasattr(mixer.MambaMixer, "states_end_with_samples"):
        return
    ssm_training = mixer.MambaMixer._ssm_training

    def with_sequences(self: Any, inputs: Tensor, packed_seq_params: Any = None) -> Tensor:
        if packed_seq_params is not None and packed_seq_params.seq_idx is None:
            packed_seq_params.seq_idx = _sequence_of_tokens(packed_seq_params, len(inputs))
        output: Tensor = ssm_training(self, inputs, packed_seq_params)
        return output

    mixer.MambaMixer._ssm_training = with_sequences
    mixer.MambaMixer.states_end_with_samples = True


def _sequence_of_tokens(params: Any, total_tokens: int) -> Tensor:
    """int32 ``[1, total_tokens]``: the number of each token's sequence in the whole row."""
    offsets = (
        params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    )
    numbers = torch.arange(len(offsets) - 1, dtype=torch.int32, device=offsets.device)
    return numbers.repeat_interleave(offsets.diff(), output_size=total_tokens)[None]


def class_of_forward(layer: Any) -> str:
    """Name of the Megatron class whose forward pass a layer runs; empty where it is none of its."""
    forward = type(layer).forward
    if not str(getattr(forward, "__module__", "")).startswith("megatron.core."):
        return ""
    return str(forward.__qualname__.partition(".")[0])


def has_hybrid_model() -> bool:
    """True if this Megatron has `HybridModel` (from 0.18 on)."""
    return importlib.util.find_spec("megatron.core.models.hybrid") is not None


def scatters_padding_mask(model: Any) -> bool:
    """True if a model's first stage scatters its padding mask under sequence parallelism.

    `GPTModel` does, `HybridModel` hands it on as it is.
    """
    return bool(model.pre_process) and not hasattr(model, "hybrid_layer_pattern")


def packs_gated_delta_net(layer: Any) -> bool:
    """True if this Megatron's GatedDeltaNet runs packed rows (from 0.18 on)."""
    return hasattr(layer, "_resolve_cu_seqlens")


def packs_sparse_attention() -> bool:
    """True if this Megatron's DeepSeek sparse attention runs packed rows (from 0.19 on)."""
    from megatron.core.transformer import experimental_attention_variant

    return (
        importlib.util.find_spec(f"{experimental_attention_variant.__name__}.dsa_layout")
        is not None
    )


def what_mamba_lacks(context_parallel: int) -> str:
    """The packages that Mamba layers lack to run packed rows; empty if none."""
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer

    is_there, lacks = mamba_mixer._check_mamba_sequence_packing_support(
        for_inference_not_training=False
    )
    if not is_there:
        return f"more than is installed: {lacks}"
    if context_parallel > 1 and mamba_context_parallel.tex is None:
        return (
            "Transformer Engine under context parallelism: install it, or set "
            "--context-parallel-size 1"
        )
    return ""


def set_row_group(params: Any, group: dist.ProcessGroup | None) -> None:
    """Let a row's packed-sequence parameters name its own context-parallel group, if it has one.

    What reads it: Transformer Engine's attention, `PackedAttention`, and `let_rows_have_groups`.
    """
    if group is not None:
        params.cp_group, params.local_cp_size = group, group.size()


def let_rows_have_groups(attention: Any) -> None:
    """Let an attention layer rotate positions by the row's group instead of the model's.

    Core attentions read the group in the row's parameters; the rotation before them reads the
    layer's ``pg_collection.cp``. So that is replaced while the layer runs forward, which it does
    again, with the same parameters, where backward computes activations anew. Nothing reads it in
    backward itself: every operation has kept what it needs of its own forward pass.

    Args:
        attention: one of Megatron's attention layers.
    """
    if hasattr(attention, "groups_of_rows"):
        return
    attention.groups_of_rows = []

    def before_forward(module: Any, arguments: Any, named: dict[str, Any]) -> None:
        del arguments
        params, groups = named.get("packed_seq_params"), module.pg_collection
        module.groups_of_rows.append(groups.cp)
        if params is not None and params.cp_group is not None:
            groups.cp = params.cp_group

    def after_forward(module: Any, *unused: Any) -> None:
        del unused
        module.pg_collection.cp = module.groups_of_rows.pop()

    attention.register_forward_pre_hook(before_forward, with_kwargs=True)
    attention.register_forward_hook(after_forward, always_call=True)
    if HAVE_TRANSFORMER_ENGINE:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        # Megatron makes it where the model's own size is above 1 alone.
        if TEDotProductAttention.cp_stream is None and torch.cuda.is_available():
            TEDotProductAttention.cp_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]


def forget_padded_length(params: Any) -> None:
    """Clear ``tokens_per_sample`` of packed-sequence parameters.

    From 0.19 on mixture-of-experts layers cut a row at multiples of it, and stock scripts set it to
    the padded length of a sample, which packed rows do not have.
    """
    if getattr(params, "tokens_per_sample", None) is not None:
        params.tokens_per_sample = None


_ASKS_FOR_SHAPES = ["self", "tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next"]


@contextlib.contextmanager
def shapes_of_transfers(known: Callable[..., tuple[list[int], list[int]]]) -> Iterator[None]:
    """Take the shapes of what stages receive from a function, in place of an exchange.

    A Megatron that exchanges them otherwise goes on doing so, with one warning: the exchange is
    slow, but never wrong.

    Args:
        known: ``(tensor to the next stage or None, to the previous one or None, whether one comes
            from the previous stage, from the next) -> (shape from the previous, from the next)``;
            called before every transfer.
    """
    exchange = getattr(P2PCommunicator, "_communicate_shapes", None)
    if exchange is None or [*inspect.signature(exchange).parameters] != _ASKS_FOR_SHAPES:
        warnings.warn(
            "this Megatron-LM exchanges shapes between pipeline stages in a way that is not known "
            "here: they are exchanged before each transfer although the plan has them",
            stacklevel=2,
        )
        yield
        return

    def known_shapes(self: Any, *transfer: Any, **named: Any) -> tuple[list[int], list[int]]:
        del self
        return known(*transfer, **named)

    P2PCommunicator._communicate_shapes = known_shapes
    try:
        yield
    finally:
        P2PCommunicator._communicate_shapes = exchange


@contextlib.contextmanager
def around_passes(mark: Callable[[], None]) -> Iterator[None]:
    """Call a function before and after each forward and backward pass of Megatron's schedules.

    The passes of one model chunk, without the transfers before and after them.
    """

    def marked(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def run(*arguments: Any, **options: Any) -> Any:
            mark()
            result = step(*arguments, **options)
            mark()
            return result

        return run

    forward, backward = schedules.forward_step, schedules.backward_step
    schedules.forward_step, schedules.backward_step = marked(forward), marked(backward)
    try:
        yield
    finally:
        schedules.forward_step, schedules.backward_step = forward, backward


def unknown_to_split_backward(model: Any) -> Iterator[str]:
    """Functions of Megatron that split backward passes replace, and that take other arguments here.

    Args:
        model: a chunk in the data-parallel wrapper.
    """
    linear = layers.LinearWithGradAccumulationAndAsyncCommunication
    tensors = {f"tensor_{what}_{whom}" for what in ("send", "recv") for whom in ("prev", "next")}
    known: list[tuple[Any, str, set[str]]] = [
        (linear, "forward", {"grad_output_buffer", "wgrad_deferral_limit"}),
        (linear, "backward", {"ctx", "grad_output"}),
        (p2p_communication, "_p2p_ops", tensors),
        (p2p_communication, "_batched_p2p_ops", tensors),
        (P2PCommunicator, "_communicate_shapes", set(_ASKS_FOR_SHAPES)),
        (schedules, "forward_step", {"forward_step_func", "data_iterator", "model"}),
        (schedules, "backward_step", {"input_tensor", "output_tensor", "output_tensor_grad"}),
    ]
    groups = [*model.bucket_groups, *model.expert_parallel_bucket_groups]
    known += [(type(group), "register_grad_ready", {"param"}) for group in groups[:1]]
    for owner, name, names in known:
        function = getattr(owner, name, None)
        if function is None or not names <= inspect.signature(function).parameters.keys():
            yield f"{owner.__name__}.{name}"


def waits_for_sends(config: Any) -> bool:
    """True if the interleaved schedule waits for an output's transfer before it frees the output.

    From 0.18 on; earlier it freed at once, and could free a tensor that was on its way.
    """
    major, minor = map(int, megatron.core.__version__.split(".")[:2])
    return bool((major, minor) >= (0, 18) and config.deallocate_pipeline_outputs)


def counts_operations_of_samples() -> bool:
    """True if stock code counts floating-point operations by samples' lengths (from 0.18 on)."""
    from megatron.training import training

    return hasattr(training, "consume_seqlen_stats_in_iteration")


def pads_uneven_dispatch_inputs(config: Any) -> bool:
    """True if HybridEP pads its inputs to one length on all ranks, an option from 0.19 on."""
    return bool(getattr(config, "moe_hybridep_pad_uneven_dispatch_inputs", False))


def has_sequence_packing(config: Any) -> bool:
    """True if Megatron packs sequences itself, an option that only some releases have."""
    return bool(getattr(config, "sequence_packing_scheduler", None))


def modules_with_validate_args(arguments: Any, initialize: Any) -> list[Any]:
    """The modules of ``megatron.training`` in which ``validate_args`` is looked up.

    Until 0.17 ``initialize`` imports it by name.
    """
    return [arguments, initialize] if hasattr(initialize, "validate_args") else [arguments]


def local_gpt_layer_spec(config: Any) -> ModuleSpec:
    """Megatron's own layer spec without Transformer Engine, for this model's shape."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    options = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
        "normalization": config.normalization,
    }
    known = inspect.signature(get_gpt_layer_local_spec).parameters
    return get_gpt_layer_local_spec(**{k: v for k, v in options.items() if k in known})


def replace_final_norm(norm: Any) -> None:
    """Make transformer blocks built from a single layer spec use ``norm`` after the last layer."""
    transformer_block.LayerNormImpl = norm


def packed_submodules(submodules: Any, core_attention: type, norm: Any) -> Any:
    """A layer's submodules with another core attention and, if given, other norms."""
    attention = submodules.self_attention
    inner: dict[str, Any] = {"core_attention": core_attention}
    changes: dict[str, Any] = {}
    if norm is not None:
        inner |= {
            name: norm
            for name in ("q_layernorm", "k_layernorm", "kv_layernorm")
            if getattr(attention.submodules, name, None) is WrappedTorchNorm
        }
        changes |= {"input_layernorm": norm, "pre_mlp_layernorm": norm}
    changes["self_attention"] = dataclasses.replace(
        attention, submodules=dataclasses.replace(attention.submodules, **inner)
    )
    return dataclasses.replace(submodules, **changes)


def modules_with_multi_token_losses() -> list[Any]:
    """The modules of models in which ``process_mtp_loss`` is looked up; none before 0.17."""
    names = ("gpt.gpt_model", "mamba.mamba_model", "hybrid.hybrid_model")
    modules = []
    for name in names:
        with contextlib.suppress(ImportError):
            modules.append(importlib.import_module(f"megatron.core.models.{name}"))
    return [module for module in modules if hasattr(module, "process_mtp_loss")]


def what_multi_token_prediction_lacks() -> str:
    """Why this Megatron's multi-token prediction cannot run packed rows; empty if it can."""
    if not modules_with_multi_token_losses():
        return "of packed rows runs from Megatron-LM 0.17 on"
    rolled = [*inspect.signature(multi_token_prediction.roll_tensor).parameters]
    if rolled[:5] != ["tensor", "shifts", "dims", "cp_group", "packed_seq_params"]:
        return "of this Megatron-LM rolls its rows in a way that is not known here"
    return ""


def log_multi_token_loss(
    share: Tensor, guessed: Tensor, trained: Tensor, depth: int, depths: int
) -> None:
    """Add this rank's share of a depth's loss to Megatron's log, which averages over ranks.

    Args:
        share: times what stock code divides by.
        guessed: tokens that were; from 0.19 on.
        trained: of so many.
        depth: from 0 on.
        depths: how many there are.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    helper = multi_token_prediction.MTPLossLoggingHelper
    share = share * group.size()
    if hasattr(helper, "save_metrics_to_tracker"):
        helper.save_metrics_to_tracker(share, guessed, trained, depth, depths, avg_group=group)
    else:
        helper.save_loss_to_tracker(share, depth, depths, avg_group=group)


def multi_token_hits(*arguments: Any) -> tuple[Tensor, Tensor]:
    """How many tokens were guessed and how many were trained, as Megatron counts from 0.19 on."""
    count = getattr(multi_token_prediction, "_compute_mtp_acceptance_counts", None)
    none = torch.zeros((), device=torch.cuda.current_device())
    found: tuple[Tensor, Tensor] = (none, none) if count is None else count(*arguments)
    return found


def scale_moe_metrics(factor: float) -> None:
    """Multiply the losses that routers have recorded since the last report.

    Stock code divides these sums by its own number of micro-batches.

    Args:
        factor: that number over the number of micro-batches that ran.
    """
    for recorded in _moe_metrics().values():
        _values_of(recorded).mul_(factor)


def _moe_metrics() -> dict[str, Any]:
    """Megatron's own dict of what routers have recorded since the last report, by name."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # until 0.17
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        until_017: dict[str, Any] = get_moe_layer_wise_logging_tracker()
        return until_017
    metrics: dict[str, Any] = get_moe_metrics_tracker().metrics
    return metrics


def _values_of(recorded: Any) -> Tensor:
    """Of one name, the sums ``[layers]``."""
    values: Tensor = recorded["values"] if isinstance(recorded, dict) else recorded.values
    return values


def local_core_attention_name() -> tuple[Any, str]:
    """The module and the name in it from which local layer specs take their core attention."""
    from megatron.core.models import backends

    return backends, "DotProductAttention"


def fix_router_masks() -> None:
    """Let routers leave padding out, also in a row that is all padding. Patches Megatron once.

    Two faults of 0.16.1 to 0.19.2: the count for the expert bias multiplies a ``[tokens, experts]``
    map with a ``[tokens]`` mask, which does not broadcast; the load-balancing loss divides by the
    square of the number of real tokens, so that a placeholder's 0 becomes NaN.
    """
    from megatron.core.transformer.moe import router

    if getattr(router, "masks_are_fixed", False):
        return
    apply_expert_bias = router.TopKRouter._apply_expert_bias
    load_balancing_loss = router.switch_load_balancing_loss_func

    def with_second_axis(self: Any, routing_map: Tensor, padding_mask: Any = None) -> Any:
        if padding_mask is not None and padding_mask.dim() == routing_map.dim() - 1:
            padding_mask = padding_mask.unsqueeze(-1)
        return apply_expert_bias(self, routing_map, padding_mask=padding_mask)

    def of_at_least_one_token(*args: Any, total_num_tokens: Any, **kwargs: Any) -> Any:
        if torch.is_tensor(total_num_tokens):
            total_num_tokens = total_num_tokens.clamp(min=1)
        return load_balancing_loss(*args, total_num_tokens=total_num_tokens, **kwargs)

    router.TopKRouter._apply_expert_bias = with_second_axis
    router.switch_load_balancing_loss_func = of_at_least_one_token
    router.masks_are_fixed = True


def patch_for_cpu() -> None:
    """Replace the megatron-core functions that insist on CUDA tensors or Transformer Engine.

    Called by the CPU stand-in alone.
    """
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def get_rng_state(*args: Any, **kwargs: Any) -> Tensor:
        del args, kwargs
        return torch.get_rng_state()

    def set_rng_state(new_state: Tensor, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        torch.set_rng_state(new_state)

    def maybe_move_tensor_to_cpu(
        tensor: Any, as_numpy: bool = False, record_stream: bool = False
    ) -> Any:
        del record_stream
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    send_and_receive = p2p_communication._p2p_ops
    in_flight: collections.deque[Any] = collections.deque(maxlen=256)

    @functools.wraps(send_and_receive)
    def send_copies(**tensors: Any) -> Any:
        # The interleaved schedule frees an output while it is being sent, and drops the handle of
        # its last one. CUDA streams allow both. gloo reads the memory only when the receiver is
        # ready, and loses a message whose handle is dropped.
        for name in ("tensor_send_next", "tensor_send_prev"):
            if tensors.get(name) is not None:
                tensors[name] = tensors[name].detach().clone()
        requests = send_and_receive(**tensors)
        in_flight.extend(requests.values())
        return requests

    p2p_communication._p2p_ops = send_copies
    # The module's own setter waits for CUDA to be initialised, which never happens here.
    megatron_random._get_cuda_rng_state = get_rng_state
    megatron_random._set_cuda_rng_state = set_rng_state
    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 without Transformer Engine
        moe_utils.te_general_gemm = None
    if hasattr(multi_token_prediction, "is_inference_column_parallel_linear"):  # main, likewise
        multi_token_prediction.is_inference_column_parallel_linear = lambda layer: False
    # The wheels ship the compiled helper, but not the Makefile that would build it.
    dataset_utils.compile_helpers = lambda: None
