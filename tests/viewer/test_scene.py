"""What the viewer is told of schedules and traces, against the timeline and drawn examples."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from arborcast import load, solve
from arborcast.synth.certificate import Bound, Cut
from arborcast.synth.collective import Collective
from arborcast.synth.errors import InputError
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Link, Topology
from arborcast.synth.viewer import scene, scene_of, scene_of_traces
from tests.support.drawn_schedules import schedules


def rows(run: dict[str, Any]) -> list[dict[str, Any]]:
    bars = run["bars"]
    return [dict(zip(bars, values, strict=True)) for values in zip(*bars.values(), strict=True)]


def line() -> Schedule:
    """0 -> 1 -> 2 at 1 GB/s and 2 GB/s, latency 5 us: two chunks, of 2/3 and 1/3, from rank 0."""
    fabric = Topology.build(
        "line", 3, [Link(0, 1, Fraction(1), Fraction(5)), Link(1, 2, Fraction(2), Fraction(5))]
    )
    return Schedule.build(
        fabric,
        Collective.on(fabric, "broadcast"),
        Method("drawn"),
        Bound(Fraction(1), Cut(frozenset({0}), Fraction(1))),
        [Chunk(Fraction(2, 3), 0), Chunk(Fraction(1, 3), 0)],
        [Transfer(0, 0, 1, 0), Transfer(0, 1, 2, 1), Transfer(1, 0, 1, 1), Transfer(1, 1, 2, 2)],
    )


def test_a_drawn_line() -> None:
    shown = scene_of(line(), [3000], ["a fact"])
    assert shown["title"] == "broadcast on line, drawn"
    assert shown["facts"] == ["a fact"]
    assert [vertex["label"] for vertex in shown["vertices"]] == ["0", "1", "2"]
    assert shown["bound"] == {"rate": 1.0, "scope": "every schedule", "sets": [[0]], "lengths": None}
    assert shown["chunks"] == ["2/3 of the buffer, of 0", "1/3 of the buffer, of 0"]
    (run,) = shown["runs"]
    # 2,000 B at 1 GB/s take 2 us and are there after 7, then 1 us; the other chunk 2 to 3, 8 to 8.5.
    assert (run["label"], run["time_us"], run["pieces"]) == ("3000 B", 13.5, 1)
    assert [
        (row["start_us"], row["end_us"], row["link"], row["chunk"], row["transfer"]) for row in rows(run)
    ] == [(0, 2, 0, 0, 0), (2, 3, 0, 1, 2), (7, 8, 1, 0, 1), (8, 8.5, 1, 1, 3)]


@given(schedules())
@settings(max_examples=20)
def test_every_transfer_passes_all_of_its_links_in_as_many_pieces(schedule: Schedule) -> None:
    shown = scene_of(schedule, [1 << 16])
    (run,) = shown["runs"]
    links = [(link["src"], link["dst"]) for link in shown["links"]]
    passed: Counter[tuple[int, tuple[int, int]]] = Counter()
    for row in rows(run):
        transfer = schedule.transfers[row["transfer"]]
        assert transfer.chunk == row["chunk"]
        assert 0 <= row["start_us"] < row["end_us"] <= run["time_us"] + 1e-4
        passed[row["transfer"], links[row["link"]]] += 1
    assert passed == {
        (index, hop): run["pieces"]
        for index, transfer in enumerate(schedule.transfers)
        for hop in transfer.hops
    }


def test_representatives_pass_when_they_do_in_the_schedule_written_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    implicit = solve(load("torus:4x4"), "allgather", form="implicit")
    every = scene_of(implicit, [1 << 16])
    assert len(every["chunks"]) == implicit.chunk_count
    monkeypatch.setattr(scene, "MOST_EXPANDED", 0)
    few = scene_of(implicit, [1 << 16])
    assert len(few["chunks"]) == len(implicit.chunks)
    assert f"{len(implicit.chunks)} representatives: 16 translations" in few["note"]
    assert few["runs"][0]["time_us"] == every["runs"][0]["time_us"]

    def timed(shown: dict[str, Any]) -> list[tuple[float, float]]:
        return [(row["start_us"], row["end_us"]) for row in rows(shown["runs"][0])]

    # Each moment of a representative's is one of its 16 images', too.
    assert Counter(timed(every)) == Counter(timed(few) * 16)


def test_where_bars_are_too_many_those_that_touch_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = scene_of(line(), [64 << 20])["runs"][0]
    assert apart["pieces"] > 1
    monkeypatch.setattr(scene, "MOST_BARS", 3)
    shown = scene_of(line(), [64 << 20])
    joined = shown["runs"][0]
    assert "drawn as one" in shown["note"]
    assert len(rows(joined)) < len(rows(apart))
    for link in (0, 1):
        assert sum(row["end_us"] - row["start_us"] for row in rows(joined) if row["link"] == link) == (
            pytest.approx(sum(row["end_us"] - row["start_us"] for row in rows(apart) if row["link"] == link))
        )


# ---------------------------------------------------------------------------------------- traces


def trace(pid: int, *bars: tuple[str, str, float, float]) -> list[dict[str, Any]]:
    """Bars of (line, name, begin, length) as a group writes them."""
    lines = {name: tid for tid, name in enumerate(dict.fromkeys(line for line, *_ in bars))}
    named = [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        for name, tid in lines.items()
    ]
    return named + [
        {"name": name, "ph": "X", "pid": pid, "tid": lines[line], "ts": at, "dur": long, "args": {}}
        for line, name, at, long in bars
    ]


def written(folder: Path, *documents: object) -> list[Path]:
    paths = [folder / f"{place}.json" for place in range(len(documents))]
    for path, document in zip(paths, documents, strict=True):
        path.write_text(document if isinstance(document, str) else json.dumps(document))
    return paths


def test_a_drawn_trace_of_two_ranks(tmp_path: Path) -> None:
    first = trace(
        0,
        ("calls", "allreduce 8 KiB", 100, 10),
        ("calls", "barrier", 120, 5),
        ("to rank 1", "send 4 KiB", 101, 4),
        ("from rank 1", "receive 4 KiB", 101, 5),
    )
    second = trace(1, ("calls", "allreduce 8 KiB", 101, 9), ("to rank 0", "send 4 KiB", 122, 2))
    shown = scene_of_traces(written(tmp_path, first, second))
    assert shown["title"] == "trace of 2 of 2 ranks"
    assert shown["chunks"] == ["allreduce 8 KiB", "barrier"]
    assert [(link["src"], link["dst"]) for link in shown["links"]] == [(0, 1), (1, 0)]
    (run,) = shown["runs"]
    assert run["time_us"] == 23
    assert [(row["start_us"], row["end_us"], row["link"], row["chunk"]) for row in rows(run)] == [
        (0, 4, 0, 0),
        (21, 23, 1, 1),
    ]


def test_a_run_is_drawn_on_the_fabric_that_is_named(tmp_path: Path) -> None:
    """A ring of four; what rank 0 sent to rank 2, which no link joins, is drawn all the same."""
    sent = trace(0, ("to rank 1", "send 4 KiB", 1, 4), ("to rank 2", "send 4 KiB", 5, 1))
    fabric = load("ring:4")
    shown = scene_of_traces(written(tmp_path, sent), fabric)
    assert len(shown["vertices"]) == 4
    drawn = [(link["src"], link["dst"]) for link in shown["links"]]
    assert drawn == [*((link.src, link.dst) for link in fabric.links), (0, 2)]
    assert [drawn[row["link"]] for row in rows(shown["runs"][0])] == [(0, 1), (0, 2)]
    with pytest.raises(InputError, match="ring:2: must have rank 2, which the traces name, got 2 ranks"):
        scene_of_traces(written(tmp_path, sent), load("ring:2"))


@pytest.mark.parametrize(
    ("documents", "facts"),
    [
        (["[1]"], ["0.json: a trace must be a list of objects"]),
        (["["], ["0.json: is no JSON"]),
        ([[]], ["0.json: pid must be one rank, got []"]),
        ([trace(0, ("to rank 1", "s", 0, 1)) + trace(1, ("calls", "s", 0, 1))], ["one rank, got ['0', '1']"]),
        ([trace(0, ("calls", "barrier", 0, 1))], ["0.json: holds no message"]),
        ([trace(0, ("to rank 1", "send", 0, 1))] * 2, ["1.json: is of rank 0, as ", "0.json is"]),
        ([trace(0, ("to rank 1", "send", "x", 1))], ["event 1: ts and dur must be numbers, got 'x', 1"]),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, documents: list[object], facts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        scene_of_traces(written(tmp_path, *documents))
    for fact in facts:
        assert fact in str(caught.value)
