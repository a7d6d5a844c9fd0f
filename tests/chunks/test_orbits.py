"""A problem under a group: classes, limits and unfolding, against the whole problem counted out."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkClass, ChunkOrbits, ChunkSend, OrbitSend
from arborcast.synth.chunks.problem.symmetry import problem_group, useful_groups
from arborcast.synth.collective import Collective, Demand
from arborcast.topologies import load
from tests.support.chunk_problems import COPIES, problem_of
from tests.support.strategies import collectives, topologies

SPECS = ["ring:6", "hypercube:3", "dgx1", "torus:3x3", "full:5", "star:5", "fat-tree:2x3", "mesh:2x3"]


@st.composite
def reduced_problems(draw: st.DrawFn) -> ChunkOrbits:
    """A problem with more or fewer symmetries, its chunks, and one of its useful groups."""
    if draw(st.booleans()):
        topology = load(draw(st.sampled_from(SPECS)))
    else:
        topology = draw(topologies(max_ranks=5, switches=1, max_bandwidth=2))
    problem = ChunkProblem.of(topology, draw(collectives(topology, COPIES)))
    if draw(st.booleans()):
        group = problem_group(problem, 60)
        return ChunkOrbits(problem, len(group), group)
    chunks = draw(st.sampled_from([1, 2, 3, 6]))
    groups = useful_groups(problem, chunks)
    trivial = ChunkOrbits.trivial(problem, chunks)
    return ChunkOrbits(problem, chunks, draw(st.sampled_from(groups))) if groups else trivial


def drawn_sends(orbits: ChunkOrbits, draw: st.DataObject) -> list[OrbitSend]:
    send = st.builds(
        lambda chunk_class, member, route, step: OrbitSend(
            chunk_class, member % orbits.classes[chunk_class].count, route, step
        ),
        st.integers(0, len(orbits.classes) - 1),
        st.integers(0, 1000),
        st.integers(0, len(orbits.problem.routes) - 1),
        st.integers(0, 1),
    )
    return draw.draw(st.lists(send, max_size=8, unique=True))


@settings(max_examples=150)
@given(reduced_problems())
def test_classes_stand_for_all_chunks(orbits: ChunkOrbits) -> None:
    """As many representatives as chunks over elements, and unfolding gives every chunk exactly once."""
    everything = len(orbits.problem.demands) * orbits.chunks
    assert sum(members.count for members in orbits.classes) * len(orbits.group) == everything
    representatives = [
        OrbitSend(chunk_class, member, 0, 0)
        for chunk_class, members in enumerate(orbits.classes)
        for member in range(members.count)
    ]
    chunks = Counter((send.demand, send.chunk) for send in orbits.unfold(representatives))
    expected = [
        (demand, chunk) for demand in range(len(orbits.problem.demands)) for chunk in range(orbits.chunks)
    ]
    assert chunks == Counter(expected)


@settings(max_examples=150)
@given(reduced_problems(), st.data())
def test_limits_count_the_load_of_every_link(orbits: ChunkOrbits, data: st.DataObject) -> None:
    """The load by the limits is that of the links in the unfolded whole, each orbit of links with its own."""
    sends = drawn_sends(orbits, data)
    load_of: dict[tuple[int, int], int] = defaultdict(int)
    for send in orbits.unfold(sends):
        for link in orbits.problem.routes[send.route].links:
            load_of[link, send.step] += 1
    whole = Counter()
    for step in (0, 1):
        for link, capacity in enumerate(orbits.problem.capacities):
            whole[step, capacity, load_of[link, step]] += 1
    found = Counter()
    links = {(link.src, link.dst) for link in orbits.problem.topology.links}
    sizes = []
    while links:
        first = min(links)
        images = {(element[first[0]], element[first[1]]) for element in orbits.group}
        links -= images
        sizes.append(len(images))
    assert len(orbits.limits) == len(sizes)
    for step in (0, 1):
        taken = Counter((send.chunk_class, send.route) for send in sends if send.step == step)
        for limit, size in zip(orbits.limits, sizes, strict=True):
            found[step, limit.capacity, sum(taken[user] for user in limit.users)] += size
    assert found == whole


@settings(max_examples=100)
@given(reduced_problems(), st.data())
def test_an_image_of_a_way_is_the_way_of_an_image(orbits: ChunkOrbits, data: st.DataObject) -> None:
    """The chunks of a class go the same way up to renaming: from a source to a target, if theirs does."""
    sends = drawn_sends(orbits, data)
    by_chunk: dict[tuple[int, int], list[ChunkSend]] = defaultdict(list)
    for send in orbits.unfold(sends):
        by_chunk[send.demand, send.chunk].append(send)
    problem = orbits.problem

    def shape(demand: Demand, ways: list[tuple[int, int]]) -> Counter[tuple[bool, bool, bool, bool, int]]:
        return Counter(
            (
                problem.routes[route].src in demand.sources,
                problem.routes[route].src in demand.targets,
                problem.routes[route].dst in demand.sources,
                problem.routes[route].dst in demand.targets,
                step,
            )
            for route, step in ways
        )

    expected = Counter()
    for chunk_class, member in {(send.chunk_class, send.member) for send in sends}:
        ways = [(s.route, s.step) for s in sends if (s.chunk_class, s.member) == (chunk_class, member)]
        demand = problem.demands[orbits.classes[chunk_class].demand]
        expected[frozenset(shape(demand, ways).items())] += len(orbits.group)
    found = Counter(
        frozenset(shape(problem.demands[demand], [(s.route, s.step) for s in ways]).items())
        for (demand, _), ways in by_chunk.items()
    )
    assert found == expected


def test_a_ring_of_four_drawn() -> None:
    """Allgather, one chunk each, under the rotations: one class, two limits, each loaded by four routes."""
    rotations = ((0, 1, 2, 3), (1, 2, 3, 0), (2, 3, 0, 1), (3, 0, 1, 2))
    problem = problem_of("ring:4", "allgather")
    ends = [(route.src, route.dst) for route in problem.routes]
    assert ends == [(0, 1), (0, 3), (1, 0), (1, 2), (2, 1), (2, 3), (3, 0), (3, 2)]
    orbits = ChunkOrbits(problem, 1, rotations)
    assert orbits.classes == (ChunkClass(demand=0, count=1),)
    onward, back = orbits.limits
    assert (onward.capacity, sorted(onward.users)) == (1, [(0, 0), (0, 3), (0, 5), (0, 6)])
    assert (back.capacity, sorted(back.users)) == (1, [(0, 1), (0, 2), (0, 4), (0, 7)])
    # Chunk 0 goes 0 -> 1 -> 2; so chunk 1 goes 1 -> 2 -> 3, chunk 2 2 -> 3 -> 0, chunk 3 3 -> 0 -> 1.
    whole = list(orbits.unfold([OrbitSend(0, 0, 0, 0), OrbitSend(0, 0, 3, 1)]))
    assert [(send.demand, ends[send.route], send.step) for send in whole] == [
        (0, (0, 1), 0),
        (1, (1, 2), 0),
        (2, (2, 3), 0),
        (3, (3, 0), 0),
        (0, (1, 2), 1),
        (1, (2, 3), 1),
        (2, (3, 0), 1),
        (3, (0, 1), 1),
    ]
    assert {send.chunk for send in whole} == {0}


def test_chunks_of_a_fixed_demand_change_places() -> None:
    """Broadcast on a ring of 4 with two chunks: the reflection gives the second chunk the mirrored way."""
    problem = problem_of("ring:4", "broadcast")
    orbits = ChunkOrbits(problem, 2, ((0, 1, 2, 3), (0, 3, 2, 1)))
    assert orbits.classes == (ChunkClass(demand=0, count=1),)
    whole = list(orbits.unfold([OrbitSend(0, 0, 0, 0)]))  # route 0 is 0 -> 1, route 1 is 0 -> 3
    assert whole == [ChunkSend(0, 0, 0, 0), ChunkSend(0, 1, 1, 0)]


def test_a_link_that_elements_keep_is_loaded_by_each() -> None:
    """A star with root 0 and leaves 1 and 2, swapped: what goes up the root's link does so twice."""
    problem = problem_of("star:3", "broadcast")
    orbits = ChunkOrbits(problem, 2, ((0, 1, 2, 3), (0, 2, 1, 3)))
    to_leaf = [route.dst for route in problem.routes].index(1)
    taken = Counter({(0, to_leaf): 1})
    loads = {
        sum(taken[user] for user in limit.users) for limit in orbits.limits if (0, to_leaf) in limit.users
    }
    # Of the root's link up two, of each leaf's link down one.
    assert loads == {1, 2}


def test_the_trivial_group_leaves_everything() -> None:
    problem = problem_of("dgx1", "alltoall")
    orbits = ChunkOrbits.trivial(problem, 3)
    assert orbits.classes == tuple(ChunkClass(demand, 3) for demand in range(56))
    assert [limit.capacity for limit in orbits.limits] == list(problem.capacities)
    assert all(len(limit.users) == 56 for limit in orbits.limits)
    assert list(orbits.unfold([OrbitSend(5, 2, 7, 1)])) == [ChunkSend(5, 2, 7, 1)]


def test_alike_demands_are_moved_in_their_order() -> None:
    ring = load("ring:4")
    problem = ChunkProblem.of(ring, Collective.custom(ring, (THERE, BACK, BACK, THERE)))
    assert ChunkOrbits.trivial(problem, 1).classes == tuple(ChunkClass(demand, 1) for demand in range(4))
    half_turn = ChunkOrbits(problem, 1, ((0, 1, 2, 3), (2, 3, 0, 1)))
    assert half_turn.classes == (ChunkClass(0, 1), ChunkClass(2, 1))
    images = [list(half_turn.unfold([OrbitSend(chunk_class, 0, 0, 0)])) for chunk_class in (0, 1)]
    assert [[send.demand for send in sends] for sends in images] == [[0, 1], [2, 3]]


THERE, BACK = Demand(frozenset({0}), frozenset({2})), Demand(frozenset({2}), frozenset({0}))


@pytest.mark.parametrize(
    ("asked", "chunks", "element", "message"),
    [
        ("allgather", 3, (0, 3, 2, 1), "demand 0: 2 symmetries keep it, which must divide its 3 chunks"),
        ("broadcast", 2, (2, 3, 0, 1), "the group must map every demand to a demand"),
        # Alike demands must go to as many alike ones.
        ((THERE, BACK, THERE), 1, (2, 3, 0, 1), "the group must map every demand to a demand"),
    ],
)
def test_a_group_that_does_not_act_freely_on_the_demands_is_refused(asked, chunks, element, message) -> None:
    ring = load("ring:4")
    named = isinstance(asked, str)
    collective = Collective.on(ring, asked) if named else Collective.custom(ring, asked)
    with pytest.raises(ValueError, match=message):
        ChunkOrbits(ChunkProblem.of(ring, collective), chunks, ((0, 1, 2, 3), element))


def test_a_permutation_that_is_no_automorphism_is_refused() -> None:
    orbits = ChunkOrbits(problem_of("ring:4", "allgather"), 1, ((0, 1, 2, 3), (1, 0, 3, 2)))
    assert orbits.limits  # a reflection
    orbits = ChunkOrbits(problem_of("ring:4", "allgather"), 2, ((0, 1, 2, 3), (1, 0, 2, 3)))
    with pytest.raises(ValueError, match="the group must map every link to a link"):
        _ = orbits.limits
    with pytest.raises(ValueError, match="the group must map every route to a route"):
        list(orbits.unfold([OrbitSend(0, 0, 0, 0)]))
