"""Rings and chains for stock NCCL on one host: the file that NCCL_GRAPH_FILE names.

NCCL deals every call in equal parts to its channels, each a ring (graph 0) and a chain (graph 1, its "tree"
on one host), and takes as many channels as both graphs have. So a schedule can be exported where its chunks
travel along Hamiltonian cycles, or up and down Hamiltonian paths, in shares that are whole multiples of
one. The other graph is cut from, or closed to, the same orders. Ranks are those of the communicator, one
process with one GPU each. From 2.30.3 on a gpu is known by its rank; before, by `dev`, its number in NVML.

Read in NCCL 2.30.7 (5067397): src/graph/search.cc, xml.cc, connect.cc, src/init.cc; the older reading in
2.18.3 to 2.29.7: src/graph/search.cc.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from arborcast.backends.programs.exporting.export import check_schedule
from arborcast.backends.programs.formats import UNKNOWN_TOPOLOGY, Files
from arborcast.backends.programs.msccl.elements import Element, parse
from arborcast.backends.programs.program import ProgramError
from arborcast.synth.api import bound
from arborcast.synth.baselines.hamiltonian import Ring
from arborcast.synth.baselines.rings import ring_schedule
from arborcast.synth.baselines.switch_paths import switch_paths
from arborcast.synth.collective import TREE_KINDS, Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.schedule import Method, Schedule, Transfer
from arborcast.synth.topology import Topology

MOST_CHANNELS = 64
"""Channels that NCCL has arrays for."""

MOST_CHANNELS_WRITTEN = 32
"""NCCL doubles the channels; beyond 32 only some of them would be."""

CHANNEL_SPEED = 30
"""GB/s of one channel at most, as in NCCL's own searches on most GPUs; faster rings get several."""

_RING, _CHAIN = 0, 1
_PATTERNS = {_RING: 4, _CHAIN: 3}
_ATTRIBUTES = (
    "id",
    "pattern",
    "crossnic",
    "nchannels",
    "speedintra",
    "speedinter",
    "typeintra",
    "typeinter",
    "samechannels",
)
_TYPES = ("LOC", "NVL", "NVB", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
_SPEED = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?(e[+-]?[0-9]{1,2})?")


@dataclass(frozen=True)
class NcclGraphs:
    """The rings and chains of a file.

    Attributes:
        rings: ranks in the order in which data go round.
        chains: ranks from the head, to which sums go and from which they come back.
        speed: GB/s that NCCL's tuning counts with for each channel.
        notes: what NCCL passes over in silence, one line each.
        algorithm: which of both a schedule became, as NCCL_ALGO calls it.
    """

    rings: tuple[tuple[int, ...], ...]
    chains: tuple[tuple[int, ...], ...]
    speed: Fraction
    notes: tuple[str, ...] = ()
    algorithm: str = "Ring"


def export(schedule: AnySchedule, gpus: Sequence[int] | None = None) -> Files:
    """The file; `gpus` as of `write`.

    Raises:
        ProgramError: as `export_graphs`, or other than one GPU for each rank.
    """
    graphs = export_graphs(schedule)
    ranks = len(graphs.rings[0])
    if gpus is not None and not len(set(gpus)) == len(gpus) == ranks:
        raise ProgramError(f"gpus: must be one for each of {ranks} ranks, got {_shown(gpus)}")
    said = f"{len(set(graphs.rings))} orders of the ranks, {len(graphs.rings)} channels"
    return Files({"": write(graphs, gpus)}, f"{said}; for NCCL_ALGO={graphs.algorithm}")


def export_graphs(schedule: AnySchedule) -> NcclGraphs:
    """The rings or chains that a schedule is made of.

    Raises:
        InputError: the schedule is not one that NCCL can run by rings or chains; what is in the way.
    """
    check_schedule(schedule, TREE_KINDS, "a graph of NCCL")
    explicit = schedule.expand()
    collective, topology = explicit.collective, explicit.topology
    of_chunk: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in explicit.transfers:
        of_chunk[transfer.chunk].append(transfer)
    orders = [_order(explicit, chunk, of_chunk[chunk]) for chunk in range(explicit.chunk_count)]
    chains = {chain for chain, _ in orders}
    if len(chains) > 1:
        raise ProgramError(
            "some chunks go round rings, others up and down chains; a call of NCCL uses one of them"
        )
    shares: dict[tuple[int, ...], dict[int, Fraction]] = defaultdict(lambda: defaultdict(Fraction))
    for index, (_, order) in enumerate(orders):
        chunk = explicit.chunks[index]
        shares[order][-1 if collective.root is not None else chunk.owner] += chunk.share
    if chains == {False} and collective.root is None:
        for order, of_owner in shares.items():
            if len(of_owner) < topology.ranks or len(set(of_owner.values())) > 1:
                raise ProgramError(
                    f"ring {_shown(order)}: NCCL gives all ranks' blocks equal parts of a ring"
                )
    weights = {order: sum(of_owner.values()) for order, of_owner in shares.items()}
    parts = math.lcm(*(weight.denominator for weight in weights.values()))
    unit = Fraction(math.gcd(*(int(weight * parts) for weight in weights.values())), parts)
    channels = sum(int(weight / unit) for weight in weights.values())
    if channels > MOST_CHANNELS_WRITTEN:
        raise ProgramError(
            f"{len(weights)} orders in shares that are multiples of {unit} take {channels} "
            "channels of equal shares, "
            f"{channels - MOST_CHANNELS_WRITTEN} beyond {MOST_CHANNELS_WRITTEN}"
        )
    rows = tuple(order for order, weight in weights.items() for _ in range(int(weight / unit)))
    speed = _speed(explicit, channels, chains == {True})
    times = max(1, min(MOST_CHANNELS_WRITTEN // channels, math.ceil(speed / CHANNEL_SPEED)))
    algorithm = "Tree" if chains == {True} else "Ring"
    return NcclGraphs(rows * times, rows * times, speed / times, algorithm=algorithm)


def _order(schedule: Schedule, chunk: int, transfers: Sequence[Transfer]) -> tuple[bool, tuple[int, ...]]:
    """Whether a chunk goes up and down a chain, and the order of the ranks, of a ring from rank 0 on."""
    ranks = schedule.topology.ranks
    after: dict[bool, dict[int, int]] = {True: {}, False: {}}
    before: dict[bool, dict[int, int]] = {True: {}, False: {}}
    for transfer in transfers:
        for ends, start, end in (
            (after[transfer.reduce], transfer.src, transfer.dst),
            (before[transfer.reduce], transfer.dst, transfer.src),
        ):
            if start in ends:
                raise ProgramError(f"chunk {chunk}: forks or joins at rank {start}, as no ring or chain does")
            ends[start] = end
    walks = [_walk(chunk, after[adds], before[adds], ranks) for adds in (True, False) if after[adds]]
    if len(walks) == 2 and walks[0] == walks[1][::-1]:
        return True, tuple(walks[1])
    cycles = {_cycle(walk) for walk in walks}
    if len(cycles) != 1:
        raise ProgramError(
            f"chunk {chunk}: is added up along {_shown(walks[0])} and spread along {_shown(walks[1])}"
        )
    return False, cycles.pop()


def _walk(chunk: int, after: dict[int, int], before: dict[int, int], ranks: int) -> list[int]:
    starts = [rank for rank in after if rank not in before]
    walk = starts[:1]
    while walk and walk[-1] in after:
        walk.append(after[walk[-1]])
    if len(walk) != ranks:
        raise ProgramError(
            f"chunk {chunk}: its path has {len(walk)} of {ranks} ranks, rings and chains have all"
        )
    return walk


def _cycle(walk: Sequence[int]) -> tuple[int, ...]:
    at = walk.index(0)
    return (*walk[at:], *walk[:at])


def _speed(schedule: Schedule, channels: int, chain: bool) -> Fraction:
    """GB/s that pass each edge of one channel while the schedule runs at its rate."""
    shares = (schedule.chunks[transfer.chunk].share for transfer in schedule.transfers)
    ranks = schedule.topology.ranks
    edges = 2 * (ranks - 1) if chain else ranks - 1 if schedule.collective.root is not None else ranks
    return sum(shares, Fraction(0)) * schedule.rate / (channels * edges)


def write(graphs: NcclGraphs, gpus: Sequence[int] | None = None) -> str:
    """The file's text.

    Args:
        graphs: what it says.
        gpus: for each rank the number that NVML and nvidia-smi give its GPU; None where that is the rank.
    """
    ranks = len(graphs.rings[0])
    numbers = range(ranks) if gpus is None else gpus
    lines = [
        f"<!-- For stock NCCL, one host and {ranks} ranks: NCCL_GRAPH_FILE names this file, and goes for all",
        f"     communicators of the process. NCCL_ALGO={graphs.algorithm} keeps to what it is made for.",
        "     NCCL 2.30.3 and later know a gpu by rank; earlier ones by dev, its number in nvidia-smi. -->",
        '<graphs version="1">',
    ]
    for number, rows in ((_RING, graphs.rings), (_CHAIN, graphs.chains)):
        speed = f"{float(graphs.speed):.6g}"
        lines.append(
            f'  <graph id="{number}" pattern="{_PATTERNS[number]}" crossnic="0" nchannels="{len(rows)}" '
            f'speedintra="{speed}" speedinter="{speed}" latencyinter="0" '
            'typeintra="NVL" typeinter="PIX" samechannels="1">'
        )
        for row in rows:
            entries = "".join(f'<gpu dev="{numbers[rank]:x}" rank="{rank}"/>' for rank in row)
            lines.append(f"    <channel>{entries}</channel>")
        lines.append("  </graph>")
    return "\n".join([*lines, "</graphs>", ""])


def read(text: str, place: str = "graphs") -> NcclGraphs:
    """The rings and chains of a file for one host.

    Raises:
        ProgramError: NCCL would refuse it, break on it, or find no ring in it; one line.
    """
    try:
        return _read(parse(text))
    except InputError as error:
        raise ProgramError(f"{place}: {error}") from error


def _read(top: Element) -> NcclGraphs:  # noqa: PLR0912  (one rule a branch)
    notes: list[str] = []
    if top.tag != "graphs":
        raise ProgramError(f"must begin with an element graphs, got {shorten(top.tag)}")
    if top.whole("version", 0, 1 << 30) != 1:
        raise ProgramError(f"graphs: version must be 1, got {shorten(top.get('version'))}")
    found: dict[int, tuple[tuple[int, ...], ...]] = {}
    speed = Fraction(0)
    for graph in top:
        if graph.tag != "graph":
            notes.append(f"element {shorten(graph.tag)} is passed over")
            continue
        for name in _ATTRIBUTES:
            if graph.get(name) is None:
                raise ProgramError(f"graph: attribute {name} is missing")
        number = graph.whole("id", 0, 5)
        for name in ("typeintra", "typeinter"):
            if graph.get(name) not in _TYPES:
                raise ProgramError(
                    f"graph {number}: {name} must be one of {', '.join(_TYPES)}, got "
                    f"{shorten(graph.get(name))}"
                )
        if number not in _PATTERNS:
            notes.append(f"graph {number} is neither the rings' nor the chains', and was not looked at")
            continue
        if number in found:
            notes.append(f"graph {number} stands twice; the last one counts")
        rows = _rows(graph, number, notes)
        found[number] = rows
        text = graph.get("speedintra") or ""
        if not _SPEED.fullmatch(text):
            raise ProgramError(f"graph {number}: speedintra must be a number of GB/s, got {shorten(text)}")
        speed = Fraction(text)
    if not found.get(_RING):
        raise ProgramError("graph 0, the rings, is missing: NCCL searches for its own")
    rings, chains = found[_RING], found.get(_CHAIN, ())
    if not chains:
        notes.append(
            "graph 1, the chains, is missing: NCCL searches for its own, and uses no more "
            "channels than both have"
        )
    elif len(chains) != len(rings):
        least = min(len(chains), len(rings))
        notes.append(f"{len(rings)} rings, {len(chains)} chains: NCCL uses the first {least} of both")
    return NcclGraphs(rings, chains, speed, tuple(notes))


def _rows(graph: Element, number: int, notes: list[str]) -> tuple[tuple[int, ...], ...]:
    rows: list[tuple[int, ...]] = []
    for channel in graph:
        if channel.tag != "channel":
            notes.append(f"graph {number}: element {shorten(channel.tag)} is taken for a channel")
        row: list[int] = []
        for at, entry in enumerate(channel):
            where = f"graph {number} channel {len(rows)}"
            if entry.tag == "net":
                raise ProgramError(f"{where}: has network interfaces; files for one host are read")
            if entry.tag != "gpu" or entry.get("dev") is None:
                raise ProgramError(f"{where}: entry {at} must be a gpu with dev, got {shorten(entry.tag)}")
            if entry.get("rank") is None:
                raise ProgramError(
                    f"{where}: gpu {shorten(entry.get('dev'))} has no rank; which one it is "
                    "depends on the machine"
                )
            row.append(entry.whole("rank", 0, 4096))
        rows.append(tuple(row))
    said = graph.whole("nchannels", 0, 1 << 30)
    if len(rows) > MOST_CHANNELS or said > MOST_CHANNELS:
        raise ProgramError(
            f"graph {number}: {max(len(rows), said)} channels, NCCL has arrays for {MOST_CHANNELS}"
        )
    if said > len(rows):
        raise ProgramError(
            f"graph {number}: nchannels is {said}, there are {len(rows)}; NCCL takes what it "
            "finds in memory for others"
        )
    if said < len(rows):
        notes.append(
            f"graph {number}: nchannels is {said}; the other {len(rows) - said} channels are passed over"
        )
    size = max((len(row) for row in rows), default=0)
    for at, order in enumerate(rows):
        if sorted(order) != list(range(size)):
            raise ProgramError(
                f"graph {number} channel {at}: must have each of ranks 0 to {size - 1} once, got "
                f"{_shown(order)}"
            )
    if size < 2:
        raise ProgramError(f"graph {number}: needs channels of at least 2 ranks")
    return tuple(rows[:said])


def read_schedule(
    text: str, place: str, *, topology: Topology | None, kind: Kind | None, root: int | None
) -> Schedule:
    """What NCCL does on the rings of a file, by default an allreduce.

    Raises:
        ProgramError: NCCL would not take the file, no topology is named, or the rings do not run on it.
    """
    if topology is None:
        raise ProgramError(f"{place}: {UNKNOWN_TOPOLOGY}")
    graphs = read(text, place)
    kind = kind or Kind.ALLREDUCE
    if root is not None and not kind.has_root:
        raise ProgramError(f"{place}: {kind} has no root, got {root}")
    return rings_as_schedule(graphs, topology, Collective.on(topology, kind, root=root or 0))


def rings_as_schedule(graphs: NcclGraphs, topology: Topology, collective: Collective) -> Schedule:
    """What NCCL's ring algorithm does on these rings, as a schedule: to verify, simulate and draw.

    Raises:
        ProgramError: other ranks than the topology's, no way between neighbours, or a collective that has
            no rings.
    """
    if collective.kind not in TREE_KINDS:
        raise ProgramError(f"{collective.kind}: NCCL runs it by sends, not by rings")
    size = len(graphs.rings[0])
    if collective.ranks != tuple(range(topology.ranks)) or topology.ranks != size:
        raise ProgramError(f"the rings have {size} ranks, {topology.name} has {topology.ranks}")
    ways = switch_paths(topology, collective.ranks)
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    for ring in graphs.rings:
        counts[ring] += 1
    rows: list[tuple[Ring, int]] = []
    for ring, count in counts.items():
        edges = list(zip(ring, (*ring[1:], ring[0]), strict=True))
        for edge in edges:
            if not ways.get(edge):
                raise ProgramError(
                    f"ring {_shown(ring)}: {topology.name} has no way from {edge[0]} to {edge[1]}"
                )
        rows.append((tuple(ways[edge][0] for edge in edges), count))
    method = Method("nccl-graph", 0, (("channels", len(graphs.rings)),))
    return ring_schedule(topology, collective, method, bound(topology, collective), rows)


def _shown(ranks: Sequence[int]) -> str:
    return "-".join(map(str, ranks[:16])) + ("-..." if len(ranks) > 16 else "")
