"""Bars of timelines: what becomes one bar, and what a rank waited; tick by tick."""

from __future__ import annotations

from itertools import groupby, pairwise

from hypothesis import given
from hypothesis import strategies as st

from arborcast.pipeline.simulation.timeline import Interval, Timeline, waiting
from arborcast.synth.simulation.timing import Occupation, join_touching

SPANS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda two: (min(two), max(two))))


@given(SPANS, st.integers(0, 15))
def test_a_rank_waits_when_no_span_covers_it(spans: list[tuple[int, int]], more: int) -> None:
    end = max((stop for _, stop in spans), default=0) + more
    found = waiting(3, spans, end)
    idle = [tick for tick in range(end) if not any(start <= tick < stop for start, stop in spans)]
    assert [tick for it in found for tick in range(int(it.start_us), int(it.end_us))] == idle
    assert all(it.start_us < it.end_us for it in found)
    # A span without length parts what is around it.
    cuts = {tick for span in spans for tick in span}
    assert all(a.end_us < b.start_us or a.end_us in cuts for a, b in pairwise(found))
    assert {(it.rank, it.kind, it.microbatch) for it in found} <= {(3, "waiting", None)}


def test_time_and_work_of_a_step() -> None:
    kinds = ("forward", "communication", "backward", "weights", "waiting", "allreduce", "update")
    step = [Interval(1, kind, None, 10.0 * at, 10.0 * at + 2**at) for at, kind in enumerate(kinds)]
    timeline = Timeline((*step, Interval(0, "forward", 0, 0.0, 500.0)))
    assert timeline.busy_us(1) == 1 + 4 + 8 + 64
    assert (timeline.busy_us(2), timeline.time_us, Timeline(()).time_us) == (0, 500, 0)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(1, 3)), min_size=1))
def test_bars_of_one_chunk_without_a_gap_are_one(pieces: list[tuple[int, int, int]]) -> None:
    now, bars, ticks = 0.0, [], []
    for number, (chunk, gap, length) in enumerate(pieces):
        now += gap
        ticks += [None] * gap + [chunk] * length
        bars.append(Occupation(now, now + length, chunk, number))
        now += length
    found = join_touching(bars)
    runs, at = [], 0
    for chunk, run in groupby(ticks):
        length = len(list(run))
        if chunk is not None:
            runs.append((at, at + length, chunk))
        at += length
    assert [(bar.start_us, bar.end_us, bar.chunk) for bar in found] == runs
    assert [bar.piece for bar in found] == [
        next(bar.piece for bar in bars if bar.start_us == start) for start, _, _ in runs
    ]


def test_a_gap_of_rounding_is_none() -> None:
    bars = [Occupation(0.0, 1000.0, 0, 0), Occupation(1000.0 + 5e-7, 1500.0, 0, 1)]
    assert join_touching(bars) == (Occupation(0.0, 1500.0, 0, 0),)
    late = [bars[0], Occupation(1000.0 + 3e-6, 1500.0, 0, 1)]
    assert join_touching(late) == tuple(late)
    nothing_sent = [Occupation(0.0, 0.0, 0, 0), Occupation(0.0, 1.0, 0, 1)]
    assert join_touching(nothing_sent) == (Occupation(0.0, 1.0, 0, 0),)
    assert join_touching([]) == ()
