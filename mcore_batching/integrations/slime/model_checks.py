"""Checks of the model, for frameworks that plan in their rollout manager.

The manager has no model, and the framework builds rows itself. So a model that cannot run packed
rows is refused at the first hooked call that has it, and Mamba layers are told where samples end,
which slime's and miles' rows do not say.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mcore_batching.megatron import compat
from mcore_batching.megatron.checks.validation import prepare_packed_model
from mcore_batching.megatron.errors import PlanningFailedError
from mcore_batching.megatron.job.job import job_of
from mcore_batching.megatron.topology import model_chunks


def checking_model(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours`, with a check of the model before: a collective over all ranks, once per model.

    It raises `PlanningFailedError` on every rank if any rank's model cannot run packed rows.
    """
    signature = inspect.signature(original)

    def checked(*arguments: Any, **keywords: Any) -> Any:
        compat.packed_rows.end_states_with_samples()
        given = signature.bind(*arguments, **keywords).arguments
        if "model" in given and _is_planned(given):
            _check(given["args"], model_chunks(given["model"]))
        return ours(*arguments, **keywords)

    return checked


def _is_planned(given: dict[str, Any]) -> bool:
    # Other calls may be of one rank: slime's server runs data-parallel ranks separately.
    if not getattr(given["args"], "use_dynamic_batch_size", False):
        return False
    data = given["data_iterator"][0] if "data_iterator" in given else None
    rollout_data = given["rollout_data"] if data is None else getattr(data, "rollout_data", ())
    return "micro_batch_indices" in rollout_data


def _check(args: Any, chunks: list[Any]) -> None:
    job = job_of(args)
    if chunks[0] in job.memory.checked_models:
        return
    job.consensus.agree(
        "checking the model", lambda: prepare_packed_model(chunks), failure=PlanningFailedError
    )
    job.memory.checked_models.add(chunks[0])
