"""Schedules to files and back, in the formats `arborcast.schedule/1` and `arborcast.schedule/2`.

A schedule file holds its topology, so that it is complete and a stranger can replay it. Reading checks the
form only: a schedule that is well-formed but wrong loads, for the verifier to reject. In the second version
transfers may start and end at switches, by their names; it is written where one does, and not otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError, ScheduleError
from arborcast.synth.formats.atomic import replacing
from arborcast.synth.formats.collectives import demands_to_documents, read_demands
from arborcast.synth.formats.documents import (
    Document,
    bound_to_document,
    picked,
    prefixed,
    raising,
    read_bound,
    read_topology,
    topology_to_document,
)
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.formats.reading import (
    check_format,
    parse_json,
    read_text,
    shorten_path,
    without_collecting,
)
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Topology, Vertex

if TYPE_CHECKING:
    from arborcast.synth.implicit_schedule import AnySchedule

SCHEDULE_FORMAT = "arborcast.schedule/1"
SWITCHED_FORMAT = "arborcast.schedule/2"
MAX_SCHEDULE_BYTES = 1 << 30
LINES_AT_ONCE = 4096


def schedule_to_document(schedule: Schedule) -> Document:
    """The keys of a schedule file."""
    return {**_head(schedule), "transfers": transfers_to_documents(schedule)}


def transfers_to_documents(schedule: Schedule) -> list[Document]:
    """The transfers as files hold them."""
    label = schedule.topology.label
    return [
        {
            "chunk": transfer.chunk,
            "from": label(transfer.src),
            "to": label(transfer.dst),
            "via": [label(switch) for switch in transfer.via],
            "step": transfer.step,
            "reduce": transfer.reduce,
        }
        for transfer in schedule.transfers
    ]


def schedule_from_document(document: object, place: str) -> Schedule:
    """The schedule that a document describes; `place` (a file name) begins every error.

    Whether the schedule does what it claims is not checked here: see `synth.verify`.

    Raises:
        ScheduleError: another format or version, another shape, an index or number out of range.
    """
    from arborcast.synth.formats.shapes import ScheduleShape, check_shape

    with raising(ScheduleError):
        check_format(document, (SCHEDULE_FORMAT, SWITCHED_FORMAT), place)
        shape = check_shape(ScheduleShape, document, place)
        topology = read_topology(shape["topology"], place, "topology.")
        bound = read_bound(shape["bound"], topology, place, "bound.")
        rounds = shape.get("rounds")
        with prefixed(place):
            return Schedule(
                topology=topology,
                collective=_collective(shape["collective"]),
                method=read_method(shape["method"]),
                bound=bound,
                chunks=read_chunks(shape["chunks"]),
                transfers=read_transfers(shape["transfers"], topology, shape["format"] == SWITCHED_FORMAT),
                rate=shape["rate"],
                rounds=None if rounds is None else tuple(rounds),
                unit=shape.get("unit"),
            )


def read_explicit(path: Path | str, *, max_bytes: int = MAX_SCHEDULE_BYTES) -> Schedule:
    """The schedule in a file.

    Raises:
        InputError: the file cannot be read, is larger than `max_bytes`, or is no schedule file.
    """
    place = shorten_path(path)
    text = read_text(path, max_bytes=max_bytes)
    with without_collecting():
        return schedule_from_document(parse_json(text, place), place)


def write_explicit(schedule: Schedule, path: Path | str) -> None:
    """Write a schedule file, whole or not at all, one chunk or transfer a line.

    Raises:
        InputError: the file cannot be written, or a setting of the method has no place in it.
    """
    head = _head(schedule)
    chunks = map(dump, head.pop("chunks"))
    with replacing(path) as file:
        write_entries(file, head, {"chunks": chunks, "transfers": transfer_lines(schedule)})


def write_entries(file: BinaryIO, head: Document, entries: Mapping[str, Iterable[str]]) -> None:
    """Write a JSON object: the keys of the head a line each, then lists whose items are text, a line each."""
    lines = [f"{json.dumps(key)}: {dump(value)}" for key, value in head.items()]
    file.write(("{" + ",\n ".join(lines)).encode())
    for key, texts in entries.items():
        file.write(f',\n "{key}": ['.encode())
        rows = iter(texts)
        first = True
        # Some thousand at a time: neither a call for each nor all of them in memory once more.
        while batch := list(islice(rows, LINES_AT_ONCE)):
            file.write((("" if first else ",\n  ") + ",\n  ".join(batch)).encode())
            first = False
        file.write(b"]")
    file.write(b"}\n")


def transfer_lines(schedule: Schedule) -> Iterator[str]:
    """The transfers as JSON, written without a document for each: there may be millions."""
    topology = schedule.topology
    name = [dump(topology.label(vertex)) for vertex in range(topology.holders)]
    moves = schedule.columns
    via = [dump([topology.label(switch) for switch in way]) for way in moves.ways]
    columns = (moves.chunk, moves.src, moves.dst, moves.way, moves.step, moves.reduce)
    for chunk, src, dst, way, step, reduce in zip(*(each.tolist() for each in columns), strict=True):
        yield (
            f'{{"chunk": {chunk}, "from": {name[src]}, "to": {name[dst]}, "via": {via[way]}, '
            f'"step": {step}, "reduce": {"true" if reduce else "false"}}}'
        )


def dump(value: object) -> str:
    """A value as JSON on one line."""
    return json.dumps(value, allow_nan=False)


def _head(schedule: Schedule) -> Document:
    """Everything but the transfers, which are written as they come."""
    collective = schedule.collective
    return {
        "format": SWITCHED_FORMAT if schedule.uses_switches else SCHEDULE_FORMAT,
        "topology": topology_to_document(schedule.topology),
        "collective": {
            "kind": collective.kind.value,
            "root": collective.root,
            "ranks": list(collective.ranks),
            **({"demands": demands_to_documents(collective.demands)} if collective.demands else {}),
            **({"sizes": [list(row) for row in collective.sizes]} if collective.sizes else {}),
        },
        "method": method_to_document(schedule.method),
        "rate": str(schedule.rate),
        "bound": bound_to_document(schedule.bound, schedule.topology),
        "rounds": None if schedule.rounds is None else list(schedule.rounds),
        **({} if schedule.unit is None else {"unit": str(schedule.unit)}),
        "chunks": [chunk_to_document(chunk) for chunk in schedule.chunks],
    }


def method_to_document(method: Method) -> Document:
    """The method with its settings.

    Raises:
        ScheduleError: a setting would stand twice in the file.
    """
    names = [name for name, _ in method.settings]
    for name in names:
        if name in {"name", "seed"} or names.count(name) > 1:
            raise ScheduleError(f"method {method.name}: setting {name} must not stand twice in the file")
    return {"name": method.name, "seed": method.seed, **dict(method.settings)}


def said_of(schedule: AnySchedule) -> Document:
    """What answers say of each of their schedules."""
    method = schedule.method
    return {"method": method.name, "settings": dict(method.settings), **picked(schedule, "rate", "steps")}


def chunk_to_document(chunk: Chunk) -> Document:
    """A chunk; the demand only where it has one."""
    demand = {} if chunk.demand is None else {"demand": chunk.demand}
    return {"share": str(chunk.share), "owner": chunk.owner, "target": chunk.target, **demand}


def read_kind(kind: str) -> Kind:
    """The kind of collective of this name."""
    kinds = [known.value for known in Kind]
    if kind not in kinds:
        raise InputError(f"collective.kind: must be one of {', '.join(kinds)}, got {shorten(kind)}")
    return Kind(kind)


def _collective(shape: Mapping[str, Any]) -> Collective:
    kind = read_kind(shape["kind"])
    demands = read_demands(shape.get("demands", ()), "collective.demands")
    sizes = tuple(map(tuple, shape.get("sizes", ())))
    return Collective(kind, tuple(shape["ranks"]), shape.get("root"), demands, sizes)


def read_method(shape: Mapping[str, Any]) -> Method:
    """The method of a document that has the shape."""
    settings = {key: value for key, value in shape.items() if key not in {"name", "seed"}}
    for key, value in settings.items():
        if value is not None and not isinstance(value, str | int):
            name = key if key.isidentifier() else shorten(key)
            rule = "must be text, a whole number or null"
            raise InputError(f"method.{name}: {rule}, got {shorten(value)}")
    return Method(shape["name"], shape.get("seed", 0), tuple(settings.items()))


def read_chunks(shapes: Sequence[Mapping[str, Any]]) -> tuple[Chunk, ...]:
    """The chunks of a document that has the shape."""
    return tuple(Chunk(c["share"], c["owner"], c.get("target"), c.get("demand")) for c in shapes)


def read_transfers(
    shapes: Sequence[Mapping[str, Any]], topology: Topology, at_switches: bool
) -> tuple[Transfer, ...]:
    """The transfers of a document that has the shape; switches are known by name.

    Only where `at_switches` is set may they start and end there.
    """
    numbers = {switch.name: topology.ranks + index for index, switch in enumerate(topology.switches)}

    def end(index: int, key: str) -> Vertex:
        label = shapes[index][key]
        if isinstance(label, str) and not at_switches:
            raise InputError(f"transfers[{index}].{key}: must be a whole number, got {shorten(label)}")
        if isinstance(label, str) and label not in numbers:
            rule = "must be a rank or name a switch of the topology"
            raise InputError(f"transfers[{index}].{key}: {rule}, got {shorten(label)}")
        if isinstance(label, int) and label >= topology.ranks:
            raise InputError(f"transfer {index}: rank must be in 0..{topology.ranks - 1}, got {label}")
        return numbers[label] if isinstance(label, str) else label

    ranks = range(topology.ranks)
    transfers = []
    for index, shape in enumerate(shapes):
        try:
            via = tuple([numbers[name] for name in shape.get("via", ())])
        except KeyError as error:
            raise InputError(
                f"transfers[{index}].via: must name switches of the topology, got {shorten(error.args[0])}"
            ) from error
        src, dst = shape["from"], shape["to"]
        if src not in ranks or dst not in ranks:
            src, dst = end(index, "from"), end(index, "to")
        transfers.append(Transfer(shape["chunk"], src, dst, shape["step"], shape.get("reduce", False), via))
    return tuple(transfers)
