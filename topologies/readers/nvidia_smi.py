"""The text of `nvidia-smi topo -m` to a machine.

The text holds a matrix of connections: NV# (so many NVLinks), or the way over PCIe (PIX, PXB, PHB, NODE,
SYS). It holds neither the generation of the GPUs nor any rate, and it does not say whether NVLinks lead to
the other GPU or to an NVSwitch. What other commands printed into the same file is used where it is there:
products (`nvidia-smi -L` and others), GB/s per NVLink (`nvidia-smi nvlink -s`). The rest is worked out here,
by rules that the docstrings give, and what was assumed is noted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations

from arborcast.synth.errors import TopologyError
from arborcast.synth.topology import Link, Switch, Topology, Vertex
from arborcast.topologies.builders import assuming, cable, joined, switch_that, with_obvious_symmetries
from arborcast.topologies.gpus import GPUS, NVIDIA, Gpu, nvswitch_for
from arborcast.topologies.machine import Machine, Nic
from arborcast.topologies.rates import NVLINK_LATENCY_US, NVSWITCH_HOP_US, Rates
from arborcast.topologies.readers.options import Said, reader
from arborcast.topologies.readers.pcie_wanted import wants_pcie
from arborcast.topologies.readers.text.pasted import (
    assumed_from_names,
    lines_of,
    named_gpus,
    nothing_known,
    nvlink_status,
    stated_gpu,
    taken_for,
    unnamed,
)
from arborcast.topologies.readers.text.pcie_paths import LEVELS, pcie_tree
from arborcast.topologies.readers.text.topo_matrix import Matrix, read_matrix

GRACE_CORES = 72
MOST_LINKS = 18
"""NVLinks of the GPUs that have most."""


@reader
def parse_nvidia_smi(text: str, place: str, said: Said) -> Machine:
    """The machine that the text shows; GPU i is rank i, NICs are no vertices.

    A set of GPUs joined by NVLinks counts as linked directly when no GPU needs more NVLinks for that than
    its generation has; otherwise its GPUs share their links over an NVSwitch: every pair then shows the
    smaller of the two GPUs' link counts (NV12 everywhere on an A100 box), and each GPU gets one link to the
    switch with its own count. Without `gpu` the text's own words decide what the GPUs are, and where there
    are none, the link counts; a note says what was assumed.

    Args:
        text: the saved output, possibly with other text around it, wrapped, framed, or damaged in columns
            of NICs; the first whole matrix counts (see `topologies.readers.text.topo_matrix`).
        place: what errors begin with.
        said: what else is said of it:
            gpu: the generation (see `topologies.GPUS`).
            pcie: whether PCIe paths become links too, as a tree of switches and CPUs (see
                `readers.text.pcie_paths`). By default they do, with a note, where NVLinks join not all.
            between_sockets: GB/s each way between two CPUs of that tree.
            numa_per_socket: NUMA nodes of a CPU (see `readers.sockets`).
            rates: the data sheet's GB/s per NVLink (`nvidia-smi nvlink -s` goes before), or NCCL's.

    Raises:
        TopologyError: no matrix, a broken matrix, counts that no GPU has.
    """
    stated = None if said.gpu is None else stated_gpu(said.gpu, NVIDIA)
    rates = said.rates
    matrix = read_matrix(text)
    count = len(matrix.gpus)
    if count < 2:
        raise TopologyError(f"must show at least 2 GPUs, got {count}; star:N,bandwidth=GB/s has N boxes")
    domains = _domains(matrix)
    cards = _identified(matrix, domains, text, place, stated, rates)
    notes = [*matrix.notes, *cards.notes]
    links: list[Link] = []
    switches: list[Switch] = []
    for domain in domains:
        if all(_direct_count(matrix, here) <= cards.links[here] for here in domain):
            links += _direct_links(matrix, domain, cards)
        else:
            hub = count + len(switches)
            links += _switched_links(matrix, domain, cards, hub)
            switches.append(switch_that(f"nvswitch{len(switches)}", _in_network(domain, cards, notes)))
    links = assuming(links, rate=cards.links_assumed)
    if len(switches) == 1:
        switches = [replace(switches[0], name="nvswitch")]
    never = ", as topo -mp never does" if "topo -mp" in text else ""
    alone = f"shows no NVLinks{never}: its PCIe paths are the links; --pcie says so"
    if wants_pcie(said, count, links, alone, notes):
        tree = pcie_tree(
            text,
            said,
            matrix.gpus,
            matrix.nics,
            matrix.cells,
            cards.kinds,
            assumed=cards.assumed,
            together=matrix.together,
            first=count + len(switches),
            nodes=matrix.nodes(),
            are_sockets=matrix.has_whole_processors(GRACE_CORES),
        )
        links += tree.links
        switches += map(Switch, tree.names)
        notes += tree.notes
        near = tree.near
    else:
        near = {nic: _nearest_gpus(matrix, nic) for nic in matrix.nics}
    return Machine(
        with_obvious_symmetries(Topology.build("nvidia-smi", count, links, switches)),
        gpus=tuple(None if kind is None else kind.name for kind in cards.kinds),
        devices=matrix.gpus,
        hosts=(0,) * count,
        nics=tuple(Nic(matrix.called.get(nic, nic), None, near[nic]) for nic in matrix.nics),
        notes=tuple(notes),
    )


def _nearest_gpus(matrix: Matrix, nic: str) -> tuple[Vertex, ...]:
    ways = [LEVELS.index(matrix.cells[gpu, nic]) for gpu in matrix.gpus]
    return tuple(vertex for vertex, way in enumerate(ways) if way == min(ways))


# --- what the GPUs are --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Cards:
    """What each GPU is taken for, by its number.

    Attributes:
        kinds: None where nothing tells, which can only be without NVLinks.
        links: how many NVLinks it has.
        rates: GB/s each way per NVLink.
        guessed: whether nothing but counts and rates of NVLinks told what they are.
        notes: what was assumed of them.
        assumed: why they are taken for these; empty where the text or somebody says it.
        links_assumed: why the rates are; empty where the text says them, too.
    """

    kinds: tuple[Gpu | None, ...]
    links: tuple[int, ...]
    rates: tuple[Fraction, ...]
    guessed: bool
    notes: tuple[str, ...] = ()
    assumed: str = ""
    links_assumed: str = ""


def _identified(
    matrix: Matrix, domains: Sequence[Sequence[int]], text: str, place: str, gpu: Gpu | None, rates: Rates
) -> _Cards:
    lines = lines_of(text)
    numbers = [int(name[3:]) for name in matrix.gpus]
    status = {} if rates is Rates.NCCL else nvlink_status(lines)
    shown = [status.get(number) for number in numbers]
    named = named_gpus(lines, NVIDIA)
    notes: tuple[str, ...] = ()
    kinds: tuple[Gpu | None, ...]
    guessed, assumed = False, ""
    if gpu is not None:
        kinds = (gpu,) * len(numbers)
    elif all(number in named.by_index for number in numbers):
        kinds = tuple(named.by_index[number] for number in numbers)
    else:
        told_by_name = assumed_from_names(named, place, NVIDIA, lambda kind: _fits(kind, matrix, domains))
        guessed = told_by_name is None
        is_bridge = re.search(r"nvlink[ -]?bridge", text, re.IGNORECASE) is not None
        kind, why = told_by_name or _assumed(matrix, domains, max(shown, key=_or_0), is_bridge)
        kinds = (kind,) * len(numbers)
        if kind is not None:
            rate = "" if not domains else f" ({float(kind.rate(rates)):g} GB/s each way per NVLink)"
            notes = (unnamed(f"{kind.name}{rate}", why, named.unknown),)
            assumed = taken_for(kind, why)
        elif named.unknown:
            notes = (f"{nothing_known(named.unknown)}: --gpu says what is alike",)
    published = next((kind.assumed for kind in kinds if kind is not None and kind.assumed), "")
    known = [GPUS["v100"] if kind is None else kind for kind in kinds]
    speeds = [kind.rate(rates) if seen is None else seen for kind, seen in zip(known, shown, strict=True)]
    if domains and any(speed != kind.rate(rates) for speed, kind in zip(speeds, known, strict=True)):
        told = [seen for seen in shown if seen is not None]
        said = ", ".join(f"{float(speed):g}" for speed in sorted(set(told)))
        some = "" if len(told) == len(shown) else f", which has {len(told)} of {len(shown)} GPUs"
        notes = (*notes, f"GB/s per NVLink are those of its nvlink status, {said}{some}")
    return _Cards(
        kinds,
        tuple(kind.links for kind in known),
        tuple(speeds),
        guessed,
        notes,
        assumed,
        (assumed or published) if None in shown else "",
    )


def _or_0(rate: Fraction | None) -> Fraction:
    return Fraction(0) if rate is None else rate


def _assumed(
    matrix: Matrix, domains: Sequence[Sequence[int]], rate: Fraction | None, is_bridge: bool
) -> tuple[Gpu | None, str]:
    """What the GPUs are taken for where none is named, and why.

    A bridge of up to four links joins workstation cards, where the text calls it one; a link of it may fail.
    """
    if not domains:
        return None, ""
    kind = _guess(matrix, domains)
    if is_bridge and max(_most_direct(matrix, domain) for domain in domains) in {3, 4}:
        return GPUS["a6000"], "the NVLink bridge that the text speaks of"
    if rate is not None:
        near = [gpu for gpu in GPUS.values() if gpu.link and abs(gpu.link - rate) * 10 <= gpu.link]
        alike = [gpu for gpu in near if gpu.vendor == NVIDIA and _fits(gpu, matrix, domains)]
        if alike and kind not in alike:
            return min(alike, key=lambda gpu: gpu.links), f"{float(rate):g} GB/s per NVLink"
    grace = _grace(matrix)
    if kind.links == MOST_LINKS and grace is not None:
        return grace, "72 cores a CPU, as Grace has, and the link counts"
    others = {
        gpu.link: gpu.name
        for gpu in reversed(GPUS.values())
        if gpu.vendor == NVIDIA and gpu.links == kind.links
    }
    others.pop(kind.link, None)
    same = ", ".join(f"{name} at {float(link):g}" for link, name in others.items())
    return kind, f"the link counts (the same as {same})" if same else "the link counts"


def _fits(gpu: Gpu, matrix: Matrix, domains: Sequence[Sequence[int]]) -> bool:
    """Whether a GPU has as many NVLinks as each one here shows at least."""
    return gpu.links >= max(
        (count for domain in domains for count in _own_links(matrix, domain).values()), default=0
    )


def _grace(matrix: Matrix) -> Gpu | None:
    """The superchip whose CPUs these are: 72 cores each, one GPU (GH200) or two (GB200) at a CPU."""
    if not matrix.has_whole_processors(GRACE_CORES):
        return None
    cores = [matrix.cores[name] for name in matrix.gpus]
    return GPUS["gh200" if len(set(cores)) == len(cores) else "gb200"]


def _guess(matrix: Matrix, domains: Sequence[Sequence[int]]) -> Gpu:
    """The generation that has as many NVLinks as some GPU here shows.

    Up to 18 links (the most any GPU has) pairs count as linked directly, above as joined by a switch. Then
    6 links are a V100's, 8 an A800's, 12 an A100's, 18 an H100's. Eight GPUs with four single links each are
    the P100 box, and two GPUs that share four are workstation cards (A6000).
    """
    needed = 0
    for domain in domains:
        direct = _most_direct(matrix, domain)
        needed = max(needed, direct if direct <= MOST_LINKS else max(_own_links(matrix, domain).values()))
    if needed > MOST_LINKS:
        raise TopologyError(
            f"shows a GPU with {needed} NVLinks, must be at most {MOST_LINKS}; gpu= (--gpu) "
            "must say which it is"
        )
    counts = [matrix.nvlinks(first, second) for first, second in combinations(range(len(matrix.gpus)), 2)]
    linked = {count for count in counts if count}
    if needed == 4 and linked == {1} and len(matrix.gpus) == 8:
        return GPUS["p100"]
    if needed == 4 and linked == {4}:
        return GPUS["a6000"]
    return next(GPUS[name] for name in ("v100", "a800", "a100", "h100") if needed <= GPUS[name].links)


# --- NVLinks ------------------------------------------------------------------------------------------


def _domains(matrix: Matrix) -> list[tuple[int, ...]]:
    """The sets of at least two GPUs that NVLinks join, directly or over others of the set."""
    pairs = combinations(range(len(matrix.gpus)), 2)
    linked = (pair for pair in pairs if matrix.nvlinks(*pair))
    return [domain for domain in joined(len(matrix.gpus), linked) if len(domain) > 1]


def _direct_count(matrix: Matrix, here: int) -> int:
    """NVLinks that a GPU needs when each NV# is links of that pair alone."""
    return sum(matrix.nvlinks(here, other) for other in range(len(matrix.gpus)) if other != here)


def _most_direct(matrix: Matrix, domain: Sequence[int]) -> int:
    return max(_direct_count(matrix, here) for here in domain)


def _own_links(matrix: Matrix, domain: Sequence[int]) -> dict[int, int]:
    """NVLinks of each GPU when they lead to a switch: the most that any pair of it shows."""
    return {here: max(matrix.nvlinks(here, other) for other in domain if other != here) for here in domain}


def _in_network(domain: Sequence[int], cards: _Cards, notes: list[str]) -> str:
    """What the NVSwitch of some GPUs can do, a word of `IN_NETWORK`; a note where that is unknown."""
    kinds = [cards.kinds[here] for here in domain]
    if cards.guessed:
        links = cards.links[domain[0]]
        alike = [gpu for gpu in GPUS.values() if gpu.board == "nvswitch" and gpu.links == links]
        able = [gpu.name for gpu in alike if gpu.in_network != "none"]
        if able and len(able) < len(alike):
            notes.append(
                f"its NVSwitch only forwards here: that of {', '.join(able)}, with as many NVLinks, adds and "
                "multicasts too (NVLink SHARP); --gpu says which it is"
            )
            return "none"
    return nvswitch_for(kinds)


def _direct_links(matrix: Matrix, domain: Sequence[int], cards: _Cards) -> list[Link]:
    return [
        link
        for first, second in combinations(domain, 2)
        if matrix.nvlinks(first, second)
        for link in cable(
            first,
            second,
            matrix.nvlinks(first, second) * min(cards.rates[first], cards.rates[second]),
            NVLINK_LATENCY_US,
        )
    ]


def _switched_links(matrix: Matrix, domain: Sequence[int], cards: _Cards, hub: int) -> list[Link]:
    own = _own_links(matrix, domain)
    most = max(domain, key=lambda here: own[here] - cards.links[here])
    kind = cards.kinds[most]
    name = "GPUs unknown here" if kind is None else kind.name
    for first, second in combinations(domain, 2):
        if matrix.nvlinks(first, second) != min(own[first], own[second]):
            direct = _most_direct(matrix, domain)
            raise TopologyError(
                f"{matrix.gpus[first]} to {matrix.gpus[second]}: these NVLinks fit neither direct links "
                f"({direct} at one GPU; {name} has {cards.links[most]}) nor an NVSwitch (all pairs alike)"
            )
    if own[most] > cards.links[most]:
        raise TopologyError(f"shows NV{own[most]}, must be at most NV{cards.links[most]} for {name}")
    return [
        link
        for here, count in own.items()
        for link in cable(here, hub, count * cards.rates[here], NVSWITCH_HOP_US)
    ]
