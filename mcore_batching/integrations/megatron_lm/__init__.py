"""One flag in stock training scripts built on ``megatron.training``.

`install` hooks everything; a patched Megatron-LM (see ``patches/``) calls the other names itself.
Importing this package imports megatron.core; ``megatron.training`` is imported when hooked.
"""

from mcore_batching.flags import add_dynamic_batch_arguments as add_arguments
from mcore_batching.integrations.megatron_lm.arguments import check_arguments, check_training
from mcore_batching.integrations.megatron_lm.forward_backward import (
    with_batching_statistics,
    wrap_forward_backward,
)
from mcore_batching.integrations.megatron_lm.install import install
from mcore_batching.integrations.megatron_lm.script_batches import next_batch
from mcore_batching.integrations.megatron_lm.stock_steps import StockDataError

__all__ = [
    "StockDataError",
    "add_arguments",
    "check_arguments",
    "check_training",
    "install",
    "next_batch",
    "with_batching_statistics",
    "wrap_forward_backward",
]
