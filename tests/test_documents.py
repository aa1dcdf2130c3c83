"""Files, imports and commands that the READMEs name exist, and the first README's code runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("", "examples", "patches", "tests/*", "mcore_batching/**")
DOCUMENTS = sorted(
    {path for name in FOLDERS for path in REPOSITORY.glob(f"{name}/README.md".lstrip("/"))}
)
ROOTS = (".", "mcore_batching", "tests/benchmarks")
each_document = pytest.mark.parametrize(
    "path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY))
)


@each_document
def test_links_and_files_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []
    named = re.findall(
        r"(?:`|bash |pytest |python )((?:[\w-]+/)+[\w-]+\.(?:py|sh|md)|bench_\w+\.py)", text
    )
    places = [path.parent, *(REPOSITORY / root for root in ROOTS)]
    own = [name for name in named if not name.startswith("megatron/training")]
    assert [name for name in own if not any((place / name).exists() for place in places)] == []
    # No package index has it: it is installed from a checkout.
    assert re.findall(r"pip install (?:-\S+ )*(mcore[-_]batching\S*)", text) == []


@each_document
def test_python_that_is_shown_can_be_imported(path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    for node in ast.walk(ast.parse("\n".join(blocks))):
        if isinstance(node, ast.ImportFrom):
            pytest.importorskip("megatron.core" if "megatron" in str(node.module) else "torch")
            module = __import__(str(node.module), fromlist=["*"])
            assert [each.name for each in node.names if not hasattr(module, each.name)] == []


RESULTS = """
sizes = {name: list(map(len, values)) for name, values in old.items()}
path = f"{__file__}.rank{torch.distributed.get_rank()}"
open(path, "w").write(f"{sizes} {sorted(result.metrics)}")
"""


def test_the_loop_runs_and_the_readme_shows_it(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    from kit.harness import launch

    loop = (REPOSITORY / "examples" / "loop.py").read_text(encoding="utf-8")
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert [line for line in shown.splitlines() if line not in loop.splitlines()] == []
    script = tmp_path / "loop.py"
    script.write_text(loop + RESULTS)
    (processes,) = re.findall(r"torchrun --nproc-per-node (2) examples/loop.py", loop)
    (flags,) = re.findall(r"\n        (--use-dynamic.*)", loop)
    # Without an agent's and each rank's own imports.
    words = (processes, str(script), *flags.split())
    done = launch("kit.ranks", *words, nproc=2, folder=tmp_path, seconds=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path(f"{script}.rank0").read_text() == "{} []"
    found = Path(f"{script}.rank1").read_text()
    assert found == "{'log_probs': [20, 5, 11, 16]} ['loss', 'policy']"


def test_the_readme_is_for_five_minutes() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 950
