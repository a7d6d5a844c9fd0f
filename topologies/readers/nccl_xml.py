"""NCCL's topology XML (NCCL_TOPO_DUMP_FILE) to a topology.

The file nests system > cpu > pci > ... > gpu > nvlink. NVLinks lead to another GPU, named by its PCI bus
id, or to an NVSwitch (tclass 0x068000); the GPU's compute capability gives their rate.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING

from arborcast.synth.errors import InputError, TopologyError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.topology import Link, Topology
from arborcast.topologies.builders import MAX_VERTICES, cable, with_obvious_symmetries
from arborcast.topologies.gpus import Gpu, gpu_named, gpu_of_capability
from arborcast.topologies.machine import Machine
from arborcast.topologies.rates import (
    BETWEEN_SOCKETS,
    NVLINK_LATENCY_US,
    NVSWITCH_HOP_US,
    PCIE_HOP_US,
    Rates,
    pcie_rate,
)

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

_log = logging.getLogger(__name__)

NVSWITCH_CLASS = "0x068000"
MAX_SOCKETS = 64


@dataclass(slots=True)
class _Gpu:
    """A gpu element: where it stands, and what its NVLinks lead to."""

    element: Element
    busid: str
    dev: int
    rank: int | None
    kind: Gpu
    vertex: int = -1

    @property
    def where(self) -> str:
        return f"gpu {self.dev} ({self.busid})"


def parse_nccl_xml(
    text: str,
    place: str,
    *,
    gpu: str | None = None,
    pcie: bool = False,
    between_sockets: Fraction | None = None,
    rates: Rates = Rates.DATASHEET,
) -> Machine:
    """The machine that the XML describes.

    Rank i is the GPU with rank="i" where these are 0, 1, 2... each once, otherwise the GPUs in the order of
    `dev`. All NVSwitches are one switch, as in NCCL, and a GPU's links to them add up. NVLinks to what the
    file does not hold are left out with a warning. NICs are no vertices: the file does not say what is
    behind them.

    Args:
        text: the XML; a DTD and entities are refused.
        place: what errors begin with.
        gpu: what the GPUs are where the file does not say it.
        pcie: whether PCIe links become links too: a tree of switches with the speed and width of each, the
            CPUs joined pairwise (10 GB/s each way, see `topologies.rates`).
        between_sockets: GB/s each way between two CPUs; 10 unless given.
        rates: the data sheet's GB/s per NVLink of the compute capability, or NCCL's constant.

    Raises:
        TopologyError: not such an XML, attributes missing or wrong, NVLinks not alike in both directions, no
            links at all.
    """
    try:
        root = _parse(text)
        gpus = _gpus(root, None if gpu is None else gpu_named(gpu))
        links, switches = _nvlinks(gpus, rates)
        if pcie:
            crossing = between_sockets or BETWEEN_SOCKETS
            more, names = _pcie(root, gpus, crossing, rates, first=len(gpus) + len(switches))
            links += more
            switches += names
        if not links:
            raise TopologyError("shows no NVLinks; pcie=True (--pcie) takes the PCIe links")
        topology = with_obvious_symmetries(Topology.build("nccl", len(gpus), links, switches))
        return Machine(
            topology,
            gpus=tuple(gpu.kind.name for gpu in gpus),
            devices=tuple(f"dev {gpu.dev} ({gpu.busid})" for gpu in gpus),
            hosts=(0,) * len(gpus),
        )
    except InputError as error:
        raise TopologyError(f"{place}: {error}") from error


def _parse(text: str) -> Element:
    import defusedxml
    from defusedxml.ElementTree import ParseError, fromstring

    try:
        root: Element = fromstring(text.strip(), forbid_dtd=True)
    except ParseError as error:
        line, column = error.position
        rule = str(error).partition(": line ")[0]  # the rest repeats the place, with columns from 0
        raise TopologyError(f"line {line}, column {column + 1}: must be XML: {rule}") from error
    except defusedxml.DefusedXmlException as error:
        raise TopologyError("must not hold a DTD or entities") from error
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"must be XML: {shorten(str(error))}") from error
    if root.tag != "system":
        raise TopologyError(f"must be NCCL's XML, whose root is system, got {shorten(root.tag)}")
    return root


def _walk(root: Element) -> Iterator[tuple[Element, Element | None]]:
    """All elements in order with their parents, without recursion."""
    stack: list[tuple[Element, Element | None]] = [(root, None)]
    while stack:
        element, parent = stack.pop()
        yield element, parent
        stack.extend((child, element) for child in reversed(element))


def _gpus(root: Element, known: Gpu | None) -> list[_Gpu]:
    """The GPUs in the order of their ranks."""
    gpus: list[_Gpu] = []
    for element, parent in _walk(root):
        if element.tag != "gpu":
            continue
        busid = parent.get("busid") if parent is not None and parent.tag == "pci" else None
        if busid is None:
            raise TopologyError(f"gpu {element.get('dev')}: must stand in a pci element with a busid")
        dev = _whole(element, "dev", f"gpu at {busid}")
        sm = _whole(element, "sm", f"gpu at {busid}")
        rank = _whole(element, "rank", f"gpu at {busid}") if element.get("rank") is not None else None
        counts = [_whole(link, "count", f"gpu at {busid}: nvlink") for link in element.iter("nvlink")]
        kind = known or gpu_of_capability(sm, links=sum(counts))
        if kind is None or not kind.links:
            raise TopologyError(f"sm {sm}: must be a compute capability with NVLinks known here")
        gpus.append(_Gpu(element, busid.lower(), dev, rank, kind))
    if len(gpus) < 2:
        raise TopologyError(f"must hold at least 2 gpus, got {len(gpus)}")
    if len(gpus) > MAX_VERTICES // 4:
        raise TopologyError(f"must hold at most {MAX_VERTICES // 4} gpus, got {len(gpus)}")
    ranked = sorted(gpu.rank if gpu.rank is not None else -1 for gpu in gpus) == list(range(len(gpus)))
    _check_different("busid", [gpu.busid for gpu in gpus])
    if not ranked:
        _check_different("dev", [str(gpu.dev) for gpu in gpus])
    gpus.sort(key=lambda gpu: gpu.rank if ranked and gpu.rank is not None else gpu.dev)
    for vertex, gpu in enumerate(gpus):
        gpu.vertex = vertex
    return gpus


def _check_different(attribute: str, values: list[str]) -> None:
    for value, count in Counter(values).items():
        if count > 1:
            raise TopologyError(f"gpus of one host must differ in {attribute}, got {shorten(value)} twice")


def _nvlinks(gpus: list[_Gpu], rates: Rates) -> tuple[list[Link], list[str]]:
    by_busid = {gpu.busid: gpu for gpu in gpus}
    hub = len(gpus)
    counts: dict[tuple[int, int], int] = {}
    for gpu in gpus:
        total = 0
        for element in gpu.element.iter("nvlink"):
            target = (element.get("target") or "").lower()
            count = _whole(element, "count", f"{gpu.where}: nvlink")
            if count < 1:
                raise TopologyError(f"{gpu.where}: nvlink count must be at least 1, got {count}")
            total += count
            if element.get("tclass") == NVSWITCH_CLASS:
                end = hub
            elif target not in by_busid:
                _log.warning(
                    "%s: its NVLinks to %s, which the file does not hold, are left out", gpu.where, target
                )
                continue
            else:
                end = by_busid[target].vertex
            if end == gpu.vertex:
                raise TopologyError(f"{gpu.where}: nvlink must lead elsewhere, got {shorten(target)} itself")
            counts[gpu.vertex, end] = counts.get((gpu.vertex, end), 0) + count
        if total > gpu.kind.links:
            raise TopologyError(
                f"{gpu.where}: must have at most {gpu.kind.links} NVLinks ({gpu.kind.name}), got {total}"
            )
    links: list[Link] = []
    for (src, dst), count in counts.items():
        rate = count * gpus[src].kind.rate(rates)
        if dst == hub:
            links += cable(src, hub, rate, NVSWITCH_HOP_US)
            continue
        back = counts.get((dst, src), 0)
        if back != count:
            raise TopologyError(
                f"{gpus[src].where}: has {count} NVLinks to {gpus[dst].where}, must be alike back, got {back}"
            )
        links.append(Link(src, dst, rate, NVLINK_LATENCY_US))
    return links, ["nvswitch"] if any(dst == hub for _, dst in counts) else []


def _pcie(
    root: Element, gpus: list[_Gpu], between_sockets: Fraction, rates: Rates, *, first: int
) -> tuple[list[Link], list[str]]:
    """The tree from the GPUs up to the CPUs, without the vertices that only pass on one link's traffic."""
    order = list(_walk(root))
    parents = {id(element): parent for element, parent in order}
    vertex_of = {id(parents[id(gpu.element)]): gpu.vertex for gpu in gpus}
    links: list[Link] = []
    names: list[str] = []
    # What reaches each element from below: the vertex on top there, and the GB/s of the way up to here.
    below: dict[int, list[tuple[int, Fraction]]] = {}
    sockets: list[int] = []
    for element, parent in reversed(order):  # children before parents
        reached = below.pop(id(element), [])
        vertex = vertex_of.get(id(element))
        if vertex is not None and reached:
            raise TopologyError(f"pci {element.get('busid')}: must hold a gpu or further devices, not both")
        if element.tag not in {"pci", "cpu"} or (vertex is None and not reached):
            continue
        offered = _slot(element, rates) if element.tag == "pci" else Fraction(0)
        if element.tag == "cpu" or len(reached) > 1:
            vertex = first + len(names)
            names.append(f"{'cpu' if element.tag == 'cpu' else 'pcie'}{len(names)}")
            for child, rate in reversed(reached):
                links += cable(child, vertex, rate, PCIE_HOP_US)
        elif vertex is None:
            vertex, rate = reached[0]
            offered = min(offered, rate)
        if element.tag == "cpu":
            sockets.append(vertex)
        elif parent is not None:
            below.setdefault(id(parent), []).append((vertex, offered))
    if len(sockets) > MAX_SOCKETS:
        raise TopologyError(f"must have at most {MAX_SOCKETS} cpus with gpus, got {len(sockets)}")
    for one, other in combinations(sockets, 2):
        links += cable(one, other, between_sockets, PCIE_HOP_US)
    return links, names


def _slot(element: Element, rates: Rates) -> Fraction:
    """GB/s each way between a pci element and its parent.

    Where a virtual machine hides speed or width, generation 3 and 16 lanes count, as in NCCL.
    """
    busid = element.get("busid", "?")
    speed = (element.get("link_speed") or "").strip()
    width = (element.get("link_width") or "").strip()
    if speed.lower() in {"", "0", "unknown", "unknown speed"}:
        speed = "8.0 GT/s"
    if width in {"", "0"}:
        width = "16"
    gigatransfers = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,3})?)(?: GT/s)?(?: PCIe)?", speed)
    if gigatransfers is None or not Fraction(gigatransfers[1]):
        raise TopologyError(f"pci {busid}: link_speed must be such as 16.0 GT/s, got {shorten(speed)}")
    if width not in {"1", "2", "4", "8", "12", "16", "32"}:
        raise TopologyError(f"pci {busid}: link_width must be 1 to 32 lanes, got {shorten(width)}")
    return pcie_rate(Fraction(gigatransfers[1]), int(width), rates)


def _whole(element: Element, attribute: str, where: str) -> int:
    value = element.get(attribute)
    if value is None:
        raise TopologyError(f"{where}: {attribute} is missing")
    if not re.fullmatch(r"-?[0-9]{1,9}", value):
        raise TopologyError(f"{where}: {attribute} must be a whole number, got {shorten(value)}")
    return int(value)
