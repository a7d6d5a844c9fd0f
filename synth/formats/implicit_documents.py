"""Implicit schedules to files and back, in the formats `arborcast.implicit/1` and `arborcast.implicit/2`.

A file holds what a symmetric schedule has of each kind once, and the translations that make the rest: a link
of each orbit, the chunks and transfers of the representatives. Long lists of vertices are written in runs
("8..15"), so that 4,096 ranks take some ten kilobytes. Reading checks the form, and the second version is for
transfers that start or end at switches, as for explicit schedules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from arborcast.synth.certificate import Bound, Dual
from arborcast.synth.collective import Collective
from arborcast.synth.errors import InputError, ScheduleError
from arborcast.synth.formats.atomic import replacing
from arborcast.synth.formats.documents import (
    Document,
    bound_to_document,
    link_to_document,
    prefixed,
    raising,
    read_adders,
    read_bound,
    read_topology,
    switch_to_document,
    topology_to_document,
)
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.formats.reading import check_format
from arborcast.synth.formats.schedules import (
    chunk_to_document,
    dump,
    method_to_document,
    read_chunks,
    read_kind,
    read_method,
    read_transfers,
    transfer_lines,
    transfers_to_documents,
    write_entries,
)
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.symmetry.translations import Integers, Translations
from arborcast.synth.topology import Link, Permutation, Topology

IMPLICIT_FORMAT = "arborcast.implicit/1"
SWITCHED_IMPLICIT_FORMAT = "arborcast.implicit/2"

MAX_LINKS = 1 << 21
"""How many links a fabric may have when all orbits are written out."""


def write_implicit(schedule: ImplicitSchedule, path: Path | str) -> None:
    """Write an implicit schedule file, whole or not at all, one chunk or transfer a line.

    Raises:
        InputError: the file cannot be written, or a setting of the method has no place in it.
    """
    head = _head(schedule)
    entries = {
        "chunks": (dump(chunk_to_document(chunk)) for chunk in schedule.chunks),
        "transfers": transfer_lines(schedule.representative),
    }
    with replacing(path) as file:
        write_entries(file, head, entries)


def implicit_to_document(schedule: ImplicitSchedule) -> Document:
    """The keys of an implicit schedule file."""
    return {
        **_head(schedule),
        "chunks": [chunk_to_document(chunk) for chunk in schedule.chunks],
        "transfers": transfers_to_documents(schedule.representative),
    }


def implicit_from_document(document: object, place: str) -> ImplicitSchedule:
    """The implicit schedule that a document describes; `place` (a file name) begins every error.

    Raises:
        ScheduleError: another format or version, another shape, an index or number out of range, links that
            are not one of each orbit.
    """
    from arborcast.synth.formats.shapes import ImplicitShape, check_shape

    with raising(ScheduleError):
        check_format(document, (IMPLICIT_FORMAT, SWITCHED_IMPLICIT_FORMAT), place)
        shape = check_shape(ImplicitShape, document, place)
        part = _read_part(shape["topology"], place)
        symmetries = [
            _read_images(images, part.size, f"{place}: topology.symmetries[{index}]")
            for index, images in enumerate(shape["topology"].get("symmetries", []))
        ]
        translations = _read_translations(shape["translations"], part, place)
        topology = _expanded(part, translations, symmetries, place)
        bound = _read_bound(shape["bound"], topology, translations, place)
        with prefixed(place):
            ranks = from_runs(shape["collective"]["ranks"], part.ranks, "collective.ranks")
            return ImplicitSchedule(
                topology=topology,
                collective=Collective(read_kind(shape["collective"]["kind"]), tuple(ranks)),
                method=read_method(shape["method"]),
                bound=bound,
                translations=translations,
                chunks=read_chunks(shape["chunks"]),
                transfers=read_transfers(
                    shape["transfers"], topology, shape["format"] == SWITCHED_IMPLICIT_FORMAT
                ),
                rate=shape["rate"],
            )


def _head(schedule: ImplicitSchedule) -> Document:
    """Everything but chunks and transfers, which are written as they come."""
    translations = schedule.translations
    return {
        "format": SWITCHED_IMPLICIT_FORMAT if schedule.uses_switches else IMPLICIT_FORMAT,
        "topology": _part_to_document(schedule),
        "translations": [
            {"order": order, "images": to_runs(images)}
            for order, images in zip(translations.orders, translations.generators, strict=True)
        ],
        "collective": {"kind": schedule.collective.kind.value, "ranks": to_runs(schedule.collective.ranks)},
        "method": method_to_document(schedule.method),
        "rate": str(schedule.rate),
        "bound": _bound_to_document(schedule),
    }


def _firsts(schedule: ImplicitSchedule) -> list[int]:
    """The index of the first link of each orbit."""
    firsts = np.unique(np.array(schedule.link_orbits, dtype=np.int64), return_index=True)[1]
    return [int(index) for index in firsts]


def _part_to_document(schedule: ImplicitSchedule) -> Document:
    """The topology with the first link of each orbit."""
    topology = schedule.topology
    part = Topology(
        topology.name,
        topology.ranks,
        tuple(topology.links[index] for index in _firsts(schedule)),
        topology.switches,
        message_us=topology.message_us,
    )
    document = topology_to_document(part)
    # Of parallel links a part may hold one half only, so that they stand here as the switches that they pass.
    document["switches"] = [
        {"name": switch.name, **switch_to_document(switch)} if switch.is_able else switch.name
        for switch in part.switches
    ]
    document["links"] = [link_to_document(link, part) for link in part.links]
    if topology.symmetries:
        document["symmetries"] = [to_runs(images) for images in topology.symmetries]
    return document


def _bound_to_document(schedule: ImplicitSchedule) -> Document:
    """The bound; lengths that are the same all over each orbit stand once for it."""
    bound = schedule.bound
    document = bound_to_document(bound, schedule.topology)
    if isinstance(bound.certificate, Dual):
        lengths = bound.certificate.lengths
        firsts = _firsts(schedule)
        if all(
            length == lengths[firsts[orbit]]
            for length, orbit in zip(lengths, schedule.link_orbits, strict=True)
        ):
            whole = document["certificate"]["lengths"]
            document["certificate"]["lengths"] = [whole[index] for index in firsts]
    return document


def _read_part(shape: Mapping[str, Any], place: str) -> Topology:
    """The topology with one link of each orbit, as it stands in the file; symmetries are of the whole."""
    document = {key: value for key, value in shape.items() if key != "symmetries"}
    part = read_topology(document, place, "topology.")
    for entry, switch in zip(shape.get("switches", []), part.switches, strict=True):
        name = entry if isinstance(entry, str) else entry["name"]
        if name != switch.name:  # translations number them as they stand in the file
            rule = "those that reduce or multicast must come before those that only forward"
            raise InputError(
                f"{place}: topology.switches: {rule}, got {shorten(switch.name)} after {shorten(name)}"
            )
    seen: set[tuple[object, object]] = set()
    for index, entry in enumerate(shape["links"]):
        first, second = entry["between"] if "between" in entry else (entry["from"], entry["to"])
        ways = {(first, second), (second, first)} if "between" in entry else {(first, second)}
        if ways & seen:
            link = f"{shorten(first)}->{shorten(second)}"
            raise InputError(f"{place}: topology.links[{index}]: must stand once, got {link} twice")
        seen |= ways
    return part


def _read_images(runs: Sequence[int | str], size: int, place: str) -> tuple[int, ...]:
    images = from_runs(runs, size, place)
    if sorted(images) != list(range(size)):
        raise InputError(f"{place}: must name each of the {size} vertices exactly once, got {len(images)}")
    return tuple(images)


def _read_translations(shapes: Sequence[Mapping[str, Any]], part: Topology, place: str) -> Translations:
    generators = tuple(
        _read_images(shape["images"], part.size, f"{place}: translations[{index}].images")
        for index, shape in enumerate(shapes)
    )
    with prefixed(place):
        return Translations(part.ranks, generators, tuple(shape["order"] for shape in shapes), part.size)


def _expanded(
    part: Topology, translations: Translations, symmetries: Sequence[Permutation], place: str
) -> Topology:
    """The whole topology: every image of every link that stands in the file."""
    numbers, keys = _all_images(part, translations, place)
    by_key = np.argsort(keys, kind="stable")
    keys, numbers = keys[by_key], numbers[by_key]
    twice = np.flatnonzero(keys[1:] == keys[:-1])
    if twice.size:
        first, second = (part.links[int(number)] for number in numbers[twice[0] : twice[0] + 2])
        raise InputError(
            f"{place}: topology.links: must be one of each orbit, got {_shown(part, second)} and "
            f"{_shown(part, first)} of one"
        )
    ends = zip((keys // part.size).tolist(), (keys % part.size).tolist(), numbers.tolist(), strict=True)
    links = tuple(replace(part.links[number], src=src, dst=dst) for src, dst, number in ends)
    with prefixed(f"{place}: topology"):
        return Topology(part.name, part.ranks, links, part.switches, tuple(symmetries), part.message_us)


def _all_images(part: Topology, translations: Translations, place: str) -> tuple[Integers, Integers]:
    """For each link of each orbit the number of the one in the file, and source * vertices + destination."""
    elements = np.arange(translations.order, dtype=np.int64)
    ends = np.array([(link.src, link.dst) for link in part.links], dtype=np.int64).reshape(-1, 2)
    numbers: list[Integers] = []
    keys: list[Integers] = []
    count = 0
    at_once = max(1, MAX_LINKS // translations.order)
    for start in range(0, len(ends), at_once):
        some = ends[start : start + at_once, :, None]
        moved = translations.apply(elements, some[:, 0]) * part.size + translations.apply(
            elements, some[:, 1]
        )
        moved.sort(axis=1)
        # Several elements may take a link between switches to one place.
        new = np.ones(moved.shape, dtype=np.bool_)
        new[:, 1:] = moved[:, 1:] != moved[:, :-1]
        rows, columns = np.nonzero(new)
        count += len(rows)
        if count > MAX_LINKS:
            raise InputError(
                f"{place}: topology.links: all orbits must have at most {MAX_LINKS} links, got more"
            )
        numbers.append(rows + start)
        keys.append(moved[rows, columns])
    if not keys:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    return np.concatenate(numbers), np.concatenate(keys)


def _shown(topology: Topology, link: Link) -> str:
    return f"{shorten(topology.label(link.src))}->{shorten(topology.label(link.dst))}"


def _read_bound(
    shape: Mapping[str, Any], topology: Topology, translations: Translations, place: str
) -> Bound:
    """The bound, with link lengths that stand for their orbits given to all of these."""
    certificate = shape["certificate"]
    if certificate["kind"] != "dual" or len(certificate["lengths"]) >= len(topology.links):
        return read_bound(shape, topology, place, "bound.")
    lengths = _all_lengths(certificate["lengths"], topology, translations, place)
    adders = read_adders(certificate, topology, place, "bound.certificate.")
    dual = Dual(lengths, certificate["capacity"], certificate["distance"], adders)
    nothing = {"kind": "cut", "side": [], "capacity": Fraction(0)}
    rest = read_bound({**shape, "certificate": nothing}, topology, place, "bound.")
    return replace(rest, certificate=dual)


def _all_lengths(
    entries: Sequence[Mapping[str, Any]], topology: Topology, translations: Translations, place: str
) -> tuple[Fraction, ...]:
    """Lengths of all links out of lengths of one link of each orbit."""
    orbits = translations.link_orbits(topology).tolist()
    orbit_of = {(link.src, link.dst): orbit for link, orbit in zip(topology.links, orbits, strict=True)}
    number = {topology.label(vertex): vertex for vertex in range(topology.size)}
    lengths: dict[int, Fraction] = {}
    for index, entry in enumerate(entries):
        pair = (number.get(entry["from"], -1), number.get(entry["to"], -1))
        orbit = orbit_of.get(pair)
        if orbit is None or orbit in lengths:
            rule = "a link of the topology" if orbit is None else "one link of each orbit, or every link"
            raise InputError(
                f"{place}: bound.certificate.lengths[{index}]: must name {rule}, "
                f"got {shorten(entry['from'])}->{shorten(entry['to'])}"
            )
        lengths[orbit] = entry["length"]
    for link, orbit in zip(topology.links, orbits, strict=True):
        if orbit not in lengths:
            raise InputError(
                f"{place}: bound.certificate.lengths: must name a link of every orbit, "
                f"got none like {_shown(topology, link)}"
            )
    return tuple(lengths[orbit] for orbit in orbits)


SHORTEST = 3
"""Runs of fewer numbers are written out."""

_RUN = re.compile(r"(0|[1-9][0-9]{0,9})\.\.(0|[1-9][0-9]{0,9})")


def to_runs(numbers: Iterable[int]) -> list[int | str]:
    """The numbers in their order, with runs of ascending ones as text."""
    runs: list[int | str] = []
    first = last = None
    for number in numbers:
        if first is None or last is None or number != last + 1:
            runs += _run(first, last)
            first = number
        last = number
    return runs + _run(first, last)


def _run(first: int | None, last: int | None) -> list[int | str]:
    if first is None or last is None:
        return []
    if last - first + 1 < SHORTEST:
        return list(range(first, last + 1))
    return [f"{first}..{last}"]


def from_runs(runs: Sequence[int | str], most: int, place: str) -> list[int]:
    """The numbers of a list with runs; `place` begins every error.

    Raises:
        InputError: an entry is neither a whole number nor a run, or there are more than `most` numbers.
    """
    numbers: list[int] = []
    for index, entry in enumerate(runs):
        first, last = (entry, entry) if isinstance(entry, int) else _ends(entry, f"{place}[{index}]")
        if len(numbers) + last - first + 1 > most:
            raise InputError(f"{place}: must have at most {most} numbers, got more with entry {index}")
        numbers.extend(range(first, last + 1))
    return numbers


def _ends(entry: str, place: str) -> tuple[int, int]:
    match = _RUN.fullmatch(entry)
    if match is None or int(match[1]) > int(match[2]):
        raise InputError(f'{place}: must be a whole number or a run such as "8..15", got {shorten(entry)}')
    return int(match[1]), int(match[2])
