"""Repairs: as fast as solving from nothing says is possible, correct by the verifier, the same every time."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast import topologies as catalog
from arborcast.synth.collective import TREE_KINDS, Collective, Demand, Kind
from arborcast.synth.errors import CollectiveError, InfeasibleError, InputError, TimedOutError
from arborcast.synth.faults.faulty import without
from arborcast.synth.faults.old_trees import OldTrees
from arborcast.synth.faults.repair import repair
from arborcast.synth.topology import Link, Topology
from tests.support.drawn_in_network import TURNS, implicit_star, star
from tests.support.strategies import topologies as graphs

KINDS = [kind.value for kind in TREE_KINDS]


def repaired_setting(schedule):
    return dict(schedule.method.settings).get("repaired", "")


def check_like_new(schedule, left, seed=0):
    """Correct, and with the rate and bound of a schedule that was solved from nothing."""
    assert synth.verify(schedule).errors == ()
    collective = schedule.collective
    assert schedule.topology == left
    fresh = synth.solve(left, collective, seed=seed)
    assert schedule.bound.rate == fresh.bound.rate
    assert schedule.rate == fresh.rate


@st.composite
def faults_of(draw, topology):
    """Arguments of `repair` with one or two faults."""
    cables = sorted({tuple(sorted((link.src, link.dst))) for link in topology.links})
    links = draw(st.lists(st.sampled_from(cables), max_size=2, unique=True))
    hops = [
        (link.src, link.dst) for link in topology.links if tuple(sorted((link.src, link.dst))) not in links
    ]
    slower = {}
    if hops and draw(st.booleans()):
        hop = draw(st.sampled_from(hops))
        slower = {hop: topology.bandwidth[hop] / 2}
        if draw(st.booleans()) and topology.bandwidth.get(hop[::-1]) == topology.bandwidth[hop]:
            slower[hop[::-1]] = slower[hop]
    ranks = []
    if topology.ranks > 2 and draw(st.booleans()):
        ranks = [draw(st.integers(0, topology.ranks - 1))]
    assume(links or slower or ranks)
    return {"without_links": links, "slower_links": slower, "without_ranks": ranks}


@given(graphs(max_ranks=6, switches=2), st.data())
@settings(max_examples=60)
def test_a_repaired_schedule_is_as_fast_as_a_new_one(topology, data):
    kind = data.draw(st.sampled_from(KINDS))
    schedule = synth.solve(topology, kind, root=0)
    faults = data.draw(faults_of(topology))
    assume(schedule.collective.root not in faults["without_ranks"])
    left = without(
        topology,
        links=faults["without_links"],
        ranks=faults["without_ranks"],
        slower=faults["slower_links"],
    ).topology
    assume(left.ranks > 1)
    try:
        synth.solve(left, kind, root=0)
    except InfeasibleError as wrong:
        with pytest.raises(InfeasibleError) as caught:
            repair(schedule, **faults)
        assert str(caught.value) == str(wrong)
        assert caught.value.proof.rate == 0
        return
    found = repair(schedule, **faults)
    check_like_new(found, left)
    assert repair(schedule, **faults) == found
    assert "on old trees" in repaired_setting(found)


@pytest.mark.parametrize("kind", ["allgather", "reduce-scatter", "allreduce", "broadcast", "reduce"])
@pytest.mark.parametrize("spec", ["dgx1", "torus:4x4", "dgx-a100:boxes=2", "mi250"])
def test_machines_with_a_failed_link(spec, kind):
    topology = catalog.load(spec)
    link = Random(spec).choice(topology.links)
    schedule = synth.solve(topology, kind)
    found = repair(schedule, without_links=[(link.src, link.dst)])
    check_like_new(found, without(topology, links=[(link.src, link.dst)]).topology)


def test_trees_without_a_fault_stay():
    # 0 and 1 joined by a cable that no tree of ranks 2, 3 and 4 uses twice: a ring keeps its other half.
    topology = catalog.load("full:6")
    schedule = synth.solve(topology, "allgather")
    found = repair(schedule, without_links=["0-1"])
    assert found.is_optimal
    old = {(c.owner, t.src, t.dst) for t in schedule.transfers for c in [schedule.chunks[t.chunk]]}
    new = {(c.owner, t.src, t.dst) for t in found.transfers for c in [found.chunks[t.chunk]]}
    assert len(old & new) > len(old) / 2
    assert not {(src, dst) for _, src, dst in new} & {(0, 1), (1, 0)}


def test_trees_through_switches_that_reduce_are_solved_anew():
    found = repair(implicit_star(star(4, TURNS), Kind.ALLREDUCE), without_ranks=[3])
    assert repaired_setting(found) == "solved anew: its trees have switches that reduce or multicast"
    check_like_new(found, found.topology)


def test_removed_ranks_are_renumbered_away():
    topology = catalog.load("dgx1")
    found = repair(synth.solve(topology, "allgather"), without_ranks=[2, 5])
    check_like_new(found, found.topology)
    fragment = topology.subset([0, 1, 3, 4, 6, 7])
    assert found.topology.links == fragment.links
    assert found.topology.name == "dgx1 without rank 2, rank 5"
    assert found.collective.ranks == tuple(range(6))


def test_a_root_keeps_its_part_under_its_new_number():
    found = repair(synth.solve(catalog.load("dgx1"), "broadcast", root=5), without_ranks=[0])
    assert found.collective.root == 4
    check_like_new(found, found.topology)


@pytest.mark.parametrize(
    ("solve", "why"),
    [
        (lambda t: synth.solve(t, "alltoall"), "alltoall is not done along trees"),
        (lambda t: synth.solve(t, "gather"), "gather is not done along trees"),
        (lambda t: synth.solve(t, "scatter", root=1), "scatter is not done along trees"),
        (lambda t: synth.solve(t, "allgather", method="sat", chunks=1, steps=2, rounds=3), "rounds"),
    ],
)
def test_what_is_no_packing_of_trees_is_solved_anew_and_says_so(solve, why):
    found = repair(solve(catalog.load("full:4")), without_links=["0-1"])
    assert repaired_setting(found).startswith("solved anew: ")
    assert why in repaired_setting(found)
    check_like_new(found, found.topology)


def test_relays_stay_relays():
    topology = catalog.load("dgx1")
    schedule = synth.solve(topology, "allgather", ranks=range(6))
    found = repair(schedule, without_ranks=[7])
    assert found.collective.ranks == tuple(range(6))
    assert found.topology.ranks == 7
    assert "relays" in repaired_setting(found)
    check_like_new(found, found.topology)


@pytest.mark.parametrize("method", ["ring", "multiring", "halving-doubling", "mwu"])
def test_schedules_of_any_method_are_repaired_to_the_optimum(method):
    schedule = synth.solve(catalog.load("hypercube:3"), "allreduce", method=method)
    found = repair(schedule, without_links=["0-1"])
    check_like_new(found, found.topology)


def test_a_schedule_whose_chunks_go_in_circles_is_solved_anew():
    schedule = synth.solve(catalog.load("full:4"), "broadcast")
    first = schedule.transfers[0]
    turned = [replace(t, src=t.dst, dst=t.src) if t == first else t for t in schedule.transfers]
    wrong = synth.Schedule.build(
        schedule.topology, schedule.collective, schedule.method, schedule.bound, schedule.chunks, turned
    )
    assert OldTrees.of(wrong) is None
    found = repair(wrong, without_links=["2-3"])
    assert "do not move along trees" in repaired_setting(found)
    assert found.is_optimal


def test_who_is_cut_off_is_named():
    schedule = synth.solve(catalog.load("torus:3x3"), "allreduce")
    links = [f"4-{other}" for other in (1, 3, 5, 7)]
    with pytest.raises(InfeasibleError, match="rank 4") as caught:
        repair(schedule, without_links=links)
    assert caught.value.proof.rate == 0


def test_a_deadline_leaves_a_correct_schedule():
    schedule = synth.solve(catalog.load("torus:4x4"), "allgather")
    with pytest.raises(TimedOutError) as caught:
        repair(schedule, without_links=["0-1"], deadline_s=1e-9)
    assert synth.verify(caught.value.best).correct


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({}, "needs a link or rank that is gone or slower, got none"),
        ({"without_links": ["0-9"]}, "link '0-9': must be two ranks in 0..5 or names of switches"),
        ({"without_ranks": [6]}, "rank must be in 0..5, got 6"),
        ({"without_ranks": [0]}, "broadcast: its root 0 is among the ranks that are gone"),
        ({"without_ranks": [1, 2, 3, 4, 5]}, "needs at least 2 ranks, got 1"),
        ({"slower_links": {(0, 1): Fraction(2)}}, "at most 1 GB/s, got 2"),
    ],
)
def test_faults_that_make_no_sense_are_refused(faults, message):
    with pytest.raises(InputError, match=message):
        repair(synth.solve(catalog.load("full:6"), "broadcast"), **faults)


def test_a_custom_collective_that_loses_a_rank_is_refused():
    topology = catalog.load("full:4")
    blocks = Collective.custom(topology, [Demand(frozenset({0}), frozenset({1, 2}))])
    schedule = synth.solve(topology, blocks)
    with pytest.raises(CollectiveError, match="rank 2 is gone, which holds or must get a block"):
        repair(schedule, without_ranks=[2])
    found = repair(schedule, without_links=["0-1"])
    assert repaired_setting(found).startswith("solved anew: custom")
    assert synth.verify(found).correct


def test_a_link_that_fails_in_one_direction_only_is_a_slower_one():
    one_way = Topology.build(
        "one way", 3, [Link(a, b, Fraction(2)) for a in range(3) for b in range(3) if a != b]
    )
    schedule = synth.solve(one_way, "allreduce")
    found = repair(schedule, slower_links={(0, 1): Fraction(1)})
    check_like_new(found, without(one_way, slower={(0, 1): Fraction(1)}).topology)
