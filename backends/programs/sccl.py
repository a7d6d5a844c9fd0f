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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from typing import Any, TypeAlias

from arborcast.backends.programs.formats import Files
from arborcast.backends.programs.program import ProgramError
from arborcast.synth.api import bound
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.formats.reading import parse_json
from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Link, Topology

Entry: TypeAlias = Mapping[str, Any]

NAMES = {
    Kind.BROADCAST: "Broadcast",
    Kind.REDUCE: "Reduce",
    Kind.SCATTER: "Scatter",
    Kind.GATHER: "Gather",
    Kind.ALLGATHER: "Allgather",
    Kind.REDUCE_SCATTER: "ReduceScatter",
    Kind.ALLREDUCE: "Allreduce",
    Kind.ALLTOALL: "Alltoall",
}
"""Our kinds by the names of its command line, which its collectives' names begin with."""

_RUNTIME = {
    Kind.ALLGATHER: "allgather",
    Kind.REDUCE_SCATTER: "reduce_scatter",
    Kind.ALLREDUCE: "allreduce",
    Kind.ALLTOALL: "alltoall",
}
MOST_RANKS = 1024
MOST_SENDS = 1 << 20


def export(schedule: AnySchedule) -> Files:
    """The file; raises as `write` does."""
    return Files({"": write(schedule)}, "steps and rounds")


def write(schedule: AnySchedule) -> str:
    """The file's text.

    Raises:
        ProgramError: switches, ranks left out, too many sends of chunks of one size, or a send that replaces
            what its receiver has to add: of the steps of a sum the file says no more than who sends.
    """
    explicit = schedule.expand() if isinstance(schedule, ImplicitSchedule) else schedule
    collective, topology = explicit.collective, explicit.topology
    if collective.kind not in NAMES or collective.ranks != tuple(range(topology.ranks)):
        raise ProgramError(
            f"{collective.kind}: SCCL has built-in collectives among all ranks, in their order"
        )
    if topology.switches:
        raise ProgramError(f"{topology.name}: topologies without switches go to SCCL's files")
    explicit = _equal(explicit)
    listed = list(_listed(collective, topology.ranks))
    addresses = sorted({address for _, _, address in listed})
    block = Fraction(1, len(addresses) // (topology.ranks if collective.kind is Kind.ALLTOALL else 1))
    parts = block / explicit.chunks[0].share
    address_of = _addresses_of(explicit, int(parts))
    links = [[0] * topology.ranks for _ in range(topology.ranks)]
    for link, capacity in zip(topology.links, topology.capacities, strict=True):
        links[link.dst][link.src] = capacity
    steps = _steps(explicit, address_of, links)
    before_and_after = _maps(listed, int(parts))
    root = "" if collective.root is None else f",root={collective.root}"
    name = f"{NAMES[collective.kind]}(n={topology.ranks}{root})"
    document = {
        "msccl_type": "algorithm",
        "name": f"{name}-{topology.name}-{explicit.method.name}",
        "instance": {
            "msccl_type": "instance",
            "steps": len(steps),
            "extra_rounds": sum(step["rounds"] for step in steps) - len(steps),
            "chunks": int(parts),
            "pipeline": None,
            "extra_memory": None,
            "allow_exchange": False,
        },
        "input_map": before_and_after[0],
        "output_map": before_and_after[1],
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
            "runtime_name": _RUNTIME.get(collective.kind, "custom"),
        },
        "topology": {"msccl_type": "topology", "name": topology.name, "switches": [], "links": links},
    }
    _check_sums(explicit, address_of, document)
    return json.dumps(document) + "\n"


def _check_sums(schedule: Schedule, address_of: Sequence[int], document: Entry) -> None:
    """Whether who reads the file adds where the schedule does."""
    if not schedule.collective.kind.reduces:
        return
    read_back = schedule_of(document, schedule.topology, schedule.collective, schedule.bound)
    addresses = sorted(address_of)  # of the chunks that are read
    adds = {(addresses[it.chunk], it.src, it.dst, it.step): it.reduce for it in read_back.transfers}
    for it in schedule.transfers:
        if adds[address_of[it.chunk], it.src, it.dst, it.step] != it.reduce:
            raise ProgramError(
                f"chunk {it.chunk}, step {it.step}: rank {it.src} replaces what rank {it.dst} holds of the "
                "sum; SCCL's steps would add it up"
            )


def _equal(schedule: Schedule) -> Schedule:
    """The schedule with chunks of one size: each is cut in as many as its share has of what divides all."""
    shares = [chunk.share for chunk in schedule.chunks]
    count = math.lcm(len(schedule.collective.blocks()), *(share.denominator for share in shares))
    unit = Fraction(math.gcd(*(int(share * count) for share in shares)), count)
    times = [int(share / unit) for share in shares]
    if max(times) == 1:
        return schedule
    first = list(accumulate(times, initial=0))
    sends = sum(times[transfer.chunk] for transfer in schedule.transfers)
    if sends > MOST_SENDS:
        raise ProgramError(
            f"chunks of one size, {unit} of the buffer, take {sends} sends, more than {MOST_SENDS}"
        )
    chunks = [
        replace(chunk, share=unit)
        for chunk, number in zip(schedule.chunks, times, strict=True)
        for _ in range(number)
    ]
    transfers = [
        replace(transfer, chunk=first[transfer.chunk] + part)
        for transfer in schedule.transfers
        for part in range(times[transfer.chunk])
    ]
    return Schedule.build(
        schedule.topology, schedule.collective, schedule.method, schedule.bound, chunks, transfers
    )


def _listed(collective: Collective, ranks: int) -> Iterator[tuple[list[int], list[int], int]]:
    """Its chunks: who holds each before and after, and its address."""
    everyone, root = list(range(ranks)), collective.root or 0
    match collective.kind:
        case Kind.BROADCAST:
            yield [root], everyone, 0
        case Kind.SCATTER:
            yield from (([root], [rank], rank) for rank in everyone)
        case Kind.GATHER:
            yield from (([rank], [root], rank) for rank in everyone)
        case Kind.ALLGATHER:
            yield from (([rank], everyone, rank) for rank in everyone)
        case Kind.ALLTOALL:
            yield from (([at % ranks], [at // ranks], at) for at in range(ranks * ranks))
        case Kind.REDUCE:
            yield from (([rank], [root], 0) for rank in everyone)
        case Kind.ALLREDUCE:
            yield from (([rank], everyone, 0) for rank in everyone)
        case _:  # reduce-scatter
            yield from (([at % ranks], [at // ranks], at // ranks) for at in range(ranks * ranks))


def _addresses_of(schedule: Schedule, parts: int) -> list[int]:
    """The address of each chunk, parts of one block behind each other."""
    ranks = schedule.topology.ranks
    used: Counter[int] = Counter()
    found = []
    for chunk in schedule.chunks:
        match schedule.collective.kind:
            case Kind.ALLTOALL:
                assert chunk.target is not None, "it has a destination"
                base = chunk.target * ranks + chunk.owner
            case Kind.SCATTER:
                assert chunk.target is not None, "it has a destination"
                base = chunk.target
            case Kind.BROADCAST | Kind.REDUCE | Kind.ALLREDUCE:
                base = 0
            case _:
                base = chunk.owner
        found.append(base * parts + used[base])
        used[base] += 1
    return found


def _steps(
    schedule: Schedule, address_of: Sequence[int], links: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Sends step by step, with the rounds that its links take for them."""
    steps = []
    for number in range(schedule.steps):
        transfers = [transfer for transfer in schedule.transfers if transfer.step == number]
        loads = Counter((transfer.src, transfer.dst) for transfer in transfers)
        rounds = max(
            (math.ceil(Fraction(load, links[dst][src])) for (src, dst), load in loads.items()), default=1
        )
        if schedule.rounds is not None:
            rounds = max(rounds, schedule.rounds[number])
        sends = sorted([address_of[transfer.chunk], transfer.src, transfer.dst] for transfer in transfers)
        steps.append({"msccl_type": "step", "rounds": rounds, "sends": sends})
    return steps


def _maps(listed: Sequence[tuple[list[int], list[int], int]], parts: int) -> list[dict[str, list[int]]]:
    """The addresses that each rank holds before, and after."""
    maps: list[dict[int, set[int]]] = [{}, {}]
    for before, after, address in listed:
        for ranks, of in ((before, maps[0]), (after, maps[1])):
            for rank in ranks:
                of.setdefault(rank, set()).update(range(address * parts, (address + 1) * parts))
    return [{str(rank): sorted(of[rank]) for rank in sorted(of)} for of in maps]


def read(text: str, place: str = "algorithm", *, topology: Topology | None = None) -> Schedule:
    """The schedule of a file.

    Args:
        text: the JSON.
        place: what errors begin with.
        topology: on which it is to run; None for the file's own, whose links have as many GB/s as chunks
            per round.

    Raises:
        ProgramError: not such a file, switches without a topology, or sends of what it does not explain;
            one line.
            Whether the schedule is right is for the verifier to say.
    """
    try:
        found = _object(parse_json(text, place), "file")
        return _read(found, topology)
    except ProgramError as error:
        raise ProgramError(f"{place}: {error}") from error
    except InputError as error:
        message = str(error)
        raise ProgramError(message if message.startswith(place) else f"{place}: {message}") from error


def _read(found: Entry, topology: Topology | None) -> Schedule:
    if found.get("msccl_type") != "algorithm":
        raise ProgramError(f"msccl_type must be algorithm, got {shorten(found.get('msccl_type'))}")
    collective = _object(found.get("collective"), "collective")
    ranks = _whole(collective, "nodes", "collective", 2, MOST_RANKS)
    if topology is None:
        topology = _topology(_object(found.get("topology"), "topology"), ranks)
    if topology.ranks != ranks:
        raise ProgramError(f"collective: nodes is {ranks}, {topology.name} has {topology.ranks} ranks")
    name = collective.get("name")
    kind = Kind.named(str(name).split("(", maxsplit=1)[0])
    if kind is None or kind not in NAMES:
        raise ProgramError(
            f"collective: name must begin with one of {', '.join(NAMES.values())}, got {shorten(name)}"
        )
    listed = [_chunk(entry, ranks) for entry in _list(collective, "chunks", "collective", ranks * ranks)]
    to_root = kind in {Kind.REDUCE, Kind.GATHER}
    ends = sorted({rank for before, after, _ in listed for rank in (after if to_root else before)})
    asked = Collective.on(topology, kind, root=ends[0] if ends else 0)
    if sorted(listed) != sorted((sorted(b), sorted(a), address) for b, a, address in _listed(asked, ranks)):
        raise ProgramError(f"collective: its chunks are not those of {asked.kind} among {ranks} ranks")
    return schedule_of(found, topology, asked, bound(topology, asked))


def read_schedule(
    text: str, place: str, *, topology: Topology | None, kind: Kind | None, root: int | None
) -> Schedule:
    """The schedule of a file that does what is asked for, where something is.

    Raises:
        ProgramError: as `read` does, or the file does something else.
    """
    found = read(text, place, topology=topology)
    does = found.collective
    if (kind is not None and kind is not does.kind) or (root is not None and root != does.root):
        wanted = f"{kind or does.kind}" + ("" if root is None else f" from {root}")
        has = f"{does.kind}" + ("" if does.root is None else f" from {does.root}")
        raise ProgramError(f"{place}: does {has}, not {wanted}")
    return found


def schedule_of(
    found: Entry,
    topology: Topology,
    collective: Collective,
    limit: Bound,
    ours: Mapping[int, int] | None = None,
) -> Schedule:
    """The schedule of a document, its rounds as they are; whether it does its job is for the verifier to say.

    A block that stays where it is has no chunk of ours: it may still be sent about where links are idle, to
    nobody's use, and that is left out (its rounds count all the same).

    Args:
        found: the document; of its parts `instance`, `collective` and `steps` are looked at.
        topology: on which it runs.
        collective: what it does.
        limit: the proven limit.
        ours: our number of each of its ranks; None where they are the same.

    Raises:
        ProgramError: an address that the document does not explain.
    """
    ours = ours or {rank: rank for rank in range(topology.ranks)}
    instance = _object(found.get("instance"), "instance")
    parts = _whole(instance, "chunks", "instance", 1, 1 << 16)
    listed = [
        _chunk(entry, topology.ranks)
        for entry in _list(
            _object(found.get("collective"), "collective"), "chunks", "collective", MOST_RANKS**2
        )
    ]
    chunks, index_of = _chunks(listed, parts, ours, collective)
    holds: dict[tuple[int, int], frozenset[int]] = {}
    for before, _, address in listed:
        for part in range(parts):
            for rank in before:
                key = address * parts + part, rank
                holds[key] = holds.get(key, frozenset()) | {rank}
    transfers: list[Transfer] = []
    rounds = []
    for number, step in enumerate(_list(found, "steps", "file", 1 << 16)):
        entry = _object(step, f"step {number}")
        rounds.append(_whole(entry, "rounds", f"step {number}", 1, 1 << 20))
        after: dict[tuple[int, int], frozenset[int]] = {}
        for address, source, target in _sends(entry, f"step {number}", topology.ranks):
            if address not in index_of:
                raise ProgramError(f"step {number}: no chunk of the collective has address {address}")
            sent = holds.get((address, source), frozenset())
            held = after.get((address, target), holds.get((address, target), frozenset()))
            adds = collective.kind.reduces and not held <= sent
            after[address, target] = sent | held if adds else sent
            chunk = index_of[address]
            if chunk is not None:
                transfers.append(Transfer(chunk, ours[source], ours[target], number, adds))
        holds |= after
        if len(transfers) > MOST_SENDS:
            raise ProgramError(f"at most {MOST_SENDS} sends are read")
    point = f"({parts},{len(rounds)},{sum(rounds)})"
    method = Method("sccl", settings=(("point", point),))
    return Schedule.build(topology, collective, method, limit, chunks, transfers, rounds)


def _chunks(
    listed: Sequence[tuple[list[int], list[int], int]],
    parts: int,
    ours: Mapping[int, int],
    collective: Collective,
) -> tuple[list[Chunk], dict[int, int | None]]:
    """Our chunks in order of its addresses, and which of them an address is."""
    blocks = collective.blocks()
    chunks: list[Chunk] = []
    index_of: dict[int, int | None] = {}
    for address in sorted({address for _, _, address in listed}):
        before = {rank for pre, _, at in listed if at == address for rank in pre}
        after = {rank for _, post, at in listed if at == address for rank in post}
        owner, target = _owner_and_target(collective.kind, before, after, ours)
        block = collective.block_of(owner, target)
        for part in range(parts):
            index_of[address * parts + part] = len(chunks) if block in blocks else None
            if block in blocks:
                chunks.append(Chunk(blocks[block] / parts, owner, target))
    return chunks, index_of


def _owner_and_target(
    kind: Kind, before: set[int], after: set[int], ours: Mapping[int, int]
) -> tuple[int, int | None]:
    """Whose data an address is (or where its sum goes), and the destination where it has a single one."""
    if kind is Kind.ALLREDUCE:
        return 0, None
    one, many = (after, before) if kind.reduces else (before, after)
    if len(one) != 1 or (kind in {Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL} and len(many) != 1):
        raise ProgramError(f"collective: its chunks are not those of {kind}")
    (owner,) = one
    if kind in {Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL}:
        (target,) = many
        return ours[owner], ours[target]
    return ours[owner], None


def _topology(entry: Entry, ranks: int) -> Topology:
    if _list(entry, "switches", "topology", 1 << 16):
        raise ProgramError(
            "topology: has switches, which SCCL knows as limits alone; name the topology (--topology)"
        )
    rows = _list(entry, "links", "topology", MOST_RANKS)
    if len(rows) != ranks or any(not isinstance(row, list) or len(row) != ranks for row in rows):
        raise ProgramError(f"topology: links must be {ranks} rows of {ranks} numbers")
    links = []
    for target, row in enumerate(rows):
        for source in range(ranks):
            width = row[source]
            if isinstance(width, bool) or not isinstance(width, int) or not 0 <= width < 1 << 31:
                raise ProgramError(f"topology: links must be whole numbers, got {shorten(width)}")
            if width and source != target:
                links.append(Link(source, target, Fraction(width)))
    return Topology.build(str(entry.get("name"))[:64], ranks, links)


def _chunk(entry: object, ranks: int) -> tuple[list[int], list[int], int]:
    shape = _object(entry, "collective: chunk")
    ends = []
    for name in ("pre", "post"):
        row = _list(shape, name, "collective: chunk", ranks)
        if any(isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks for rank in row):
            raise ProgramError(f"collective: {name} of a chunk must be ranks from 0 to {ranks - 1}")
        ends.append(sorted(row))
    return ends[0], ends[1], _whole(shape, "addr", "collective: chunk", 0, MOST_RANKS**2)


def _sends(step: Entry, where: str, ranks: int) -> Iterator[tuple[int, int, int]]:
    for send in _list(step, "sends", where, MOST_SENDS):
        whole = isinstance(send, list) and len(send) == 3 and all(type(number) is int for number in send)
        if not whole or not (0 <= send[1] < ranks and 0 <= send[2] < ranks):
            raise ProgramError(f"{where}: a send must be [address, from, to], got {shorten(send)}")
        yield send[0], send[1], send[2]


def _object(value: object, where: str) -> Entry:
    if not isinstance(value, dict):
        raise ProgramError(f"{where}: must be an object, got {shorten(value)}")
    return value


def _list(entry: Entry, name: str, where: str, most: int) -> list[Any]:
    value = entry.get(name)
    if not isinstance(value, list) or len(value) > most:
        raise ProgramError(f"{where}: {name} must be a list of at most {most}, got {shorten(value)}")
    return value


def _whole(entry: Entry, name: str, where: str, least: int, most: int) -> int:
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ProgramError(
            f"{where}: {name} must be a whole number from {least} to {most}, got {shorten(value)}"
        )
    return value
