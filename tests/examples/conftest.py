"""The example's modules lie beside its script, as they do under torchrun."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
EXAMPLES = TESTS.parent / "examples"
# For `kit`, what the tests with several processes share.
sys.path.insert(0, str(TESTS / "distributed"))
sys.path.insert(0, str(EXAMPLES))
