"""One step to be planned: lengths, parallel dims, options and costs, validated once.

    dims, config = ParallelDims(context_parallel=2), PlannerConfig(max_tokens_per_gpu=512)
    problem = Problem.of([700, 30], dims, config)
    problem.tokens                # [700, 32]: padded to a multiple of 4
    problem.capacity              # 1024: 512 per GPU on two context-parallel ranks
    problem.row_tokens([0, 1])    # 732

Everything below the planner's public functions takes a `Problem` and checks nothing again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mcore_batching.planning.config import (
    PlannerConfig,
    needed_max_tokens_per_gpu,
    placeholder_tokens,
    row_capacity_tokens,
    row_multiple_tokens,
    sample_multiple_tokens,
)
from mcore_batching.planning.costs.cost import CostModel, costs_of_chunks
from mcore_batching.planning.errors import ConfigError, OversizeSampleError, named
from mcore_batching.planning.forest import PrefixTree
from mcore_batching.planning.integers import check_lengths, require_bool, round_up
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.schedule import Schedule


@dataclass(frozen=True)
class Problem:
    """The samples of one step and what they are planned for; made by `Problem.of`.

    A sample is a position in `lengths`, a micro-batch a sequence of samples, a placeholder `()`.
    """

    lengths: tuple[int, ...]
    """Total length of each sample [samples], in tokens."""
    dims: ParallelDims
    """Sizes of the parallel groups."""
    config: PlannerConfig
    """Cap, padding, policies and effort."""
    cost_model: CostModel
    """Costs of samples and micro-batches."""
    forward_only: bool
    """True for forward passes alone, as for old and reference log-probs."""
    trees: tuple[PrefixTree | None, ...] = ()
    """The tree that each sample [samples] stands for, None for a sample of its own; its length is
    then the tree's `size`. Empty: all are samples."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        dims: ParallelDims,
        config: PlannerConfig,
        cost_model: CostModel | None = None,
        *,
        forward_only: bool = False,
        trees: Sequence[PrefixTree | None] = (),
    ) -> Problem:
        """The problem of these samples, its parts checked against each other.

        Raises:
            LengthError: a length is out of range; names the sample.
            ConfigError: the cap leaves no room for a token, or an argument has the wrong type.
            OversizeSampleError: a sample exceeds the cap under `on_oversize="error"`.
        """
        require_bool("forward_only", forward_only, ConfigError)
        costs = CostModel() if cost_model is None else cost_model
        for name, value, kind in (
            ("dims", dims, ParallelDims),
            ("config", config, PlannerConfig),
            ("cost_model", costs, CostModel),
        ):
            if not isinstance(value, kind):
                what = f" must be a {kind.__name__}, got {value!r:.60}; pass {kind.__name__}(…)"
                raise ConfigError(f"{named(name)}{what}")
        config.check_max_context_parallel(dims)  # the config alone lacks the ranks
        checked = tuple(check_lengths(lengths))
        problem = cls(checked, dims, config, costs, forward_only, tuple(trees))
        if config.max_context_parallel is not None:
            _ = problem.on_ranks[1].capacity  # raises where no token fits
        if problem.oversize and config.on_oversize == "error":
            raise problem.oversize_error()
        return problem

    def subset(self, samples: Sequence[int]) -> Problem:
        """The problem of some of the samples; its sample i is `samples[i]` of this one."""
        lengths = tuple(self.lengths[sample] for sample in samples)
        trees = tuple(self.trees[sample] for sample in samples) if self.trees else ()
        return dataclasses.replace(self, lengths=lengths, trees=trees)

    @property
    def num_samples(self) -> int:
        """Samples to be planned."""
        return len(self.lengths)

    @cached_property
    def schedule(self) -> Schedule:
        """The pipeline schedule, with what its passes cost."""
        return Schedule(
            dims=self.dims,
            forward_only=self.forward_only,
            backward_ratio=self.cost_model.backward_ratio,
            which_cost=costs_of_chunks(self.cost_model, self.dims)[1],
        )

    @cached_property
    def costs_of_stages(self) -> list[tuple[float, list[float]]]:
        """For each kind of stage the forward cost of a micro-batch and of each sample [samples];
        a single one, the mean stage's, where stages are equal."""
        kinds, _ = costs_of_chunks(self.cost_model, self.dims)
        if len(kinds) == 1:
            return [(self.cost_model.per_micro_batch, self.costs)]
        return [(kind.per_micro_batch, self._costs_by(kind)) for kind in kinds]

    @cached_property
    def cost_ratios(self) -> list[float]:
        """Forward cost on each kind of stage over that on the mean one, of all samples together."""
        whole = self.cost(range(self.num_samples))
        return [
            cost / whole if whole else 1.0 for cost in self.slot_costs([range(self.num_samples)])
        ]

    @cached_property
    def capacity(self) -> int:
        """Most padded tokens of a micro-batch: the cap, rounded down to the row multiple."""
        return row_capacity_tokens(self.dims, self.config)

    @cached_property
    def row_multiple(self) -> int:
        """Every micro-batch is padded to a multiple of this, in tokens."""
        return row_multiple_tokens(self.dims, self.config)

    @cached_property
    def max_samples(self) -> int:
        """Most samples of a micro-batch."""
        return self.config.max_samples_per_row or max(1, self.num_samples)

    @cached_property
    def tokens(self) -> list[int]:
        """Padded tokens of each sample [samples]."""
        # Never 0: an empty segment of a row breaks attention kernels.
        multiple = sample_multiple_tokens(self.dims, self.config)
        return [round_up(length or 1, multiple) for length in self.lengths]

    @cached_property
    def costs(self) -> list[float]:
        """Forward cost of each sample on a mean stage [samples]."""
        return self._costs_by(self.cost_model)

    def _costs_by(self, model: CostModel) -> list[float]:
        cost = model.sample
        if not self.trees:
            return [cost(length) for length in self.lengths]
        return [
            cost(length) if tree is None else tree.cost(model)
            for length, tree in zip(self.lengths, self.trees, strict=True)
        ]

    @property
    def on_ranks(self) -> dict[int, Problem]:
        """{CP size: this problem as if every micro-batch had that size}, by ascending size, with
        costs on one rank of the micro-batch; without dynamic CP this problem alone."""
        # Not kept: a reference to itself would keep the problem until the garbage collector runs.
        if self.config.max_context_parallel is None:
            return {self.dims.context_parallel: self}
        return self._on_ranks

    @cached_property
    def _on_ranks(self) -> dict[int, Problem]:
        config = dataclasses.replace(self.config, max_context_parallel=None)
        found = {}
        for size in self.dims.row_sizes(self.config.max_context_parallel or 1):
            dims, model = self.dims.for_rows_on(size), self.cost_model.on_ranks(size)
            found[size] = dataclasses.replace(self, dims=dims, config=config, cost_model=model)
        return found

    @cached_property
    def row_sizes(self) -> tuple[int, ...]:
        """Context-parallel sizes under which a placeholder fits into a micro-batch, ascending."""
        # A larger size pads to a larger multiple, which a small cap may not hold.
        return tuple(
            size
            for size, rows in self.on_ranks.items()
            if rows.placeholder_tokens <= rows.config.cap_tokens(rows.dims)
        )

    @property
    def num_ranks(self) -> int:
        """Ranks that have micro-batches of their own."""
        return self.config.num_ranks(self.dims)

    @cached_property
    def least_costs(self) -> list[float]:
        """Least forward cost of each sample [samples], summed over the ranks that share it."""
        if self.config.max_context_parallel is None:
            return self.costs
        return [size * self.on_ranks[size].costs[i] for i, size in enumerate(self.least_sizes)]

    @cached_property
    def least_sizes(self) -> list[int]:
        """Least context-parallel size under which each sample [samples] fits the cap; for an
        oversize sample the largest."""
        *smaller, largest = self.row_sizes
        oversize = {size: self.on_ranks[size].oversize for size in smaller}
        return [
            next((size for size in smaller if i not in oversize[size]), largest)
            for i in range(self.num_samples)
        ]

    @cached_property
    def oversize(self) -> frozenset[int]:
        """The samples that exceed the cap; each is alone in its micro-batch."""
        if self.config.max_context_parallel is None:
            return frozenset(i for i, n in enumerate(self.tokens) if n > self.capacity)
        return frozenset.intersection(*(self.on_ranks[size].oversize for size in self.row_sizes))

    @cached_property
    def fewest_rows(self) -> int:
        """Lower bound on the number of micro-batches; one that c ranks share counts c times."""
        is_dynamic = self.config.max_context_parallel is not None
        # Under dynamic CP padding depends on the size, which is not chosen yet: real tokens count.
        tokens = [max(n, 1) for n in self.lengths] if is_dynamic else self.tokens
        fitting = [n for i, n in enumerate(tokens) if i not in self.oversize]
        capacity = self.config.max_tokens_per_gpu if is_dynamic else self.capacity
        by_tokens = -(-sum(fitting) // capacity)
        by_samples = -(-len(fitting) // self.max_samples)
        # An oversize sample is on as many ranks as may be, and takes a place on each.
        alone = self.row_sizes[-1] if is_dynamic else 1
        return alone * len(self.oversize) + max(by_tokens, by_samples)

    @cached_property
    def placeholder_tokens(self) -> int:
        """Padded tokens of a placeholder."""
        return placeholder_tokens(self.dims, self.config)

    def row_tokens(self, samples: Sequence[int]) -> int:
        """Padded tokens of a micro-batch; 0 for no samples."""
        return round_up(sum(self.tokens[sample] for sample in samples), self.row_multiple)

    def held_tokens(self, samples: Sequence[int], size: int) -> int:
        """Padded tokens of a micro-batch of this context-parallel size, or of a placeholder, on the
        dims' context-parallel ranks."""
        rows = self.on_ranks[size]
        tokens = rows.row_tokens(samples) or rows.placeholder_tokens
        # Each rank of the row holds tokens / size.
        return tokens * self.dims.context_parallel // size

    def cost(self, samples: Sequence[int]) -> float:
        """Forward cost of a micro-batch on a mean stage."""
        return _cost(self.cost_model.per_micro_batch, self.costs, samples)

    def slot_costs(self, slots: Iterable[Sequence[int]]) -> list[float]:
        """Forward cost of each micro-batch on each kind of stage [slots * kinds], as clocks take
        them."""
        kinds = self.costs_of_stages
        return [_cost(*kind, samples) for samples in slots for kind in kinds]

    def weight(self, samples: Sequence[int]) -> float:
        """The quantity that `config.balance` evens out: padded tokens for "tokens", else cost."""
        by_tokens = self.config.balance == "tokens"
        return float(self.row_tokens(samples)) if by_tokens else self.cost(samples)

    def oversize_error(self) -> OversizeSampleError:
        """The error for the longest oversize sample, with the cap that it needs."""
        if self.config.max_context_parallel is not None:
            return self.on_ranks[self.row_sizes[-1]].oversize_error()
        # The longest: a cap that holds it holds the others too.
        worst = max(self.oversize, key=lambda sample: (self.lengths[sample], -sample))
        length, dims, config = self.lengths[worst], self.dims, self.config
        return OversizeSampleError(
            index=worst,
            length=length,
            padded_length=self.tokens[worst],
            cap=config.cap_tokens(dims),
            needed_max_tokens_per_gpu=needed_max_tokens_per_gpu(length, dims, config),
            num_oversize=len(self.oversize),
        )


def _cost(fixed: float, costs: Sequence[float], samples: Sequence[int]) -> float:
    # CostModel.micro_batch with the costs of samples known: the search calls it very often. In the
    # same order of additions, since plans must not depend on which of the two was called.
    total = 0.0
    for sample in samples:
        total += costs[sample]
    return fixed + total
