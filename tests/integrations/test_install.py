"""`install` and the launcher: what is touched with the flag, and that nothing is without it.

In processes of their own, since Megatron's modules are patched there.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from kit.patience import patience

from mcore_batching.megatron import DynamicBatchArgumentError

needs_training = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="this megatron-core wheel ships no megatron.training (0.19 does)",
)

NAMES = """
import os, sys
from mcore_batching.megatron import cpu_emulation
cpu_emulation.enable(force=True)
import importlib, types
MODULES = [importlib.import_module(name) for name in (
    "megatron.training", "megatron.training.arguments", "megatron.training.checkpointing",
    "megatron.training.initialize",
    "megatron.training.training", "megatron.training.global_vars", "megatron.training.utils",
    "megatron.core.models.backends", "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.pipeline_parallel.schedules", "megatron.core.num_microbatches_calculator",
    "megatron.core.transformer.dot_product_attention",
)]

def names():
    return {f"{m.__name__}.{n}": id(v) for m in MODULES for n, v in vars(m).items()}

def changed(before, after):
    return sorted(name for name in before | after if before.get(name) != after.get(name))

from mcore_batching.integrations.megatron_lm import install
"""


SERVER = """
import json, traceback
reports = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what Megatron prints is no report
for line in sys.stdin:
    program, sys.argv[1:] = json.loads(line)
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    report = ""
    try:
        exec(program, globals())
    except BaseException:
        report = traceback.format_exc()
    print(json.dumps(report), file=reports, flush=True)
    os._exit(0)
"""


Runs = Callable[..., None]


@pytest.fixture(scope="module")
def run() -> Iterator[Runs]:
    """Runs a program in a process of its own, forked off one that has imported Megatron."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", NAMES + SERVER],
        env=os.environ | {"MCORE_BATCHING_CPU": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def run_in_fork(program: str, *arguments: str) -> None:
            print(json.dumps([program, arguments]), file=server.stdin, flush=True)
            ready, _, _ = select.select([server.stdout], [], [], patience(200))
            assert ready, "no report in time"
            assert json.loads(server.stdout.readline()) == ""

        yield run_in_fork
        server.kill()


@needs_training
def test_without_the_flag_no_megatron_name_is_touched(run: Runs) -> None:
    run("""
before = names()
installation = install(["--num-layers", "4"])
assert changed(before, names()) == [], changed(before, names())
assert installation.hooked == []
assert "nothing hooked" in str(installation)
""")


@needs_training
def test_without_the_flag_the_parser_knows_its_other_flags_and_nothing_else_changes(
    run: Runs,
) -> None:
    run("""
before = names()
installation = install(["--max-tokens-per-gpu=64"])
assert changed(before, names()) == sorted(installation.hooked)
assert all(name.startswith("megatron.training.arguments.") for name in installation.hooked)
from megatron.training import training
assert training.get_forward_backward_func.__module__.startswith("megatron.")
""")


@needs_training
def test_with_the_flag_it_says_what_it_hooked_and_undo_puts_it_back(run: Runs) -> None:
    run("""
before = names()
installation = install(["--use-dynamic-batch-size", "--dynamic-batch-data", "x"])
assert changed(before, names()) == sorted(installation.hooked)
for name in ("get_forward_backward_func", "train", "evaluate", "training_log"):
    assert f"megatron.training.training.{name}" in installation.hooked
    assert f"megatron.training.training.{name}" in str(installation)
assert "megatron.core.models.backends.DotProductAttention" in installation.hooked
hooked = names()
assert install([]) is installation  # the second call changes nothing
assert install(["--use-dynamic-batch-size"]) is installation
assert changed(hooked, names()) == []
installation.undo()
installation.undo()
assert changed(before, names()) == []
assert install([]).hooked == []
""")


@needs_training
def test_what_raises_hooks_nothing_and_a_later_call_hooks_the_rest(run: Runs) -> None:
    """A second call returned what the first had hooked, until it raised or altogether."""
    run("""
from mcore_batching.integrations.megatron_lm import script_batches
from mcore_batching.megatron import DynamicBatchArgumentError
from megatron.training import training
OFFSETS = ("cu_seqlens", "cu_seqlens_padded")
before, log = names(), training.training_log
flags = install(["--max-tokens-per-gpu", "64"])
of_flags = names()
assert changed(before, of_flags)
del training.training_log
for _ in range(2):
    try:
        install(["--use-dynamic-batch-size"])
    except DynamicBatchArgumentError as error:
        assert "has no training_log" in str(error)
    else:
        raise AssertionError("accepted")
    training.training_log = log
    assert changed(of_flags, names()) == []
    assert changed(before, names()) == sorted(flags.hooked)
    del training.training_log
training.training_log = log
assert install(["--use-dynamic-batch-size"]) is flags
assert changed(before, names()) == sorted(flags.hooked)
assert "megatron.training.training.train" in flags.hooked
flags.undo()
assert changed(before, names()) == []
del training.training_log
for fields in (None, ["tokens"], ["tokens", "labels", "loss_mask", "position_ids", *OFFSETS]):
    try:
        install(["--use-dynamic-batch-size"], batch_fields=fields)
    except DynamicBatchArgumentError as error:
        assert "has no training_log" in str(error)
        continue
    raise AssertionError("accepted")
assert script_batches._declared_fields is None  # no later script is read by them
training.training_log = log
assert changed(before, names()) == []
""")


@needs_training
@pytest.mark.parametrize("word", ["--yaml-cfg", "--yaml-cfg=job.yaml"])
def test_a_yaml_file_that_would_drop_the_flag_is_refused(word: str, run: Runs) -> None:
    run(
        """
from mcore_batching.megatron import DynamicBatchArgumentError
before = names()
try:
    install(["--use-dynamic-batch-size", *sys.argv[1:]])
except DynamicBatchArgumentError as error:
    assert "--yaml-cfg overrides" in str(error)
else:
    raise AssertionError("accepted")
assert changed(before, names()) == []
assert install(sys.argv[1:]).hooked == []  # without the flag it is nobody's business
""",
        word,
    )


@needs_training
def test_the_parser_takes_every_flag(run: Runs) -> None:
    run("""
install(["--use-dynamic-batch-size"])
import argparse
from megatron.training import arguments
parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
args = parser.parse_args([
    "--use-dynamic-batch-size", "--max-tokens-per-gpu", "64", "--dynamic-batch-exchange",
    "--dynamic-batch-plan-effort", "10", "--dynamic-batch-data", "a.jsonl", "b.jsonl",
])
assert args.use_dynamic_batch_size and args.dynamic_batch_exchange
assert args.max_tokens_per_gpu == 64 and args.dynamic_batch_plan_effort == 10
assert args.dynamic_batch_data == ["a.jsonl", "b.jsonl"]
""")


def launched(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mcore_batching.run", str(script), *arguments],
        env={key: value for key, value in os.environ.items() if key != "MCORE_BATCHING_CPU"},
        capture_output=True,
        text=True,
        timeout=patience(200),
    )


def test_the_launcher_runs_a_script_as_if_it_were_started_by_itself(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "loaded = [name for name in sys.modules if name.split('.')[0] in ('torch', 'megatron')]\n"
        "import beside\n"
        "print(__name__, sys.argv, beside.VALUE, loaded)\n"
    )
    done = launched(script, "--num-layers", "4")
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.split()
        == (
            f"__main__ ['{script}', '--num-layers', '4'] 7 []"  # torch is not even imported
        ).split()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the training script first"),
        (["--use-dynamic-batch-size"], "name the training script first, got --use-dynamic"),
        (["absent.py"], "no script absent.py: give its path"),
    ],
)
def test_the_launcher_says_what_is_missing(arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mcore_batching.run", *arguments],
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is not None,
    reason="this megatron-core wheel ships megatron.training",
)
def test_without_megatron_training_the_flag_says_where_to_get_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    done = launched(script, "--use-dynamic-batch-size")
    assert done.returncode != 0
    assert "cannot import megatron.training" in done.stderr
    assert "put a Megatron-LM checkout on PYTHONPATH" in done.stderr


def test_a_module_that_lacks_what_is_replaced_is_named() -> None:
    module = importlib.import_module("mcore_batching.integrations.megatron_lm.install")
    with pytest.raises(DynamicBatchArgumentError, match="later has no pretrain: use Megatron-LM 0"):
        module._require(ModuleType("later"), "pretrain")
    with pytest.raises(DynamicBatchArgumentError, match=r"cannot import megatron\.training"):
        module._module("later")
