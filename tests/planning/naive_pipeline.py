"""Pipelines played pass by pass; waits of Megatron's interleaved schedule as its code has them.

A stage of the interleaved schedule runs a pass, posts what it sends and what it is to receive, and
waits, here or later. A transfer ends when both sides have posted it. Written after ``forward_
backward_pipelining_with_interleaving`` with overlapped point-to-point communication, of
megatron-core 0.18 and later, and without ``waits_for_sends`` of earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_batching.planning import ParallelDims
from mcore_batching.planning.clock import Blocks
from mcore_batching.planning.schedule import Schedule

Node = tuple[int, str, int, int]
"""Stage, F or B, chunk, slot."""
Action = tuple[str, Node]
"""``run`` a pass; ``post`` a receive, or ``wait`` for a transfer: of a pass's output."""


def played(
    costs: Sequence[Sequence[float]],
    schedule: Schedule,
    blocks: Sequence[Blocks] | None = None,
) -> dict[tuple[int, Node], tuple[float, float]]:
    """Start and end of each pass of each rank, given costs [slots][ranks] and who shares what."""
    dims, count = schedule.dims, len(costs) // schedule.num_costs
    ranks, stages = range(len(costs[0])), range(dims.pipeline_parallel)
    orders = [[(s, *what) for what in schedule.order(s, count)] for s in stages]
    waits = waited_for(orders, dims) if dims.virtual_pipeline > 1 else {}
    left = {(rank, stage): list(orders[stage]) for rank in ranks for stage in stages}
    times: dict[tuple[int, Node], tuple[float, float]] = {}
    free = dict.fromkeys(left, 0.0)

    def took(rank: int, node: Node) -> float:
        stage, kind, chunk, slot = node
        which = schedule.which_cost[stage][chunk] if schedule.which_cost else 0
        share = (schedule.backward_ratio if kind == "B" else 1.0) / dims.virtual_pipeline
        return costs[slot * schedule.num_costs + which][rank] * share

    while any(left.values()):
        for (rank, stage), nodes in left.items():
            if not nodes:
                continue
            node = nodes[0]
            shared = [range(*each) for each in (blocks[node[3]] if blocks else ())]
            members = [each for each in shared if rank in each]
            together = members[0] if members else range(rank, rank + 1)
            needed = [
                (each, other)
                for other in (*needs(node, dims), *waits.get(node, ()))
                for each in together
            ]
            if any(left[each, stage][:1] != [node] for each in together) or any(
                each not in times for each in needed
            ):
                continue
            start = max([free[r, stage] for r in together] + [times[each][1] for each in needed])
            end = start + max(took(each, node) for each in together)
            for each in together:
                left[each, stage].pop(0)
                free[each, stage] = end
                times[each, node] = start, end
    return times


def needs(node: Node, dims: ParallelDims) -> list[Node]:
    """The pass whose result another takes: the model is one row of parts, down and then up."""
    stage, kind, chunk, slot = node
    stages = dims.pipeline_parallel
    part = chunk * stages + stage + (-1 if kind == "F" else 1)
    if part == stages * dims.virtual_pipeline:
        return [(stage, "F", chunk, slot)]
    return [(part % stages, kind, part // stages, slot)] if part >= 0 else []


def output_goes_nowhere(node: Node, dims: ParallelDims) -> bool:
    stage, kind, chunk, _ = node
    if kind == "F":
        return stage == dims.pipeline_parallel - 1 and chunk == dims.virtual_pipeline - 1
    return stage == 0 and chunk == 0


def received_after(order: Sequence[Node], number: int, dims: ParallelDims) -> list[Node]:
    """The pass, or none, with the output that a stage begins to receive after one of its passes in
    one direction."""
    stage, kind, *_ = order[0]
    last = dims.pipeline_parallel - 1
    if stage == (0 if kind == "F" else last):
        # What comes back from the other end of the pipeline, as soon as there is any.
        if number < last:
            return []
        sent = (last - stage, *order[number - last][1:])
        return [] if output_goes_nowhere(sent, dims) else [sent]
    before = stage - 1 if kind == "F" else stage + 1
    return [(before, *node[1:]) for node in order[number + 1 : number + 2]]


def run(passes: Sequence[Node], number: int, dims: ParallelDims) -> list[Action]:
    received = received_after(passes, number, dims)
    return [("run", passes[number]), *(("post", node) for node in received)]


def waits_for_sends(passes: Sequence[Node], dims: ParallelDims) -> list[Action]:
    return [("wait", node) for node in passes if not output_goes_nowhere(node, dims)]


def run_alone(passes: Sequence[Node], number: int, dims: ParallelDims) -> list[Action]:
    """One pass of warm-up or cool-down: both transfers, at once."""
    received = received_after(passes, number, dims)
    sent = waits_for_sends(passes[number : number + 1], dims)
    return [*run(passes, number, dims), *sent, *(("wait", node) for node in received)]


def actions(order: Sequence[Node], dims: ParallelDims) -> list[Action]:
    """What one stage does, given its passes."""
    stage, made = order[0][0], list[Action]()
    forward = [node for node in order if node[1] == "F"]
    backward = [node for node in order if node[1] == "B"]
    behind = dims.pipeline_parallel - stage - 1
    warm_up = len(forward)
    if backward:
        group = dims.microbatch_group_size or dims.pipeline_parallel
        warm_up = min(2 * behind + (dims.virtual_pipeline - 1) * group, warm_up)
    steady = len(forward) - warm_up
    if stage > 0:
        made.append(("post", (stage - 1, *forward[0][1:])))
    for number in range(warm_up):
        made += run_alone(forward, number, dims)
    if backward and behind:
        made.append(("post", (stage + 1, *backward[0][1:])))
    for number in range(steady):
        at = warm_up + number
        sent = at - (not dims.waits_for_sends)
        made += run(forward, at, dims)
        made += waits_for_sends(forward[max(warm_up, sent) : sent + 1], dims)
        made += run(backward, number, dims)
        made += waits_for_sends(backward[max(0, number - 1) : number], dims)
    for number in range(steady, len(backward)):
        made += run_alone(backward, number, dims)
    return made


def waited_for(orders: Sequence[Sequence[Node]], dims: ParallelDims) -> dict[Node, set[Node]]:
    """Of each pass of all stages, those that have to end before it can begin, for transfers that
    its stage waits for."""
    of_stages = [actions(order, dims) for order in orders]
    posted_after: dict[Node, Node | None] = {}
    for of_stage in of_stages:
        ran: Node | None = None
        for what, node in of_stage:
            if what == "run":
                ran = node
            elif what == "post":
                assert node not in posted_after
                posted_after[node] = ran
    waits: dict[Node, set[Node]] = {}
    for stage, of_stage in enumerate(of_stages):
        needed: set[Node] = set()
        for what, node in of_stage:
            if what == "run":
                waits[node], needed = needed, set()
            elif what == "wait":
                other = posted_after[node] if node[0] == stage else node
                needed |= {other} if other is not None else set()
    return waits
