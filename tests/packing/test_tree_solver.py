"""The tree methods end to end: the values that must be reached, and correctness on any graph.

Relays are seen as switches: the same links, and for balanced relays the same bound.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies as catalog
from arborcast.synth.bounds import bound
from arborcast.synth.collective import TREE_KINDS, Collective, Kind
from arborcast.synth.errors import CollectiveError, InfeasibleError, InputError, TimedOutError
from arborcast.synth.packing import exact, tree_solver
from arborcast.synth.packing.exact import pack_exactly
from arborcast.synth.packing.relays import relays_as_switches
from arborcast.synth.packing.tree_solver import solve_by_trees, solve_by_weights
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Link, Topology
from arborcast.synth.verification.verifier import verify
from tests.fuzzing.replay import objections
from tests.support.strategies import collectives
from tests.support.strategies import topologies as graphs


def solved(topology, kind, method="trees", **wishes):
    solve = {"trees": solve_by_trees, "mwu": solve_by_weights}[method]
    return solve(topology, Collective.on(topology, kind), SolveOptions(**wishes))


@given(st.booleans().flatmap(lambda symmetric: graphs(max_ranks=6, symmetric=symmetric)), st.data())
@settings(max_examples=60)
def test_exact_trees_reach_the_bound_on_any_graph(topology, data):
    collective = data.draw(collectives(topology, list(TREE_KINDS)))
    schedule = solve_by_trees(topology, collective)
    verdict = verify(schedule)
    assert verdict.errors == ()
    assert verdict.rate == schedule.rate == schedule.bound.rate
    assert objections(schedule) == []


@given(st.booleans().flatmap(lambda symmetric: graphs(max_ranks=6, symmetric=symmetric)), st.data())
@settings(max_examples=40)
def test_relays_help_and_what_they_pass_on_is_correct(topology, data):
    collective = data.draw(collectives(topology, list(TREE_KINDS), relays=True))
    schedule = solve_by_trees(topology, collective)
    assert verify(schedule).errors == ()
    assert 0 < schedule.rate <= schedule.bound.rate
    assert objections(schedule) == []


@given(st.booleans().flatmap(lambda symmetric: graphs(max_ranks=5, symmetric=symmetric)), st.data())
@settings(max_examples=25)
def test_multiplicative_weights_come_within_epsilon_of_the_bound(topology, data):
    collective = data.draw(collectives(topology, list(TREE_KINDS)))
    schedule = solve_by_weights(topology, collective, SolveOptions(epsilon=Fraction(1, 10)))
    assert verify(schedule).errors == ()
    assert schedule.rate >= schedule.bound.rate * Fraction(9, 10)
    facts = dict(schedule.method.settings)
    assert schedule.method.name == "mwu"
    assert facts["epsilon"] == "1/10"
    assert facts["iterations"] >= 1


@given(graphs(max_ranks=5, switches=1), st.data(), st.integers(1, 3))
@settings(max_examples=20)
def test_no_more_trees_than_allowed(topology, data, most):
    collective = data.draw(collectives(topology, list(TREE_KINDS), relays=True))
    schedule = solve_by_trees(topology, collective, SolveOptions(max_trees=most))
    assert verify(schedule).errors == ()
    assert trees_that_count(schedule) <= most


def test_few_trees_stay_within_the_tolerance():
    topology = catalog.load("dgx1").subset([0, 1, 2, 3, 4, 5])
    schedule = solved(topology, "allreduce", tolerance=Fraction(1, 5))
    assert schedule.rate >= schedule.bound.rate * Fraction(4, 5)
    assert len(schedule.chunks) == 1
    assert dict(schedule.method.settings)["proved"] == "no fewer trees are possible"
    assert verify(schedule).correct


def test_a_tolerance_that_needs_too_many_trees_gives_way_to_the_number_of_trees():
    topology = catalog.load("dgx1")
    schedule = solved(topology, "broadcast", tolerance=Fraction(0), max_trees=2)
    assert len(schedule.chunks) == 2
    assert schedule.rate == 100  # two double links of rank 0


def test_equal_roots_are_preferred_where_they_are_lower():
    schedule = solved(catalog.load("star:6"), "allreduce")
    assert schedule.is_optimal
    assert schedule.steps == 2  # up to each root through the switch, and down again


PAIRS = [(0, 1), (1, 0), (2, 3), (3, 2)]
STREET = [(0, 1), (2, 0)]


@pytest.mark.parametrize(
    ("ends", "kind", "message"),
    [
        (PAIRS, "allreduce", r"allreduce: ranks 2, 3 cut off: .* rank 0 and back"),
        (STREET, "broadcast", "broadcast: rank 2 cut off: nothing leads there from rank 0"),
        (STREET, "reduce", "reduce: rank 1 cut off: nothing leads from there to rank 0"),
        (STREET, "allgather", "allgather: ranks 1, 2 cut off: there is no way from rank 0 and back"),
    ],
)
def test_who_cannot_come_or_go_is_named(ends, kind, message):
    links = [Link(src, dst, Fraction(1)) for src, dst in ends]
    topology = Topology.build("apart", 1 + max(map(max, ends)), links)
    with pytest.raises(InfeasibleError, match=message) as caught:
        solved(topology, kind)
    assert caught.value.proof == bound(topology, Collective.on(topology, kind))
    assert caught.value.proof.rate == 0


@given(st.booleans().flatmap(lambda symmetric: graphs(max_ranks=6, symmetric=symmetric)), st.data())
@settings(max_examples=40)
def test_a_deadline_before_the_first_packing_still_leaves_a_schedule(topology, data):
    collective = data.draw(collectives(topology, list(TREE_KINDS), relays=True))
    most = data.draw(st.sampled_from([None, 1, 2]))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TimedOutError, match="out of time") as caught:
        patch.setattr(exact, "pack_exactly", out_of_time)
        solve_by_trees(topology, collective, SolveOptions(max_trees=most, deadline_s=60))
    best = caught.value.best
    assert best is not None
    assert verify(best).errors == ()
    assert 0 < best.rate <= best.bound.rate
    assert best.method.name == "mwu"
    assert most is None or trees_that_count(best) <= most


def test_a_packing_that_was_done_in_time_is_not_lost_with_the_next(monkeypatch):
    topology = catalog.load("torus:4x4")  # free roots and equal roots reach the same rate
    calls = []

    def first_only(*arguments, **knobs):
        calls.append(arguments)
        return (pack_exactly if len(calls) == 1 else out_of_time)(*arguments, **knobs)

    monkeypatch.setattr(exact, "pack_exactly", first_only)
    schedule = solved(topology, "allreduce", deadline_s=60)
    assert len(calls) == 2
    assert schedule.is_optimal


@pytest.mark.parametrize("kind", ["allgather", "allreduce"])
def test_a_late_answer_has_no_more_trees_than_allowed(kind):
    with pytest.raises(TimedOutError) as caught:
        solved(catalog.load("torus:4x4"), kind, method="mwu", max_trees=1, deadline_s=1e-6)
    assert trees_that_count(caught.value.best) == 1
    assert verify(caught.value.best).correct


def out_of_time(*_, **__):
    raise TimedOutError("packing: out of time")


def trees_that_count(schedule):
    """Those of one root, or of all where roots are free: what `max_trees` limits."""
    owners = [chunk.owner for chunk in schedule.chunks]
    per_root = schedule.collective.kind in {Kind.ALLGATHER, Kind.REDUCE_SCATTER}
    return max(map(owners.count, owners)) if per_root else len(owners)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"kind": "alltoall"}, r"alltoall: trees serve broadcast, reduce, allgather, .* only"),
        ({"max_trees": 0}, "max-trees: must be at least 1, got 0"),
        ({"tolerance": Fraction(1)}, "tolerance: must be from 0 to below 1, got 1"),
        ({"method": "mwu", "epsilon": Fraction(0)}, "epsilon: must be above 0 and below 1, got 0"),
        ({"method": "mwu", "max_height": 2}, "method mwu: takes no max-height, which is for trees"),
    ],
)
def test_what_cannot_be_asked_is_refused(knobs, message):
    with pytest.raises(InputError, match=message):
        solved(catalog.load("ring:4"), **{"kind": "broadcast", **knobs})


@pytest.mark.parametrize("kind", ["allgather", "reduce-scatter"])
def test_many_roots_out_of_time_share_one_tree(monkeypatch, kind):
    monkeypatch.setattr(exact, "pack_exactly", out_of_time)
    monkeypatch.setattr(tree_solver, "_ROUNDS_UP_TO", 3)
    with pytest.raises(TimedOutError, match="out of time") as caught:
        solve_by_trees(
            catalog.load("torus:3x3"),
            Collective.on(catalog.load("torus:3x3"), kind),
            SolveOptions(deadline_s=60),
        )
    best = caught.value.best
    assert best is not None
    assert verify(best).errors == ()
    assert best.method.settings == (("shared", "one tree"),)
    undirected = {frozenset((transfer.src, transfer.dst)) for transfer in best.transfers}
    assert len(undirected) == 8  # the edges of one spanning tree of 9 ranks


@settings(max_examples=60)
@given(st.data())
def test_nothing_is_lost_for_out_trees_on_balanced_relays(data):
    topology = data.draw(graphs(max_ranks=7, switches=2, min_ranks=3))
    ranks = range(data.draw(st.integers(2, topology.ranks)))
    for kind in ("broadcast", "allgather", "reduce-scatter"):
        collective = Collective.on(topology, kind, ranks=ranks)
        flat, there = relays_as_switches(topology, collective)
        assert flat.links == topology.links
        assert (flat.ranks, flat.size) == (len(ranks), topology.size)
        assert bound(flat, there).rate == bound(topology, collective).rate


@settings(max_examples=40)
@given(st.data())
def test_an_allreduce_through_switches_is_no_faster_than_through_relays(data):
    topology = data.draw(graphs(max_ranks=6, switches=1, min_ranks=3, symmetric=data.draw(st.booleans())))
    collective = Collective.on(topology, "allreduce", ranks=range(data.draw(st.integers(2, topology.ranks))))
    assert bound(*relays_as_switches(topology, collective)).rate <= bound(topology, collective).rate


def test_names_and_symmetries_of_relays():
    ring, mirror = catalog.load("ring:4"), (1, 0, 3, 2)
    topology = replace(ring, symmetries=(*ring.symmetries, mirror))
    assert len(topology.symmetries) > 1
    flat, _ = relays_as_switches(topology, Collective.on(topology, "broadcast", ranks=[0, 1]))
    assert [switch.name for switch in flat.switches] == ["relay 2", "relay 3"]
    assert flat.symmetries == (mirror,)


def test_ranks_must_come_first():
    topology = catalog.load("ring:4")
    with pytest.raises(CollectiveError, match=r"numbered 0\.\.1 before their relays, got \[0, 2\]"):
        relays_as_switches(topology, Collective.on(topology, "broadcast", ranks=[0, 2]))
