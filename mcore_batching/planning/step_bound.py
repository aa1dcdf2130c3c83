"""A time before which no plan's step ends, closer to the best one than `step_time_floor`.

Proof, in two parts; the third of the floor's, the longest sample's own way, is taken from there.

Part A, the mean rank. With K micro-batches per rank let m be the mean over ranks of the costs of
each slot. A rank's end is the length of the longest of many chains of passes (`critical_path`),
each a sum of weights times costs. The longest of them is no shorter than any mean of them, and the
latest rank ends no sooner than the mean of ranks. So for any weights w that are a mean of chains',

    end >= sum(w * m) >= overhead * sum(w) + work * min(w)

because each slot of m costs the overhead of a micro-batch or more, and all of them together K
overheads and a rank's mean work. The weights that make this largest are looked for by a linear
program that is given one chain after the other; any that it stops at give a bound, whatever its
rounding errors, since only that they are a mean of chains' is used. With ranks in lockstep a slot
costs the most of any rank, which is no less than m. Ranks that share micro-batches wait for each
other, and end no sooner than by themselves; a rank's work is then the least that samples can have.

Part B, every K. No plan has fewer micro-batches per rank than hold all tokens, and the bound is the
least of those of every K from there on. A slot of no cost put first takes no time, so w of one K
also gives a bound for each smaller one, of min(w) times all that a rank's slots cost. Beyond the
largest K that is looked at, all passes of the last stage and a first and last overhead are left:
they grow with K, so the first of these is a bound for all that follow.
"""

from __future__ import annotations

import functools
import math

from mcore_batching.planning.bounds import step_time_floor
from mcore_batching.planning.cost import ordered_sum
from mcore_batching.planning.critical_path import critical_path
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.profiles import profile

MOST_SLOTS = 40
"""Beyond so many the work alone is the bound."""
MOST_CHAINS = 120
"""Chains that a linear program is given at most; one takes a millisecond or two."""
MOST_PIVOTS = 800
"""Exchanges of variables at most, for programs that go round in circles by rounding."""
TIES = 1e-6
"""Differences between the gains of slots."""
NEARER = 0.3
"""Share of the way from the best costs known to those of the program."""
LOWEST = 0.3
"""Last slot over a full one of the costs that are tried first."""
CLOSE_ENOUGH = 1.005
"""The end of the costs found over the bound at which no more chains are looked for."""


def step_time_bound(problem: Problem) -> float:
    """A time before which no plan's step can end, in units of cost; at least `step_time_floor`.

    The interleaved schedule's is the floor.
    """
    floor = step_time_floor(problem)
    dims, model = problem.dims, problem.cost_model
    if dims.virtual_pipeline > 1 or not problem.num_samples:
        return floor
    fewest = -(-problem.fewest_rows // problem.num_ranks)
    work, fixed = ordered_sum(problem.least_costs) / problem.num_ranks, model.per_micro_batch
    ratio, stages = model.backward_ratio, dims.pipeline_parallel
    least, first = math.inf, fewest
    # Placeholders in all ranks can be left out, so no step needs more than one sample a slot.
    while first <= max(problem.num_samples, fewest):
        passes = 1.0 if problem.forward_only else 1.0 + ratio
        at_best = passes * (work + (first + stages - 1) * fixed)
        if first > MOST_SLOTS or at_best >= least:
            # Of this many or more.
            least = min(least, at_best)
            break
        last = max(first, min(first * 9 // 8, MOST_SLOTS))
        if problem.forward_only:
            # Every stage waits for the costliest once, which costs the mean or more.
            smallest = 1.0 + (stages - 1) / last
            whole = last * smallest
        else:
            smallest, whole = best_weights(last, stages, ratio)
        overhead = whole if first == last else first * smallest
        least = min(least, max(at_best, overhead * fixed + work * smallest))
        first = last + 1
    return max(floor, least)


@functools.lru_cache(maxsize=1024)
def best_weights(count: int, stages: int, ratio: float) -> tuple[float, float]:
    """Least and sum of the weights of that mean of chains whose least weight is largest."""
    if stages == 1:
        return 1.0 + ratio, (1.0 + ratio) * count
    dims = ParallelDims(pipeline_parallel=stages)
    # All passes of the last stage: no weight is zero, so the program is bounded.
    chain = [1.0 + ratio] * count
    chain[0] += stages - 1
    chain[-1] += ratio * (stages - 1)
    program = _Program(chain)
    # The search's profiles are within a hundredth of the costs that are looked for.
    sizes = profile(count, stages, min(stages - 1, count - 1), LOWEST)
    whole = ordered_sum(sizes)
    inside, soonest = [size / whole for size in sizes], math.inf
    best = 1.0 + ratio, (1.0 + ratio) * count
    for _ in range(MOST_CHAINS):
        # Rounding errors may spoil the program in the end.
        mean = program.mean_chain()
        best = max(best, (min(mean), ordered_sum(mean)))
        costs, longest = program.costs(), program.longest()
        if soonest <= CLOSE_ENOUGH * longest or program.pivots > MOST_PIVOTS:
            break
        # Chains of costs between the program's, which jump about, and the best known tell more.
        for share in (0.0, NEARER, 1.0):
            between = [old + share * (new - old) for old, new in zip(inside, costs, strict=True)]
            end, chain = critical_path(between, dims, backward_ratio=ratio)
            if end < soonest:
                inside, soonest = between, end
            length = 0.0
            for weight, cost in zip(chain, costs, strict=True):
                length += weight * cost
            if length > longest * (1.0 + 1e-9):
                program.add(chain)
                break
        else:
            break
    return best


class _Program:
    """Costs that add up to one and make the longest of some chains as short as possible.

    The simplex method, for the largest sum of x with chain * x <= 1 for each chain; the costs are x
    over its sum. Rows say what a basic variable is: row[-1] - sum(row[i] * other variable i).
    Variable j is x_j, and a chain stands for what it leaves of its 1.
    """

    def __init__(self, chain: list[float]) -> None:
        self._count = len(chain)
        self._chains = [chain]
        self._others = list(range(self._count))
        self._basic = [self._count]
        self._rows = [[*chain, 1.0]]
        # Not quite equal, since ties let the method go round in circles.
        self._gain = [1.0 + TIES * (slot * slot % 97) for slot in range(self._count)] + [0.0]
        self.pivots = 0
        self._pivot(0, min(range(self._count), key=chain.__getitem__))

    def _x(self) -> list[float]:
        x = [0.0] * self._count
        for variable, row in zip(self._basic, self._rows, strict=True):
            if variable < self._count:
                x[variable] = max(0.0, row[-1])
        return x

    def longest(self) -> float:
        """Length of the longest chain at the costs."""
        return 1.0 / ordered_sum(self._x())

    def costs(self) -> list[float]:
        """The costs of each slot."""
        x = self._x()
        whole = ordered_sum(x)
        return [each / whole for each in x]

    def mean_chain(self) -> list[float]:
        """The mean of the chains whose least weight is largest."""
        mean, whole = [0.0] * self._count, 0.0
        for variable, gain in zip(self._others, self._gain, strict=False):
            if variable >= self._count and gain < 0.0:
                whole -= gain
                for slot, weight in enumerate(self._chains[variable - self._count]):
                    mean[slot] -= gain * weight
        return [each / whole for each in mean]

    def add(self, chain: list[float]) -> None:
        """Add a chain that is longer than one at the costs."""
        before = self.longest()
        place = {variable: index for index, variable in enumerate(self._others)}
        row = [chain[variable] if variable < self._count else 0.0 for variable in self._others]
        row.append(1.0)
        for variable, basic in zip(self._basic, self._rows, strict=True):
            if variable < self._count and variable not in place and chain[variable]:
                weight = chain[variable]
                row = [old - weight * other for old, other in zip(row, basic, strict=True)]
        self._basic.append(self._count + len(self._chains))
        self._rows.append(row)
        self._chains.append(chain)
        for _ in range(4 * self._count):
            lowest = min(range(len(self._rows)), key=lambda number: self._rows[number][-1])
            row = self._rows[lowest]
            if row[-1] > -1e-12:
                break
            entering = [index for index in range(self._count) if row[index] < -1e-9]
            if not entering:
                break
            self._pivot(lowest, min(entering, key=lambda index: self._gain[index] / row[index]))
        if self.longest() > before * (1.0 + 1e-6):
            # A chain that is not as long as the longest may be left out; where the longest stays
            # what it was, it would come back.
            kept = [number for number, basic in enumerate(self._basic) if basic < self._count]
            self._basic = [self._basic[number] for number in kept]
            self._rows = [self._rows[number] for number in kept]

    def _pivot(self, number: int, index: int) -> None:
        """Exchange the basic variable of a row for another one."""
        self.pivots += 1
        row = self._rows[number]
        pivot = row[index]
        row = [each / pivot for each in row]
        row[index] = 1.0 / pivot
        for other, changed in enumerate(self._rows):
            if other != number and changed[index]:
                self._rows[other] = _without(changed, row, index)
        self._gain = _without(self._gain, row, index)
        self._rows[number] = row
        self._basic[number], self._others[index] = self._others[index], self._basic[number]


def _without(row: list[float], pivot: list[float], index: int) -> list[float]:
    """A row in which what the pivot's row says stands for the variable at `index`."""
    share = row[index]
    changed = [old - share * new for old, new in zip(row, pivot, strict=True)]
    changed[index] = -share * pivot[index]
    return changed
