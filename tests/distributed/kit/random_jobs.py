"""Runs a job drawn at random through the engine, and compares all it gives with the reference."""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer import multi_latent_attention as latent
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils._pytree import tree_map_only

from kit.blocking_p2p import blocking_p2p
from kit.calls import on_all_ranks
from kit.model import ADAM, ROUTING
from kit.random_reference import RandomReference
from kit.random_run import RandomRun, Samples, values_of
from kit.samples import ALLOWED, VOCABULARY, multimodal_positions, rollout_of
from kit.shared_rows import mixed_sizes
from kit.worker import layout
from kit.workers import FAULTS, worker_with
from mcore_batching.megatron import CollectiveError, PipelineFailedError, compat, cpu_emulation
from mcore_batching.planning import MCoreBatchingError, ParallelDims

# Relative to the largest entry of a tensor. float32 has a unit roundoff of 6e-8; a value here is a
# sum of up to some hundred products in an order that depends on the layout, so that results of
# right programs differ by some 1e-7 to 1e-6. A token of a neighbour let in, a placeholder counted,
# a sample forgotten or doubled changes them by 1e-3 and more. Weights of the steps before carry
# their rounding on, so that every step may be off by as much again.
FLOAT32 = {
    "log-probs": 2e-6,
    "metrics": 2e-6,
    "gradients": 2e-5,  # the deepest sums: over all tokens of the batch, through all layers
    "weights": 1e-5,  # Adam multiplies an error of the gradient by up to lr / epsilon = 10
}
BFLOAT16 = dict.fromkeys(FLOAT32, 5e-2)
"""8 bits are kept, so that each rounding is up to 4e-3 of a value; some tens of them in a row. Of
weights beside what their one step of Adam makes of such an error of the gradient, see `_adam`."""

SMALL = 1e-2
"""Part of the largest gradient of all below which a tensor's is what rounding leaves of parts that
cancel: that of a bias of all keys is 0 where these are not rotated."""


def compare(job: dict[str, Any]) -> dict[str, Any]:
    """Run a drawn job, and the reference of it on the first rank.

    Returns:
        why it was ``refused``, ``failed`` or is ``not built``; or what a `Comparison` found, the
        smallest ``gap`` by which a router chose its experts, and ``counts`` of slots.
    """
    if why := _why_not_built(job["model"]):
        return {"not built": why}
    with layout(ParallelDims(data_parallel=job["nproc"])):
        reference = RandomReference(job) if dist.get_rank() == 0 else None
        weights = _from_first(lambda: reference and reference.weights)
    rollouts = [_samples(job, number) for number in range(len(job["rollouts"]))]
    shape = ParallelDims(**job["dims"])
    with layout(shape):
        run = RandomRun(job, shape, weights)
        try:
            with contextlib.ExitStack() as conditions:
                conditions.enter_context(_clock(job))
                if job["blocking"]:
                    conditions.enter_context(blocking_p2p())
                # The engine puts what it knows of shapes in place of this.
                shapes = conditions.enter_context(
                    mock.patch.object(
                        P2PCommunicator,
                        "_communicate_shapes",
                        autospec=True,
                        side_effect=P2PCommunicator._communicate_shapes,
                    )
                )
                planned = conditions.enter_context(worker_with(job["worker"]))
                if job["mixed_sizes"]:
                    conditions.enter_context(mixed_sizes())
                for number, samples in enumerate(rollouts):
                    run.train(samples, job["rollouts"][number])
        except PipelineFailedError:
            raise  # nothing communicates any more
        except (CollectiveError, MCoreBatchingError):  # on every rank
            said = traceback.format_exc()[-3000:]
            return {"refused" if "DynamicBatchArgumentError" in said else "failed": said}
    with layout(ParallelDims(data_parallel=job["nproc"])):
        rows = on_all_ranks([each["rows"] for each in run.seen])
        made = _from_first(
            lambda: reference and _reference_of(job, reference, rollouts, run.seen, rows)
        )
    compared = Comparison(job, rollouts, run.seen, rows, made["made"])
    exchanged = job["planner"]["dynamic_batch_no_planned_shapes"] and shape.pipeline_parallel > 1
    if shapes.called != exchanged:
        compared.wrong.append(f"stages exchange shapes {shapes.call_count} times")
    compared.wrong += _wrong_with_worker(job["worker"], planned, run.seen) + run.wrong_records()
    return {
        "differences": compared.differences,
        "wrong": compared.wrong,
        "gap": made["gap"],
        "counts": [event.get("slots") for event in run.seen],
    }


def _why_not_built(model: dict[str, Any]) -> str:
    """What this version of Megatron lacks for a model; "": nothing."""
    settings = model["settings"]
    if model["kind"] == "mla" and latent.HAVE_TE and not isinstance(latent.TELinear, type):
        return "0.16 makes no such layers without Transformer Engine"
    if settings.get("mtp_num_layers") and not compat.modules_with_multi_token_losses():
        return "0.16 runs no multi-token prediction on packed rows"
    if "hybrid_layer_pattern" in model["options"] and not compat.has_hybrid_model():
        return "HybridModel is there from 0.18 on"
    is_known = settings.keys() <= TransformerConfig.__dataclass_fields__.keys()
    return "" if is_known else "a setting of later versions"


@contextlib.contextmanager
def _clock(job: Mapping[str, Any]) -> Iterator[None]:
    """Let passes be timed by a clock that lies, each rank's in its own way."""
    stream = random.Random(f"{job['seed']} clock {dist.get_rank()}")
    speed, offset = 10 ** stream.uniform(-4, 4), stream.uniform(-1e6, 1e6)
    ahead = 0.0

    def noisy() -> float:
        nonlocal ahead
        ahead += stream.lognormvariate(-9, 3)
        return ahead

    clocks: dict[str, Callable[[], float]] = {
        "true": time.perf_counter,
        "skewed": lambda: offset + speed * time.perf_counter(),
        "noisy": noisy,
        "stalled": lambda: 1.0,
        "backwards": lambda: -time.perf_counter(),
        "absurd": lambda: stream.choice([math.nan, math.inf, -math.inf, -1e30, 1e300, 0.0]),
    }
    clock = SimpleNamespace(perf_counter=clocks[job["clock"]])
    with mock.patch.object(cpu_emulation, "time", clock):
        yield


def _wrong_with_worker(
    fault: str | None, planned: Mapping[str, Any], seen: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What is said where later steps' plans come late or not at all, by the rank that plans."""
    if dist.get_rank():
        return [f"planned here: {planned}"] if any(planned.values()) else []
    steps = collections.Counter(event["rollout"] for event in seen if event["kind"] == "step")
    is_lost = fault in FAULTS and max(steps.values(), default=0) > 1
    if is_lost == bool(planned["said"]) and all(
        "the planning worker" in s for s in planned["said"]
    ):
        return []
    return [f"the worker {fault}, and it says {planned['said']}"]


def _from_first(make: Callable[[], Any]) -> Any:
    """What the first rank makes, on all ranks; tensors as arrays, which are unpickled faster."""
    made = [tree_map_only(Tensor, Tensor.numpy, make()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, src=0)
    return tree_map_only(np.ndarray, torch.from_numpy, made[0])


def _samples(job: Mapping[str, Any], number: int) -> Samples:
    """The samples of a rollout over all ranks, numbered through."""
    stream = f"{job['seed']} turns {number}"
    generator = torch.Generator(device="cpu").manual_seed(1000 * job["seed"] + number)
    uniform = functools.partial(torch.rand, generator=generator, device="cpu")
    lengths = [(total, response) for total, response, _ in job["rollouts"][number]["samples"]]
    entries = ALLOWED if job["banned"] else VOCABULARY
    samples: Samples = rollout_of(lengths, entries, generator)
    samples["sample_indices"] = list(range(len(lengths)))
    masks = {
        "some": lambda response: (uniform(response) > 0.3).int(),
        "all 0": lambda response: torch.full((response,), int(uniform(1) > 0.6)),
        "weights": lambda response: (uniform(response) * 3).floor() / 2,
    }
    if job["loss_masks"] in masks:
        samples["loss_masks"] = [masks[job["loss_masks"]](response) for _, response in lengths]
    if job["objective"]["page"] is not None:  # samples of each lie on any ranks, in any steps
        samples["uids"] = [i % 3 for i in range(len(lengths))]
        samples["trajectory_ids"] = [i % 2 for i in range(len(lengths))]
    if job["fields"]:
        samples["source"] = [float(i) for i in range(len(lengths))]
        samples["image"] = [{"pixels": torch.full((i % 4, 2), i)} for i in range(len(lengths))]
    if job["turns"]:
        _begin_others(samples["tokens"], stream, lengths)
    if job["model"]["options"]["position_embedding_type"] == "mrope":
        samples["position_ids"] = [multimodal_positions(total) for total, _ in lengths]
    if job["model"]["kind"] == "replay":
        layers, experts = job["model"]["settings"]["num_layers"], ROUTING["experts"]
        samples["rollout_routed_experts"] = [
            uniform(max(total - 1, 0), layers, experts)
            .topk(ROUTING["top_k"])
            .indices.to(torch.int16)
            for total, _ in lengths
        ]
        if job["turns"]:
            _begin_others(samples["rollout_routed_experts"], stream, lengths)
    return samples


def _begin_others(values: list[Tensor], stream: str, lengths: Sequence[tuple[int, int]]) -> None:
    """Let some samples begin like another: whole turns of trajectories, and branches at any place,
    within prompts and within responses. By one stream the same samples begin the same others."""
    drawn = random.Random(stream)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i][0])
    for place, turn in enumerate(order):
        total = lengths[turn][0]
        if place and drawn.random() < 0.8:
            begun = values[drawn.choice(order[:place])]
            common = total if drawn.random() < 0.4 else drawn.randint(0, total)
            common = min(common, len(values[turn]))
            values[turn] = torch.cat((begun[:common], values[turn][common:]))


def _reference_of(
    job: Mapping[str, Any],
    reference: RandomReference,
    rollouts: Sequence[Samples],
    seen: Sequence[Mapping[str, Any]],
    rows: Sequence[Sequence[Sequence[Sequence[int]]]],
) -> dict[str, Any]:
    """The engine's passes and steps again, each of the samples that the engine's holds."""
    made: list[Any] = []
    given: dict[int, Samples] = {}
    for event, of_ranks in zip(seen, zip(*rows, strict=True), strict=True):
        number = event["rollout"]
        samples = rollouts[number]
        if event["kind"] == "step":
            # Ranks of a row, and stages, hold the same one.
            distinct = {tuple(row) for of_rank in of_ranks for row in of_rank}
            made.append(reference.step(given[number], sorted(distinct)))
            continue
        outputs = reference.outputs(samples, is_trained_next=number not in given)
        made.append(outputs)
        if number not in given:
            behaviour = samples["rollout_log_probs"]
            if job["objective"]["forward_only"] != "none":
                behaviour = [log_probs for log_probs, _ in outputs]
            given[number] = samples | {"behaviour": behaviour}
    return {"made": made, "gap": reference.smallest_gap}


class Comparison:
    """Differences between a rank's passes and steps, `seen`, and those that the reference `made`;
    `rows` are of each rank the samples of each row of each.

    `differences` are by name the largest, 1 as much as rounding; `wrong` is what had to be equal
    and is not, in words.
    """

    def __init__(
        self,
        job: Mapping[str, Any],
        rollouts: Sequence[Mapping[str, list[Any]]],
        seen: Sequence[Mapping[str, Any]],
        rows: Sequence[Sequence[Sequence[Sequence[int]]]],
        made: Sequence[Any],
    ) -> None:
        self._job, self._rollouts, self._seen, self._rows = job, rollouts, seen, rows
        self._tolerances = BFLOAT16 if job["bfloat16"] else FLOAT32
        self.differences: dict[str, float] = {}
        self.wrong: list[str] = []
        self._trained = 0
        for event, expected in zip(seen, made, strict=True):
            self._require("over the cap", event["fullest"] > 1.0, False)
            if event["kind"] == "forward":
                self._compare_outputs(event, expected)
            else:
                self._compare_step(event, expected)
                self._trained += 1
        for number in range(len(job["rollouts"])):
            self._check_steps(number)

    def _note(self, name: str, error: float, kind: str, size: float = 1.0) -> None:
        """Keep an error relative to the tolerance of its kind, for values of this size."""
        ratio = error / (self._tolerances[kind] * size * (1 + self._trained))
        # NaN compares as not larger.
        if not ratio <= self.differences.get(name, 0.0):
            self.differences[name] = ratio if math.isfinite(ratio) else 1e30

    def _require(self, name: str, found: Any, expected: Any) -> None:
        if found != expected:
            self.wrong.append(f"{name}: {found} instead of {expected}")

    def _compare_outputs(
        self, event: Mapping[str, Any], made: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Every output at the place of its own sample, on every rank of the last stage."""
        outputs, mine = event["outputs"], event["mine"]
        samples = self._rollouts[event["rollout"]]
        names = {"log_probs", "length"}
        names |= {"entropy"} if self._job["objective"]["forward_entropy"] else set()
        exact: dict[str, list[Tensor]] = {}
        if self._job["fields"]:
            own = ([samples[name][i] for i in mine] for name in ("tokens", "source", "image"))
            exact = values_of(*own)
        names |= {*exact}
        self._require("outputs", set(outputs), names if event["last_stage"] else set())
        if set(outputs) != names:
            return
        lengths = [int(value) for value in outputs["length"][: len(mine)]]
        self._require("lengths", lengths, [samples["total_lengths"][i] for i in mine])
        for name, expected in exact.items():
            pairs = zip(outputs[name], expected, strict=False)
            came = [a.dtype == b.dtype and torch.equal(a.cpu(), b) for a, b in pairs]
            self._require(f"{name} of the samples", came, [True] * len(mine))
        when = "before" if not self._trained else "after training"
        for place, name in enumerate(("log_probs", "entropy")):
            for ours, i in zip(outputs.get(name, [])[: len(mine)], mine, strict=False):
                expected = made[i][place]
                self._require(f"shape of {name} of sample {i}", ours.shape, expected.shape)
                if ours.shape == expected.shape and expected.numel():
                    error = float((ours.cpu() - expected).abs().max()) / _largest(expected)
                    self._note(f"{name} {when}", error, "log-probs")

    def _compare_step(self, event: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        totals = event["totals"]
        counts = [totals.num_samples, totals.num_trained_samples, totals.num_tokens]
        self._require("samples, trained samples, tokens", counts, made["counts"])
        self._require("updated", event["updated"], "gradients" in made)
        counted = [event["counts as"]] * 2 if made["counts"][0] else [0]
        self._require("counted samples", event["counted"], counted)
        self._require("counts of slots", len(set(event["slots"])), 1)
        self._require("ends with a placeholder", event["ends with a placeholder"], False)
        self._require("tokens of the model, as planned", len(set(event["tokens"])) < 2, True)
        if event["metrics"]:
            self._require("names of metrics", set(event["metrics"]), set(made["metrics"]))
        for name, value in event["metrics"].items():
            expected, size = made["metrics"].get(name, (math.nan, math.nan))
            self._note(f"metric {name}", abs(value - expected), "metrics", size + 1e-3)
        whole = made.get("gradients", {})
        if whole:
            norm = made["grad_norm"]
            found = math.nan if event["grad_norm"] is None else event["grad_norm"]
            self._note("gradients' norm", abs(found - norm), "gradients", norm + 1e-4)
            for name, places, ours in event["gradients"]:
                error = float((ours - whole[name].flatten()[places]).abs().max())
                self._note(f"gradient of {name}", error, "gradients", _scale(name, whole))
        for name, places, ours in event["weights"]:
            errors = (ours - made["weights"][name].flatten()[places]).abs()
            if self._job["bfloat16"] and name in whole:
                gradient = whole[name].flatten()[places]
                off = self._tolerances["gradients"] * _scale(name, whole)
                moved, more, less = map(_adam, (gradient, gradient + off, gradient - off))
                errors = (errors - torch.maximum(more - moved, moved - less)).clamp(min=0.0)
            largest = _largest(made["weights"][name])
            self._note(f"weight {name}", float(errors.max()), "weights", largest)

    def _check_steps(self, number: int) -> None:
        """As many steps of a rollout as asked for, of the samples asked for, each of them once."""
        rollout = self._job["rollouts"][number]
        count, size = len(rollout["samples"]), rollout.get("global_batch_size")
        events = [(each["kind"], each["rollout"]) for each in self._seen]
        at = [place for place, event in enumerate(events) if event == ("step", number)]
        held = [sorted({i for rank in self._rows for row in rank[n] for i in row}) for n in at]
        if "steps" in rollout:
            self._require("steps", held, [sorted(step) for step in rollout["steps"]])
        elif size is not None:
            sizes = [min(size, count - first) for first in range(0, count, size)]
            self._require("samples of the steps", [len(step) for step in held], sizes)
        else:
            self._require("steps", held, [list(range(count))])
        self._require("all samples", sorted(i for step in held for i in step), [*range(count)])
        if self._job["planner"]["dynamic_batch_exchange"] or "steps" in rollout:
            return
        # Samples that stay on their rank are trained in its order, where batches and ranks come out
        # even as many of each rank in every step.
        owned = collections.Counter(rank for _, _, rank in rollout["samples"])
        ranks = self._job["dims"]["data_parallel"]
        even = len(owned) == ranks and len({*owned.values()}) == 1
        for rank in self._rows:
            steps = [sorted(i for row in rank[n] for i in row) for n in at]
            trained = [i for step in steps for i in step]
            self._require("order of samples that stay", trained, sorted(trained))
            if size and size % ranks == 0 and even:
                whole = {len(step) for step in steps[: count // size]}
                self._require("samples of a rank", whole - {size // ranks}, set())


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) or 1.0


def _scale(name: str, whole: Mapping[str, Tensor]) -> float:
    """The size of a tensor's gradient, relative to which it may be off."""
    sizes = {each: float(gradient.abs().max()) for each, gradient in whole.items()}
    return max(sizes[name], SMALL * max(sizes.values())) or 1.0


def _adam(gradient: Tensor) -> Tensor:
    """By how much Adam's first step moves weights, up to the sign: steep where a gradient is near
    0, so that weights may be off by more of their size than gradients."""
    return ADAM["lr"] * gradient / (gradient.abs() + ADAM["adam_eps"])
