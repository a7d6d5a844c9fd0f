"""Labels of trees limited in height or number: true of fabrics with any decimals, the same in any unit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.lp.branch_and_bound import is_ruled_out
from arborcast.synth.lp.sparsify import few_as_asked
from arborcast.synth.lp.tree_program import TreeProgram
from arborcast.synth.packing.fewest import fewest
from arborcast.synth.packing.symmetric.symmetric_solver import solve_symmetric
from arborcast.synth.packing.tree_solver import shallow_schedules, solve_by_trees
from arborcast.synth.schedule import Schedule
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Link, Topology
from arborcast.synth.tree import Tree, TreeEdge
from tests.fuzzing.all_trees import best_of, best_of_height, best_together
from tests.packing.test_fewest import spanning_trees
from tests.packing.test_symmetric_solver import circulants, declared
from tests.support.carriers import carrier, choice_of, hops
from tests.support.strategies import collectives
from tests.support.strategies import topologies as graphs

LABELS = ("within_height", "proved", "few", "best_trees")
PROVED = {"the limit of any height", "best"}


@st.composite
def fabrics(draw: Callable, max_ranks: int = 4, switches: int = 1) -> Topology:
    """Connected, some links both ways alike, bandwidths with 0 to 9 decimals."""
    drawn = draw(graphs(max_ranks=max_ranks, switches=switches, symmetric=draw(st.booleans()), min_ranks=2))
    decimals = draw(st.sampled_from([0, 3, 6, 9]))
    rates = {
        pair: Fraction(draw(st.integers(10**decimals // 2 + 1, 20 * 10**decimals)), 10**decimals)
        for pair in {(min(hop), max(hop)) for hop in drawn.bandwidth}
    }
    return with_rates(drawn, lambda link: rates[min(link.src, link.dst), max(link.src, link.dst)])


def with_rates(topology: Topology, rate: Callable[[Link], Fraction]) -> Topology:
    links = [replace(link, bandwidth=rate(link)) for link in topology.links]
    return Topology.build(topology.name, topology.ranks, links, topology.switches, topology.symmetries)


def times(topology: Topology, factor: Fraction) -> Topology:
    return with_rates(topology, lambda link: link.bandwidth * factor)


def meshed(seed: int, decimals: int, ranks: int = 6) -> Topology:
    """A ring with chords, each both ways, of bandwidths with so many decimals."""
    dice = random.Random(seed)
    links = []
    for u, v in combinations(range(ranks), 2):
        if v == u + 1 or (u, v) == (0, ranks - 1) or dice.random() < 0.6:
            rate = Fraction(dice.randint(1, 20 * 10**decimals), 10**decimals)
            links += [Link(u, v, rate), Link(v, u, rate)]
    return Topology.build("meshed", ranks, links)


def said(schedule: Schedule) -> tuple[object, ...]:
    """All that must not depend on the unit of bandwidth."""
    facts = dict(schedule.method.settings)
    shares = tuple(chunk.share for chunk in schedule.chunks)
    return tuple(facts.get(label) for label in LABELS), shares, schedule.is_optimal, schedule.height


@pytest.mark.parametrize("decimals", [6, 9])
def test_meshes_with_many_decimals(decimals: int) -> None:
    """Prices times capacities outgrow 64 bits here, and raw capacities the tolerances of HiGHS."""
    for seed in range(2):
        topology = meshed(seed, decimals)
        found = solve_by_trees(topology, Collective.on(topology, "allreduce"), SolveOptions(max_height=2))
        assert dict(found.method.settings)["within_height"] in PROVED
        # Five ranks are few enough for a program over all of their trees.
        few = topology.subset(range(5))
        if few.is_symmetric:
            broadcast = Collective.on(few, "broadcast")
            best = best_of_height(few, (0,), 2)
            try:
                assert solve_by_trees(few, broadcast, SolveOptions(max_height=2)).rate == best
            except InfeasibleError:
                assert best == 0


def test_no_link_rounded_down_is_faster_than_the_best() -> None:
    for seed in range(2):
        fine = meshed(seed, 6)
        coarse = with_rates(fine, lambda link: Fraction(int(link.bandwidth * 100) or 1, 100))
        rates = [
            solve_by_trees(one, Collective.on(one, "allreduce"), SolveOptions(max_height=2)).rate
            for one in (fine, coarse)
        ]
        assert rates[0] >= rates[1] or min(fine.bandwidth.values()) < Fraction(1, 100)


@given(fabrics(switches=0), st.integers(1, 9), st.data())
@settings(max_examples=10)
def test_another_unit_changes_nothing(topology: Topology, power: int, data: st.DataObject) -> None:
    collective = data.draw(collectives(topology, [Kind.BROADCAST, Kind.ALLGATHER, Kind.ALLREDUCE]))
    wish = data.draw(
        st.sampled_from([{"max_height": topology.ranks - 1}, {"max_trees": 2}, {"tolerance": Fraction(0)}])
    )
    here, there = (
        solve_by_trees(one, collective, SolveOptions(**wish))
        for one in (topology, times(topology, Fraction(10**power)))
    )
    assert said(here) == said(there)


@pytest.mark.parametrize("kind", ["broadcast", pytest.param("allreduce", marks=pytest.mark.long)])
def test_a_link_of_many_decimals_that_no_tree_needs_changes_nothing(kind: str) -> None:
    """It makes the common unit of all bandwidths a billion times smaller."""
    links = meshed(0, 0, ranks=5).links
    rough, fine = (
        Topology.build(
            "meshed", 5, [*links, Link(0, 5, Fraction(rate)), Link(5, 0, Fraction(rate))], ["dead end"]
        )
        for rate in ("30", "30.000000001")
    )
    for height in (2, 4):
        here, there = (
            solve_by_trees(one, Collective.on(one, kind), SolveOptions(max_height=height))
            for one in (rough, fine)
        )
        assert said(here) == said(there)


def test_low_trees_to_choose_from_are_labelled_alike() -> None:
    topology = meshed(1, 6)
    collective = Collective.on(topology, "allreduce")
    found = list(shallow_schedules(topology, collective, below=5))
    again = list(shallow_schedules(times(topology, Fraction(10**9)), collective, below=5))
    assert [said(one) for one in found] == [said(one) for one in again]
    assert found and all(dict(one.method.settings)["within_height"] in PROVED for one in found)


@given(graphs(max_ranks=4, min_ranks=3, switches=0, symmetric=False), st.integers(1, 3), st.data())
@settings(max_examples=25)
def test_what_is_called_fewest_or_best_of_few_is(topology: Topology, most: int, data: st.DataObject) -> None:
    scale = data.draw(st.sampled_from([1, 10**6, 10**9, 10**12]))
    topology = with_rates(
        topology, lambda link: link.bandwidth + Fraction(data.draw(st.integers(0, 99)), scale)
    )
    every = list(spanning_trees(topology, 0))[:12]
    uses = [hops(tree) for tree in every]

    def reach(count: int) -> Fraction:
        return max(best_together(topology, some) for some in combinations(uses, min(count, len(uses))))

    whole = best_together(topology, uses)
    choice, known = choice_of(topology, [every], whole), range(len(every))
    few, facts = few_as_asked(choice, known, SolveOptions(max_trees=most), Deadline.after(None))
    rate = sum(few.values()) * whole
    if dict(facts)["proved"] in {"best among the candidates", "optimal"}:
        assert rate == reach(most)
    assert rate == whole or dict(facts)["proved"] != "optimal"
    tolerance = data.draw(st.sampled_from([Fraction(0), Fraction(1, 5)]))
    kept, facts = few_as_asked(choice, known, SolveOptions(tolerance=tolerance), Deadline.after(None))
    assert sum(kept.values()) >= 1 - tolerance
    if dict(facts)["proved"] in {"fewest among the candidates", "no fewer trees are possible"}:
        assert len(kept) == 1 or reach(len(kept) - 1) < whole * (1 - tolerance)
    for strictly in (True, False):
        rate = reach(most) / whole
        assert not is_ruled_out(
            choice.rows,
            choice.trees,
            most,
            rate * Fraction(9, 10),
            strictly=strictly,
            deadline=Deadline.after(None),
        )
    assert is_ruled_out(
        choice.rows, choice.trees, most, rate * Fraction(11, 10), strictly=True, deadline=Deadline.after(None)
    )


@given(graphs(max_ranks=4, switches=0, symmetric=False), st.integers(0, 12))
@settings(max_examples=25)
def test_prices_limit_and_weights_reach_the_best_rate(topology: Topology, decimals: int) -> None:
    """The vertex and its prices, which share no code with the simplex of the test, prove each other best.

    Where rates differ by less than HiGHS's tolerance its vertex may overfill a row by that much.
    """
    topology = with_rates(
        topology, lambda link: link.bandwidth + Fraction(7 * link.src + link.dst, 10**decimals)
    )
    groups = [list(spanning_trees(topology, root))[:10] for root in range(2)]
    best = best_of(
        topology, {(root, False): [hops(tree) for tree in group] for root, group in enumerate(groups)}
    )
    choice = choice_of(topology, groups, best * Fraction(3, 2))
    assert choice.rate == Fraction(2, 3)
    program = TreeProgram(choice.rows, choice.trees)
    program.solve()
    vertex = program.vertex()
    assert vertex is not None
    limit = program.limit(vertex.prices)
    assert limit is not None
    assert 0 <= limit - Fraction(2, 3) <= (Fraction(1, 10**6) if decimals > 6 else 0)


def test_no_known_tree_reaches_the_rate_and_few_are_found_all_the_same() -> None:
    """One wide tree is known, two others reach the optimum together."""
    rate = Fraction("1.000000001")
    topology = Topology.build(
        "three", 3, [Link(0, 1, rate), Link(0, 2, Fraction(1)), Link(1, 2, rate), Link(2, 1, rate)]
    )
    star, *paths = (
        carrier(topology, Tree(0, Fraction(1), (TreeEdge(0, first), TreeEdge(parent, second))))
        for first, parent, second in ((1, 0, 2), (1, 1, 2), (2, 2, 1))
    )
    found = fewest(topology, [0], 1 + rate, [star, *paths], SolveOptions(tolerance=Fraction(0)))
    assert sum(tree.weight for tree in found.trees) == 1 + rate
    assert dict(found.settings)["proved"] == "fewest among the candidates"
    late = fewest(topology, [0], 1 + rate, [star], SolveOptions(tolerance=Fraction(0)), Deadline.after(1e-9))
    assert late.trees


@given(circulants(), st.integers(1, 9), st.sampled_from(["allgather", "allreduce"]))
@settings(max_examples=6, deadline=None)
@pytest.mark.few(2)
def test_orbits_in_another_unit(topology: Topology, power: int, kind: str) -> None:
    collective = Collective.on(topology, kind)
    for wish in ({}, {"max_trees": 1}, {"max_height": topology.ranks}):
        here, there = (
            solve_symmetric(one, collective, SolveOptions(**wish), translations=declared(one))
            for one in (topology, times(topology, Fraction(10**power)))
        )
        assert said(here.expand()) == said(there.expand())


@given(circulants(), st.data())
@settings(max_examples=15, deadline=None)
def test_best_trees_of_orbits_are_the_best_of_all_trees(topology: Topology, data: st.DataObject) -> None:
    assume(topology.ranks <= 4)
    height = data.draw(st.none() | st.integers(1, topology.ranks))
    collective = Collective.on(topology, "allgather")
    best = best_of_height(topology, collective.ranks, height or topology.ranks)
    try:
        found = solve_symmetric(
            topology, collective, SolveOptions(max_height=height), translations=declared(topology)
        )
    except InfeasibleError:
        assert best == 0
        return
    assert found.rate <= best
    if found.is_optimal or dict(found.method.settings).get("best_trees") == "proved":
        assert found.rate == best
