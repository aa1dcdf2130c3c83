"""A package named skyrl with the iterator that is replaced; and SkyRL's own, from a checkout.

Of SkyRL's own, third-party packages that the iterator does not use are stand-ins, and so are its
packages' start-up and its `distributed.strategy`, which import engines. torch is real.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from kit.stand_ins import bare_packages, forget, write_package

SOURCE = os.environ.get("MCORE_BATCHING_SKYRL_SOURCE", "")
WORKERS = "skyrl.backends.skyrl_train.workers"
STAND_INS = (
    "jaxtyping",
    "loguru",
    "transformers",
    "skyrl.backends.skyrl_train.distributed.strategy",
)
PACKAGES = (
    "skyrl",
    "skyrl.backends",
    "skyrl.backends.skyrl_train",
    "skyrl.backends.skyrl_train.distributed",
    "skyrl.backends.skyrl_train.distributed.megatron",
    "skyrl.backends.skyrl_train.utils",
    WORKERS,
    "skyrl.train",
    "skyrl.train.dataset",
)
WORKER_UTILS = """
class TokenBasedBatchIterator:
    def __init__(self, data, max_tokens_per_microbatch):
        self._max_tokens_per_microbatch = max_tokens_per_microbatch
        self._token_counts = data["attention_mask"].sum(dim=1).cpu().tolist()
        self._microbatches = [[sample] for sample in range(len(self._token_counts))]
        most = self._sync_num_microbatches()
        self._num_padding_microbatches = most - len(self._microbatches)

    def _sync_num_microbatches(self):
        return len(self._microbatches)

    def __len__(self):
        return len(self._microbatches) + self._num_padding_microbatches

    def reorder_and_combine_batches(self, batches):
        found = {}
        for samples, batch in zip(self._microbatches, batches):
            for name, values in batch.items():
                places = zip(samples, values)
                found.setdefault(name, {}).update(places)
        return {name: [values[i] for i in sorted(values)] for name, values in found.items()}

    def reorder_and_combine_items(self, batches):
        pairs = zip(self._microbatches, batches)
        found = {i: item for samples, items in pairs for i, item in zip(samples, items)}
        return [found[i] for i in sorted(found)]

def get_microbatch_iterator(data, micro_batch_size, max_tokens_per_microbatch):
    return TokenBasedBatchIterator(data, max_tokens_per_microbatch=max_tokens_per_microbatch)
"""


@contextlib.contextmanager
def small_skyrl(folder: Path) -> Iterator[None]:
    """The small package, importable meanwhile."""
    path = folder.joinpath(*WORKERS.split("."))
    workers = f"from {WORKERS}.worker_utils import *\n"
    write_package(path, {"worker_utils": WORKER_UTILS, "megatron_worker": workers})
    with importable(folder):
        yield


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """The skyrl in a folder, importable meanwhile."""
    before = dict(sys.modules)
    sys.modules |= bare_packages(folder, PACKAGES)
    try:
        yield
    finally:
        forget("skyrl")
        for name in STAND_INS:
            if name in sys.modules and name not in before:
                del sys.modules[name]


@contextlib.contextmanager
def own_skyrl() -> Iterator[None]:
    """SkyRL's own, importable meanwhile."""
    if not SOURCE:
        pytest.skip("MCORE_BATCHING_SKYRL_SOURCE does not name a checkout of SkyRL (a9564572)")
    with importable(Path(SOURCE)):
        for name in STAND_INS:
            stand_in: Any = MagicMock(name=name, __path__=[], __spec__=None, __name__=name)
            sys.modules.setdefault(name, stand_in)
        yield
