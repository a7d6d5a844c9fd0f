"""Topology files (YAML or JSON) to machines: the graph, what they say of GPUs, hosts, NICs, assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.documents import prefixed, raising, topology_from_document, vertex_reader
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.formats.reading import parse_json
from arborcast.synth.topology import Topology
from arborcast.topologies.gpus import gpu_named
from arborcast.topologies.machine import Machine, Nic
from arborcast.topologies.readers.infragraph import is_infragraph, of_infragraph
from arborcast.topologies.readers.kinds import UNDERSTOOD

_GRAPH = {each.name for each in fields(Topology)}
_MACHINE = {"gpu", "hosts", "devices", "nics", "notes"}
_SHOWN = {"picture", "parts"}
"""What tells a topology that `synth show --json` has printed: it says more of it than a file may."""


def read_document(text: str, place: str, kind: str) -> Any:
    """What a text of this kind, "JSON" or "YAML", holds; errors begin with the place."""
    if kind == "JSON":
        return parse_json(text, place)
    from arborcast.synth.formats.yaml_text import parse_yaml

    return parse_yaml(text, place)


def parse_document(text: str, place: str, kind: str) -> Machine:
    """The machine in a topology file, or in what `synth show --json` printed.

    Args:
        text: of the file.
        place: what errors begin with.
        kind: "JSON" or "YAML".

    Raises:
        InputError: it breaks a rule of its kind.
    """
    document = read_document(text, place, kind)
    if not isinstance(document, dict):
        raise TopologyError(
            f"{place}: must be a mapping with the keys ranks and links, got {shorten(document)}; "
            f"understood are {UNDERSTOOD}"
        )
    if is_infragraph(document):
        return of_infragraph(document, place)
    if "format" in document:
        raise TopologyError(
            f"{place}: must be a topology, got a file of format {shorten(document['format'])}"
        )
    document, notes = _plain(document, place)
    known = _GRAPH | _MACHINE if document.keys() >= _SHOWN else document.keys()
    graph = {key: value for key, value in document.items() if key in known - _MACHINE}
    topology = topology_from_document(graph, place)
    machine = _machine(topology, {key: document[key] for key in document.keys() & _MACHINE}, place)
    return replace(machine, notes=(*machine.notes, *notes))


VERSIONS = (1, 2)
"""Of topology files; 1 where a file says none."""


def _plain(document: Mapping[str, Any], place: str) -> tuple[dict[str, Any], list[str]]:
    """The document without `version`, and links without `parallel`; a note on links that stand twice.

    In version 1 links of the same ends and latency count as one with the sum of their bandwidths, in version
    2 a link of ends that another one has must say `parallel: true`, or have addresses.

    Raises:
        TopologyError: another version, or such a link that does not say so.
    """
    version = document.get("version", 1)
    if version not in VERSIONS or isinstance(version, bool):
        raise TopologyError(f"{place}: version must be 1 or 2, got {shorten(version)}")
    links = document.get("links")
    entries = links if isinstance(links, list) else []
    notes: list[str] = []
    seen: dict[tuple[str, ...], set[str]] = {}
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            continue
        where, meant = f"{place}: links[{index}]", entry.get("parallel", None)
        if meant not in (None, True):
            raise TopologyError(f"{where}.parallel: must be true, got {shorten(meant)}")
        meant = meant or "addresses" in entry  # of their own each, or they are refused
        both = entry.get("between")
        ends = tuple(map(str, both if isinstance(both, list) else (entry.get("from"), entry.get("to"))))
        latency, ways = str(entry.get("latency_us", 0)), {ends, ends[::-1]} if both else {ends}
        known = [seen[way] for way in ways if way in seen]
        if known and not meant and version > 1:
            raise TopologyError(
                f"{where}: {' and '.join(ends)} have a link already; parallel: true allows another"
            )
        if any(latency in latencies for latencies in known) and not meant and not notes:
            notes.append(
                f"links[{index}] joins {' and '.join(ends)} a second time: their bandwidths are added; "
                "parallel: true says that both are meant"
            )
        for way in ways:
            seen.setdefault(way, set()).add(latency)
    drop = {"version", "parallel"}
    plain = {key: value for key, value in document.items() if key not in drop}
    if entries:
        plain["links"] = [
            {key: entry[key] for key in entry if key not in drop} if isinstance(entry, dict) else entry
            for entry in entries
        ]
    return plain, notes


def _machine(topology: Topology, given: Mapping[str, Any], place: str) -> Machine:
    """The graph with what the file says beside it."""
    machine = Machine.of(topology)
    if not given:
        return machine
    from arborcast.synth.formats.shapes import MachineShape, check_shape

    vertex = vertex_reader(topology.ranks, [switch.name for switch in topology.switches])
    with raising(TopologyError):
        said = check_shape(MachineShape, given, place)
        gpu = said.get("gpu")
        names = gpu if isinstance(gpu, list) else [gpu] * topology.ranks
        nics: list[Nic] = []
        for index, nic in enumerate(said.get("nics", [])):
            where = f"{place}: nics[{index}].near"
            near = tuple(vertex(label, f"{where}[{at}]") for at, label in enumerate(nic["near"]))
            nics.append(Nic(nic["name"], nic.get("rate"), near))
    each = {
        "gpu": names,
        "devices": said.get("devices", machine.devices),
        "hosts": said.get("hosts", machine.hosts),
    }
    for key, values in each.items():
        if len(values) != topology.ranks:
            rule = f"must have one for each of {topology.ranks} ranks"
            raise TopologyError(f"{place}: {key}: {rule}, got {len(values)}")
    with prefixed(f"{place}: gpu"):
        known = {name: None if name is None else gpu_named(name).name for name in dict.fromkeys(names)}
    return replace(
        machine,
        gpus=tuple(known[name] for name in names),
        devices=tuple(each["devices"]),
        hosts=tuple(each["hosts"]),
        nics=tuple(nics),
        notes=tuple(said.get("notes", ())),
    )
