"""What can matter in S steps: drawn for a line, and against all schedules that send nothing in vain."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arborcast.synth.chunks.encodings.reachable_sends import (
    MANY_MEMBERS,
    ReachableSends,
    is_ordered,
    longest_step,
)
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkOrbits
from tests.support.chunk_problems import problems
from tests.support.chunk_replay import instance_of
from tests.support.timed_trees import all_trees


def test_a_broadcast_along_a_line() -> None:
    """Rank 0 of 0 - 1 - 2 sends in 3 steps: to rank 1 by the last, from there when it may be there."""
    instance = instance_of("mesh:1x3", "broadcast", 1, 3, 3)
    routes = [(route.src, route.dst) for route in instance.orbits.problem.routes]
    reachable = ReachableSends.of(instance.orbits, 3)
    assert [(*routes[route], step) for route, step in reachable.sends[0]] == [
        (0, 1, 0),
        (0, 1, 1),
        (1, 2, 1),
        (0, 1, 2),
        (1, 2, 2),
        (2, 1, 2),  # to a target: that rank 1 had it before is not looked at
    ]
    assert reachable.holds[0] == ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2), (1, 3), (2, 3))


@settings(max_examples=100)
@given(problems(4, custom=True), st.integers(0, 1))
def test_what_leads_to_targets_is_among_the_reachable_sends(problem: ChunkProblem, more: int) -> None:
    """Every send of every tree that has no dead ends, and every moment at which its ranks hold the block."""
    assert problem.latency is not None
    steps = problem.latency + more
    assume(problem.ranks < 4 or steps <= 3)  # the trees of larger ones are too many
    reachable = ReachableSends.of(ChunkOrbits.trivial(problem, 1), steps)
    for number, demand in enumerate(problem.demands):
        for tree in all_trees(problem, demand, steps):
            senders = {problem.routes[route].src for route, _ in tree}
            if all(problem.routes[route].dst in demand.targets | senders for route, _ in tree):
                assert set(tree) <= set(reachable.sends[number])
                assert {(problem.routes[route].dst, step + 1) for route, step in tree} <= set(
                    reachable.holds[number]
                )
        latest = {(target, steps) for target in demand.targets}
        assert latest <= set(reachable.holds[number])


def test_too_few_steps_miss_a_target() -> None:
    reachable = ReachableSends.of(instance_of("mesh:1x3", "broadcast", 1, 1, 1).orbits, 1)
    assert (2, 1) not in reachable.holds[0]


def test_the_longest_step() -> None:
    """Eight chunks over links that carry one a round fill eight rounds, of which R leaves fewer."""
    assert longest_step(instance_of("ring:4", "allgather", 2, 2, 100)) == 8
    assert longest_step(instance_of("ring:4", "allgather", 2, 2, 5)) == 4
    assert longest_step(instance_of("ring:4", "allgather", 2, 2, 2)) == 1


def test_when_chunks_that_are_alike_are_ordered() -> None:
    assert is_ordered(instance_of("ring:4", "broadcast", MANY_MEMBERS, 2, 2).orbits)
    assert not is_ordered(instance_of("ring:4", "broadcast", MANY_MEMBERS - 1, 2, 2).orbits)
    assert not is_ordered(instance_of("ring:4", "allgather", MANY_MEMBERS, 2, 2).orbits)
