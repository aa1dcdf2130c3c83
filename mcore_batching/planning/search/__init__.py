"""The search for the step that ends first.

`search` decides the number of micro-batches, their samples, their order and their ranks,
`search_dynamic` their context-parallel sizes as well. Reading order: `objective` (what is
minimised), `targets` (how large each slot is to be), `assign` (samples to targets), `rounds`
(late ranks get less work; numbers of slots), `moves` (single samples), `dynamic_cp` (rows that
ranks share).
"""

from mcore_batching.planning.search.dynamic_cp import search_dynamic
from mcore_batching.planning.search.objective import Objective
from mcore_batching.planning.search.rounds import search

__all__ = [
    "Objective",
    "search",
    "search_dynamic",
]
