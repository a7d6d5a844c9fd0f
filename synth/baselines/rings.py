"""Rings turned into schedules: what moves on a ring in each step, for each kind of collective.

On one ring of n ranks (positions 0..n-1), the chunk that belongs to position p moves in step s

    allgather        from p+s    to p+s+1    s = 0..n-2
    reduce-scatter   from p+1+s  to p+2+s    s = 0..n-2, adding up, so that it ends in p
    allreduce        the second, then the first: 2(n-1) steps
    broadcast        as allgather, from the root only; reduce: as reduce-scatter, to the root only
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from arborcast.synth.baselines.hamiltonian import Ring
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InfeasibleError, Prover
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Topology

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
                transfers += _moves(kind, ring, position, len(chunks))
                chunks.append(Chunk(Fraction(weight, weight_in_all * blocks), path.src))
    return Schedule.build(topology, collective, method, bound, chunks, transfers)


def _moves(kind: Kind, ring: Ring, position: int, chunk: int) -> Iterator[Transfer]:
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
