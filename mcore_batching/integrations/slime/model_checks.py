"""The model of a framework that plans in its rollout manager, looked at where a call shows it.

The manager plans without a model, and the framework makes rows itself. So what no packed row can
run on is refused at the first call that shows the model, and Mamba layers are told where samples
end, which slime's and miles' rows leave out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from mcore_batching.megatron import compat
from mcore_batching.megatron.checks.validation import prepare_packed_model
from mcore_batching.megatron.errors import PlanningFailedError
from mcore_batching.megatron.job.job import job_of
from mcore_batching.megatron.topology import model_chunks


def checking_model(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours`, which looks at the model first: a collective over all ranks, once for each model.

    Only at calls that run the manager's plan. slime's server runs each data-parallel rank by
    itself.

    Args:
        original: the framework's function, for its parameters.
        ours: called with the same arguments.

    Returns:
        the function; raises `PlanningFailedError` on every rank where the model of any cannot run
        packed rows.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        compat.end_states_with_samples()
        given = signature.bind(*arguments, **keywords).arguments
        if "model" in given and _is_planned(given):
            _check(given["args"], model_chunks(given["model"]))
        return ours(*arguments, **keywords)

    return checked


def _is_planned(given: dict[str, Any]) -> bool:
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
