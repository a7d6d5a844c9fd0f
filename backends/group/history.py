"""What a group has done on this rank: its last calls one by one, all of them in sum.

The last calls are kept as torch's flight recorder keeps those of its own backends, and by its variables:
TORCH_FR_BUFFER_SIZE says how many, TORCH_FR_DUMP_TEMP_FILE where a process writes them when a group of it
fails, as JSON: that name with the rank of the process and ".json" behind it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from arborcast.backends.schedules.schedule_table import KernelEntry, TableEntry
from arborcast.backends.transport.fingerprint import CollectiveFingerprint
from arborcast.synth.errors import InputError
from arborcast.synth.formats.atomic import write_atomically
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.formats.sizes import format_size

log = logging.getLogger(__name__)

KEPT = 2000
"""Calls, where TORCH_FR_BUFFER_SIZE does not say it: 0.3 MB."""

EPOCH_NS = time.time_ns() - time.perf_counter_ns()
"""What makes a time of day of a `perf_counter_ns`."""

_PEER = re.compile(r"\b(?:from|to|with) rank (\d+)")
_BLAME = re.compile(r"(?: \(|: )rank \d+ (?:gave up|closed|has left)")


def calls_to_keep() -> int:
    """How many, by TORCH_FR_BUFFER_SIZE; none where it is 0.

    Raises:
        InputError: it is not such a number.
    """
    said = os.environ.get("TORCH_FR_BUFFER_SIZE", "").strip() or str(KEPT)
    if not re.fullmatch(r"[0-9]{1,9}", said):
        raise InputError(f"TORCH_FR_BUFFER_SIZE: must be a number of calls below 1e9, got {shorten(said)}")
    return int(said)


@dataclass(slots=True, eq=False)
class Call:
    """One call of a collective that the group itself serves; its `with` block is the time it takes.

    Attributes:
        opening: what the ranks compared.
        nbytes: of the whole buffer.
        entry: of the table that serves it, or what else does; None where gloo does.
        is_counted: whether it is one of the caller's, not a part of another one.
        begun_ns: by `perf_counter_ns`, like the next one.
        ended_ns: 0 while it is under way, and where it failed.
        error: what it failed with.
    """

    _history: History
    opening: CollectiveFingerprint
    nbytes: int
    entry: TableEntry | str | None
    is_counted: bool
    begun_ns: int = 0
    ended_ns: int = 0
    error: str | None = None

    def __enter__(self) -> Call:
        """Begin."""
        self._history.calls.append(self)
        self.begun_ns = time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End, well or not."""
        if error is None:
            self.ended_ns = time.perf_counter_ns()
            self._history.end(self)
        else:
            self.error = str(error) or type(error).__name__
            if self._history.has_failed():  # and not only refused an argument
                self._history.fail(self.error)

    @property
    def title(self) -> str:
        """In a few words."""
        return f"{self.opening.kind} {format_size(self.nbytes) if self.nbytes else '0 B'}"

    def as_document(self) -> dict[str, Any]:
        """As the record of a flight shows it; times of day in ns, `waits_for` with ranks of the group."""
        opening = self.opening
        document = {
            "sequence": opening.sequence,
            "collective": str(opening.kind),
            "root": None if opening.root < 0 else opening.root,
            "bytes": self.nbytes,
            "elements": opening.elements,
            "schedule": None if self.entry is None else str(self.entry),
            "state": "failed" if self.error else "completed" if self.ended_ns else "started",
            "begun_ns": EPOCH_NS + self.begun_ns,
            "ended_ns": EPOCH_NS + self.ended_ns if self.ended_ns else None,
        }
        if not self.ended_ns:
            text = self._history.waits_for() if self.error is None else self.error
            own = _BLAME.split(text.split(f"{opening}: ", 1)[-1])[0]
            document["waits_for"] = sorted({int(peer) for peer in _PEER.findall(own)})
        if self.error is not None:
            document["error"] = self.error
        return document


class History:
    """The calls of one group on this rank; read from any thread.

    Attributes:
        calls: the last ones, in their order.
        waits_for: what the call under way waits for, in the words of errors.
        has_failed: see below.

    Args:
        rank: in the group.
        global_ranks: of the group's ranks in the job.
        waits_for: see above.
        has_failed: whether the group is of no more use.

    Raises:
        InputError: see `calls_to_keep`.
    """

    def __init__(
        self,
        rank: int,
        global_ranks: Sequence[int],
        waits_for: Callable[[], str] = str,
        has_failed: Callable[[], bool] = bool,
    ) -> None:
        self.calls: deque[Call] = deque(maxlen=calls_to_keep())
        self.waits_for = waits_for
        self.has_failed = has_failed
        self._rank = rank
        self._global_ranks = tuple(global_ranks)
        self._sums: dict[tuple[str, int], _Sum] = {}
        self._number = next(_numbers)
        self._failure: str | None = None
        self._is_detailed = dist.get_debug_level() == dist.DebugLevel.DETAIL
        _histories.add(self)

    def begin(
        self,
        opening: CollectiveFingerprint,
        nbytes: int,
        entry: TableEntry | str | None,
        is_counted: bool = True,
    ) -> Call:
        """A call that its `with` block serves; arguments as `Call` has them."""
        return Call(self, opening, nbytes, entry, is_counted)

    def end(self, call: Call) -> None:
        """Note that a call has ended well."""
        if self._is_detailed:
            took_ms = (call.ended_ns - call.begun_ns) / 1e6
            by = "gloo" if call.entry is None else call.entry
            log.info("rank %d: %s in %.3f ms by %s", self._global_ranks[self._rank], call.title, took_ms, by)
        if not call.is_counted:
            return
        key = str(call.opening.kind), id(call.entry)
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = _Sum(key[0], call.entry)
        found.calls += 1
        found.nbytes += call.nbytes
        found.ns += call.ended_ns - call.begun_ns

    def fail(self, reason: str) -> None:
        """Note that the group is of no more use; the first time, write the record where it is asked for."""
        if self._failure is None:
            self._failure = reason
            prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE")
            if prefix:
                path = Path(f"{prefix}{self._global_ranks[self._rank]}.json")
                try:
                    write_flights(path)
                except InputError as error:
                    log.warning("the last calls could not be written: %s", error)
                else:
                    log.warning("the last calls of this process are in %s", path)

    def counters(self) -> dict[str, dict[str, int | float]]:
        """See `SynthGroup.counters`."""
        counters: dict[str, dict[str, int | float]] = {}
        least_s: dict[str, float] = defaultdict(float)
        took_s: dict[str, float] = defaultdict(float)
        for found in list(self._sums.values()):
            kind, seconds = found.kind, found.ns / 1e9
            counter = counters.setdefault(kind, {"schedule": 0, "gloo": 0, "bytes": 0, "seconds": 0.0})
            counter["gloo" if found.entry is None else "schedule"] += found.calls
            if isinstance(found.entry, KernelEntry):
                counter["kernel"] = counter.get("kernel", 0) + found.calls
            counter["bytes"] += found.nbytes
            counter["seconds"] += seconds
            if isinstance(found.entry, TableEntry):
                least_s[kind] += found.nbytes / float(found.entry.schedule.bound.rate) / 1e9
                took_s[kind] += seconds
                counter["share"] = least_s[kind] / took_s[kind]
        return counters

    def as_document(self) -> dict[str, Any]:
        """The last calls."""
        return {
            "group": self._number,
            "rank": self._rank,
            "ranks": self._global_ranks,
            "failure": self._failure,
            "calls": [call.as_document() for call in list(self.calls)],
        }


@dataclass(slots=True)
class _Sum:
    """Of the calls of one kind that one entry has served; it keeps the entry, by whose id it is known."""

    kind: str
    entry: TableEntry | str | None
    calls: int = 0
    nbytes: int = 0
    ns: int = 0


def speak_up() -> None:
    """Have what is logged be seen where TORCH_DISTRIBUTED_DEBUG asks for it; what a script says goes."""
    package = logging.getLogger("arborcast")
    if dist.get_debug_level() == dist.DebugLevel.OFF:
        return
    if package.level == logging.NOTSET:
        package.setLevel(logging.INFO)
    if not package.hasHandlers():
        package.addHandler(logging.StreamHandler())


_histories: weakref.WeakSet[History] = weakref.WeakSet()
_numbers = count()  # of groups, as this process makes them


def write_flights(path: Path | str) -> None:
    """Write the last calls of all groups of this process, as JSON.

    Raises:
        InputError: the file cannot be written.
    """
    groups = [history.as_document() for history in list(_histories)]
    groups.sort(key=itemgetter("group"))
    document = {"format": "arborcast.flight/1", "at_ns": time.time_ns(), "groups": groups}
    write_atomically(path, json.dumps(document, indent=1) + "\n")
