"""Conversations for ``pretrain_gpt.py --sft``, by a made tokenizer, and the same samples by hand.

`BY_HAND` is a launcher. Without ``--sft`` the script's own dataset is replaced by its rows of
``--sft`` without what packs them: one conversation of each line, padded.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

PACKAGES = Path(__file__).with_name("sft_packages")
"""In place of Hugging Face's ``transformers`` and ``datasets``, for ``PYTHONPATH``."""

BY_HAND = """
import runpy, sys
import mcore_batching.megatron  # the CPU stand-in is on before anything is imported
from megatron.core.datasets import gpt_dataset
from megatron.training import initialize
from megatron.training.datasets.sft_dataset import SFTDataset

class Padded(SFTDataset):
    def __getitem__(self, index):
        row = super().__getitem__(index)
        return {name: row[name] for name in ("tokens", "labels", "loss_mask", "position_ids")}

# On the CPU it draws from the weights' generator, as often as a micro-batch is large.
initialize._warmup_jit_function = lambda **unused: None
if "--sft" not in sys.argv:
    gpt_dataset.GPTDataset = Padded
runpy.run_module("mcore_batching.run", run_name="__main__", alter_sys=True)
"""


def words_for(release: str, data: Path) -> list[str]:
    """A script's arguments for a file of conversations."""
    return [
        *("--data-path", str(data), "--tokenizer-type", "SFTTokenizer", "--vocab-size", "262"),
        *("--tokenizer-model", "made"),
        *(["--legacy-tokenizer"] if release == "core_v0.16.1" else []),
    ]


def write_lines(path: Path, conversations_a_line: int) -> Path:
    """Write 60 conversations, of which Megatron gives each line one row."""
    made, count = _conversations(), conversations_a_line
    lines = [itertools.chain(*made[at : at + count]) for at in range(0, len(made), count)]
    path.write_text("".join(json.dumps({"messages": [*line]}) + "\n" for line in lines))
    return path


def _conversations() -> list[list[dict[str, Any]]]:
    draw = random.Random(1)
    made = []
    for number in range(60):
        turns = [{"role": "system", "content": f"s{number}"}]
        for _ in range(1 + (number % 3 == 0)):
            turns.append({"role": "user", "content": "u" * draw.randint(1, 8)})
            turns.append({"role": "assistant", "content": "abcdefgh"[: draw.randint(1, 8)]})
        made.append(turns)
    return made
