"""Several groups in a folder: schedule files, and `groups.json` with rates and the certificate.

Groups that a symmetry takes to each other share the file of the first: `images` says which vertex each one
becomes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from arborcast.synth.collective import Collective
from arborcast.synth.errors import InputError, ScheduleError
from arborcast.synth.formats import read_explicit, write_explicit
from arborcast.synth.formats.atomic import check_folder, write_atomically
from arborcast.synth.formats.documents import picked
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.formats.reading import check_format, parse_json, read_text, shorten_path
from arborcast.synth.groups.result import GroupSchedule, GroupSchedules
from arborcast.synth.groups.sharing_certificate import JointCertificate, Level
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Topology

GROUPS_FORMAT = "arborcast.groups/1"
GROUPS_FILE = "groups.json"
_MAX_BYTES = 1 << 28


def write_groups(found: GroupSchedules, folder: Path) -> list[Path]:
    """Write `group-0.json` and so on, for the first of groups that are alike, and then `groups.json`.

    An older `groups.json` goes first, so that a folder that has one is complete.

    Returns:
        The schedule file of each group, its own or that of the group whose images it has.

    Raises:
        InputError: a file cannot be written.
    """
    check_folder(folder)
    try:
        folder.mkdir(exist_ok=True)
        (folder / GROUPS_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror or error}") from error
    digits = len(str(len(found.groups) - 1))
    files: dict[int, Path] = {}
    for number, group in enumerate(found.groups):
        if id(group.written) not in files:
            files[id(group.written)] = path = folder / f"group-{number:0{digits}}.json"
            write_explicit(group.written, path)
    paths = [files[id(group.written)] for group in found.groups]
    document = {
        "format": GROUPS_FORMAT,
        "topology": found.topology.name,
        "groups": [
            {
                **picked(group.collective, "kind", "root", "ranks"),
                **picked(group, "weight", "rate", "alone"),
                "file": path.name,
                **({} if group.images is None else {"images": list(group.images)}),
            }
            for group, path in zip(found.groups, paths, strict=True)
        ],
        "certificate": {
            "relays": found.certificate.relays,
            "levels": [_level_document(level, found.topology) for level in found.certificate.levels],
        },
    }
    write_atomically(folder / GROUPS_FILE, json.dumps(document, indent=1) + "\n")
    return paths


def _level_document(level: Level, topology: Topology) -> dict[str, Any]:
    label = topology.label
    return {
        **picked(level, "rate", "bound", "groups"),
        "lengths": [
            {"from": label(link.src), "to": label(link.dst), "length": str(length)}
            for link, length in zip(topology.links, level.lengths, strict=True)
            if length
        ],
    }


def read_groups(folder: Path | str) -> GroupSchedules:
    """The groups in a folder; only the form is checked here, see `verify_groups`.

    Raises:
        InputError: a file cannot be read, or is not what it must be; names the file and the place.
    """
    from arborcast.synth.formats.shapes import check_shape
    from arborcast.synth.groups.folder_shapes import GroupsShape

    path = Path(folder) / GROUPS_FILE
    place = shorten_path(path)
    document = parse_json(read_text(path, max_bytes=_MAX_BYTES), place)
    check_format(document, (GROUPS_FORMAT,), place)
    shape = check_shape(GroupsShape, document, place)
    files: dict[str, Schedule] = {}
    groups = tuple(
        _group(entry, path.parent, files, f"{place}: groups[{index}]")
        for index, entry in enumerate(shape["groups"])
    )
    topology = groups[0].written.topology
    levels = tuple(
        _level(entry, topology, f"{place}: certificate.levels[{index}]")
        for index, entry in enumerate(shape["certificate"]["levels"])
    )
    if not levels:
        raise ScheduleError(f"{place}: certificate.levels: must have at least one, got none")
    return GroupSchedules(topology, groups, JointCertificate(levels, shape["certificate"]["relays"]))


def _group(entry: Mapping[str, Any], folder: Path, files: dict[str, Schedule], place: str) -> GroupSchedule:
    name, images = entry["file"], entry.get("images")
    if Path(name).name != name:
        raise ScheduleError(f"{place}.file: must be a file of the folder, got {shorten(name)}")
    if name not in files:
        files[name] = read_explicit(folder / name)
    written = files[name]
    stated = (entry["kind"], entry["root"], entry["ranks"])
    collective = written.collective
    if images is not None:
        size = written.topology.size
        if sorted(images) != list(range(size)):
            raise ScheduleError(f"{place}.images: must name each of the {size} vertices once")
        collective = _stated(stated, written.topology, place)
    elif stated != (collective.kind.value, collective.root, list(collective.ranks)):
        raise ScheduleError(f"{place}: must be the collective of {name}, got another one")
    for key in ("weight", "rate"):
        if entry[key] <= 0:
            raise ScheduleError(f"{place}.{key}: must be positive, got {shorten(entry[key])}")
    moved = None if images is None else tuple(images)
    return GroupSchedule(entry["weight"], entry["rate"], entry["alone"], collective, written, moved)


def _stated(stated: tuple[str, int | None, list[int]], topology: Topology, place: str) -> Collective:
    """The collective that an entry names."""
    kind, root, ranks = stated
    try:
        found = Collective.on(topology, kind, ranks=ranks, root=-1 if root is None else root)
    except InputError as error:
        raise ScheduleError(f"{place}: {error}") from error
    if found.root != root:
        raise ScheduleError(f"{place}.root: must be null for a collective without one, got {root}")
    return found


def _level(entry: Mapping[str, Any], topology: Topology, place: str) -> Level:
    numbers = {switch.name: topology.ranks + i for i, switch in enumerate(topology.switches)}
    lengths: dict[object, Fraction] = {}
    for index, length in enumerate(entry["lengths"]):
        ends = tuple(numbers.get(length[key], length[key]) for key in ("from", "to"))
        if ends not in topology.bandwidth or ends in lengths:
            rule = "must name each link once" if ends in lengths else "must name a link of the topology"
            named = f"{shorten(length['from'])}->{shorten(length['to'])}"
            raise ScheduleError(f"{place}.lengths[{index}]: {rule}, got {named}")
        lengths[ends] = length["length"]
    in_order = tuple(lengths.get((link.src, link.dst), Fraction(0)) for link in topology.links)
    return Level(entry["rate"], entry["bound"], tuple(entry["groups"]), in_order)
