"""Plans with the extra `fast` (`planning/pipeline/compiled.py`) are those without it, to a bit."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from kit.patience import patience

REPOSITORY = Path(__file__).resolve().parents[2]
PLANS = """
import random

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, plan_step
from mcore_batching.planning.pipeline.compiled import _compiler
from mcore_batching.planning.plans.statistics import predicted_step_time

generator = random.Random(11)
for number in range(15):
    lengths = [generator.randrange(1, 2 ** generator.randrange(4, 15)) for _ in range(60)]
    dims = ParallelDims(
        data_parallel=4,
        pipeline_parallel=(1, 2, 4, 8)[number % 4],
        virtual_pipeline=2 if number in (1, 6) else 1,
        expert_parallel=4 if number == 10 else 1,
    )
    config = PlannerConfig(
        max_tokens_per_gpu=16384,
        plan_effort=40,
        max_context_parallel=4 if number in (2, 7) else None,
    )
    model = CostModel(linear=0.1, quadratic=1 / 7000.1, per_micro_batch=0.3, backward_ratio=1.7)
    step = plan_step(lengths, dims, config, model, forward_only=number == 9)
    print(step.digest(), predicted_step_time(step, lengths).hex())
print(_compiler() is not None)
"""


def plans(folder: Path | None = None, **environment: str) -> list[str]:
    folders = [str(folder or REPOSITORY), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(folders)
    run = subprocess.run(
        [sys.executable, "-c", PLANS],
        env={**os.environ, "NUMBA_DISABLE_JIT": "0", "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


@pytest.fixture(scope="module")
def plain() -> list[str]:
    return plans(NUMBA_DISABLE_JIT="1")


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed (extra fast)")
def test_plans_are_the_same_compiled_and_not(plain: list[str]) -> None:
    *compiled, is_compiled = plans()
    assert is_compiled == "True"
    assert [*compiled, "False"] == plain


BROKEN = [
    'raise SystemError("initialization of _internal failed")',
    "def njit(**options):\n"
    "    def compile_(function):\n"
    '        raise RuntimeError("cannot cache function: no locator available")\n'
    "    return compile_",
]


@pytest.mark.parametrize("numba", BROKEN, ids=["import fails", "nowhere to keep it"])
def test_a_numba_that_cannot_be_used_is_not(tmp_path: Path, numba: str, plain: list[str]) -> None:
    (tmp_path / "numba.py").write_text(numba)
    assert plans(tmp_path) == plain
