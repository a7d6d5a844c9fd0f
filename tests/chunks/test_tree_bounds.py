"""The exact packing of time-expanded trees: known optima, enumeration, certificates, packings replayed."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.synth.chunks.bounds.step_certificate import TreeDual
from arborcast.synth.chunks.bounds.step_check import certified_ratio
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.trees.column_generation import TreeBound, tree_bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError, InputError
from arborcast.synth.topology import Topology
from tests.support.strategies import collectives
from tests.support.strategies import topologies as drawn_topologies
from tests.support.timed_trees import least_ratio

NO_LIMIT = Deadline()


def problem_of(spec: str | Topology, kind: str, root: int = 0) -> ChunkProblem:
    topology = topologies.load(spec) if isinstance(spec, str) else spec
    return ChunkProblem.of(topology, Collective.on(topology, kind, root=root))


def check(problem: ChunkProblem, steps: int, found: TreeBound) -> None:
    """The packing is one, the steps carry it, and the certificate proves what it says."""
    share: dict[int, Fraction] = defaultdict(Fraction)
    load: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
    for tree in found.trees:
        demand = problem.demands[tree.demand]
        since = dict.fromkeys(demand.sources, 0)
        for route, step in tree.sends:
            assert since[problem.routes[route].src] <= step < steps
            since[problem.routes[route].dst] = step + 1
            for link in problem.routes[route].links:
                load[step, link] += tree.weight
        assert demand.targets <= since.keys()
        assert tree.weight > 0
        share[tree.demand] += tree.weight
    assert share == dict.fromkeys(range(len(problem.demands)), Fraction(1))
    for (step, link), amount in load.items():
        assert amount <= problem.capacities[link] * found.durations[step]
    assert len(found.durations) == found.bound.steps == steps
    assert isinstance(found.bound.certificate, TreeDual)
    assert found.bound.ratio == certified_ratio(problem, steps, found.bound.certificate)
    assert found.bound.ratio <= sum(found.durations)
    assert found.is_exact == (found.bound.ratio == sum(found.durations))


@pytest.mark.parametrize(
    ("spec", "kind", "root", "steps", "ratio"),
    [
        ("dgx1", "allgather", 0, 2, "3/2"),
        ("dgx1", "allgather", 0, 3, "7/6"),
        ("dgx1", "broadcast", 0, 2, "1"),
        ("dgx1", "broadcast", 0, 3, "9/22"),
        ("dgx1", "broadcast", 0, 4, "4/13"),
        ("dgx1", "broadcast", 0, 5, "5/19"),
        ("dgx1", "broadcast", 0, 6, "6/25"),
        ("dgx1", "broadcast", 0, 7, "7/31"),
        ("dgx1", "broadcast", 0, 8, "8/37"),
        ("dgx1", "gather", 0, 2, "7/6"),
        ("dgx1", "alltoall", 0, 2, "8/3"),
        ("hypercube:3", "broadcast", 0, 3, "1"),
        ("hypercube:3", "broadcast", 0, 4, "2/3"),
        ("ring:8", "allgather", 0, 4, "7/2"),
    ],
)
def test_known_optima(spec, kind, root, steps, ratio):
    problem = problem_of(spec, kind, root)
    found = tree_bound(problem, steps, deadline=NO_LIMIT)
    assert found.is_exact
    assert found.bound.ratio == Fraction(ratio)
    check(problem, steps, found)


def test_roots_of_one_orbit_are_alike():
    ratios = {
        root: tree_bound(problem_of("dgx1", "broadcast", root), 3, deadline=NO_LIMIT) for root in range(8)
    }
    assert [ratios[root].bound.ratio for root in range(8)] == [
        Fraction(ratio) for ratio in ("9/22", "9/22", "1/2", "1/2", "9/22", "9/22", "1/2", "1/2")
    ]


@settings(max_examples=40)
@given(st.data())
def test_agrees_with_the_program_over_all_trees(data):
    topology = data.draw(drawn_topologies(max_ranks=4, switches=1, symmetric=data.draw(st.booleans())))
    kinds = [Kind.BROADCAST, Kind.ALLGATHER, Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL]
    problem = ChunkProblem.of(topology, data.draw(collectives(topology, kinds, relays=True)))
    steps = problem.latency + data.draw(
        st.integers(0, 3 - min(problem.latency, 3)).map(lambda more: min(more, 1))
    )
    found = tree_bound(problem, steps, deadline=NO_LIMIT)
    check(problem, steps, found)
    assert found.is_exact
    assert float(found.bound.ratio) == pytest.approx(least_ratio(problem, steps), rel=1e-6)


def rotations(ranks: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple((rank + by) % ranks for rank in range(ranks)) for by in range(ranks))


@pytest.mark.parametrize(("kind", "steps"), [("allgather", 3), ("allgather", 4), ("alltoall", 3)])
def test_a_group_changes_nothing_but_the_work(kind, steps):
    problem = problem_of("ring:6", kind)
    alone = tree_bound(problem, steps, deadline=NO_LIMIT)
    together = tree_bound(problem, steps, deadline=NO_LIMIT, group=rotations(6))
    check(problem, steps, together)
    assert together.is_exact
    assert together.bound.ratio == alone.bound.ratio
    # One demand of each orbit stands for the others: 1 of 6 blocks to all, 5 of 30 blocks to one.
    assert {demand for demand, _ in together.candidates} == set(range(len(problem.demands) // 6))


def test_a_group_may_keep_a_demand():
    """The stabilizer of a root: prices are merged, and each tree is spread over its images."""
    problem = problem_of("hypercube:3", "broadcast")
    turned = tuple(
        tuple(sum(((rank >> bit) & 1) << ((bit + by) % 3) for bit in range(3)) for rank in range(8))
        for by in range(3)
    )
    found = tree_bound(problem, 4, deadline=NO_LIMIT, group=turned)
    check(problem, 4, found)
    assert found.bound.ratio == Fraction(2, 3)
    assert found.is_exact


@pytest.mark.parametrize("kind", ["broadcast", "allgather"])
def test_out_of_time_leaves_a_proven_limit_and_a_packing(kind):
    problem = problem_of("dgx1", kind)
    found = tree_bound(problem, 4, deadline=Deadline.after(0))
    check(problem, 4, found)
    assert 0 < found.bound.ratio < sum(found.durations)


def test_candidates_cost_what_the_packing_does():
    problem = problem_of("dgx1", "broadcast")
    found = tree_bound(problem, 5, deadline=NO_LIMIT)
    lengths = found.bound.certificate.lengths
    costs = {
        sum(lengths[step][link] for route, step in tree for link in problem.routes[route].links)
        for _, tree in found.candidates
    }
    assert costs == {found.bound.ratio}
    assert {tree.sends for tree in found.trees} <= {tree for _, tree in found.candidates}


def test_refusals():
    problem = problem_of("dgx1", "broadcast")
    with pytest.raises(InfeasibleError, match="cannot be reached in 1 steps, only in 2"):
        tree_bound(problem, 1, deadline=NO_LIMIT)
    with pytest.raises(InputError, match="steps must be at least 1, got 0"):
        tree_bound(problem, 0, deadline=NO_LIMIT)
    with pytest.raises(InputError, match="at most 12 targets, got 17"):
        tree_bound(problem_of("ring:18", "broadcast"), 9, deadline=NO_LIMIT)
