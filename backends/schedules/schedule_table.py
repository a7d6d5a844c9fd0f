"""The schedules of one collective on one fabric, and from which message size on each of them serves.

A table is what rank 0 finds and every rank runs, so that it travels as bytes with a hash, in the format
`arborcast.table/1`: a topology, a collective, and schedules as `synth.formats` writes them.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from arborcast.backends.lowering.additions import adds_alike
from arborcast.backends.lowering.rank_view import partners_of
from arborcast.synth.collective import Collective
from arborcast.synth.errors import InputError
from arborcast.synth.formats.any_schedule import any_schedule_from_document, any_schedule_to_document
from arborcast.synth.formats.reading import check_format, parse_json
from arborcast.synth.formats.sizes import format_size
from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
from arborcast.synth.selection import Choice
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Topology
from arborcast.synth.verification.verifier import verify

TABLE_FORMAT = "arborcast.table/1"

MAX_TABLE_BYTES = 1 << 30
"""Bytes beyond which a table is refused."""

_SHARED = ("topology", "collective")  # the same in all schedules, so they stand in the document once


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A schedule and the bytes of the buffer from which on it serves, up to the next entry."""

    from_bytes: int
    schedule: AnySchedule

    def __str__(self) -> str:
        """As logs and `explain` show it."""
        size = f" from {format_size(self.from_bytes)}" if self.from_bytes else ""
        return f"{describe(self.schedule)}{size}"


@dataclass(frozen=True, slots=True)
class KernelEntry(TableEntry):
    """An entry of a table whose schedule the kernel runs."""

    def __str__(self) -> str:
        """As logs show it."""
        return f"{TableEntry.__str__(self)} by the kernel"


@dataclass(frozen=True)
class ScheduleTable:
    """Which schedule serves which size.

    Schedules are all written out, or all in implicit form with the same translations.

    Attributes:
        collective: what all its schedules do.
        entries: with ascending `from_bytes`, which begin at 0.
        is_cut_short: whether a deadline passed before all candidates were compared.

    Raises:
        InputError: there is no entry, they are not in order, or schedules of different things.
    """

    collective: Collective
    entries: tuple[TableEntry, ...]
    is_cut_short: bool = False

    @classmethod
    def of(cls, choices: Iterable[Choice], *, is_cut_short: bool = False) -> ScheduleTable:
        """The table of what a comparison chose; the first choice serves whatever is smaller, too."""
        choices = tuple(choices)
        if not choices:
            raise InputError("table: must have at least one schedule, got none")
        entries = tuple(
            TableEntry(choice.from_bytes if index else 0, choice.schedule)
            for index, choice in enumerate(choices)
        )
        return cls(choices[0].schedule.collective, entries, is_cut_short)

    def __post_init__(self) -> None:
        """Check the rules of the class docstring."""
        if not self.entries:
            raise InputError("entries: must have at least one schedule, got none")
        before = -1
        for index, entry in enumerate(self.entries):
            size, rule = entry.from_bytes, "must be above the one before it" if index else "must be 0"
            if size <= before or (index == 0 and size != 0):
                raise InputError(f"entries[{index}].from_bytes: {rule}, got {size}")
            before = size
            if entry.schedule.collective != self.collective:
                raise InputError(f"entries[{index}].schedule: must be of the collective of the table")
            if entry.schedule.topology != self.topology:
                raise InputError(f"entries[{index}].schedule: must be of the topology of the table")
            if _translations(entry.schedule) != _translations(self.entries[0].schedule):
                raise InputError(f"entries[{index}].schedule: must be in the form of the first")

    @property
    def topology(self) -> Topology:
        """The fabric of all its schedules."""
        return self.entries[0].schedule.topology

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the bytes, in hexadecimal: the same on ranks that run the same schedules."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def at(self, size_bytes: int) -> TableEntry:
        """The entry that serves a buffer of so many bytes (as algbw counts them)."""
        return self.entries[max(bisect_right(self._starts, size_bytes) - 1, 0)]

    def peers(self, rank: int) -> frozenset[int]:
        """The ranks that exchange messages with `rank` in any of its schedules."""
        return frozenset[int]().union(*(partners_of(entry.schedule, rank) for entry in self.entries))

    def renamed(self, name: str) -> ScheduleTable:
        """The same on a topology of another name."""
        if name == self.topology.name:
            return self
        topology = replace(self.topology, name=name)
        entries = (
            replace(entry, schedule=replace(entry.schedule, topology=topology)) for entry in self.entries
        )
        return replace(self, entries=tuple(entries))

    def summary(self) -> str:
        """One line for a log: which schedule serves which sizes."""
        kind, root = self.collective.kind.value, self.collective.root
        what = (
            f"{kind} on {self.topology.name}"
            if root is None
            else f"{kind} from {root} on {self.topology.name}"
        )
        cut = "; cut short by the deadline" if self.is_cut_short else ""
        return f"{what}: {', '.join(map(str, self.entries))}{cut}"

    def to_bytes(self) -> bytes:
        """The document of the table; the same table gives the same bytes."""
        documents = [any_schedule_to_document(entry.schedule) for entry in self.entries]
        document = {
            "format": TABLE_FORMAT,
            **{key: documents[0][key] for key in _SHARED},
            "cut_short": self.is_cut_short,
            "entries": [
                {
                    "from_bytes": entry.from_bytes,
                    "schedule": {key: value for key, value in found.items() if key not in _SHARED},
                }
                for entry, found in zip(self.entries, documents, strict=True)
            ],
        }
        return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes, source: str) -> ScheduleTable:
        """The table in a document.

        Whether its schedules do what they claim is not checked here: see `check`.

        Args:
            data: what `to_bytes` gave.
            source: where it is from; it begins every error.

        Raises:
            InputError: another format, a key that is missing or unknown, a value that breaks a rule.
        """
        if len(data) > MAX_TABLE_BYTES:
            raise InputError(f"{source}: must be at most {MAX_TABLE_BYTES} bytes, got {len(data)}")
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{source}: must be UTF-8 text, got byte {data[error.start]:#04x} at {error.start}"
            ) from error
        from arborcast.synth.formats.shapes import TableShape, check_shape  # pydantic: 5 MB of every rank

        document = parse_json(text, source)
        check_format(document, (TABLE_FORMAT,), source)
        document = check_shape(TableShape, document, source)
        shared = {key: document[key] for key in _SHARED}
        entries = tuple(
            _entry(entry, shared, source, f"entries[{index}]")
            for index, entry in enumerate(document["entries"])
        )
        try:
            return cls(entries[0].schedule.collective, entries, document["cut_short"])
        except InputError as error:
            raise InputError(f"{source}: {error}") from error

    def check(self, source: str, *, alike: bool = True) -> ScheduleTable:
        """This table, whose schedules have been replayed: a checksum does not tell who made them.

        That takes a third of the time of reading it.

        Args:
            source: where it is from; it begins the error.
            alike: see `flaw_of`.

        Raises:
            InputError: a schedule does not do what it should, or ranks by it differ in the bits of sums.
        """
        for index, entry in enumerate(self.entries):
            if flaw := flaw_of(entry.schedule, alike=alike):
                raise InputError(f"{source}: entries[{index}]: {flaw}")
        return self

    @cached_property
    def _starts(self) -> list[int]:
        return [entry.from_bytes for entry in self.entries]


def _translations(schedule: AnySchedule) -> Translations | None:
    return schedule.translations if isinstance(schedule, ImplicitSchedule) else None


def flaw_of(schedule: AnySchedule, *, alike: bool = True) -> str | None:
    """Why no rank may run a schedule; None where nothing is wrong with it.

    Args:
        schedule: of a table.
        alike: whether floating-point sums must have the same bits on all ranks by it: replicas that differ
            drift apart.
    """
    verdict = verify(schedule)
    if not verdict.correct:
        return f"a schedule that is not correct: {verdict.errors[0]}"
    return None if not alike or adds_alike(schedule) else "a schedule whose ranks add in different orders"


def describe(schedule: AnySchedule) -> str:
    """A schedule in a few words: its method, its shape, how near it is to what is possible."""
    settings = dict(schedule.method.settings)
    count = schedule.chunk_count
    if schedule.rounds is not None and "chunks" in settings:
        shape = f"{settings['chunks']} chunks, {len(schedule.rounds)} steps, {sum(schedule.rounds)} rounds"
    elif schedule.method.name in {"trees", "mwu", "symmetric"}:
        shape = f"{count} tree{'' if count == 1 else 's'}, height {schedule.height}"
    elif "rings" in settings:
        shape = f"{settings['rings']} rings"
    else:
        shape = f"{count} chunks, {schedule.steps} steps"
    together = settings.get("jointly")
    if isinstance(together, int):
        shape += f", with {together - 1} other groups"
    rate, limit = schedule.rate, schedule.bound.rate
    quality = "optimal" if rate == limit else f"{float(rate / limit):.0%} of {float(limit):.4g}"
    return f"{schedule.method.name} ({shape}, {float(rate):.4g} GB/s, {quality})"


def _entry(shape: Mapping[str, Any], shared: Mapping[str, Any], source: str, place: str) -> TableEntry:
    for key in _SHARED:
        if key in shape["schedule"]:
            raise InputError(f"{source}: {place}.schedule: key {key} must stand once, beside the entries")
    schedule = any_schedule_from_document({**shape["schedule"], **shared}, f"{source}: {place}.schedule")
    return TableEntry(shape["from_bytes"], schedule)
