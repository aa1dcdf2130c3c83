"""Pictures of plans.

timeline  start and end of every pass of a step
plot      a step: its passes, and the fill of its micro-batches, as .png or .svg
"""
