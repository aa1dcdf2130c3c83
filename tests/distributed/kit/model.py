"""The small model of the tests: its arguments, optimizer, and weights cut for every layout."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import bootstrap
import torch
from bootstrap import build_model, pipeline_config
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from kit import cpu_kernels
from kit.samples import CAP_TOKENS, VOCABULARY
from mcore_batching.megatron import packed_layer_spec
from mcore_batching.planning import ParallelDims

MAX_SEQUENCE_LENGTH = 256
# A large epsilon keeps Adam's first step smooth: with a small one it is a sign function, which
# turns rounding of gradients near zero into differences of twice the learning rate.
ADAM = {"lr": 1e-2, "adam_eps": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.95}
CLIP_GRAD = 1.0
ROUTING = {"layers": 4, "experts": 4, "top_k": 2}
"""Of a model with experts."""
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_grouped_gemm": False,
}
MAMBA = {
    "mamba_num_groups": 2,
    "mamba_head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_state_dim": 8,
}
GATED_DELTA_NET = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
}
SPARSE_ATTENTION = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 8,
    "dsa_indexer_topk": 256,  # all of a sample
    "dsa_indexer_rotate_activation": False,  # bfloat16 alone has it
    "dsa_indexer_scoring_relu": False,  # with it many keys have a score of 0: which count is open
    "cp_comm_type": "allgather",
}
LATER_TOKENS = {"mtp_loss_scaling_factor": 0.3, "mtp_num_layers": 1}
HYBRID = {"hybrid-moe": "*E*E", "hybrid-mtp-moe": "*E*E/*E"}
"""Kinds that are a `HybridModel` of these layers; those of `kit.random_model` have others."""
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": EXPERTS,
    "replay": EXPERTS | {"moe_enable_routing_replay": True},  # told which experts to take
    "mla": LATENT,
    "mamba": MAMBA,  # three of four layers with Mamba for attention
    "mtp-moe": EXPERTS | LATER_TOKENS | {"mtp_num_layers": 2},
    "hybrid-moe": EXPERTS | {"is_hybrid_model": True},
    "hybrid-mtp-moe": EXPERTS | LATER_TOKENS | {"is_hybrid_model": True},
    "hybrid-mla": LATENT,
    "hybrid-mamba": MAMBA,
    "hybrid-gdn": GATED_DELTA_NET,
    "hybrid-dsa": SPARSE_ATTENTION | LATENT,
}
"""What models have beside small dense layers with grouped-query attention."""
MERGED = {
    ("in_proj", 168): (64, 64, 16, 16, 8),
    ("conv1d", 96): (64, 16, 16),
    ("in_proj", 208): (32, 32, 64, 64, 8, 8),
    ("conv1d", 128): (32, 32, 64),
}
"""Weights of several projections, by what their names hold and by rows, with the rows of each; the
first two are Mamba's, the others GatedDeltaNet's. Tensor-parallel ranks have a part of each."""


def arguments(dims: ParallelDims, **changes: Any) -> SimpleNamespace:
    """Megatron's arguments, as far as the engine reads them; plans do not depend on times."""
    defaults = {
        "max_tokens_per_gpu": CAP_TOKENS // dims.context_parallel,
        "global_batch_size": None,
        "seq_length": 1,
        "dynamic_batch_cost_model": "fixed",
    }
    return SimpleNamespace(**defaults | changes)


def transformer_config(kind: str, **settings: Any) -> TransformerConfig:
    """A small float32 model of one of `KINDS`."""
    options: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "pipeline_dtype": torch.float32,
        "params_dtype": torch.float32,
        "deallocate_pipeline_outputs": True,
        "calculate_per_token_loss": True,
        **KINDS[kind],
    }
    if KINDS[kind].get("multi_latent_attention"):
        return MLATransformerConfig(**options | settings)
    return TransformerConfig(**options | {"num_query_groups": 2} | settings)


def layer_spec(kind: str, attention_layer: ModuleSpec, config: TransformerConfig) -> Any:
    """The layers of a model kind, of which this is one with attention."""
    return cpu_kernels.with_mamba(attention_layer, config) if kind == "mamba" else attention_layer


def small_model(
    dims: ParallelDims,
    kind: str = "dense",
    ddp: DistributedDataParallelConfig | None = None,
    **settings: Any,
) -> list[Any]:
    """This rank's chunks in the data-parallel wrapper, with the same random weights each time:
    tensor-parallel ranks have parts of the same ones, stages start from the same seed."""
    torch.manual_seed(22)
    config = transformer_config(kind, **pipeline_config(dims) | settings)
    # Of one stage: a hybrid model's pattern is not cut.
    options = {"hybrid_layer_pattern": HYBRID[kind]} if kind in HYBRID else {}
    return packed_model(kind, config, ddp, **options)


def packed_model(
    kind: str, config: TransformerConfig, ddp: Any, trained: str = "all", **options: Any
) -> list[Any]:
    """This rank's chunks, with layers of this package, trained as far as `freeze` leaves them."""
    options |= {"vocab_size": VOCABULARY, "max_sequence_length": MAX_SEQUENCE_LENGTH}
    if options.get("hybrid_layer_pattern"):
        cpu_kernels.hybrid_spec()
    else:
        options["spec"] = lambda config: layer_spec(kind, packed_layer_spec(config), config)
    if trained == "all":
        return build_model(config, ddp=ddp, **options)
    model = build_model(config, wrap=False, **options)
    for chunk in model:
        freeze(trained, chunk)  # of what is frozen by then the wrapper has no gradients
    return list(bootstrap._wrapped(config, model, ddp))


def quick_model(shape: ParallelDims, longest: int) -> list[Any]:
    """A layer in each chunk, which computes in no time."""
    config = transformer_config(
        "moe" if shape.expert_parallel > 1 else "dense",
        num_layers=shape.pipeline_parallel * shape.virtual_pipeline,
        hidden_size=8,
        ffn_hidden_size=8,
        **pipeline_config(shape),
    )
    return build_model(config, vocab_size=VOCABULARY, max_sequence_length=longest)


def freeze(trained: str, chunk: Any) -> None:
    """``"frozen"``: train the output projections of attention alone; ``"lora"``: put adapters
    beside all that attention projects, and train these alone."""
    if trained == "lora":
        for layer in chunk.decoder.layers:
            attention = layer.self_attention
            attention.linear_qkv = Adapted(attention.linear_qkv)
            attention.linear_proj = Adapted(attention.linear_proj)
        if hasattr(chunk, "embedding"):  # else Megatron's recomputed layers have no gradients
            chunk.embedding.register_forward_hook(lambda *call: call[2].requires_grad_())
    part = {"frozen": "linear_proj", "lora": "adapter"}[trained]
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(part in name)


class Adapted(torch.nn.Module):
    """A linear layer, and beside it a low-rank one, cut over tensor-parallel ranks as it is."""

    RANK = 4

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear = linear
        options = {"config": linear.config, "init_method": linear.config.init_method}
        options |= {"bias": False, "skip_bias_add": True}
        # What goes in is whole beside columns, and a part beside rows; so is what comes out.
        make, down, up = ColumnParallelLinear, {"gather_output": True}, {"gather_output": False}
        if isinstance(linear, RowParallelLinear):
            make = RowParallelLinear
            down, up = {"input_is_parallel": True}, {"input_is_parallel": False}
        self.adapter_down = make(linear.input_size, self.RANK, **options | down)
        self.adapter_up = make(self.RANK, linear.output_size, **options | up)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Any]:
        output, bias = self.linear(inputs)
        return output + self.adapter_up(self.adapter_down(inputs)[0])[0], bias


def adam(
    model: list[Any], distributed: bool, overlap_gather: bool = False, bf16: bool = False
) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        weight_decay=0.0,
        clip_grad=CLIP_GRAD,
        use_distributed_optimizer=distributed,
        overlap_param_gather=overlap_gather,
        bf16=bf16,
        **ADAM,
    )
    return get_megatron_optimizer(config, model)


def no_optimizer() -> SimpleNamespace:
    """In place of an optimizer, which changes no weights and leaves gradients as they are."""
    return SimpleNamespace(
        zero_grad=lambda: None, scale_loss=lambda x: x, step=lambda: (True, 0.0, 0)
    )


def named_parameters(model: list[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of this rank under the names they have in the whole, unsharded model."""
    for chunk in model:
        bare = unwrap_model(chunk)
        numbers = [layer.layer_number - 1 for layer in bare.decoder.layers]
        for name, parameter in bare.named_parameters():
            local = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
            whole = f"decoder.layers.{numbers[int(local[1])]}.{local[2]}" if local else name
            yield re.sub(r"local_experts\.(\d+)", _global_expert, whole), parameter


def _global_expert(match: re.Match[str]) -> str:
    local = 4 // parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * local
    return f"local_experts.{first + int(match[1])}"


def local_part(name: str, whole: Tensor, parameter: torch.nn.Parameter) -> Tensor:
    """The part of a whole weight (or gradient) that this tensor-parallel rank holds."""
    whole = whole.to(parameter.device)
    if whole.shape == parameter.shape:
        return whole
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    dim = max(parameter.partition_dim, 0)  # 0.16 does not tell that of Mamba's convolution
    rows = whole.shape[dim]
    sections = next(
        (sizes for (part, size), sizes in MERGED.items() if part in name and size == rows), (rows,)
    )
    if "linear_fc1" in name:  # gate and up
        sections = (rows // 2, rows // 2)
    return torch.cat([part.chunk(size, dim)[rank] for part in whole.split(sections, dim)], dim)


@contextlib.contextmanager
def counted_tokens(model: list[Any]) -> Iterator[list[int]]:
    """Tokens that this rank's embedding gets in each call inside the block, padding among them."""
    seen: list[int] = []
    hooks = [
        module.register_forward_hook(lambda *call: seen.append(call[1][0].numel()))
        for chunk in model
        for name, module in chunk.named_modules()
        if name.endswith("word_embeddings")
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
