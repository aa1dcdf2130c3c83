"""Functions of megatron-core that insist on CUDA, replaced for the CPU stand-in."""

from __future__ import annotations

import collections
import functools
import logging
from typing import Any

import torch
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.transformer import multi_token_prediction


def patch_for_cpu() -> None:
    """Replace the megatron-core functions that insist on CUDA tensors or Transformer Engine.

    Called by the CPU stand-in alone, once `torch.cuda` is replaced.
    """
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def maybe_move_tensor_to_cpu(
        tensor: Any, as_numpy: bool = False, record_stream: bool = False
    ) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    send_and_receive = p2p_communication._p2p_ops
    # Of more messages than a pipeline has under way; those before have arrived.
    in_flight: collections.deque[Any] = collections.deque(maxlen=256)

    @functools.wraps(send_and_receive)
    def send_copies(**tensors: Any) -> Any:
        # The interleaved schedule frees an output while it is being sent, and drops the handle of
        # its last one. CUDA streams allow both. gloo reads the memory only when the receiver is
        # ready, and loses a message whose handle is dropped.
        for name in ("tensor_send_next", "tensor_send_prev"):
            if tensors.get(name) is not None:
                tensors[name] = tensors[name].detach().clone()
        requests = send_and_receive(**tensors)
        in_flight.extend(requests.values())
        return requests

    p2p_communication._p2p_ops = send_copies
    # The module's own setter waits for CUDA to be initialised, which never happens here.
    megatron_random._get_cuda_rng_state = torch.cuda.get_rng_state
    megatron_random._set_cuda_rng_state = torch.cuda.set_rng_state
    # The device's generator is the CPU's, which so changes at every dropout.
    logging.getLogger(megatron_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 without Transformer Engine
        moe_utils.te_general_gemm = None
    if hasattr(multi_token_prediction, "is_inference_column_parallel_linear"):  # main, likewise
        multi_token_prediction.is_inference_column_parallel_linear = lambda layer: False
    # The wheels ship the compiled helper, but not the Makefile that would build it.
    dataset_utils.compile_helpers = lambda: None
