"""InfraGraph (keysight/infragraph), YAML and JSON, in and out: devices of components, instances, edges.

Its accelerators (`xpu`) are the ranks, in the order of instances and components; everything else forwards.
Memory, and what leads to no other rank (ports that are free), is left out. An edge is a cable whose bandwidth
goes each way. Many files give no rates; those of links are then said beside them, by the links' names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import Annotated, Any, Literal, NotRequired

import yaml
from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.documents import raising
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.formats.shapes import MAX_RANKS, Bandwidth, Latency, Name, check_shape
from arborcast.synth.topology import Topology, Vertex
from arborcast.topologies.builders import cable
from arborcast.topologies.machine import Machine

MOST_EDGES = 1 << 20
"""Of a file, once its slices are written out."""

_PART = re.compile(r"([\w-]+)(?:\[(-?\d*(?::-?\d*){0,2})\])?")
_LOOSE = with_config(ConfigDict(extra="allow", strict=True))
_PER_GBYTE = {"gigabits_per_second": 8, "gigabytes_per_second": 1}
_US = {"ms": Fraction(1000), "us": Fraction(1), "ns": Fraction(1, 1000)}
_Count = Annotated[int, Field(ge=0, le=MAX_RANKS)]


class _Bandwidth(TypedDict, total=False):
    choice: str
    gigabits_per_second: Bandwidth
    gigabytes_per_second: Bandwidth
    gigatransfers_per_second: Bandwidth


class _Latency(TypedDict, total=False):
    choice: str
    ms: Latency
    us: Latency
    ns: Latency


class _Physical(TypedDict):
    bandwidth: NotRequired[_Bandwidth]
    latency: NotRequired[_Latency]


@_LOOSE
class _Link(TypedDict):
    name: Name
    physical: NotRequired[_Physical]


@_LOOSE
class _End(TypedDict):
    component: str
    device: NotRequired[str]
    instance: NotRequired[str]


@_LOOSE
class _Edge(TypedDict):
    ep1: _End
    ep2: _End
    link: Name
    scheme: Literal["one2one", "many2many"]


@_LOOSE
class _Component(TypedDict):
    name: Name
    choice: str
    count: _Count


@_LOOSE
class _Device(TypedDict):
    name: Name
    components: list[_Component]
    links: NotRequired[list[_Link]]
    edges: NotRequired[list[_Edge]]


@_LOOSE
class _Instance(TypedDict):
    name: Name
    device: Name
    count: _Count


@_LOOSE
class _Infrastructure(TypedDict):
    name: NotRequired[Name]
    devices: list[_Device]
    instances: list[_Instance]
    links: NotRequired[list[_Link]]
    edges: NotRequired[list[_Edge]]


_SAID = {
    "link latency_us",
    "link rate_assumed",
    "link latency_assumed",
    "topology switches",
    "topology symmetries",
}
"""What a topology has that InfraGraph can say, or that is no property of its own."""


def asked_rates(names: Sequence[str]) -> str:
    """How somebody says rates that a file has not."""
    return f"synth cluster FILE --link-rates {','.join(f'{name}=GB/S' for name in names)} does"


def is_infragraph(document: object) -> bool:
    """Whether a document is one of InfraGraph."""
    return isinstance(document, dict) and document.keys() >= {"devices", "instances"}


def of_infragraph(document: object, place: str, rates: Mapping[str, Fraction] | None = None) -> Machine:
    """The machine of a document.

    Args:
        document: which `is_infragraph`.
        place: what errors begin with.
        rates: GB/s each way of links by their names, where the document does not say them.

    Raises:
        TopologyError: it breaks a rule, or a link between ranks has no rate.
    """
    with raising(TopologyError):
        found = check_shape(_Infrastructure, document, place)
    try:
        return _Reading(found).machine(rates or {})
    except TopologyError as error:
        raise TopologyError(f"{place}: {error}") from error


class _Reading:
    """Vertices and edges of a document, by the names that InfraGraph gives them: instance.0.component.0."""

    def __init__(self, found: _Infrastructure) -> None:
        self._found = found
        self._devices = {device["name"]: device for device in found["devices"]}
        self._kinds: dict[str, str] = {}
        self._walked = 0
        self._edges: dict[tuple[str, str, str], _Link] = {}
        counts = {instance["name"]: instance["count"] for instance in found["instances"]}
        for instance in found["instances"]:
            for number in range(instance["count"]):
                self._walk(f"{instance['name']}.{number}", instance["device"], 0)
        of = {instance["name"]: instance["device"] for instance in found["instances"]}

        def ends(end: _End) -> list[str]:
            name, numbers = self._numbers(end.get("instance", ""), counts)
            inside = self._inside(of[name], end["component"])
            return [f"{name}.{number}.{one}" for number in numbers for one in inside]

        self._add(found.get("edges", []), found.get("links", []), ends, "")

    def machine(self, rates: Mapping[str, Fraction]) -> Machine:
        """The machine, with rates of links that have none."""
        beside: dict[str, set[str]] = defaultdict(set)
        for one, other, _ in self._edges:
            beside[one].add(other)
            beside[other].add(one)
        ends = {name for name, kind in self._kinds.items() if kind != "xpu" and len(beside[name]) < 2}
        loose = [name for name, kind in self._kinds.items() if kind == "memory" or name in ends]
        while loose:
            name = loose.pop()
            for other in beside.pop(name, ()):
                beside[other].discard(name)
                if self._kinds[other] != "xpu" and len(beside[other]) < 2:
                    loose.append(other)
        ranks = [name for name, kind in self._kinds.items() if kind == "xpu"]
        switches = [name for name, kind in self._kinds.items() if kind != "xpu" and name in beside]
        if not ranks:
            raise TopologyError("must have at least one component of choice xpu, which are the ranks")
        number = {name: at for at, name in enumerate([*ranks, *switches])}
        used = {ends: link for ends, link in self._edges.items() if {*ends[:2]} <= number.keys()}
        if missing := sorted({it["name"] for it in used.values() if not _rate(it)} - rates.keys()):
            raise TopologyError(f"does not say how fast {', '.join(missing)} are; {asked_rates(missing)}")
        links = [
            link
            for (one, other, _), said in used.items()
            for link in cable(number[one], number[other], _rate(said) or rates[said["name"]], _latency(said))
        ]
        topology = Topology.build(self._found.get("name", "infragraph"), len(ranks), links, switches)
        boxes = [".".join(name.split(".")[:2]) for name in ranks]
        host = {box: at for at, box in enumerate(dict.fromkeys(boxes))}
        return Machine(topology, (None,) * len(ranks), tuple(ranks), tuple(host[box] for box in boxes))

    def _walk(self, prefix: str, device: str, depth: int) -> None:
        """The vertices and edges of an instance of a device."""
        if device not in self._devices:
            raise TopologyError(f"instance {prefix}: there is no device {shorten(device)}")
        self._walked += 1
        if depth > 8 or self._walked > MAX_RANKS:
            raise TopologyError(
                f"device {device}: contains itself, or there are more than {MAX_RANKS} devices"
            )
        found = self._devices[device]
        for component in found["components"]:
            for number in range(component["count"]):
                name = f"{prefix}.{component['name']}.{number}"
                if component["choice"] == "device":
                    self._walk(name, component["name"], depth + 1)
                else:
                    self._kinds[name] = component["choice"]
            if len(self._kinds) > MAX_RANKS:
                raise TopologyError(f"must have at most {MAX_RANKS} components in all")

        def ends(end: _End) -> list[str]:
            path = ".".join([*([end["device"]] if "device" in end else []), end["component"]])
            return [f"{prefix}.{one}" for one in self._inside(device, path)]

        self._add(found.get("edges", []), found.get("links", []), ends, device)

    def _add(
        self, edges: Sequence[_Edge], links: Sequence[_Link], ends: Callable[[_End], list[str]], within: str
    ) -> None:
        """Write out some edges; of one link there is one between two vertices, however often it is said."""
        known = {link["name"]: link for link in links}
        for number, edge in enumerate(edges):
            place = f"{within or 'infrastructure'}: edges[{number}]"
            if edge["link"] not in known:
                raise TopologyError(f"{place}: there is no link {shorten(edge['link'])}")
            try:
                one, other = ends(edge["ep1"]), ends(edge["ep2"])
            except (LookupError, ValueError) as error:
                raise TopologyError(
                    f"{place}: names no component that there is: {shorten(str(error))}"
                ) from error
            pairs = product(one, other) if edge["scheme"] == "many2many" else zip(one, other, strict=False)
            if len(one) * len(other) + len(self._edges) > MOST_EDGES:
                raise TopologyError(f"{place}: makes more than {MOST_EDGES} edges in all")
            for first, second in map(sorted, pairs):
                if not {first, second} <= self._kinds.keys():
                    raise TopologyError(f"{place}: {first} or {second} is no component")
                if first != second:
                    self._edges[first, second, f"{within}/{edge['link']}"] = known[edge["link"]]

    def _inside(self, device: str, path: str) -> list[str]:
        """What a path such as `cx5[0:2].port` names within a device."""
        found: list[str] = []
        for part in path.split("."):
            counts = {it["name"]: it["count"] for it in self._devices[device]["components"]}
            device, numbers = self._numbers(part, counts)
            if len(found) * len(numbers) > MOST_EDGES:
                raise ValueError(f"{path}, which is too many")
            found = [
                f"{before}{device}.{at}" for before in ([f"{it}." for it in found] or [""]) for at in numbers
            ]
        return found

    @staticmethod
    def _numbers(text: str, counts: Mapping[str, int]) -> tuple[str, range]:
        """A name, and which of its copies are meant: all, one, or a slice of Python's."""
        found = _PART.fullmatch(text)
        if found is None:
            raise ValueError(text)
        count = range(counts[found[1]])
        if found[2] is None:
            return found[1], count
        first, *rest = (int(each) if each else None for each in found[2].split(":"))
        if rest:
            return found[1], count[slice(first, *rest)]
        if first is None:
            return found[1], count
        at = count[first]
        return found[1], range(at, at + 1)


def _rate(link: _Link) -> Fraction | None:
    """GB/s; None where nothing is said, or transfers, which have no width here."""
    said = link.get("physical", {}).get("bandwidth", {})
    return next((said[unit] / each for unit, each in _PER_GBYTE.items() if unit in said), None)  # type: ignore[literal-required]


def _latency(link: _Link) -> Fraction:
    said = link.get("physical", {}).get("latency", {})
    return next((said[unit] * each for unit, each in _US.items() if unit in said), Fraction(0))  # type: ignore[literal-required]


def to_infragraph(topology: Topology) -> str:
    """The YAML of a topology: one device whose components are ranks (`xpu`) and switches, in their order.

    Raises:
        TopologyError: links differ by their direction, switches add, or what else edges cannot say.
    """
    if unsaid := sorted(topology.features.keys() - _SAID):
        raise TopologyError(
            f"{topology.name}: InfraGraph cannot say {', '.join(unsaid)}; --no-in-network leaves out what "
            "switches do"
        )
    links: dict[tuple[Fraction, Fraction], str] = {}
    edges: list[dict[str, Any]] = []
    turned = {(link.dst, link.src): (link.bandwidth, link.latency_us) for link in topology.links}

    def name(vertex: Vertex) -> dict[str, str]:
        at = vertex - topology.ranks
        return {"component": f"xpu[{vertex}]" if at < 0 else f"switch[{at}]"}

    for link in topology.links:
        numbers = link.bandwidth, link.latency_us
        if turned.get((link.src, link.dst)) != numbers:
            raise TopologyError(
                f"{topology.name}: {topology.label(link.src)}->{topology.label(link.dst)}: must be as the "
                "link back, as edges of InfraGraph are alike both ways"
            )
        if link.src < link.dst:
            said = links.setdefault(numbers, f"link-{len(links)}")
            edges.append({"scheme": "one2one", "link": said, "ep1": name(link.src), "ep2": name(link.dst)})
    named = ", ".join(switch.name for switch in topology.switches)
    kinds = [("xpu", topology.ranks, "ranks"), ("switch", len(topology.switches), named)]
    device = {
        "name": "machine",
        "components": [
            {"name": kind, "choice": kind, "count": count, "description": told}
            for kind, count, told in kinds
            if count
        ],
        "links": [
            {
                "name": said,
                "physical": {
                    "bandwidth": {"choice": "gigabytes_per_second", "gigabytes_per_second": float(rate)},
                    "latency": {"choice": "us", "us": float(wait)},
                },
            }
            for (rate, wait), said in links.items()
        ],
        "edges": edges,
    }
    document = {
        "name": re.sub(r"[^A-Za-z0-9_()<> -]", "-", topology.name),
        "devices": [device],
        "instances": [{"name": "machine", "device": "machine", "count": 1}],
    }
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=110)
