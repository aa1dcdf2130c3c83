"""Samples that begin alike: each computed by itself, or sharing tokens.

    python tests/benchmarks/bench_shared_prefixes.py [--data ../shared/data] [--trajectories 6]

The first table is planned on DP8×PP4 with the default costs, apart over shared: tokens, work and
predicted end of a step; and the end where only turns share (chains) over shared. Groups have random
tokens, a prompt and responses of these lengths; solutions are four of each question, four
characters a token; turns are recorded ones with random tokens, behind the same first 1,400. The
second table trains the first trajectories, each a sixteenth as long, on one process of the CPU:
processor time of a step, and the norm of its gradient, of random advantages.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from benchmark_cases import PP4, SOLVERS, parser_of
from kit.harness import Job, results, run_jobs

from mcore_batching.batch import DEFAULT_SCHEMA
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.prefix_tree import hashes_of_beginnings
from mcore_batching.planning import CostModel, PlannerConfig, StepPlan, plan_step, step_statistics
from mcore_batching.planning.forest import find_forest
from mcore_batching.tools.report import Table

CAPS = {"16k": 16384, "32k": 32768}
CAP = CAPS["16k"]
VOCABULARY = 150_000
SYSTEM = 1400
"""Tokens that all trajectories begin with."""
GROUPS = (
    *((256, 2000, 8, 64), (1000, 1000, 8, 64), (8000, 1000, 8, 64), (8000, 1000, 8, 16)),
    *((12000, 300, 8, 64), (8000, 1000, 16, 64)),
)
"""Tokens of the prompt and of each response, responses of a prompt, prompts."""
SHORTER = 16
"""Turns that are trained are shorter by this factor, so that a step takes seconds."""
Trajectories = list[list[tuple[int, int]]]
"""Prompt and response tokens of each turn."""
Case = tuple[str, list[torch.Tensor], str]
"""Name, tokens of each sample, cap."""


def random_tokens(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(VOCABULARY, (count,), generator=generator)


def groups(prompt: int, response: int, size: int, count: int) -> list[torch.Tensor]:
    """Samples of groups with a prompt in common."""
    generator = torch.Generator().manual_seed(0)
    prompts = [random_tokens(prompt, generator) for _ in range(count)]
    return [
        torch.cat((p, random_tokens(response, generator))) for p in prompts for _ in range(size)
    ]


def turns(trajectories: Trajectories, first: int = SYSTEM) -> list[torch.Tensor]:
    """Turn after turn of each trajectory, each beginning the next, behind the same first tokens."""
    generator = torch.Generator().manual_seed(0)
    system = random_tokens(first, generator)
    made: list[torch.Tensor] = []
    for each in trajectories:
        whole = torch.cat((system, random_tokens(max(map(sum, each)) - first, generator)))
        made += [whole[: sum(turn)].clone() for turn in each]
    return made


def solutions(file: Path, questions: int) -> list[torch.Tensor]:
    """Four solutions of each question, four characters a token."""
    made = []
    for line in file.read_text("utf-8").splitlines()[:questions]:
        row = json.loads(line)
        for solver in SOLVERS:
            text = f"{row['question']}\n{row[solver]['solution']}".encode()
            text += b" " * (-len(text) % 4)
            made.append(torch.frombuffer(bytearray(text), dtype=torch.int32))
    return made


def _pairs(plan: StepPlan, lengths: list[int]) -> float:
    """Pairs of a query and a key, twice."""
    model = CostModel(linear=0.0, quadratic=1.0, per_micro_batch=0.0)
    units = plan.units(plan.sample_indices)
    return sum(
        model.sample(lengths[each]) if isinstance(each, int) else each.cost(model) for each in units
    )


def planned(name: str, tokens: list[torch.Tensor], cap: str) -> tuple[str, ...]:
    """A row of the first table."""
    shuffled = random.Random(0).sample(tokens, len(tokens))
    lengths = [len(each) for each in shuffled]
    fields = {"tokens": shuffled, "total_lengths": lengths, "response_lengths": [1] * len(lengths)}
    columns = Columns.read(fields, DEFAULT_SCHEMA)
    started = time.process_time()
    hashes = hashes_of_beginnings(columns)
    forest = find_forest(lengths, hashes)
    seconds = time.process_time() - started
    settings = PP4, PlannerConfig(max_tokens_per_gpu=CAPS[cap]), CostModel()
    started = time.process_time()
    shared = plan_step(lengths, *settings, forest=forest)
    planning = time.process_time() - started
    turns = find_forest(lengths, hashes, branches=False)
    chains = plan_step(lengths, *settings, forest=turns)
    apart_plan = plan_step(lengths, *settings)
    found, by_chains, apart = (
        step_statistics(plan, lengths) for plan in (shared, chains, apart_plan)
    )
    return (
        *(name, cap, f"{len(lengths):,}", f"{found.sample_tokens:,}", f"{found.real_tokens:,}"),
        f"{found.sample_tokens / found.real_tokens:.2f}",
        f"{found.keys / found.real_tokens:.1f}",
        f"{_pairs(apart_plan, lengths) / _pairs(shared, lengths):.2f}",
        f"{apart.mean_rank_cost / found.mean_rank_cost:.2f}",
        f"{apart.step_time / found.step_time:.2f}",
        f"{by_chains.step_time / found.step_time:.2f}",
        f"{seconds:.2f} + {planning:.2f} s",
    )


def trained(trajectories: Trajectories, repeats: int) -> list[tuple[str, ...]]:
    """The rows of the second table."""
    short = [
        [(p // SHORTER, (p + r) // SHORTER - p // SHORTER) for p, r in turns]
        for turns in trajectories
    ]
    parameters = {"trajectories": short, "repeats": repeats}
    job = Job("train", "bench_shared_prefixes:train", 1, {}, parameters, seconds=500.0)
    with tempfile.TemporaryDirectory() as scratch:
        [rows] = results(run_jobs([job], Path(scratch))[job.name])
    return [tuple(row) for row in rows]


def train(trajectories: Trajectories, repeats: int) -> list[list[str]]:
    """Training steps on turns apart and sharing tokens, from the same weights: a job."""
    from bootstrap import build_model
    from kit.model import adam, arguments, counted_tokens, transformer_config
    from kit.objective import packed_objective
    from kit.samples import VOCABULARY, rollout_of

    from mcore_batching.megatron import get_data_iterator, train_step
    from mcore_batching.planning import ParallelDims

    data = rollout_of([(sum(turn), turn[1]) for each in trajectories for turn in each])
    data["tokens"] = [tokens % VOCABULARY for tokens in turns(trajectories, SYSTEM // SHORTER)]
    config = transformer_config("dense", hidden_size=64, ffn_hidden_size=256)
    longest = CAP // SHORTER
    seconds: dict[bool, list[float]] = {False: [], True: []}
    rows = {}
    for shares in [*seconds] * repeats:
        torch.manual_seed(0)
        model = build_model(config, vocab_size=VOCABULARY, max_sequence_length=longest)
        cap = {"max_tokens_per_gpu": longest, "dynamic_batch_share_prefixes": shares}
        args = arguments(ParallelDims(), **cap)
        planned = get_data_iterator(args, model, data)
        optimizer = adam(model, distributed=False)
        with counted_tokens(model) as seen:
            started = time.process_time()
            done = train_step(packed_objective, args, model, *planned, optimizer)
            seconds[shares].append(time.process_time() - started)
        rows[shares] = [
            *("shared" if shares else "apart", f"{len(data['tokens'])}", f"{sum(seen):,}"),
            *(f"{planned[1][0]}", f"{statistics.median(seconds[shares]):.2f} s"),
            f"{done.grad_norm:.6f}",
        ]
    return [*rows.values()]


def main() -> None:
    """Plan, train, print both tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--trajectories", type=int, default=6, help="that are trained")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    file = options.data / "tau_airline_turns.jsonl"
    if not file.exists():
        raise SystemExit(f"there is no {file}: set --data to its folder")
    read = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    cases: list[Case] = [
        (f"{prompt:,}/{response:,} × {size} × {count}", groups(prompt, response, size, count), cap)
        for prompt, response, size, count in GROUPS
        for cap in CAPS
    ]
    answers = options.data / "gsm8k_example_model_solutions.jsonl"
    if answers.exists():
        cases.append(("256 questions × 4 solutions", solutions(answers, 256), "16k"))
    cases.append((f"{len(read)} trajectories", turns(read), "16k"))
    rows = [planned(*case) for case in cases if options.only in case[0]]
    columns = ("", "cap", "samples", "tokens", "computed", "x", "keys a token", "pairs x", "work x")
    columns += ("step x", "step over chains x", "found + planned in")
    print(Table(columns=columns, rows=tuple(rows)))
    columns = ("", "samples", "tokens", "micro-batches", "step", "norm of the gradient")
    rows = trained(read[: options.trajectories], options.repeats)
    print(Table(columns=columns, rows=tuple(rows)))


if __name__ == "__main__":
    main()
