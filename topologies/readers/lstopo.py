"""hwloc's XML (`lstopo --of xml`) to a machine: translated to NCCL's XML, which `nccl_xml` reads.

It shows packages, PCIe with the GB/s of each link, and network ports by name. NVLinks and xGMI stand in it
where hwloc was built with NVML or ROCm SMI (its matrices NVLinkBandwidth and XGMIBandwidth), else in the
table of `nvidia-smi topo -m` or `rocm-smi --showtopo` behind the XML in the same file. Where neither is
there, those of the board that a GPU is sold on are assumed, as in NCCL's files that hold slots alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING

from arborcast.synth.errors import TopologyError
from arborcast.topologies.gpus import AMD_ID, GIGATRANSFERS, GPUS, NVIDIA_ID, Gpu, gpu_of_device
from arborcast.topologies.machine import Machine
from arborcast.topologies.rates import Rates, pcie_rate
from arborcast.topologies.readers.kinds import kind_of
from arborcast.topologies.readers.nccl.xml_links import CPU_CLASS, NVSWITCH_CLASS
from arborcast.topologies.readers.nccl.xml_tree import bus_address, printable
from arborcast.topologies.readers.nccl_xml import machine_of, parse_xml
from arborcast.topologies.readers.nvidia_smi import parse_nvidia_smi
from arborcast.topologies.readers.options import Said, reader
from arborcast.topologies.readers.rocm_smi import parse_rocm_smi

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

_DTD = re.compile(r"<!DOCTYPE topology [^<>\[\]]{0,99}>")
_PACKAGES = {"Package", "Socket"}  # the latter in hwloc 1
_MATRICES = {"NVLinkBandwidth", "XGMIBandwidth"}  # MB/s from the object of a row to that of a column
_TYPE = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]")
_SPEED = re.compile(r"[0-9]{1,4}(?:\.[0-9]{1,9})?")
_NETWORK, _RDMA = {"2", "16"}, {"3", "32", "48"}  # `osdev_type` of ports in hwloc 1 and 2, and in 3
_IDLE = GIGATRANSFERS[1]
MOST_OBJECTS = 1 << 18
MOST_CELLS = 1 << 20


@dataclass(frozen=True, slots=True)
class _Device:
    """A PCI device: its element, its class in 4 digits, vendor and device."""

    element: Element
    kind: str
    vendor: int
    device: int

    @property
    def gpu(self) -> Gpu | None:
        return gpu_of_device(self.vendor, self.device)

    @property
    def busid(self) -> str:
        return self.element.get("pci_busid") or ""

    def ports(self, types: Collection[str]) -> list[str]:
        """Names of what the operating system has of these types in it."""
        inside = self.element.iter("object")
        return [printable(each.get("name") or "") for each in inside if each.get("osdev_type") in types]


_Links = Iterable[tuple[int, str, str, int]]
"""The number of a GPU, the address and the class of what its links lead to, and how many these are."""


@reader
def parse_lstopo(text: str, place: str, said: Said) -> Machine:
    """The machine that hwloc shows; GPUs are ranks in the order of their PCI addresses, as for nvidia-smi.

    A package is a socket. NVIDIA's display and compute devices are GPUs; where there are none, AMD's that the
    table of GPUs has. Ports with RDMA are NICs, where there are none all; they are as fast as their slot. A
    GPU of PCIe 3 or later that reads generation 1 is idle: its lanes count, at the rate of its product.

    Args:
        text: the XML, with other text behind it, such as what `nvidia-smi topo -m` prints.
        place: what errors begin with.
        said: what else is said of it (see `parse_nccl_xml`).

    Raises:
        TopologyError: no such XML, fewer than two GPUs, another number of them in the table, links that
            these GPUs do not have.
    """
    xml, end, beside = text.partition("</topology>")
    root = parse_xml(_DTD.sub("", xml[max(xml.find("<?xml"), 0) :], count=1) + end, "topology", "lstopo's")
    if sum(1 for _ in root.iter()) > MOST_OBJECTS:
        raise TopologyError(f"must have at most {MOST_OBJECTS} elements, got more")
    devices = list(_devices(root))
    gpus = _gpus(devices)
    if len(gpus) < 2:
        raise TopologyError(
            f"must show at least 2 GPUs, PCI devices of NVIDIA or AMD, got {len(gpus)}; "
            "lstopo --whole-io --of xml writes all that there are"
        )
    system, slots = _translated(root, devices, gpus)
    links = list(_measured(root, devices, gpus))
    is_shown = bool(links)
    if not is_shown and kind_of("", beside) in {"nvidia-smi", "rocm-smi"}:
        links, is_shown = list(_beside(beside, place, said, gpus)), True
    if is_shown:
        _add_links(slots, gpus, links)
    return machine_of(system, said, "lstopo")


def _devices(root: Element) -> Iterator[_Device]:
    for element in root.iter("object"):
        found = _TYPE.match((element.get("pci_type") or "").lower())
        if element.get("type") == "PCIDev" and found is not None:
            yield _Device(element, found[1], int(found[2], 16), int(found[3], 16))


def _gpus(devices: Iterable[_Device]) -> list[_Device]:
    shown = [each for each in devices if each.kind in {"0300", "0302", "0380", "1200"}]
    nvidia = [each for each in shown if each.vendor == NVIDIA_ID]
    amd = [each for each in shown if each.vendor == AMD_ID and each.gpu is not None]
    return sorted(nvidia or amd, key=lambda each: each.busid)


def _translated(
    root: Element, devices: Sequence[_Device], gpus: Sequence[_Device]
) -> tuple[Element, list[Element]]:
    """NCCL's `system` with a `cpu` for each package, and the `pci` element of each GPU."""
    from xml.etree.ElementTree import Element, SubElement

    nics = [each for each in devices if each.kind in {"0200", "0207", "0280", "0c06"}]
    ports = [each for each in nics if each.ports(_RDMA)] or nics
    names = {id(each.element): each.ports(_RDMA) or each.ports(_NETWORK) for each in ports}
    wanted = {id(each.element): each for each in gpus}
    slots: dict[int, Element] = {}
    system = Element("system")
    stack = [(root, _cpu(system, root, root))]
    while stack:
        element, over = stack.pop()
        own, speed = id(element), element.get("pci_link_speed") or ""
        attributes = {"busid": element.get("pci_busid") or ""}
        if element.get("type") in _PACKAGES:
            over = _cpu(system, root, element)
        elif element.get("type") == "Bridge" and attributes["busid"]:
            inside = [wanted[id(each)].gpu for each in element.iter("object") if id(each) in wanted]
            over = SubElement(over, "pci", {**attributes, "class": "0x060400", **_link(speed, inside)})
        elif own in wanted:
            device = wanted[own]
            ids = {"vendor": f"{device.vendor:#06x}", "device": f"{device.device:#06x}", "class": "0x030200"}
            slots[own] = SubElement(over, "pci", {**attributes, **ids, **_link(speed, [device.gpu])})
        elif names.get(own):
            port = {"class": "0x020000", "name": names[own][0]}
            SubElement(over, "pci", {**attributes, **port, **_link(speed, [])})
        stack += [(child, over) for child in reversed(element) if child.tag == "object"]
    return system, [slots[id(each.element)] for each in gpus]


def _cpu(system: Element, root: Element, package: Element) -> Element:
    """NCCL's `cpu` for a package, or for what hangs on none."""
    from xml.etree.ElementTree import SubElement

    machine = next((each for each in root if each.get("type") == "Machine"), root)
    infos = [*machine.findall("info"), *package.findall("info")]
    said = {info.get("name"): info.get("value") or "" for info in infos}
    is_power = said.get("CPUModel", "").startswith("POWER")
    architecture = "ppc64le" if is_power else said.get("Architecture", "")
    return SubElement(
        system,
        "cpu",
        arch={"aarch64": "arm64", "ppc64le": "ppc64"}.get(architecture, architecture),
        vendor=said.get("CPUVendor", ""),
        familyid=said.get("CPUFamilyNumber", ""),
        modelid=said.get("CPUModelNumber", ""),
    )


def _link(speed: str, gpus: Sequence[Gpu | None]) -> dict[str, str]:
    """`link_speed` and `link_width` of these GB/s, as hwloc multiplies them; none where no lanes carry that.

    `gpus` is what hangs on the link: all of it is idle that reads generation 1 while it has a later one.
    """
    shown = Fraction(speed) if _SPEED.fullmatch(speed) else Fraction(0)
    for rate, lanes in product(GIGATRANSFERS.values(), (16, 8, 4, 2, 1, 32)):
        known = pcie_rate(rate, lanes, Rates.DATASHEET)
        if abs(known - shown) * 200 <= known:
            later = [gpu is not None and gpu.pcie_generation > 2 for gpu in gpus]
            idle = rate == _IDLE and bool(later) and all(later)
            return {"link_width": str(lanes), **({} if idle else {"link_speed": f"{float(rate):g}"})}
    return {}


def _measured(root: Element, devices: Sequence[_Device], gpus: Sequence[_Device]) -> _Links:
    """The links that hwloc's matrices show, which name GPUs' ports, switches and packages by `gp_index`."""
    at: dict[str, tuple[str, str]] = {}
    for device in devices:
        is_switch = device.element.get("subtype") == "NVSwitch" or device.kind == "0680"
        kind = NVSWITCH_CLASS if is_switch else "0x030200"
        inside = device.element.iter("object")
        at.update((each.get("gp_index") or "", (device.busid, kind)) for each in inside)
    packages = (each for each in root.iter("object") if each.get("type") in _PACKAGES)
    at.update((each.get("gp_index") or "", ("cpu", CPU_CLASS)) for each in packages)
    number = {gpu.busid: index for index, gpu in enumerate(gpus)}
    for matrix in (
        each for each in root if each.tag.startswith("distances") and each.get("name") in _MATRICES
    ):
        names, values = (
            " ".join(part.text or "" for part in matrix if part.tag == tag).split()
            for tag in ("indexes", "u64values")
        )
        if len(names) ** 2 != len(values) or len(values) > MOST_CELLS or not all(map(str.isdecimal, values)):
            rule = f"must have a number for each pair of its {len(names)} objects"
            raise TopologyError(f"{matrix.get('name')}: {rule}, got {len(values)} words")
        ends = [at.get(name.rpartition(":")[2], ("", "")) for name in names]
        for ((here, _), (there, kind)), value in zip(product(ends, ends), values, strict=True):
            if here in number and there != here and int(value[:12]):
                gpu = gpus[number[here]].gpu
                each = 25 if gpu is None or not gpu.link else gpu.link
                yield number[here], there, kind, max(1, round(int(value[:12]) / 1000 / each))


def _beside(text: str, place: str, said: Said, gpus: Sequence[_Device]) -> _Links:
    """NVLinks or xGMI of a tool's table, whose rates are so many times that of a link of its GPUs."""
    read = parse_rocm_smi if kind_of("", text) == "rocm-smi" else parse_nvidia_smi
    kinds = {each.gpu.name for each in gpus if each.gpu is not None}
    shown = read(text, place, gpu=said.gpu or (min(kinds) if len(kinds) == 1 else None), pcie=False)
    topology = shown.topology
    if topology.ranks != len(gpus):
        raise TopologyError(f"its table must show the {len(gpus)} GPUs of its XML, got {topology.ranks}")
    addresses = [bus_address(name) for name in shown.devices]
    number = {each.busid: index for index, each in enumerate(gpus)}
    places = [number.get(address, index) for index, address in enumerate(addresses)]
    for link in topology.links:
        is_switch = str(topology.label(link.dst)).startswith("nvswitch")
        kind = shown.gpus[link.src] if link.src < topology.ranks else None
        if kind is not None and (is_switch or link.dst < topology.ranks):
            count = round(link.bandwidth / GPUS[kind].link)
            end = ("nvswitch", NVSWITCH_CLASS) if is_switch else (gpus[places[link.dst]].busid, "0x030200")
            yield places[link.src], *end, count


def _add_links(slots: Sequence[Element], gpus: Sequence[_Device], links: _Links) -> None:
    """A `gpu` element in each slot, with what its links lead to."""
    from xml.etree.ElementTree import SubElement

    elements = [SubElement(slot, "gpu", dev=str(number)) for number, slot in enumerate(slots)]
    for here, target, kind, count in links:
        tag = "nvlink" if gpus[here].vendor == NVIDIA_ID else "xgmi"
        if count:
            SubElement(elements[here], tag, target=target, count=str(count), tclass=kind)
