"""Rings turned into schedules: what moves on a ring in each step, for each kind of collective.

On one ring of n ranks (positions 0..n-1), the chunk that belongs to position p moves in step s

    allgather        from p+s    to p+s+1    s = 0..n-2
    reduce-scatter   from p+1+s  to p+2+s    s = 0..n-2, adding up, so that it ends in p
    allreduce        the second, then the first: 2(n-1) steps
    broadcast        as allgather, from the root only; reduce: as reduce-scatter, to the root only
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from random import Random

from arborcast.synth.baselines.budget import BudgetError
from arborcast.synth.baselines.hamiltonian import Ring, RingFabric, find_ring
from arborcast.synth.baselines.switch_paths import Paths, switch_paths
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError, Prover
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Hop, Topology

MOST_TRANSFERS = 4_000_000


def ring_schedule(
    topology: Topology,
    collective: Collective,
    method: Method,
    bound: Bound,
    rings: Sequence[tuple[Ring, int]],
) -> Schedule:
    """The schedule over weighted rings; each ring carries its weight's part of every block.

    Raises:
        InfeasibleError: it would take too many transfers to write down.
    """
    kind = collective.kind
    count = len(collective.ranks)
    phases = 2 if kind is Kind.ALLREDUCE else 1
    blocks = 1 if kind.has_root else count
    transfers_in_all = len(rings) * blocks * (count - 1) * phases
    if transfers_in_all > MOST_TRANSFERS:
        raise InfeasibleError(
            f"{method.name}: {len(rings)} rings of {count} ranks take {transfers_in_all} transfers, "
            f"more than {MOST_TRANSFERS}"
        )
    weight_in_all = sum(weight for _, weight in rings)
    chunks: list[Chunk] = []
    transfers: list[Transfer] = []
    for ring, weight in rings:
        for position, path in enumerate(ring):
            if collective.root in {None, path.src}:
                transfers += moves_on_ring(kind, ring, position, len(chunks))
                chunks.append(Chunk(Fraction(weight, weight_in_all * blocks), path.src))
    return Schedule.build(topology, collective, method, bound, chunks, transfers)


def moves_on_ring(kind: Kind, ring: Ring, position: int, chunk: int) -> Iterator[Transfer]:
    """What the chunk of one position does."""
    last = len(ring) - 1
    if kind.reduces:
        yield from _walk(ring, position + 1, chunk, step=0, reduce=True)
    if kind is Kind.ALLREDUCE:
        yield from _walk(ring, position, chunk, step=last, reduce=False)
    if not kind.reduces:
        yield from _walk(ring, position, chunk, step=0, reduce=False)


def _walk(ring: Ring, position: int, chunk: int, *, step: int, reduce: bool) -> Iterator[Transfer]:
    """Once round the ring from a position, all but the last edge."""
    for offset in range(len(ring) - 1):
        path = ring[(position + offset) % len(ring)]
        yield Transfer(chunk, path.src, path.dst, step + offset, reduce, path.via)


def no_ring(method: str, topology: Topology, collective: Collective) -> InfeasibleError:
    """What to say where there is no Hamiltonian cycle."""
    ranks = ", ".join(map(str, collective.ranks))
    return InfeasibleError(
        f"{method}: no ring exists through ranks {ranks} of {topology.name} over direct links and switches; "
        "method trees needs none",
        proved_by=[Prover.EXHAUSTION],
    )


def solve_ring(
    topology: Topology, collective: Collective, bound: Bound, seed: int, deadline: Deadline
) -> Schedule:
    """The schedule over the widest ring.

    `Method.settings` holds `proved_widest`: "yes" where no other ring (of direct links and of the ways
    through switches that `paths` lists) is wider, "no" where a search ran out of its budget.

    Raises:
        InfeasibleError: there is no ring, or none was found within the budget.
        TimedOutError: the deadline passed.
    """
    paths = switch_paths(topology, collective.ranks)
    widths = _widths(topology, collective.ranks, paths)
    best: Ring | None = None
    unsure = False
    low, high = 0, len(widths)  # every width from `high` on is feasible, every one before `low` is not
    while low < high:
        middle = (low + high) // 2
        try:
            ring = _ring_of_width(topology, collective, paths, widths[middle], seed, deadline)
        except BudgetError:
            ring, unsure = None, True
        if ring is None:
            low = middle + 1
        else:
            best, high = ring, middle
    if best is None:
        if unsure:
            raise InfeasibleError(
                f"ring: none found through the {len(collective.ranks)} ranks of {topology.name} within the "
                "budget of the search; method trees needs none"
            )
        raise no_ring("ring", topology, collective)
    method = Method("ring", seed, (("proved_widest", "no" if unsure else "yes"),))
    return ring_schedule(topology, collective, method, bound, [(best, 1)])


def _ring_of_width(
    topology: Topology, collective: Collective, paths: Paths, width: Fraction, seed: int, deadline: Deadline
) -> Ring | None:
    capacity = {hop: math.floor(bandwidth / width) for hop, bandwidth in topology.bandwidth.items()}
    fabric = RingFabric(collective.ranks, paths, capacity).restricted(capacity)
    return find_ring(fabric, start=collective.ranks[0], rng=Random(seed), deadline=deadline)


def _widths(topology: Topology, ranks: tuple[int, ...], paths: Paths) -> list[Fraction]:
    """The widths that a ring can have, the largest first: a trunk may serve several of its edges."""
    used: set[Hop] = {hop for ways in paths.values() for way in ways for hop in way.hops}
    widths: set[Fraction] = set()
    for src, dst in used:
        # A rank has one edge out and one in; only a link between two switches can serve more.
        most = len(ranks) if topology.is_switch(src) and topology.is_switch(dst) else 1
        widths.update(topology.bandwidth[src, dst] / times for times in range(1, most + 1))
    widest_out = {rank: Fraction(0) for rank in ranks}
    widest_in = dict(widest_out)
    for (src, dst), ways in paths.items():
        widest_out[src] = max(widest_out[src], ways[0].width)
        widest_in[dst] = max(widest_in[dst], ways[0].width)
    limit = min((*widest_out.values(), *widest_in.values()))
    return sorted((width for width in widths if width <= limit), reverse=True)
