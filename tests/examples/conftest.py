"""The examples' modules lie beside their scripts, as they do under torchrun."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
EXAMPLES = TESTS.parent / "examples"
# With `kit`, what the tests with several processes share.
for folder in (TESTS / "distributed", *(EXAMPLES / name for name in ("data", "sft", "grpo"))):
    sys.path.insert(0, str(folder))
