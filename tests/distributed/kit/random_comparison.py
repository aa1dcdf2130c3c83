"""What a job drawn at random gave on one rank, beside what it must have given."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kit.model import ADAM
from kit.random_run import values_of

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


class Comparison:
    """Differences between a rank's passes and steps and the reference's.

    Args:
        job: as drawn.
        rollouts: the samples of each.
        seen: of this rank, passes and steps in order.
        rows: of each rank, the samples of each row of each.
        made: by the reference, likewise.

    Attributes:
        differences: by name the largest, 1 is as much as rounding.
        wrong: what had to be equal and is not, in words.
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
