"""Sizes of a training job's parallel groups, as far as a plan depends on them; those that exist are
ones that Megatron's schedules can run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mcore_batching.planning.errors import ParallelDimsError, named
from mcore_batching.planning.integers import at_least, check_options

MAX_RANKS = 2**17
"""More GPUs than any job has. Beyond, even few samples take minutes: a plan has a list per rank."""
MAX_CHUNKS = 1024
"""Limit of chunks over all stages: more than any model has layers, each of which a clock passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelDims:
    """Sizes of the parallel groups.

    Raises:
        ParallelDimsError: a size is no integer, below 1 or beyond any job's; experts do not divide
            the ranks; or the interleaved schedule cannot run.
    """

    data_parallel: int = 1
    """Ranks that hold different samples."""
    pipeline_parallel: int = 1
    """Pipeline stages."""
    virtual_pipeline: int = 1
    """Model chunks a pipeline stage holds; more than 1 selects the interleaved schedule."""
    context_parallel: int = 1
    """Ranks over which each sample is cut."""
    tensor_parallel: int = 1
    """Ranks over which each layer is cut."""
    expert_parallel: int = 1
    """Ranks over which experts are spread; they run every slot in lockstep."""
    sequence_parallel: bool = False
    """True if activations are cut along the sequence over the tensor-parallel ranks."""
    microbatch_group_size: int | None = None
    """Micro-batches a model chunk runs before the next chunk does, under the interleaved schedule;
    None is Megatron's default, `pipeline_parallel`."""
    waits_for_sends: bool = True
    """True if the interleaved schedule waits until a sent output has left before it frees it, as
    megatron-core does from 0.18 on. Without, it waits one forward pass later, and steps of unequal
    costs end about 5 % sooner."""

    def __post_init__(self) -> None:
        """Check ranges, sizes against each other, and the interleaved schedule's conditions."""
        check_options(self, ParallelDimsError)
        self._check_sizes()
        if self.virtual_pipeline > 1:
            self._check_interleaving()

    def _check_sizes(self) -> None:
        """Check sizes against each other and the largest that any job has."""
        within = self.data_parallel * self.context_parallel * self.tensor_parallel
        if within * self.pipeline_parallel > MAX_RANKS:
            raise ParallelDimsError(
                f"{within * self.pipeline_parallel} ranks are more than {MAX_RANKS}; decrease "
                f"{named('data_parallel')} or {named('pipeline_parallel')}"
            )
        # Megatron spreads experts over data-, context- and tensor-parallel ranks of a stage.
        if within % self.expert_parallel:
            raise ParallelDimsError(
                f"{named('expert_parallel')} must divide the {within} ranks of a pipeline stage, "
                f"got {self.expert_parallel}; set a divisor, or {named('data_parallel')} to a "
                "multiple"
            )
        for name, limit in (
            ("pipeline_parallel", MAX_CHUNKS),
            ("virtual_pipeline", MAX_CHUNKS // self.pipeline_parallel),
            # No more slots over all ranks than the largest job has ranks.
            ("microbatch_group_size", MAX_RANKS // self.data_parallel),
        ):
            size = getattr(self, name)
            if size is not None and size > limit:
                raise ParallelDimsError(f"{named(name)} must be at most {limit}, got {size}")

    def _check_interleaving(self) -> None:
        if self.pipeline_parallel == 1:
            raise ParallelDimsError(
                f"{named('virtual_pipeline', self.virtual_pipeline)} needs more than one pipeline "
                f"stage; set {named('pipeline_parallel')} to 2 or more, or "
                f"{named('virtual_pipeline', 1)}"
            )
        if self.group_size < self.pipeline_parallel:
            raise ParallelDimsError(
                f"{named('microbatch_group_size')} must be at least "
                f"{named('pipeline_parallel', self.pipeline_parallel)}, got {self.group_size}; "
                "increase it, or leave it out"
            )

    @property
    def sample_alignment_tokens(self) -> int:
        """Each sample's padded length is a multiple of this."""
        # Context parallelism cuts a sample into `2 * context_parallel` equal chunks, of which each
        # rank has two; sequence parallelism cuts a rank's part into `tensor_parallel` parts.
        context = 2 * self.context_parallel if self.context_parallel > 1 else 1
        sequence = self.tensor_parallel if self.sequence_parallel else 1
        return context * sequence

    @property
    def data_context_parallel(self) -> int:
        """Data- times context-parallel ranks: those that dynamic CP gives rows to."""
        return self.data_parallel * self.context_parallel

    def row_sizes(self, most: int) -> tuple[int, ...]:
        """Context-parallel sizes of rows under dynamic CP, up to `most`, ascending: powers of two
        that divide the ranks, and all ranks. On 12 ranks: 1, 2, 4, 12."""
        ranks = self.data_context_parallel
        # Only divisors make blocks that tile the ranks, each beginning at a multiple of its size.
        powers = (1 << doublings for doublings in range(ranks.bit_length()))
        sizes = {size for size in powers if ranks % size == 0} | {ranks}
        return tuple(sorted(size for size in sizes if size <= most))

    def for_rows_on(self, ranks: int) -> ParallelDims:
        """The same GPUs with context-parallel size `ranks` for every row."""
        return dataclasses.replace(
            self, data_parallel=self.data_context_parallel // ranks, context_parallel=ranks
        )

    @property
    def group_size(self) -> int:
        """The interleaved schedule's micro-batch group size, Megatron's default filled in."""
        return self.microbatch_group_size or self.pipeline_parallel

    @property
    def slots_per_group(self) -> int:
        """Micro-batches that run as a group; 1 without the interleaved schedule."""
        return self.group_size if self.virtual_pipeline > 1 else 1

    @property
    def in_lockstep(self) -> bool:
        """True with expert parallelism: in each slot all ranks wait for the straggler."""
        return self.expert_parallel > 1

    @property
    def lockstep_groups(self) -> list[range]:
        """Data-parallel ranks that run every slot together: all with expert parallelism, else each
        by itself."""
        ranks = self.data_parallel
        return [range(ranks)] if self.in_lockstep else [range(r, r + 1) for r in range(ranks)]

    def is_legal_num_microbatches(self, num_microbatches: int) -> bool:
        """True if Megatron's schedule for these dims runs `num_microbatches` per rank."""
        # Megatron's condition: the last group is whole, or at least as long as the pipeline.
        remainder = num_microbatches % self.slots_per_group
        is_whole = remainder == 0 or remainder >= self.pipeline_parallel
        return is_whole and num_microbatches >= self.slots_per_group

    def round_up_num_microbatches(self, num_microbatches: int) -> int:
        """The least legal number of micro-batches that is `num_microbatches` or more; 1 or more
        even for 0."""
        least = at_least("num_microbatches", num_microbatches, 0, ParallelDimsError)
        count = max(self.slots_per_group, least)
        # A last group shorter than the pipeline would not fill it, which Megatron refuses.
        remainder = count % self.slots_per_group
        if 0 < remainder < self.pipeline_parallel:
            count += self.pipeline_parallel - remainder
        return count
