"""Samples that begin others, as turns of a trajectory do, computed once in verl's Megatron engine.

verl's forward function gets a micro-batch's samples as a nested tensor and returns nested outputs.
Ours calls it with the hosts alone and cuts every sample's outputs out of its host's, so what comes
before and behind it is verl's own: packing, context parallelism, losses.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch import DEFAULT_SCHEMA, Kind
from mcore_batching.batch.rows.prefixes import find_hosts
from mcore_batching.integrations.replacements import (
    Hook,
    HookError,
    Replacement,
    in_place_of,
    replacing,
)

UNSET = "unset MCORE_BATCHING_VERL_SHARE_PREFIXES"  # mends every refusal
_PACKAGE = "verl.models.mcore"
_FORWARD = "gptmodel_forward_model_engine"
_FUSED = "fused_forward_model_engine"
# Arguments of verl's logits processor with a value a token, and those that it takes out again where
# there is no multi-token prediction.
_PER_TOKEN = ("label", "temperature")
_OF_MTP = ("loss_mask", "response_attention_mask")
_SCHEMA = DEFAULT_SCHEMA.declare("temperature", Kind.PER_TOKEN)


class SharedPrefixes:
    """Finds hosts, and has verl compute them alone.

    Attributes:
        hook: to which verl's forward is still to be added; None: it is replaced.
    """

    def __init__(self) -> None:
        self.hook: Hook | None = None

    def hosts(self, batch: Any) -> Sequence[int]:
        """For each sample of verl's batch the one in whose segment it is computed, or itself."""
        state: Any = sys.modules.get("megatron.core.parallel_state")
        if state is None or not state.model_parallel_is_initialized():
            raise HookError(f"prefixes are shared in verl's Megatron engine alone: {UNSET}")
        input_ids = batch["input_ids"]
        if not input_ids.is_nested:
            raise HookError(f"prefixes are shared where input_ids are nested alone: {UNSET}")
        # At the first step: verl cannot import its forward while it loads its plugins.
        if self.hook is not None:
            _replace_forward(self.hook)
            self.hook = None
        columns: dict[str, list[Tensor]] = {"tokens": list(input_ids.unbind())}
        temperature = batch.get("temperature", None)
        if isinstance(temperature, Tensor) and temperature.dim():
            pairs = zip(temperature, columns["tokens"], strict=True)
            columns["temperature"] = [value.expand(len(row)) for value, row in pairs]
        return _hosts_of(columns)


def _hosts_of(columns: Mapping[str, Sequence[Tensor]]) -> Sequence[int]:
    return find_hosts(columns, _SCHEMA, [0] * len(columns["tokens"])).host


def _replace_forward(hook: Hook) -> None:
    forward = importlib.import_module(f"{_PACKAGE}.model_forward")
    fused = getattr(importlib.import_module(f"{_PACKAGE}.model_forward_fused"), _FUSED)
    hook.add(replacing(forward, _FORWARD, _forward, like=_forward_of_verl))
    hook.add(Replacement(_FUSED, fused, in_place_of(fused, _refuse_fused)))


def _forward_of_verl(
    model: Any,
    input_ids: Any,
    multi_modal_inputs: Any,
    logits_processor: Any = None,
    logits_processor_args: Any = None,
    value_model: Any = False,
    vision_model: Any = False,
    pad_token_id: Any = None,
    data_format: Any = "thd",
    mtp_enable_train: Any = False,
    local_cp_size: Any = None,
    forced_max_seqlen: Any = None,
    pad_to_length_bucket: Any = None,
    cp_layout: Any = "zigzag",
    router_padding_mask: Any = None,
    mtp_loss_normalization_factor: Any = None,
) -> Any:
    """The signature of verl's."""


def _refuse_fused(vision_model: bool = False) -> Any:
    del vision_model
    raise HookError(f"prefixes are not shared with use_fused_kernels: set it to False, or {UNSET}")


def _forward(
    original: Callable[..., Any],
    model: Any,
    input_ids: Tensor,
    multi_modal_inputs: Any,
    logits_processor: Any = None,
    logits_processor_args: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Outputs of every sample, of verl's forward over the hosts.

    Raises a `HookError` where the model, or what comes with the samples, does not allow it.
    """
    # verl plans and runs in two places: what the plan put into one row is found again here.
    given = dict(logits_processor_args or {})
    problems = list(_problems(model, multi_modal_inputs, given, options))
    if problems:
        raise HookError("\n  - ".join(["prefixes cannot be shared:", *problems]))
    arguments = {name: given[name] for name in _PER_TOKEN if name in given}
    columns = {"tokens": list(input_ids.unbind())}
    if "temperature" in arguments:
        columns["temperature"] = list(arguments["temperature"].detach().unbind())
    host = _hosts_of(columns)
    held = [i for i, own in enumerate(host) if own == i]
    outputs = original(
        model,
        _rows(input_ids, held),
        multi_modal_inputs,
        logits_processor,
        {name: _rows(values, held) for name, values in arguments.items()} or None,
        **options,
    )
    # A sample's outputs are the beginning of its host's, as both see the same tokens until there.
    # Gradients of tokens that several samples train add up, hence responses may overlap.
    place = {i: at for at, i in enumerate(held)}
    sources = [place[own] for own in host]
    lengths = [len(row) for row in columns["tokens"]]
    if isinstance(outputs, Mapping):
        return {name: _cut(values, sources, lengths) for name, values in outputs.items()}
    return _cut(outputs, sources, lengths)


def _problems(
    model: Any, multi_modal_inputs: Any, given: Mapping[str, Any], options: Mapping[str, Any]
) -> list[str]:
    from mcore_batching.megatron.checks.shared_prefixes import sharing_problems

    problems = list(sharing_problems([model]))
    if getattr(model.config, "enable_routing_replay", False):
        problems.append(f"verl replays experts sample by sample: set router_replay off, or {UNSET}")
    if multi_modal_inputs or options.get("vision_model"):
        problems.append(f"verl lays images out sample by sample: {UNSET}")
    if options.get("mtp_enable_train"):
        problems.append(f"multi-token prediction trains labels per sample: {UNSET}")
    if options.get("local_cp_size") is not None:
        problems.append(f"verl's dynamic context parallelism makes rows of its own: {UNSET}")
    unknown = sorted(set(given) - {*_PER_TOKEN, *_OF_MTP})
    if unknown:
        problems.append(f"this version of verl also passes {', '.join(unknown)}: {UNSET}")
    return problems


def _rows(values: Tensor, held: Sequence[int]) -> Tensor:
    rows = values.unbind()
    return torch.nested.as_nested_tensor([rows[i] for i in held], layout=torch.jagged)


def _cut(values: Tensor, sources: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Of every sample the beginning of its host's outputs."""
    if not values.is_nested:  # an earlier pipeline stage's hidden states: as they are
        return values
    nested: Any = values
    rows = nested.values().split(nested.offsets().diff().tolist())
    cut = [rows[at][:length] for at, length in zip(sources, lengths, strict=True)]
    return torch.nested.as_nested_tensor(cut, layout=torch.jagged)
