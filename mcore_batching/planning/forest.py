"""Prefix trees: what samples of a step have in common at their beginnings is computed once.

    samples            nodes      start  end  parent
    a b c d | e f      a b c          0    3    none
    a b c d | g h i      d e f        3    6    a b c
                         d g h i      3    7    a b c

A causal model computes the same for a token whatever follows it. A shared node ends one token short
of what is common, so that each position has one token to predict: here d begins both branches. The
samples stay: each is the path from a root to the node that holds its last token.

Part of a tree is planned as one unit (`PrefixTree`), in one micro-batch. Its tokens count towards
the cap. The attention of a node reads the keys of its whole path, so a part costs the sum over its
nodes of `cost(end) - cost(start)`.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add, attrgetter
from typing import NamedTuple

from mcore_batching.planning.config import (
    PlannerConfig,
    row_capacity_tokens,
    sample_multiple_tokens,
)
from mcore_batching.planning.costs.cost import CostModel, ordered_sum
from mcore_batching.planning.parallel_dims import ParallelDims

KEYS_PER_TOKEN = 8
"""Gathered keys that a token's room in a micro-batch holds. Keys and values of a key take about a
thirtieth of the activations of a token; a part with more keys takes more room than its tokens."""


@dataclass(frozen=True)
class PrefixTree:
    """Samples that are computed together, in one micro-batch."""

    samples: tuple[int, ...]
    """Indices of the samples, ascending."""
    nodes: tuple[tuple[int, int], ...]
    """Places within its samples at which each node starts and ends, in tokens."""

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return sum(end - start for start, end in self.nodes)

    @property
    def keys(self) -> int:
        """Keys that are gathered for attention: each node's whole path."""
        return sum(end for _, end in self.nodes)

    @property
    def size(self) -> int:
        """Tokens of room that it takes in a micro-batch: its own, or more for many keys."""
        return max(self.tokens, -(-self.keys // KEYS_PER_TOKEN))

    def renumbered(self, numbers: Sequence[int] | Mapping[int, int]) -> PrefixTree:
        """The same tree of samples with other indices: `numbers[i]` is that of sample i."""
        return PrefixTree(tuple(numbers[sample] for sample in self.samples), self.nodes)

    def cost(self, model: CostModel) -> float:
        """Forward cost on a mean stage."""
        of_nodes = (model.sample(end) - model.sample(start) for start, end in self.nodes)
        return ordered_sum(of_nodes)


@dataclass(frozen=True)
class Node:
    """Tokens that all samples below have in common."""

    sample: int
    """A sample that has these tokens."""
    start: int
    """Place of its first token in that sample."""
    end: int
    """Place behind its last one."""
    parent: int
    """The node before it; -1 for a root."""


@dataclass(frozen=True)
class Forest:
    """The prefix trees of some samples."""

    lengths: tuple[int, ...]
    """Total length of each sample [samples], in tokens."""
    nodes: tuple[Node, ...]
    """Parents before their children, each subtree in one stretch."""
    last: tuple[int, ...]
    """The leaf on the path of each sample [samples]. A sample that begins another ends before it;
    -1 for a sample without tokens."""

    def path(self, sample: int) -> list[int]:
        """The nodes that hold a sample's tokens, from the root on."""
        found, node = list[int](), self.last[sample]
        while node >= 0:
            found.append(node)
            node = self.nodes[node].parent
        # Those behind its last token are of the sample that it begins.
        return [n for n in found[::-1] if self.nodes[n].start < self.lengths[sample]]

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return sum(node.end - node.start for node in self.nodes)

    @property
    def has_branches(self) -> bool:
        """True if two samples begin alike and then differ, so that neither begins the other."""
        return any(node.parent >= 0 for node in self.nodes)

    @cached_property
    def samples_of_leaves(self) -> dict[int, tuple[int, ...]]:
        """The samples that end in each leaf or, as samples that begin others, before it."""
        found: dict[int, list[int]] = {}
        for sample, leaf in enumerate(self.last):
            if leaf >= 0:
                found.setdefault(leaf, []).append(sample)
        return {leaf: tuple(samples) for leaf, samples in found.items()}

    def tree(self, samples: Sequence[int]) -> PrefixTree:
        """Some samples as one unit, with the nodes that these alone would have."""
        held: dict[int, int] = {}  # each node that is kept, with its number of children
        for sample in samples:
            node = self.last[sample]
            while node >= 0 and node not in held:
                held[node] = 0
                node = self.nodes[node].parent
        for node in held:
            if self.nodes[node].parent >= 0:
                held[self.nodes[node].parent] += 1
        nodes, starts = list[tuple[int, int]](), dict[int, int]()
        for node in sorted(held):
            parent = self.nodes[node].parent
            # A node and its only child are one.
            is_joined = parent >= 0 and held[parent] == 1
            starts[node] = starts[parent] if is_joined else self.nodes[node].start
            if held[node] != 1:
                nodes.append((starts[node], self.nodes[node].end))
        return PrefixTree(tuple(sorted(samples)), tuple(nodes))

    def joined(self, later: Forest) -> Forest:
        """The samples of both, those of `later` behind these."""
        samples, nodes = len(self.lengths), len(self.nodes)
        moved = [
            Node(node.sample + samples, node.start, node.end, _behind(node.parent, nodes))
            for node in later.nodes
        ]
        last = self.last + tuple(_behind(node, nodes) for node in later.last)
        return Forest(self.lengths + later.lengths, self.nodes + tuple(moved), last)


def _behind(node: int, count: int) -> int:
    return node if node < 0 else node + count


def find_forest(
    lengths: Sequence[int],
    beginnings: Sequence[bytes],
    *,
    block: int = 1,
    spare: int = 0,
    branches: bool = True,
) -> Forest:
    """The forest of samples, from hashes of their beginnings.

    Args:
        lengths: total length of each sample [samples], in tokens.
        beginnings: of each sample [samples] 8 bytes for its first `block`, `2 * block`, ... tokens;
            fewer where it is to share no more. Equal bytes stand for equal tokens.
        block: tokens between two hashes. Samples share what whole blocks have in common.
        spare: further tokens that a shared node ends short, for the labels of multi-token
            prediction.
        branches: False: only a sample that begins another shares its tokens.
    """
    # Sorted by their hashes, samples that begin alike stand together, and a sample right before one
    # that it begins.
    order = sorted((i for i, n in enumerate(lengths) if n), key=beginnings.__getitem__)
    common = [0, *(_common(beginnings, *pair) * block for pair in itertools.pairwise(order)), -1]
    leaf_of, leaves, cuts = dict[int, int](), list[int](), list[int]()
    begun, shared = list[int](), math.inf  # of the leaf to come
    for place, sample in enumerate(order):
        begun.append(sample)
        shared = min(shared, common[place])
        if common[place + 1] != lengths[sample]:  # it does not begin the next one
            leaf_of |= dict.fromkeys(begun, sample)
            leaves.append(sample)
            # The tokens that each leaf shares with the one before it.
            cuts.append(max(0, int(shared) - 1 - spare) if branches else 0)
            begun, shared = [], math.inf
    nodes, of_leaf = _nodes(lengths, leaves, cuts)
    last = tuple(of_leaf[leaf_of[i]] if i in leaf_of else -1 for i in range(len(lengths)))
    return Forest(tuple(lengths), tuple(nodes), last)


def _common(beginnings: Sequence[bytes], one: int, other: int) -> int:
    """Blocks that two samples have in common."""
    first, second = memoryview(beginnings[one]).cast("q"), memoryview(beginnings[other]).cast("q")
    # Behind the first difference all hashes differ.
    return bisect_left(
        range(min(len(first), len(second))), True, key=lambda at: first[at] != second[at]
    )


def _nodes(
    lengths: Sequence[int], leaves: Sequence[int], cuts: Sequence[int]
) -> tuple[list[Node], dict[int, int]]:
    """Nodes of sorted leaves, and the node of each, given what each shares with the one before."""
    nodes, of_leaf = list[Node](), dict[int, int]()
    stack = [(0, len(leaves), 0, -1)] if leaves else []
    while stack:
        first, last, start, parent = stack.pop()
        sample = leaves[first]
        if last - first == 1:
            of_leaf[sample] = len(nodes)
            nodes.append(Node(sample, start, lengths[sample], parent))
            continue
        shared = min(cuts[first + 1 : last])
        if shared > start:
            nodes.append(Node(sample, start, shared, parent))
            parent, start = len(nodes) - 1, shared
        apart = [first, *(k for k in range(first + 1, last) if cuts[k] == shared), last]
        # In the order of the samples, whatever their hashes; the stack gives the last one first.
        parts = sorted(
            itertools.pairwise(apart), key=lambda part: min(leaves[slice(*part)]), reverse=True
        )
        stack += [(begin, end, start, parent) for begin, end in parts]
    return nodes, of_leaf


def forest_of_groups(
    lengths: Sequence[int], prompts: Sequence[int], groups: Sequence[Hashable]
) -> Forest:
    """The forest of samples with equal prompts within a group, given the total length and the
    prompt of each [samples] in tokens; responses have nothing in common."""
    members: dict[tuple[Hashable, int], list[int]] = {}
    for sample, (group, prompt) in enumerate(zip(groups, prompts, strict=True)):
        if lengths[sample]:
            members.setdefault((group, prompt), []).append(sample)
    leaves, cuts = list[int](), list[int]()
    for (_, prompt), samples in members.items():
        leaves += samples
        cuts += [0, *[max(0, prompt - 1)] * (len(samples) - 1)]
    nodes, of_leaf = _nodes(lengths, leaves, cuts)
    last = tuple(of_leaf.get(sample, -1) for sample in range(len(lengths)))
    return Forest(tuple(lengths), tuple(nodes), last)


class _Piece(NamedTuple):
    """Part of a subtree: its samples, and what it takes below the node where it hangs."""

    samples: tuple[int, ...]
    tokens: int
    keys: int
    cost: float

    def beside(self, other: _Piece) -> _Piece:
        return _Piece(*map(add, self, other))

    def fits(self, most_tokens: float, most_cost: float) -> bool:
        """True if a part may be this large."""
        size = max(self.tokens, self.keys / KEYS_PER_TOKEN)
        return size <= most_tokens and self.cost <= most_cost


def most_tokens_of_part(dims: ParallelDims, config: PlannerConfig) -> int:
    """Room of a micro-batch for one part, in tokens; a `ConfigError` if there is none."""
    if config.max_context_parallel is not None:
        # Rows may be kept to fewer ranks than the layout has for each.
        sizes = dims.row_sizes(config.max_context_parallel)
        dims = dims.for_rows_on(max(size for size in sizes if size <= dims.context_parallel))
    # It is padded as a sample, and then as a row.
    multiple = sample_multiple_tokens(dims, config)
    return row_capacity_tokens(dims, config) // multiple * multiple


def parts_of(
    forest: Forest, model: CostModel, most_tokens: float, most_cost: float = math.inf
) -> list[tuple[int, ...]]:
    """Samples of each part of the forest's trees, so that a part takes `most_tokens` of room and
    costs `most_cost` at most; a leaf that takes more is alone.

    Best fit, largest first, from the leaves to the roots.
    """
    nodes, limits = forest.nodes, (most_tokens, most_cost)
    # What each node takes, and with it the path above, which is in every part of what hangs there.
    own, paths = list[_Piece](), list[_Piece]()
    for node in nodes:
        cost = model.sample(node.end) - model.sample(node.start)
        own.append(_Piece((), node.end - node.start, node.end, cost))
        paths.append(own[-1] if node.parent < 0 else paths[node.parent].beside(own[-1]))
    pieces: list[list[_Piece]] = [[] for _ in (*nodes, None)]  # the last ones of no parent, -1
    for number in range(len(nodes) - 1, -1, -1):
        samples = forest.samples_of_leaves.get(number)
        if samples is None:
            packed = _packed(pieces[number], paths[number], limits)
            made = [each.beside(own[number]) for each in packed]
        else:
            made = [own[number]._replace(samples=samples)]
        pieces[nodes[number].parent] += made
    return [piece.samples for piece in pieces[-1]]


def _packed(pieces: Sequence[_Piece], path: _Piece, limits: tuple[float, float]) -> list[_Piece]:
    """Pieces that hang on one path, put together as far as they fit the most tokens and cost."""
    _, *least_of_each = zip(*pieces, strict=True)
    least = _Piece((), *map(min, least_of_each)).beside(path)
    made, bins = list[_Piece](), list[_Piece]()  # bins: the fullest last
    by_tokens = attrgetter("tokens")
    for piece in sorted(pieces, key=by_tokens, reverse=True):
        fitting = (
            place
            for place in range(len(bins) - 1, -1, -1)
            if bins[place].beside(piece).beside(path).fits(*limits)
        )
        place = next(fitting, None)
        held = piece if place is None else bins.pop(place).beside(piece)
        # A bin that holds no further piece is left out of the search.
        if held.beside(least).fits(*limits):
            insort(bins, held, key=by_tokens)
        else:
            made.append(held)
    return made + bins


def ways_to_cut(
    forest: Forest, dims: ParallelDims, config: PlannerConfig, model: CostModel
) -> list[list[PrefixTree]]:
    """Ways to cut the trees, each as units that cover all samples."""
    empty = [(sample,) for sample, leaf in enumerate(forest.last) if leaf < 0]
    chains = [*forest.samples_of_leaves.values()]
    ways = [chains]
    if len(forest.nodes) > len(chains):  # there are branches
        cap = most_tokens_of_part(dims, config)
        whole = parts_of(forest, model, cap)
        work = ordered_sum(forest.tree(samples).cost(model) for samples in whole)
        # At most half of what a stage of the pipeline would take if work were even.
        share = work / (2 * dims.data_parallel * dims.pipeline_parallel)
        ways += [whole, parts_of(forest, model, cap // 2), parts_of(forest, model, cap, share)]
    distinct = {tuple(sorted((*way, *empty))) for way in ways}
    trees = [[*map(forest.tree, way)] for way in sorted(distinct, key=len)]
    if len(chains) + len(empty) < len(forest.lengths):  # else chains are single samples
        trees.append([PrefixTree((i,), ((0, n),)) for i, n in enumerate(forest.lengths)])
    return trees
