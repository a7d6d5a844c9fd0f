"""A trace of a group's calls on one rank, for a viewer: Perfetto, or chrome://tracing.

    calls          [ allreduce 4 MiB               ]
    to rank 1      [ send 512 KiB ][ send 512 KiB ]
    from rank 2    [ receive and add 512 KiB ][ .. ]

Of each call a bar; below, per peer and direction, a bar for each message, from the end of the one before (or
the begin of the call) until it was handed over, or all of it was there. So a long bar is a wait. Where
several cables lead to a peer, each has its lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from arborcast.backends.dataflow.task_graph import Act, TaskGraph
from arborcast.backends.group.history import EPOCH_NS, Call
from arborcast.backends.transport.socket_channel import SocketChannel
from arborcast.synth.formats.atomic import write_atomically
from arborcast.synth.formats.sizes import format_size

MOMENTS = 1 << 16
"""Of each channel in one run, at most."""

_WORDS = {Act.SEND: "send", Act.RECEIVE: "receive", Act.COMBINE: "receive and add"}


class Tracer:
    """Collects events of Chrome's trace format; times of day in us, the process is the rank of the job.

    Args:
        rank: in the group.
        global_ranks: of the group's ranks in the job.
        channels: of the group, as they are made; they note what passes.
    """

    def __init__(self, rank: int, global_ranks: Sequence[int], channels: Mapping[int, SocketChannel]) -> None:
        self._channels = channels
        self._watched: set[int] = set()
        self._pid = global_ranks[rank]
        self._global_ranks = global_ranks
        self._lines: dict[str, int] = {}
        self._events = [self._about("process_name", f"rank {self._pid}", 0)]

    def watch(self) -> None:
        """A call begins: have channels that are new note what passes, and forget what passed before."""
        for peer in self._channels:
            if peer not in self._watched:
                self._watched.add(peer)
                self._channels[peer].record(MOMENTS)
            self._channels[peer].recorded()

    def add(self, call: Call, graph: TaskGraph | None = None, item_bytes: int = 1) -> None:
        """A call that has ended.

        Args:
            call: which one.
            graph: what this rank did in it; None where gloo served it.
            item_bytes: of an element.
        """
        document = call.as_document()
        taken = {key: document[key] for key in ("sequence", "bytes", "elements", "schedule")}
        self._bar("calls", call.title, call.begun_ns, call.ended_ns, taken)
        if graph is None:
            return
        for peer in sorted({*graph.sends, *graph.receives}):
            moments = self._channels[peer].recorded()
            lane, of = divmod(peer, len(self._global_ranks))
            cable = f", cable {lane + 1}" if lane else ""
            for way, orders, sign in (("to", graph.sends, 1), ("from", graph.receives, -1)):
                line = f"{way} rank {self._global_ranks[of]}{cable}"
                passed = ((at, sign * count) for at, count in moments if sign * count > 0)
                self._messages(line, call.begun_ns, graph, orders.get(peer, ()), passed, item_bytes)

    def write(self, path: Path | str) -> None:
        """Write the file.

        Raises:
            InputError: it cannot be written.
        """
        events = ",\n".join(json.dumps(event) for event in self._events)
        write_atomically(path, f"[\n{events}\n]\n")

    def _messages(
        self,
        line: str,
        begin_ns: int,
        graph: TaskGraph,
        numbers: Iterable[int],
        moments: Iterator[tuple[float, int]],
        item_bytes: int,
    ) -> None:
        """A bar of each message; bytes tell where one ends and the next begins."""
        count, due, end_ns = 0, 0, begin_ns
        for number in numbers:
            action = graph.action(number)
            nbytes = action.into.length * item_bytes
            due += nbytes
            while count < due:
                moment = next(moments, None)
                if moment is None:
                    return
                count += moment[1]
                end_ns = int(moment[0] * 1e9)
            self._bar(
                line, f"{_WORDS[action.act]} {format_size(nbytes)}", begin_ns, end_ns, {"bytes": nbytes}
            )
            begin_ns = end_ns

    def _bar(self, line: str, title: str, begin_ns: int, end_ns: int, details: Mapping[str, Any]) -> None:
        if line not in self._lines:
            self._lines[line] = len(self._lines)
            self._events.append(self._about("thread_name", line, self._lines[line]))
        # A float holds times of day to a quarter of 1 us: one bar must end exactly where the next begins.
        begin, end = (EPOCH_NS + begin_ns) / 1000, (EPOCH_NS + end_ns) / 1000
        self._events.append(
            {
                "name": title,
                "ph": "X",
                "pid": self._pid,
                "tid": self._lines[line],
                "ts": begin,
                "dur": end - begin,
                "args": dict(details),
            }
        )

    def _about(self, what: str, name: str, line: int) -> dict[str, Any]:
        return {"name": what, "ph": "M", "pid": self._pid, "tid": line, "args": {"name": name}}
