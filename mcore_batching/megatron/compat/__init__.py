"""Differences between Megatron-LM versions, and nothing else.

The rest of the package calls `compat.<module>.<function>` and never reads a version. Run on
megatron-core 0.16.1 and 0.19.2.
"""

from mcore_batching.megatron.compat import layers as layers
from mcore_batching.megatron.compat import packed_rows as packed_rows
from mcore_batching.megatron.compat import schedules as schedules
