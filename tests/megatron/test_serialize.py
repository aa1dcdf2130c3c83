"""Values as bytes and back."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch

from mcore_batching.megatron.exchange import deserialize, serialize

VALUES: dict[str, Any] = {
    "nothing": None,
    "numbers": {"total_lengths": [3, 5], "rewards": [0.5, -1.0], "names": ["a", "b"]},
    "no tensors": [],
    "tensors": [torch.arange(3), torch.tensor(2.5), torch.zeros(0, 4), torch.tensor([True])],
    "alike": [torch.arange(3.0), torch.tensor(2.5), torch.zeros(0, 4), torch.ones(2, 3).t()],
    "alike for a time": [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j, 3 - 4j])],
    "alike, some negative": [torch.tensor([1 + 2j]).conj().imag, torch.ones(1)],
    "nested, alike": [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])] * 2,
    "quantised, alike": [torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)] * 2,
    "kinds": [torch.ones(3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64)],
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "inside": ([1, 2], {"tokens": [torch.arange(5)], "images": [{"pixels": torch.rand(2, 2)}]}),
    "an array": np.arange(6).reshape(2, 3),
    "twice": [torch.arange(2)] * 2,
    # Contiguous at any stride, but no bytes at another than 1.
    "one of a column": torch.arange(6.0).view(3, 2)[1:2, 1],
    "one for all": torch.tensor([3, 4])[1].expand(2, 3),
    "negative in passing": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "conjugate in passing": torch.tensor([1 + 2j]).conj(),
    "eight bits": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
    "sparse": torch.eye(3).to_sparse(),
    "sparse with a gradient": torch.eye(3, requires_grad=True).to_sparse(),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "nested and ragged": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.layout, a.is_nested) != (b.dtype, b.layout, b.is_nested):
            return False
        if a.is_nested:
            return equal(list(a.unbind()), list(b.unbind()))
        if a.layout != torch.strided:
            return torch.equal(a.to_dense(), b.to_dense())
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.mark.parametrize("name", VALUES)
def test_what_arrives_is_what_was_sent(name: str) -> None:
    assert equal(deserialize(serialize(VALUES[name])), VALUES[name])


def test_several_lie_one_behind_the_other_at_any_byte() -> None:
    parts = [serialize(value) for value in VALUES.values()]
    joined = torch.cat([torch.zeros(1, dtype=torch.uint8), *parts])
    _, *split = torch.split(joined, [1, *(part.numel() for part in parts)])
    assert equal([deserialize(part) for part in split], list(VALUES.values()))


def test_tensors_are_not_pickled() -> None:
    tensor = torch.arange(1000)
    text = pickle.dumps(tensor)
    assert len(serialize(tensor)) < tensor.nbytes + 200 < len(text)
    part = torch.ones(2, 10**6)[:, :2]  # of a storage that is not to be sent
    assert len(serialize(part)) < 1000


def test_a_shape_is_all_there_is_of_a_tensor_on_meta() -> None:
    found = deserialize(serialize([torch.ones(2), torch.empty(3, 4, device="meta")]))[1]
    assert (found.device.type, found.shape) == ("meta", (3, 4))


def test_a_gradient_stays_behind() -> None:
    assert not deserialize(serialize(torch.ones(2, requires_grad=True))).requires_grad


@pytest.mark.parametrize("value", [lambda: None, (each for each in ()), threading.Lock()])
def test_what_cannot_be_pickled_is_said_with_what_to_do(value: Any) -> None:
    text = "values cannot be pickled: .*; give others, or leave"
    with pytest.raises(TypeError, match=text):
        serialize({"tokens": [torch.ones(2)], "judge": [value]})
