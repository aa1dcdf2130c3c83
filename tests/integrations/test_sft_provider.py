"""Supervised fine-tuning data of a job: what it gets of its files, on which ranks."""

import argparse
import functools
import sys
from types import SimpleNamespace

import pytest
from megatron.core import parallel_state
from megatron.core.datasets.utils import Split
from sft_cases import Wrapped, write

from mcore_batching.integrations.megatron_lm.sft import SftDataError, provider


@pytest.fixture
def rank(monkeypatch):
    """Where in the layout this process seems to be."""
    place = SimpleNamespace(tensor=0, stage=0, stages=1, chunks=None)

    def at(stage_wanted, chunk_wanted):
        def here(ignore_virtual=True, vp_stage=None):
            if not ignore_virtual and place.chunks and vp_stage != chunk_wanted():
                return False
            return place.stage == stage_wanted()

        return here

    monkeypatch.setattr(
        parallel_state, "get_tensor_model_parallel_rank", lambda *ignored: place.tensor
    )
    monkeypatch.setattr(parallel_state, "is_pipeline_first_stage", at(lambda: 0, lambda: 0))
    monkeypatch.setattr(
        parallel_state,
        "is_pipeline_last_stage",
        at(lambda: place.stages - 1, lambda: (place.chunks or 1) - 1),
    )
    return place


def arguments(*paths, **changed):
    parser = provider.add_sft_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--dynamic-batch-data", *paths, "--dynamic-batch-tokenizer", "bytes"])
    defaults = {"seq_length": 64, "split": "60,20,20", "seed": 1234}
    vars(args).update(defaults | changed)
    return args


@pytest.fixture
def path(tmp_path):
    return write(
        tmp_path / "data.jsonl", [{"prompt": "p" * n, "completion": "c"} for n in range(1, 11)]
    )


def prompts(dataset):
    return [
        int((item["tokens"] == ord("p")).sum())
        for item in map(dataset.__getitem__, range(len(dataset)))
    ]


def test_datasets_share_the_lines_as_split_says(path, rank):
    train, valid, test = provider.build_sft_datasets(arguments(path), (12, 2, None))
    assert [each.split for each in (train, valid, test)] == list(Split)
    assert sorted(prompts(train)[:6]) == sorted(prompts(train)[6:]) == [1, 2, 3, 4, 5, 6]
    assert prompts(train)[:6] != [1, 2, 3, 4, 5, 6]
    assert prompts(valid) == [7, 8]
    assert prompts(test) == [9, 10]
    again, *_ = provider.build_sft_datasets(arguments(path), (6, 2, None))
    assert prompts(again) == prompts(train)[:6]
    other, *_ = provider.build_sft_datasets(arguments(path, seed=1), (6, 2, None))
    assert prompts(other) != prompts(again)


def test_every_file_is_cut_at_the_same_shares(path, tmp_path, rank):
    second = write(
        tmp_path / "b.jsonl", [{"prompt": "p" * n, "completion": ""} for n in range(21, 26)]
    )
    train, valid, test = provider.build_sft_datasets(arguments(path, second), (9, 3, 3))
    assert sorted(prompts(train)) == [1, 2, 3, 4, 5, 6, 21, 22, 23]
    assert (prompts(valid), prompts(test)) == ([7, 8, 24], [9, 10, 25])


def test_shares_of_zero_and_of_no_samples_give_no_dataset(path, rank):
    made = provider.build_sft_datasets(arguments(path, split="100,0"), (4, 0, 4))
    assert [each and len(each) for each in made] == [4, None, None]
    made = provider.build_sft_datasets(arguments(path), (4, 0, 4))
    assert [each and len(each) for each in made] == [4, None, 4]


def test_padding_follows_the_flag(path, rank):
    def lengths(args):
        train, *_ = provider.build_sft_datasets(args, (6, 1, 1))
        return {len(train[index]["tokens"]) for index in range(6)}

    assert lengths(arguments(path)) == {64}
    assert lengths(arguments(path, use_dynamic_batch_size=False)) == {64}
    assert lengths(arguments(path, use_dynamic_batch_size=True)) == {2, 3, 4, 5, 6, 7}
    with_mask = arguments(path, create_attention_mask_in_dataloader=True)
    train, *_ = provider.build_sft_datasets(with_mask, (6, 1, 1))
    assert train[0]["attention_mask"].shape == (1, 64, 64)
    with_mask.use_dynamic_batch_size = True
    train, *_ = provider.build_sft_datasets(with_mask, (6, 1, 1))
    assert "attention_mask" not in train[0]


def test_samples_that_are_too_long_end_the_job_or_are_counted(path, rank, capsys):
    fits = provider.build_sft_datasets(arguments(path, seq_length=11), (6, 2, 2))
    assert fits[2][1]["loss_mask"].sum() == 2
    message = (
        r"data\.jsonl:10: 2 of 10 samples are longer than --seq-length 9, this one 11: raise it, "
        r"or .* --dynamic-batch-on-too-long drop"
    )
    with pytest.raises(SftDataError, match=message) as raised:
        provider.build_sft_datasets(arguments(path, seq_length=9), (6, 2, 2))
    assert raised.value.line == 10
    assert capsys.readouterr().out == ""
    dropping = {"dynamic_batch_on_too_long": "drop", "split": "40,60,0"}
    _, valid, test = provider.build_sft_datasets(
        arguments(path, seq_length=9, **dropping), (4, None, None)
    )
    assert prompts(valid) == [4, 5, 6, 7, 8]
    assert test is None
    assert "data.jsonl:10: 2 of 10 samples are longer" in capsys.readouterr().out
    with pytest.raises(SftDataError, match=r"no sample is left for the train dataset: raise its"):
        provider.build_sft_datasets(arguments(path, seq_length=1, **dropping), (4, 6, None))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"split": "0,0,0"}, "--split must be one to three shares, got '0,0,0'"),
        ({"split": "1,1,1,1"}, "--split must be"),
        ({"split": "all"}, "--split must be"),
        (
            {"split": "1,0,0"},
            "valid dataset: raise its share of --split, or set --eval-iters 0$",
        ),
        (
            {"split": "1,0,0", "full_validation": True},
            "or set --eval-iters 0 and unset --full-validation$",
        ),
        (
            {"split": "80,19,1"},
            "no sample is left for the test dataset: raise its share of --split, or set it to 0",
        ),
        ({"dynamic_batch_data": None}, "no file to train on: set --dynamic-batch-data"),
    ],
)
def test_settings_that_give_no_dataset_are_refused(path, rank, changed, problem):
    valid = None if changed.get("full_validation") else 1
    with pytest.raises(SftDataError, match=problem):
        provider.build_sft_datasets(arguments(path, **changed), (4, valid, 1))


def test_the_split_is_megatrons_own_if_none_is_given(tmp_path, rank):
    path = write(tmp_path / "long.jsonl", [{"prompt": "p", "completion": ""}] * 1000)
    made = provider.build_sft_datasets(arguments(path, split=None), (None, None, None))
    assert [len(each) for each in made] == [969, 30, 1]


def test_only_ranks_that_read_data_in_stock_scripts_make_datasets(path, rank):
    def reads(vp_stage=None, **changed):
        made = provider.build_sft_datasets(arguments(path, **changed), (4, 1, 1), vp_stage=vp_stage)
        assert len({each is None for each in made}) == 1
        return made[0] is not None

    rank.stages = 4
    by_stage = []
    for rank.stage in range(4):
        by_stage.append(reads())
    assert by_stage == [True, False, False, True]
    rank.stage = 1
    assert reads(mtp_num_layers=1)
    rank.chunks = 2
    by_chunk = []
    for rank.stage in range(4):
        by_chunk.append([reads(vp_stage=0), reads(vp_stage=1)])
    assert by_chunk == [[True, False], [False, False], [False, False], [False, True]]
    rank.stage, rank.tensor = 0, 1
    assert not reads(vp_stage=0)
    assert not reads(vp_stage=0, mtp_num_layers=1)


def test_a_scripts_own_provider_is_kept_without_the_flag(path, monkeypatch):
    def own(num_samples, vp_stage=None):
        raise AssertionError

    assert provider.datasets_provider_for(SimpleNamespace(), own) is own
    assert provider.datasets_provider_for(SimpleNamespace(dynamic_batch_data=None), own) is own


def test_with_the_flag_the_provider_reads_the_jobs_arguments(path, rank, monkeypatch):
    args = arguments(path)
    stock = SimpleNamespace(get_args=lambda: args)
    monkeypatch.setitem(sys.modules, "megatron.training", stock)

    def own(num_samples, vp_stage=None):
        raise AssertionError

    train, *_ = provider.datasets_provider_for(args, own)((4, 1, 1))
    assert len(train) == 4
    rank.stages = rank.chunks = 2
    chunks = [
        provider.datasets_provider_for(args, functools.partial(own, vp_stage=v)) for v in (0, 1)
    ]
    assert [chunk((4, 1, 1))[0] is None for chunk in chunks] == [False, True]
    assert all(chunk.is_distributed for chunk in chunks)


def test_the_jobs_tokenizer_is_used_unless_bytes_are_asked_for(path, rank, monkeypatch):
    args = arguments(path, dynamic_batch_tokenizer="megatron")
    upper = Wrapped(([7], []))
    upper.vocab_size = 300
    stock = SimpleNamespace(get_tokenizer=lambda: upper)
    monkeypatch.setitem(sys.modules, "megatron.training", stock)
    train, *_ = provider.build_sft_datasets(args, (4, 1, 1))
    assert train[0]["tokens"][0] == 7
