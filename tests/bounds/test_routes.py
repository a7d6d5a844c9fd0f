"""Gather, scatter and alltoall along paths: the bound is reached, or missed by what is said."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings

from arborcast.synth.bounds import bound
from arborcast.synth.certificate import Cut, Dual
from arborcast.synth.collective import Collective
from arborcast.synth.errors import CollectiveError, InfeasibleError, TimedOutError
from arborcast.synth.routes.path_solver import solve_by_routes
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Link, Topology
from arborcast.synth.verification.verifier import verify
from arborcast.topologies import load
from tests.support.strategies import topologies


def chain(*bandwidths: int) -> Topology:
    """0 - 1 - 2 ... with these GB/s both ways."""
    pairs = [(i, i + 1, Fraction(bandwidth)) for i, bandwidth in enumerate(bandwidths)]
    links = [Link(a, b, w) for a, b, w in pairs] + [Link(b, a, w) for a, b, w in pairs]
    return Topology.build("chain", len(bandwidths) + 1, links)


def test_gather_on_a_chain_is_drawn() -> None:
    topology = chain(2, 2)
    schedule = solve_by_routes(topology, Collective.on(topology, "gather", root=0))
    drawn = {(schedule.chunks[t.chunk].owner, t.step, t.src, t.dst, t.reduce) for t in schedule.transfers}
    assert drawn == {
        (1, 0, 1, 0, False),
        (2, 0, 2, 1, False),
        (2, 1, 1, 0, False),
    }
    # Two of three blocks pass the link 1->0 of 2 GB/s.
    assert schedule.rate == schedule.bound.rate == 3


def test_alltoall_on_a_chain() -> None:
    topology = chain(1, 1, 1)
    schedule = solve_by_routes(topology, Collective.on(topology, "alltoall"))
    # 2 x 2 blocks of a quarter buffer each pass the middle link in one direction.
    assert schedule.rate == schedule.bound.rate == 1


@given(topologies(max_ranks=6, switches=2, symmetric=True))
@settings(max_examples=30)
def test_gather_and_scatter_reach_the_bound(topology: Topology) -> None:
    for kind in ("gather", "scatter"):
        collective = Collective.on(topology, kind, root=topology.ranks - 1)
        try:
            schedule = solve_by_routes(topology, collective)
        except InfeasibleError as error:
            assert error.proof is not None
            assert isinstance(error.proof.certificate, Cut)
            assert error.proof.certificate.capacity == 0
        else:
            verdict = verify(schedule)
            assert verdict.errors == ()
            assert verdict.rate == schedule.bound.rate


@given(topologies(max_ranks=5, switches=1, symmetric=True))
@settings(max_examples=20)
def test_alltoall_is_correct_and_within_a_millionth_of_its_bound(topology: Topology) -> None:
    collective = Collective.on(topology, "alltoall")
    try:
        schedule = solve_by_routes(topology, collective)
    except InfeasibleError:
        assert bound(topology, collective).rate == 0
        return
    verdict = verify(schedule)
    assert verdict.errors == ()
    assert schedule.bound.rate * (1 - Fraction(1, 10**6)) <= verdict.rate <= schedule.bound.rate


def test_relays_forward() -> None:
    topology = chain(1, 1)
    collective = Collective.on(topology, "gather", ranks=(0, 2))
    schedule = solve_by_routes(topology, collective)
    assert verify(schedule).correct
    assert [(t.src, t.dst) for t in schedule.transfers] == [(2, 1), (1, 0)]


def test_a_torus_is_as_symmetric_where_it_does_not_say_so() -> None:
    said = load("torus:4x3,bandwidth=2")
    silent = replace(said, symmetries=())
    lengths = [bound(each, Collective.on(each, "alltoall")).certificate for each in (said, silent)]
    assert [len(set(each.lengths)) for each in lengths if isinstance(each, Dual)] == [
        2,
        2,
    ]  # those of 4, of 3
    schedule = solve_by_routes(silent, Collective.on(silent, "alltoall"))
    assert schedule.rate == schedule.bound.rate == bound(said, Collective.on(said, "alltoall")).rate
    drawn = {
        (t.step, (t.dst - t.src) % 12) for t in schedule.transfers if schedule.chunks[t.chunk].owner == 0
    }
    moved = {
        (t.step, (t.dst - t.src) % 12) for t in schedule.transfers if schedule.chunks[t.chunk].owner == 3
    }
    assert drawn == moved  # what rank 0 does every other does as far away


def test_other_kinds_are_sent_to_trees() -> None:
    topology = chain(1)
    with pytest.raises(CollectiveError, match="broadcast: routes serve alltoall, gather, scatter; use trees"):
        solve_by_routes(topology, Collective.on(topology, "broadcast"))


@given(topologies(max_ranks=5, switches=2, symmetric=False))
@settings(max_examples=20, deadline=None)
def test_an_alltoall_without_time_goes_the_shortest_ways(topology: Topology) -> None:
    collective = Collective.on(topology, "alltoall")
    with pytest.raises(TimedOutError, match="alltoall: the deadline of 1e-09 s passed") as caught:
        solve_by_routes(topology, collective, SolveOptions(deadline_s=1e-9))
    best = caught.value.best
    assert best is not None
    assert verify(best).errors == ()
    assert 0 < best.rate <= solve_by_routes(topology, collective).rate
