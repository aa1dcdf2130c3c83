"""The transfers of `kit.blocking_p2p` block where NCCL's would and gloo's do not."""

from __future__ import annotations

from typing import Any

import pytest
from kit.harness import Job

PP4 = {"pipeline_parallel": 4}


def neighbours_send_first(blocking: bool) -> Job:
    return Job(
        "neighbours-send-first" + "-blocking" * blocking,
        "kit.blocking_p2p:neighbours_send_first",
        4,
        PP4,
        {"blocking": blocking},
    )


@pytest.mark.parametrize("job", [neighbours_send_first(False)], ids=str)
def test_deadlock_on_gpus_passes_on_plain_gloo(job: Job, ranks: list[Any]) -> None:
    assert ranks == ["passed"] * 4


@pytest.mark.parametrize("job", [neighbours_send_first(True)], ids=str)
def test_deadlock_on_gpus_hangs_here(job: Job, ranks: list[Any]) -> None:
    assert ranks == ["hung"] * 4
