"""Split backward passes beside Megatron's own schedules: weight gradients while a stage waits.

plan              a stage's split passes, by the step's plan
split_passes      what is replaced while the schedule runs
linear_layers     linear layers that leave their weight's gradient for later
weight_gradients  what was left, and when it runs
"""
