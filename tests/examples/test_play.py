"""The policy plays the very same games on every layout as in one process, one game at a time."""

import os
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from kit.harness import Job, results, run_jobs

HERE = Path(__file__).resolve().parent
SEED, MOST_PROMPTS = 5, 5
LAYOUTS = {
    "dp2-pp2": {"data_parallel": 2, "pipeline_parallel": 2},
    "pp2-vpp2-dp2": {"data_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2},
    "tp2-cp2": {"tensor_parallel": 2, "context_parallel": 2},
    "tp2-sp-pp2": {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2},
    "dp4": {"data_parallel": 4},
}
# Of one prompt the second, or three of four data-parallel ranks, bring no game; two run none.
CASES = [("pp2-vpp2-dp2", MOST_PROMPTS), ("dp2-pp2", 1), ("dp4", 1)]
LONG_CASES = [(name, MOST_PROMPTS) for name in ("tp2-cp2", "tp2-sp-pp2", "dp4")]


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("play")
    given = {"weights": str(folder / "weights.pt"), "seed": SEED}
    most = given | {"num_prompts": MOST_PROMPTS}
    jobs = [Job("reference", "play_worker:reference", 4, {"data_parallel": 4}, most)]
    for dims, num_prompts in CASES + LONG_CASES * request.config.getoption("--long"):
        of_case = given | {"dims": LAYOUTS[dims], "num_prompts": num_prompts}
        name = f"{dims}-{num_prompts}"
        jobs.append(Job(name, "play_worker:played", 4, LAYOUTS[dims], of_case))
    with pytest.MonkeyPatch.context() as patch:
        modules = HERE.parents[1] / "examples" / "grpo"
        paths = [str(HERE), str(modules), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        return run_jobs(jobs, folder / "together")


@pytest.mark.parametrize(
    ("dims", "num_prompts"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_CASES)],
    ids=str,
)
def test_every_layout_draws_the_tokens_of_one_process(outcomes, dims, num_prompts):
    reference = results(outcomes["reference"])[0]
    expected = {tuple(each["game"]): each for each in reference[: 2 * num_prompts]}
    ranks = results(outcomes[f"{dims}-{num_prompts}"])
    replicas = {}
    for rank in ranks:
        # All ranks of a replica hold the same games.
        games = replicas.setdefault(rank["data_parallel_rank"], rank["games"])
        assert rank["games"] == games
    found = [game for games in replicas.values() for game in games]
    assert sorted(tuple(each["game"]) for each in found) == sorted(expected)
    for each in found:
        ours = expected[tuple(each["game"])]
        assert (each["tokens"], each["turns"]) == (ours["tokens"], ours["turns"])
        # Float32 logits of a size of about 10, computed in another order.
        assert each["log_probs"] == pytest.approx(ours["log_probs"], abs=1e-4)
    # All ranks go on until the last game is over. Open games move to ranks that have none; where
    # there are fewer than data-parallel ranks, each of the others has a placeholder at least.
    drawn = [tokens_drawn(each) for each in expected.values()]
    open_games = [sum(own > number for own in drawn) for number in range(max(drawn))]
    [(passes, placeholders)] = {(rank["passes"], rank["placeholders"]) for rank in ranks}
    assert passes == len(open_games)
    assert placeholders >= sum(max(0, len(replicas) - count) for count in open_games)


def tokens_drawn(game):
    return sum(end - start for start, end in game["turns"])


def test_the_games_are_worth_comparing(outcomes):
    reference = results(outcomes["reference"])[0]
    assert len(set(map(tokens_drawn, reference))) > 2
    tokens = [t for g in reference for s, e in g["turns"] for t in g["tokens"][s:e]]
    assert len(set(tokens)) > len(tokens) // 3
    # The two of a prompt part ways.
    for first, second in zip(reference[::2], reference[1::2], strict=True):
        assert first["tokens"] != second["tokens"]
