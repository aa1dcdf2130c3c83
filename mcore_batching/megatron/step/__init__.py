"""One step: its rows through Megatron's pipeline, forward alone or with an update."""
