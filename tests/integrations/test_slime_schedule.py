"""``build_dp_schedule`` in slime's rollout manager: the contract of its result, and replacing it.

slime's own function and its own tests of it take part in test_own_schedules.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit.stand_ins import forget
from planning_cases import examples
from slime_package import slime

from mcore_batching.integrations.slime import HookError, hook_schedule
from mcore_batching.integrations.slime.learning import chosen_costs
from mcore_batching.integrations.slime.rollout_manager import build_dp_schedule
from mcore_batching.planning.costs.layers_of import first_guess

__all__ = ["slime"]

INIT = "mcore_batching.integrations.slime.init"


def arguments(cap: int, **more: Any) -> SimpleNamespace:
    made = {
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": cap,
        "micro_batch_size": 1,
        "custom_megatron_init_path": INIT,
        "balance_data": False,
        "balance_by_flops": False,
        "dynamic_batch_plan_effort": 30,
    }
    return SimpleNamespace(**(made | more))


def parallel(ranks: int, context: int = 1, chunks: int = 1, group: int = 1) -> dict[str, int]:
    return {
        "dp_size": ranks,
        "cp_size": context,
        "vpp_size": chunks,
        "microbatch_group_size_per_vp_stage": group,
    }


def plan(
    args: Any, config: dict[str, int], lengths: list[int], rollouts: list[int], size: int
) -> Any:
    return build_dp_schedule(
        pytest.fail, args, config, lengths, global_batch_size=size, rollout_indices=rollouts
    )


def check(
    result: Any,
    config: dict[str, int],
    lengths: list[int],
    rollouts: list[int],
    size: int,
    cap: int,
    partial: int = 0,
) -> None:
    """What slime's trainer and its own tests expect of a schedule.

    Args:
        partial: rollouts of a last, smaller step.
    """
    partitions, micro_batches, counts, sizes = result
    ranks = config["dp_size"]
    names = list(dict.fromkeys(rollouts))
    assert sizes == [size] * (len(names) // size) + [partial] * bool(partial)
    num_steps = len(sizes)
    assert len(counts) == num_steps
    assert len(partitions) == len(micro_batches) == ranks
    for count in counts:
        assert type(count) is int
        assert count > 0
        if config["vpp_size"] > 1:
            assert count % config["microbatch_group_size_per_vp_stage"] == 0
    step_of = {name: place // size for place, name in enumerate(names)}
    kept = [i for i, name in enumerate(rollouts) if step_of[name] < num_steps]
    assert sorted(i for part in partitions for i in part) == kept
    for part, slots in zip(partitions, micro_batches, strict=True):
        assert all(type(i) is int for i in part)
        assert part
        assert len(slots) == sum(counts)
        assert [i for samples in slots for i in samples] == list(range(len(part)))
        steps = [step for step, count in enumerate(counts) for _ in range(count)]
        for step, samples in zip(steps, slots, strict=True):
            assert {step_of[rollouts[part[i]]] for i in samples} <= {step}
            tokens = sum(lengths[part[i]] for i in samples)
            assert tokens <= cap * config["cp_size"] or len(samples) == 1


@st.composite
def problems(draw: Any) -> tuple[dict[str, int], list[int], list[int], int]:
    ranks = draw(st.integers(1, 4))
    context = draw(st.sampled_from([1, 2]))
    chunks, group = draw(st.sampled_from([(1, 1), (1, 1), (2, 2), (2, 4)]))
    count = draw(st.integers(ranks, 24))
    lengths = draw(st.lists(st.integers(1, 90), min_size=count, max_size=count))
    rollouts = draw(st.lists(st.integers(0, count), min_size=count, max_size=count))
    return (
        parallel(ranks, context, chunks, group),
        lengths,
        rollouts,
        draw(st.integers(1, len(set(rollouts)))),
    )


@examples(250)
@given(problems(), st.booleans())
@example((parallel(2), [5] * 6, [*range(6)], 4), True)  # as many samples left as ranks
def test_the_contract_holds(
    problem: tuple[dict[str, int], list[int], list[int], int], allow_partial: bool
) -> None:
    """With miles' option, rollouts that are left over make a smaller step, unless a rank would
    have no sample of it."""
    config, lengths, rollouts, size = problem
    args = arguments(
        64, context_parallel_size=config["cp_size"], allow_partial_train_step=allow_partial
    )
    names = list(dict.fromkeys(rollouts))
    samples = Counter(names.index(name) // size for name in rollouts)
    partial = len(names) % size * allow_partial
    if samples[len(names) // size] < config["dp_size"]:
        partial = 0
    try:
        result = plan(args, config, lengths, rollouts, size)
    except HookError:
        assert max(samples[step] for step in range(len(names) // size)) < config["dp_size"]
        assert not partial
        return
    check(result, config, lengths, rollouts, size, 64, partial)


def test_fewer_samples_than_ranks_times_group_is_no_error() -> None:
    args = arguments(16384, pipeline_model_parallel_size=4, data_pad_size_multiplier=128)
    for config in (parallel(8), parallel(8, chunks=2, group=4)):
        lengths, rollouts = [12000] * 17, list(range(17))
        result = plan(args, config, lengths, rollouts, 17)
        check(result, config, lengths, rollouts, 17, 16384)
        assert sum(not samples for rank in result[1] for samples in rank) == 8 * result[2][0] - 17


def test_the_cap_counts_what_get_batch_pads() -> None:
    """Three samples of 6 fill 18 of 20 tokens, in a row that is padded to 24."""
    unpadded = plan(arguments(20), parallel(1), [6] * 3, [0, 1, 2], 3)
    assert unpadded[2] == [1]
    padded = arguments(20, data_pad_size_multiplier=4, tensor_model_parallel_size=2)
    assert plan(padded, parallel(1), [6] * 3, [0, 1, 2], 3)[2] == [2]


def test_the_planners_options_are_read_from_the_arguments() -> None:
    lengths, rollouts = [5] * 4, [0, 1, 2, 3]
    args = arguments(20, dynamic_batch_max_samples_per_row=1)
    assert plan(args, parallel(1), lengths, rollouts, 4)[2] == [4]
    with pytest.raises(ValueError, match="on_oversize"):
        plan(arguments(4, dynamic_batch_on_oversize="error"), parallel(1), lengths, rollouts, 4)


def test_a_cost_model_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text("{}")
    args = arguments(20, dynamic_batch_cost_model=str(path))
    with pytest.raises(ValueError, match="expected a JSON object"):
        plan(args, parallel(1), [5], [0], 1)
    plan(arguments(20, dynamic_batch_cost_model="fixed"), parallel(1), [5], [0], 1)
    sizes = {"hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 256}
    assert chosen_costs(arguments(20, **sizes)) == first_guess(sizes)


def test_what_the_trainer_could_not_run_is_refused_by_name() -> None:
    lengths, rollouts = [5] * 3, [0, 1, 2]
    unset = arguments(5, custom_megatron_init_path=None)
    with pytest.raises(HookError, match=f"set --custom-megatron-init-path {INIT}"):
        plan(unset, parallel(1), lengths, rollouts, 3)
    with pytest.raises(HookError, match=r"rank 3 would train no sample.*--global-batch-size to 4"):
        plan(arguments(5), parallel(4), lengths, rollouts, 3)
    predicting = arguments(5, enable_mtp_training=True)
    assert plan(predicting, parallel(1), lengths, rollouts, 3)[2] == [3]
    with pytest.raises(HookError, match="batch-size higher, or unset --enable-mtp-training"):
        plan(predicting, parallel(2), lengths, rollouts, 3)


@pytest.mark.parametrize(
    ("option", "value", "mend"),
    [
        ("share_prefixes", True, "unset dynamic_batch_share_prefixes"),
        ("pad_each_to", 8, "unset dynamic_batch_pad_each_to, and pad rows by dynamic_batch_pad_t"),
        ("context_parallel", 2, "unset dynamic_batch_context_parallel"),
        ("split_backward", "auto", "--dynamic-batch-split-backward is gone"),
    ],
)
def test_options_of_the_engines_own_rows_and_step_are_refused(
    option: str, value: Any, mend: str
) -> None:
    with pytest.raises(HookError, match=mend):
        plan(arguments(5, **{f"dynamic_batch_{option}": value}), parallel(2), [5] * 4, [0] * 4, 1)


@pytest.mark.parametrize("value", [False, None, "off"])
def test_off_is_off_as_yaml_reads_it(value: Any) -> None:
    args = arguments(5, dynamic_batch_split_backward=value)
    assert plan(args, parallel(2), [5] * 4, [0] * 4, 1) == (
        plan(arguments(5), parallel(2), [5] * 4, [0] * 4, 1)
    )


def test_it_is_replaced_everywhere_and_put_back(slime: Path, capfd: Any) -> None:
    """Ray sends the manager's class by value: its methods then have globals of their own."""
    manager = importlib.import_module("slime.ray.rollout")
    module = importlib.import_module("slime.utils.dp_schedule")
    own, split = module.build_dp_schedule, manager.RolloutManager.split
    copied = {"build_dp_schedule": own, "__name__": "slime.ray.rollout", "__builtins__": {}}
    sent = FunctionType(split.__code__, copied)
    saved = {"build_dp_schedule": own}  # somebody's own note of it
    args, config = arguments(10), parallel(2)
    given = {"global_batch_size": 2, "rollout_indices": [0, 1]}
    hooked = hook_schedule()
    assert hooked is not None
    assert sorted(hooked.hooked) == [
        "slime.ray.rollout.build_dp_schedule",
        "slime.ray.rollout.build_dp_schedule",
        "slime.utils.dp_schedule.build_dp_schedule",
    ]
    assert capfd.readouterr().out.strip() == str(hooked)
    assert saved["build_dp_schedule"] is own
    assert hook_schedule() is None  # once is enough
    assert manager.RolloutManager().split(args, config, [4, 5], **given)[2] == [1]
    assert sent(None, args, config, [4, 5], **given)[2] == [1]
    args.use_dynamic_batch_size = False
    assert sent(None, args, config, [4, 5], **given) == "own"
    args.use_dynamic_batch_size = True
    assert sent(None, args, config, [4, 5], **(given | {"global_batch_size": 3})) == "own"
    hooked.undo()
    assert (
        module.build_dp_schedule is manager.build_dp_schedule is copied["build_dp_schedule"] is own
    )


def test_images_are_packed_apart_by_slimes_own_rule(slime: Path) -> None:
    """Versions that say which samples have images; only under an option of theirs it matters."""
    module = importlib.import_module("slime.utils.dp_schedule")
    source = Path(module.__file__ or "").read_text()
    exec(
        source.replace("rollout_indices)", "rollout_indices, sample_is_multimodal=None)"),
        vars(module),
    )
    given: dict[str, Any] = {"global_batch_size": 2, "rollout_indices": [0, 1]}
    images = [False, True]
    with hook_schedule() or pytest.fail("nothing is hooked"):
        for option, multimodal, is_ours in [
            ("off", images, True),
            ("separate", images, False),
            ("separate", [False, False], True),
            ("separate", None, True),
        ]:
            args = arguments(10, multimodal_aware_packing=option)
            made = module.build_dp_schedule(
                args, parallel(2), [5, 6], sample_is_multimodal=multimodal, **given
            )
            assert (made != "own") == is_ours


def test_the_rollout_function_hooks_the_plan_of_its_process(slime: Path) -> None:
    wrapper = importlib.import_module("mcore_batching.integrations.slime.rollout")
    try:
        assert wrapper.generate_rollout(None, 0, None) == "rollouts"
        module = importlib.import_module("slime.utils.dp_schedule")
        assert module.build_dp_schedule.__wrapped__ is not None
    finally:
        del sys.modules[wrapper.__name__]


def test_unknown_versions_are_refused_by_name(slime: Path) -> None:
    path = slime / "utils" / "dp_schedule.py"
    path.write_text("def build_dp_schedule(args, config, lengths, *, global_batch_size): ...\n")
    with pytest.raises(
        HookError, match=r"dp_schedule cannot be replaced: .* found build_dp_schedule\(args, config"
    ):
        hook_schedule()
    forget("slime", "miles")
    path.unlink()
    with pytest.raises(
        HookError, match=r"has no slime\.utils\.dp_schedule .*leave hook_schedule out"
    ):
        hook_schedule()
