"""From sends to schedules: pruning to trees, mirror images, compositions."""

from __future__ import annotations

from fractions import Fraction

import pytest

from arborcast import synth
from arborcast.synth import bounds
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkSend
from arborcast.synth.chunks.problem.prune import ChunkPlan, prune
from arborcast.synth.chunks.problem.time_reversal import allreduce_of, mirrored, schedule_of
from arborcast.synth.collective import Collective
from arborcast.synth.errors import CollectiveError
from arborcast.synth.schedule import Method, Schedule
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load

# A ring of four, one chunk each, both ways round at once: 2 steps of 1 and 1 rounds reach everybody.
#   step 0: r -> r+1 and r -> r-1          step 1: what came from r-1 goes on to r+1
RING = load("ring:4")


def ring_allgather(problem: ChunkProblem) -> list[ChunkSend]:
    route = {(r.src, r.dst): i for i, r in enumerate(problem.routes)}
    sends = [ChunkSend(r, 0, route[r, (r + way) % 4], 0) for r in range(4) for way in (1, -1)]
    return sends + [ChunkSend(r, 0, route[(r + 1) % 4, (r + 2) % 4], 1) for r in range(4)]


def built(kind: str, rounds: tuple[int, ...] = (1, 1)) -> Schedule:
    collective = Collective.on(RING, kind)
    problem = ChunkProblem.of(*mirrored(RING, collective))
    plan = prune(problem, 1, rounds, ring_allgather(problem))
    limit = bounds.bound(RING, collective)
    return schedule_of(RING, collective, problem, 1, plan, method=Method("drawn"), bound=limit)


@pytest.mark.parametrize("kind", ["allgather", "reduce-scatter"])
def test_the_drawn_allgather_and_its_mirror_image_verify(kind: str) -> None:
    schedule = built(kind)
    verdict = synth.verify(schedule)
    assert verdict.correct, verdict.errors
    assert schedule.rounds == (1, 1)
    assert len(schedule.chunks) == 4
    assert schedule.rate == 2  # 4 ranks * 1 chunk / 2 rounds, links of 1 GB/s
    # Nothing is sent in the last two steps: they come before the others.
    idle = built(kind, (1, 1, 4, 2))
    assert synth.verify(idle).correct
    assert idle.rounds == ((4, 2, 1, 1) if kind == "allgather" else (2, 4, 1, 1))


def test_the_mirror_image_reduces_last_step_first() -> None:
    schedule = built("reduce-scatter")
    # Chunk 0's last send of the allgather was 1 -> 2 in step 1: its reduction starts with 2 -> 1 in step 0.
    first = [(t.src, t.dst, t.reduce) for t in schedule.transfers if t.chunk == 0 and t.step == 0]
    assert first == [(2, 1, True)]
    assert sorted((t.src, t.dst) for t in schedule.transfers if t.chunk == 0 and t.step == 1) == [
        (1, 0),
        (3, 0),
    ]


def test_an_allreduce_is_the_one_and_then_the_other() -> None:
    collective = Collective.on(RING, "allreduce")
    schedule = allreduce_of(
        collective,
        built("reduce-scatter"),
        built("allgather"),
        method=Method("drawn"),
        bound=bounds.bound(RING, collective),
    )
    assert synth.verify(schedule).correct
    assert schedule.rounds == (1, 1, 1, 1)
    with pytest.raises(CollectiveError, match="allreduce: has no mirror image"):
        mirrored(RING, collective)


def test_an_asymmetric_fabric_is_reversed_for_a_reduction() -> None:
    one_way = Topology.build("loop", 3, [Link(r, (r + 1) % 3, Fraction(1)) for r in range(3)])
    topology, collective = mirrored(one_way, Collective.on(one_way, "reduce", root=1))
    assert set(topology.bandwidth) == {(1, 0), (2, 1), (0, 2)}
    assert (collective.kind, collective.root) == ("broadcast", 1)


def test_what_nobody_needs_is_pruned() -> None:
    line = load("mesh:1x4")
    problem = ChunkProblem.of(line, Collective.on(line, "gather", root=0, ranks=(0, 1)))
    route = {(r.src, r.dst): i for i, r in enumerate(problem.routes)}
    useful = ChunkSend(0, 0, route[1, 0], 1)
    sends = [
        useful,
        ChunkSend(0, 0, route[1, 2], 0),  # leads nowhere
        ChunkSend(0, 0, route[2, 3], 1),
        ChunkSend(0, 0, route[1, 0], 2),  # a second time
        ChunkSend(0, 0, route[3, 2], 0),  # rank 3 does not hold it yet
    ]
    assert prune(problem, 1, (1, 1, 1), sends) == ChunkPlan((1, 1, 1), (useful,))


def test_a_chunk_that_never_arrives_is_a_bug() -> None:
    problem = ChunkProblem.of(RING, Collective.on(RING, "broadcast"))
    with pytest.raises(ValueError, match="demand 0, chunk 1: never reaches rank 1"):
        prune(problem, 2, (1, 1), [send for send in ring_allgather(problem) if send.demand == 0])
