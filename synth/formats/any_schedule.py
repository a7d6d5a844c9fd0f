"""Schedule files of all formats: the explicit ones and the implicit ones, told apart by their format key."""

from __future__ import annotations

import re
from pathlib import Path

from arborcast.synth.errors import ScheduleError
from arborcast.synth.formats.documents import Document, raising
from arborcast.synth.formats.implicit_documents import (
    IMPLICIT_FORMAT,
    SWITCHED_IMPLICIT_FORMAT,
    implicit_from_document,
    implicit_to_document,
    write_implicit,
)
from arborcast.synth.formats.reading import (
    check_format,
    parse_json,
    read_text,
    shorten_path,
    without_collecting,
)
from arborcast.synth.formats.schedules import (
    MAX_SCHEDULE_BYTES,
    SCHEDULE_FORMAT,
    SWITCHED_FORMAT,
    schedule_from_document,
    schedule_to_document,
    write_explicit,
)
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Schedule

_HEAD = 1000
"""Characters within which a schedule file names its format."""

_OTHER_FILES = {
    "topology": re.compile(r'(^|[{,])\s*"?(links|ranks|switches)"?\s*:|^\s*(<system|GPU0\s)', re.MULTILINE),
    "collective": re.compile(r'(^|[{,])\s*"?blocks"?\s*:', re.MULTILINE),
}
"""What people name instead of a schedule, and how it begins."""


def read_schedule(path: Path | str, *, max_bytes: int = MAX_SCHEDULE_BYTES) -> Schedule | ImplicitSchedule:
    """The schedule in a file, in the form in which it stands there.

    Raises:
        InputError: the file cannot be read, is larger than `max_bytes`, or is no schedule file.

    Examples:
        >>> synth.write_schedule(synth.solve(topologies.load("ring:4"), "broadcast", root=1), "one.json")
        >>> synth.read_schedule("one.json").collective.root
        1
    """
    place = shorten_path(path)
    text = read_text(path, max_bytes=max_bytes)
    for what, pattern in _OTHER_FILES.items():
        if '"format"' not in text[:_HEAD] and pattern.search(text):
            raise ScheduleError(f"{place}: must be a schedule, as `synth solve -o` writes it, got a {what}")
    with without_collecting():
        return any_schedule_from_document(parse_json(text, place), place)


def any_schedule_from_document(document: object, place: str) -> Schedule | ImplicitSchedule:
    """The schedule that a document describes; `place` (a file name) begins every error.

    Raises:
        ScheduleError: none of the formats, another shape, an index or number out of range.
    """
    implicit = (IMPLICIT_FORMAT, SWITCHED_IMPLICIT_FORMAT)
    with raising(ScheduleError):
        found = check_format(document, (SCHEDULE_FORMAT, SWITCHED_FORMAT, *implicit), place)
    read = implicit_from_document if found in implicit else schedule_from_document
    return read(document, place)


def any_schedule_to_document(schedule: Schedule | ImplicitSchedule) -> Document:
    """The keys of a schedule file in the format of the schedule's own form."""
    if isinstance(schedule, ImplicitSchedule):
        return implicit_to_document(schedule)
    return schedule_to_document(schedule)


def write_schedule(schedule: Schedule | ImplicitSchedule, path: Path | str) -> None:
    """Write a schedule file in the format of the schedule's own form, whole or not at all.

    Raises:
        InputError: the file cannot be written, or a setting of the method has no place in it.

    Examples:
        >>> schedule = synth.solve(topologies.load("ring:4"), "allreduce")
        >>> synth.write_schedule(schedule, "ring.json.gz")  # compressed, as the name says
        >>> synth.read_schedule("ring.json.gz") == schedule
        True
    """
    if isinstance(schedule, ImplicitSchedule):
        write_implicit(schedule, path)
    else:
        write_explicit(schedule, path)
