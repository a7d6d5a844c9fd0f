"""Commands that run schedules whose switches execute programs."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from arborcast.backends import Executor  # noqa: E402
from arborcast.backends.measure.launch import RunError, run_schedule  # noqa: E402
from arborcast.backends.measure.nccl_tests import sweep_of  # noqa: E402
from arborcast.synth.collective import Kind  # noqa: E402
from arborcast.synth.errors import InputError  # noqa: E402
from tests.support.in_network import one_way, star, turning, two_levels  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402


@pytest.mark.long
@pytest.mark.parametrize(
    "schedule", [turning(two_levels(2, 2)), one_way(star(3), Kind.REDUCE), one_way(star(3), Kind.BROADCAST)]
)
def test_run_starts_a_process_for_each_switch(schedule: Any) -> None:
    rows = run_schedule(schedule, size_bytes=(0, 4, 1 << 20), dtype="bfloat16", iterations=1)
    assert [row.wrong for row in rows] == [0, 0, 0]


@pytest.mark.long
def test_run_says_where_nobody_plays_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARBORCAST_AGGREGATORS", "127.0.0.1:1")
    monkeypatch.setenv("ARBORCAST_AGGREGATOR_TOKEN", "0" * 32)
    with pytest.raises(RunError, match=r"switch s \(127.0.0.1:1\) cannot be reached: .*refused"):
        run_schedule(turning(star(2)), size_bytes=(4,))


def test_torchs_messages_refuse_in_one_line() -> None:
    with pytest.raises(InputError, match=r"^via messages: switch s has to execute a program, which torch's"):
        sweep_of(turning(star(2)), [4], via="messages")


def executor(rank: int, size: int) -> str:
    with pytest.raises(InputError) as caught:
        Executor(turning(star(2)))
    dist.barrier()  # gloo's first connections must not meet a rank that has ended
    return str(caught.value)


def test_so_does_the_executor() -> None:
    said = run_ranks(2, executor)
    assert all(one.startswith("executor: switch s has to execute a program, which torch's") for one in said)
