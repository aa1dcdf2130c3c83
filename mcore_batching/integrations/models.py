"""The model that a framework's batch is for: its check, and the costs of its layers.

verl and SkyRL hand the functions that are replaced a batch alone. The model is their caller's, an
engine or a worker; NeMo-RL's lives in other processes, so there its config is asked for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from mcore_batching.batch.agreement.consensus import Consensus
from mcore_batching.planning import ConfigError, CostModel
from mcore_batching.planning.costs.layers_of import config_of_json, first_guess, language_model
from mcore_batching.planning.json_text import read_document

# By the first chunk of each model that was checked; a model that is gone takes its costs along.
_costs: WeakKeyDictionary[Any, CostModel] = WeakKeyDictionary()


def caller_with(attribute: str) -> Any:
    """The nearest caller's ``self`` with this attribute of its own; None where no caller has it."""
    # The frameworks hand over a batch alone, and no public name leads from there to the model.
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if attribute in getattr(owner, "__dict__", ()):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def checked_costs(chunks: list[Any], consensus: Consensus, *, packs_rows: bool) -> CostModel:
    """The first guess of a Megatron model's costs. A collective at the first call with it.

    Where samples share rows (``packs_rows``), a model that cannot run these on some rank is a
    `RankFailedError` on every rank.
    """
    # Megatron is there where its models are; other engines' processes may lack it.
    from megatron.core.utils import get_model_config, unwrap_model

    from mcore_batching.megatron import topology
    from mcore_batching.megatron.checks.validation import prepare_packed_model

    if chunks[0] not in _costs:
        if packs_rows:
            consensus.agree("checking the model", lambda: prepare_packed_model(chunks))
        vocabulary, config = topology.vocabulary_size(chunks), get_model_config(chunks[0])
        _costs[chunks[0]] = topology.first_guess(vocabulary, config, unwrap_model(chunks[0]))
    return _costs[chunks[0]]


def costs_of_config(model: Any, **sizes: int) -> CostModel:
    """The first guess of a model's costs from its config, for one of NeMo-RL's.

    The config is names and values, as in Hugging Face's ``config.json`` or Megatron's; an object
    with ``to_dict``; or the path of a ``config.json`` or of its folder. ``sizes`` of the job count
    where it does not say.

    Raises:
        ConfigError: the path cannot be read, or a size is missing or out of range.
    """
    if hasattr(model, "to_dict"):
        model = model.to_dict()
    if isinstance(model, Mapping):
        return first_guess(sizes | language_model(model))
    path = os.fspath(model)
    path = os.path.join(path, "config.json") if os.path.isdir(path) else path
    try:
        text = read_document(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}; give the folder of a model on this machine, or "
            "transformers.AutoConfig.from_pretrained(name)"
        ) from error
    return first_guess(sizes | config_of_json(text))
