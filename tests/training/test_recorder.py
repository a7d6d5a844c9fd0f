from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from arborcast.pipeline.run import recorder as recorder_module
from arborcast.pipeline.run.recorder import Notes, PassRecorder, timeline_of, with_waiting
from arborcast.pipeline.simulation.timeline import Interval, Timeline
from tests.support.ranks import run_ranks

RANKS_IMPORT = ("torch._dynamo",)


class Clock:
    """Says what it is told to."""

    def __init__(self) -> None:
        self.now_ns = 5_000_000

    def __call__(self) -> int:
        return self.now_ns


def drawn(text: str) -> set[Interval]:
    """Lines such as `1 forward 0 10..30`: rank, kind, microbatch, begin..end in us, and perhaps `to 2`."""
    found = set()
    for line in text.strip().splitlines():
        rank, kind, microbatch, span, *to = line.split()
        start, end = span.split("..")
        number = None if microbatch == "-" else int(microbatch)
        found.add(Interval(int(rank), kind, number, float(start), float(end), int(to[1]) if to else None))
    return found


def test_a_step_of_one_rank() -> None:
    clock = Clock()
    recorder = PassRecorder(clock)
    recorder.add("forward", 9, 0, 1)  # of another step: forgotten
    clock.now_ns = 10_000_000
    recorder.start()
    clock.now_ns += 2_000
    with recorder.measure("forward", 0):
        clock.now_ns += 10_000
    recorder.add("communication", 0, clock.now_ns, clock.now_ns + 7_000, peer=3)
    clock.now_ns += 5_000
    with recorder.measure("backward", 0):
        clock.now_ns += 20_000
    with recorder.measure("update"):
        clock.now_ns += 1_000
    assert set(recorder.timeline().intervals) == drawn(
        """
        0 waiting       - 0..2
        0 forward       0 2..12
        0 communication 0 12..19 to 3
        0 waiting       - 12..17
        0 backward      0 17..37
        0 update        - 37..38
        """
    )


def test_what_raises_is_not_noted() -> None:
    recorder = PassRecorder()
    with pytest.raises(ValueError, match="lost"), recorder.measure("forward", 0):
        raise ValueError("lost")
    assert recorder.timeline() == Timeline(())


def test_hosts_are_set_equal_where_they_begin() -> None:
    notes = [
        Notes(0, "a", 1_000_000, (("forward", 0, 1_004_000, 1_010_000, None, None),)),
        Notes(1, "a", 1_003_000, (("forward", 0, 1_012_000, 1_020_000, None, None),)),
        Notes(2, "b", 7_000, (("forward", 0, 22_000, 30_000, None, None),)),
        Notes(3, "b", 5_000, ()),
    ]
    assert set(timeline_of(notes).intervals) == drawn(
        """
        0 waiting - 0..4
        0 forward 0 4..10
        0 waiting - 10..25
        1 waiting - 0..12
        1 forward 0 12..20
        1 waiting - 20..25
        2 waiting - 0..17
        2 forward 0 17..25
        3 waiting - 0..25
        """
    )


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(["forward", "backward", "allreduce", "communication"]),
            st.integers(0, 30),
            st.integers(0, 9),
        )
    )
)
def test_at_every_moment_a_rank_is_busy_or_waits(spans: list[tuple[int, str, int, int]]) -> None:
    given_ = [Interval(rank, kind, 0, start, start + length) for rank, kind, start, length in spans]
    filled = with_waiting(given_, range(3))
    end = max((interval.end_us for interval in given_), default=0.0)
    assert [it.start_us for it in filled] == sorted(it.start_us for it in filled)
    assert sorted(map(repr, filled)) == sorted(
        map(repr, (*given_, *(it for it in filled if it.kind == "waiting")))
    )
    for rank in range(3):
        for moment in (tick + 0.5 for tick in range(int(end))):
            over = {it.kind for it in filled if it.rank == rank and it.start_us < moment < it.end_us}
            assert ("waiting" in over) != bool(over & {"forward", "backward", "allreduce"})


def step(rank: int, size: int) -> Timeline:
    recorder = PassRecorder()
    group = dist.new_group(backend="gloo")
    recorder.start(group)
    begun = time.perf_counter_ns()
    with recorder.measure("forward", rank):
        pass
    dist.barrier(group)
    recorder.add("communication", rank, begun, time.perf_counter_ns(), peer=(rank + 1) % size)
    return recorder.timeline(group)


def test_all_ranks_gather_the_same() -> None:
    first, second = run_ranks(2, step)
    assert first == second
    told = {(it.rank, it.kind, it.microbatch, it.peer) for it in first.intervals if it.kind != "waiting"}
    assert told == {
        (0, "forward", 0, None),
        (1, "forward", 1, None),
        (0, "communication", 0, 1),
        (1, "communication", 1, 0),
    }
    assert all(0 <= it.start_us <= it.end_us <= first.time_us for it in first.intervals)
    sent = [it for it in first.intervals if it.kind == "communication"]
    # Both messages end behind a barrier that both ranks enter after they begin: one clock must show it.
    assert max(it.start_us for it in sent) < min(it.end_us for it in sent)


def test_a_kernel_that_does_not_name_its_start_is_named_as_host(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Notes] = []
    monkeypatch.setattr(recorder_module, "boot_id", lambda: None)
    monkeypatch.setattr(recorder_module.socket, "gethostname", lambda: "box")  # type: ignore[attr-defined]
    monkeypatch.setattr(recorder_module, "timeline_of", noted.extend)
    PassRecorder().timeline()
    assert [it.host for it in noted] == ["box"]


def test_nothing_is_recorded_unless_asked() -> None:
    recorder = PassRecorder(is_on=False)
    recorder.start()
    with recorder.measure("forward", 0):
        recorder.add("forward", 0, 0, 1)
    assert recorder.timeline() == Timeline(())
