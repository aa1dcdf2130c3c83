"""Packages in the names of frameworks, with the functions that are replaced; frameworks' own
modules, from checkouts that environment variables name.

Of the own ones, third-party packages that their functions here do not use are stand-ins, and so are
packages with a start-up that imports engines. torch and tensordict are real.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
import torch
from kit.stand_ins import StandIns, bare_packages, forget, write_package

from mcore_batching.integrations.slime.rollout_manager import build_dp_schedule

PLAN = """
def build_dp_schedule(args, train_parallel_config, total_lengths, *, global_batch_size,
                      rollout_indices):
    return "own", args, train_parallel_config, total_lengths, global_batch_size, rollout_indices
"""
DATA = "from kit.hooking import Listed as DataIterator\n"
DATA_OF_SLIME = """
def get_data_iterator(rollout_data):
    return [DataIterator(rollout_data, rollout_data["micro_batch_indices"])]
"""
DATA_OF_MILES = """
def get_data_iterator(args, model, rollout_data):
    if "micro_batch_indices" in rollout_data:
        indices, counts = rollout_data["micro_batch_indices"], rollout_data["num_microbatches"]
    else:
        indices, counts = [[i] for i in range(len(rollout_data["tokens"]))], [3]
    return [DataIterator(rollout_data, indices)], counts
"""
MODEL = """
def forward_only(f, args, model, data_iterator, num_microbatches, store_prefix="",
                 use_rollout_top_p_replay=False):
    (iterator,) = data_iterator
    iterator.reset()
    made = []
    for _ in range(sum(num_microbatches)):
        batch = iterator.get_next(["tokens", "total_lengths", "loss_masks"])
        _, values = f("logits", total_lengths=batch["total_lengths"], tokens=batch["tokens"])
        made += values["sums"]
    origin = [None] * len(made)
    for index, value in zip(sum(iterator.micro_batch_indices, []), made, strict=False):
        origin[index] = value
    return {store_prefix + "sums": origin, "replay": use_rollout_top_p_replay}
"""
MODEL_OF_MILES = MODEL.replace('store_prefix="",', 'rollout_id, store_prefix="",').replace(
    '_, values = f("logits", ', 'values = f("logits", non_loss_data=True, '
)
ROLLOUT = "def generate_rollout(args, rollout_id, source): return 'rollouts'\n"
USE_LEGACY = """
import os

def use_legacy_rollout_v1():
    return bool(int(os.environ.get("MILES_USE_LEGACY_ROLLOUT_V1", "0")))
"""
REARRANGE = """
def rearrange_micro_batches(batch, max_token_len, dp_group=None, num_batches_divided_by=None,
                            same_micro_num_in_dp=True, min_num_micro_batch=None,
                            use_dynamic_bsz_balance=True, force_group_size=1):
    return "own", force_group_size

def restore_dynamic_batch(data, batch_idx_list):
    return "own"
"""
SELECT = """
def index_select_tensor_dict(batch, indices):
    return {name: values[indices] for name, values in batch.items()}
"""
ITERATOR = """
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
PACKER = """
class SequencePacker:
    def __init__(self, bin_capacity, collect_metrics=False, min_bin_count=None,
                 bin_count_multiple=None):
        self.bin_capacity, self.bin_count_multiple = bin_capacity, bin_count_multiple

    def _validate_sequence_lengths(self, lengths):
        if max(lengths, default=0) > self.bin_capacity:
            raise ValueError("exceeds bin capacity")

    def pack(self, sequence_lengths):
        return self._pack_implementation(sequence_lengths)

def get_packer(algorithm, bin_capacity, collect_metrics=False, min_bin_count=None,
               bin_count_multiple=None):
    return "own", algorithm, bin_capacity, min_bin_count, bin_count_multiple
"""
TRAINERS = {
    "slime": ("slime.backends.megatron_utils.data", "slime.backends.megatron_utils.model"),
    "miles": ("miles.backends.training_utils.data", "miles.backends.megatron_utils.model"),
}
"""Modules of the trainers that `mcore_batching.hook` is given."""
WORKERS = "skyrl.backends.skyrl_train.workers"
PACKING = "nemo_rl.data.packing"
SMALL = {
    "slime": {
        "utils.dp_schedule": PLAN,
        "backends.megatron_utils.data": DATA + DATA_OF_SLIME,
        "backends.megatron_utils.model": MODEL,
        "backends.megatron_utils.actor": "from .data import *\nfrom .model import *\n",
        "ray.rollout": "from slime.utils.dp_schedule import *\n",
        "rollout.sglang_rollout": ROLLOUT,
    },
    "miles": {
        "utils.dp_schedule": PLAN,
        "utils.environ": USE_LEGACY,
        "utils.misc": "",
        "backends.training_utils.data": DATA + DATA_OF_MILES,
        "backends.megatron_utils.model": MODEL_OF_MILES,
        "rollout.sglang_rollout": ROLLOUT,
        "rollout.inference_rollout.inference_rollout_common": "class InferenceRolloutFn: ...\n",
    },
    "verl": {
        "utils.seqlen_balancing": REARRANGE,
        "utils.tensordict_utils": SELECT,
        "workers.engine.utils": "from verl.utils.seqlen_balancing import *\n",
    },
    "skyrl": {
        f"{WORKERS}.worker_utils".removeprefix("skyrl."): ITERATOR,
        f"{WORKERS}.megatron_worker".removeprefix("skyrl."): "from .worker_utils import *\n",
    },
    "nemo_rl": {
        "data.packing.algorithms": PACKER,
        "data.packing.__init__": f"from {PACKING}.algorithms import get_packer\n",
    },
}
"""Text of each framework's modules, by their names in it."""


class Checkout(NamedTuple):
    """Where a framework's own modules are, and what it imports that is not run here."""

    variable: str
    commit: str
    stand_ins: tuple[str, ...] = ()  # where they are not installed
    bare: tuple[str, ...] = ()  # packages without their start-up
    mocked: tuple[str, ...] = ()  # modules of its own


_OF_SLIME = ("ray", "httpx", "tqdm", "transformers", "huggingface_hub", "pydantic", "sglang")
CHECKOUTS = {
    "slime": Checkout("MCORE_BATCHING_SLIME_SCHEDULED", "624b824a8", _OF_SLIME),
    "miles": Checkout("MCORE_BATCHING_MILES", "31f1ca961", _OF_SLIME),
    "verl": Checkout(
        "MCORE_BATCHING_VERL_SOURCE",
        "an unpacked wheel of 0.9.1, or a checkout",
        ("datasets", "omegaconf", "pandas", "ray", "transformers"),
        ("verl.workers", "verl.workers.engine"),
        ("verl.workers.config",),
    ),
    "skyrl": Checkout(
        "MCORE_BATCHING_SKYRL_SOURCE",
        "a9564572",
        ("jaxtyping", "loguru", "transformers"),
        (
            *("skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", WORKERS),
            *("skyrl.backends.skyrl_train.distributed", "skyrl.backends.skyrl_train.utils"),
            *("skyrl.backends.skyrl_train.distributed.megatron", "skyrl.train"),
            "skyrl.train.dataset",
        ),
        ("skyrl.backends.skyrl_train.distributed.strategy",),
    ),
    "nemo_rl": Checkout(
        "MCORE_BATCHING_NEMO_RL_SOURCE", "7ea279abf", bare=("nemo_rl", "nemo_rl.data", PACKING)
    ),
}


def source_of(framework: str) -> Path:
    """The folder of a framework's own modules; the test is skipped where there is none."""
    variable, commit, *_ = CHECKOUTS[framework]
    if not os.environ.get(variable):
        pytest.skip(f"{variable} does not name a folder with {framework} ({commit})")
    return Path(os.environ[variable])


@contextlib.contextmanager
def importable(folder: Path, *modules: str) -> Iterator[None]:
    """Packages of a folder, imported anew meanwhile; beside them are stand-ins for modules."""
    forget(*SMALL)
    before, finder = set(sys.modules), StandIns(modules)
    sys.path.insert(0, str(folder))
    sys.meta_path.append(finder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.meta_path.remove(finder)
        made = {name.partition(".")[0] for name in {*sys.modules} - before}
        forget(*SMALL, *(made & {*modules}))


@contextlib.contextmanager
def own(framework: str) -> Iterator[Path]:
    """The framework's own modules, from the folder that is given."""
    folder, checkout = source_of(framework), CHECKOUTS[framework]
    with importable(folder, *checkout.stand_ins):
        sys.modules |= bare_packages(folder, checkout.bare)
        sys.modules |= {name: MagicMock(name=name) for name in checkout.mocked}
        yield folder


@contextlib.contextmanager
def small(folder: Path, *frameworks: str) -> Iterator[Path]:
    """The small packages of these names, in a folder."""
    for framework in frameworks:
        files = SMALL[framework]
        write_package(folder / framework, {k.replace(".", "/"): v for k, v in files.items()})
    with importable(folder):
        yield folder


def rewrite(module: str, folder: Path, before: str, after: str) -> Any:
    """The module of a small package, another version of it."""
    path = Path(folder, *module.split(".")).with_suffix(".py")
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    sys.modules.pop(module, None)
    importlib.invalidate_caches()
    return importlib.import_module(module)


def trainer_of(framework: str) -> Any:
    data, model = map(importlib.import_module, TRAINERS[framework])
    return SimpleNamespace(data=data, model=model)


SLIME_INIT = "mcore_batching.integrations.slime.init"


def slime_arguments(cap: int, **more: Any) -> SimpleNamespace:
    made = {
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": cap,
        "micro_batch_size": 1,
        "custom_megatron_init_path": SLIME_INIT,
        "balance_data": False,
        "balance_by_flops": False,
        "dynamic_batch_plan_effort": 30,
    }
    return SimpleNamespace(**(made | more))


def trainer_sizes(
    ranks: int, context: int = 1, chunks: int | None = None, group: int | None = None
) -> dict[str, Any]:
    """Sizes as a trainer sends them; miles' are None without virtual pipeline stages."""
    return {
        "dp_size": ranks,
        "cp_size": context,
        "vpp_size": chunks,
        "microbatch_group_size_per_vp_stage": group,
    }


def slime_plan(
    args: Any,
    config: dict[str, Any],
    lengths: list[int],
    rollouts: list[int] | None = None,
    size: int | None = None,
) -> Any:
    """The schedule; without rollouts every sample is one, and all are one step."""
    return build_dp_schedule(
        pytest.fail,
        args,
        config,
        lengths,
        global_batch_size=size or len(lengths),
        rollout_indices=rollouts or list(range(len(lengths))),
    )


LENGTHS = [90, 13, 55, 8, 21, 34, 70, 5, 3, 44, 61, 29]


def padded_batch(lengths: list[int]) -> dict[str, torch.Tensor]:
    """verl's or SkyRL's batch: the sample's number in place of each token, beside its mask."""
    mask = torch.zeros(len(lengths), max(lengths, default=1), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    numbers = mask * torch.arange(len(lengths))[:, None]
    # verl's name, SkyRL's
    return {"attention_mask": mask, "input_ids": numbers, "sequences": numbers}
