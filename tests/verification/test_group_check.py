"""Translations of implicit schedules, judged by listing every element of the group that they generate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, permutations
from typing import Any, cast

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.collective import Collective
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Link, Switch, Topology
from arborcast.synth.verification.group_check import CheckedGroup, check_group, identity_alone
from arborcast.synth.verification.replay import Errors
from tests.support.drawn_implicit import circulant
from tests.verification.test_implicit_verifier import forged_group

Images = tuple[int, ...]


@dataclass(frozen=True)
class Said:
    """The part of an implicit schedule that speaks of them."""

    topology: Topology
    collective: Collective
    translations: Translations


def checked(said: Said) -> tuple[CheckedGroup | None, list[str]]:
    errors = Errors(100)
    return check_group(cast(Any, said), errors), [*errors.all()]


def elements(generators: tuple[Images, ...], size: int) -> set[Images]:
    """Every product of permutations."""
    found, new = set(), {tuple(range(size))}
    while new:
        found |= new
        new = {tuple(by[image] for image in one) for one in new for by in generators} - found
    return found


def order_of(images: Images) -> int:
    return len(elements((images,), len(images)))


def keeps(topology: Topology, images: Images) -> bool:
    """Whether a permutation is an automorphism; links and vertices are compared with all that they have."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    for vertex in range(topology.size):
        graph.add_node(vertex, what=(topology.is_switch(vertex), topology.abilities(vertex)))
    for link in topology.links:
        graph.add_edge(link.src, link.dst, what=(link.bandwidth, link.latency_us))
    moved = nx.relabel_nodes(graph, dict(enumerate(images)))
    return dict(moved.nodes.data()) == dict(graph.nodes.data()) and {
        (a, b): data for a, b, data in moved.edges.data()
    } == {(a, b): data for a, b, data in graph.edges.data()}


def acts_freely(declared: Translations, ranks: int) -> bool:
    """Of permutations that commute: a product for each choice of powers, of which one keeps a rank alone."""
    group = elements(declared.generators, declared.size)
    kept = [one for one in group if any(one[rank] == rank for rank in range(ranks))]
    return len(group) == math.prod(declared.orders) and len(kept) == 1


def is_right(said: Said) -> bool:
    """By the definition: `check_group`."""
    topology, declared = said.topology, said.translations
    if (declared.ranks, declared.size) != (topology.ranks, topology.size):
        return False
    if any(sorted(images) != list(range(topology.size)) for images in declared.generators):
        return False
    members = set(said.collective.ranks)
    return (
        tuple(map(order_of, declared.generators)) == declared.orders
        and all(order >= 2 for order in declared.orders)
        and all(keeps(topology, images) for images in declared.generators)
        and all(
            tuple(a[b[v]] for v in range(topology.size)) == tuple(b[a[v]] for v in range(topology.size))
            for a, b in permutations(declared.generators, 2)
        )
        and all({images[rank] for rank in members} == members for images in declared.generators)
        and acts_freely(declared, topology.ranks)
    )


@st.composite
def sayings(draw: Any) -> Said:
    """A grid that wraps around, perhaps with a hub, its shifts, and whatever may be wrong with either."""
    wide, high = draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (6, 1), (2, 2), (3, 2), (4, 2), (3, 3)]))
    ranks = wide * high
    hubs = draw(st.integers(0, 2))
    right = tuple(y * wide + (x + 1) % wide for y in range(high) for x in range(wide))
    up = tuple((y + 1) % high * wide + x for y in range(high) for x in range(wide))
    hops = {(v, images[v]) for images in (right, up) for v in range(ranks) if images[v] != v}
    rates = {hop: Fraction(2) for hop in hops}
    swap = draw(st.booleans()) and hubs == 2
    for hub in range(ranks, ranks + hubs):
        for rank in range(ranks):
            if not swap or (rank % wide) % 2 == hub - ranks:
                rates[rank, hub] = rates[hub, rank] = Fraction(1)
    late = dict.fromkeys(rates, Fraction(1))
    if draw(st.integers(0, 3)) == 0:  # a link unlike the others
        odd = draw(st.sampled_from(sorted(rates)))
        draw(st.sampled_from([rates, late]))[odd] = Fraction(3)
    if draw(st.integers(0, 5)) == 0:
        del rates[draw(st.sampled_from(sorted(rates)))]
    able = draw(st.sampled_from([0, 0, 0, 1, 2]))
    switches = [Switch(f"hub{hub}", multicasts=hub < able) for hub in range(hubs)]
    links = [Link(src, dst, rate, late[src, dst]) for (src, dst), rate in rates.items()]
    topology = Topology.build("grid", ranks, links, switches)
    end = tuple(range(ranks, ranks + hubs))
    turned = end[::-1] if swap and wide % 2 == 0 else end
    made = [images for images in (right + turned, up + end) if images[:ranks] != tuple(range(ranks))]
    generators = draw(st.permutations(made))[: draw(st.integers(0, len(made)))]
    kind = draw(st.integers(0, 8))
    if kind == 0 and generators:
        generators[0] = tuple(draw(st.permutations(range(topology.size))))
    if kind == 1 and generators:
        generators.append(generators[0])
    if kind == 2 and generators:
        generators[0] = tuple(generators[0][generators[0][v]] for v in range(topology.size))
    orders = [order_of(images) for images in generators]
    if kind == 3 and orders:
        orders[-1] = draw(st.sampled_from([1, orders[-1] + 1, 2 * orders[-1], 4 * orders[-1], topology.size]))
    if kind == 4 and generators:
        broken = list(generators[0])
        broken[draw(st.integers(0, topology.size - 1))] = draw(st.integers(0, topology.size - 1))
        generators[0] = tuple(broken)
    few = sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=2))) if kind == 5 else range(ranks)
    wrong = (draw(st.integers(0, 1)), draw(st.integers(0, 1))) if kind == 6 else (0, 0)
    declared = forged_group(*generators, orders=orders, ranks=ranks + wrong[0], size=topology.size + wrong[1])
    return Said(topology, Collective.on(topology, "allgather", ranks=tuple(few)), declared)


@given(sayings())
@settings(max_examples=400)
def test_as_by_listing_every_element(said: Said) -> None:
    found, lines = checked(said)
    assert (found is not None) == is_right(said) == (not lines)
    if found is None:
        return
    topology, generators = said.topology, said.translations.generators
    group = elements(generators, topology.size)
    assert found.order == len(group)
    assert found.orders.tolist() == [*said.translations.orders]
    assert found.generators.tolist() == [*map(list, generators)]
    assert found.vertex_orbit.tolist() == [min(one[v] for one in group) for v in range(topology.size)]
    ends = [(link.src, link.dst) for link in topology.links]
    images = [[ends.index((one[a], one[b])) for a, b in ends] for one in generators]
    assert found.link_images.tolist() == images
    orbit = [min(ends.index((one[a], one[b])) for one in group) for a, b in ends]
    assert found.link_orbit.tolist() == orbit


RING = circulant(6, {1: 1})


def shifted(ranks: int, by: int) -> Images:
    return tuple((v + by) % ranks for v in range(ranks))


def test_each_wrong_order_is_told_once() -> None:
    """Others of what `test_implicit_verifier` names."""
    wrong = forged_group(shifted(6, 2), range(6), shifted(6, 1), orders=[2, 4, 12], ranks=6, size=6)
    found, told = checked(Said(RING, Collective.on(RING, "allgather"), wrong))
    assert found is None and told == [
        "translation 0: order 2 declared, but applied so often it does not lead back",
        "translation 1: order 4 declared, but applied 1 times it leads back already",
        "translation 2: order must be in 2..6, the vertices there are, got 12",
    ]


def test_one_fabric_for_another() -> None:
    everyone = Collective.on(RING, "allgather")
    found, told = checked(Said(RING, everyone, forged_group(shifted(6, 1), orders=[6], ranks=5, size=6)))
    assert found is None
    assert told == ["translations: are of 5 ranks and 6 vertices, circle of 6 has 6 and 6"]


def test_without_links_there_is_nothing_to_map() -> None:
    alone = Topology.build("apart", 2, [])
    said = Said(alone, Collective.on(alone, "allgather"), forged_group([1, 0], orders=[2], ranks=2, size=2))
    found, told = checked(said)
    assert not told and found is not None and found.link_images.shape == (1, 0)


def test_the_first_rank_with_few_images_is_named() -> None:
    """A rank in its place, two and four that go around."""
    apart = Topology.build("apart", 7, [])
    images = forged_group([0, 2, 1, 4, 5, 6, 3], orders=[4], ranks=7, size=7)
    found, told = checked(Said(apart, Collective.on(apart, "allgather"), images))
    few = "translations: only the identity may keep a rank in its place, rank 0 has 1 images under 4 elements"
    assert found is None and told == [few]


def test_the_identity_alone_keeps_everything_in_its_place() -> None:
    group = identity_alone(circulant(5, {1: 1}))
    assert group.order == 1 and group.generators.shape == (0, 5) and group.link_images.shape == (0, 10)
    assert group.orders.size == 0 and all(a < b for a, b in pairwise(group.vertex_orbit.tolist()))
    assert group.vertex_orbit.tolist() == [*range(5)] and group.link_orbit.tolist() == [*range(10)]
