"""Spare schedules to files and back, in the format `arborcast.spares/1`: a schedule and differences.

Chunks and transfers of a difference are rows of numbers, so that a failure takes a tenth of a schedule file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict  # pydantic refuses typing's own before Python 3.12

from arborcast.synth.errors import InputError, ScheduleError
from arborcast.synth.faults.backup_schedules import BackupSchedules, Difference, Failure, Part
from arborcast.synth.formats.atomic import replacing
from arborcast.synth.formats.documents import Document, bound_to_document, picked, prefixed, read_bound
from arborcast.synth.formats.reading import (
    check_format,
    head_of,
    parse_json,
    read_text,
    shorten_path,
    without_collecting,
)
from arborcast.synth.formats.schedules import (
    dump,
    method_to_document,
    read_method,
    schedule_from_document,
    schedule_to_document,
    write_entries,
)
from arborcast.synth.formats.shapes import (
    MAPPING,
    MAX_INT,
    MAX_STEP,
    AnyNumber,
    BoundShape,
    MethodShape,
    check_shape,
)
from arborcast.synth.schedule import Chunk, Schedule, Transfer
from arborcast.synth.topology import Topology

SPARES_FORMAT = "arborcast.spares/1"
MAX_SPARES_BYTES = 1 << 30

_Number = Annotated[int, Field(ge=0, le=MAX_INT)]
_Numbers = list[_Number]


@MAPPING
class _PartShape(TypedDict):
    share: AnyNumber
    chunk: list[_Number | None]  # owner, target, demand
    like: _Number | None
    left_out: _Numbers
    added: list[_Numbers]  # source, destination, step, whether it reduces, the switches between


@MAPPING
class _FailureShape(TypedDict):
    links: list[_Numbers]
    ranks: _Numbers


@MAPPING
class _DifferenceShape(_FailureShape):
    method: MethodShape
    rate: AnyNumber
    bound: BoundShape
    rounds: list[Annotated[int, Field(ge=1, le=MAX_INT)]] | None
    unit: AnyNumber | None
    chunks: list[_PartShape]


@MAPPING
class _NoneShape(_FailureShape):
    why: str


@MAPPING
class _SparesShape(TypedDict):
    format: str
    whole: dict[str, Any]
    failures: list[_DifferenceShape]
    none: list[_NoneShape]


def is_spares(path: Path | str) -> bool:
    """Whether a file says that it holds spare schedules; False where it cannot be read."""
    return f'"{SPARES_FORMAT.partition("/")[0]}/' in head_of(path, 200)


def write_spares(spares: BackupSchedules, path: Path | str) -> None:
    """Write a file of spare schedules, whole or not at all, one failure a line.

    Raises:
        InputError: the file cannot be written.
    """
    head = {"format": SPARES_FORMAT, "whole": schedule_to_document(spares.whole)}
    with replacing(path) as file:
        write_entries(file, head, {"failures": _lines(spares), "none": _why(spares)})


def digest_of(spares: BackupSchedules) -> str:
    """Another one for other schedules."""
    text = "".join([dump(schedule_to_document(spares.whole)), *_lines(spares)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_spares(path: Path | str, *, max_bytes: int = MAX_SPARES_BYTES) -> BackupSchedules:
    """The spare schedules in a file; what they do is for `BackupSchedules.flaws` to say.

    Raises:
        InputError: the file cannot be read, is larger than `max_bytes`, or holds something else.
    """
    place = shorten_path(path)
    text = read_text(path, max_bytes=max_bytes)
    with without_collecting():
        return spares_from_document(parse_json(text, place), place)


def spares_from_document(document: object, place: str) -> BackupSchedules:
    """The spare schedules that a document holds; `place` (a file name) begins every error.

    Raises:
        InputError: another format or shape, a number out of its range.
    """
    check_format(document, (SPARES_FORMAT,), place)
    shape = check_shape(_SparesShape, document, place)
    whole = schedule_from_document(shape["whole"], f"{place}: whole")
    seen: dict[Failure, str] = {}

    def failure(entry: _FailureShape, where: str) -> Failure:
        found = Failure.of([_pair(pair, where) for pair in entry["links"]], entry["ranks"])
        if found in seen:
            raise InputError(f"{where}: must not be the failure of {seen[found]} again")
        seen[found] = where
        return found

    differences = []
    for index, entry in enumerate(shape["failures"]):
        where = f"{place}: failures[{index}]"
        differences.append(_difference(entry, failure(entry, where), whole, where))
    none = [(failure(entry, f"{place}: none[{i}]"), entry["why"]) for i, entry in enumerate(shape["none"])]
    return BackupSchedules(whole, tuple(differences), tuple(none))


def _pair(pair: list[int], where: str) -> tuple[int, int]:
    if len(pair) != 2:
        raise InputError(f"{where}.links: must be pairs of vertices, got {pair}")
    return pair[0], pair[1]


def _difference(entry: _DifferenceShape, failure: Failure, whole: Schedule, where: str) -> Difference:
    with prefixed(where):
        left = failure.left_of(whole.topology).topology
    bound = read_bound(entry["bound"], left, where, "bound.")
    with prefixed(where):
        parts = [_part(number, part, left) for number, part in enumerate(entry["chunks"])]
        method = read_method(entry["method"])
        rounds = None if entry["rounds"] is None else tuple(entry["rounds"])
        found = Difference(failure, method, bound, entry["rate"], tuple(parts), rounds, entry["unit"])
        found.applied(whole)  # so that whoever needs it later meets no error
    return found


def _part(number: int, shape: _PartShape, left: Topology) -> Part:
    match shape["chunk"]:
        case [int(owner), target, demand]:
            chunk = Chunk(shape["share"], owner, target, demand)
        case other:
            raise ScheduleError(f"chunks[{number}].chunk: must be owner, target and demand, got {other}")
    added = []
    for index, row in enumerate(shape["added"]):
        place = f"chunks[{number}].added[{index}]"
        if len(row) < 4 or row[3] > 1 or row[2] > MAX_STEP:
            raise ScheduleError(
                f"{place}: must be source, destination, step (to {MAX_STEP}), 0 or 1, switches; got {row}"
            )
        for vertex in (*row[:2], *row[4:]):
            if vertex >= left.size:
                raise ScheduleError(f"{place}: vertex must be in 0..{left.size - 1}, got {vertex}")
        added.append(Transfer(number, row[0], row[1], row[2], bool(row[3]), tuple(row[4:])))
    return Part(chunk, shape["like"], tuple(shape["left_out"]), tuple(added))


def _lines(spares: BackupSchedules) -> Iterator[str]:
    for it in spares.differences:
        left = it.failure.left_of(spares.whole.topology).topology
        document = {
            **_failure(it.failure),
            "method": method_to_document(it.method),
            **picked(it, "rate", "rounds", "unit"),
            "bound": bound_to_document(it.bound, left),
            "chunks": [_chunk(part) for part in it.parts],
        }
        yield json.dumps(document, separators=(",", ":"), allow_nan=False)


def _chunk(part: Part) -> Document:
    chunk = part.chunk
    return {
        "share": str(chunk.share),
        "chunk": [chunk.owner, chunk.target, chunk.demand],
        "like": part.like,
        "left_out": list(part.left_out),
        "added": [[it.src, it.dst, it.step, int(it.reduce), *it.via] for it in part.added],
    }


def _why(spares: BackupSchedules) -> Iterator[str]:
    return (dump({**_failure(failure), "why": why}) for failure, why in spares.without)


def _failure(failure: Failure) -> Document:
    return {"links": [list(hop) for hop in failure.links], "ranks": list(failure.ranks)}
