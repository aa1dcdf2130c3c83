"""A job drawn at random on one rank: what it plans, runs forward and trains, through the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from bootstrap import pipeline_config
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor

from kit.exactness import arguments, counted_tokens
from kit.model import (
    adam,
    local_part,
    named_parameters,
    packed_model,
    transformer_config,
)
from kit.objective import MEANS, kl_terms, policy_terms, share_of_the_page
from kit.random_reference import WEIGHTS
from kit.samples import take
from mcore_batching.batch import DEFAULT_SCHEMA, Kind, PackedMicroBatch, StepTotals
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
from mcore_batching.megatron.iterator import plan_forward_passes, rollout_of
from mcore_batching.megatron.job import job_of
from mcore_batching.megatron.topology import is_last_stage
from mcore_batching.planning import ParallelDims
from mcore_batching.rl import pad_batch

SCHEMA = DEFAULT_SCHEMA.declare("old_log_probs", Kind.PER_RESPONSE_TOKEN).declare(
    "old_entropy", Kind.PER_RESPONSE_TOKEN
)
OPTIONS = ("temperature", "chunk_tokens")
"""Of an objective, those of log-probabilities."""
FORWARD_CAP = "dynamic_batch_forward_only_max_tokens_per_gpu"
Samples = dict[str, list[Any]]
BEHAVIOUR = {"none": "rollout_log_probs", "old": "old_log_probs", "replaced": "log_probs"}
"""The field that a policy loss compares with, by what the forward pass before is for."""


class RandomRun:
    """A drawn job on this rank.

    Args:
        job: as drawn.
        shape: its dims, whose groups are there.
        weights: whole weights to begin with.

    Attributes:
        seen: what came of every forward pass and step on this rank, in order.
    """

    def __init__(
        self, job: Mapping[str, Any], shape: ParallelDims, weights: Mapping[str, Tensor]
    ) -> None:
        self._job, self._shape = job, shape
        self._ddp = job["ddp"]
        self._model = self._build(weights)
        self._optimizer = adam(
            self._model,
            self._ddp["distributed_optimizer"],
            self._ddp["overlap_gather"],
            job["bfloat16"],
        )
        self._args = arguments(shape, **job["planner"])
        self.seen: list[dict[str, Any]] = []
        self._rollout = -1

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

    def train(self, samples: Samples, rollout: Mapping[str, Any]) -> None:
        """Plan the samples, run them forward if asked to, and train every step."""
        self._rollout += 1
        self._args.global_batch_size = rollout.get("global_batch_size")
        check_settings(self._args, self._model)
        data, mine, steps = self._own(samples, rollout)
        given = map_tensors(data, torch.clone)
        iterators, counts = get_data_iterator(
            self._args,
            self._model,
            given if self._holds else None,
            schema=SCHEMA,
            steps=steps if self._holds else None,
        )
        # What the caller does to its own afterwards changes nothing.
        map_tensors(given, torch.Tensor.zero_)
        self._forward(iterators, counts, mine)
        schedule = schedule_of(iterators)
        held = schedule.rollout_data
        are_padding = held.get("is_padding") or [False] * len(held["tokens"])
        for step in range(len(counts)):
            rows = schedule.steps[step]
            with counted_tokens(self._model) as tokens:
                result = train_step(
                    self._loss,
                    self._args,
                    self._model,
                    iterators,
                    counts,
                    self._optimizer,
                    step=step,
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
                    "totals": result.totals,
                    "slots": [result.num_microbatches, counts[step], len(rows)],
                    "ends with a placeholder": any(rows)
                    and not rows[-1]
                    and not self._job["mixed_sizes"],
                    "tokens": self._tokens(schedule, step, sum(tokens)),
                    "fullest": self._fullest(
                        schedule, step, self._job["planner"].get("max_tokens_per_gpu", math.inf)
                    ),
                    "gradients": self._gradients(),
                    "weights": self._weights(),
                }
            )
        # What the caller does to its own afterwards changes nothing.
        map_tensors(given, torch.Tensor.zero_)
        self._forward(iterators, counts, mine)

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
        owners = [rank for _, _, rank in rollout["samples"]]
        mine = [i for i, rank in enumerate(owners) if rank == replica]
        data = take(samples, mine)
        padded_to = rollout.get("padded_to")
        if padded_to is not None and mine:
            data = pad_batch(data, padded_to, SCHEMA, pad_token_id=0)
        if padded_to is not None:
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
        objective = self._job["objective"]
        prefix = "old_" if objective["forward_only"] == "old" else ""
        outputs = forward_only(
            self._statistics, self._args, self._model, iterators, counts, store_prefix=prefix
        )
        cap = getattr(self._args, FORWARD_CAP, None)
        fullest = 0.0
        if cap is not None:
            own = plan_forward_passes(rollout_of(iterators), job_of(self._args), self._model)
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
        outputs.pop(f"{prefix}length", None)
        if objective["forward_only"] != "none":
            add_fields(iterators, outputs)

    def _statistics(self, logits: Any, micro_batch: PackedMicroBatch) -> dict[str, Any]:
        options = {name: self._job["objective"][name] for name in OPTIONS}
        lengths = [torch.tensor(length) for length in micro_batch.total_lengths]
        if not self._job["objective"]["forward_entropy"]:
            log_probs = response_log_probs(logits, micro_batch, **options)
            return {"log_probs": log_probs, "length": lengths}
        log_probs, entropy = response_log_probs_and_entropy(logits, micro_batch, **options)
        return {"log_probs": log_probs, "entropy": entropy, "length": lengths}

    def _loss(
        self, logits: Any, row: PackedMicroBatch, totals: StepTotals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        objective = self._job["objective"]
        options = {name: objective[name] for name in OPTIONS}
        if objective["entropy"] is None:
            log_probs = response_log_probs(logits, row, **options)
            entropy = None
        else:
            log_probs, entropy = response_log_probs_and_entropy(logits, row, **options)
        behaviour = BEHAVIOUR[objective["forward_only"]]
        if objective["terms"] == "likelihood":
            policy = [-values for values in log_probs]
        else:
            given = zip(log_probs, row[behaviour], row["advantages"], strict=True)
            policy = [policy_terms(*values) for values in given]
        shares = {"policy": MEANS[objective["policy"]](policy, row, totals)}
        if objective["kl"] is not None:
            terms = [kl_terms(*each) for each in zip(log_probs, row["ref_log_probs"], strict=True)]
            shares["kl"] = MEANS[objective["kl"]](terms, row, totals)
        if objective["page"] is not None:
            given = {"new": log_probs, "old": row[behaviour], "advantages": row["advantages"]}
            shares["page"] = share_of_the_page(
                objective["page"], **given, micro_batch=row, totals=totals
            )
        if entropy is not None:
            shares["entropy"] = MEANS[objective["entropy"]](entropy, row, totals)
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
