"""The worker of `kit.worker` on the twin in place of the CPU stand-in."""

import os

os.environ["MCORE_BATCHING_CPU"] = "0"

import twin
from kit import worker


def main() -> None:
    """Start the ranks."""
    twin.install()
    worker.main()
