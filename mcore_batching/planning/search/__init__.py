"""The search for the step that ends first.

`search` decides the number of micro-batches, their samples, their order and their ranks,
`search_dynamic` their context-parallel sizes as well, `best_slots` and `improve` those of one rank
alone. Reading order: `objective` (what is minimised), `targets` (how large each slot is to be),
`deal` (samples are dealt to targets), `steps` (in rounds that even out ranks), `choice` (numbers of
slots and shapes that are tried), `pipelines` (what a change costs a step), `moves` (single samples
are moved), `one_rank` (a rank that keeps its samples). Under dynamic CP: `shared_rows` (what is
simulated) and `dynamic_cp`.
"""

from mcore_batching.planning.search.choice import search
from mcore_batching.planning.search.dynamic_cp import search_dynamic
from mcore_batching.planning.search.moves import improve
from mcore_batching.planning.search.objective import Objective, Slots
from mcore_batching.planning.search.one_rank import best_slots, ends_by_count
from mcore_batching.planning.search.steps import MOST_SLOTS_PER_STAGE, steps_of_counts

__all__ = [
    "MOST_SLOTS_PER_STAGE",
    "Objective",
    "Slots",
    "best_slots",
    "ends_by_count",
    "improve",
    "search",
    "search_dynamic",
    "steps_of_counts",
]
