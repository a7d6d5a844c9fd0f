"""Reductions as mirror images of copies, and plans as schedules.

A reduce is a broadcast run backwards on the reversed topology, a reduce-scatter an allgather run backwards:
every send turns round and becomes a reduction, and the last step becomes the first. `mirrored` gives the
collective that a solver is asked, `schedule_of` turns its plan into a schedule of what was wanted, and
`allreduce_of` joins a reduce-scatter and an allgather.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from arborcast.synth.certificate import Bound
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.prune import ChunkPlan
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import CollectiveError
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Topology

IMAGES = {Kind.REDUCE: Kind.BROADCAST, Kind.REDUCE_SCATTER: Kind.ALLGATHER}
"""The copy whose mirror image each reduction is."""


def mirrored(topology: Topology, collective: Collective) -> tuple[Topology, Collective]:
    """The topology and collective to solve; those given where nothing is reduced.

    Raises:
        CollectiveError: an allreduce, which is two of them (`allreduce_of`).
    """
    if collective.kind is Kind.ALLREDUCE:
        raise CollectiveError("allreduce: has no mirror image; join a reduce-scatter and an allgather")
    if collective.kind not in IMAGES:
        return topology, collective
    return topology.reversed(), replace(collective, kind=IMAGES[collective.kind])


def schedule_of(
    topology: Topology,
    collective: Collective,
    problem: ChunkProblem,
    chunks: int,
    plan: ChunkPlan,
    *,
    method: Method,
    bound: Bound,
) -> Schedule:
    """The schedule that a plan is.

    The topology is the one that was asked about, not its mirror image; the problem is that of
    `mirrored(topology, collective)`, with so many chunks per demand, and the plan is pruned to a tree per
    chunk.
    """
    rounds = plan.rounds
    transfers = list(_transfers(problem, chunks, plan))
    if collective.kind in IMAGES:
        rounds = rounds[::-1]
        transfers = [reversed_in_time(transfer, len(rounds)) for transfer in transfers]
    rounds, transfers = _ending_late(rounds, transfers)
    return Schedule.build(
        topology, collective, method, bound, _chunks(collective, problem, chunks), transfers, rounds
    )


def allreduce_of(
    collective: Collective, scattered: Schedule, gathered: Schedule, *, method: Method, bound: Bound
) -> Schedule:
    """The allreduce that reduces every chunk to its owner and then spreads it from there.

    Both halves are step-synchronous, among the ranks of the allreduce, and have the same chunks.
    """
    assert scattered.rounds is not None and gathered.rounds is not None, "both halves are step-synchronous"
    assert scattered.chunks == gathered.chunks, "both halves have the same chunks in the same order"
    later = (replace(t, step=t.step + len(scattered.rounds)) for t in gathered.transfers)
    return Schedule.build(
        scattered.topology,
        collective,
        method,
        bound,
        scattered.chunks,
        (*scattered.transfers, *later),
        (*scattered.rounds, *gathered.rounds),
    )


def _chunks(collective: Collective, problem: ChunkProblem, count: int) -> Iterator[Chunk]:
    share = share_of_demand(collective) / count
    for index, demand in enumerate(problem.demands):
        owner = demand.owner
        target = min(demand.targets) if collective.kind in _WITH_TARGET else None
        number = index if collective.kind is Kind.CUSTOM else None
        for _ in range(count):
            yield Chunk(share, owner, target, number)


def share_of_demand(collective: Collective) -> Fraction:
    """The part of the whole buffer that one demand of its problem is (all are of one size).

    An allreduce has one block and as many demands as ranks: each rank owns a part of it.
    """
    if collective.kind is Kind.ALLREDUCE:
        return Fraction(1, len(collective.ranks))
    return next(iter(collective.blocks().values()))


_WITH_TARGET = frozenset({Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL})


def _transfers(problem: ChunkProblem, chunks: int, plan: ChunkPlan) -> Iterator[Transfer]:
    for send in plan.sends:
        route = problem.routes[send.route]
        yield Transfer(
            send.demand * chunks + send.chunk, route.src, route.dst, send.step, reduce=False, via=route.via
        )


def _ending_late(
    rounds: tuple[int, ...], transfers: list[Transfer]
) -> tuple[tuple[int, ...], list[Transfer]]:
    """Steps at the end in which nothing is sent go before the others: a schedule ends with a send."""
    idle = len(rounds) - 1 - max(transfer.step for transfer in transfers)
    if not idle:
        return rounds, transfers
    return rounds[-idle:] + rounds[:-idle], [replace(t, step=t.step + idle) for t in transfers]


def reversed_in_time(transfer: Transfer, steps: int) -> Transfer:
    """A copy of one of so many steps as the reduction that it is backwards."""
    return replace(
        transfer,
        src=transfer.dst,
        dst=transfer.src,
        step=steps - 1 - transfer.step,
        reduce=True,
        via=transfer.via[::-1],
    )
