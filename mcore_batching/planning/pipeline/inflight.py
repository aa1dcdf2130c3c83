"""The tokens in flight on a stage."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

from mcore_batching.planning.pipeline.passes import Schedule


def inflight_tokens(slot_tokens: Sequence[int], schedule: Schedule, *, stage: int = 0) -> float:
    """Peak of the tokens whose activations a stage holds.

    A micro-batch is in flight from its forward to its backward pass; each model chunk holds its
    share of the stage's layers. Under 1F1B stage s of P has P - s micro-batches in flight. Of
    forward passes alone each holds its micro-batch by itself.

    Args:
        slot_tokens: padded tokens of each micro-batch [num_microbatches].
        schedule: gives the order of passes.
        stage: pipeline rank; stage 0 holds most.
    """
    if schedule.forward_only:
        return float(max(slot_tokens))  # one at a time: nothing waits for a backward pass
    held = most = 0  # whole micro-batches; a chunk holds 1 / virtual_pipeline of the layers
    for is_forward, slot in _held_passes(schedule, stage, len(slot_tokens)):
        if is_forward:
            held += slot_tokens[slot]
            most = held if held > most else most
        else:
            held -= slot_tokens[slot]
    return most / schedule.dims.virtual_pipeline


def slots_in_flight(slot_tokens: Sequence[int], schedule: Schedule) -> list[int]:
    """The slots that the first stage holds when `inflight_tokens` are, ascending."""
    if schedule.forward_only:
        return [slot_tokens.index(max(slot_tokens))]
    passes = _held_passes(schedule, 0, len(slot_tokens))
    held = [0]  # before each pass, and after the last
    for is_forward, slot in passes:
        held.append(held[-1] + (slot_tokens[slot] if is_forward else -slot_tokens[slot]))
    until = passes[: held.index(max(held))]
    chunks = Counter(slot for is_forward, slot in until if is_forward)
    chunks.subtract(slot for is_forward, slot in until if not is_forward)
    return sorted(slot for slot, number in chunks.items() if number)


# Kept: a search under a bound on tokens asks for the same few stages' passes at every move.
@functools.lru_cache(maxsize=64)
def _held_passes(schedule: Schedule, stage: int, count: int) -> list[tuple[bool, int]]:
    """A stage's passes that begin or end to hold tokens: whether forward, and the slot."""
    return [(each.kind == "F", each.slot) for each in schedule.order(stage, count)]
