"""The search for the step that ends first.

`search` decides the number of micro-batches, their samples, their order and their ranks,
`search_dynamic` their context-parallel sizes as well. Reading order: `objective` (what is
minimised), `targets` (how large each slot is to be), `deal` (samples are dealt to targets), `steps`
(in rounds that even out ranks), `choice` (numbers of slots and shapes that are tried), `pipelines`
(what a change costs a step), `moves` (single samples are moved). Under dynamic CP: `shared_rows`
(what is simulated) and `dynamic_cp`.
"""

from mcore_batching.planning.search.choice import search
from mcore_batching.planning.search.dynamic_cp import search_dynamic
from mcore_batching.planning.search.objective import Objective, Slots

__all__ = [
    "Objective",
    "Slots",
    "search",
    "search_dynamic",
]
