"""The supervised fine-tuning dataset: its items, batches and epochs."""

import pytest
import torch
from megatron.core.datasets.utils import Split
from sft_cases import BYTES, END, write
from torch.utils.data import DataLoader

from mcore_batching.integrations.megatron_lm.sft import collate
from mcore_batching.integrations.megatron_lm.sft.dataset import SftDataset, read_samples


@pytest.fixture
def samples(tmp_path):
    records = [{"prompt": "p" * (n + 1), "completion": "c" * n} for n in range(10)]
    return [*read_samples(write(tmp_path / "data.jsonl", records), BYTES).values()]


def dataset(samples, members=range(10), split=Split.train, **options):
    return SftDataset([samples[member] for member in members], split=split, **options)


def test_an_unpadded_item_is_shifted_by_one_token(samples):
    item = dataset(samples)[2]
    assert {key: value.tolist() for key, value in item.items()} == {
        "tokens": [*b"pppcc"],
        "labels": [*b"ppcc", END],
        "loss_mask": [0, 0, 1, 1, 1],
        "position_ids": [0, 1, 2, 3, 4],
    }
    assert {key: value.dtype for key, value in item.items()} == {
        "tokens": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.float32,
        "position_ids": torch.int64,
    }


def test_padding_only_appends_what_is_not_trained(samples):
    bare, padded = dataset(samples), dataset(samples, pad_to=24)
    for index in range(10):
        short, long = bare[index], padded[index]
        length = len(short["tokens"])
        assert length == 2 * index + 1
        assert short.keys() == long.keys()
        for key, value in long.items():
            assert value.shape == (24,)
            assert value.dtype == short[key].dtype
            assert torch.equal(value[:length], short[key])
        assert not long["loss_mask"][length:].any()
        assert long["position_ids"].tolist() == list(range(24))
        assert set(long["tokens"][length:].tolist()) <= {END}
    assert dataset(samples, pad_to=19)[9]["loss_mask"][-1] == 1


def test_the_attention_mask_is_that_of_stock_datasets(samples):
    item = dataset(samples, pad_to=20, attention_mask=True)[0]
    expected = torch.tril(torch.ones(20, 20)).unsqueeze(0) < 0.5
    assert torch.equal(item["attention_mask"], expected)
    assert item["attention_mask"].dtype == torch.bool


@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_loaders_give_lists_of_unpadded_and_stacks_of_padded_samples(samples, num_workers):
    loaders = [
        DataLoader(each, batch_sampler=[[1, 3], [2]], num_workers=num_workers)
        for each in (dataset(samples), dataset(samples, pad_to=20))
    ]
    (pair, single), (stack, row) = (list(loader) for loader in loaders)
    for key in ("tokens", "labels", "loss_mask", "position_ids"):
        assert [len(each) for each in pair[key]] == [3, 7]
        assert [len(each) for each in single[key]] == [5]
        assert stack[key].shape == (2, 20)
        assert row[key].shape == (1, 20)
    assert pair["tokens"][1].tolist() == [*b"ppppccc"]
    assert collate([dataset(samples)[1], dataset(samples)[3]]).keys() == pair.keys()


def test_every_epoch_holds_each_sample_once_in_an_order_of_its_own(samples):
    def drawn(**options):
        chosen = dataset(samples, members=[1, 4, 6, 7, 9], **options)
        return [len(chosen[index]["tokens"]) // 2 for index in range(len(chosen))]

    three = drawn(num_samples=15, seed=5)
    epochs = [three[start : start + 5] for start in (0, 5, 10)]
    assert all(sorted(epoch) == [1, 4, 6, 7, 9] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # However many are drawn, and whenever.
    assert drawn(num_samples=7, seed=5) == three[:7]
    assert drawn(num_samples=15, seed=5) == three
    assert drawn(num_samples=15, seed=6) != three
    assert drawn(num_samples=7) == [1, 4, 6, 7, 9, 1, 4]
    assert drawn() == [1, 4, 6, 7, 9]
    # The same in every version of numpy: a job resumed years later sees the same data.
    assert three[:5] == [4, 7, 9, 6, 1]
