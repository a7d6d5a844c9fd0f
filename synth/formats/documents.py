"""Topologies, bounds and certificates to plain documents (what JSON and YAML hold) and back.

Numbers are exact both ways: fractions are written as text such as "25/2". `synth.formats` offers these
functions to everyone else and adds the schedules that contain such documents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

from arborcast.synth.certificate import Bound, Certificate, Cut, Dual, Partition, Scope, TollFlow, Tolls
from arborcast.synth.errors import InputError, ScheduleError, TopologyError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.ports import ported
from arborcast.synth.topology import Hop, Link, Switch, Topology, Vertex

Document: TypeAlias = dict[str, Any]


def topology_to_document(topology: Topology) -> Document:
    """The keys of a topology file; every link is written in its one direction, parallel ones each."""
    label, parallels = topology.label, topology.parallels
    document: Document = {
        "name": topology.name,
        "ranks": topology.ranks,
        "switches": [
            {"name": switch.name, **said} if (said := switch_to_document(switch)) else switch.name
            for vertex, switch in enumerate(topology.switches, topology.ranks)
            if vertex not in parallels
        ],
        "links": [link_to_document(link, topology) for link in topology.cables],
    }
    if topology.message_us:
        document["message_us"] = str(topology.message_us)
    if topology.streams:
        document["streams"] = said_of_streams(topology)
    if topology.symmetries:
        document["symmetries"] = [
            [label(image) for vertex, image in enumerate(images) if vertex not in parallels]
            for images in topology.symmetries
        ]
    return document


def said_of_streams(topology: Topology) -> int | list[int | None]:
    """What files say of streams where some rank has a limit: one number, or one for each rank."""
    first, *others = topology.streams
    return list(topology.streams) if first is None or set(others) - {first} else first


def link_to_document(link: Link, topology: Topology) -> Document:
    """A link by what its ends are called, with what is assumed of it."""
    return {"from": topology.label(link.src), "to": topology.label(link.dst), **_plain(said_of_link(link))}


def said_of_link(link: Link) -> dict[str, object]:
    """What files say of a link beside its ends: bandwidth, latency, and what is not as its default.

    Lanes are links of their own there.
    """
    return _said(link, always={"bandwidth", "latency_us"}, apart={"src", "dst", "lanes"})


def _said(thing: Link | Switch, *, always: Collection[str] = (), apart: Collection[str]) -> dict[str, object]:
    """The attributes that are not as their defaults, and some always; those apart are said elsewhere."""
    values = ((each, getattr(thing, each.name)) for each in fields(thing) if each.name not in apart)
    return {each.name: value for each, value in values if each.name in always or value != each.default}


def _plain(said: Mapping[str, object]) -> Document:
    return {key: plain(value) for key, value in said.items()}


def plain(value: object) -> object:
    """A value as documents hold it: fractions as text, tuples as lists, the rest as it is."""
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, Fraction) else value


def picked(thing: object, *names: str) -> Document:
    """Attributes of a value, under their own names, as documents hold them."""
    return {name: plain(getattr(thing, name)) for name in names}


def switch_to_document(switch: Switch) -> Document:
    """What a switch can do beside forwarding, its name aside; empty where there is nothing."""
    return _plain(_said(switch, apart={"name"}))


@contextlib.contextmanager
def raising(kind: type[InputError]) -> Iterator[None]:
    """Any wrong input of the block becomes an error of the document's own kind, with the same line."""
    try:
        yield
    except InputError as error:
        raise kind(str(error)) from error


def topology_from_document(document: object, place: str) -> Topology:
    """The topology that a document describes; `place` (a file name) begins every error.

    Raises:
        TopologyError: the document has another shape, or breaks a rule of topologies.
    """
    from arborcast.synth.formats.shapes import TopologyShape, check_shape

    with raising(TopologyError):
        return read_topology(check_shape(TopologyShape, document, place), place, "")


def read_topology(shape: Mapping[str, Any], place: str, prefix: str) -> Topology:
    """The topology of a document that has the shape; `prefix` is where in the file it stands."""
    ranks = shape["ranks"]
    switches = []
    for index, entry in enumerate(shape.get("switches", [])):
        with prefixed(f"{place}: {prefix}switches[{index}]"):
            switches.append(Switch(entry) if isinstance(entry, str) else Switch(**entry))
    first: dict[str, int] = {}
    for index, switch in enumerate(switches):
        if first.setdefault(switch.name, index) != index:
            place_of = f"{place}: {prefix}switches[{index}]"
            raise InputError(f"{place_of}: names must be unique, got {shorten(switch.name)} twice")
    # Topologies have switches that are able before the others; files name them in any order.
    order = sorted(range(len(switches)), key=lambda index: not switches[index].is_able)
    switches = [switches[index] for index in order]
    vertex = vertex_reader(ranks, [switch.name for switch in switches])
    links: list[Link] = []
    for index, entry in enumerate(shape["links"]):
        links.extend(_links(entry, vertex, f"{place}: {prefix}links[{index}]"))
    symmetries = [
        _images(images, ranks, order, vertex, f"{place}: {prefix}symmetries[{index}]")
        for index, images in enumerate(shape.get("symmetries", []))
    ]
    name = shape.get("name", Path(place).stem or "topology")
    with prefixed(f"{place}: {prefix.removesuffix('.')}" if prefix else place):
        message_us = shape.get("message_us", Fraction(0))
        said = shape.get("streams", ())
        streams = [said] * ranks if isinstance(said, int) else said
        return Topology.build(name, ranks, links, switches, symmetries, message_us, streams)


def _links(entry: Mapping[str, Any], vertex: Callable[[object, str], Vertex], place: str) -> Iterator[Link]:
    ways = [key for key in ("between", "from", "to") if key in entry]
    if ways not in (["between"], ["from", "to"]):
        raise InputError(
            f"{place}: must have either between, or from and to, got {' and '.join(ways) or 'neither'}"
        )
    if "between" in entry:
        first, second = (
            vertex(label, f"{place}.between[{index}]") for index, label in enumerate(entry["between"])
        )
    else:
        first, second = vertex(entry["from"], f"{place}.from"), vertex(entry["to"], f"{place}.to")
    if first == second:
        label = entry["between"][0] if "between" in entry else entry["from"]
        raise InputError(f"{place}: must join two different vertices, got {shorten(label)} twice")
    said = {key: value for key, value in entry.items() if key not in ("between", "from", "to")}
    with prefixed(place):
        link = Link(first, second, **said)
    yield link
    if "between" in entry:
        yield link.reversed


def _images(
    labels: Sequence[object],
    ranks: int,
    order: Sequence[int],
    vertex: Callable[[object, str], Vertex],
    place: str,
) -> list[Vertex]:
    images = [vertex(label, f"{place}[{index}]") for index, label in enumerate(labels)]
    if len(images) == ranks:
        return [*images, *range(ranks, ranks + len(order))]
    if len(images) != ranks + len(order):
        raise InputError(
            f"{place}: must have the images of the {ranks} ranks, or of these and the {len(order)} switches, "
            f"got {len(images)}"
        )
    return [*images[:ranks], *(images[ranks + index] for index in order)]


def vertex_reader(ranks: int, switches: Sequence[str]) -> Callable[[object, str], Vertex]:
    """A function that turns a label in a file into a vertex, or says why it is none."""
    numbers = {name: ranks + index for index, name in enumerate(switches)}

    def vertex(label: object, place: str) -> Vertex:
        if isinstance(label, str):
            if label not in numbers:
                known = ", ".join(map(shorten, switches[:8])) or "there is none"
                raise InputError(f"{place}: must be a switch ({known}), got {shorten(label)}")
            return numbers[label]
        if not isinstance(label, int) or not 0 <= label < ranks:
            raise InputError(f"{place}: rank must be in 0..{ranks - 1}, got {shorten(label)}")
        return label

    return vertex


def bound_to_document(bound: Bound, topology: Topology) -> Document:
    """Rate and certificate; the scope only where the bound does not hold for every schedule."""
    topology = ported(topology)
    document: Document = {
        "rate": str(bound.rate),
        "certificate": certificate_to_document(bound.certificate, topology),
    }
    if bound.scope is not Scope.EVERY_SCHEDULE:
        document["scope"] = bound.scope.value
    if bound.times:
        document["times"] = [tolls_to_document(tolls, topology) for tolls in bound.times]
    return document


def tolls_to_document(tolls: Tolls, topology: Topology) -> Document:
    """What proves a least time, with the tolls of each link together."""
    topology = ported(topology)
    label = topology.label

    def flow_to_document(flow: TollFlow) -> Document:
        links: dict[int, Document] = {}
        for index, interval, toll in flow.tolls:
            link = topology.links[index]
            start: Document = {"from": label(link.src), "to": label(link.dst), "intervals": [], "tolls": []}
            entry = links.setdefault(index, start)
            entry["intervals"].append(interval)
            entry["tolls"].append(toll)
        return {
            "terminal": flow.terminal,
            "direction": "out" if flow.outward else "in",
            "others": list(flow.others),
            "links": list(links.values()),
        }

    return {
        "kind": "tolls",
        "step_us": str(tolls.step_us),
        "intervals": tolls.intervals,
        "bytes": str(tolls.bytes),
        "weight": str(tolls.weight),
        "symmetries": [[label(vertex) for vertex in image] for image in tolls.symmetries],
        "flows": [flow_to_document(flow) for flow in tolls.flows],
    }


def bound_from_document(document: object, topology: Topology, place: str) -> Bound:
    """The bound that a document holds, for the topology whose vertices it names.

    Raises:
        ScheduleError: the document has another shape, or names what the topology has not.
    """
    from arborcast.synth.formats.shapes import BoundShape, check_shape

    with raising(ScheduleError):
        return read_bound(check_shape(BoundShape, document, place), topology, place, "")


def certificate_to_document(certificate: Certificate, topology: Topology) -> Document:
    """The certificate under its kind: cut, partition or dual."""
    topology = ported(topology)
    label = topology.label
    match certificate:
        case Cut(side, capacity):
            return {"kind": "cut", "side": [label(v) for v in sorted(side)], "capacity": str(capacity)}
        case Partition(blocks, capacity):
            return {
                "kind": "partition",
                "blocks": [[label(v) for v in sorted(block)] for block in blocks],
                "capacity": str(capacity),
            }
        case Dual(lengths, capacity, distance, adders):
            document: Document = {
                "kind": "dual",
                "lengths": [
                    {"from": label(link.src), "to": label(link.dst), "length": str(length)}
                    for link, length in zip(topology.links, lengths, strict=True)
                ],
                "capacity": str(capacity),
                "distance": str(distance),
            }
            if adders:
                priced = zip(topology.limited_adders, adders, strict=True)
                document["adders"] = [{"switch": label(v), "price": str(price)} for v, price in priced]
            return document


def certificate_from_document(document: object, topology: Topology, place: str) -> Certificate:
    """The certificate that a document holds, for the topology whose vertices it names.

    Raises:
        ScheduleError: the document has another shape, or names what the topology has not.
    """
    from arborcast.synth.formats.shapes import CertificateShape, check_shape

    with raising(ScheduleError):
        return _certificate(check_shape(CertificateShape, document, place), ported(topology), place, "")


def read_bound(shape: Mapping[str, Any], topology: Topology, place: str, prefix: str) -> Bound:
    """The bound of a document that has the shape; `prefix` is where in the file it stands."""
    topology = ported(topology)
    scope = shape.get("scope", Scope.EVERY_SCHEDULE.value)
    if scope not in [known.value for known in Scope]:
        known = ", ".join(repr(known.value) for known in Scope)
        raise InputError(f"{place}: {prefix}scope: must be one of {known}, got {shorten(scope)}")
    certificate = _certificate(shape["certificate"], topology, place, f"{prefix}certificate.")
    times = (
        _tolls(each, topology, f"{place}: {prefix}times[{index}]")
        for index, each in enumerate(shape.get("times", ()))
    )
    return Bound(shape["rate"], certificate, Scope(scope), tuple(times))


def _tolls(shape: Mapping[str, Any], topology: Topology, where: str) -> Tolls:
    """The tolls of a document that has the shape; what they prove is not looked at."""
    vertex = vertex_reader(topology.ranks, [switch.name for switch in topology.switches])
    place = {(link.src, link.dst): index for index, link in enumerate(topology.links)}
    flows = []
    for number, each in enumerate(shape["flows"]):
        tolls = []
        for at, entry in enumerate(each["links"]):
            here = f"{where}.flows[{number}].links[{at}]"
            link = place.get((vertex(entry["from"], f"{here}.from"), vertex(entry["to"], f"{here}.to")))
            if link is None:
                got = f"{shorten(entry['from'])}->{shorten(entry['to'])}"
                raise InputError(f"{here}: must name a link of the topology, got {got}")
            if len(entry["intervals"]) != len(entry["tolls"]):
                counts = f"{len(entry['intervals'])} and {len(entry['tolls'])}"
                raise InputError(f"{here}: needs a toll for each interval, got {counts}")
            pairs = zip(entry["intervals"], entry["tolls"], strict=True)
            tolls += [(link, interval, toll) for interval, toll in pairs]
        flows.append(
            TollFlow(each["terminal"], each["direction"] == "out", tuple(each["others"]), tuple(tolls))
        )
    symmetries = tuple(
        tuple(vertex(label, f"{where}.symmetries[{at}]") for label in image)
        for at, image in enumerate(shape["symmetries"])
    )
    return Tolls(
        shape["step_us"], shape["intervals"], tuple(flows), shape["weight"], symmetries, shape["bytes"]
    )


def _certificate(shape: Mapping[str, Any], topology: Topology, place: str, prefix: str) -> Certificate:
    vertex = vertex_reader(topology.ranks, [switch.name for switch in topology.switches])

    def vertices(labels: Iterable[object], where: str) -> frozenset[Vertex]:
        return frozenset(vertex(label, f"{place}: {prefix}{where}[{i}]") for i, label in enumerate(labels))

    match shape["kind"]:
        case "cut":
            return Cut(vertices(shape["side"], "side"), shape["capacity"])
        case "partition":
            blocks = (vertices(block, f"blocks[{i}]") for i, block in enumerate(shape["blocks"]))
            return Partition(tuple(blocks), shape["capacity"])
    lengths: dict[Hop, Fraction] = {}
    for index, entry in enumerate(shape["lengths"]):
        where = f"{place}: {prefix}lengths[{index}]"
        pair = (vertex(entry["from"], f"{where}.from"), vertex(entry["to"], f"{where}.to"))
        if pair not in topology.bandwidth or pair in lengths:
            rule = "must name each link once" if pair in lengths else "must name a link of the topology"
            raise InputError(f"{where}: {rule}, got {shorten(entry['from'])}->{shorten(entry['to'])}")
        lengths[pair] = entry["length"]
    if len(lengths) != len(topology.links):
        missing = next(link for link in topology.links if (link.src, link.dst) not in lengths)
        link = f"{topology.label(missing.src)}->{topology.label(missing.dst)}"
        raise InputError(f"{place}: {prefix}lengths: must name every link, got none for {link}")
    in_order = tuple(lengths[link.src, link.dst] for link in topology.links)
    adders = read_adders(shape, topology, place, prefix)
    return Dual(in_order, shape["capacity"], shape["distance"], adders)


def read_adders(
    shape: Mapping[str, Any], topology: Topology, place: str, prefix: str
) -> tuple[Fraction, ...]:
    """The prices of limited adders in a document of a dual that has the shape; none where it names none."""
    if "adders" not in shape:
        return ()
    names = {topology.label(vertex): vertex for vertex in topology.limited_adders}
    prices: dict[Vertex, Fraction] = {}
    for index, entry in enumerate(shape["adders"]):
        vertex = names.get(entry["switch"])
        if vertex is None or vertex in prices:
            rule = "a switch whose adder is limited" if vertex is None else "each switch once"
            name = shorten(entry["switch"])
            raise InputError(f"{place}: {prefix}adders[{index}].switch: must name {rule}, got {name}")
        prices[vertex] = entry["price"]
    for vertex in topology.limited_adders:
        if vertex not in prices:
            missing = topology.label(vertex)
            raise InputError(
                f"{place}: {prefix}adders: must name every limited adder, got none for {missing}"
            )
    return tuple(prices[vertex] for vertex in topology.limited_adders)


@contextlib.contextmanager
def prefixed(place: str) -> Iterator[None]:
    """Put the place before the message of an input error raised in the block."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{place}: {error}") from error
