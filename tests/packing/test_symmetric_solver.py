"""Trees by orbits: the exact rate, correct schedules, and what the knobs promise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth, topologies
from arborcast.synth.collective import Collective
from arborcast.synth.errors import CollectiveError, InfeasibleError, InputError
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.packing.symmetric import solve_symmetric
from arborcast.synth.packing.symmetric.height_frontier import symmetric_frontier
from arborcast.synth.packing.symmetric.orbit_problem import Problem
from arborcast.synth.packing.symmetric.orbit_weights import MOST_PARTS, Chosen, filled, in_fewer_parts
from arborcast.synth.packing.symmetric.symmetric_solver import generated, question_of, simplest
from arborcast.synth.packing.tree_solver import solve_by_trees
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Link, Topology

KINDS = ("allgather", "reduce-scatter", "allreduce")
SMALL = (
    "torus:2x3", "torus:4x4", "ring:5", "hypercube:3", "full:6", "star:5", "dgx1", "dgx1-p100", "dgx-a100",
    "dgx-a100:boxes=2", "dgx-a100:boxes=2,rails=1", "fat-tree:2x2x2",
    "fat-tree:2x3x2,oversubscription=3",
    "dragonfly:4x2x2", "dragonfly:3x2x1,local=2",
)  # fmt: skip


def declared(topology: Topology) -> Translations:
    return Translations.generated(topology, topology.symmetries)


@st.composite
def circulants(draw: Callable, symmetric: bool = False) -> Topology:
    """Cayley graphs of a cyclic group, some with a switch, or with one per orbit of a subgroup."""
    order = draw(st.integers(2, 7))
    kinds = draw(st.integers(1, 2))  # orbits of ranks
    ranks = order * kinds
    rate = st.integers(1, 4)
    links: list[Link] = []
    vertices: list[list[int]] = [[kind * order + i for i in range(order)] for kind in range(kinds)]
    has_switches = draw(st.sampled_from(["none", "one", "orbit"]))
    if has_switches == "one":
        vertices.append([ranks] * order)
    elif has_switches == "orbit":
        vertices.append([ranks + i for i in range(order)])
    cycle = [(kind, kind, 1) for kind in range(kinds)] + [(kind, kind + 1, 0) for kind in range(kinds - 1)]
    back = [(kind + 1, kind, 0) for kind in range(kinds - 1)]
    more = draw(
        st.lists(
            st.tuples(
                st.integers(0, len(vertices) - 1),
                st.integers(0, len(vertices) - 1),
                st.integers(0, order - 1),
            ),
            max_size=4,
        )
    )
    for src, dst, shift in [*cycle, *back, *more]:
        speed = draw(rate)
        seen = set()
        for i in range(order):
            pair = (vertices[src][i], vertices[dst][(i + shift) % order])
            if pair[0] == pair[1] or pair in seen:
                continue
            seen.add(pair)
            links.append(Link(*pair, Fraction(speed)))
            if symmetric:
                links.append(Link(pair[1], pair[0], Fraction(speed)))
    size = max(max(row) for row in vertices) + 1
    images = list(range(size))
    for row in vertices:
        for i in range(order):
            images[row[i]] = row[(i + 1) % order]
    switches = [f"switch{i}" for i in range(size - ranks)]
    return Topology.build("circulant", ranks, links, switches, [images])


def solved(topology: Topology, kind: str, **wishes: Any) -> ImplicitSchedule:
    """By the declared translations; written out it is correct and as fast as it says."""
    found = solve_symmetric(
        topology, Collective.on(topology, kind), SolveOptions(**wishes), translations=declared(topology)
    )
    verdict = synth.verify(found.expand())
    assert verdict.correct, verdict.errors
    assert verdict.rate == found.rate
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [*SMALL, pytest.param("mi250", marks=pytest.mark.long)])
def test_catalog_exactly_at_the_bound(spec: str, kind: str) -> None:
    assert solved(topologies.load(spec), kind).is_optimal


@given(topology=circulants(), kind=st.sampled_from(KINDS))
@settings(max_examples=30, deadline=None)
def test_drawn_circulants(topology: Topology, kind: str) -> None:
    """The best of trees, whatever the switches: what the explicit packer reaches at least."""
    found = solved(topology, kind)
    collective = Collective.on(topology, kind)
    assert solve_by_trees(topology, collective).rate <= found.rate <= synth.bound(topology, collective).rate


@given(topology=circulants(symmetric=True), kind=st.sampled_from(KINDS))
@settings(max_examples=15, deadline=None)
def test_drawn_circulants_both_ways(topology: Topology, kind: str) -> None:
    assert solved(topology, kind).is_optimal


def test_without_symmetry_it_is_plain_column_generation() -> None:
    mesh = replace(topologies.load("mesh:2x3"), symmetries=())
    assert solved(mesh, "allgather").is_optimal


@pytest.mark.parametrize(
    ("spec", "height", "trees"),
    [
        ("torus:4x4", 4, 4),
        ("torus:6x6", 6, 4),
        ("torus:4x4x4", 6, 6),
        ("hypercube:5", 5, 5),
        # Through the fabric into each other box, then within: 16 boxes, one tree per rank.
        ("dgx-a100:boxes=16", 2, 1),
    ],
)
def test_as_low_as_can_be(spec: str, height: int, trees: int) -> None:
    """On tori the height is the diameter, in few equal parts."""
    topology = topologies.load(spec)
    for kind in KINDS if "boxes" in spec else KINDS[:1]:
        found = solve_symmetric(topology, Collective.on(topology, kind), translations=declared(topology))
        assert found.is_optimal
        assert found.height == height
        assert len(found.chunks) <= trees
        assert dict(found.method.settings)["parts"] <= trees


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("spec", ["dgx1-p100", "hypercube:3", "torus:2x3"])
def test_few_trees(spec: str, most: int) -> None:
    """No more trees than asked for, more with more of them, and near what the explicit choice has."""
    topology = topologies.load(spec)
    found = solved(topology, "allgather", max_trees=most)
    owners = [chunk.owner for chunk in found.chunks]
    assert max(owners.count(owner) for owner in owners) <= most
    explicit = solve_by_trees(topology, Collective.on(topology, "allgather"), SolveOptions(max_trees=most))
    assert found.rate >= explicit.rate * Fraction(4, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_tolerance(kind: str) -> None:
    """Fewer trees, and no more lost than that."""
    topology = topologies.load("dgx1")
    full, some = (solved(topology, kind, tolerance=loss) for loss in (None, Fraction(1, 4)))
    assert some.rate >= full.rate * Fraction(3, 4)
    assert len(some.chunks) < len(full.chunks)


@pytest.mark.parametrize("height", [2, 3])
def test_max_height(height: int) -> None:
    """Against the explicit search, which weighs all trees of a height on 8 ranks."""
    topology = topologies.load("dgx1")
    found = solved(topology, "allgather", max_height=height)
    best = solve_by_trees(topology, Collective.on(topology, "allgather"), SolveOptions(max_height=height))
    assert found.height <= height
    assert found.rate == best.rate
    if not found.is_optimal:
        assert dict(found.method.settings)["loss"] == str(1 - found.rate / found.bound.rate)


@pytest.mark.parametrize(
    "spec", ["dgx1", pytest.param("torus:4x4", marks=pytest.mark.long), "dgx-a100:boxes=2,rails=1"]
)
@pytest.mark.parametrize("kind", ["allgather", "allreduce"])
def test_frontier(spec: str, kind: str) -> None:
    """Correct, none beaten by another, and the last has the best rate."""
    topology = topologies.load(spec)
    found = symmetric_frontier(topology, Collective.on(topology, kind), translations=declared(topology))
    assert max(schedule.rate for schedule in found) == found[0].bound.rate
    for schedule in found:
        assert synth.verify(schedule.expand()).correct
        assert not any(
            other.height <= schedule.height
            and len(other.chunks) <= len(schedule.chunks)
            and other.rate >= schedule.rate
            for other in found
            if other is not schedule
        )


def test_relays_forward() -> None:
    """Every second rank of a ring of 6 takes part: 3 ranks, and a way of two links to each neighbour."""
    ring = topologies.load("ring:6").reordered([0, 2, 4])
    rotation = tuple((rank + 1) % 3 for rank in range(3)) + tuple(3 + (rank + 1) % 3 for rank in range(3))
    translations = Translations(6, (rotation,), (3,), 6)
    collective = Collective.on(ring, "allgather", ranks=[0, 1, 2])
    schedule = solve_symmetric(ring, collective, translations=translations)
    assert schedule.rate == 3
    assert synth.verify(schedule.expand()).correct


@pytest.mark.parametrize(
    ("kind", "wishes", "error", "message"),
    [
        ("broadcast", {}, CollectiveError, "broadcast: symmetric trees serve allgather"),
        ("allgather", {"max_trees": 0}, InputError, "max-trees: must be at least 1, got 0"),
        (
            "allgather",
            {"tolerance": Fraction(1)},
            InputError,
            "tolerance: must be at least 0 and below 1, got 1",
        ),
        ("allgather", {"max_height": 1}, InfeasibleError, "max-height 1: some rank is 2 edges away"),
    ],
)
def test_what_cannot_be_asked(
    kind: str, wishes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        solved(topologies.load("ring:4"), kind, **wishes)


def test_ranks_apart() -> None:
    with pytest.raises(InfeasibleError):
        solved(Topology.build("apart", 2, [], symmetries=[[1, 0]]), "allgather")


def test_shares_add_up() -> None:
    topology = topologies.load("dgx1")
    schedule = solved(topology, "allgather")
    order = schedule.translations.order
    for first in schedule.translations.representatives:
        assert sum(c.share for c in schedule.chunks if c.owner == first) == Fraction(1, topology.ranks)
    assert np.isclose(float(sum(c.share for c in schedule.chunks)) * order, 1)
    parts = dict(schedule.method.settings)["parts"]
    assert math.lcm(*((c.share * topology.ranks).denominator for c in schedule.chunks)) == parts


@cache
def chosen_for(spec: str) -> tuple[Problem, Chosen]:
    """What its shares are rounded of."""
    fabric = topologies.load(spec)
    question = question_of(fabric, Collective.on(fabric, "allgather"), SolveOptions(), declared(fabric))
    return question.problem, simplest(generated(question, None)[0])


@pytest.mark.few(8)
@given(
    st.lists(st.integers(1, 10**9), min_size=12, max_size=12),
    st.sampled_from(["torus:3x4", "dragonfly:4x2x2"]),
)
def test_shares_are_rounded_within_the_loss_that_is_allowed(noise: list[int], spec: str) -> None:
    problem, chosen = chosen_for(spec)
    crooked = [
        weight + Fraction(1, 10**7 + more) for weight, more in zip(chosen.weights, noise, strict=False)
    ]
    exact = filled(problem, chosen.columns[: len(crooked)], crooked)
    least = exact.rate * (1 - Fraction(1, 10**5))
    rounded = in_fewer_parts(problem, exact, least)
    assert rounded.parts <= max(MOST_PARTS, 1)
    assert least <= rounded.rate <= 1
    assert max(problem.rows.fullest(rounded.columns, rounded.weights), 1) == 1
    if exact.parts > MOST_PARTS:
        assert in_fewer_parts(problem, exact, Fraction(2)) is exact
