from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.pictures import chrome_trace, draw_plan, draw_timelines, write_chrome_trace
from arborcast.pipeline.pictures.timeline_picture import axis_of, rows_of, title_of
from arborcast.pipeline.planning.memory_need import MemoryNeed
from arborcast.pipeline.profiles import Layer, Profile
from arborcast.pipeline.simulation.timeline import KINDS, Interval, Timeline
from arborcast.pipeline.stages import Plan
from arborcast.synth.errors import InputError
from tests.support.picture_words import words

if TYPE_CHECKING:
    from arborcast.pipeline.planning.plan_prediction import Prediction

LETTERS = {"F": "forward", "B": "backward", "W": "weights", "A": "allreduce", "U": "update", "_": "waiting"}


def drawn(text: str, tick_us: float = 10) -> Timeline:
    """A step by rows such as `2: _ F0 F0 B0 A U`: a word per tick; `F0>1,3` sends in the next."""
    intervals = []
    for line in text.strip().splitlines():
        head, *body = line.split()
        rank = int(head.rstrip(":"))
        for tick, word in enumerate(body):
            work, _, peers = word.partition(">")
            number = int(work[1:]) if work[1:] else None
            start, end = tick * tick_us, (tick + 1) * tick_us
            intervals.append(Interval(rank, LETTERS[work[0]], number, start, end))
            intervals += [
                Interval(rank, "communication", number, end, end + tick_us, int(peer))
                for peer in peers.split(",")
                if peer
            ]
    return Timeline(tuple(sorted(intervals, key=lambda it: (it.start_us, it.rank))))


PREDICTED = drawn(
    """
    0: F0>2,1 F1>2,1 _  _    _  B0   _ B1 U
    2: _      _      F0 B0>0 F1 B1>0 A U
    1: _      _      F0 B0>0 F1 B1>0 A U
    """
)
MEASURED = drawn(
    """
    0: F0>2,1 F1>2,1 _  _ _    _  B0   _ B1 U
    2: _      _      F0 _ B0>0 F1 B1>0 A U
    1: _      _      F0 _ B0>0 F1 B1>0 A U
    """
)
PLAN = Plan([(0, 2, [0]), (2, 3, [2, 1])], 2, model="toy")
PROFILE = Profile(
    "toy",
    8,
    tuple(Layer(f"{index} Linear", 5.0, 10.0, 2048, 4096, 1 << 20, 1 << 20) for index in range(3)),
)
PREDICTION = cast(
    "Prediction",
    SimpleNamespace(
        time_us=PREDICTED.time_us,
        bubble=0.25,
        memory=(
            MemoryNeed(3 << 20, 2 << 20, 0, 1 << 20, 0),
            MemoryNeed(1 << 20, 1 << 20, 0, 1 << 20, 1 << 10),
        ),
        peak_in_flight=(2, 1),
        timeline=PREDICTED,
    ),
)
BOTH = {"predicted": PREDICTED, "measured": MEASURED}
DRAWINGS: dict[str, Callable[[Path], None]] = {
    "timelines": lambda path: draw_timelines(BOTH, path, plan=PLAN),
    "plan": lambda path: draw_plan(PLAN, PROFILE, PREDICTION, path, memory_bytes=8 << 20),
}


def test_timelines_say_how_far_they_are_apart(tmp_path: Path) -> None:
    draw_timelines(BOTH, tmp_path / "both.svg", plan=PLAN)
    said = words(tmp_path / "both.svg")
    assert "toy: 2 stages of 1, 2 ranks, 2 microbatches, order 1f1b" in said
    assert "predicted: 90 us" in said
    assert "measured: 100 us (predicted is 10.0 % below)" in said
    assert [word for word in said if "rank " in word][:3] == ["stage 0  rank 0", "stage 1  rank 2", "rank 1"]
    # Each rank computes in 5 ticks: of 9, and measured of 10.
    assert [word for word in said if word.endswith(" %")] == ["56 %"] * 3 + ["50 %"] * 3
    legend = [word for word in said if word in KINDS]
    assert sorted(legend) == sorted(set(KINDS) - {"weights"})
    # Each rank passes each microbatch forward and backward, in both steps (ticks have other digits).
    assert said.count("1") == 2 * 3 * 2


def test_numbers_are_left_out_where_boxes_are_too_narrow(tmp_path: Path) -> None:
    narrow = drawn("0: " + " ".join(["F7"] * 1500 + ["B7"] * 2), tick_us=0.25)
    draw_timelines({"narrow": narrow}, tmp_path / "narrow.svg")
    assert "7" not in words(tmp_path / "narrow.svg")


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must show at least one timeline, got none"):
        draw_timelines({}, tmp_path / "none.svg")
    with pytest.raises(InputError, match="timeline measured must last longer than 0 us"):
        draw_timelines({"predicted": PREDICTED, "measured": Timeline(())}, tmp_path / "none.svg")


def test_rows_are_sorted_by_stage_and_nobody_is_left_out() -> None:
    assert rows_of([PREDICTED], PLAN) == (0, 2, 1)
    assert rows_of([PREDICTED], None) == (0, 1, 2)
    assert rows_of([PREDICTED], Plan([(0, 1, [1])], 1)) == (1, 0, 2)


def test_ranks_with_several_stages_name_them_all(tmp_path: Path) -> None:
    plan = Plan([(0, 1, [0]), (1, 2, [1]), (2, 3, [1]), (3, 4, [0])], 1, "zb-v")
    step = drawn("0: F0>1 _ _ F0 B0>1 W0 _ _ B0 W0\n1: _ F0 F0>0 _ _ B0 B0>0 W0 W0 _")
    draw_timelines({"predicted": step}, tmp_path / "v.svg", plan=plan)
    said = words(tmp_path / "v.svg")
    assert {"stage 0, 3  rank 0", "stage 1, 2  rank 1", "weights"} <= set(said)
    assert "4 stages, 2 on each rank, 1 microbatch, order zb-v" in said
    names = {event["args"].get("name") for event in events(chrome_trace({"predicted": step}, plan=plan), "M")}
    assert {"stage 0, 3, rank 0", "stage 1, 2, rank 1"} <= names


@pytest.mark.parametrize(("end_us", "unit"), [(9_999, "us"), (10_000, "ms"), (9_999_000, "ms"), (2e7, "s")])
def test_the_unit_leaves_two_digits_or_more(end_us: float, unit: str) -> None:
    assert axis_of(end_us).unit == unit


def test_a_plan_in_a_line() -> None:
    assert title_of(Plan([(0, 1, [0])], 1)) == "1 stage, 1 microbatch, order 1f1b"
    many = Plan([(stage, stage + 1, [2 * stage, 2 * stage + 1]) for stage in range(5)], 4, "pe", model="net")
    assert title_of(many) == "net: 5 stages on 10 ranks, 4 microbatches, order pe"


def test_a_plan_is_told_in_full(tmp_path: Path) -> None:
    draw_plan(PLAN, PROFILE, PREDICTION, tmp_path / "plan.svg", memory_bytes=8 << 20)
    said = words(tmp_path / "plan.svg")
    assert "1.00 KiB" in said  # 4 of 8 samples cross the one cut: half of 2048 bytes
    assert {"stage 0", "stage 1", "rank 0", "ranks 2, 1", "0 Linear", "2 in flight", "limit"} <= set(said)
    assert "predicted step: 90 us, ranks idle 25 % of it" in said


def test_a_plan_for_another_model_is_not_drawn(tmp_path: Path) -> None:
    other = Plan([(0, 4, [0])], 1)
    with pytest.raises(PlanError, match="plan: must have the 3 layers of toy, got 4"):
        draw_plan(other, PROFILE, PREDICTION, tmp_path / "plan.svg")


def events(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_a_trace_has_a_process_per_timeline_and_threads_per_rank() -> None:
    trace = chrome_trace(BOTH, plan=PLAN)
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name") for event in events(trace, "M")
    }
    assert names["process_name", 0, 0] == "predicted"
    assert names["process_name", 1, 0] == "measured"
    assert names["thread_name", 1, 4] == "stage 1, rank 2"
    assert names["thread_name", 1, 5] == "stage 1, rank 2: messages"
    order = {
        event["tid"]: event["args"]["sort_index"]
        for event in events(trace, "M")
        if "thread_sort" in event["name"]
    }
    assert sorted(order, key=order.__getitem__) == [0, 1, 4, 5, 2, 3]


def test_a_trace_has_every_interval_but_waiting() -> None:
    complete = events(chrome_trace(BOTH), "X")
    shown = sorted((it["pid"], it["cat"], it["ts"], it["dur"], it["tid"] // 2) for it in complete)
    assert shown == sorted(
        (process, it.kind, it.start_us, it.end_us - it.start_us, it.rank)
        for process, timeline in enumerate(BOTH.values())
        for it in timeline.intervals
        if it.kind != "waiting"
    )
    beside = {it["cat"] for it in complete if it["tid"] % 2}
    assert beside == {"communication", "allreduce"}


def test_threads_of_a_trace_do_not_overlap_where_ranks_compute() -> None:
    spans = sorted(
        (it["tid"], it["ts"], it["ts"] + it["dur"]) for it in events(chrome_trace({"a": MEASURED}), "X")
    )
    for (thread, _, end), (other, start, _) in pairwise(spans):
        assert thread != other or thread % 2 or start >= end


def test_arrows_lead_from_a_message_to_the_pass_that_needs_it() -> None:
    trace = chrome_trace({"predicted": PREDICTED})
    ends = {event["id"]: event for event in events(trace, "f")}
    arrows = {
        (start["tid"] // 2, start["ts"], ends[start["id"]]["tid"] // 2, ends[start["id"]]["ts"])
        for start in events(trace, "s")
    }
    to_last = {(0, 10, rank, 20) for rank in (1, 2)} | {(0, 20, rank, 40) for rank in (1, 2)}
    to_first = {(rank, 40, 0, 50) for rank in (1, 2)} | {(rank, 60, 0, 70) for rank in (1, 2)}
    assert arrows == to_last | to_first


def test_a_trace_is_json(tmp_path: Path) -> None:
    write_chrome_trace(BOTH, tmp_path / "trace.json", plan=PLAN)
    read = json.loads((tmp_path / "trace.json").read_text())
    assert read == chrome_trace(BOTH, plan=PLAN)
