"""Traces of a real run, as `group.trace()` writes them on each rank, as a scene of the viewer.

A trace has a line for each peer and direction, "to rank 1". What a rank sends is drawn on the link to that
peer, from when it began to when it was handed over; a chunk is a call. A trace does not know its fabric:
where none is named, ranks stand on a circle. What goes through switches is drawn from rank to rank.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arborcast.synth.errors import InputError
from arborcast.synth.formats.reading import head_of
from arborcast.synth.topology import Topology
from arborcast.synth.viewer.scene import Json, scene_of_fabric

_TO_RANK = re.compile(r"to rank (\d+)(, cable \d+)?")


def scene_of_traces(paths: Sequence[Path], topology: Topology | None = None) -> Json:
    """The scene of one run.

    Args:
        paths: the files of its ranks.
        topology: on which they are drawn; its ranks are those of the group.

    Raises:
        InputError: a file that cannot be read or is no such trace, two files of one rank, no message, or a
            rank that the topology has not.
    """
    ranks: dict[int, Path] = {}
    events: list[tuple[int, int, float, float, str]] = []
    calls: list[tuple[float, float, str]] = []
    for path in paths:
        rank, sent, called = _read(path)
        if rank in ranks:
            raise InputError(f"{path}: is of rank {rank}, as {ranks[rank]} is")
        ranks[rank] = path
        events += sent
        calls = max(calls, called, key=len)
    if not events:
        raise InputError(f"{paths[0]}: holds no message that a rank sent to another")
    begin = min(start for _, _, start, _, _ in events)
    end = max(start + long for _, _, start, long, _ in events)
    calls.sort()
    count = 1 + max(max(src, dst) for src, dst, *_ in events)
    if topology is not None and count > topology.ranks:
        raise InputError(
            f"topology {topology.name}: must have rank {count - 1}, which the traces name, got "
            f"{topology.ranks} ranks"
        )
    fabric = _circle(count) if topology is None else scene_of_fabric(topology)
    links = [(link["src"], link["dst"]) for link in fabric["links"]]
    others = sorted({(src, dst) for src, dst, *_ in events} - set(links))
    fabric["links"] += [{"src": src, "dst": dst, "bandwidth": None} for src, dst in others]
    links += others
    number = {link: index for index, link in enumerate(links)}
    events.sort(key=lambda event: event[2])
    chunk = [_call_at(calls, start) for _, _, start, _, _ in events]
    return {
        "title": f"trace of {len(ranks)} of {count} ranks",
        "facts": [f"{len(calls)} calls, {len(events)} messages"],
        **fabric,
        "bound": None,
        "chunks": [title for _, _, title in calls] or ["messages outside calls"],
        "transfers": {
            "chunk": chunk,
            "src": [src for src, *_ in events],
            "dst": [dst for _, dst, *_ in events],
            "step": chunk,
            "reduce": [0] * len(events),
            "via": [[] for _ in events],
        },
        "representatives": False,
        "runs": [
            {
                "label": "as it ran",
                "time_us": end - begin,
                "busbw": None,
                "pieces": None,
                "bars": {
                    "start_us": [round(start - begin, 4) for _, _, start, _, _ in events],
                    "end_us": [round(start + long - begin, 4) for _, _, start, long, _ in events],
                    "link": [number[src, dst] for src, dst, *_ in events],
                    "transfer": list(range(len(events))),
                    "piece": [0] * len(events),
                    "chunk": chunk,
                },
            }
        ],
        "note": "A bar lasts from the end of the message before, or the begin of the call, until the message "
        "was handed over: a long bar is a wait.",
    }


def _circle(count: int) -> Json:
    radius = max(1.0, count / (2 * math.pi))
    return {
        "vertices": [
            {
                "label": str(rank),
                "x": round(radius * math.sin(2 * math.pi * rank / count), 4),
                "y": round(radius * math.cos(2 * math.pi * rank / count), 4),
                "kind": "rank",
            }
            for rank in range(count)
        ],
        "links": [],
        "is_grid": False,
    }


def is_trace(path: Path) -> bool:
    """Whether a file begins as a trace does; what cannot be read is left to others to say."""
    return head_of(path, 64).lstrip().startswith("[")


def _read(
    path: Path,
) -> tuple[int, list[tuple[int, int, float, float, str]], list[tuple[float, float, str]]]:
    """The rank, what it sent (src, dst, begin and length in us, name), its calls (begin, end, name)."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path}: is no JSON: {error}") from error
    if not isinstance(document, list) or not all(isinstance(event, dict) for event in document):
        raise InputError(f"{path}: a trace must be a list of objects, got {type(document).__name__}")
    lines: dict[tuple[object, object], str] = {}
    sent, calls = [], []
    pids = {event.get("pid") for event in document}
    if len(pids) != 1 or not all(isinstance(pid, int) and pid >= 0 for pid in pids):
        raise InputError(f"{path}: pid must be one rank, got {sorted(map(str, pids))}")
    rank = int(next(iter(pids)))
    for place, event in enumerate(document):
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            lines[event["pid"], event.get("tid")] = str(event.get("args", {}).get("name"))
        elif event.get("ph") == "X":
            start, long = event.get("ts"), event.get("dur")
            if not all(isinstance(value, int | float) and math.isfinite(value) for value in (start, long)):
                raise InputError(
                    f"{path}: event {place}: ts and dur must be numbers, got {start!r}, {long!r}"
                )
            line = lines.get((event["pid"], event.get("tid")), "")
            peer = _TO_RANK.fullmatch(line)
            if peer:
                sent.append((rank, int(peer[1]), float(start), float(long), str(event.get("name"))))
            elif line == "calls":
                calls.append((float(start), float(start) + float(long), str(event.get("name"))))
    return rank, sent, calls


def _call_at(calls: Sequence[tuple[float, float, str]], start: float) -> int:
    """The number of the last call that had begun; clocks of ranks differ a little."""
    from bisect import bisect_right

    return max(bisect_right(calls, (start, math.inf, "")) - 1, 0)
