"""A trace of a group's calls on one rank, for a viewer: Perfetto, or chrome://tracing.

    calls          [ allreduce 4 MiB               ]
    to rank 1      [ send 512 KiB ][ send 512 KiB ]
    from rank 2    [ receive and add 512 KiB ][ .. ]

Of each call a bar; below, per peer and direction, a bar for each message, from the end of the one before (or
the begin of the call) until it was handed over, or all of it was there. So a long bar is a wait.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from arborcast.backends.dataflow.recording import RecordedBytes, Recorder
from arborcast.backends.dataflow.task_graph import Act, TaskGraph
from arborcast.backends.group.history import EPOCH_NS, Call
from arborcast.synth.formats.atomic import write_atomically
from arborcast.synth.formats.sizes import format_size

_WORDS = {Act.SEND: "send", Act.RECEIVE: "receive", Act.COMBINE: "receive and add"}


class Tracer:
    """Collects events of Chrome's trace format; times of day in us, the process is the rank of the job.

    Attributes:
        recorder: of what passes the channels; to be put before the engine's network.

    Args:
        rank: in the group.
        global_ranks: of the group's ranks in the job.
    """

    def __init__(self, rank: int, global_ranks: Sequence[int]) -> None:
        self.recorder = Recorder()
        self._pid = global_ranks[rank]
        self._global_ranks = global_ranks
        self._lines: dict[str, int] = {}
        self._events = [self._about("process_name", f"rank {self._pid}", 0)]

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
        if graph is not None:
            for way, orders, moments in (
                ("to", graph.sends, self.recorder.sent),
                ("from", graph.receives, self.recorder.received),
            ):
                of_peer: dict[int, list[RecordedBytes]] = defaultdict(list)
                for moment in moments:
                    of_peer[moment.peer].append(moment)
                for peer, numbers in orders.items():
                    line = f"{way} rank {self._global_ranks[peer]}"
                    self._messages(line, call.begun_ns, graph, numbers, of_peer[peer], item_bytes)
        self.recorder.forget()

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
        moments: Iterable[RecordedBytes],
        item_bytes: int,
    ) -> None:
        """A bar of each message; bytes tell where one ends and the next begins."""
        passed, count, due, end_ns = iter(moments), 0, 0, begin_ns
        for number in numbers:
            action = graph.actions[number]
            nbytes = action.into.length * item_bytes
            due += nbytes
            while count < due:
                moment = next(passed, None)
                if moment is None:
                    return
                count += moment.count
                end_ns = int(moment.at * 1e9)
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
