"""Peak memory of a step at a vocabulary of 152064 and 16384 tokens, against what is predicted.

Over the logits, log-probs may take 0.7 of one float32 copy of them. The whole step is predicted
from the same layers with a small vocabulary: what they take, and the logits, their chunks, and the
gradients of the first and the last layer before those are added up.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import setting
import torch

from mcore_batching.megatron import get_data_iterator
from mcore_batching.planning.plans.memory import LOG_PROB_CHUNK_TOKENS

VOCABULARY, SMALL, TOKENS = 152064, 1024, 16384
LIMIT, TOLERANCE = 0.7, 1.15
GB = 1e9


def main() -> None:
    """Measure both vocabularies, and report."""
    options, dims = setting.start(__doc__)
    if not setting.on_gpu():
        raise SystemExit("on a CPU memory is measured by tests/device/test_device.py")
    sizes = dataclasses.replace(setting.GPU, layers=2, hidden=2048, heads=32, key_value_heads=8)
    small = _measure(options, dims, dataclasses.replace(sizes, vocabulary=SMALL))
    large = _measure(options, dims, dataclasses.replace(sizes, vocabulary=VOCABULARY))
    copy = 4 * TOKENS * VOCABULARY
    for name in ("forward", "backward"):
        share = large[name] / copy
        setting.report(
            f"{name} over the logits, of a float32 copy ({copy / GB:.2f} GB)",
            f"{share:.2f}",
            f"at most {LIMIT}",
            share <= LIMIT,
        )
    logits, chunk = copy / 2, 4 * LOG_PROB_CHUNK_TOKENS * VOCABULARY
    weights = 2 * 2 * VOCABULARY * sizes.hidden
    predicted = small["step"] + logits + 3 * chunk + weights
    setting.report(
        f"peak of a step over what is held between steps, {TOKENS} tokens",
        f"{large['step'] / GB:.2f} GB",
        f"predicted {predicted / GB:.2f} GB, at most {TOLERANCE} × that",
        large["step"] <= TOLERANCE * predicted,
    )


def _measure(options: Any, dims: Any, sizes: setting.Sizes) -> dict[str, float]:
    model = setting.bare_model(dims, sizes, options.attention)
    args = setting.arguments(TOKENS)
    data = setting.samples([TOKENS // 4] * 4, sizes.vocabulary)
    planned = get_data_iterator(args, model, data)
    setting.step(args, model, planned)
    found: dict[str, float] = {}

    def watched(logits: Any, row: Any, totals: Any) -> Any:
        before = torch.cuda.memory_allocated()
        found["layers"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made = setting.loss(logits, row, totals)
        found["forward"] = torch.cuda.max_memory_allocated() - before

        def gradient_is_made(grad: Any) -> None:
            found["backward"] = torch.cuda.max_memory_allocated() - before

        logits.register_hook(gradient_is_made)
        return made

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    setting.step(args, model, planned, watched)
    found["step"] = max(found["layers"], torch.cuda.max_memory_allocated()) - base
    del model, planned
    torch.cuda.empty_cache()
    return found


if __name__ == "__main__":
    main()
