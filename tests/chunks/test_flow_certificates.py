"""What certificates of flows prove, by networkx and the whole group, and those of messages, by trying all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import permutations, product
from math import nan
from typing import Any

import networkx as nx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arborcast.synth.chunks.bounds.step_certificate import FlowDual, MessageDual, PairDual
from arborcast.synth.chunks.bounds.step_check import certified_ratio
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.collective import Collective, Demand
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load
from tests.support.chunk_problems import least_ratio, problem_of, small_problems, sums_on
from tests.support.strategies import topologies


def drawn_links(draw: Any, problem: ChunkProblem, steps: int) -> tuple[tuple[Fraction, ...], ...]:
    """Lengths that use up each step in which there are any."""
    rows = [[draw(st.integers(0, 3)) for _ in problem.capacities] for _ in range(steps)]
    used = [sum(map(int.__mul__, row, problem.capacities)) or 1 for row in rows]
    return tuple(tuple(Fraction(each, of) for each in row) for row, of in zip(rows, used, strict=True))


def automorphisms(problem: ChunkProblem, members: set[int]) -> Iterator[tuple[int, ...]]:
    fabric = problem.topology
    for image in permutations(range(fabric.size)):
        hops = {(image[src], image[dst]): rate for (src, dst), rate in fabric.bandwidth.items()}
        keeps = all((image[vertex] < fabric.ranks) == (vertex < fabric.ranks) for vertex in image)
        if hops == dict(fabric.bandwidth) and keeps and {image[rank] for rank in members} == members:
            yield image


def shortest(problem: ChunkProblem, steps: int, own: dict[Any, Fraction], ends: tuple[int, int]) -> Fraction:
    graph = nx.DiGraph()
    for step, rank in product(range(steps), range(problem.ranks)):
        graph.add_edge((rank, step), (rank, step + 1), far=Fraction(0))
    for step, (number, route) in product(range(steps), enumerate(problem.routes)):
        hop = (route.src, step), (route.dst, step + 1)
        far = own.get((step, number), Fraction(0))
        graph.add_edge(*hop, far=min(far, graph.edges[hop]["far"]) if graph.has_edge(*hop) else far)
    length: Fraction = nx.dijkstra_path_length(graph, (ends[0], 0), (ends[1], steps), "far")
    return length


@settings(max_examples=60)
@given(st.booleans(), st.data())
def test_flows_prove_what_all_their_images_do(is_sum: bool, data: st.DataObject) -> None:
    """A flow stands for its images under what symmetries generate, with lengths averaged over it."""
    fabric = data.draw(
        st.one_of(
            st.sampled_from(["ring:4", "star:3", "full:3"]).map(load),
            topologies(max_ranks=3, switches=1, symmetric=False, max_bandwidth=2),
        )
    )
    ranks = sorted(data.draw(st.sets(st.integers(0, fabric.ranks - 1), min_size=2)))
    problem, steps = sums_on(fabric, ranks), data.draw(st.integers(1, 3))
    links = drawn_links(data.draw, problem, steps)
    symmetries = data.draw(st.lists(st.sampled_from(list(automorphisms(problem, set(ranks)))), max_size=2))
    group = {tuple(range(fabric.size))}
    while (more := group | {tuple(g[v] for v in h) for g in symmetries for h in group}) != group:
        group = more
    index = {(route.src, *route.via, route.dst): number for number, route in enumerate(problem.routes)}
    ends = [(at, target) for at, one in enumerate(ranks) for target in ranks if target != one]
    flows: list[tuple[tuple[tuple[int, int], ...], dict[tuple[int, int], int]]] = []
    for _ in range(data.draw(st.integers(1, 4))):
        pairs = data.draw(st.lists(st.sampled_from(ends), min_size=1, max_size=1 if is_sum else 3))
        taken = tuple({at: (at, target) for at, target in pairs}.values())
        places = st.tuples(st.integers(0, steps - 1), st.integers(0, len(problem.routes) - 1))
        flows.append((taken, data.draw(st.dictionaries(places, st.integers(1, 3), min_size=2, max_size=12))))
    many = [
        len({tuple(sorted((g[ranks[at]], g[target]) for at, target in taken)) for g in group})
        for taken, _ in flows
    ]
    worst = Fraction(0)
    for step, way in product(range(steps), index):
        images = [index[tuple(g[vertex] for vertex in way)] for g in group]
        total = sum(
            n * own.get((step, at), 0) for at in images for n, (_, own) in zip(many, flows, strict=True)
        )
        allowed = sum(links[step][link] for at in images for link in problem.routes[at].links)
        assume(allowed or not total)
        worst = max(worst, total / (allowed or 1))

    def scaled(by: Fraction) -> FlowDual:
        written = ((taken, tuple((*at, by * far) for at, far in own.items())) for taken, own in flows)
        return (PairDual if is_sum else FlowDual)(links, tuple(written), tuple(symmetries))

    fits = 1 / worst if worst else Fraction(1)
    try:
        ratio = sum(
            n * shortest(problem, steps, {at: fits * far for at, far in own.items()}, (ranks[one], other))
            for n, (taken, own) in zip(many, flows, strict=True)
            for one, other in taken
        )
    except nx.NetworkXNoPath:
        with pytest.raises(InputError, match=rf"cannot reach rank \d in {steps} steps"):
            certified_ratio(problem, steps, scaled(fits))
        return
    assert certified_ratio(problem, steps, scaled(fits)) == ratio
    if worst:
        with pytest.raises(InputError, match="lengths must add up to at most"):
            certified_ratio(problem, steps, scaled(fits * Fraction(98, 97)))


@settings(max_examples=40)
@given(small_problems(), st.data())
def test_no_flows_prove_more_than_the_best_packing(
    drawn: tuple[ChunkProblem, int], data: st.DataObject
) -> None:
    """Some blocks, each to one of its targets, whatever the lengths."""
    problem, steps = drawn
    links = drawn_links(data.draw, problem, steps)
    flows = []
    for _ in range(2):
        taken = [
            (at, data.draw(st.sampled_from(sorted(demand.targets))))
            for at, demand in enumerate(problem.demands)
            if data.draw(st.booleans())
        ]
        own = [
            (step, number, sum(links[step][link] for link in route.links) / 2)
            for step in range(steps)
            for number, route in enumerate(problem.routes)
            if data.draw(st.booleans())
        ]
        flows.append((tuple(taken), tuple(own)))
    assert certified_ratio(problem, steps, FlowDual(links, tuple(flows))) <= least_ratio(problem, steps)


def test_a_block_begins_at_the_nearest_of_its_sources() -> None:
    ring = load("ring:4")
    problem = ChunkProblem.of(ring, Collective.custom(ring, [Demand(frozenset({0, 2}), frozenset({1}))]))
    eighths = ((Fraction(1, 8),) * 8,)
    ways = [(route.src, route.dst) for route in problem.routes]
    own = tuple((0, ways.index(way), length) for way, length in (((0, 1), EIGHTH), ((2, 1), EIGHTH / 2)))
    assert certified_ratio(problem, 1, FlowDual(eighths, ((((0, 1),), own),))) == EIGHTH / 2


# Ranks 0 and 1 with the relay 2 between them, and the switch 3: 0-2-1 and 0-3-1, both ways.
DIAMOND = Topology.build(
    "diamond",
    3,
    [Link(*hop, Fraction(1)) for v in (0, 1) for w in (2, 3) for hop in ((v, w), (w, v))],
    ["hub"],
)
BETWEEN = sums_on(DIAMOND, (0, 1))
EIGHTH = Fraction(1, 8)
EIGHTHS = ((EIGHTH,) * 8,) * 2
WAYS = [(route.src, *route.via, route.dst) for route in BETWEEN.routes]
AHEAD = tuple(
    (step, WAYS.index(way), Fraction(len(way) - 1, 8))
    for step in (0, 1)
    for way in ((0, 3, 1), (0, 2), (2, 1))
)
WHOLE = PairDual(EIGHTHS, ((((0, 1),), AHEAD),), ((1, 0, 2, 3),))


def test_a_length_may_be_zero_and_come_in_parts() -> None:
    nothing = (0, WAYS.index((1, 2)), Fraction(0))
    halves = [(step, route, length / 2) for step, route, length in AHEAD]
    for lengths in ((*AHEAD, nothing), (*halves, *halves)):
        more = replace(WHOLE, flows=((((0, 1),), lengths),))
        assert certified_ratio(BETWEEN, 2, more) == certified_ratio(BETWEEN, 2, WHOLE)


def with_length(step: int, route: int, length: Fraction | float) -> dict[str, Any]:
    return {"flows": ((((0, 1),), ((step, route, length),)),)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"links": EIGHTHS[1:]}, "needs a length for each of 8 links in 2 steps"),
        ({"links": (EIGHTHS[0], EIGHTHS[1][1:])}, "needs a length for each of 8 links in 2 steps"),
        ({"links": (EIGHTHS[0], (*EIGHTHS[1][1:], -EIGHTH))}, "step 1, link 3->1: a length .* got -1/8"),
        ({"links": (EIGHTHS[0], (*EIGHTHS[1][1:], 0.125))}, "step 1, link 3->1: .* a fraction .* got 0.125"),
        (
            {"links": (EIGHTHS[0], (*EIGHTHS[1][1:], Fraction(1, 4)))},
            "step 1: capacities times lengths must add up to at most 1, got 9/8",
        ),
        ({"flows": WHOLE.flows * 2}, r"step 0, route \d: lengths must add up to at most"),
        ({"flows": ((((0, 0),), ()),)}, "flow 0: demand 0 is not for rank 0"),
        ({"flows": (*WHOLE.flows, (((0, 2),), ()))}, "flow 1: demand 0 is not for rank 2"),
        ({"flows": ((((2, 1),), ()),)}, "flow 0: demand 2 is not for rank 1"),
        ({"flows": ((((-1, 0),), ()),)}, "flow 0: demand -1 is not for rank 0"),
        ({"flows": ((((0, 1), (0, 1)), ()),)}, "flow 0: must name each demand once"),
        ({"flows": ((((0, 1), (1, 0)), ()),)}, "flow 0: a contribution flows alone, got 2"),
        (with_length(2, 0, Fraction(1, 99)), "flow 0: there is no length 1/99 of route 0 in step 2"),
        (with_length(-1, 0, Fraction(1, 99)), "flow 0: there is no length 1/99 of route 0 in step -1"),
        (with_length(0, 6, Fraction(1, 99)), "flow 0: there is no length 1/99 of route 6 in step 0"),
        (with_length(0, -1, Fraction(1, 99)), "flow 0: there is no length 1/99 of route -1 in step 0"),
        (with_length(1, 5, Fraction(-1)), "flow 0: there is no length -1 of route 5 in step 1"),
        (with_length(1, 5, nan), "flow 0: there is no length nan of route 5 in step 1"),
        (
            with_length(1, WAYS.index((0, 3, 1)), Fraction(3, 8)),
            rf"step 1, route {WAYS.index((0, 3, 1))}: lengths must add up to at most 1/2, got 3/4",
        ),
        ({"symmetries": ((0, 0, 2, 3),)}, "must be a permutation of the vertices"),
        ({"symmetries": ((0, 2, 1, 3),)}, "must map links to links of the same capacity"),
        ({"symmetries": ((0, 1, 3, 2),)}, "must map switches to switches"),
    ],
)
def test_flows_that_break_a_rule(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^certificate: .*{message}"):
        certified_ratio(BETWEEN, 2, replace(WHOLE, **changes))


def test_a_symmetry_keeps_what_is_asked() -> None:
    turned = PairDual(((EIGHTH,) * 8,) * 2, (), ((1, 2, 3, 0),))
    assert certified_ratio(sums_on("ring:4"), 2, turned) == 0
    for problem in (sums_on("ring:4", (0, 1)), problem_of("ring:4", "broadcast")):
        with pytest.raises(InputError, match="must map the demands to each other"):
            certified_ratio(problem, 2, turned)


def least_cost(problem: ChunkProblem, links: tuple[tuple[Fraction, ...], ...]) -> Fraction | None:
    """Of all sets of messages after which each rank that takes part has met all others."""
    members = [min(demand.sources) for demand in problem.demands]
    slots = list(product(links, problem.routes))
    found = None
    for sent in product((False, True), repeat=len(slots)):
        known = {rank: {rank} & set(members) for rank in range(problem.ranks)}
        for step in range(len(links)):
            before = {rank: set(met) for rank, met in known.items()}
            for at, route in enumerate(problem.routes, step * len(problem.routes)):
                if sent[at]:
                    known[route.dst] |= before[route.src]
        if all(known[rank] >= set(members) for rank in members):
            chosen = (
                row[link]
                for (row, route), is_sent in zip(slots, sent, strict=True)
                if is_sent
                for link in route.links
            )
            cost = sum(chosen, Fraction(0))
            found = cost if found is None else min(cost, found)
    return found


@settings(max_examples=60)
@given(topologies(max_ranks=3, switches=1, symmetric=False, max_bandwidth=2), st.data())
def test_no_messages_are_cheaper(fabric: Topology, data: st.DataObject) -> None:
    ranks = sorted(data.draw(st.sets(st.integers(0, fabric.ranks - 1), min_size=2)))
    problem, steps = sums_on(fabric, ranks), data.draw(st.integers(1, 3))
    assume(len(problem.routes) * steps <= 10)
    links = drawn_links(data.draw, problem, steps)
    least = least_cost(problem, links)
    said = Fraction(2) if least is None else least
    assert certified_ratio(problem, steps, MessageDual(links, said)) == said
    if least is not None:
        more = least + Fraction(1, 10**6)
        with pytest.raises(InputError, match=f"at a cost of {least} or less, it says {more}"):
            certified_ratio(problem, steps, MessageDual(links, more))


LINE = sums_on(
    Topology.build("line", 3, [Link(*hop, Fraction(1)) for hop in ((0, 1), (1, 0), (1, 2), (2, 1))])
)
OUTWARD = tuple(Fraction(int(link.dst == 1), 2) for link in LINE.topology.links)


def test_less_than_the_only_message_costs_is_proved_too() -> None:
    pair = sums_on("full:2")
    lengths = ((Fraction(2, 3), Fraction(0)),)
    for cost in (Fraction(1, 3), Fraction(2, 3)):
        assert certified_ratio(pair, 1, MessageDual(lengths, cost)) == cost


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((OUTWARD,), "needs a length for each of 4 links in 2 steps"),
        ((OUTWARD, OUTWARD[1:]), "needs a length for each of 4 links in 2 steps"),
        ((OUTWARD, (Fraction(-1), *OUTWARD[1:])), "step 1, link 0->1: a length must be .*, got -1"),
        ((OUTWARD, (Fraction(1),) * 4), "step 1: capacities times lengths must add up to at most 1, got 4"),
    ],
)
def test_messages_that_break_a_rule(lengths: tuple[tuple[Fraction, ...], ...], message: str) -> None:
    with pytest.raises(InputError, match=f"^certificate: {message}"):
        certified_ratio(LINE, 2, MessageDual(lengths, Fraction(1)))


@pytest.mark.parametrize("kind", ["gather", "broadcast", "alltoall"])
def test_messages_that_are_copied_are_not_limited_by_contributions(kind: str) -> None:
    """A gather need not bring anything to any rank but the root."""
    problem = problem_of("star:3", kind)
    lengths = (tuple(Fraction(link.dst == 1) for link in problem.topology.links),)
    with pytest.raises(InputError, match="messages limit what all ranks add up"):
        certified_ratio(problem, 1, MessageDual(lengths, Fraction(1)))
