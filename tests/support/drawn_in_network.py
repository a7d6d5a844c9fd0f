"""Drawn schedules whose transfers start and end at switches, with the fabrics they are drawn for."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from arborcast.synth.certificate import Bound, Cut
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Link, Switch, Topology
from tests.support.drawn_implicit import of_orbits

TURNS = Switch("hub", reduces=True, multicasts=True, turns=True)
BOTH = Switch("hub", reduces=True, multicasts=True)
NVLS = Switch("hub", reduces=True, multicasts=True, loopback=True)


def drawn_transfers(steps: Sequence[str]) -> list[Transfer]:
    """Each step is "SRC>DST:CHUNK ...", with + at the end for a reduction and SRC>s>DST through switch s."""
    transfers = []
    for step, line in enumerate(steps):
        for word in line.split():
            path, chunk = word.rstrip("+").split(":")
            src, *via, dst = map(int, path.split(">"))
            transfers.append(Transfer(int(chunk), src, dst, step, word.endswith("+"), tuple(via)))
    return transfers


def star(ranks: int, switch: Switch) -> Topology:
    """Ranks around a switch, links of 1 GB/s; every turn of the circle of ranks is a symmetry."""
    links = [Link(*pair, Fraction(1)) for rank in range(ranks) for pair in ((rank, ranks), (ranks, rank))]
    return Topology.build(f"star of {ranks}", ranks, links, [switch], [[*range(1, ranks), 0, ranks]])


def two_stars(switch: Switch, between: str = "1") -> Topology:
    """Ranks 0 to 3 around switch 8, ranks 4 to 7 around switch 9, and a link both ways between the two."""
    links = [
        Link(*pair, Fraction(1))
        for rank in range(8)
        for pair in ((rank, 8 + rank // 4), (8 + rank // 4, rank))
    ]
    links += [Link(8, 9, Fraction(between)), Link(9, 8, Fraction(between))]
    switches = [Switch(**{**_fields(switch), "name": name}) for name in ("left", "right")]
    turned = [1, 2, 3, 0, 5, 6, 7, 4, 8, 9]
    exchanged = [4, 5, 6, 7, 0, 1, 2, 3, 9, 8]
    return Topology.build("two stars", 8, links, switches, [turned, exchanged])


def _fields(switch: Switch) -> dict[str, object]:
    return {name: getattr(switch, name) for name in Switch.__dataclass_fields__}


def drawn(topology: Topology, kind: Kind, chunks: Sequence[Chunk], steps: Sequence[str]) -> Schedule:
    """The bound is what one rank can send."""
    collective = Collective.on(topology, kind)
    return Schedule.build(
        topology, collective, Method("drawn"), _cut(collective), chunks, drawn_transfers(steps)
    )


def _cut(collective: Collective) -> Bound:
    """What must leave rank 0 (of a reduce, which has its root there, rank 1) over its link of 1 GB/s."""
    count = len(collective.ranks)
    share = {Kind.ALLGATHER: Fraction(1, count), Kind.REDUCE_SCATTER: Fraction(count - 1, count)}
    side = frozenset({1 if collective.kind is Kind.REDUCE else 0})
    return Bound(1 / share.get(collective.kind, Fraction(1)), Cut(side, Fraction(1)))


def implicit_star(
    topology: Topology, kind: Kind, shares: Sequence[Fraction] = (Fraction(1),)
) -> ImplicitSchedule:
    """A tree through the switch for each rank and share of its block, as its abilities have it.

    Allgather: from the rank over the switch to all. Reduce-scatter: the other way round. Allreduce: at the
    switch, if that turns; otherwise up to the rank and down again.
    """
    ranks, hub = topology.ranks, topology.ranks
    switch = topology.switches[0]
    back = [0] if switch.loopback else []
    others = range(1, ranks)
    up = [Transfer(0, rank, hub, 0, True) for rank in (*back, *others)]
    down = [Transfer(0, hub, rank, 3) for rank in (*back, *others)]
    gathered, spread = Transfer(0, hub, 0, 1, not switch.loopback), Transfer(0, 0, hub, 2)
    match kind:
        case Kind.ALLREDUCE if switch.turns:
            up = [Transfer(0, rank, hub, 0, True) for rank in range(ranks)]
            transfers = [*up, *(Transfer(0, hub, rank, 1) for rank in range(ranks))]
        case Kind.ALLREDUCE:
            transfers = [*up, gathered, spread, *down]
        case Kind.REDUCE_SCATTER:
            transfers = [*up, gathered]
        case _:
            transfers = [spread, *down]
    limit = _cut(Collective.on(topology, kind))
    return of_orbits(topology, kind, [Chunk(Fraction(1, ranks), 0)], transfers, limit=limit)


def implicit_two_stars(topology: Topology) -> ImplicitSchedule:
    """An allreduce that turns at the switch of its owner; the other switch gives it one sum, and gets one."""
    ups = [f"{rank}>{8 + rank // 4}:0+" for rank in range(8)]
    downs = [f"{8 + rank // 4}>{rank}:0" for rank in range(8)]
    steps = [" ".join(ups), "9>8:0+", " ".join(["8>9:0", *downs[:4]]), " ".join(downs[4:])]
    limit = _cut(Collective.on(topology, Kind.ALLREDUCE))
    chunks = [Chunk(Fraction(1, 8), 0)]
    return of_orbits(topology, Kind.ALLREDUCE, chunks, drawn_transfers(steps), limit=limit)
