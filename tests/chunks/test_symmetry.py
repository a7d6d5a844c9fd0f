"""Groups under which a problem is worth solving, checked from the definitions."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkOrbits, Group
from arborcast.synth.chunks.problem.symmetry import (
    LARGEST_GROUP,
    problem_group,
    useful_groups,
)
from arborcast.synth.collective import Collective, Demand, Kind
from arborcast.synth.topology import Link, Permutation, Topology
from arborcast.topologies import load
from tests.support.chunk_problems import problem_of, problems


def moved(demand: Demand, images: Permutation) -> Demand:
    return Demand(
        frozenset(images[rank] for rank in demand.sources), frozenset(images[rank] for rank in demand.targets)
    )


def assert_keeps(problem: ChunkProblem, images: Permutation) -> None:
    """It renames the links to themselves, and the demands."""
    links = {(link.src, link.dst): link.bandwidth for link in problem.topology.links}
    assert {(images[src], images[dst]): rate for (src, dst), rate in links.items()} == links
    assert Counter(moved(demand, images) for demand in problem.demands) == Counter(problem.demands)


def assert_group(group: Group, size: int) -> None:
    """The identity first, no element twice, all products and inverses there."""
    assert group[0] == tuple(range(size))
    elements = set(group)
    assert len(elements) == len(group)
    assert {tuple(first[v] for v in second) for first, second in product(group, group)} == elements


def stabilisers(problem: ChunkProblem, group: Group) -> list[int]:
    """How many elements keep each demand."""
    return [sum(moved(demand, images) == demand for images in group) for demand in problem.demands]


def is_lossless(problem: ChunkProblem, group: Group) -> bool:
    return all(
        capacity % sum((images[link.src], images[link.dst]) == (link.src, link.dst) for images in group) == 0
        for link, capacity in zip(problem.topology.links, problem.capacities, strict=True)
    )


def assert_useful(problem: ChunkProblem, chunks: int, groups: tuple[Group, ...]) -> None:
    for group in groups:
        assert 1 < len(group) <= LARGEST_GROUP
        assert_group(group, problem.topology.size)
        for images in group:
            assert_keeps(problem, images)
        assert all(chunks % order == 0 for order in stabilisers(problem, group))
        assert ChunkOrbits(problem, chunks, group).classes
    assert [len(group) for group in groups] == sorted(map(len, groups), reverse=True)
    assert len({is_lossless(problem, group) for group in groups}) <= 1


@settings(max_examples=150)
@given(problems(6, symmetric=True), st.sampled_from([1, 2, 3, 6]))
def test_groups_are_groups_that_act_freely_on_the_chunks(problem: ChunkProblem, chunks: int) -> None:
    assert_useful(problem, chunks, useful_groups(problem, chunks))


@settings(max_examples=60)
@given(problems(5, symmetric=True), st.sampled_from([1, 2, 6]))
def test_a_group_is_found_where_one_element_would_do(problem: ChunkProblem, chunks: int) -> None:
    """Every problem with an element of prime order that acts freely has a useful group, and only those."""
    topology = problem.topology
    ways = product(permutations(range(topology.ranks)), permutations(range(topology.ranks, topology.size)))
    found = False
    for ranks, switches in ways:
        images = (*ranks, *switches)
        cycle = [tuple(range(topology.size))]
        while (power := tuple(images[v] for v in cycle[-1])) != cycle[0]:
            cycle.append(power)
        try:
            assert_keeps(problem, images)
        except AssertionError:
            continue
        found |= len(cycle) > 1 and all(chunks % order == 0 for order in stabilisers(problem, tuple(cycle)))
    assert bool(useful_groups(problem, chunks)) == found


@pytest.mark.parametrize(
    ("spec", "kind", "chunks", "largest"),
    [
        ("ring:8", "allgather", 1, 8),  # rotations
        ("ring:8", "allgather", 2, 16),  # with reflections, which swap the two chunks of a rank
        ("torus:4x4", "allgather", 1, 16),  # translations
        ("torus:4x8", "allgather", 1, 32),
        ("hypercube:5", "allgather", 1, 32),  # XOR
        ("hypercube:3", "allgather", 3, 24),  # XOR and the rotations about diagonals
        ("dgx1", "allgather", 1, 4),
        ("dgx1", "alltoall", 3, 4),
        ("dgx1-p100", "allgather", 1, 8),
        ("mi250", "allgather", 2, 4),
        ("dgx2", "allgather", 1, 16),
        ("dgx-a100:boxes=2", "allgather", 1, 16),
        ("full:16", "allgather", 1, 16),
        ("full:8", "alltoall", 1, 56),  # x -> ax + b over the field of 8 elements
        ("hypercube:3", "broadcast", 3, 3),
        ("hypercube:3", "broadcast", 1, 1),
        ("dgx1", "broadcast", 6, 1),
    ],
)
def test_the_largest_groups(spec: str, kind: str, chunks: int, largest: int) -> None:
    problem = problem_of(spec, kind)
    groups = useful_groups(problem, chunks)
    assert max([1, *map(len, groups)]) == largest
    assert_useful(problem, chunks, groups)
    assert all(is_lossless(problem, group) for group in groups)


def test_groups_that_spoil_links_are_left_out_where_others_are() -> None:
    """The 48 symmetries of a cube with 6 chunks act freely, but reflections keep links of capacity 1."""
    problem = problem_of("hypercube:3", "allgather")
    everything = problem_group(problem)
    assert len(everything) == 48
    assert ChunkOrbits(problem, 6, everything).classes
    assert not is_lossless(problem, everything)
    assert len(useful_groups(problem, 6)[0]) == 24


def test_groups_that_spoil_links_are_better_than_none() -> None:
    """A swap of the two leaves keeps the cable between the middle and the root."""
    links = [Link(a, b, 1) for a, b in [(0, 1), (1, 0), (1, 2), (2, 1), (1, 3), (3, 1)]]
    topology = Topology.build("fork", 4, links)
    problem = ChunkProblem.of(topology, Collective.on(topology, "broadcast", root=0))
    (group,) = useful_groups(problem, 2)
    assert group == ((0, 1, 2, 3), (0, 1, 3, 2))
    assert not is_lossless(problem, group)
    assert useful_groups(problem, 3) == ()
    # Whatever is gathered over a star arrives over one link, which every rotation of the others keeps.
    assert len(useful_groups(problem_of("star:8", "gather"), 1)[0]) == 7


def test_few_groups_of_different_sizes() -> None:
    groups = useful_groups(problem_of("torus:4x8", "allgather"), 2)
    assert 2 <= len(groups) <= 4
    for larger, smaller in pairwise(groups):
        assert len(smaller) <= len(larger) // 2
    assert len(useful_groups(problem_of("torus:4x8", "allgather"), 2, most=1)) == 1


def test_the_largest_group_that_fixes_nothing_is_among_them() -> None:
    problem = problem_of("torus:4x4", "allgather")
    groups = useful_groups(problem, 4)
    assert any(len(group) == 16 and set(stabilisers(problem, group)) == {1} for group in groups)


def test_an_irregular_graph_has_none() -> None:
    links = [
        Link(a, b, 1)
        for x, y in [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (1, 3)]
        for a, b in [(x, y), (y, x)]
    ]
    topology = Topology.build("irregular", 6, [*links, Link(5, 0, 3)])
    assert useful_groups(ChunkProblem.of(topology, Collective.on(topology, "allgather")), 12) == ()


def test_demands_that_are_alike_are_kept_in_their_order() -> None:
    topology = load("ring:4")
    twice = Demand(frozenset({0}), frozenset({2}))
    problem = ChunkProblem.of(topology, Collective(Kind.CUSTOM, (0, 1, 2, 3), demands=(twice, twice)))
    mirror = ((0, 1, 2, 3), (0, 3, 2, 1))
    assert useful_groups(problem, 1) == ()  # it keeps both demands, whose one chunk it cannot move
    assert useful_groups(problem, 2) == (mirror,)
    assert problem_group(problem) == mirror


def test_custom_demands_are_kept_as_sets() -> None:
    """Two blocks across a ring of 4: a half turn swaps them, quarter turns give blocks nobody wants."""
    topology = load("ring:4")
    demands = (Demand(frozenset({0}), frozenset({2})), Demand(frozenset({2}), frozenset({0})))
    problem = ChunkProblem.of(topology, Collective(Kind.CUSTOM, (0, 1, 2, 3), demands=demands))
    assert set(problem_group(problem)) == {(0, 1, 2, 3), (2, 3, 0, 1), (0, 3, 2, 1), (2, 1, 0, 3)}
    assert [len(group) for group in useful_groups(problem, 1)] == [2]


def test_relays_stay_relays() -> None:
    topology = load("ring:6")
    collective = Collective.on(topology, "allgather", ranks=[0, 2, 4])
    group = problem_group(ChunkProblem.of(topology, collective))
    assert len(group) == 6
    assert all({images[0], images[2], images[4]} == {0, 2, 4} for images in group)


@settings(max_examples=60)
@given(problems(6, symmetric=True), st.integers(1, 12))
def test_the_group_of_a_problem_keeps_it(problem: ChunkProblem, limit: int) -> None:
    group = problem_group(problem, limit)
    assert len(group) <= limit
    assert_group(group, problem.topology.size)
    for images in group:
        assert_keeps(problem, images)


def test_the_group_of_a_problem_is_all_of_it_where_that_is_small() -> None:
    assert len(problem_group(problem_of("dgx1-p100", "allgather"))) == 48
    assert len(problem_group(problem_of("hypercube:3", "broadcast"))) == 6
    assert len(problem_group(problem_of("torus:4x8", "alltoall"))) == 128


@pytest.mark.parametrize(
    ("spec", "kind", "orbits"), [("full:16", "allgather", 15), ("torus:4x4", "allgather", 1)]
)
def test_the_group_of_a_problem_has_few_orbits_of_links(spec: str, kind: str, orbits: int) -> None:
    """Where the whole group is too large: at least as good as a cycle through all ranks."""
    problem = problem_of(spec, kind)
    group = problem_group(problem)
    assert_group(group, problem.topology.size)
    least = {min((images[link.src], images[link.dst]) for images in group) for link in problem.topology.links}
    assert len(least) <= orbits


def test_latencies_do_not_matter_to_chunks() -> None:
    topology = Topology.build("pair", 2, [Link(0, 1, 1, 5), Link(1, 0, 1)])
    assert len(problem_group(ChunkProblem.of(topology, Collective.on(topology, "allgather")))) == 2
