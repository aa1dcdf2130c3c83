"""Bytes of a batch in two padded segments, left-padded, and packed, in one run.

    python tests/benchmarks/bench_left_padded.py [--samples 8] [--json OUT]

Anti-correlated lengths, as in multi-turn training: late turns have long prompts and short
responses, early ones the other way round. No sample is longer than 60,000 tokens, but the longest
prompt and the longest response together are 105,000. Counted are the tensors that are as wide as a
sample: tokens, position ids (int64 each) and the attention mask (bool), as they are allocated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from mcore_batching.batch import DEFAULT_SCHEMA, pack
from mcore_batching.rl import left_pad

LONGEST, LONGEST_PROMPT, LONGEST_RESPONSE = 60_000, 50_000, 55_000


def anti_correlated(num_samples: int) -> list[tuple[int, int]]:
    """(prompt, response) tokens of each sample; from short to long prompts."""
    if num_samples < 2:
        raise SystemExit(f"--samples must be 2 or more, got {num_samples}")
    shortest_prompt = LONGEST - LONGEST_RESPONSE
    shapes = []
    for index in range(num_samples):
        share = index / (num_samples - 1)
        prompt = round(shortest_prompt + share * (LONGEST_PROMPT - shortest_prompt))
        shapes.append((prompt, LONGEST - prompt))
    return shapes


def two_segments(samples: dict[str, Any], prompts: list[int]) -> list[torch.Tensor]:
    """`[PAD … PROMPT | RESPONSE PAD …]`: each segment as wide as its longest."""
    boundary, end = max(prompts), max(samples["response_lengths"])
    tokens = torch.zeros(len(prompts), boundary + end, dtype=torch.int64)
    mask = torch.zeros(len(prompts), boundary + end, dtype=torch.bool)
    for line, (prompt, value) in enumerate(zip(prompts, samples["tokens"], strict=True)):
        columns = slice(boundary - prompt, boundary - prompt + len(value))
        tokens[line, columns] = value
        mask[line, columns] = True
    return [tokens, mask, (mask.long().cumsum(1) - 1).clamp(min=0)]


def measure(num_samples: int) -> dict[str, dict[str, int]]:
    """Width in tokens and bytes of each layout; all three hold the same tokens."""
    shapes = anti_correlated(num_samples)
    samples: dict[str, Any] = {
        "tokens": [torch.randint(1, 1000, (sum(shape),)) for shape in shapes],
        "total_lengths": [sum(shape) for shape in shapes],
        "response_lengths": [response for _, response in shapes],
    }
    blocks = left_pad(samples, pad_token_id=0)
    row = pack(samples, schema=DEFAULT_SCHEMA, sample_indices=range(num_samples))
    dims_list = {
        "two segments": two_segments(samples, [prompt for prompt, _ in shapes]),
        "left-padded": [blocks.tokens, blocks.attention_mask, blocks.position_ids],
        "packed": [row.tokens, row.padding_mask, row.position_ids],
    }
    total = sum(int(value.sum()) for value in samples["tokens"])
    for name, (tokens, *_) in dims_list.items():
        if int(tokens.sum()) != total:
            raise AssertionError(f"{name} does not hold the tokens of the samples")
    return {
        name: {
            "width_tokens": tensors[0].shape[1],
            "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        }
        for name, tensors in dims_list.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    found = measure(options.samples)
    before = found["two segments"]["bytes"]
    for name, numbers in found.items():
        print(
            f"{name:12}  width {numbers['width_tokens']:7,}  {numbers['bytes']:12,} bytes  "
            f"{numbers['bytes'] / before:.1%}"
        )
    if options.json:
        options.json.write_text(json.dumps({"samples": options.samples, "layouts": found}))


if __name__ == "__main__":
    main()
