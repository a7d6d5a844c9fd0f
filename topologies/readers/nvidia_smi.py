"""The text of `nvidia-smi topo -m` to a topology.

The text holds a matrix of connections: NV# (so many NVLinks), or the way over PCIe (PIX, PXB, PHB, NODE,
SYS). It holds neither the generation of the GPUs nor any rate, and it does not say whether NVLinks lead to
the other GPU or to an NVSwitch. Both are worked out here, by rules that the docstrings give.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

from arborcast.synth.errors import InputError, TopologyError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.topology import Link, Topology, Vertex
from arborcast.topologies.builders import cable, check_size, with_obvious_symmetries
from arborcast.topologies.gpus import GPUS, Gpu, gpu_named, slot_rate
from arborcast.topologies.machine import Machine
from arborcast.topologies.rates import (
    BETWEEN_SOCKETS,
    NVLINK_LATENCY_US,
    NVSWITCH_HOP_US,
    PCIE_HOP_US,
    Rates,
)

_log = logging.getLogger(__name__)

LEVELS = {"PIX": "pcie", "PXB": "bridges", "PHB": "hostbridge", "NODE": "numa", "SYS": "host"}
"""The ways over PCIe from near to far, with what the switch that stands for each is called."""

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU = re.compile(r"GPU[0-9]+")
_CELL = re.compile(rf"X|NV([0-9]{{1,3}})|{'|'.join(LEVELS)}|SOC")


@dataclass(frozen=True, slots=True)
class Matrix:
    """What the text says: the devices in order, and the cell of each pair of different devices."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    cells: dict[tuple[str, str], str]

    def nvlinks(self, first: int, second: int) -> int:
        """NVLinks between two GPUs, by their numbers."""
        cell = self.cells.get((self.gpus[first], self.gpus[second]), "")
        return int(cell[2:]) if cell.startswith("NV") else 0


def parse_nvidia_smi(
    text: str,
    place: str,
    *,
    gpu: str | None = None,
    pcie: bool = False,
    between_sockets: Fraction | None = None,
    rates: Rates = Rates.DATASHEET,
) -> Machine:
    """The machine that the text shows; GPU i is rank i, NICs are no vertices.

    A set of GPUs joined by NVLinks counts as linked directly when no GPU needs more NVLinks for that than
    its generation has; otherwise its GPUs share their links over an NVSwitch: every pair then shows the
    smaller of the two GPUs' link counts (NV12 everywhere on an A100 box), and each GPU gets one link to the
    switch with its own count. Without `gpu` the generation is guessed from the link counts, and a warning
    says what was assumed.

    Args:
        text: the saved output, possibly with other text before and after it.
        place: what errors begin with.
        gpu: the generation (see `topologies.GPUS`).
        pcie: whether PCIe paths become links too, as a tree of switches (see `topologies.nvidia_smi`).
        between_sockets: GB/s each way on a path that shows SYS; 10 unless given (see `topologies.rates`).
        rates: which rates an NVLink has.

    Raises:
        TopologyError: no matrix, a broken matrix, counts that no GPU has, no links at all.
    """
    try:
        return _machine(_read(text), place, gpu, pcie, between_sockets or BETWEEN_SOCKETS, rates)
    except InputError as error:
        raise TopologyError(f"{place}: {error}") from error


def _machine(
    matrix: Matrix, place: str, gpu: str | None, pcie: bool, between_sockets: Fraction, rates: Rates
) -> Machine:
    count = len(matrix.gpus)
    if count < 2:
        raise TopologyError(f"must show at least 2 GPUs, got {count}")
    check_size("matrix", 2 * count, count * count)
    domains = _domains(matrix)
    known = None if gpu is None else gpu_named(gpu)
    if known is None and (domains or pcie):
        known = _guess(matrix, domains)
        assumed = (
            f"{known.name} ({float(known.rate(rates)):g} GB/s each way per NVLink) from the link counts"
            if domains
            else f"the PCIe of a {known.name} ({float(slot_rate(known, rates)):.4g} GB/s each way)"
        )
        _log.warning(
            "%s: nvidia-smi does not say which GPUs these are; assuming %s; gpu= or --gpu says otherwise",
            place,
            assumed,
        )
    links: list[Link] = []
    switches: list[str] = []
    if known is not None:
        for domain in domains:
            if _most_direct(matrix, domain) <= known.links:
                links += _direct_links(matrix, domain, known, rates)
            else:
                hub = count + len(switches)
                links += _switched_links(matrix, domain, known, rates, hub)
                switches.append(f"nvswitch{len(switches)}")
        if len(switches) == 1:
            switches = ["nvswitch"]
    if pcie and known is not None:
        rate = slot_rate(known, rates)
        first = count + len(switches)
        more, names = pcie_tree(
            matrix.gpus, matrix.nics, matrix.cells, rate, first=first, between_sockets=between_sockets
        )
        links += more
        switches += names
    if not links:
        raise TopologyError("shows no NVLinks; pcie=True (--pcie) takes the PCIe paths as links")
    topology = with_obvious_symmetries(Topology.build("nvidia-smi", count, links, switches))
    kind = None if known is None else known.name
    return Machine(topology, (kind,) * count, devices=matrix.gpus, hosts=(0,) * count)


def _domains(matrix: Matrix) -> list[tuple[int, ...]]:
    """The sets of at least two GPUs that NVLinks join, directly or over others of the set."""
    left = set(range(len(matrix.gpus)))
    domains = []
    while left:
        todo = [min(left)]
        left.discard(todo[0])
        domain: list[int] = []
        while todo:
            here = todo.pop()
            domain.append(here)
            reached = {other for other in left if matrix.nvlinks(here, other)}
            left -= reached
            todo += reached
        if len(domain) > 1:
            domains.append(tuple(sorted(domain)))
    return domains


def _most_direct(matrix: Matrix, domain: Sequence[int]) -> int:
    """NVLinks that the busiest GPU needs when each NV# is links of that pair alone."""
    return max(sum(matrix.nvlinks(here, other) for other in domain if other != here) for here in domain)


def _own_links(matrix: Matrix, domain: Sequence[int]) -> dict[int, int]:
    """NVLinks of each GPU when they lead to a switch: the most that any pair of it shows."""
    return {here: max(matrix.nvlinks(here, other) for other in domain if other != here) for here in domain}


def _guess(matrix: Matrix, domains: Iterable[Sequence[int]]) -> Gpu:
    """The generation that has as many NVLinks as some GPU here shows.

    Up to 18 links (the most any GPU has) pairs count as linked directly, above as joined by a switch. Then
    6 links are a V100's, 8 an A800's, 12 an A100's, 18 an H100's. Eight GPUs with four single links each are
    the P100 box, and two GPUs that share four are workstation cards (A6000).
    """
    needed = 0
    for domain in domains:
        direct = _most_direct(matrix, domain)
        needed = max(needed, direct if direct <= 18 else max(_own_links(matrix, domain).values()))
    if needed > 18:
        raise TopologyError(
            f"shows a GPU with {needed} NVLinks, must be at most 18; gpu= must say which it is"
        )
    counts = [matrix.nvlinks(first, second) for first, second in combinations(range(len(matrix.gpus)), 2)]
    linked = {count for count in counts if count}
    if needed == 4 and linked == {1} and len(matrix.gpus) == 8:
        return GPUS["p100"]
    if needed == 4 and linked == {4}:
        return GPUS["a6000"]
    return next(GPUS[name] for name in ("v100", "a800", "a100", "h100") if needed <= GPUS[name].links)


def _direct_links(matrix: Matrix, domain: Sequence[int], gpu: Gpu, rates: Rates) -> list[Link]:
    return [
        link
        for first, second in combinations(domain, 2)
        if matrix.nvlinks(first, second)
        for link in cable(first, second, matrix.nvlinks(first, second) * gpu.rate(rates), NVLINK_LATENCY_US)
    ]


def _switched_links(matrix: Matrix, domain: Sequence[int], gpu: Gpu, rates: Rates, hub: int) -> list[Link]:
    own = _own_links(matrix, domain)
    for first, second in combinations(domain, 2):
        if matrix.nvlinks(first, second) != min(own[first], own[second]):
            direct = _most_direct(matrix, domain)
            raise TopologyError(
                f"{matrix.gpus[first]} to {matrix.gpus[second]}: these NVLinks fit neither direct links "
                f"({direct} at one GPU; {gpu.name} has {gpu.links}) nor an NVSwitch (all pairs alike)"
            )
    most = max(own.values())
    if most > gpu.links:
        raise TopologyError(f"shows NV{most}, must be at most NV{gpu.links} for {gpu.name}")
    return [
        link
        for here, count in own.items()
        for link in cable(here, hub, count * gpu.rate(rates), NVSWITCH_HOP_US)
    ]


# --- the text -----------------------------------------------------------------------------------------


def _read(text: str) -> Matrix:
    lines = [(number, _ANSI.sub("", line).split()) for number, line in enumerate(text.splitlines(), 1)]
    columns: list[str] | None = None
    known: set[str] = set()
    rows: dict[str, tuple[int, list[str]]] = {}
    for number, words in lines:
        if not words:
            continue
        if columns is None:
            columns = _columns(words)
            known = set(columns or ())
        elif words[0] in known:
            if words[0] in rows:
                raise TopologyError(f"line {number}: {words[0]} must have one row, got another")
            rows[words[0]] = (number, words[1:])
            if len(rows) == len(columns):
                break
    if columns is None:
        raise TopologyError("must hold the matrix of nvidia-smi topo -m, got no line that begins with GPU0")
    if len(set(columns)) < len(columns):
        raise TopologyError("columns must have different names, got one twice")
    gpus = tuple(name for name in columns if _GPU.fullmatch(name))
    nics = tuple(name for name in columns if not _GPU.fullmatch(name))
    cells: dict[tuple[str, str], str] = {}
    for name in columns:
        if name in rows:
            cells.update(_cells(name, columns, *rows[name]))
        elif name in gpus:
            raise TopologyError(f"row {name} is missing")
    _check_both_ways(gpus, cells)
    return Matrix(gpus, nics, cells)


def _columns(words: Sequence[str]) -> list[str] | None:
    """The devices of a header line, which begins with a GPU and holds no cell; None for other lines."""
    if not _GPU.fullmatch(words[0]) or any(_CELL.fullmatch(word) for word in words):
        return None
    # What follows the devices: "CPU Affinity", "NUMA Affinity", "GPU NUMA ID".
    end = next((index for index, word in enumerate(words) if word in {"CPU", "NUMA", "GPU"}), len(words))
    return list(words[:end])


def _cells(
    name: str, columns: Sequence[str], number: int, words: Sequence[str]
) -> dict[tuple[str, str], str]:
    if len(words) < len(columns):
        raise TopologyError(f"line {number}: {name} must have {len(columns)} entries, got {len(words)}")
    cells = {}
    for other, word in zip(columns, words, strict=False):
        if not _CELL.fullmatch(word) or (word == "X") != (other == name) or word == "NV0":
            rule = "must be X" if other == name else f"must be NV# or one of {', '.join(LEVELS)}"
            raise TopologyError(f"line {number}: {name} to {other}: {rule}, got {shorten(word)}")
        if other != name:
            cells[name, other] = "SYS" if word == "SOC" else word
    return cells


def _check_both_ways(gpus: Sequence[str], cells: dict[tuple[str, str], str]) -> None:
    for first, second in combinations(gpus, 2):
        there, back = cells[first, second], cells[second, first]
        if there != back:
            raise TopologyError(f"{first} to {second} shows {there}, must be alike back, got {back}")


def pcie_tree(
    gpus: Sequence[str],
    nics: Sequence[str],
    cells: Mapping[tuple[str, str], str],
    rate: Fraction,
    *,
    first: Vertex,
    between_sockets: Fraction = BETWEEN_SOCKETS,
) -> tuple[list[Link], list[str]]:
    """Links and names of the switches of the tree over the GPUs; its switches are `first` and on.

    NICs only help to find it: two GPUs near one NIC are near each other. Where NVLinks hide the path of a
    pair and no NIC tells it, the pair counts as far apart (SYS).

    Args:
        gpus: names of the GPUs; the vertex of each is its place here.
        nics: names of the other devices.
        cells: the connection of each ordered pair of devices.
        rate: GB/s each way of one PCIe link; links up to the host get no more than the way between sockets.
        first: the number of the first switch.
        between_sockets: GB/s each way between two sockets.
    """
    devices = [*gpus, *nics]
    group = {device: device for device in devices}
    members = {device: [device] for device in devices}
    # What stands for a group in the tree so far: the GPU, the switch above, or nothing (NICs only).
    top: dict[str, Vertex | None] = {
        device: index if index < len(gpus) else None for index, device in enumerate(devices)
    }
    links: list[Link] = []
    names: list[str] = []
    for level, word in LEVELS.items():
        pairs = [pair for pair, cell in cells.items() if cell == level]
        if level == "SYS":
            pairs += [(gpus[0], gpu) for gpu in gpus[1:]]
        children: dict[str, list[Vertex]] = {}
        for one, other in pairs:
            kept, gone = group[one], group[other]
            if kept == gone:
                continue
            if len(members[kept]) < len(members[gone]):
                kept, gone = gone, kept
            under = [children.pop(side, _listed(top[side])) for side in (kept, gone)]
            children[kept] = [*under[0], *under[1]]
            for device in members[gone]:
                group[device] = kept
            members[kept] += members.pop(gone)
        counted = 0
        for kept, vertices in children.items():
            if len(vertices) < 2:
                top[kept] = vertices[0] if vertices else None
                continue
            switch = first + len(names)
            names.append(f"{word}{counted}")
            counted += 1
            offered = min(rate, between_sockets) if level == "SYS" else rate
            for vertex in sorted(vertices):
                links += cable(vertex, switch, offered, PCIE_HOP_US)
            top[kept] = switch
    return links, names


def _listed(vertex: Vertex | None) -> list[Vertex]:
    return [] if vertex is None else [vertex]
