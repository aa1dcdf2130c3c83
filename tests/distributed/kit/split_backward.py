"""Jobs that compare steps of split backward passes with the same steps of whole ones."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.tensor_parallel import ColumnParallelLinear, layers
from megatron.core.utils import get_model_config

from kit.blocking_p2p import blocking_p2p
from kit.exactness import arguments, log_probs_of
from kit.faults import my_samples
from kit.model import (
    HYBRID,
    MAX_SEQUENCE_LENGTH,
    adam,
    layer_spec,
    model_options,
    named_parameters,
    transformer_config,
)
from kit.objective import packed_objective
from kit.samples import VOCABULARY
from mcore_batching.megatron import (
    check_settings,
    forward_only,
    get_data_iterator,
    packed_layer_spec,
    schedule_of,
    train_step,
)
from mcore_batching.megatron.job.job import job_of
from mcore_batching.megatron.split_backward import linear_layers, split_passes
from mcore_batching.megatron.split_backward.plan import LastStep, planned_split
from mcore_batching.megatron.split_backward.weight_gradients import WeightGradients
from mcore_batching.megatron.standalone.bootstrap import build_model, pipeline_config
from mcore_batching.megatron.step import prepare
from mcore_batching.planning import ParallelDims, validate_plan
from mcore_batching.planning.pipeline import PARTS, SplitStage

ALL = {"dynamic_batch_split_backward": "all"}
STEPS = 3


def small_model(
    dims: dict[str, Any],
    kind: str = "dense",
    ddp: dict[str, Any] | None = None,
    tied: bool = False,
    aligned: bool = False,
    **settings: Any,
) -> list[Any]:
    """A model of random weights on a layout, in Megatron's data-parallel wrapper.

    Args:
        dims: the layout.
        kind: of `transformer_config`, or ``"engine"``: dense, with layers as Transformer Engine's.
        ddp: of the wrapper.
        tied: one weight for embedding and output layer.
        aligned: stages start to reduce gradients together (``--align-grad-reduce``).
        settings: of the model.
    """
    shape = ParallelDims(**dims)
    own = "dense" if kind == "engine" else kind
    if settings.get("bf16"):
        settings |= {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    config = transformer_config(own, **pipeline_config(shape) | settings)
    options = model_options(own, shape.pipeline_parallel * shape.virtual_pipeline)
    if kind not in HYBRID:
        options["spec"] = functools.partial(_layer_spec, kind)
    model = build_model(
        config,
        vocab_size=VOCABULARY,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True, **(ddp or {})),
        **({"share_embeddings_and_output_weights": True} if tied else {}),
        **options,
    )
    get_model_config(model[0]).finalize_model_grads_func = finalize_model_grads
    if aligned:
        syncs = [chunk.start_grad_sync for chunk in model]
        get_model_config(model[0]).grad_sync_func = syncs if len(syncs) > 1 else syncs[0]
    return model


def _layer_spec(kind: str, config: Any) -> Any:
    spec = layer_spec("dense" if kind == "engine" else kind, packed_layer_spec(config), config)
    if kind == "engine":
        mlp = spec.submodules.mlp  # later releases have the arguments in a `partial`
        parts = getattr(mlp, "keywords", None) or vars(mlp)
        parts["submodules"].linear_fc1 = EngineLinear
    return spec


class EngineLinear(ColumnParallelLinear):
    """Follows the protocol of Transformer Engine's linear modules with their store.

    Of newer ones, which take the store in their forward pass if it delays then.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.fuse_wgrad_accumulation, self.use_bias = True, False
        self.is_first_microbatch = True
        self.wgrad_store = SimpleNamespace(delay_wgrad_compute=lambda: False)

    @property
    def _forward_impl(self) -> Any:
        return self._multiplied

    @_forward_impl.setter
    def _forward_impl(self, value: Any) -> None:
        """Left as it is: Megatron's forward pass sets its own."""

    def _multiplied(self, input: Any, weight: Any, **unused: Any) -> Any:
        del unused
        is_first, self.is_first_microbatch = self.is_first_microbatch, False
        store = self.wgrad_store if self.wgrad_store.delay_wgrad_compute() else None
        return _EngineProduct.apply(input, weight, store, is_first)


class _EngineProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Any, weight: Any, store: Any, is_first: bool) -> Any:
        ctx.save_for_backward(inputs, weight)
        ctx.store, ctx.is_first = store, is_first
        return inputs.matmul(weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        inputs, weight = ctx.saved_tensors

        def add(inputs: Any, gradient: Any) -> None:
            made = gradient.flatten(0, 1).t().matmul(inputs.flatten(0, 1))
            # As Transformer Engine, whose first micro-batch need find no zeros there.
            (weight.main_grad.copy_ if ctx.is_first else weight.main_grad.add_)(made)

        if ctx.store is not None and ctx.store.delay_wgrad_compute():
            ctx.store.put([inputs, gradient], add)
        else:
            add(inputs, gradient)
        weight.grad_added_to_main_grad = True
        return gradient.matmul(weight), torch.empty_like(weight), None, None


@contextlib.contextmanager
def fused_kernels() -> Iterator[None]:
    """Stand-ins of Megatron's kernels that multiply and add at once."""

    def add(inputs: Any, gradient: Any, main_grad: Any) -> None:
        main_grad.addmm_(gradient.t(), inputs)

    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add)
    with (
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", kernels, create=True),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
    ):
        yield


def some_split(job: Any, schedule: Any, step: int) -> tuple[SplitStage, ...]:
    """A plan of some passes: every third is whole, and parts run here and there in the second half.

    Another one on each data-parallel rank.
    """
    rank = parallel_state.get_data_parallel_rank()
    stages = []
    for stage, (split, _) in enumerate(planned_split(job, schedule, step)):
        chosen = [each and (at + rank) % 3 > 0 for at, each in enumerate(split)]
        later = len(split) // 2
        parts = [(at + stage + rank) % 4 * 3 * (at > later) for at in range(len(split))]
        stages.append(SplitStage(tuple(chosen), tuple(parts)))
    return tuple(stages)


def left_to_the_end(job: Any, schedule: Any, step: int) -> tuple[SplitStage, ...]:
    """A plan of which all passes are split, and all of W runs after the last."""
    stages = planned_split(job, schedule, step)
    return tuple(SplitStage(split, (0,) * len(split)) for split, _ in stages)


def last_split(job: Any, schedule: Any, step: int) -> tuple[SplitStage, ...]:
    """A plan of which the last stage alone splits passes, and makes up for each at once."""
    *others, (split, _) = planned_split(job, schedule, step)
    whole = [SplitStage((False,) * len(each.split), (0,) * len(each.split)) for each in others]
    return (*whole, SplitStage(split, (0, *(PARTS * each for each in split[:-1]))))


def compare_blocking(**parameters: Any) -> dict[str, Any]:
    """`compare_steps`, where transfers between stages block as NCCL's do."""
    with blocking_p2p():
        return compare_steps(**parameters)


def compare_steps(
    dims: dict[str, Any],
    planner: dict[str, Any] | None = None,
    spread: str = "uneven",
    some: bool = False,
    fused: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Some steps with split backward passes and the same with whole ones, from the same weights.

    Before each step forward passes alone, as of an evaluation.

    Args:
        dims: the layout.
        planner: arguments.
        spread: of the samples over ranks.
        some: split some passes, others on each data-parallel rank; else all.
        fused: with kernels that multiply and add at once.
        settings: of `small_model`.

    Returns:
        ``gradients`` and ``weights``, the largest differences after any step, relative to the
        tensor's largest entry: 0.0 means equal to the bit; the most ``bytes`` that waited, and
        what the plan allows; names of weights whose gradients were ``left``; ``restored``: nothing
        is left of the hooks.
    """
    shape = ParallelDims(**dims)
    with contextlib.ExitStack() as stack:
        if fused:
            stack.enter_context(fused_kernels())
            settings["gradient_accumulation_fusion"] = True
        model = small_model(dims, **settings)
        hooked = hooks_of(model)
        put = stack.enter_context(
            mock.patch.object(
                WeightGradients, "put", autospec=True, side_effect=WeightGradients.put
            )
        )
        before = [parameter.detach().clone() for _, parameter in named_parameters(model)]
        distributed = bool((settings.get("ddp") or {}).get("use_distributed_optimizer"))
        data = my_samples(dims, spread)
        outcomes: dict[bool, list[list[torch.Tensor]]] = {}
        waited: list[tuple[int, int]] = []
        # Split first: in the first batch of all the wrapper counts its calls.
        for splits in (True, False):
            with torch.no_grad():
                for (_, parameter), value in zip(named_parameters(model), before, strict=True):
                    parameter.copy_(value)
            # Whole ones by the same plan, which the flag makes: in other rows sums are others.
            chosen = (some_split if some else planned_split) if splits else lambda *_: ()
            stack.enter_context(mock.patch.object(prepare, "planned_split", chosen))
            args = arguments(shape, **ALL | (planner or {}))
            check_settings(args, model)
            optimizer = adam(model, distributed, bf16=bool(settings.get("bf16")))
            outcomes[splits] = []
            for _ in range(STEPS):
                iterators, counts = get_data_iterator(args, model, data)
                forward_only(log_probs_of, args, model, iterators, counts)
                for each in (m for chunk in model for m in chunk.modules()):
                    if isinstance(each, EngineLinear):
                        each.is_first_microbatch = True  # as Megatron under FP8
                train_step(packed_objective, args, model, iterators, counts, optimizer)
                found = [parameter for _, parameter in named_parameters(model)]
                outcomes[splits].append([p.main_grad.clone() for p in found])
                outcomes[splits].append([p.detach().clone() for p in found])
                schedule = schedule_of(iterators)
                plan, lengths = schedule.step_plan(0)
                validate_plan(plan, lengths)
                sizes = plan.context_parallel
                assert sizes is None or {1, 2} <= {size for of in sizes for size in of}, sizes
                rank = parallel_state.get_data_parallel_rank()
                if plan.split_backward:
                    assert plan.split_backward[rank] == planned_split(job_of(), schedule, 0)
                weights = job_of().memory.only(LastStep).weights
                # A rank without samples has placeholders alone, which are run whole.
                assert (weights is not None) == (splits and any(data.values()))
                assert plan.split_backward or not any(data.values())
                if weights is not None:
                    assert weights.num_bytes == 0
                    waited.append((weights.peak_bytes, planned_bytes(weights)))
    pairs = list(zip(outcomes[True], outcomes[False], strict=True))
    left = {id(call.args[1]) for call in put.call_args_list}
    return {
        "left": [name for name, each in named_parameters(model) if id(each) in left],
        "others": [name for name, each in named_parameters(model) if id(each) not in left],
        "gradients": max(_difference(*pair) for pair in pairs[::2]),
        "weights": max(_difference(*pair) for pair in pairs[1::2]),
        "bytes": waited,
        "restored": hooks_of(model) == hooked,
    }


def _difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(
        0.0 if torch.equal(a, b) else float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
        for a, b in zip(ours, theirs, strict=True)
    )


def planned_bytes(weights: WeightGradients) -> int:
    """What waits at most by the plan, which counts a micro-batch until its last part has run."""
    of_pass: dict[Any, int] = {}
    for run in weights.timed:
        for passed, num_bytes in run.num_bytes.items():
            of_pass[passed] = of_pass.get(passed, 0) + num_bytes
    waiting: list[int] = []
    most = run = 0
    for passed, splits, before in zip(weights._order, *weights._stage, strict=True):
        run = min(run + before, PARTS * len(waiting))
        while run >= PARTS:
            waiting.pop(0)
            run -= PARTS
        if splits:
            waiting.append(of_pass[passed])
        most = max(most, sum(waiting))
    return most


def hooks_of(model: list[Any]) -> list[Any]:
    """Everything that split backward passes replace, as it is."""
    config = get_model_config(model[0])
    groups = [g for c in model for g in (*c.bucket_groups, *c.expert_parallel_bucket_groups)]
    return [
        vars(linear_layers.MEGATRONS)["backward"],
        *(vars(schedules)[name] for name in ("forward_step", "backward_step")),
        *(vars(p2p_communication)[name] for name in ("_p2p_ops", "_batched_p2p_ops")),
        config.finalize_model_grads_func,
        config.grad_sync_func,
        *("register_grad_ready" in vars(group) for group in groups),
        *(getattr(m, "wgrad_store", None) for chunk in model for m in chunk.modules()),
    ]


def left_by_a_failure(dims: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """What is left of the hooks and of what waits when a step raises in its middle, and whether one
    that ends runs what is left."""
    model = small_model(dims, **settings)
    hooked = hooks_of(model)
    deferred = mock.Mock(spec=WeightGradients)
    kept: list[Any] = []
    with contextlib.suppress(ZeroDivisionError), split_passes.split_backward(model, deferred):
        now = hooks_of(model)
        kept = [b for a, b in zip(now, hooked, strict=True) if a is b and b is not None]
        raise ZeroDivisionError
    found = {
        "replaced": not kept,
        "restored": hooks_of(model) == hooked,
        "cleared": deferred.clear.called,
        "flushed": deferred.flush.called,
    }
    with split_passes.split_backward(model, deferred):
        pass
    return found | {"flushed at the end": deferred.flush.called}


_DEBUGGING = "transformer_engine.debug.pytorch.debug_state"


def refused(dims: dict[str, Any], cases: list[dict[str, Any]]) -> list[str]:
    """What `check_settings` says of arguments and of attributes of the configurations."""
    model = small_model(dims)
    said = []
    for case in cases:
        args = arguments(ParallelDims(**dims), **ALL | case.get("planner", {}))
        with contextlib.ExitStack() as stack:
            for owner, name, value in [
                *((get_model_config(model[0]), *each) for each in case.get("model", {}).items()),
                *((model[0].ddp_config, *each) for each in case.get("ddp", {}).items()),
            ]:
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
            if "other function" in case:
                stack.enter_context(mock.patch(f"megatron.core.{case['other function']}", print))
            if case.get("engine"):
                module = next(m for m in model[0].modules() if isinstance(m, ColumnParallelLinear))
                for name, value in case["engine"].items():
                    stack.enter_context(mock.patch.object(module, name, value, create=True))
                state = SimpleNamespace(debug_enabled=case.get("debugged", False))
                debugging = {_DEBUGGING: SimpleNamespace(TEDebugState=state)}
                stack.enter_context(mock.patch.dict(sys.modules, debugging))
            try:
                bare = case.get("unwrapped")
                check_settings(args, [model[0].module] if bare else model)
                said.append("")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def one_step(model: list[Any], dims: dict[str, Any], **planner: Any) -> None:
    """A training step under the flag."""
    args = arguments(ParallelDims(**dims), **ALL | planner)
    iterators, counts = get_data_iterator(args, model, my_samples(dims))
    train_step(packed_objective, args, model, iterators, counts, adam(model, False))


def without_effect(dims: dict[str, Any], kind: str = "dense") -> list[str]:
    """What two steps print of the flag."""
    model = small_model(dims, kind)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for _ in range(2):
            one_step(model, dims)
            assert job_of().memory.only(LastStep).weights is None
    return [line for line in printed.getvalue().splitlines() if "split-backward" in line]


def failed_step(dims: dict[str, Any], infinite: bool) -> str:
    """The error of a step in which the last rank's weight gradients alone are infinite, or in which
    it alone runs W at the end."""
    is_last = dist.get_rank() == dist.get_world_size() - 1

    def add(weight: Any, *rest: Any, **options: Any) -> None:
        del rest, options
        weight.main_grad.fill_(math.inf)

    model = small_model(dims)
    with contextlib.ExitStack() as stack:
        if infinite and is_last:
            stack.enter_context(mock.patch.object(linear_layers, "add_weight_gradient", add))
        if infinite or is_last:
            stack.enter_context(mock.patch.object(prepare, "planned_split", left_to_the_end))
        try:
            one_step(model, dims)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def order_of_reductions(dims: dict[str, Any], **settings: Any) -> list[list[int]]:
    """Number of each bucket group in the order in which a step reduces them, for two steps, under
    plans that differ from one data-parallel rank to the next."""
    model = small_model(dims, **settings)
    groups = [group for chunk in model for group in chunk.bucket_groups]
    orders: list[list[int]] = []
    start = type(groups[0]).start_grad_sync

    def recorded(group: Any, *rest: Any, **options: Any) -> Any:
        orders[-1].append(next(at for at, each in enumerate(groups) if each is group))
        return start(group, *rest, **options)

    def planned(job: Any, schedule: Any, step: int) -> Any:
        whole = parallel_state.get_data_parallel_rank() == 1
        return () if whole else some_split(job, schedule, step)

    with (
        mock.patch.object(type(groups[0]), "start_grad_sync", recorded),
        mock.patch.object(prepare, "planned_split", planned),
    ):
        for _ in range(2):
            orders.append([])
            one_step(model, dims)
    return orders


Event = tuple[str, str, float, float]
"""What, of what, from when to when, in seconds of a clock that all processes share."""


def recorded_step(
    dims: dict[str, Any], last_alone: bool, seconds_per_part: float = 0.02
) -> list[Event]:
    """The passes, posts, waits and parts of W of one step, each part sleeping for a while.

    Args:
        dims: the layout.
        last_alone: W runs after each backward pass, on the last stage alone; else as planned.
        seconds_per_part: of the sleep.
    """
    model = small_model(dims)
    events: list[Event] = []

    def timed(what: str, names: Callable[..., str], function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            start = time.monotonic()
            made = function(*arguments, **options)
            events.append((what, names(*arguments, **options), start, time.monotonic()))
            return made

        return run

    def directions(**tensors: Any) -> str:
        return " ".join(name for name in sorted(tensors) if torch.is_tensor(tensors[name]))

    def posting(function: Callable[..., Any]) -> Callable[..., Any]:
        posted = timed("post", directions, function)

        @functools.wraps(function)
        def post(**tensors: Any) -> Any:
            requests, names = posted(**tensors), directions(**tensors)

            def waited(request: Any) -> Any:
                wait = timed("wait", lambda *unused: names, request.wait)
                return SimpleNamespace(wait=wait)

            if isinstance(requests, dict):
                return {name: waited(request) for name, request in requests.items()}
            return [waited(request) for request in requests]

        return post

    def run_parts(weights: Any, left: Any, parts: int) -> None:
        start = time.monotonic()
        time.sleep(parts * seconds_per_part)
        running(weights, left, parts)
        events.append(("W", f"{left.passed.chunk} {left.passed.slot}", start, time.monotonic()))

    running = WeightGradients._run_parts
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (schedules, "forward_step", timed("F", lambda *a, **o: "", schedules.forward_step)),
            (schedules, "backward_step", timed("B", lambda *a, **o: "", schedules.backward_step)),
            (p2p_communication, "_p2p_ops", posting(p2p_communication._p2p_ops)),
            (p2p_communication, "_batched_p2p_ops", posting(p2p_communication._batched_p2p_ops)),
            (WeightGradients, "_run_parts", run_parts),
            *([(prepare, "planned_split", last_split)] if last_alone else []),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        one_step(model, dims)
    return events
