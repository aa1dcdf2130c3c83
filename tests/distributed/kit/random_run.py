"""A job drawn at random on one rank: what it plans, runs forward and trains, through the engine."""

from __future__ import annotations

import collections
import math
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from bootstrap import pipeline_config
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor

from kit.model import (
    adam,
    arguments,
    counted_tokens,
    local_part,
    named_parameters,
    packed_model,
    transformer_config,
)
from kit.objective import MEANS, kl_terms, policy_terms, share_of_the_page
from kit.random_reference import WEIGHTS
from kit.samples import ALLOWED, take
from mcore_batching.batch import DEFAULT_SCHEMA, Kind
from mcore_batching.batch.columns import map_tensors
from mcore_batching.megatron import (
    add_fields,
    check_settings,
    forward_only,
    get_data_iterator,
    response_log_probs,
    response_log_probs_and_entropy,
    schedule_of,
    train_step,
)
from mcore_batching.megatron.iterator import rollout_of
from mcore_batching.megatron.job import job_of
from mcore_batching.megatron.plan import plan_forward_passes
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.planning import CostModel, ParallelDims, plan_step
from mcore_batching.planning.plans.records import read_records
from mcore_batching.planning.plans.validation import validate_plan
from mcore_batching.rl import pad_batch

SCHEMA = (
    DEFAULT_SCHEMA.declare("old_log_probs", Kind.PER_RESPONSE_TOKEN)
    .declare("old_entropy", Kind.PER_RESPONSE_TOKEN)
    .declare("source", Kind.PER_SAMPLE)
    .declare("image", Kind.METADATA)
)
COSTS = CostModel(quadratic=0.25, per_micro_batch=2.0)
"""Read from a file where steps are recorded."""
DECLARED, INCREMENT = 5, 7
"""Samples that a step counts as, by the rollout data or by what calls `train_step`, where there is
no global batch size."""
Samples = dict[str, list[Any]]
BEHAVIOUR = {"none": "rollout_log_probs", "old": "old_log_probs", "replaced": "log_probs"}
"""The field that a policy loss compares with, by what the forward pass before is for."""


def values_of(
    tokens: Sequence[Any], source: Sequence[float], images: Sequence[Any]
) -> dict[str, list[Tensor]]:
    """Outputs of several types and shapes that are made of samples' fields alone."""
    return {
        "tokens": [torch.as_tensor(each) for each in tokens],
        "source": [torch.tensor(each, dtype=torch.float64) for each in source],
        "large": [torch.as_tensor(each) > 30 for each in tokens],
        "pixels": [each["pixels"].bfloat16() for each in images],
        # As the log-prob of a response of one token lies beside its entropy.
        "beside": [torch.tensor([[each, 0.0]])[:, 0] for each in source],
    }


class RandomRun:
    """A drawn job on this rank, whose groups are there, from these whole weights; `seen` is what
    came of every forward pass and step on this rank, in order."""

    def __init__(
        self, job: Mapping[str, Any], shape: ParallelDims, weights: Mapping[str, Tensor]
    ) -> None:
        self._job, self._shape, self._ddp = job, shape, job["ddp"]
        self._model = self._build(weights)
        self._optimizer = adam(
            self._model,
            self._ddp["distributed_optimizer"],
            self._ddp["overlap_gather"],
            job["bfloat16"],
        )
        self._args = arguments(shape, **job["planner"])
        self._cap = job["planner"].get("max_tokens_per_gpu", math.inf)
        self.seen: list[dict[str, Any]] = []
        self._rollout = -1
        if job["recorded"]:
            self._record()

    def _build(self, weights: Mapping[str, Tensor]) -> list[Any]:
        drawn = self._job["model"]
        settings = pipeline_config(self._shape) | drawn["settings"]
        settings["calculate_per_token_loss"] = self._ddp["per_token_loss"]
        if self._job["bfloat16"]:
            half = torch.bfloat16
            settings |= {"bf16": True, "params_dtype": half, "pipeline_dtype": half}
        config = transformer_config(drawn["kind"], **settings)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=self._ddp["distributed_optimizer"],
            overlap_grad_reduce=self._ddp["overlap"] or self._ddp["overlap_gather"],
            overlap_param_gather=self._ddp["overlap_gather"],
        )
        model = packed_model(drawn["kind"], config, ddp, drawn["trained"], **drawn["options"])
        self._parts: list[tuple[str, Tensor, Any]] = []
        held = dict(named_parameters(model))
        for name, parameter in held.items():
            # The last stage of a pipeline has a copy of tied embeddings, which nobody reads where
            # it embeds later tokens and has the embedding itself.
            if name not in weights and name == "output_layer.weight":
                name = "embedding.word_embeddings.weight"
                if name in held:
                    continue
            whole = weights[name]
            places = torch.arange(whole.numel(), device=whole.device).view(whole.shape)
            part = local_part(name, places, parameter).cpu()
            self._parts.append((name, part, parameter))
            with torch.no_grad():
                parameter.copy_(whole.flatten()[part].to(parameter.device))
        return model

    def _record(self) -> None:
        """Let rank 0 record steps, with costs from a file where none are learnt."""
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder, src=0)
        self._args.dynamic_batch_record = folder[0]
        if self._args.dynamic_batch_cost_model == "fixed":
            file = Path(folder[0], "costs.json")
            if dist.get_rank() == 0:
                file.write_text(COSTS.to_json())
            dist.barrier()
            self._args.dynamic_batch_cost_model = str(file)

    def wrong_records(self) -> list[str]:
        """What rank 0 wrote of all ranks' steps, if that is not what was trained."""
        if not self._job["recorded"] or dist.get_rank():
            return []
        records = read_records(self._args.dynamic_batch_record)
        steps = sum(event["kind"] == "step" for event in self.seen)
        found = [] if [each.step for each in records] == [*range(steps)] else ["recorded steps"]
        samples = (each for rollout in self._job["rollouts"] for each in rollout["samples"])
        totals = collections.Counter(total for total, _, _ in samples)
        if totals - collections.Counter(length for each in records for length in each.lengths):
            found.append("not all samples are recorded")
        args, is_learnt = self._job["planner"], self._args.dynamic_batch_cost_model == "auto"
        again = args["dynamic_batch_exchange"] and not self._job["mixed_sizes"] and not is_learnt
        for record in records:
            validate_plan(record.plan, record.lengths)
            dims, config, costs = record.plan.dims, record.plan.config, record.plan.cost_model
            if dims.data_parallel != self._shape.data_parallel or not (is_learnt or costs == COSTS):
                found.append(f"recorded with {dims} and {costs}")
            if not (record.measured_seconds or 0) > 0:
                found.append(f"recorded {record.measured_seconds} seconds")
            plan = plan_step(record.lengths, dims, config, costs) if again else record.plan
            if plan != record.plan and not record.plan.trees:
                found.append("recorded another plan")
        return found

    def train(self, samples: Samples, rollout: Mapping[str, Any]) -> None:
        self._rollout += 1
        data, mine, steps = self._own(samples, rollout)
        size = rollout.get("global_batch_size")
        # A rank without samples need not know of a batch size.
        self._args.global_batch_size = size if mine else None
        check_settings(self._args, self._model)
        given = map_tensors(data, torch.clone)
        is_declared = steps is not None and not self._rollout
        if is_declared:
            given["dynamic_global_batch_size"] = DECLARED
        iterators, counts = get_data_iterator(
            self._args,
            self._model,
            given if self._holds else None,
            schema=SCHEMA,
            # Steps may be read once.
            steps=None if steps is None or not self._holds else map(iter, steps),
        )
        # What the caller does to its own afterwards changes nothing.
        map_tensors(given, torch.Tensor.zero_)
        self._forward(iterators, counts, mine)
        for step in range(len(counts)):
            self._step(iterators, counts, step, size or (DECLARED if is_declared else None))
        if self._rollout == len(self._job["rollouts"]) - 1:  # else the next one's pass has them
            self._forward(iterators, counts, mine)

    def _step(self, iterators: Any, counts: Any, step: int, size: int | None) -> None:
        """Train a step that counts as so many samples, None: as the caller says."""
        schedule, advances = schedule_of(iterators), list[int]()
        held, rows = schedule.rollout_data, schedule.steps[step]
        are_padding = held.get("is_padding") or [False] * len(held["tokens"])
        ends_empty = any(rows) and not rows[-1] and not self._job["mixed_sizes"]
        with counted_tokens(self._model) as tokens:
            result = train_step(
                self._loss,
                self._args,
                self._model,
                iterators,
                counts,
                self._optimizer,
                SimpleNamespace(step=lambda increment: advances.append(increment)),
                step=step,
                increment=None if size else INCREMENT,
            )
        self.seen.append(
            {
                "kind": "step",
                "rollout": self._rollout,
                "rows": [
                    [int(held["sample_indices"][i]) for i in row if not are_padding[i]]
                    for row in rows
                ],
                "metrics": result.metrics,
                "grad_norm": result.grad_norm,
                "updated": result.update_successful,
                "counted": [result.consumed_samples, *advances],
                "counts as": size or INCREMENT,
                "totals": result.totals,
                "slots": [result.num_microbatches, counts[step], len(rows)],
                "ends with a placeholder": ends_empty,
                "tokens": self._tokens(schedule, step, sum(tokens)),
                "fullest": self._fullest(schedule, step, self._cap),
                "gradients": self._gradients(),
                "weights": self._weights(),
            }
        )

    @property
    def _holds(self) -> bool:
        """True if this rank is given the data of its replica."""
        others = (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
        )
        return self._job["holders"] == "all" or not any(others)

    def _own(
        self, samples: Samples, rollout: Mapping[str, Any]
    ) -> tuple[Samples, list[int], list[list[int]] | None]:
        """This replica's samples, their numbers, and its local indices of every step if given."""
        replica = parallel_state.get_data_parallel_rank()
        mine = [i for i, (_, _, rank) in enumerate(rollout["samples"]) if rank == replica]
        data = take(samples, mine)
        if "padded_to" in rollout:
            if mine:
                data = pad_batch(data, rollout["padded_to"], SCHEMA, pad_token_id=0)
            data.setdefault("is_padding", [False] * len(mine))
        if "steps" not in rollout:
            return data, mine, None
        place = {number: at for at, number in enumerate(mine)}
        steps = [[place[i] for i in step if i in place] for step in rollout["steps"]]
        for padding in range(len(mine), len(data["tokens"])):
            steps[padding % len(steps)].append(padding)
        return data, mine, steps

    def _forward(self, iterators: Sequence[Any], counts: list[int], mine: list[int]) -> None:
        """A forward pass, whose log-probs training goes on with if the job says so."""
        kind = self._job["objective"]["forward_only"]
        prefix = "old_" if kind == "old" else ""
        outputs = forward_only(
            self._statistics, self._args, self._model, iterators, counts, store_prefix=prefix
        )
        cap = self._job["planner"].get("dynamic_batch_forward_only_max_tokens_per_gpu")
        fullest = 0.0
        if cap is not None:
            own = plan_forward_passes(rollout_of(iterators), job_of(self._args), self._model)
            assert own.config.max_tokens_per_gpu == cap
            fullest = self._fullest(own, 0, cap)
        self.seen.append(
            {
                "kind": "forward",
                "rollout": self._rollout,
                "rows": [],
                "mine": mine,
                "last_stage": is_last_stage(),
                "fullest": fullest,
                "outputs": {name.removeprefix(prefix): v for name, v in outputs.items()},
            }
        )
        if kind != "none":
            names = (f"{prefix}log_probs", f"{prefix}entropy")
            add_fields(iterators, {name: outputs[name] for name in names if name in outputs})

    def _log_probs(self, logits: Any, row: Any, with_entropy: bool) -> dict[str, list[Tensor]]:
        """``log_probs`` and ``entropy``, with the last half of the vocabulary banned or not."""
        objective, banned = self._job["objective"], self._job["banned"]
        options = {name: objective[name] for name in ("temperature", "chunk_tokens")}
        if banned is not None:
            lowest = -math.inf if banned == "infinite" else torch.finfo(logits.dtype).min
            size = logits.shape[-1]
            first = size * parallel_state.get_tensor_model_parallel_rank()
            entries = torch.arange(first, first + size, device=logits.device)
            logits = logits.masked_fill(entries >= ALLOWED, lowest)
        if not with_entropy:
            return {"log_probs": response_log_probs(logits, row, **options)}
        log_probs, entropy = response_log_probs_and_entropy(logits, row, **options)
        return {"log_probs": log_probs, "entropy": entropy}

    def _statistics(self, logits: Any, micro_batch: Any) -> dict[str, Any]:
        found = {"length": [torch.tensor(length) for length in micro_batch.total_lengths]}
        if self._job["fields"]:
            images = [image or {"pixels": torch.zeros(0, 2)} for image in micro_batch["image"]]
            found |= values_of(micro_batch["tokens"], micro_batch["source"], images)
        with_entropy = self._job["objective"]["forward_entropy"]
        return found | self._log_probs(logits, micro_batch, with_entropy)

    def _loss(self, logits: Any, row: Any, totals: Any) -> tuple[Tensor, dict[str, Tensor]]:
        objective = self._job["objective"]
        made = self._log_probs(logits, row, objective["entropy"] is not None)
        new, old = made["log_probs"], row[BEHAVIOUR[objective["forward_only"]]]
        policy = map(policy_terms, new, old, row["advantages"])
        terms = {
            "policy": [-each for each in new] if objective["terms"] == "likelihood" else policy,
            "kl": map(kl_terms, new, row["ref_log_probs"]),
            "entropy": made.get("entropy", []),
        }
        shares = {
            name: MEANS[objective[name]]([*values], row, totals)
            for name, values in terms.items()
            if objective[name] is not None
        }
        if objective["page"] is not None:
            given = {"new": new, "old": old, "advantages": row["advantages"]}
            given |= {"micro_batch": row, "totals": totals}
            shares["page"] = share_of_the_page(objective["page"], **given)
        weighted = [WEIGHTS[name] * share for name, share in shares.items()]
        return torch.stack(weighted).sum(), shares

    def _tokens(self, schedule: Any, step: int, seen: int) -> list[int]:
        """Tokens that this rank's embedding got, and those to compute; [] where they are apart."""
        args, dims = self._job["planner"], self._job["dims"]
        pads = dims["sequence_parallel"] or dims["context_parallel"] > 1
        pads = pads or any("pad_" in name or "context" in name for name in args)
        if pads or not seen or "mtp_num_layers" in self._job["model"]["settings"]:
            return []
        # A placeholder has one token.
        return [seen, sum(schedule.nodes(row, 1).offsets[-1] for row in schedule.steps[step])]

    def _fullest(self, schedule: Any, step: int, cap: float) -> float:
        """The largest part of the cap that several samples of a row take."""
        taken = [0.0]
        for row, size in zip(schedule.steps[step], schedule.row_sizes(step), strict=True):
            nodes = schedule.nodes(row, size)
            # A sample may be over the cap alone, or with those that begin it.
            if len({path[-1] for path in nodes.paths if path}) > 1 and not self._job["mixed_sizes"]:
                lengths = zip(nodes.starts, nodes.samples, pairwise(nodes.offsets), strict=True)
                real = (
                    min(end - start, schedule.own_lengths[row[sample]] - first)
                    for first, sample, (start, end) in lengths
                    if sample < len(row)
                )
                taken.append(sum(real) / size / cap)
        return max(taken)

    def _gradients(self) -> list[tuple[str, Tensor, Tensor]]:
        """Name, places in the whole, and this rank's part; none where ranks reduce parts alone."""
        if self._ddp["distributed_optimizer"]:
            return []
        return [
            (name, part, parameter.main_grad.cpu().clone())
            for name, part, parameter in self._parts
            if parameter.requires_grad
        ]

    def _weights(self) -> list[tuple[str, Tensor, Tensor]]:
        if self._ddp["overlap_gather"]:
            for chunk in self._model:  # else the next forward pass gathers them
                chunk.start_param_sync(force_sync=True)
        return [(n, part, p.detach().float().cpu().clone()) for n, part, p in self._parts]
