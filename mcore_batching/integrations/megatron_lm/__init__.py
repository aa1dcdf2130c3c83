"""One flag in stock training scripts built on ``megatron.training``.

`install` hooks everything; the other names are what a patched Megatron-LM calls (see ``patches/``).
Importing this package imports megatron.core; ``megatron.training`` only as it is hooked.
"""

from mcore_batching.integrations.megatron_lm.arguments import (
    add_arguments,
    check_arguments,
    check_training,
)
from mcore_batching.integrations.megatron_lm.batch_fields import next_batch
from mcore_batching.integrations.megatron_lm.forward_backward import wrap_schedule
from mcore_batching.integrations.megatron_lm.install import Installation, install
from mcore_batching.integrations.megatron_lm.step_log import with_statistics

__all__ = [
    "Installation",
    "add_arguments",
    "check_arguments",
    "check_training",
    "install",
    "next_batch",
    "with_statistics",
    "wrap_schedule",
]
