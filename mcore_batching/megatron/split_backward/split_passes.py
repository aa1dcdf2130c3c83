"""`split_backward`: what holds while Megatron's own schedule runs a step of split backward passes.

Post, then W, then wait: a stage's weight gradients run once it has sent what its neighbours wait
for and asked for what it will wait for itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from mcore_batching.megatron import compat
from mcore_batching.megatron.split_backward.linear_layers import (
    MEGATRONS,
    EngineStore,
    leaving_weights,
)
from mcore_batching.megatron.split_backward.weight_gradients import WeightGradients


@contextlib.contextmanager
def split_backward(model: list[Any], deferred: WeightGradients | None) -> Iterator[None]:
    """Split the backward passes of a step that runs inside; without ``deferred`` none.

    To be entered after whatever else replaces the hooks of the model's configuration.
    """
    if deferred is None:
        yield
        return
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(compat.schedules.replaced(owner, name, value))

        kept = [weight for chunk in model for weight in _weights_of_output(chunk)]
        backward = leaving_weights(MEGATRONS.backward, deferred, kept)
        # Also of layers that run outside of a split pass: it then does what it always did.
        replace(MEGATRONS, "backward", staticmethod(backward))
        stack.enter_context(compat.schedules.in_passes(deferred.passing))
        # Megatron's communicator finds these in its module, at each transfer.
        for name in ("_p2p_ops", "_batched_p2p_ops"):
            post = getattr(p2p_communication, name)
            replace(p2p_communication, name, _posting(post, deferred, interleaved=len(model) > 1))
        for owner, name, value in _of_reductions(model, deferred):
            replace(owner, name, value)
        for chunk in model:
            for module in compat.layers.engine_linears(chunk).values():
                replace(module, "wgrad_store", EngineStore(module, deferred))
        try:
            yield
            deferred.flush()  # nothing, unless gradients are added up over ranks later
        finally:
            deferred.clear()


def _weights_of_output(chunk: Any) -> list[Tensor]:
    """Weights of a chunk's output layer, never left: tokens times vocabulary would wait."""
    bare = unwrap_model(chunk)
    layer = getattr(bare, "output_layer", None)
    if layer is None:
        return []
    tied = getattr(bare, "shared_embedding_or_output_weight", lambda: None)()
    return [weight for weight in (layer.weight, tied) if weight is not None]


def _posting(
    post: Callable[..., Any], deferred: WeightGradients, *, interleaved: bool
) -> Callable[..., Any]:
    """A function that posts transfers, of whose requests those run W first that may be waited for
    long."""

    @functools.wraps(post)
    def posted(**tensors: Any) -> Any:
        requests = post(**tensors)
        received = (tensors["tensor_recv_prev"], tensors["tensor_recv_next"])
        receives = any(each is not None for each in received)
        # The interleaved schedule waits for what it has sent, too, and has asked for its next input
        # by then; the other one asks after such a wait, which so has to be short, but for the last.
        if not (receives or interleaved or deferred.passes_are_over):
            return requests
        if isinstance(requests, dict):
            return {name: _Request(each, deferred) for name, each in requests.items()}
        return [_Request(each, deferred) for each in requests]

    return posted


class _Request:
    """A transfer that is waited for once the weight gradients due by then are under way."""

    def __init__(self, request: Any, deferred: WeightGradients) -> None:
        self._request, self._deferred = request, deferred

    def wait(self, *arguments: Any) -> Any:
        wait = functools.partial(self._request.wait, *arguments)
        if self._deferred.passes_are_over:
            return self._deferred.wait_after_flush(wait)
        self._deferred.run_due()
        return wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _of_reductions(
    model: list[Any], deferred: WeightGradients
) -> Iterator[tuple[Any, str, Callable[..., Any] | list[Any]]]:
    """Owner, name and replacement of each function that adds up gradients over ranks, W first."""
    config = get_model_config(model[0])
    finalize, sync = config.finalize_model_grads_func, config.grad_sync_func

    def finalize_all(*arguments: Any, **options: Any) -> Any:
        deferred.flush()
        return finalize(*arguments, **options)

    def syncing(function: Callable[..., Any]) -> Callable[..., Any]:
        def sync_some(parameters: Any) -> Any:
            some = list(parameters)
            deferred.flush(some)
            return function(some)

        return sync_some

    def held(group: Any) -> Callable[..., None]:
        register = group.register_grad_ready

        # Of all parameters, left or not: else replicas with other plans reduce in other orders.
        def hold(parameter: Any, *rest: Any, **named: Any) -> None:
            if group.is_last_microbatch:
                deferred.hold(parameter, lambda: register(parameter, *rest, **named))

        return hold

    if finalize is not None:
        yield config, "finalize_model_grads_func", finalize_all
    if sync is not None:
        several = isinstance(sync, list)
        yield config, "grad_sync_func", [*map(syncing, sync)] if several else syncing(sync)
    for chunk in model:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            yield group, "register_grad_ready", held(group)
