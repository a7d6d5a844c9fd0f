"""Schedules to files and back, in the format `arborcast.schedule/1`.

A schedule file holds its topology, so that it is complete and a stranger can replay it. Reading checks the
form only: a schedule that is well-formed but wrong loads, for the verifier to reject.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from synth.collective import Collective, Kind
from synth.errors import InputError, ScheduleError
from synth.formats.atomic import replacing
from synth.formats.collectives import demands_to_documents, read_demands
from synth.formats.documents import (
    Document,
    bound_to_document,
    prefixed,
    raising,
    read_bound,
    read_topology,
    topology_to_document,
)
from synth.formats.numerals import shorten
from synth.formats.reading import parse_json, read_text, shorten_path
from synth.schedule import Chunk, Method, Schedule, Transfer
from synth.topology import Topology

SCHEDULE_FORMAT = "arborcast.schedule/1"
MAX_SCHEDULE_BYTES = 1 << 30


def schedule_to_document(schedule: Schedule) -> Document:
    """The keys of a schedule file."""
    label = schedule.topology.label
    return {
        **_head(schedule),
        "transfers": [
            {
                "chunk": transfer.chunk,
                "from": transfer.src,
                "to": transfer.dst,
                "via": [label(switch) for switch in transfer.via],
                "step": transfer.step,
                "reduce": transfer.reduce,
            }
            for transfer in schedule.transfers
        ],
    }


def schedule_from_document(document: object, place: str) -> Schedule:
    """The schedule that a document describes; `place` (a file name) begins every error.

    Whether the schedule does what it claims is not checked here: see `synth.verify`.

    Raises:
        ScheduleError: another format or version, another shape, an index or number out of range.
    """
    from synth.formats.shapes import ScheduleShape, check_shape

    with raising(ScheduleError):
        _check_format(document, place)
        shape = check_shape(ScheduleShape, document, place)
        topology = read_topology(shape["topology"], place, "topology.")
        bound = read_bound(shape["bound"], topology, place, "bound.")
        rounds = shape.get("rounds")
        with prefixed(place):
            return Schedule(
                topology=topology,
                collective=_collective(shape["collective"]),
                method=_method(shape["method"]),
                bound=bound,
                chunks=tuple(
                    Chunk(c["share"], c["owner"], c.get("target"), c.get("demand")) for c in shape["chunks"]
                ),
                transfers=_transfers(shape["transfers"], topology),
                rate=shape["rate"],
                rounds=None if rounds is None else tuple(rounds),
            )


def read_schedule(path: Path | str, *, max_bytes: int = MAX_SCHEDULE_BYTES) -> Schedule:
    """The schedule in a file.

    Raises:
        InputError: the file cannot be read, is larger than `max_bytes`, or is no schedule file.
    """
    place = shorten_path(path)
    return schedule_from_document(parse_json(read_text(path, max_bytes=max_bytes), place), place)


def write_schedule(schedule: Schedule, path: Path | str) -> None:
    """Write a schedule file, whole or not at all, one chunk or transfer a line.

    Raises:
        InputError: the file cannot be written, or a setting of the method has no place in it.
    """
    head = _head(schedule)
    entries = {"chunks": head.pop("chunks"), "transfers": schedule_to_document(schedule)["transfers"]}
    with replacing(path) as file:
        lines = [f"{json.dumps(key)}: {_dump(value)}" for key, value in head.items()]
        file.write(("{" + ",\n ".join(lines)).encode())
        for key, rows in entries.items():
            body = ",\n  ".join(map(_dump, rows))
            file.write(f',\n "{key}": [{body}]'.encode())
        file.write(b"}\n")


def _dump(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _head(schedule: Schedule) -> Document:
    """Everything but the transfers, which are written as they come."""
    method = schedule.method
    names = [name for name, _ in method.settings]
    for name in names:
        if name in {"name", "seed"} or names.count(name) > 1:
            raise ScheduleError(f"method {method.name}: setting {name} must not stand twice in the file")
    collective = schedule.collective
    return {
        "format": SCHEDULE_FORMAT,
        "topology": topology_to_document(schedule.topology),
        "collective": {
            "kind": collective.kind.value,
            "root": collective.root,
            "ranks": list(collective.ranks),
            **({"demands": demands_to_documents(collective.demands)} if collective.demands else {}),
        },
        "method": {"name": method.name, "seed": method.seed, **dict(method.settings)},
        "rate": str(schedule.rate),
        "bound": bound_to_document(schedule.bound, schedule.topology),
        "rounds": None if schedule.rounds is None else list(schedule.rounds),
        "chunks": [
            {
                "share": str(chunk.share),
                "owner": chunk.owner,
                "target": chunk.target,
                **({} if chunk.demand is None else {"demand": chunk.demand}),
            }
            for chunk in schedule.chunks
        ],
    }


def _check_format(document: object, place: str) -> None:
    found = document.get("format") if isinstance(document, dict) else None
    if found != SCHEDULE_FORMAT:
        raise InputError(f"{place}: format: must be {SCHEDULE_FORMAT}, got {shorten(found)}")


def _collective(shape: Mapping[str, Any]) -> Collective:
    kinds = [known.value for known in Kind]
    if shape["kind"] not in kinds:
        raise InputError(f"collective.kind: must be one of {', '.join(kinds)}, got {shorten(shape['kind'])}")
    demands = read_demands(shape.get("demands", ()), "collective.demands")
    return Collective(Kind(shape["kind"]), tuple(shape["ranks"]), shape.get("root"), demands)


def _method(shape: Mapping[str, Any]) -> Method:
    settings = {key: value for key, value in shape.items() if key not in {"name", "seed"}}
    for key, value in settings.items():
        if value is not None and not isinstance(value, str | int):
            name = key if key.isidentifier() else shorten(key)
            rule = "must be text, a whole number or null"
            raise InputError(f"method.{name}: {rule}, got {shorten(value)}")
    return Method(shape["name"], shape.get("seed", 0), tuple(settings.items()))


def _transfers(shapes: Sequence[Mapping[str, Any]], topology: Topology) -> tuple[Transfer, ...]:
    numbers = {switch.name: topology.ranks + index for index, switch in enumerate(topology.switches)}
    transfers = []
    for index, shape in enumerate(shapes):
        try:
            via = tuple([numbers[name] for name in shape.get("via", ())])
        except KeyError as error:
            raise InputError(
                f"transfers[{index}].via: must name switches of the topology, got {shorten(error.args[0])}"
            ) from error
        transfers.append(
            Transfer(
                shape["chunk"], shape["from"], shape["to"], shape["step"], shape.get("reduce", False), via
            )
        )
    return tuple(transfers)
