"""Supervised fine-tuning data for a stock training script: JSON lines, tokens, datasets.

`build_sft_datasets` and `add_sft_arguments` are for a script that uses ``--dynamic-batch-data`` by
itself; with `mcore_batching.install` or the launcher no script needs them.
"""

from mcore_batching.integrations.megatron_lm.sft.dataset import collate
from mcore_batching.integrations.megatron_lm.sft.provider import (
    add_sft_arguments,
    build_sft_datasets,
)
from mcore_batching.integrations.megatron_lm.sft.records import SftDataError

__all__ = ["SftDataError", "add_sft_arguments", "build_sft_datasets", "collate"]
