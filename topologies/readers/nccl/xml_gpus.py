"""The GPUs in NCCL's XML: where they are, which products, and in which order they are ranks.

A `gpu` element stands in the `pci` element of its slot. Clouds' files (NCCL_TOPO_FILE) may hold the slots
alone, and leave GPUs and NVLinks to be detected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.topology import Vertex
from arborcast.topologies.builders import MAX_VERTICES
from arborcast.topologies.gpus import (
    AMD_ID,
    NVIDIA_ID,
    VENDORS,
    Gpu,
    gpu_named,
    gpu_of_architecture,
    gpu_of_capability,
    gpu_of_device,
    others_like,
)
from arborcast.topologies.readers.nccl.xml_tree import XmlTree, bus_address, hexadecimal, whole
from arborcast.topologies.readers.options import Said

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element


@dataclass(slots=True)
class Device:
    """A GPU of the file.

    Attributes:
        slot: its pci element.
        gpu: its gpu element; None where the slot alone stands in the file.
        host: counted from 0 among those that have GPUs.
        dev: its number on the host; None where the file has none.
        address: of its slot.
        kind: which product it is; None where nothing says so.
        vertex: its rank.
    """

    slot: Element
    gpu: Element | None
    host: int
    dev: int | None
    address: str
    kind: Gpu | None = None
    vertex: Vertex = -1

    @property
    def where(self) -> str:
        """What messages call it."""
        return f"gpu at {self.address}" if self.dev is None else f"gpu {self.dev} ({self.address})"

    @property
    def name(self) -> str:
        """What `Machine.devices` calls it."""
        return f"pci {self.address}" if self.dev is None else f"dev {self.dev} ({self.address})"

    def parts(self, *tags: str) -> list[Element]:
        """What stands in its gpu element under these tags."""
        return [] if self.gpu is None else [element for element in self.gpu if element.tag in tags]

    @property
    def links(self) -> list[Element]:
        """Its NVLinks or xGMI links, those to one target in one element."""
        return self.parts("nvlink", "xgmi")

    @property
    def number(self) -> int | None:
        """Its PCI device; None where the file does not say it."""
        return hexadecimal(self.slot, "device")


@dataclass(frozen=True, slots=True)
class NcclFile:
    """A file while it is read.

    Attributes:
        tree: its elements.
        said: what is said of it besides.
        devices: its GPUs in the order of their ranks.
        notes: what had to be assumed; more as more of it is read.
    """

    tree: XmlTree
    said: Said
    devices: list[Device]
    notes: list[str]

    @classmethod
    def of(cls, root: Element, said: Said) -> NcclFile:
        """That of a `system` element; errors as of `find_devices`."""
        tree, notes = XmlTree.of(root), list[str]()
        known = None if said.gpu is None else gpu_named(said.gpu)
        return cls(tree, said, find_devices(tree, known, notes), notes)


def find_devices(tree: XmlTree, known: Gpu | None, notes: list[str]) -> list[Device]:
    """The GPUs in the order of their ranks: by host, then by `dev`, where there is none by PCI address.

    Args:
        tree: of the file.
        known: what they are, where somebody says so.
        notes: gets what had to be assumed.

    Raises:
        TopologyError: fewer than two, too many, of another vendor than what is known, or what they are
            called does not tell them apart.
    """
    devices = [_device(tree, element) for element in tree.order if element.tag == "gpu"]
    devices = devices or [_bare(tree, slot) for slot in _slots(tree)]
    if not devices:
        raise TopologyError(
            "must hold at least 2 gpus, got neither gpu elements nor pci elements of a GPU's class: files "
            "for NCCL_TOPO_FILE may leave them out, NCCL_TOPO_DUMP_FILE has NCCL write all; the catalog has "
            "machines of clouds"
        )
    if len(devices) < 2:
        raise TopologyError(f"must hold at least 2 gpus, got {len(devices)}")
    if len(devices) > MAX_VERTICES // 4:
        raise TopologyError(f"must hold at most {MAX_VERTICES // 4} gpus, got {len(devices)}")
    hosts = {host: number for number, host in enumerate(dict.fromkeys(device.host for device in devices))}
    for device in devices:
        device.host = hosts[device.host]
    _check_addresses(devices)
    if known is not None:
        _check_vendor(devices, known)
    _sort(devices, notes)
    for vertex, device in enumerate(devices):
        device.vertex = vertex
        device.kind = known or _kind(device)
    if known is None:
        notes += _choices(devices)
    return devices


def _device(tree: XmlTree, gpu: Element) -> Device:
    slot = tree.parent(gpu)
    busid = None if slot is None or slot.tag != "pci" else slot.get("busid")
    if slot is None or busid is None:
        raise TopologyError(f"gpu {shorten(gpu.get('dev') or '')}: must stand in a pci element with a busid")
    address = bus_address(busid)
    return Device(slot, gpu, tree.host(gpu), whole(gpu, "dev", f"gpu at {address}"), address)


def _bare(tree: XmlTree, slot: Element) -> Device:
    return Device(slot, None, tree.host(slot), None, bus_address(slot.get("busid") or ""))


def _slots(tree: XmlTree) -> list[Element]:
    """The slots of GPUs by the class of their device; display controllers count where nothing else does."""
    display: list[Element] = []
    compute: list[Element] = []
    for element in tree.order:
        if element.tag != "pci" or not element.get("busid") or any(child.tag == "pci" for child in element):
            continue
        kind, vendor = (element.get("class") or "").lower(), hexadecimal(element, "vendor")
        if kind.startswith(("0x0302", "0x0300")) and vendor in {None, NVIDIA_ID, AMD_ID}:
            (compute if kind.startswith("0x0302") else display).append(element)
        elif kind.startswith(("0x0380", "0x1200")) and vendor == AMD_ID:
            compute.append(element)
    return compute or display


def _check_addresses(devices: Sequence[Device]) -> None:
    for (host, address), count in Counter((device.host, device.address) for device in devices).items():
        if count > 1:
            raise TopologyError(
                f"gpus of one host must differ in busid, got {shorten(address)} {count} times on host {host} "
                "(parts of one GPU, or several ranks on it, are not read)"
            )


def _check_vendor(devices: Sequence[Device], known: Gpu) -> None:
    for device in devices:
        vendor = VENDORS.get(hexadecimal(device.slot, "vendor") or 0, known.vendor)
        if vendor != known.vendor:
            raise TopologyError(
                f"gpu {known.name}: must be {vendor}'s, as {device.where} is, got {known.vendor}'s"
            )


def _sort(devices: list[Device], notes: list[str]) -> None:
    numbers = {(device.host, device.dev) for device in devices if device.dev is not None}
    if not numbers or len(numbers) == len(devices):
        devices.sort(key=lambda device: (device.host, device.dev or 0, device.address))
        return
    rank_of = {
        id(device): whole(device.gpu, "rank", device.where) for device in devices if device.gpu is not None
    }
    if sorted(rank_of.values()) != list(range(len(devices))):
        raise TopologyError("gpus of one host must differ in dev, or have the ranks 0, 1, 2...: got neither")
    notes.append("gpus of one host have the same dev: they are numbered by their rank in the file")
    devices.sort(key=lambda device: rank_of[id(device)])


def _kind(device: Device) -> Gpu | None:
    slot, gpu = device.slot, device.gpu
    vendor, number = hexadecimal(slot, "vendor"), device.number
    told = None if vendor is None or number is None else gpu_of_device(vendor, number)
    if told is not None or gpu is None:
        return told
    links = sum(whole(link, "count", f"{device.where}: {link.tag}") for link in device.links)
    gcn = gpu.get("gcn")
    # AMD's `sm` counts compute units.
    if gcn is not None or vendor == AMD_ID or any(link.tag == "xgmi" for link in device.links):
        return gpu_of_architecture(gcn or "", links=links)
    return None if gpu.get("sm") is None else gpu_of_capability(whole(gpu, "sm", device.where), links=links)


def _choices(devices: Iterable[Device]) -> list[str]:
    """A line for each product that was taken where others are alike in all that the file shows."""
    taken = dict.fromkeys(
        device.kind
        for device in devices
        if device.kind is not None and device.number not in device.kind.devices
    )
    return [
        f"takes GPUs for {kind.name} that may be {', '.join(others)}: --gpu says which"
        for kind in taken
        if (others := others_like(kind))
    ]
