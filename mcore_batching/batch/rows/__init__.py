"""Rows: samples packed one behind another, and placeholders.

packed            a packed row, drawn
pack              samples to a row
row_layout        offsets of the padded samples, values at them, and context-parallel slices
prefixes          samples computed in another's segment
response_tokens   the position that predicts each response token, and its weight
context_parallel  whole responses from the slices
placeholder       a fabricated sample for a micro-batch without one
side_by_side      host tensors moved to a device by one copy
"""
