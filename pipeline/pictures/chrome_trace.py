"""Steps of training as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each timeline is a process, each rank a thread of it; messages have threads of their own, since they overlap
what the rank computes, and arrows to what the receiver computes next with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from arborcast.pipeline.simulation.timeline import Interval, Timeline
from arborcast.pipeline.stages import Plan
from arborcast.synth.formats.atomic import write_atomically

COLOURS = {
    "forward": "thread_state_running",
    "backward": "thread_state_iowait",
    "weights": "thread_state_runnable",
    "allreduce": "rail_animation",
    "update": "good",
    "communication": "generic_work",
}
"""Names of the trace viewer's own colours."""

Event = dict[str, Any]


def chrome_trace(timelines: Mapping[str, Timeline], *, plan: Plan | None = None) -> dict[str, Any]:
    """The Trace Event Format's JSON object of some timelines.

    A process per timeline; thread 2r is what rank r computes, thread 2r + 1 its messages and allreduces.
    Waiting is what is left blank.

    Args:
        timelines: by what they are called, such as "predicted" and "measured".
        plan: what the step carried out; its stages are then named.
    """
    ids = count(1)
    events = [
        event
        for process, (name, timeline) in enumerate(timelines.items())
        for event in (
            *_names(process, name, timeline, plan),
            *_intervals(process, timeline),
            *_messages(process, timeline, ids),
        )
    ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_chrome_trace(
    timelines: Mapping[str, Timeline], path: Path | str, *, plan: Plan | None = None
) -> None:
    """Write them to a file that Perfetto opens; arguments as for `chrome_trace`.

    Raises:
        InputError: the file cannot be written.
    """
    write_atomically(path, json.dumps(chrome_trace(timelines, plan=plan)) + "\n")


def _names(process: int, name: str, timeline: Timeline, plan: Plan | None) -> Iterator[Event]:
    def meta(kind: str, thread: int, **values: Any) -> Event:
        return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": values}

    yield meta("process_name", 0, name=name)
    yield meta("process_sort_index", 0, sort_index=process)
    ranks = {interval.rank for interval in timeline.intervals} | set(plan.ranks if plan else ())
    order = list(plan.ranks if plan else ())
    order += sorted(ranks - set(order))
    sending = {it.rank for it in timeline.intervals if _is_beside(it)}
    for place, rank in enumerate(order):
        worker = plan.worker_of(rank) if plan else None
        held = () if worker is None or plan is None else plan.workers[worker].stages
        label = f"stage {', '.join(map(str, held))}, rank {rank}" if held else f"rank {rank}"
        yield meta("thread_name", 2 * rank, name=label)
        yield meta("thread_sort_index", 2 * rank, sort_index=2 * place)
        if rank in sending:
            yield meta("thread_name", 2 * rank + 1, name=f"{label}: messages")
            yield meta("thread_sort_index", 2 * rank + 1, sort_index=2 * place + 1)


def _intervals(process: int, timeline: Timeline) -> Iterator[Event]:
    for it in timeline.intervals:
        if it.kind == "waiting":
            continue
        number = "" if it.microbatch is None else f" {it.microbatch}"
        to = "" if it.peer is None else f" to rank {it.peer}"
        arguments = {"microbatch": it.microbatch, "peer": it.peer}
        yield {
            "ph": "X",
            "name": f"{it.kind}{number}{to}",
            "cat": it.kind,
            "pid": process,
            "tid": _thread(it),
            "ts": it.start_us,
            "dur": it.end_us - it.start_us,
            "cname": COLOURS[it.kind],
            "args": {key: value for key, value in arguments.items() if value is not None},
        }


def _messages(process: int, timeline: Timeline, ids: Iterator[int]) -> Iterator[Event]:
    """Arrows from each message to what its receiver computes with it: its next pass of that microbatch."""
    passes: dict[tuple[int, int | None], list[Interval]] = {}
    for it in timeline.intervals:
        if it.kind in ("forward", "backward"):
            passes.setdefault((it.rank, it.microbatch), []).append(it)
    for it in timeline.intervals:
        if it.kind != "communication" or it.peer is None:
            continue
        # Clocks of hosts differ by little: a pass that begins a little before the message ends still uses it.
        later = [use for use in passes.get((it.peer, it.microbatch), ()) if use.start_us >= it.start_us]
        if not later:
            continue
        use = min(later, key=lambda interval: interval.start_us)
        flow = {"name": "message", "cat": "message", "id": next(ids), "pid": process}
        yield {"ph": "s", "ts": it.start_us, "tid": _thread(it), **flow}
        yield {"ph": "f", "bp": "e", "ts": use.start_us, "tid": _thread(use), **flow}


def _is_beside(interval: Interval) -> bool:
    """Whether it may overlap what the rank computes."""
    return interval.kind in ("communication", "allreduce")


def _thread(interval: Interval) -> int:
    return 2 * interval.rank + _is_beside(interval)
