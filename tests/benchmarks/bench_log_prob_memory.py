"""Peak memory of log-probabilities from logits, beside other ways to compute them.

    python tests/benchmarks/bench_log_prob_memory.py

Resident memory on the CPU (Linux), over the logits themselves, in float32 copies of them: forward,
and from then to the end of backward; in all, with the logits themselves. Exit status 1 if ours need
more than 0.7 of one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from kit.harness import Job, results, run_jobs

LIMIT = 0.7


def main() -> None:
    """Measure every case and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32768, 152064])
    parser.add_argument("--tensor-parallel", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--response-share", type=float, default=1.0)
    options = parser.parse_args()
    missed = False
    for size in options.tensor_parallel:
        for vocabulary in options.vocabularies:
            for dtype in options.dtypes:
                job = Job(
                    f"memory-{size}-{vocabulary}-{dtype}",
                    "kit.log_prob_memory:measure",
                    size,
                    {"tensor_parallel": size},
                    {
                        "tokens": options.tokens,
                        "vocabulary": vocabulary,
                        "dtype": dtype,
                        "response_share": options.response_share,
                    },
                    seconds=1800.0,
                )
                with tempfile.TemporaryDirectory() as scratch:
                    ranks = results(run_jobs([job], Path(scratch))[job.name])
                gigabytes = options.tokens * vocabulary // size * 4 / 1e9
                print(
                    f"\n{options.tokens} tokens, vocabulary {vocabulary}, TP{size}, {dtype} "
                    f"logits; one float32 copy is {gigabytes:.2f} GB\n"
                    f"{'':<36}{'forward':>9}{'backward':>10}{'in all':>8}{'seconds':>9}"
                )
                for name in ranks[0]:
                    worst = {key: max(rank[name][key] for rank in ranks) for key in ranks[0][name]}
                    print(
                        f"{name:<36}{worst['forward']:>9.2f}{worst['backward']:>10.2f}"
                        f"{worst['all']:>8.2f}{worst['seconds']:>9.1f}",
                        flush=True,
                    )
                    if name.startswith("ours"):
                        missed |= max(worst["forward"], worst["backward"]) > LIMIT
    sys.exit(missed)


if __name__ == "__main__":
    main()
