"""Packed rows against one sample a row, in bfloat16; both against float32, one sample a row.

Rounding differs between the two, as kernels cut rows of other lengths otherwise. What is right: the
packed rows are no further from float32 than single samples are. A neighbour's token let in is
further by orders of magnitude.
"""

from __future__ import annotations

from typing import Any

import setting
import torch
from kit.exactness import log_probs_of
from megatron.core.utils import unwrap_model

from mcore_batching.megatron import forward_only, get_data_iterator

LENGTHS = [1, 2, 7, 64, 300, 33, 1000, 512, 129, 65]
SHORTER = 16
"""Lengths over this in the CPU twin."""
MORE_ERROR = 1.5
"""Over that of single samples: two roundings of the same kind differ by less."""


def main() -> None:
    """Compare, and report three rows."""
    options, dims = setting.start(__doc__)
    sizes = setting.GPU if setting.on_gpu() else setting.CPU
    lengths = LENGTHS if setting.on_gpu() else [n // SHORTER + 1 for n in LENGTHS]
    data = setting.samples(lengths, sizes.vocabulary)
    torch.manual_seed(0)
    half = setting.bare_model(dims, sizes, options.attention)
    exact = setting.bare_model(dims, sizes, "pytorch", torch.float32)
    source = dict(setting.named_parameters(half))
    with torch.no_grad():
        for name, parameter in setting.named_parameters(exact):
            parameter.copy_(source[name])
    cap = 1024 if setting.on_gpu() else 80
    packed = setting.arguments(cap)
    alone = setting.arguments(cap, dynamic_batch_max_samples_per_row=1)
    wanted = _results(alone, exact, data)
    found = {"packed": _results(packed, half, data), "alone": _results(alone, half, data)}
    assert found["packed"]["rows"] < found["alone"]["rows"]
    kernel = type(unwrap_model(half[0]).decoder.layers[0].self_attention.core_attention).__name__
    rows = f"{found['packed']['rows']} rows in place of {found['alone']['rows']}"
    for name in ("log-probs", "gradients"):
        errors = {way: _error(found[way][name], wanted[name]) for way in found}
        setting.report(
            f"{name}, {kernel}, {rows}: error over float32's norm, packed and alone",
            f"{errors['packed']:.2e}, {errors['alone']:.2e}",
            f"at most {MORE_ERROR} × alone",
            errors["packed"] <= MORE_ERROR * errors["alone"],
        )
    apart = _error(found["packed"]["log-probs"], found["alone"]["log-probs"])
    setting.report("log-probs, packed from alone", f"{apart:.2e}", "for information", True)


def _results(args: Any, model: list[Any], data: dict[str, list[Any]]) -> dict[str, Any]:
    iterators, counts = get_data_iterator(args, model, dict(data))
    made = forward_only(log_probs_of, args, model, iterators, counts)
    setting.step(args, model, (iterators, counts))
    gradients = {name: p.main_grad.float().clone() for name, p in setting.named_parameters(model)}
    return {
        "rows": counts[0],
        "log-probs": torch.cat(made["log_probs"]).clone(),
        "gradients": torch.cat([gradients[name].flatten() for name in sorted(gradients)]),
    }


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


if __name__ == "__main__":
    main()
