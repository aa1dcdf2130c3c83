"""Waits of Megatron's interleaved schedule, as its code has them: what a stage posts and waits for.

A stage runs a pass, posts what it sends and what it is to receive, and waits, here or later. A
transfer ends when both sides have posted it. Written after ``forward_backward_pipelining_with_
interleaving`` with overlapped point-to-point communication, of megatron-core 0.18 and later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mcore_batching.planning import ParallelDims

Node = tuple[int, str, int, int]
"""Stage, F or B, chunk, slot."""
Action = tuple[str, Node]
"""``run`` a pass; ``post`` a receive, or ``wait`` for a transfer: of a pass's output."""


def output_goes_nowhere(node: Node, dims: ParallelDims) -> bool:
    stage, kind, chunk, _ = node
    if kind == "F":
        return stage == dims.pipeline_parallel - 1 and chunk == dims.virtual_pipeline - 1
    return stage == 0 and chunk == 0


def received_after(order: Sequence[Node], number: int, dims: ParallelDims) -> Node | None:
    """The pass whose output a stage begins to receive after one of its passes in one direction."""
    stage, kind, *_ = order[0]
    last = dims.pipeline_parallel - 1
    if stage == (0 if kind == "F" else last):
        # What comes back from the other end of the pipeline, as soon as there is any.
        if number < last:
            return None
        _, _, chunk, slot = order[number - last]
        sent = (last - stage, kind, chunk, slot)
        return None if output_goes_nowhere(sent, dims) else sent
    if number + 1 == len(order):
        return None
    _, _, chunk, slot = order[number + 1]
    return (stage - 1 if kind == "F" else stage + 1, kind, chunk, slot)


def actions(order: Sequence[Node], dims: ParallelDims) -> Iterator[Action]:
    """Of one stage, given its passes."""
    stage = order[0][0]
    forward = [node for node in order if node[1] == "F"]
    backward = [node for node in order if node[1] == "B"]
    behind = dims.pipeline_parallel - stage - 1
    warm_up = len(forward)
    if backward:
        group = dims.microbatch_group_size or dims.pipeline_parallel
        warm_up = min(2 * behind + (dims.virtual_pipeline - 1) * group, warm_up)
    steady = len(forward) - warm_up

    def after(passes: Sequence[Node], number: int) -> Iterator[Action]:
        """One pass of warm-up or cool-down: both transfers, at once."""
        yield "run", passes[number]
        received = received_after(passes, number, dims)
        if received is not None:
            yield "post", received
        if not output_goes_nowhere(passes[number], dims):
            yield "wait", passes[number]
        if received is not None:
            yield "wait", received

    def begun(passes: Sequence[Node], number: int) -> Iterator[Action]:
        received = received_after(passes, number, dims)
        if received is not None:
            yield "post", received

    if stage > 0:
        yield "post", (stage - 1, *forward[0][1:])
    for number in range(warm_up):
        yield from after(forward, number)
    if backward and behind:
        yield "post", (stage + 1, *backward[0][1:])
    for number in range(steady):
        yield "run", forward[warm_up + number]
        yield from begun(forward, warm_up + number)
        if not output_goes_nowhere(forward[warm_up + number], dims):
            yield "wait", forward[warm_up + number]
        yield "run", backward[number]
        yield from begun(backward, number)
        if number and not output_goes_nowhere(backward[number - 1], dims):
            yield "wait", backward[number - 1]
    for number in range(steady, len(backward)):
        yield from after(backward, number)


def waited_for(orders: Sequence[Sequence[Node]], dims: ParallelDims) -> dict[Node, set[Node]]:
    """Of each pass of all stages, those that have to end before it can begin, for transfers that
    its stage waits for."""
    of_stages = [list(actions(order, dims)) for order in orders]
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
