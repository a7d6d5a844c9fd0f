"""Rings both ways round: the rate of the rings that they join, in half of their steps."""

from __future__ import annotations

import pytest

from arborcast import topologies
from arborcast.synth.baselines import solve_baseline
from arborcast.synth.baselines.bidirectional_rings import both_ways, implicit_two_way_rings
from arborcast.synth.bounds import bound
from arborcast.synth.collective import Collective
from arborcast.synth.schedule import Schedule
from arborcast.synth.symmetry.translation_search import translations_of
from arborcast.synth.verification.verifier import verify


def rings(spec: str, kind: str) -> Schedule:
    fabric = topologies.load(spec)
    return solve_baseline(fabric, Collective.on(fabric, kind), "multiring")


@pytest.mark.parametrize("spec", ["ring:4", "ring:5", "ring:8", "full:5", "dgx1", "star:6", "torus:4x3"])
@pytest.mark.parametrize("kind", ["allgather", "reduce_scatter", "allreduce"])
def test_the_rate_of_the_rings_in_half_of_their_steps(spec: str, kind: str) -> None:
    one_way = rings(spec, kind)
    both = both_ways(one_way)
    if spec == "star:6":  # all rings of a star pass the same links, and one way of them is all that it takes
        assert both is None
        return
    assert both is not None
    verdict = verify(both)
    assert verdict.errors == ()
    assert verdict.rate == both.rate == one_way.rate
    facts = dict(both.method.settings)
    count = len(both.collective.ranks)
    phases = 2 if kind == "allreduce" else 1
    assert one_way.steps == phases * (count - 1)
    if 2 * int(str(facts["pairs"])) == facts["rings"]:
        assert both.steps == phases * (count // 2)


def test_a_ring_of_four_by_hand() -> None:
    both = both_ways(rings("ring:4", "reduce_scatter"))
    assert both is not None
    of_rank_0 = [
        sorted((t.step, t.src, t.dst) for t in both.transfers if t.chunk == chunk)
        for chunk, its in enumerate(both.chunks)
        if its.owner == 0
    ]
    # Three others: one on one side, which begins at once, two on the other; and the other way round.
    assert sorted(of_rank_0) == [[(0, 1, 0), (0, 2, 3), (1, 3, 0)], [(0, 2, 1), (0, 3, 0), (1, 1, 0)]]


def test_roots_and_three_ranks_stay_as_they_are() -> None:
    assert both_ways(rings("ring:5", "broadcast")) is None
    assert both_ways(rings("ring:3", "allgather")) is None


@pytest.mark.parametrize("kind", ["allgather", "allreduce"])
def test_square_tori_have_them_in_implicit_form(kind: str) -> None:
    fabric = topologies.load("torus:6x6")
    collective = Collective.on(fabric, kind)
    limit = bound(fabric, collective)
    found = implicit_two_way_rings(fabric, collective, limit, translations_of(fabric))
    assert found is not None and found.is_optimal
    assert verify(found).errors == ()
    assert verify(found.expand()).errors == ()
    assert found.steps == (36 if kind == "allreduce" else 18)
