"""NICs in NCCL's XML: how fast they are, and which vertices of the topology they hang on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.topology import Vertex
from arborcast.topologies.gpus import GIGATRANSFERS
from arborcast.topologies.machine import Nic
from arborcast.topologies.rates import pcie_rate
from arborcast.topologies.readers.nccl.xml_gpus import Device, NcclFile
from arborcast.topologies.readers.nccl.xml_pcie import link_speed, link_width
from arborcast.topologies.readers.nccl.xml_tree import XmlTree, bus_address, printable, some, whole

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

MAX_NIC_ENDS = 1 << 20

_UNKNOWN_MBITS = 10_000  # as in NCCL, where a port does not say
_MOST_MBITS = 10_000_000  # 10 Tbit/s: some drivers count in kbit/s

# Why a rate is assumed, and the note that says so.
_SILENT = (
    "10 Gbit/s for NICs that do not say their speed, as in NCCL",
    "does not say the speed of {}: 10 Gbit/s, as in NCCL",
)
_TOO_FAST = "of NICs whose speed must mean kbit/s", "must mean kbit/s in the speed of {}"
_BARE = (
    "of NICs that do not say their speed: that of the slot",
    "does not say the speed of {}: that of the slot",
)


def find_nics(file: NcclFile, over: Mapping[int, Vertex]) -> tuple[Nic, ...]:
    """Ports to networks, those of one host with one name counted once.

    Args:
        file: whose NICs may have the rates of their slots.
        over: see `PcieTree`; empty without PCIe links, where NICs hang on the GPUs nearest in the tree.

    Raises:
        TopologyError: an odd speed, or more than fit into memory.
    """
    tree, rates = file.tree, file.said.rates
    near = _Nearest(tree, file.devices, over)
    found: dict[tuple[int, str], Nic] = {}
    told: dict[str, list[str]] = {note: [] for _, note in (_SILENT, _TOO_FAST, _BARE)}
    assumed: dict[str, str] = {}
    ends = 0
    for element in tree.order:
        note = ""
        if element.tag == "net":
            name = printable(element.get("name") or f"net{element.get('dev') or ''}")
            speed = whole(element, "speed", f"net {shorten(name)}") if element.get("speed") is not None else 0
            if speed <= 0:
                speed, (assumed[name], note) = _UNKNOWN_MBITS, _SILENT
            elif speed > _MOST_MBITS:
                speed, (assumed[name], note) = speed // 1000, _TOO_FAST
            rate, why = Fraction(speed, 8000), assumed.get(name, "")
        elif _is_bare_nic(element):
            name = printable(element.get("name") or bus_address(element.get("busid") or "?"))
            why, note = _BARE
            rate = pcie_rate(link_speed(element) or GIGATRANSFERS[3], link_width(element) or 16, rates)
        else:
            continue
        if note:
            told[note].append(name)
        nic = Nic(name, rate, near.of(element), why)
        if not nic.near:
            continue
        ends += len(nic.near)
        if ends > MAX_NIC_ENDS:
            raise TopologyError(f"nics must be near at most {MAX_NIC_ENDS} gpus in all, got more")
        key = (tree.host(element), name)
        twin = found.get(key)
        if twin is not None:
            faster = max(twin, nic, key=lambda each: each.rate or rate)
            nic = replace(faster, near=tuple(sorted({*twin.near, *nic.near})))
        found[key] = nic
    for note, names in told.items():
        if names:
            said = note.format(f"NIC {some([shorten(names[0]), *names[1:]])}")
            file.notes.append(f"{said}; --nic of `synth cluster` says otherwise")
    return tuple(found.values())


def _is_bare_nic(element: Element) -> bool:
    is_nic = element.tag == "pci" and (element.get("class") or "").lower().startswith(("0x0200", "0x0207"))
    return is_nic and not any(child.tag in {"nic", "pci"} for child in element)


class _Nearest:
    """Which vertices an element hangs on."""

    def __init__(self, tree: XmlTree, devices: Sequence[Device], over: Mapping[int, Vertex]) -> None:
        # Elements stand in the order of a walk: the GPUs inside one are consecutive among all.
        inside: Counter[int] = Counter()
        before: dict[int, int] = {}
        slots = {id(device.slot): device.vertex for device in devices}
        self._ranks = [slots[id(element)] for element in tree.order if id(element) in slots]
        passed = 0
        for element in tree.order:
            before[id(element)] = passed
            passed += id(element) in slots
        for element in reversed(tree.order):
            inside[id(element)] += id(element) in slots
            parent = tree.parent(element)
            if parent is not None:
                inside[id(parent)] += inside[id(element)]
        self._tree = tree
        self._over = over
        cpus = (element for element in tree.order if element.tag == "cpu" and id(element) in over)
        self._of_host = {host: [over[id(it)] for it in own] for host, own in tree.by_host(cpus).items()}
        # The nearest element, it or above, that has GPUs inside.
        self._with_gpus: dict[int, Element | None] = {}
        for element in tree.order:
            parent = tree.parent(element)
            above = None if parent is None else self._with_gpus[id(parent)]
            # Hosts share nothing: above its cpus a file has no GPUs that are near.
            is_shared = parent is None and any(child.tag == "cpu" for child in element)
            self._with_gpus[id(element)] = element if inside[id(element)] and not is_shared else above
        self._span = {key: (before[key], before[key] + inside[key]) for key in before}
        self._hosts: dict[int, list[Vertex]] = {}
        for device in devices:
            self._hosts.setdefault(tree.host(device.slot), []).append(device.vertex)

    def of(self, element: Element) -> tuple[Vertex, ...]:
        """The vertices; empty where its host has no GPUs."""
        nearest = self._with_gpus[id(element)]
        host = self._tree.host(element)
        if self._over:
            if nearest is not None and id(nearest) in self._over:
                return (self._over[id(nearest)],)
            return tuple(self._of_host.get(host, ()))
        if nearest is None:
            return tuple(self._hosts.get(host, ()))
        start, end = self._span[id(nearest)]
        return tuple(sorted(self._ranks[start:end]))
