"""Differences between Megatron-LM versions, and nothing else.

The rest of the package calls `compat.<function>` and never reads a version. Run on megatron-core
0.16.1 and 0.19.2.
"""

from __future__ import annotations

import contextlib
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
from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer import multi_token_prediction
from torch import Tensor


def is_engines_attention(module: Any) -> bool:
    """True if a module is Megatron's wrapper of Transformer Engine's attention."""
    # Without it something that is no class stands for the wrapper.
    return HAVE_TE and isinstance(module, TEDotProductAttention)


def engine_versions() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Major and minor version of Transformer Engine and of the cuDNN that it runs."""
    from megatron.core.utils import get_te_version
    from transformer_engine.pytorch.utils import get_cudnn_version

    return get_te_version().release[:2], get_cudnn_version()[:2]


def class_of_forward(layer: Any) -> str:
    """Name of the Megatron class that has the layer's forward pass; empty if none has it."""
    forward = type(layer).forward
    if not str(getattr(forward, "__module__", "")).startswith("megatron.core."):
        return ""
    return str(forward.__qualname__.partition(".")[0])


def has_hybrid_model() -> bool:
    """True if this Megatron has `HybridModel` (from 0.18 on)."""
    return importlib.util.find_spec("megatron.core.models.hybrid") is not None


def packs_gated_delta_net(layer: Any) -> bool:
    """True if this Megatron's GatedDeltaNet runs packed rows (from 0.18 on)."""
    return hasattr(layer, "_resolve_cu_seqlens")


def packs_sparse_attention() -> bool:
    """True if this Megatron's DeepSeek sparse attention runs packed rows (from 0.19 on)."""
    from megatron.core.transformer import experimental_attention_variant

    name = f"{experimental_attention_variant.__name__}.dsa_layout"
    return importlib.util.find_spec(name) is not None


def what_mamba_lacks(context_parallel: int) -> str:
    """The packages that Mamba layers lack to run packed rows; empty if none."""
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer

    check = mamba_mixer._check_mamba_sequence_packing_support
    is_there, lacks = check(for_inference_not_training=False)
    if not is_there:
        return f"more than is installed: {lacks}"
    mend = "install it, or set --context-parallel-size 1"
    if context_parallel > 1 and mamba_context_parallel.tex is None:
        return f"Transformer Engine under context parallelism: {mend}"
    return ""


def mask_padding(chunk: Any) -> None:
    """Let a model's routers leave padding out: their layers take the mask from a row's parameters.
    Once for each model."""
    # HybridModel passes none to the layers of further tokens, nor does GPTModel before 0.18.
    if getattr(chunk, "masks_padding", False):
        return
    chunk.masks_padding = True
    for layer in chunk.modules():
        if getattr(getattr(layer, "mlp", None), "router", None) is not None:
            layer.register_forward_pre_hook(_with_padding_mask, with_kwargs=True)
            _fix_router_masks()


def _with_padding_mask(_: Any, arguments: Any, named: dict[str, Any]) -> Any:
    mask = getattr(named.get("packed_seq_params"), "own_padding_mask", None)
    return None if mask is None else (arguments, named | {"padding_mask": mask})


@functools.cache
def _fix_router_masks() -> None:
    """Let routers take a mask, also of a row that is all padding. Patches Megatron once.

    Three faults of 0.16.1 to 0.19.2 under a mask: the count for the expert bias multiplies a
    ``[tokens, experts]`` map with a ``[tokens]`` mask, which does not broadcast; the load-balancing
    loss divides by the square of the number of real tokens, so that a placeholder's 0 becomes NaN;
    the local count of tokens is summed over tensor- and context-parallel ranks in place, and from
    0.19 on multiplied by their number again. And a loss is logged with the model's group, where the
    router has the row's (`let_router_have_groups`): logs are summed once a step.
    """
    from megatron.core.transformer.moe import router

    apply_expert_bias = router.TopKRouter._apply_expert_bias
    load_balancing_loss = router.switch_load_balancing_loss_func
    count_tokens = router.get_tokens_per_expert_and_token_count
    attach_and_log = router.TopKRouter.attach_and_log_load_balancing_loss
    multiplies = multiplies_by_ranks()

    def with_second_axis(self: Any, routing_map: Tensor, padding_mask: Any = None) -> Any:
        if padding_mask is not None and padding_mask.dim() == routing_map.dim() - 1:
            padding_mask = padding_mask.unsqueeze(-1)
        return apply_expert_bias(self, routing_map, padding_mask=padding_mask)

    def of_at_least_one_token(*args: Any, total_num_tokens: Any, **kwargs: Any) -> Any:
        if torch.is_tensor(total_num_tokens):
            total_num_tokens = total_num_tokens.clamp(min=1)
        return load_balancing_loss(*args, total_num_tokens=total_num_tokens, **kwargs)

    def with_count_of_row(*args: Any, reduce_group: Any, **kwargs: Any) -> Any:
        per_expert, local, total = count_tokens(*args, reduce_group=reduce_group, **kwargs)
        tensor = parallel_state.get_tensor_model_parallel_group()
        if tensor.size() > 1 and not _includes(reduce_group, tensor):
            per_expert = reduce_from_tensor_model_parallel_region(per_expert, tensor)
            counted = total if torch.is_tensor(total) else per_expert.new_tensor(total)
            total = reduce_from_tensor_model_parallel_region(counted, tensor)
        # Only the loss's weight reads the local count. A rank's loss is its part of the row's, so
        # the weight is the row's tokens, however unevenly ranks hold padding.
        if torch.is_tensor(total):
            local = total / reduce_group.size() if multiplies else total
        return per_expert, local, total

    @functools.wraps(attach_and_log)
    def with_models_group(
        self: Any, probs: Tensor, weight: float, loss: Tensor, name: str, group: Any, **others: Any
    ) -> Any:
        group = getattr(self, "models_group", group)
        return attach_and_log(self, probs, weight, loss, name, group, **others)

    router.TopKRouter.attach_and_log_load_balancing_loss = with_models_group
    router.TopKRouter._apply_expert_bias = with_second_axis
    router.get_tokens_per_expert_and_token_count = with_count_of_row
    router.switch_load_balancing_loss_func = of_at_least_one_token


@functools.cache
def _includes(group: dist.ProcessGroup, part: dist.ProcessGroup) -> bool:
    """True of Megatron's groups; a row's own, of data- and context-parallel ranks, is without the
    tensor-parallel ones. Listed once, not in every pass of a router."""
    return {*dist.get_process_group_ranks(part)} <= {*dist.get_process_group_ranks(group)}


def multiplies_by_ranks() -> bool:
    """True if routers weight a rank's auxiliary losses by its tokens times the tensor- and
    context-parallel ranks (from 0.19 on), False if by its tokens alone."""
    from megatron.core.transformer.moe.router import TopKRouter

    code = inspect.unwrap(TopKRouter.attach_and_log_load_balancing_loss).__code__
    return {"tp_cp_group", "size"} <= set(code.co_names)


def scale_moe_metrics(micro_batches: int, *, rows: float, passes: int) -> None:
    """Turn the losses that routers have recorded since the last report into means, though stock
    code divides them by `micro_batches`: those that ranks of a row add up by a replica's `rows`,
    those that each rank has of its own tokens by its `passes`."""
    for recorded in _moe_metrics().values():
        entry = recorded if isinstance(recorded, dict) else vars(recorded)
        is_added_up = entry["reduce_group"] is not None
        entry["values"].mul_(micro_batches / (rows if is_added_up else passes))


def _moe_metrics() -> Any:
    """Megatron's own dict of what routers have recorded by name: a dict each until 0.17."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # until 0.17
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        return get_moe_layer_wise_logging_tracker()
    return get_moe_metrics_tracker().metrics


def modules_with_multi_token_losses() -> list[Any]:
    """The modules of models in which ``process_mtp_loss`` is looked up; none before 0.17."""
    modules = []
    for name in ("gpt.gpt_model", "mamba.mamba_model", "hybrid.hybrid_model"):
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


def recomputes_multi_token_rows() -> bool:
    """True if this Megatron recomputes multi-token prediction of packed rows (from 0.19 on)."""
    # 0.17 saves a row's parameters as tensors, 0.18 passes on a mask that it does not take.
    layer = multi_token_prediction.MultiTokenPredictionLayer
    return "padding_mask" in inspect.signature(layer._checkpointed_forward).parameters


def log_multi_token_loss(
    share: Tensor, guessed: Tensor, trained: Tensor, depth: int, depths: int
) -> None:
    """Add this rank's share of a depth's loss to Megatron's log, which averages over ranks.

    ``share``: times what stock code divides by. ``guessed``: tokens guessed right, of those
    ``trained``; logged from 0.19 on. ``depth``: from 0 on.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    helper = multi_token_prediction.MTPLossLoggingHelper
    share = share * group.size()
    if hasattr(helper, "save_metrics_to_tracker"):
        helper.save_metrics_to_tracker(share, guessed, trained, depth, depths, avg_group=group)
    else:
        helper.save_loss_to_tracker(share, depth, depths, avg_group=group)


def multi_token_hits(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Numbers of tokens guessed and of tokens trained, as Megatron counts them from 0.19 on."""
    count = getattr(multi_token_prediction, "_compute_mtp_acceptance_counts", None)
    if count is None:
        return (torch.zeros((), device=torch.cuda.current_device()),) * 2
    found: tuple[Tensor, Tensor] = count(*arguments)
    return found


def packed_seq_params(
    cu_seqlens: Tensor,
    max_seqlen: int,
    host_cu_seqlens: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> PackedSeqParams:
    """Megatron's THD parameters for a row of padded sequences.

    Args:
        cu_seqlens: int32 ``[sequences + 1]`` offsets in the full row, before context-parallel
            slicing.
        max_seqlen: longest padded sequence, in tokens.
        host_cu_seqlens: the same offsets as Python ints.
        group: ranks that share the row, where rows differ in it; None: the model's own.
    """
    # As stock Megatron does, the offsets of the padded sequences are given as the real ones, as
    # Transformer Engine's context-parallel attention wants it: trailing padding attends to its own
    # sequence, and causal masking hides it from every real token.
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
    )
    params.host_cu_seqlens = tuple(host_cu_seqlens)
    if group is not None:
        params.cp_group, params.local_cp_size = group, group.size()
    return params


def end_states_with_samples() -> None:
    """Let Mamba layers begin anew with every sample of a row, once the model is built."""
    # From 0.17 on they do by `seq_idx` alone. Megatron makes it where `total_tokens` is given from
    # the start, but then the host waits for the device; other layers do not read it.
    mixer = sys.modules.get("megatron.core.ssm.mamba_mixer")
    if mixer is None or not hasattr(PackedSeqParams, "seq_idx"):
        return
    if hasattr(mixer.MambaMixer, "states_end_with_samples"):
        return
    ssm_training = mixer.MambaMixer._ssm_training

    def with_sequences(self: Any, inputs: Tensor, packed_seq_params: Any = None) -> Tensor:
        params = packed_seq_params
        if params is not None and params.seq_idx is None:
            padded = params.cu_seqlens_q_padded
            offsets = params.cu_seqlens_q if padded is None else padded
            numbers = torch.arange(len(offsets) - 1, dtype=torch.int32, device=offsets.device)
            # Of each token, in the whole row: [1, tokens].
            of_tokens = numbers.repeat_interleave(offsets.diff(), output_size=len(inputs))
            params.seq_idx = of_tokens[None]
        output: Tensor = ssm_training(self, inputs, packed_seq_params)
        return output

    mixer.MambaMixer._ssm_training = with_sequences
    mixer.MambaMixer.states_end_with_samples = True


def let_rows_have_groups(attention: Any) -> None:
    """Let an attention layer rotate positions by the row's group instead of the model's."""
    # Core attentions read the group in the row's parameters; the rotation before them reads the
    # layer's `pg_collection.cp`.
    _follow_rows(attention, attention.pg_collection, "cp")
    # Megatron makes it where the model's own size is above 1 alone.
    if HAVE_TE and TEDotProductAttention.cp_stream is None and torch.cuda.is_available():
        TEDotProductAttention.cp_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]


def let_router_have_groups(layer: Any, router: Any) -> None:
    """Let the router of a layer sum the load of experts over the ranks that share a row."""
    if not hasattr(router, "models_group"):
        router.models_group = router.tp_cp_group
    _follow_rows(layer, router, "tp_cp_group")


def _follow_rows(layer: Any, owner: Any, name: str) -> None:
    """Replace a group of ``owner`` by the row's while a layer runs forward, which it does again,
    with the same parameters, where backward computes whole layers anew."""
    if hasattr(layer, "groups_of_rows"):
        return
    layer.groups_of_rows = []
    layer.register_forward_pre_hook(functools.partial(_take_group, owner, name), with_kwargs=True)
    layer.register_forward_hook(functools.partial(_give_back, owner, name), always_call=True)


def _take_group(owner: Any, name: str, layer: Any, _: Any, named: dict[str, Any]) -> None:
    params = named.get("packed_seq_params")
    layer.groups_of_rows.append(getattr(owner, name))
    if params is not None and params.cp_group is not None:
        setattr(owner, name, params.cp_group)


def _give_back(owner: Any, name: str, layer: Any, *unused: Any) -> None:
    setattr(owner, name, layer.groups_of_rows.pop())


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value inside a ``with`` block."""
    own = vars(owner)
    was_there, before = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if was_there:
            setattr(owner, name, before)
        else:  # of the class
            delattr(owner, name)


def waits_for_sends(config: Any) -> bool:
    """True if the interleaved schedule waits for an output's transfer before it frees it."""
    # Before 0.18 it freed at once, and could free a tensor that was on its way.
    major, minor = map(int, megatron.core.__version__.split(".")[:2])
    return bool((major, minor) >= (0, 18) and config.deallocate_pipeline_outputs)


_PARAMETERS_OF_EXCHANGE = ["self", "tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next"]


@contextlib.contextmanager
def shapes_of_transfers(known: Callable[..., tuple[list[int], list[int]]]) -> Iterator[None]:
    """Take the shapes of what stages receive from a function, called before every transfer, in
    place of an exchange: ``(tensor to the next stage or None, to the previous one or None, whether
    one comes from the previous stage, from the next) -> (shape from the previous, from the next)``.
    """
    exchange = getattr(P2PCommunicator, "_communicate_shapes", None)
    # The exchange is slow, but never wrong.
    if exchange is None or [*inspect.signature(exchange).parameters] != _PARAMETERS_OF_EXCHANGE:
        warnings.warn(
            "this Megatron-LM exchanges shapes between pipeline stages in a way that is not known "
            "here: each transfer waits for its exchange",
            stacklevel=2,
        )
        yield
        return

    with replaced(P2PCommunicator, "_communicate_shapes", staticmethod(known)):
        yield


@contextlib.contextmanager
def around_passes(mark: Callable[[], None]) -> Iterator[None]:
    """Call a function before and after each pass of one model chunk, without its transfers."""

    forward, backward = schedules.forward_step, schedules.backward_step
    with (
        replaced(schedules, "forward_step", functools.partial(_marked, mark, forward)),
        replaced(schedules, "backward_step", functools.partial(_marked, mark, backward)),
    ):
        yield


def _marked(
    mark: Callable[[], None], step: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    mark()
    result = step(*arguments, **options)
    mark()
    return result
