"""Whether samples that begin others are looked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_batching.batch import DEFAULT_SCHEMA
from mcore_batching.megatron.job.job import JobMemory
from mcore_batching.megatron.rollout import cut_steps
from mcore_batching.megatron.rollout.cut_steps import look_for_hosts


@pytest.mark.parametrize("flag", [True, False, None])
def test_a_job_without_the_flag_is_looked_at_ever_more_rarely(
    flag: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Any model that could share.
    monkeypatch.setattr(cut_steps, "sharing_problems", lambda chunks: chunks)
    tokens = [torch.tensor([1, 2]), torch.tensor([1, 2, 3, 4])]
    data: dict[str, list[Any]] = {"tokens": tokens, "response_lengths": [1, 1]}
    # Experts that differ keep samples apart, but are not compared for an advice.
    data["rollout_routed_experts"] = [torch.zeros(2, 1, 1), torch.ones(4, 1, 1)]
    job: Any = SimpleNamespace(
        options=SimpleNamespace(share_prefixes=flag), memory=JobMemory(data_parallel_group=None)
    )
    batch: Any = SimpleNamespace(data=data, schema=DEFAULT_SCHEMA)
    found = [look_for_hosts(job, [], batch, [[0, 1]]) for _ in range(9)]
    hosts = [each.host if each is not None else None for each in found]
    apart, together = (0, 1), (1, 1)
    looked = {True: [apart] * len(found), None: [None] * len(found)}
    few = [together if number in (1, 2, 4, 8) else None for number in range(1, 10)]
    assert hosts == (few if flag is False else looked[flag])
