"""SCCL's JSON: schedules in steps and rounds, which msccl-tools checks by itself and ncclizes.

    {"msccl_type": "algorithm", "steps": [{"rounds": 1, "sends": [[address, from, to], ...]}, ...],
     "collective": {"chunks": [{"pre": [ranks], "post": [ranks], "addr": address}, ...], ...},
     "instance": {"chunks": parts of each address, ...}, "topology": {"links": [[...]], "switches": []}, ...}

An address stands for what is to be at one place of the buffer: contributions that are added up share it.
Links have a row for each receiver and a column for each sender, in chunks per round. Read in
microsoft/msccl-tools: msccl/serialization.py, algorithm.py, collectives.py, topologies/topology.py.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict  # pydantic refuses typing's own before Python 3.12

from arborcast.backends.programs.exporting.export import check_schedule
from arborcast.backends.programs.formats import Files
from arborcast.backends.programs.program import ProgramError
from arborcast.synth.api import bound
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import NAMED_KINDS, Block, Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.formats.reading import parse_json
from arborcast.synth.formats.shapes import check_shape
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Link, Topology

NAMES: dict[Kind, str] = {kind: kind.value.title().replace("-", "") for kind in NAMED_KINDS}
"""Our kinds by the names of its command line, which its collectives' names begin with."""

MOST_RANKS = 1024
MOST_SENDS = 1 << 20

Listed: TypeAlias = list[tuple[list[int], list[int], int]]
"""The chunks of a collective: who holds each before and after, and its address."""

_LOOSE = with_config(ConfigDict(extra="allow", strict=True))
_Ranks: TypeAlias = list[Annotated[int, Field(ge=0, lt=MOST_RANKS)]]


@_LOOSE
class _ListedChunk(TypedDict):
    pre: _Ranks
    post: _Ranks
    addr: Annotated[int, Field(ge=0, le=MOST_RANKS**2)]


@_LOOSE
class _Collective(TypedDict):
    name: str
    nodes: Annotated[int, Field(ge=2, le=MOST_RANKS)]
    chunks: Annotated[list[_ListedChunk], Field(max_length=MOST_RANKS**2)]


@_LOOSE
class _Step(TypedDict):
    rounds: Annotated[int, Field(ge=1, le=1 << 20)]
    sends: list[Annotated[list[int], Field(min_length=3, max_length=3)]]


@_LOOSE
class _Instance(TypedDict):
    chunks: Annotated[int, Field(ge=1, le=1 << 16)]


@_LOOSE
class Algorithm(TypedDict):
    """The form of a file; of its topology, where that is looked at, `_Topology`."""

    msccl_type: Literal["algorithm"]
    instance: _Instance
    collective: _Collective
    steps: Annotated[list[_Step], Field(max_length=1 << 16)]


@_LOOSE
class _Topology(TypedDict):
    name: str
    switches: list[Any]
    links: list[list[Annotated[int, Field(ge=0, lt=1 << 31)]]]


def export(schedule: AnySchedule) -> Files:
    """The file; raises as `write` does."""
    return Files({"": write(schedule)}, "steps and rounds")


def write(schedule: AnySchedule) -> str:
    """The file's text.

    Raises:
        ProgramError: switches, ranks left out, too many sends of chunks of one size, or a send that replaces
            what its receiver has to add: of the steps of a sum the file says no more than who sends.
    """
    check_schedule(schedule, NAMES, "SCCL")
    explicit = schedule.expand()
    collective, topology = explicit.collective, explicit.topology
    kind = collective.kind
    if topology.switches:
        raise ProgramError(f"{topology.name}: topologies without switches go to SCCL's files")
    unit, addresses = _addresses_of(explicit)
    parts = int(next(iter(collective.blocks().values())) / unit)
    steps = _steps(explicit, addresses)
    listed = _listed(collective)
    root = "" if collective.root is None else f",root={collective.root}"
    name = f"{NAMES[kind]}(n={topology.ranks}{root})"
    built_in = kind in {Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE, Kind.ALLTOALL}
    links = [[0] * topology.ranks for _ in range(topology.ranks)]
    for link, capacity in zip(topology.links, topology.capacities, strict=True):
        links[link.dst][link.src] = capacity
    document = {
        "msccl_type": "algorithm",
        "name": f"{name}-{topology.name}-{explicit.method.name}",
        "instance": {
            "msccl_type": "instance",
            "steps": len(steps),
            "extra_rounds": sum(step["rounds"] for step in steps) - len(steps),
            "chunks": parts,
            "pipeline": None,
            "extra_memory": None,
            "allow_exchange": False,
        },
        "input_map": _held(listed, parts, 0),
        "output_map": _held(listed, parts, 1),
        "steps": steps,
        "collective": {
            "msccl_type": "collective",
            "name": name,
            "nodes": topology.ranks,
            "chunks": [
                {"msccl_type": "chunk", "pre": before, "post": after, "addr": address}
                for before, after, address in listed
            ],
            "triggers": {},
            "runtime_name": kind.replace("-", "_") if built_in else "custom",
        },
        "topology": {"msccl_type": "topology", "name": topology.name, "switches": [], "links": links},
    }
    if kind.reduces:
        told = cast("Algorithm", document)
        _check_sums(explicit, addresses, schedule_of(told, topology, collective, explicit.bound))
    return json.dumps(document) + "\n"


def _check_sums(schedule: Schedule, addresses: Sequence[range], back: Schedule) -> None:
    """Whether who reads the file adds where the schedule does."""
    adds = {(it.chunk, it.src, it.dst, it.step): it.reduce for it in back.transfers}
    for it in schedule.transfers:
        # Of a sum every address has chunks, which are read in the order of their addresses.
        if adds[addresses[it.chunk][0], it.src, it.dst, it.step] != it.reduce:
            raise ProgramError(
                f"chunk {it.chunk}, step {it.step}: rank {it.src} replaces what rank {it.dst} holds of the "
                "sum; SCCL's steps would add it up"
            )


def _listed(collective: Collective) -> Listed:
    """Its chunks, as msccl-tools numbers them."""
    kind, everyone = collective.kind, sorted(collective.ranks)
    each, root = [[rank] for rank in everyone], [[collective.root or 0]]
    befores = root if kind in {Kind.BROADCAST, Kind.SCATTER} else each
    if kind in {Kind.BROADCAST, Kind.ALLGATHER, Kind.ALLREDUCE}:
        afters = [everyone]
    else:
        afters = root if kind in {Kind.REDUCE, Kind.GATHER} else each
    return [
        (before, after, to if kind.reduces else to * len(befores) + at)
        for to, after in enumerate(afters)
        for at, before in enumerate(befores)
    ]


def _block(collective: Collective, before: Sequence[int], after: Sequence[int]) -> Block:
    """The block that one of its chunks belongs to, which has the same ends for all its contributions."""
    if not before or not after:
        raise ProgramError("collective: a chunk is held by somebody before and after")
    one, other = (after[0], before[0]) if collective.kind.reduces else (before[0], after[0])
    has_target = collective.kind in {Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL}
    return collective.block_of(one, other if has_target else None)


def _addresses_of(schedule: Schedule) -> tuple[Fraction, list[range]]:
    """The share of each address, and which of them each chunk is cut into: parts of a block in a row."""
    collective, shares = schedule.collective, [chunk.share for chunk in schedule.chunks]
    count = math.lcm(*(share.denominator for share in shares))
    unit = Fraction(math.gcd(*(int(share * count) for share in shares)), count)
    sends = sum(int(shares[transfer.chunk] / unit) for transfer in schedule.transfers)
    if sends > MOST_SENDS:
        raise ProgramError(
            f"chunks of one size, {unit} of the buffer, take {sends} sends, more than {MOST_SENDS}"
        )
    parts = int(next(iter(collective.blocks().values())) / unit)
    following = {
        _block(collective, before, after): address * parts for before, after, address in _listed(collective)
    }
    found = []
    for chunk in schedule.chunks:
        block = collective.block_of(chunk.owner, chunk.target)
        start = following[block]
        following[block] += int(chunk.share / unit)
        found.append(range(start, following[block]))
    return unit, found


def _steps(schedule: Schedule, addresses: Sequence[range]) -> list[dict[str, Any]]:
    """Sends step by step, with the rounds that its links take for them."""
    topology = schedule.topology
    capacity = {
        (link.src, link.dst): units for link, units in zip(topology.links, topology.capacities, strict=True)
    }
    sends: list[list[list[int]]] = [[] for _ in range(schedule.steps)]
    for it in schedule.transfers:
        sends[it.step] += ([address, it.src, it.dst] for address in addresses[it.chunk])
    steps = []
    for number, row in enumerate(sends):
        loads = Counter((src, dst) for _, src, dst in row)
        rounds = max((math.ceil(Fraction(load, capacity[hop])) for hop, load in loads.items()), default=1)
        if schedule.rounds is not None and max(map(len, addresses)) == 1:
            rounds = max(rounds, schedule.rounds[number])
        steps.append({"msccl_type": "step", "rounds": rounds, "sends": sorted(row)})
    return steps


def _held(listed: Listed, parts: int, side: Literal[0, 1]) -> dict[str, list[int]]:
    """The addresses that each rank holds before (side 0), or after."""
    held: dict[int, set[int]] = defaultdict(set)
    for entry in listed:
        address = entry[2]
        for rank in entry[side]:
            held[rank].update(range(address * parts, (address + 1) * parts))
    return {str(rank): sorted(held[rank]) for rank in sorted(held)}


def read(
    text: str,
    place: str = "algorithm",
    *,
    topology: Topology | None = None,
    kind: Kind | None = None,
    root: int | None = None,
) -> Schedule:
    """The schedule of a file; whether it is right is for the verifier to say.

    Args:
        text: the JSON.
        place: what errors begin with.
        topology: on which it is to run; None for the file's own, whose links have as many GB/s as chunks
            per round.
        kind: what it must do, where that is known.
        root: of which root.

    Raises:
        ProgramError: not such a file, switches without a topology, sends of what it does not explain, or
            another collective than was asked for; one line.
    """
    try:
        found = check_shape(Algorithm, parse_json(text, place), place)
    except InputError as error:
        raise ProgramError(str(error)) from error
    try:
        topology = topology or _topology(found)
        does = _collective(found["collective"], topology)
        if (kind is not None and kind is not does.kind) or (root is not None and root != does.root):
            wanted = f"{kind or does.kind}" + ("" if root is None else f" from {root}")
            has = f"{does.kind}" + ("" if does.root is None else f" from {does.root}")
            raise ProgramError(f"does {has}, not {wanted}")
        return schedule_of(found, topology, does, bound(topology, does))
    except InputError as error:
        raise ProgramError(f"{place}: {error}") from error


def _collective(found: _Collective, topology: Topology) -> Collective:
    ranks = found["nodes"]
    if ranks != topology.ranks:
        raise ProgramError(f"collective: nodes is {ranks}, {topology.name} has {topology.ranks} ranks")
    kind = Kind.named(found["name"].split("(", maxsplit=1)[0])
    if kind is None or kind not in NAMES:
        raise ProgramError(
            f"collective: name must begin with one of {', '.join(NAMES.values())}, "
            f"got {shorten(found['name'])}"
        )
    ends = (it["post"] if kind in {Kind.REDUCE, Kind.GATHER} else it["pre"] for it in found["chunks"])
    return Collective.on(topology, kind, root=min((rank for ranks in ends for rank in ranks), default=0))


def _topology(found: Mapping[str, Any]) -> Topology:
    entry = cast("_Topology", check_shape(_Topology, found.get("topology"), "topology"))
    ranks = found["collective"]["nodes"]
    if entry["switches"]:
        raise ProgramError(
            "topology: has switches, which SCCL knows as limits alone; name the topology (--topology)"
        )
    if {len(entry["links"]), *map(len, entry["links"])} != {ranks}:
        raise ProgramError(f"topology: links must be {ranks} rows of {ranks} numbers")
    links = [
        Link(source, target, Fraction(width))
        for target, row in enumerate(entry["links"])
        for source, width in enumerate(row)
        if width and source != target
    ]
    return Topology.build(entry["name"][:64], ranks, links)


def schedule_of(
    document: Algorithm,
    topology: Topology,
    collective: Collective,
    limit: Bound,
    ours: Mapping[int, int] | None = None,
) -> Schedule:
    """The schedule of a document, its rounds as they are; whether it does its job is for the verifier to say.

    A block that stays where it is has no chunk of ours: it may still be sent about where links are idle, to
    nobody's use, and that is left out (its rounds count all the same).

    Args:
        document: which has the form of a file; its name and its topology are not looked at.
        topology: on which it runs.
        collective: what it does.
        limit: the proven limit.
        ours: our number of each of its ranks; None where they are the same.

    Raises:
        ProgramError: other chunks than the collective's, or an address that the document does not explain.
    """
    ours = ours or {rank: rank for rank in range(topology.ranks)}
    parts = document["instance"]["chunks"]
    listed: Listed = [
        (_ours(it["pre"], ours), _ours(it["post"], ours), it["addr"])
        for it in document["collective"]["chunks"]
    ]
    chunks, index_of = _chunks(listed, parts, collective)
    holds: dict[tuple[int, int], frozenset[int]] = defaultdict(frozenset)
    for before, _, address in listed:
        for part in range(address * parts, (address + 1) * parts):
            for rank in before:
                holds[part, rank] |= {rank}
    transfers: list[Transfer] = []
    for number, step in enumerate(document["steps"]):
        after: dict[tuple[int, int], frozenset[int]] = {}
        for address, *ends in step["sends"]:
            if address not in index_of:
                raise ProgramError(f"step {number}: no chunk of the collective has address {address}")
            src, dst = _ours(ends, ours)
            sent, held = holds[address, src], after.get((address, dst), holds[address, dst])
            adds = collective.kind.reduces and not held <= sent
            after[address, dst] = sent | held if adds else sent
            chunk = index_of[address]
            if chunk is not None:
                transfers.append(Transfer(chunk, src, dst, number, adds))
        holds |= after
    rounds = [step["rounds"] for step in document["steps"]]
    method = Method("sccl", settings=(("point", f"({parts},{len(rounds)},{sum(rounds)})"),))
    return Schedule.build(topology, collective, method, limit, chunks, transfers, rounds)


def _ours(ranks: Sequence[int], ours: Mapping[int, int]) -> list[int]:
    strange = [rank for rank in ranks if rank not in ours]
    if strange:
        raise ProgramError(f"ranks must be in 0..{len(ours) - 1}, got {strange[0]}")
    return [ours[rank] for rank in ranks]


def _chunks(listed: Listed, parts: int, collective: Collective) -> tuple[list[Chunk], dict[int, int | None]]:
    """Our chunks in order of its addresses, and which of them an address is."""
    found = {(address, _block(collective, before, after)) for before, after, address in listed}
    numbers, named = {address for address, _ in found}, {block for _, block in found}
    if _pairs(listed) != _pairs(_listed(collective)) or not len(numbers) == len(named) == len(found):
        raise ProgramError(f"collective: its chunks are not those of {collective.kind}")
    blocks = collective.blocks()
    chunks: list[Chunk] = []
    index_of: dict[int, int | None] = {}
    for address, block in sorted(found, key=lambda pair: pair[0]):
        for part in range(address * parts, (address + 1) * parts):
            index_of[part] = len(chunks) if block in blocks else None
            if block in blocks:
                chunks.append(Chunk(blocks[block] / parts, block.owner or 0, block.target))
    return chunks, index_of


def _pairs(listed: Listed) -> list[tuple[list[int], list[int]]]:
    return sorted((sorted(before), sorted(after)) for before, after, _ in listed)
