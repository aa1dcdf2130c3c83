"""Layers of a pipeline's model chunks where Megatron does not cut them evenly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def layers_of_chunks(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """Layers of each model chunk, all stages' first chunks first, by Megatron's names; nothing
    where they are equal."""
    stages = config.get("pipeline_model_parallel_size") or 1
    chunks = config.get("virtual_pipeline_model_parallel_size") or 1
    # In Megatron's config an object; the text of an argument is Megatron's to read.
    layout = getattr(config.get("pipeline_model_parallel_layout"), "layout", None)
    if layout is not None:
        return [
            sum(layer.name == "decoder" for layer in layout[stage][chunk])
            for chunk in range(chunks)
            for stage in range(stages)
        ]
    first, last = (
        config.get(f"num_layers_in_{end}_pipeline_stage")
        or config.get(f"decoder_{end}_pipeline_num_layers")
        for end in ("first", "last")
    )
    ends = [
        bool(config.get(f"account_for_{each}_in_pipeline_split")) for each in ("embedding", "loss")
    ]
    if stages == 1 or not (first or last or any(ends)):
        return []
    given = [each for each in (first, last) if each]
    each = (num_layers + sum(ends) - sum(given)) // max(1, stages - len(given))
    of_stages = [each] * stages
    of_stages[0], of_stages[-1] = first or each, last or each
    counts = [count // chunks for _ in range(chunks) for count in of_stages]
    # The embedding and the loss take the place of a layer each.
    counts[0], counts[-1] = counts[0] - ends[0], counts[-1] - ends[1]
    return counts
