from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core")

from timeline import record


def chunks(count):
    config = SimpleNamespace(timers="before")
    model = [torch.nn.Linear(2, 2) for _ in range(count)]
    for chunk in model:
        chunk.config = config
    return model, config


def forward(config, chunk):
    config.timers("forward-compute", log_level=2).start()
    output = chunk(torch.ones(1, 2))
    config.timers("forward-compute").stop()
    return output.sum()


def backward(config, output):
    config.timers("backward-compute", log_level=2).start()
    output.backward()
    config.timers("backward-compute").stop()


def test_every_pass_is_noted_with_its_chunk_and_slot_in_any_order():
    model, config = chunks(2)
    with record(model) as recorder:
        config.timers("forward-backward", log_level=1).start(barrier=False)
        outputs = [forward(config, model[chunk]) for chunk in (0, 0, 1, 1)]
        for output in (outputs[2], outputs[0], outputs[3], outputs[1]):
            backward(config, output)
        config.timers("forward-backward").stop()
    assert [(chunk, slot, back) for chunk, slot, back, _, _ in recorder.passes] == [
        (0, 0, False),
        (0, 1, False),
        (1, 0, False),
        (1, 1, False),
        (1, 0, True),
        (0, 0, True),
        (1, 1, True),
        (0, 1, True),
    ]
    times = [time for _, _, _, start, end in recorder.passes for time in (start, end)]
    assert times == sorted(times)


def test_timers_and_hooks_are_gone_afterwards_even_after_an_error():
    model, config = chunks(1)
    with pytest.raises(RuntimeError, match="in the step"), record(model) as recorder:
        raise RuntimeError("in the step")
    assert config.timers == "before"
    model[0](torch.ones(1, 2))
    assert not model[0]._forward_hooks
    assert recorder.passes == []


def test_results_are_those_without_recording():
    model, config = chunks(1)
    backward(
        SimpleNamespace(timers=lambda *a, **k: SimpleNamespace(start=int, stop=int)),
        model[0](torch.ones(1, 2)).sum(),
    )
    gradient = model[0].weight.grad.clone()
    model[0].zero_grad()
    with record(model):
        backward(config, forward(config, model[0]))
    assert torch.equal(model[0].weight.grad, gradient)
