"""In front on the path, this makes Megatron believe that Transformer Engine is not installed."""

raise ModuleNotFoundError("hidden by tests/gpu/run_parts.py", name=__name__)
