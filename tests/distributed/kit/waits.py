"""Jobs that list what makes the host wait inside the pipeline of real steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kit.calls import my_samples, small_model
from kit.exactness import arguments, log_probs_of
from kit.host_waits import DEVICE, host_waits
from kit.model import adam
from kit.objective import packed_objective
from mcore_batching.megatron import forward_only, get_data_iterator, schedule_of, train_step
from mcore_batching.planning import ParallelDims

Waits = list[tuple[str, str, int]]
"""Kind of wait, ``module:function`` that asked for it, how many times."""


def waits_of_a_step(
    dims: dict[str, Any],
    reference: str,
    samples_on_device: bool = False,
    options: dict[str, Any] | None = None,
) -> dict[str, Waits]:
    """The waits inside the pipelines of a `forward_only` and of a `train_step`.

    Args:
        dims: of the job.
        reference: file of the model's weights.
        samples_on_device: the rollout data is there already.
        options: of Megatron's arguments.
    """
    found: dict[str, Waits] = {}
    with host_waits() as waits:
        model = small_model(dims, reference)
        optimizer = adam(model, distributed=False)
        data = my_samples(dims)
        if samples_on_device:
            data = {
                name: [v.to(DEVICE) if isinstance(v, torch.Tensor) else v for v in values]
                for name, values in data.items()
            }
        args = arguments(ParallelDims(**dims), **(options or {}))
        iterators, counts = get_data_iterator(args, model, data)
        schedule = schedule_of(iterators)
        # Also of samples on the device: laying them out there would ask it for every length.
        block = schedule.rows(0, [0], 0, has_labels=False)
        assert block.rows()[0].tokens.device.type == "cpu"
        for name in ("forward_only", "train_step"):
            waits.counts.clear()
            if name == "forward_only":
                forward_only(log_probs_of, args, model, iterators, counts)
            else:
                train_step(packed_objective, args, model, iterators, counts, optimizer)
            found[name] = [(*what, number) for what, number in sorted(waits.counts.items())]
    return found


def deliberate_waits() -> list[tuple[str, Waits]]:
    """For each of `ACTS`, the kind of wait that it makes ("": none) and what is counted."""
    found: list[tuple[str, Waits]] = []
    with host_waits() as waits:
        x = torch.arange(4, device=DEVICE)
        host = torch.arange(4)
        for kind, act in ACTS:
            waits.counts.clear()
            with waits.counting():
                act(x, host)
            found.append((kind, [(*what, number) for what, number in waits.counts.items()]))
    return found


Act = Callable[[torch.Tensor, torch.Tensor], Any]
ACTS: list[tuple[str, Act]] = [
    ("_local_scalar_dense", lambda x, host: x[0].item()),
    ("_local_scalar_dense", lambda x, host: bool(x[1] > 0)),
    ("_local_scalar_dense", lambda x, host: host[x[1]]),
    ("tolist", lambda x, host: x.tolist()),
    ("copy to the host", lambda x, host: x.cpu()),
    ("copy to the host", lambda x, host: x.to("cpu")),
    ("copy to the host", lambda x, host: host.clone().copy_(x)),
    ("nonzero", lambda x, host: x.nonzero()),
    ("index by a mask", lambda x, host: x[x > 1]),
    ("index by a mask", lambda x, host: x.clone().__setitem__(x > 1, x[:2])),
    ("masked_select", lambda x, host: x.masked_select(x > 1)),
    ("repeat_interleave", lambda x, host: x.repeat_interleave(x)),
    ("_unique2", lambda x, host: x.unique()),
    ("equal", lambda x, host: torch.equal(x, x)),
    ("copy to the device", lambda x, host: host.to(DEVICE)),
    ("copy to the device", lambda x, host: host.to(x.device, non_blocking=True)),
    ("copy to the device", lambda x, host: host.pin_memory().to(DEVICE)),
    ("copy to the device", lambda x, host: host.cuda()),
    ("copy to the device", lambda x, host: torch.tensor(3, device=x.device)),
    ("copy to the device", lambda x, host: torch.as_tensor([1, 2], device="cuda")),
    ("copy to the device", lambda x, host: x.clone().copy_(host)),
    ("tensor of the host's in aten.index", lambda x, host: x[[0, 1]]),
    ("tensor of the host's in aten.add", lambda x, host: x + host),
    ("synchronize", lambda x, host: torch.cuda.synchronize()),
    ("synchronize", lambda x, host: torch.cuda.current_stream().synchronize()),
    ("", lambda x, host: torch.full((), 3, device=x.device) + x),
    ("", lambda x, host: torch.where(x > 1, x, 0) * 2 + torch.arange(4, device="cuda")),
    ("", lambda x, host: host.pin_memory().to(x.device, non_blocking=True) + x),
    ("", lambda x, host: x[1:3].sum() + host[0]),
    ("", lambda x, host: host[host > 1].tolist()),
    ("", lambda x, host: x.index_select(0, x)),
    ("", lambda x, host: x.clone().__setitem__(x > 1, 0)),
    ("", lambda x, host: x.float().requires_grad_().sum().backward()),
    ("", lambda x, host: x.repeat_interleave(x, output_size=6)),
]


def waits_of_stock_training(script: str, words: list[str]) -> Waits:
    """The waits inside the pipelines of a training script's steps and evaluations."""
    from kit.stock import train

    with host_waits() as waits:
        record = train(script, words)
    assert "error" not in record, record
    return [(*what, number) for what, number in sorted(waits.counts.items())]
