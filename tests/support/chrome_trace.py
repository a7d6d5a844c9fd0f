"""A strict reader of Chrome's trace-event format, for what viewers would only show wrongly.

Rules: "Trace Event Format", JSON array format, of Google (2016), for the events that we write: complete ones
("X") and metadata ("M").
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

KEYS = {
    "X": {"name", "ph", "pid", "tid", "ts", "dur", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
}
METADATA = {"process_name": str, "thread_name": str, "process_sort_index": int, "thread_sort_index": int}


def events_of(path: Path) -> list[dict[str, Any]]:
    """The events of a file, in its order; an AssertionError says which one breaks a rule."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    events = json.loads(path.read_text(), parse_constant=refuse)
    assert isinstance(events, list) and events
    named: dict[tuple[str, int, int], object] = {}
    bars: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert isinstance(event, dict) and event.get("ph") in KEYS, event
        assert event.keys() == KEYS[event["ph"]], event
        assert isinstance(event["name"], str) and event["name"], event
        assert type(event["pid"]) is int and type(event["tid"]) is int, event
        assert isinstance(event["args"], dict), event
        place = event["pid"], event["tid"]
        if event["ph"] == "M":
            (value,) = event["args"].values()
            assert type(value) is METADATA[event["name"]], event
            key = event["name"], event["pid"], event["tid"] if "thread" in event["name"] else 0
            assert key not in named, f"said twice: {event}"
            named[key] = value
        else:
            for time in (event["ts"], event["dur"]):
                assert type(time) in (int, float) and math.isfinite(time) and time >= 0, event
            bars.setdefault(place, []).append((event["ts"], event["ts"] + event["dur"]))
    for (pid, tid), of_line in bars.items():
        assert ("process_name", pid, 0) in named and ("thread_name", pid, tid) in named
        around: list[float] = []  # ends of the bars that one lies in
        for begin, end in sorted(of_line, key=lambda bar: (bar[0], -bar[1])):
            while around and around[-1] <= begin:
                around.pop()
            assert not around or end <= around[-1], f"bars of line {tid} of process {pid} cross at {begin} us"
            around.append(end)
    return events
