"""Batches to test with, and the runs in several processes, are those of tests/batch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "batch"))
