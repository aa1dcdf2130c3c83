"""Split backward passes beside Megatron's own schedules: weight gradients while a stage waits."""
