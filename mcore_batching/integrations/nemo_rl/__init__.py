"""The planner as one of NeMo-RL's packing algorithms."""

from mcore_batching.integrations.nemo_rl.packer import ALGORITHM, hook

__all__ = ["ALGORITHM", "hook"]
