"""PCIe in NCCL's XML: the tree from the GPUs up to the CPUs, and the way between CPUs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING

from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.topology import Link, Vertex
from arborcast.topologies.builders import assuming, cable
from arborcast.topologies.gpus import GIGATRANSFERS
from arborcast.topologies.processors import Crossing, crossing
from arborcast.topologies.rates import PCIE_HOP, PCIE_HOP_US, Rates, pcie_rate
from arborcast.topologies.readers.nccl.xml_gpus import Device, NcclFile
from arborcast.topologies.readers.nccl.xml_tree import some
from arborcast.topologies.readers.sockets import sockets_of

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

MAX_SOCKETS = 64


@dataclass(slots=True)
class PcieTree:
    """The vertices and links of PCIe.

    Attributes:
        links: both ways of each.
        names: of the switches.
        over: the vertex that stands for each element above a GPU, by the element's identity.
    """

    links: list[Link]
    names: list[str]
    over: dict[int, Vertex]


def pcie_links(file: NcclFile, first: Vertex, coherent: Mapping[Vertex, Fraction]) -> PcieTree:
    """The tree, without the vertices that only pass on the traffic of one link.

    Args:
        file: of which `numa_per_socket` means `cpu` elements, which are NUMA nodes.
        first: the number of the first switch.
        coherent: GB/s each way from GPUs to their CPU beside PCIe.

    Raises:
        TopologyError: an odd speed or width, a GPU with devices behind it, too many CPUs.
    """
    tree = file.tree
    of_slot = {id(device.slot): device for device in file.devices}
    speeds = _Speeds(file.said.rates, file.notes)
    # What reaches each element from below: the element on top there, and the GB/s of the way up to here.
    below: dict[int, list[tuple[Element, Fraction]]] = {}
    stands_for: dict[int, Element] = {}
    cables: list[tuple[Element, Element, Fraction]] = []
    switches: list[Element] = []
    for element in reversed(tree.order):  # children before parents
        reached = below.pop(id(element), [])
        device = of_slot.get(id(element))
        if device is not None and reached:
            raise TopologyError(f"pci {device.address}: must hold a gpu or further devices, not both")
        parent = tree.parent(element)
        is_top = element.tag == "cpu" or parent is None
        if device is None and not reached:
            continue
        if not is_top and parent is not None and element.tag != "pci":  # a name for what it holds, no slot
            below.setdefault(id(parent), []).extend(reached)
            continue
        top = element
        if is_top or len(reached) > 1:
            switches.append(element)
            cables += ((child, element, rate) for child, rate in reversed(reached))
        elif device is None:
            top = reached[0][0]
        stands_for[id(element)] = top
        if not is_top and parent is not None:
            offered = speeds.of(element, device, [rate for _, rate in reached])
            if top is not element:
                offered = min(offered, reached[0][1])
            below.setdefault(id(parent), []).append((top, offered))
    speeds.tell()
    switches.reverse()
    heads = _sockets(file, switches)
    cables = [(child, heads.get(id(over), over), rate) for child, over, rate in cables]
    switches = [element for element in switches if heads.get(id(element), element) is element]
    vertices = {id(device.slot): device.vertex for device in file.devices}
    vertices |= {id(element): first + index for index, element in enumerate(switches)}
    vertices |= {key: vertices[id(head)] for key, head in heads.items()}
    found = PcieTree([], _names(file, switches), {})
    found.over = {key: vertices[id(top)] for key, top in stands_for.items()}
    for one, other, rate in cables:
        found.links += cable(vertices[id(one)], vertices[id(other)], rate, PCIE_HOP_US)
    found.links = assuming(found.links, rate=speeds.assumed)
    found.links += _coherent(file, vertices, coherent)
    sockets = [element for element in switches if element.tag == "cpu"]
    found.links += _between(file, sockets, vertices)
    found.links = assuming(found.links, latency=PCIE_HOP)
    return found


def _sockets(file: NcclFile, switches: Sequence[Element]) -> dict[int, Element]:
    """For each `cpu` element above GPUs, by its identity, the first one of its socket.

    Processors of Arm and MI300A are a NUMA node each. Nodes without a number are a socket each.
    """
    tree, stated, notes = file.tree, file.said.numa_per_socket, file.notes
    apart = any(device.kind is not None and device.kind.name == "mi300a" for device in file.devices)
    above = {id(element) for element in switches}
    heads: dict[int, Element] = {}
    for cpus in tree.by_host(element for element in tree.order if element.tag == "cpu").values():
        numbers = {id(cpu): int(word) for cpu in cpus if (word := cpu.get("numaid", "")).isdecimal()}
        mine = [cpu for cpu in cpus if id(cpu) in above]
        is_own = apart or any(cpu.get("arch") == "arm64" for cpu in cpus)
        if len(numbers) < len(cpus) or (is_own and stated is None):
            continue
        known = sockets_of(
            [numbers[id(cpu)] for cpu in mine], stated=stated, total=max(numbers.values(), default=0) + 1
        )
        by_socket: dict[int, Element] = {}
        for cpu in mine:
            heads[id(cpu)] = by_socket.setdefault(known.of(numbers[id(cpu)]), cpu)
        if known.note and len(by_socket) < len(mine) and known.note not in notes:
            notes.append(known.note)
    return heads


def _coherent(file: NcclFile, vertices: Mapping[int, Vertex], rates: Mapping[Vertex, Fraction]) -> list[Link]:
    """The links of GPUs to their CPUs beside PCIe."""
    if not rates:
        return []
    cpus: dict[int, Element | None] = {}
    for element in file.tree.order:
        parent = file.tree.parent(element)
        cpus[id(element)] = element if element.tag == "cpu" else None if parent is None else cpus[id(parent)]
    links: list[Link] = []
    for device in file.devices:
        cpu = cpus[id(device.slot)]
        if device.vertex in rates and cpu is not None:
            links += cable(device.vertex, vertices[id(cpu)], rates[device.vertex], PCIE_HOP_US)
    return links


def _names(file: NcclFile, switches: Sequence[Element]) -> list[str]:
    """cpu0, cpu1, pcie0, ... in the order of the file, with the host in front where there are several."""
    tree = file.tree
    hosts = {tree.host(device.slot): device.host for device in file.devices}
    counted: Counter[str] = Counter()
    names = []
    for element in switches:
        kind = "cpu" if element.tag == "cpu" else "pcie"
        if len(hosts) > 1 and tree.parent(element) is not None:
            kind = f"host{hosts[tree.host(element)]}.{kind}"
        names.append(f"{kind}{counted[kind]}")
        counted[kind] += 1
    return names


def _between(file: NcclFile, sockets: Sequence[Element], vertices: Mapping[int, Vertex]) -> list[Link]:
    stated, rates = file.said.between_sockets, file.said.rates
    links: list[Link] = []
    taken: dict[str, None] = {}
    for here in file.tree.by_host(sockets).values():
        if len(here) > MAX_SOCKETS:
            raise TopologyError(f"must have at most {MAX_SOCKETS} cpus with gpus on a host, got {len(here)}")
        for one, other in combinations(here, 2):
            way = min(_crossing(one, rates), _crossing(other, rates), key=lambda way: way.rate)
            way = way if stated is None else Crossing(stated, "")
            both = cable(vertices[id(one)], vertices[id(other)], way.rate, PCIE_HOP_US)
            links += assuming(both, rate=way.assumed)
            taken[way.note] = None
    if stated is None:
        file.notes.extend(taken)
    return links


def _crossing(cpu: Element, rates: Rates) -> Crossing:
    family, model = (
        int(value) if re.fullmatch(r"[0-9]{1,6}", value) else 0
        for value in (cpu.get("familyid") or "", cpu.get("modelid") or "")
    )
    return crossing(cpu.get("arch") or "", cpu.get("vendor") or "", family, model, rates)


# --- slots --------------------------------------------------------------------------------------------


class _Speeds:
    """GB/s each way of slots, and what was assumed of those that hide it."""

    def __init__(self, rates: Rates, notes: list[str]) -> None:
        self._rates = rates
        self._notes = notes
        self._hidden: list[str] = []

    def of(self, element: Element, device: Device | None, below: Sequence[Fraction]) -> Fraction:
        """GB/s each way between a pci element and its parent.

        Virtual machines hide the speed or width of slots, and those that they emulate say 2.5 GT/s and one
        lane. Then a GPU counts with 16 lanes of its own generation, a bridge as no slower than what is below
        it, the rest as generation 3 with 16 lanes (in NCCL's rates all do).
        """
        speed, width = link_speed(element), link_width(element)
        if (speed, width) == (Fraction(5, 2), 1):
            speed = width = None
        if speed is None or width is None:
            self._hidden.append(element.get("busid") or "?")
            if below and speed is None and self._rates is Rates.DATASHEET:
                return max(below)
        if speed is None:
            kind = None if device is None or self._rates is Rates.NCCL else device.kind
            speed = GIGATRANSFERS[3 if kind is None else kind.pcie_generation]
        return pcie_rate(speed, width or 16, self._rates)

    @property
    def assumed(self) -> str:
        """Why the rates of slots are assumed; empty where all are said."""
        return "of PCIe slots that hide their speed or width" if self._hidden else ""

    def tell(self) -> None:
        """Note what was assumed."""
        if self._hidden:
            names = some([shorten(self._hidden[-1]), *self._hidden[:-1]])
            self._notes.append(
                f"pci {names} hides its speed or width, as virtual machines do: 16 "
                "lanes of its GPU's generation, or what is below, are assumed; link_speed and link_width say "
                "otherwise"
            )


def link_speed(element: Element) -> Fraction | None:
    """Gigatransfers a second; None where a virtual machine hides it."""
    text = (element.get("link_speed") or "").strip()
    if text.lower() in {"", "0", "unknown", "unknown speed"}:
        return None
    number = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,3})?)(?: ?GT/s)?(?: PCIe(?:/s)?)?", text)
    if number is None or not Fraction(number[1]):
        busid = shorten(element.get("busid") or "?")
        raise TopologyError(f"pci {busid}: link_speed must be such as 16.0 GT/s, got {shorten(text)}")
    return Fraction(number[1])


def link_width(element: Element) -> int | None:
    """Lanes; None where a virtual machine hides it."""
    text = (element.get("link_width") or "").strip()
    if text in {"", "0", "255"}:
        return None
    if text not in {"1", "2", "4", "8", "12", "16", "32"}:
        busid = shorten(element.get("busid") or "?")
        raise TopologyError(f"pci {busid}: link_width must be 1 to 32 lanes, got {shorten(text)}")
    return int(text)
