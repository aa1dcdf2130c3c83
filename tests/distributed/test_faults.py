"""What goes wrong on one rank is a named error on all, within seconds; and slime's known faults."""

from __future__ import annotations

import math
import re
from importlib.metadata import version
from typing import Any

import pytest
import torch
from kit import output_faults
from kit.harness import Job
from kit.wrong_calls import WRONG

DP2 = {"data_parallel": 2}
DP2_PP2 = {"data_parallel": 2, "pipeline_parallel": 2}
DP2_CP2 = {"data_parallel": 2, "context_parallel": 2}
SHARED = {"dynamic_batch_context_parallel": 2}
SECONDS = 45.0  # an error that came by a collective's timeout would take 60


def job(name: str, function: str, dims: dict[str, Any], nproc: int, **parameters: Any) -> Job:
    kind = parameters.pop("reference", "dense")
    module = parameters.pop("module", "faults")
    parameters = {"dims": dims, "reference": kind, **parameters}
    return Job(name, f"kit.{module}:{function}", nproc, dims, parameters)


@pytest.mark.parametrize(
    ("job", "error", "text"),
    [
        pytest.param(
            job(
                f"moves-{name}-{what.split()[0]}",
                "moves_fail",
                dims,
                4,
                module="shared_rows",
                what=what,
                planner=planner | {"dynamic_batch_share_prefixes": what == "other beginning"},
            ),
            error,
            text,
            marks=() if name == "shared" else pytest.mark.long,
        )
        for name, dims, planner in (
            ("shared", DP2_PP2, SHARED),
            ("shared-cp2", DP2_CP2, SHARED),
            ("exchange", DP2_PP2, {}),
        )
        for what, error, text in (
            ("global batch size", "PlanMismatchError", "global_batch_size is 8, on rank 0 it is 7"),
            ("one token more", "PlanMismatchError", "lengths of all samples (sha256)"),
            ("other beginning", "PlanMismatchError", "hosts of all samples (sha256)"),
            ("unreadable value", "PlanningFailedError", "no such file on this rank"),
        )
    ],
    ids=lambda value: str(value) if isinstance(value, Job) else "",
)
def test_samples_that_do_not_go_together_are_an_error_on_all_ranks(
    job: Job, ranks: list[dict[str, Any]], error: str, text: str
) -> None:
    assert [rank["type"] for rank in ranks] == [error] * 4
    assert text in ranks[0]["message"]


EXTRA = 4
PLACEHOLDERS = {
    "dp2-pp2": (4, "dense", DP2_PP2),
    "cp2-tp2-sp": (
        4,
        "dense",
        {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
    ),
    "dp2-ep2": (2, "moe", {"data_parallel": 2, "expert_parallel": 2}),
}


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(
            job(
                f"placeholders-{name}{'' if per_token else '-mean-over-micro-batches'}",
                "extra_placeholders",
                dims,
                nproc,
                reference=kind,
                kind=kind,
                count=EXTRA,
                per_token_loss=per_token,
                settings={},
            ),
            marks=() if name == "dp2-pp2" or (per_token and nproc == 2) else pytest.mark.long,
        )
        for name, (nproc, kind, dims) in PLACEHOLDERS.items()
        for per_token in (True, False)
    ]
    + [
        pytest.param(
            job(
                f"placeholders-dp2-ep2-{balancing}",
                "extra_placeholders",
                PLACEHOLDERS["dp2-ep2"][2],
                2,
                reference="moe",
                kind="moe",
                count=EXTRA,
                per_token_loss=True,
                settings={
                    "moe_router_load_balancing_type": balancing,
                    "moe_aux_loss_coeff": 0.1,
                    "moe_z_loss_coeff": 0.01,
                },
            ),
            marks=() if balancing == "aux_loss" else pytest.mark.long,
        )
        for balancing in ("aux_loss", "seq_aux_loss")
    ],
    ids=str,
)
def test_placeholders_contribute_exactly_zero(job: Job, ranks: list[dict[str, Any]]) -> None:
    """slime counts each placeholder as one token. Here some more on every rank change no bit.

    Gradients are accumulated micro-batch after micro-batch, then summed over ranks: the order is
    the same with and without placeholders, which come first. Where Megatron divides by the number
    of micro-batches, that number differs and what undoes it rounds.
    """
    for rank in ranks:
        assert rank["nonzero"]
        assert rank["placeholders"] >= EXTRA
        if job.parameters["per_token_loss"]:
            assert rank["bit_equal"], rank["largest_difference"]
            assert rank["metrics"][0] == rank["metrics"][1]
        else:
            assert rank["largest_difference"] < 1e-5


@pytest.mark.parametrize(
    "job",
    [
        job("empty-dp2-pp2", "no_samples_anywhere", DP2_PP2, 4),
        job("empty-shared", "no_samples_anywhere", DP2_PP2, 4, planner=SHARED),
        job(
            "empty-vpp",
            "no_samples_anywhere",
            {"data_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2},
            4,
        ),
        job("empty-cp2", "no_samples_anywhere", {"context_parallel": 2}, 2),
    ],
    ids=str,
)
def test_batch_without_samples_changes_nothing(job: Job, ranks: list[dict[str, Any]]) -> None:
    """slime crashed in torch.cat of nothing; later it raises for samples < ranks × group."""
    legal = 2 if job.dims and "virtual_pipeline" in job.dims else 1
    for rank in ranks:
        assert rank["counts"] == [legal]
        assert rank["unchanged"]
        if rank["last_stage"]:
            assert rank["outputs"] == {"log_probs": 0}
            assert rank["metrics"] == {"loss": 0.0, "policy": 0.0, "kl": 0.0}


@pytest.mark.parametrize(
    "job",
    [
        job("some-dp2-pp2", "data_on_some_ranks", DP2_PP2, 4),
        job("some-pp4", "data_on_some_ranks", {"pipeline_parallel": 4}, 4),
        job("some-tp2", "data_on_some_ranks", {"tensor_parallel": 2}, 2),
        job("some-cp2", "data_on_some_ranks", {"context_parallel": 2}, 2),
    ],
    ids=str,
)
def test_data_reaches_the_ranks_that_lack_it(job: Job, ranks: list[dict[str, Any]]) -> None:
    assert all(rank["equal"] for rank in ranks)
    assert sum(rank["count"] for rank in ranks if rank["last_stage"]) > 0


@pytest.mark.parametrize("job", [job("nobody", "nobody_has_data", DP2_PP2, 4)], ids=str)
def test_replica_without_data_is_named(job: Job, ranks: list[dict[str, Any]]) -> None:
    assert [rank["type"] for rank in ranks] == ["PlanMismatchError"] * 4
    assert "data-parallel rank 1" in ranks[0]["message"]
    assert "pass it on at least one" in ranks[0]["message"]


@pytest.mark.parametrize(
    "job",
    [
        job("steps-equal", "several_steps", {"data_parallel": 2}, 2, sizes=[6, 6], batch=4),
        job("steps-short", "several_steps", {"data_parallel": 2}, 2, sizes=[5, 5], batch=4),
        job("steps-uneven", "several_steps", {"data_parallel": 2}, 2, sizes=[9, 1], batch=5),
        job("steps-none", "several_steps", {"data_parallel": 2}, 2, sizes=[9, 0], batch=4),
        job("steps-one", "several_steps", {"data_parallel": 2}, 2, sizes=[5, 4], batch=1),
        job("steps-few", "several_steps", {"data_parallel": 4}, 4, sizes=[1, 1, 1, 1], batch=2),
        job("steps-all", "several_steps", {"data_parallel": 2}, 2, sizes=[3, 2], batch=64),
        *(
            job(
                f"steps-{name}",
                "several_steps",
                {"data_parallel": 2},
                2,
                sizes=[5, 2],
                batch=3,
                planner=planner,
            )
            for name, planner in (
                ("stay", {"dynamic_batch_exchange": False}),
                ("shared", {"dynamic_batch_context_parallel": 2}),
            )
        ),
    ],
    ids=str,
)
def test_steps_depend_on_the_batch_alone(job: Job, ranks: list[dict[str, Any]]) -> None:
    """Whole steps of ``global_batch_size`` samples and a short one, every sample in one of them.

    Each rank's share was rounded down: 1, 1, 1, 1 in steps of 2 gave steps of 0 and 4.
    """
    sizes, batch = job.parameters["sizes"], job.parameters["batch"]
    whole, left = divmod(sum(sizes), batch)
    for rank, size in zip(ranks, sizes, strict=True):
        assert rank["trained"] == [batch] * whole + [left] * bool(left)
        if job.name == "steps-stay":  # else they run elsewhere
            assert [i for step in rank["steps"] for i in step] == list(range(size))
        assert rank["outputs"] == size
    if job.name == "steps-stay" and sizes[0] == sizes[1] and batch % len(sizes) == 0:
        assert ranks[0]["steps"][:whole] == ranks[1]["steps"][:whole]


@pytest.mark.parametrize(
    "job", [job("refused-shared", "refused_models", {}, 1, module="shared_rows")], ids=str
)
def test_models_that_do_not_follow_a_rows_own_group_are_refused(
    job: Job, ranks: list[dict[str, str]]
) -> None:
    said = ranks[0]
    assert "position embeddings mrope slice by a fixed" in said["other_positions"]
    assert "layers.1.self_attention, a SelfAttention with Identity, is not" in said["other_core"]
    assert "layers.2.self_attention, a OwnAttention with PackedAttention" in said["other_layer"]
    assert "layers.3.mixer is a state-space layer" in said["state_space"]
    assert all("unset --dynamic-batch-context-parallel" in text for text in said.values())


OUTPUTS = [
    *output_faults.jobs_of("engine"),
    *output_faults.jobs_of("engine", "", "dp2", dynamic_batch_exchange=False),
    *output_faults.jobs_of("engine", "", "dp2", dynamic_batch_context_parallel=2),
]


@pytest.mark.parametrize("job", OUTPUTS, ids=str)
def test_outputs_that_no_sample_has_are_an_error_on_all(
    job: Job, ranks: list[dict[str, str]]
) -> None:
    """slime reorders with strict=False and [None] * n: a lost output became a None."""
    output_faults.check(ranks)


@pytest.mark.parametrize(
    "job",
    [
        job(
            f"wrong-calls-{table}",
            "wrong_calls",
            dims,
            nproc,
            module="wrong_calls",
            table=table,
            at_fault=at_fault,
            planner=planner,
        )
        for table, dims, nproc, at_fault, planner in (
            ("replica", DP2_PP2, 4, 2, {}),
            ("shared-rows", DP2_PP2, 4, 2, SHARED),
            ("tp2", {"tensor_parallel": 2}, 2, 1, {}),
        )
    ],
    ids=str,
)
def test_wrong_call_on_one_rank_is_a_named_error_on_all(
    job: Job, ranks: list[dict[str, Any]]
) -> None:
    texts = {
        name: {(rank["cases"][name]["type"], rank["cases"][name].get("message")) for rank in ranks}
        for name in WRONG[job.parameters["table"]]
    }
    assert {name: found for name, found in texts.items() if len(found) > 1} == {}
    table = WRONG[job.parameters["table"]]
    unlike = {
        name: (kind, message)
        for name, [(kind, message)] in texts.items()
        if kind != table[name].error or table[name].text not in message
    }
    assert unlike == {}
    for name in table:
        reports = [rank["cases"][name] for rank in ranks]
        message = reports[0]["message"]
        # The rank on which it happened chains its own exception, as the message names it.
        causes = dict(re.findall(r"rank (\d): (\w+Error|\w+Exception): ", message))
        assert {str(r): each["cause"] for r, each in enumerate(reports) if each["cause"]} == causes
        assert max(report["seconds"] for report in reports) < SECONDS, name
    for rank in ranks:
        assert rank["unchanged"]
        assert rank["grad_norm"] == pytest.approx(ranks[0]["grad_norm"])
        assert rank["grad_norm"] > 0


@pytest.mark.parametrize(
    "job", [job("all-wrong", "all_ranks_wrong", {"data_parallel": 2}, 2, module="misuse")], ids=str
)
def test_wrong_call_on_all_ranks_is_the_error_itself(job: Job, ranks: list[list[str]]) -> None:
    assert ranks[0] == ranks[1]
    ahead, behind, no_function, lacking, no_batch, no_micro_batch, own_plan = ranks[0]
    assert ahead.startswith("IndexError: step must be 0 to 0, got 7")
    assert behind.startswith("IndexError: step must be 0 to 0, got -1")
    assert no_function.startswith("TypeError: f must be a function of the logits, got NoneType")
    assert lacking.startswith("KeyError: 'rollout_data lacks total_lengths, response_lengths")
    assert no_batch.startswith("ConfigError: global_batch_size must be 0 or more, got -4")
    assert no_micro_batch.startswith("ConfigError: micro_batch_size must be 1 or more, got -1")
    assert own_plan.startswith("DynamicBatchArgumentError: forward_only has no plan of its own")


@pytest.mark.parametrize(
    "job",
    [job("wrong-timeouts", "wrong_timeouts", {"data_parallel": 2}, 2, module="misuse")],
    ids=str,
)
def test_a_time_out_that_is_none_is_named_on_all(
    job: Job, ranks: list[tuple[dict[str, str], int]]
) -> None:
    """Before there is anything by which ranks agree; of the watches made for it one is left."""
    assert ranks[0] == ranks[1]
    errors, num_watches = ranks[0]
    assert num_watches == 1
    assert len(errors) == 10
    for name, said in errors.items():
        text = "--dynamic-batch-consensus-timeout-seconds must be a number of seconds from 1 to "
        assert text in said
        assert f"got {name.split()[0]}" in said.replace("'", "")
        alike = "DynamicBatchArgumentError" if name.endswith("on 2") else "PlanningFailedError"
        assert said.startswith(alike)


@pytest.mark.parametrize(
    "job",
    [job("gathered-logits", "gathered_logits", {"tensor_parallel": 2}, 2, module="misuse")],
    ids=str,
)
def test_logits_of_the_whole_vocabulary_are_no_ranks_part(job: Job, ranks: list[list[str]]) -> None:
    """Summed over tensor-parallel ranks once more they gave log-probs that were off by log 2."""
    text = "BatchError: expected logits of this tensor-parallel rank's 32 entries of the vocabulary"
    for rank in ranks:
        assert [each.startswith(text) for each in rank] == [True, True]


@pytest.mark.parametrize(
    "job",
    [job("stages-read", "stages_read_other_samples", {"pipeline_parallel": 2}, 2, module="misuse")],
    ids=str,
)
def test_stages_that_read_other_samples_are_an_error_on_all(job: Job, ranks: list[str]) -> None:
    for said in ranks:
        assert said.startswith("PlanMismatchError")
        assert "lengths of all samples (sha256)" in said


@pytest.mark.parametrize(
    "job",
    [
        job(
            "experts-tp2",
            "said_of_model",
            {"tensor_parallel": 2, "sequence_parallel": True},
            2,
            module="misuse",
            reference="moe",
            kind="moe",
        )
    ],
    ids=str,
)
def test_experts_whose_gradients_are_not_added_up_are_refused(job: Job, ranks: list[str]) -> None:
    """Before 0.19 Megatron takes them for parameters that data-parallel ranks alone share."""
    before_0_19 = tuple(map(int, version("megatron-core").split(".")[:2])) < (0, 19)
    refusal = "set --expert-tensor-parallel-size 2, or --expert-model-parallel-size above 1"
    for said in ranks:
        assert (refusal in said) == before_0_19
        assert bool(said) == before_0_19


MROPE = {"kind": "mrope", "mrope_section": [2, 1, 1]}


@pytest.mark.parametrize(
    ("job", "refused"),
    [
        (job(f"mrope-{name}", "said_of_model", {name: 2}, 2, module="misuse", **MROPE), refused)
        for name, refused in (("context_parallel", True), ("data_parallel", False))
    ],
    ids=["cp2", "dp2"],
)
def test_multimodal_positions_are_not_cut_twice(job: Job, ranks: list[str], refused: bool) -> None:
    """Under context parallelism Megatron raised in mid-forward: rows are cut before."""
    for said in ranks:
        assert ("cuts positions that are cut for context-parallel ranks already" in said) == refused
        assert bool(said) == refused


@pytest.mark.parametrize(
    "job",
    [job("data-of-few", "data_that_few_read", {"tensor_parallel": 2}, 2, module="misuse")],
    ids=str,
)
def test_data_that_cannot_be_read_are_an_error_on_ranks_that_read_none(
    job: Job, ranks: list[list[str]]
) -> None:
    """They would wait in Megatron's broadcast of what there is to train on."""
    for wrong, _ in ranks:
        assert wrong.startswith("RankFailedError")
        assert "rank 0: SftDataError: " in wrong
        assert ".absent: cannot be read: No such file" in wrong
    assert [right for _, right in ranks] == ["3 samples", "None samples"]


@pytest.mark.parametrize(
    "job",
    [job("framework-model", "framework_shows_model", {"pipeline_parallel": 2}, 2, module="misuse")],
    ids=str,
)
def test_a_model_that_a_framework_shows_on_one_stage_is_refused_on_all(
    job: Job, ranks: list[list[str]]
) -> None:
    for right, planned, own, wrong in ranks:
        assert right == planned == own == "its own"
        assert wrong.startswith("PlanningFailedError")
        assert "rank 1" in wrong
        assert "unset --tp-comm-overlap" in wrong


@pytest.mark.parametrize(
    "job",
    [
        job(
            "framework-caller",
            "framework_holds_model",
            {"pipeline_parallel": 2},
            2,
            module="misuse",
        )
    ],
    ids=str,
)
def test_the_model_of_verl_and_skyrl_is_packed_by_the_rule_or_refused_on_all_stages(
    job: Job, ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        for framework in ("verl", "skyrl"):
            right, wrong = rank[framework]
            assert right == rank["plan"]
            assert wrong.startswith("RankFailedError")
            assert "rank 1" in wrong
            assert "unset --tp-comm-overlap" in wrong


@pytest.mark.parametrize(
    "job",
    [job("averaged-loss", "averaged_loss", {"data_parallel": 2}, 2, module="misuse")],
    ids=str,
)
def test_a_loss_averaged_over_its_micro_batch_is_told(job: Job, ranks: list[list[int]]) -> None:
    """On the rank with several samples in a micro-batch; the weights were some times too large."""
    assert ranks[0] == [1, 0]
    assert ranks[1][1] == 0


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (
            job(
                f"not-finite-{fault}{'-overlapped' if overlap else ''}",
                "settings_for_nonfinite",
                DP2_PP2,
                4,
                module="nonfinite",
                fault=fault,
                overlap=overlap,
            ),
            text,
        )
        for fault, overlap, text in (
            ("loss", False, "rank 2: the loss of micro-batch 1 (samples ["),
            ("gradient", False, "rank 2: the gradient of "),
            ("gradient", True, "rank 2: the gradient of "),
        )
    ],
    ids=lambda value: str(value) if isinstance(value, Job) else "",
)
def test_what_is_not_finite_is_an_error_on_all_or_skipped_on_all(
    job: Job, ranks: list[dict[str, Any]], text: str
) -> None:
    """Also where Megatron's wrapper would raise on one rank, and leave the others waiting."""
    for rank in ranks:
        assert rank["error"]["type"] == "NonFiniteError"
        assert rank["error"]["message"] == ranks[0]["error"]["message"]
        assert text in rank["error"]["message"]
        assert rank["error"]["unchanged"]
        expected = {"updated": False, "grad_norm": None, "dropped": True, "unchanged": True}
        assert rank["skip"] == expected
        assert rank["updated"]
        assert 0 < rank["grad_norm"] < math.inf
    found = set(re.findall(r"rank (\d):", ranks[0]["error"]["message"]))
    if job.parameters["fault"] == "loss":
        assert found == {"2"}
    elif not job.parameters["overlap"]:
        assert found == {"0", "2"}  # both stages of the replica, before gradients are added up
    named = 0 if job.parameters["fault"] == "loss" else 3 * len(found)
    assert ranks[0]["error"]["message"].count("the gradient of ") == named


@pytest.mark.parametrize(
    "job", [job("loss-scaling", "loss_scaling", DP2_PP2, 4, module="nonfinite")], ids=str
)
def test_dynamic_loss_scaling_skips_as_megatron_means_it(
    job: Job, ranks: list[dict[str, list[Any]]]
) -> None:
    assert all(rank == ranks[0] for rank in ranks)
    before, steps = 2.0**15, ranks[0]["steps"]
    for updated, scale, grad_norm in steps:
        assert scale == (before if updated else before / 2)
        assert (grad_norm is not None) == updated
        before = scale
    assert {updated for updated, _, _ in steps} == {True, False}
    # Each step is scaled by its own optimizer; 1 %: float16 has 11 bits.
    one, other = ranks[0]["norms"]
    assert one == pytest.approx(other, rel=0.01)


@pytest.mark.parametrize(
    "job", [job("returns-less", "returns_less", DP2_PP2, 4, module="misuse")], ids=str
)
def test_placeholder_may_have_fewer_names(job: Job, ranks: list[dict[str, Any]]) -> None:
    """A rank with placeholders alone learns the names from the others."""
    for rank in ranks:
        assert rank["equal"]
        if rank["last_stage"]:
            assert rank["counts"] == {"log_probs": rank["samples"]}
            assert set(rank["metrics"][0]) == {"loss", "policy", "kl"}
            # Named, not by place: the last rank returns its metrics in the reverse order.
            assert rank["metrics"][1] == pytest.approx(rank["metrics"][0])
    assert ranks[3]["samples"] == 0
    assert ranks[2]["samples"] > 0


@pytest.mark.parametrize(
    "job",
    [
        job("by-lengths-dp2", "found_by_lengths", {"data_parallel": 2}, 2),
        job("by-lengths-cp2", "found_by_lengths", {"context_parallel": 2}, 2),
    ],
    ids=str,
)
def test_functions_that_find_tokens_by_lengths(job: Job, ranks: list[dict[str, Any]]) -> None:
    """slime's functions step through the logits by lengths: padded samples would shift them."""
    for rank in ranks:
        if "cp2" in job.name:
            assert "let it take micro_batch" in rank["message"]
        else:
            assert rank["difference"] < 1e-5


@pytest.mark.parametrize("job", [job("slime-style", "slime_style", DP2_PP2, 4)], ids=str)
def test_functions_written_for_slime_run(job: Job, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert all(rank["seen"])
        assert rank["own_memory"]  # a slice would keep the logits of its whole row
        assert rank["none_fields"]
        assert rank["sizes"] == [max(1, len(indices)) for indices in rank["indices"]]
        if rank["last_stage"]:
            assert rank["outputs"] == rank["expected"]
            assert rank["alias"] == len(rank["expected"])


VERSION = tuple(map(int, version("megatron-core").split(".")[:2]))
DP2_EP2 = {"data_parallel": 2, "expert_parallel": 2}
BIASES = [job("expert-bias", "expert_bias_counts", DP2_EP2, 2, reference="moe")]
if VERSION >= (0, 17):  # four layers, and one for each of two further tokens
    several = {"reference": "mtp-moe", "kind": "mtp-moe"}
    BIASES.append(job("expert-bias-multi-token", "expert_bias_counts", DP2_EP2, 2, **several))


@pytest.mark.parametrize("job", BIASES, ids=str)
def test_router_counts_real_tokens_alone(job: Job, ranks: list[dict[str, Any]]) -> None:
    """The mask has a broadcast bug upstream; padding and placeholders must not move the bias."""
    assert ranks[1]["real"] == 0
    for rank in ranks:
        assert rank["counted"] == [rank["real"]] * (6 if "multi-token" in job.name else 4)


SHARDED_EXPERTS = {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}
MASKS = [
    job(
        "expert-bias-later-stage",
        "expert_bias_counts",
        {"pipeline_parallel": 2, **SHARDED_EXPERTS},
        4,
        reference="moe",
    )
]
if VERSION >= (0, 18):
    hybrid = {"reference": "hybrid-moe", "kind": "hybrid-moe"}
    MASKS.append(job("expert-bias-hybrid", "expert_bias_counts", SHARDED_EXPERTS, 2, **hybrid))
    several = {"reference": "hybrid-mtp-moe", "kind": "hybrid-mtp-moe"}
    MASKS.append(
        job("expert-bias-hybrid-multi-token", "expert_bias_counts", SHARDED_EXPERTS, 2, **several)
    )


@pytest.mark.parametrize("job", MASKS, ids=str)
def test_every_stage_masks_its_own_tokens(job: Job, ranks: list[dict[str, Any]]) -> None:
    """Only the first stage of a GPTModel scatters the mask over tensor-parallel ranks by itself."""
    for first, second in zip(ranks[::2], ranks[1::2], strict=True):
        both = [a + b for a, b in zip(first["counted"], second["counted"], strict=True)]
        assert both == [first["real"]] * (3 if "multi-token" in job.name else 2)


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="makes groups of gloo")
@pytest.mark.parametrize("job", [job("remade", "groups_made_anew", DP2, 2)], ids=str)
def test_groups_that_a_framework_destroys_and_makes_anew(
    job: Job, ranks: list[list[dict[str, Any]]]
) -> None:
    """As slime does where it offloads a model: ranks agree and watch over the present ones, and the
    job goes on. A new job knows nothing of the former."""
    for rank, (before, *later, new) in enumerate(ranks):
        remembered = [number["remembered"] for number in (before, *later, new)]
        # It is the last rank that says so, of a sample of the first batch already.
        assert remembered == [False] * 3 + [rank == 1]
        assert [number["watching"] for number in later] == [[False, True], [False, False, True]]
        for number in (before, *later):
            assert number["outputs"] == before["outputs"] != []
            assert number["others"]
            assert number["joined"]


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="reads the options of gloo's groups")
@pytest.mark.parametrize(
    "job", [Job("timeouts", "kit.faults:timeouts_of_groups", 2, {"pipeline_parallel": 2})], ids=str
)
def test_megatrons_groups_have_the_time_out_of_the_job(job: Job, ranks: list[list[float]]) -> None:
    """Megatron's own default is half an hour."""
    assert ranks == [[60.0] * 4] * 2


@pytest.mark.parametrize("job", [job("fields", "adds_fields", DP2_PP2, 4)], ids=str)
def test_outputs_become_fields(job: Job, ranks: list[dict[str, Any]]) -> None:
    """Before an update the ratio of new to old probabilities is 1, also where a rank is empty."""
    for rank in ranks:
        if rank["last_stage"]:
            assert rank["metrics"]["loss"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="gloo under the CPU stand-in alone")
@pytest.mark.parametrize(
    "job",
    [
        Job(
            "freed-while-sending",
            "kit.faults:freed_while_sending",
            2,
            {"pipeline_parallel": 2},
            {"repeats": 20, "num_values": 50_000},
        )
    ],
    ids=str,
)
def test_freed_outputs_arrive_whole(job: Job, ranks: list[int]) -> None:
    """Of 20 such messages gloo delivers 19 wrong, if it reads the freed memory."""
    assert ranks == [0, 0]
