"""``examples/sft/sft.py`` with something in it that a script of one's own may have.

``--variant`` names it:

- ``loss-raises``: the loss function raises on the last rank, in the third step.
- ``data-ends``: rank 0 runs out of data in the third step. Ranks iterate by themselves over the
  data.
- ``conversations``: a row holds two samples, as ``--sft`` packs those of a line.
- ``reading-raises``: a sample of the third step cannot be read on rank 0.
- ``none``: nothing.
- ``rejected``: the loss is validated as ``pretrain_gpt.py`` does it, and rejected in the third
  step, which Megatron then runs again.
- ``tokens-per-sample``: packed rows are said to be of samples of ``--seq-length``, as
  ``pretrain_gpt.py`` does from 0.19 on.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from torch import Tensor
from torch.utils.data import default_collate

from kit.harness import REPOSITORY
from kit.stand_ins import module_of

STEPS_BEFORE = 2
SAMPLES_A_RANK = 4

_path = REPOSITORY / "examples" / "sft" / "sft.py"
sys.path.insert(0, str(_path.parent))
sft = module_of(_path)


@functools.wraps(sft.forward_step)
def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
    losses, loss_func = sft.forward_step(data_iterator, model)
    args = get_args()
    third_step = args.curr_iteration == STEPS_BEFORE

    def loss(output: Tensor) -> Any:
        args.num_losses = getattr(args, "num_losses", 0) + 1
        result = loss_func(output)
        if args.variant == "rejected":
            get_rerun_state_machine().validate_result(
                result=result[0],
                rejection_func=lambda value: third_step,
                message="rejected",
                tolerance=0.0,
                fatal=False,
            )
        at_fault = dist.get_rank() == dist.get_world_size() - 1
        if args.variant == "loss-raises" and at_fault and third_step:
            raise ArithmeticError("the loss function has had enough")
        return result

    return losses, loss


SftDataset = sys.modules["sft_datasets"].SftDataset


class _Unreadable(SftDataset):  # type: ignore[misc, valid-type]
    """Its samples cannot be read from the third step on."""

    num_read = 0

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        if self.num_read > STEPS_BEFORE * SAMPLES_A_RANK:
            raise OSError("the file is gone")
        return super().__getitem__(index)


class _Conversations(SftDataset):
    """Rows of two samples, and behind the second one padding; one of four counts as truncated."""

    def __len__(self) -> int:
        return super().__len__() // 2

    def __getitem__(self, index: int) -> Any:
        both = [super(_Conversations, self).__getitem__(2 * index + each) for each in (0, 1)]
        length = len(both[0]["tokens"])
        first = int(both[0]["loss_mask"].nonzero()[-1]) + 1
        row = {name: torch.cat([both[0][name][:first], both[1][name]]) for name in both[0]}
        offsets = torch.full((first + length + 1,), first + length, dtype=torch.int32)
        offsets[:2] = torch.tensor([0, first])
        if index % 4 == 0:
            row["labels"][-1] = 0  # else padding's
        return row | {"cu_seqlens": offsets}


def datasets_provider(num_samples: Any, vp_stage: int | None = None) -> Any:
    args = get_args()
    if args.variant == "conversations":
        num_samples = [2 * number for number in num_samples]
    train, valid, test = sft.datasets_provider(num_samples, vp_stage)
    if args.variant == "conversations" and train is not None:
        for each in (train, valid, test):
            each.__class__ = _Conversations
    if args.variant == "reading-raises" and dist.get_rank() == 0:
        train.__class__ = _Unreadable
    if args.variant != "data-ends" or train is None:
        return train, valid, test
    replica = parallel_state.get_data_parallel_rank()
    replicas = parallel_state.get_data_parallel_world_size()

    def samples() -> Iterator[Any]:
        for number in range(replica, len(train), replicas):
            step = number // replicas // SAMPLES_A_RANK
            if step == STEPS_BEFORE and dist.get_rank() == 0:
                return
            yield default_collate([train[number]])

    return samples(), None, None


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--variant", required=True)
    return parser


if __name__ == "__main__":
    parsed = parse_and_validate_args(extra_args_provider=add_arguments)
    if parsed.variant == "tokens-per-sample":
        sft.PackedSeqParams = functools.partial(
            PackedSeqParams, tokens_per_sample=parsed.seq_length
        )
    pretrain(
        pretrain_cfg_container_from_args(parsed, gpt_config_from_args(parsed)),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
    )
