"""Differences between Megatron-LM versions, and nothing else.

The rest of the package calls `compat.<module>.<function>` and never asks for a version. Run on
megatron-core 0.16.1 and 0.19.2.

packed_rows  Megatron's parameters of a packed row, and the ranks that share it
layers       kinds of layers, what they can run, and their specs
schedules    passes of pipeline schedules, and transfers between stages
experts      routers, what they record, and how tokens are exchanged
multi_token  losses of multi-token prediction
scripts      start and log of stock training scripts
cpu          functions that insist on CUDA, replaced
"""

from mcore_batching.megatron.compat import cpu as cpu
from mcore_batching.megatron.compat import experts as experts
from mcore_batching.megatron.compat import layers as layers
from mcore_batching.megatron.compat import multi_token as multi_token
from mcore_batching.megatron.compat import packed_rows as packed_rows
from mcore_batching.megatron.compat import schedules as schedules
from mcore_batching.megatron.compat import scripts as scripts
