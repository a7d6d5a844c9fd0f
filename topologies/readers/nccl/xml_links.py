"""Where NVLinks and xGMI links of NCCL's XML lead, and what is assumed where the file leaves them out.

An `nvlink` or `xgmi` element names the PCI address and the class of its target, and counts the links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING

from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.topology import Link, Switch, Vertex
from arborcast.topologies.builders import assuming, cable, switch_that
from arborcast.topologies.gpus import AMD, nvswitch_for, others_like
from arborcast.topologies.rates import NOT_NVLINK, NVLINK_LATENCY_US, NVSWITCH_HOP_US, Rates
from arborcast.topologies.readers.nccl.xml_gpus import Device, NcclFile
from arborcast.topologies.readers.nccl.xml_tree import bus_address, some, whole
from arborcast.topologies.wirings import links_of_board

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

NVSWITCH_CLASS, CPU_CLASS = "0x068000", "0x068001"  # the latter: the NVLink bridge of a POWER CPU

_ALIKE = {"nvswitch", "mesh"}
"""Boards whose wiring is the same in every box."""

MOST_LINKS = 64
"""Of one GPU; the most that is known are 36 (NVLink 6)."""

FABRIC = "fffffff:ff"
"""How the target begins of NVLinks to switches that the host cannot see: those of the whole NVLink domain."""


@dataclass(slots=True)
class GpuWiring:
    """Where the links of all GPUs lead.

    Attributes:
        pairs: links from one GPU to another, by their ranks.
        switched: links from a GPU to a switch, by its rank and the switch's key: the host, or None for the
            one of all hosts.
        to_cpu: links from a GPU to its CPU.
        assumed: why there are links; empty where the file shows them.
    """

    pairs: Counter[tuple[Vertex, Vertex]] = field(default_factory=Counter)
    switched: Counter[tuple[Vertex, int | None]] = field(default_factory=Counter)
    to_cpu: Counter[Vertex] = field(default_factory=Counter)
    assumed: str = ""


def find_wiring(file: NcclFile) -> GpuWiring:
    """The links that the file shows, or those of the board that a GPU is sold on only.

    The latter is assumed where the file holds the slots of GPUs alone, and where it shows no links at all and
    somebody says which GPUs these are. Where PCIe paths are asked for, nothing need be refused for missing
    links.

    Raises:
        TopologyError: a wrong count, other links back than there, GPUs whose links would be a guess.
    """
    devices, pcie = file.devices, file.said.pcie
    if any(device.links for device in devices):
        return _shown(devices, file.notes)
    are_bare = devices[0].gpu is None
    # A dump names the PCI device: such a file shows all links that there are.
    unsure = [
        device.kind
        for device in devices
        if device.kind is not None and device.kind.board in _ALIKE and device.number is None
    ]
    if are_bare or file.said.gpu is not None:
        if not pcie and all(device.kind is None for device in devices):
            raise TopologyError(
                f"holds {len(devices)} slots of GPUs, neither which these are nor their NVLinks: gpu= (--gpu "
                "a100, h100, ...) says which, pcie=True (--pcie) takes PCIe paths alone"
            )
        wired = next(
            (device.kind for device in devices if device.kind and device.kind.board == "wired"), None
        )
        if wired is not None and not pcie:
            raise TopologyError(
                f"does not show how the links of its {wired.name} are wired, which differs from box to box: "
                "a dump (NCCL_TOPO_DUMP_FILE) does, or lstopo's XML with nvidia-smi topo -m behind it; "
                "pcie=True (--pcie) takes PCIe paths alone"
            )
        return _boards(devices, file.notes)
    if unsure and not pcie:
        names = ", ".join([unsure[0].name, *others_like(unsure[0])])
        raise TopologyError(
            f"shows neither links of its GPUs nor which these are ({names}?): gpu= (--gpu) says which, with "
            "the NVLinks of an SXM board, pcie=True (--pcie) takes PCIe paths alone"
        )
    return GpuWiring()


def _shown(devices: Sequence[Device], notes: list[str]) -> GpuWiring:
    """Count links by where they lead; those to the GPU itself and to what the file lacks are left out."""
    by_address = {(device.host, device.address): device for device in devices}
    wiring = GpuWiring()
    to_itself: list[str] = []
    to_nothing: list[str] = []
    for device in devices:
        total = 0
        for link in device.links:
            count = whole(link, "count", f"{device.where}: {link.tag}")
            if not 1 <= count <= MOST_LINKS:
                rule = f"must be in 1..{MOST_LINKS}"
                raise TopologyError(f"{device.where}: {link.tag} count {rule}, got {count}")
            total += count
            end = _end(device, link, by_address)
            if isinstance(end, str):
                to_nothing.append(f"{device.where} to {shorten(end)}")
            elif end is device:
                to_itself.append(device.where)
            elif isinstance(end, Device):
                wiring.pairs[device.vertex, end.vertex] += count
            elif end is _CPU:
                wiring.to_cpu[device.vertex] += count
            else:
                wiring.switched[device.vertex, end.key] += count
        _check_total(device, total)
    _check_both_ways(devices, wiring)
    if to_itself:
        notes.append(f"links of {some(to_itself)} to itself are left out")
    if to_nothing:
        notes.append(f"links to what the file does not hold are left out: {some(to_nothing)}")
    notes += _counts_of_boards(devices, wiring)
    notes += _odd_counts(devices, wiring)
    return wiring


def _counts_of_boards(devices: Sequence[Device], wiring: GpuWiring) -> Iterable[str]:
    """Take the numbers of links of known boards where a host's pairs all count one; a line each."""
    for host in dict.fromkeys(device.host for device in devices):
        here = [device for device in devices if device.host == host]
        kinds = {device.kind for device in here}
        kind = here[0].kind
        first = here[0].vertex
        own = {
            (one - first, other - first): count
            for (one, other), count in wiring.pairs.items()
            if one < other and devices[one].host == host
        }
        board = None if kind is None or len(kinds) > 1 else links_of_board(kind, own)
        if kind is None or board is None or set(own.values()) != {1}:
            continue
        for (one, other), links in board.items():
            wiring.pairs[first + one, first + other] = wiring.pairs[first + other, first + one] = links
        most = max(board.values())
        yield (
            f"counts 1 xGMI link for every pair, where boards of {kind.name} have "
            f"{'' if set(board.values()) == {most} else 'up to '}{most} links: the latter count"
        )


@dataclass(frozen=True, slots=True)
class _Switch:
    key: int | None


_CPU = _Switch(-1)


def _end(device: Device, link: Element, by_address: dict[tuple[int, str], Device]) -> Device | _Switch | str:
    """What a link leads to; its target where the file does not hold it."""
    kind = (link.get("tclass") or "").strip().lower()
    target = bus_address(link.get("target") or "")
    if kind.startswith(CPU_CLASS):
        return _CPU
    if target.startswith(FABRIC):
        return _Switch(None)
    if kind.startswith(NVSWITCH_CLASS):
        return _Switch(device.host)
    return by_address.get((device.host, target), target)


def _check_total(device: Device, total: int) -> None:
    kind = device.kind
    if total and (kind is None or not kind.links):
        why = "nothing says which GPU it is" if kind is None else f"a {kind.name} has none"
        raise TopologyError(f"{device.where}: has {total} links, but {why}; gpu= (--gpu) says which it is")
    if kind is None:
        return
    # RCCL's own models of machines to come have more than the GPUs that they are written for.
    most, links = (MOST_LINKS, "xGMI links") if kind.vendor == AMD else (kind.links, "NVLinks")
    if total > most:
        raise TopologyError(f"{device.where}: must have at most {most} {links} ({kind.name}), got {total}")


def _check_both_ways(devices: Sequence[Device], wiring: GpuWiring) -> None:
    for (src, dst), count in wiring.pairs.items():
        back = wiring.pairs.get((dst, src), 0)
        if back != count:
            raise TopologyError(
                f"{devices[src].where}: has {count} links to {devices[dst].where}, must be alike back, "
                f"got {back}"
            )


def _odd_counts(devices: Sequence[Device], wiring: GpuWiring) -> Iterable[str]:
    """Lines on GPUs with more links than their kind has, and with fewer to a switch than others."""
    totals: Counter[Vertex] = Counter()
    for (vertex, _), count in wiring.pairs.items():
        totals[vertex] += count
    for device in devices:
        if device.kind is not None and totals[device.vertex] > device.kind.links:
            yield (
                f"shows {totals[device.vertex]} xGMI links at {device.where}, where a {device.kind.name} has "
                f"{device.kind.links}; --gpu says what else it is"
            )
            break
    most: dict[int | None, int] = {}
    for (_, switch), count in wiring.switched.items():
        most[switch] = max(count, most.get(switch, 0))
    fewer = [
        f"{device.where} ({count}, others {links})"
        for device in devices
        for switch in (None, device.host)
        if (links := most.get(switch, 0)) > (count := wiring.switched.get((device.vertex, switch), 0))
        and (count or not device.links)
    ]
    if fewer:
        yield f"shows fewer NVLinks to a switch than others at {some(fewer)}"


def _boards(devices: Sequence[Device], notes: list[str]) -> GpuWiring:
    wiring = GpuWiring()
    said: dict[str, str] = {}
    by_host: dict[int, list[Device]] = {}
    for device in devices:
        by_host.setdefault(device.host, []).append(device)
    for host, here in by_host.items():
        for device in here:
            if device.kind is not None and device.kind.board == "nvswitch":
                wiring.switched[device.vertex, host] += device.kind.links
                said[device.kind.name] = f"{device.kind.links} from each to an NVSwitch"
        meshed = [device for device in here if device.kind is not None and device.kind.board == "mesh"]
        for one, other in combinations(meshed, 2):
            if one.kind is not None and one.kind is other.kind and len(meshed) <= one.kind.links + 1:
                wiring.pairs[one.vertex, other.vertex] += 1
                wiring.pairs[other.vertex, one.vertex] += 1
                said[one.kind.name] = "1 from each to each"
    for name, how in said.items():
        notes.append(f"leaves links to be detected: those of {name} are assumed, {how}; --gpu says otherwise")
        wiring.assumed = f"those of the board of {name}"
    return wiring


def links_of(file: NcclFile, wiring: GpuWiring) -> tuple[list[Link], list[Switch]]:
    """The links between GPUs, and those to the switches after them, with these.

    A switch can do what it can for each of its GPUs: NVLink SHARP takes all of them.
    """
    devices, rates = file.devices, file.said.rates
    links: list[Link] = []
    for (src, dst), count in wiring.pairs.items():
        link = Link(src, dst, count * _rate(devices[src], rates), NVLINK_LATENCY_US)
        links += assuming([link], latency=NOT_NVLINK if _is_amd(devices[src]) else "")
    keys = list(dict.fromkeys(switch for _, switch in wiring.switched))
    hubs = {key: len(devices) + index for index, key in enumerate(keys)}
    for (vertex, switch), count in wiring.switched.items():
        links += cable(vertex, hubs[switch], count * _rate(devices[vertex], rates), NVSWITCH_HOP_US)
    why = wiring.assumed or next((each.kind.assumed for each in devices if each.kind is not None), "")
    links = assuming(links, rate=why)
    names = ["nvswitch"] if len(keys) == 1 else [f"nvswitch{index}" for index in range(len(keys))]
    switches = []
    for key, name in zip(keys, names, strict=True):
        kinds = [devices[vertex].kind for vertex, switch in wiring.switched if switch == key]
        switches.append(switch_that(name, nvswitch_for(kinds)))
    return links, switches


def _is_amd(device: Device) -> bool:
    return device.kind is not None and device.kind.vendor == AMD


def _rate(device: Device, rates: Rates) -> Fraction:
    if device.kind is None:
        raise AssertionError("links of an unknown GPU were refused before")
    return device.kind.rate(rates)


def links_to_cpus(file: NcclFile, wiring: GpuWiring) -> dict[Vertex, Fraction]:
    """GB/s each way between a GPU and its CPU beside PCIe: NVLink-C2C, MI300A's, NVLinks of POWER.

    Raises:
        TopologyError: a wrong number.
    """
    rates = file.said.rates
    found = {vertex: count * _rate(file.devices[vertex], rates) for vertex, count in wiring.to_cpu.items()}
    for device in file.devices:
        for element in device.parts("c2c"):
            where = f"{device.where}: c2c"
            megabytes, count = whole(element, "bw", where), whole(element, "count", where)
            if megabytes < 1 or count < 1:
                raise TopologyError(f"{where}: bw and count must be at least 1, got {megabytes} and {count}")
            before = found.get(device.vertex, Fraction(0))
            found[device.vertex] = before + Fraction(megabytes * count, 1000)
    return found
