"""The planner's input beside the lengths: dims, configuration, costs, and common beginnings of all
ranks' samples.

Ranks gather hashes of beginnings. The planning rank makes the forest of a step of them, and the
rank that runs some samples makes it anew of their tokens, with which everything shared is compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.utils import get_model_config, unwrap_model

from mcore_batching.batch.columns import Columns
from mcore_batching.batch.prefix_tree import fields_compared, hashes_of_beginnings
from mcore_batching.megatron import compat
from mcore_batching.megatron.job import Job
from mcore_batching.megatron.prefix_attention import why_no_branches
from mcore_batching.megatron.timing import learner_of
from mcore_batching.megatron.topology import current_dims, first_guess, prediction_depths
from mcore_batching.planning import (
    CostModel,
    OversizeSampleError,
    ParallelDims,
    PlannerConfig,
    PlanningError,
    Problem,
)
from mcore_batching.planning.errors import named
from mcore_batching.planning.forest import Forest, find_forest
from mcore_batching.planning.learn import LearntCosts
from mcore_batching.planning.worker import PlanRequest

MOST_HASHES = 1 << 19
"""Hashes of beginnings that ranks gather for a batch, 8 bytes each. In the plan of a batch with
more tokens, samples share whole blocks of some tokens; in rows they share all."""

MOST_HASHES_OF_TURNS = 1 << 23
"""The same where only a sample that begins another shares its tokens: it is found where it ends
with a block, so that turns of an agent need a hash for each token."""


@dataclasses.dataclass(frozen=True)
class PlanInputs:
    """The planner's arguments beside the lengths; the same on every rank."""

    dims: ParallelDims
    config: PlannerConfig
    cost_model: CostModel
    # Where costs are learnt: `cost_model` is a part of it.
    learnt: LearntCosts | None = dataclasses.field(default=None, compare=False)
    forward_only: bool = False  # under the cap that forward passes have of their own

    @classmethod
    def of(
        cls,
        job: Job,
        chunks: list[Any],
        cost_model: CostModel | None = None,
        *,
        forward_only: bool = False,
    ) -> PlanInputs:
        """The inputs for one of a job's models. Costs that are not given are read from the
        arguments: if these name none, they are what was learnt by now, or of the model's shape."""
        if cost_model is not None and not isinstance(cost_model, CostModel):
            raise TypeError(
                f"cost_model must be a CostModel or None, got {type(cost_model).__name__}; pass "
                "CostModel.from_json(text), or name its file in --dynamic-batch-cost-model"
            )
        dims = current_dims(chunks)
        config = job.options.planner_config(dims)
        if forward_only:
            config = job.options.forward_only_config(config, dims)
        # A file that the user named is never corrected by what is learnt.
        costs, learnt = cost_model or job.options.given_cost_model(), None
        if costs is None:
            model = unwrap_model(chunks[0])
            costs = first_guess(job.options.padded_vocab_size, get_model_config(chunks[0]), model)
            if job.options.learns_cost_model:
                learnt = learner_of(job, chunks).begin(costs, dims)
                costs = learnt.cost_model
        return cls(dims, config, costs, learnt, forward_only)

    def request(self, lengths: tuple[int, ...]) -> PlanRequest:
        """The planner's whole input."""
        return PlanRequest(lengths, self.dims, self.config, self.cost_model, self.forward_only)

    @contextlib.contextmanager
    def naming(self, samples: Sequence[int]) -> Iterator[None]:
        """Let errors of planning name the cap that was planned with, and the sample by its number
        in the batch, which `samples` has of each one planned."""
        try:
            yield
        except PlanningError as error:
            raised = error
            if isinstance(error, OversizeSampleError):
                # The planner counts samples of the step that have segments of their own.
                raised = OversizeSampleError(**vars(error) | {"index": samples[error.index]})
            if self.forward_only:
                cap, own = named("max_tokens_per_gpu"), named("forward_only_max_tokens_per_gpu")
                raised.args = (str(raised).replace(cap, own),)
            raise raised from error.__cause__

    def comparable(self) -> dict[str, Any]:
        """Each setting by its own name, so that an error names the one that differs."""
        parts: tuple[Any, ...] = self.dims, self.config, self.cost_model
        return {n: value for part in parts for n, value in dataclasses.asdict(part).items()}


def say_oversize(job: Job, settings: PlanInputs, longest: int) -> None:
    """Print once a job that the longest sample of all ranks is over the cap, if it is."""
    if settings.config.on_oversize == "error":
        return
    problem = Problem.of([longest], settings.dims, settings.config)
    if problem.oversize:
        over = problem.oversize_error()
        job.say_once(
            "oversize",
            f"a sample has {over.length} tokens, {over.padded_length} after padding, over the cap "
            f"of {over.cap} of a micro-batch: it runs alone, as all such samples do, and takes the "
            f"memory of its length; --max-tokens-per-gpu {over.needed_max_tokens_per_gpu} would "
            "hold it",
        )


@dataclasses.dataclass(frozen=True)
class Beginnings:
    """Common beginnings of all ranks' samples."""

    hashes: Sequence[bytes]  # of each sample, as `hashes_of_beginnings` gives them
    block: int  # tokens between two hashes
    spare: int  # further tokens that shared nodes end short
    branches: bool  # False: only a sample that begins another shares its tokens

    @property
    def digest(self) -> str:
        """By which ranks compare them."""
        settings = f"{self.block} {self.spare} {self.branches} "
        return hashlib.sha256(settings.encode() + b"".join(self.hashes)).hexdigest()[:16]

    def forest(self, lengths: Sequence[int], samples: Sequence[int]) -> Forest:
        """The forest of some samples, given the lengths of all."""
        return find_forest(
            [lengths[i] for i in samples],
            [self.hashes[i] for i in samples],
            block=self.block,
            spare=self.spare,
            branches=self.branches,
        )


def find_beginnings(
    job: Job, chunks: list[Any], data: Columns, steps: Sequence[Sequence[int]], tokens: int
) -> Beginnings:
    """Find common beginnings of samples: of this rank's, by their local indices in each step, and
    of all ranks', which have so many tokens. A collective; what keeps samples that begin alike
    apart is printed once a job."""
    spare, reason = prediction_depths(get_model_config(chunks[0])), why_no_branches(chunks)
    with job.agreement("which prefixes are shared") as agree:
        agree.same("further tokens that are predicted", spare)
        # Each stage has layers of its own: one that cannot run branches is enough.
        reasons = agree.every("why no branches", reason, wanted=bool(reason))
    reason = next(filter(None, reasons.by_rank.values()), "")
    block = max(1, -(-tokens // (MOST_HASHES_OF_TURNS if reason else MOST_HASHES)))
    with job.agreement("finding shared prefixes") as agree:
        hashes = agree.gather("beginnings", hashes_of_beginnings(data, block))
        # Once a job: it hashes the samples twice more.
        is_first = "beginnings" not in job.memory.said
        job.memory.said.add("beginnings")
        apart = agree.sum("tokens kept apart", _kept_apart(data, steps) if is_first else 0)
    if reason:
        few = f", and of {tokens:,} tokens only turns of a multiple of {block}" * (block > 1)
        job.say_once("no branches", f"samples share tokens only with one they begin{few}: {reason}")
    if apart.value:
        job.say_once(
            "fields keep tokens apart",
            f"{apart.value:,} tokens that samples have in common are computed for each, as their "
            "fields per token differ: declare fields that no row is made of as Kind.METADATA",
        )
    config = get_model_config(chunks[0])
    # Its keys have as many heads as its queries: several of them for each token of a row are large.
    is_latent = getattr(config, "multi_latent_attention", False)
    if not reason and is_latent and config.recompute_granularity is None:
        job.say_once(
            "latent attention",
            "multi-latent attention holds the keys that samples share for each of them: set "
            "--recompute-granularity selective (--recompute-modules core_attn)",
        )
    modules = itertools.chain.from_iterable(chunk.modules() for chunk in chunks)
    if not reason and any(map(compat.is_engines_attention, modules)):
        job.say_once("untested", "shared prefixes on Transformer Engine are untested on a GPU")
    found = [each for of_rank in hashes.values for each in of_rank]
    return Beginnings(found, block, spare, not reason)


def _kept_apart(data: Columns, steps: Sequence[Sequence[int]]) -> int:
    """Tokens of this rank's samples that would be shared if tokens alone counted."""
    if not fields_compared(data):
        return 0
    units = [0] * len(data.total_lengths)
    for step, indices in enumerate(steps):
        for index in indices:
            units[index] = step
    tokens = []
    for by_fields in (True, False):
        hashes = hashes_of_beginnings(data, by_fields=by_fields, units=units)
        tokens.append(find_forest(data.total_lengths, hashes).tokens)
    return tokens[0] - tokens[1]
