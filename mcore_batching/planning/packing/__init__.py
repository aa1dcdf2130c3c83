"""First-fit packing, and bounds that no packing and no plan goes under.

packing  first-fit and first-fit-decreasing
bounds   least number of micro-batches, and the earliest end of a step
"""
