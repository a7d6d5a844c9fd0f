"""The project's promises as one table: known optima of known machines, reached exactly and verified."""

from __future__ import annotations

from fractions import Fraction

import pytest

from arborcast import synth, topologies
from arborcast.synth.certificate import Cut, Scope
from arborcast.synth.collective import NAMED_KINDS
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.topology import Link, Topology

NVLINK = 25  # GB/s; the sources count DGX-1 rates in links

# spec, ranks of the fragment, GB/s of one unit, then in units: broadcast, allgather per root, allreduce
MACHINES = [
    ("dgx1", None, NVLINK, "6", "6/7", "24/7"),
    ("dgx1", (0, 2, 3), NVLINK, "3", "3/2", "5/2"),
    ("dgx1", (0, 1, 2, 3, 4, 5), NVLINK, "3", "3/5", "5/2"),
    ("dgx1", (0, 3, 4), NVLINK, "2", "1", "2"),
    ("dgx-a100:boxes=2", None, 1, "200", "65/3", "520/3"),
    ("mi250:boxes=2", None, 1, "256", "166/15", "2656/15"),
    ("torus:4x4", None, 1, "4", "4/15", "32/15"),
]


@pytest.mark.parametrize(("spec", "ranks", "unit", "broadcast", "per_root", "allreduce"), MACHINES)
def test_optimum_is_proved_and_reached(
    spec: str, ranks: tuple[int, ...] | None, unit: int, broadcast: str, per_root: str, allreduce: str
) -> None:
    fabric = topologies.load(spec, ranks=ranks)
    expected = {
        "broadcast": Fraction(broadcast),
        "reduce": Fraction(broadcast),  # every link of these machines has its reverse
        "allgather": Fraction(per_root) * fabric.ranks,
        "reduce-scatter": Fraction(per_root) * fabric.ranks,
        "allreduce": Fraction(allreduce),
    }
    for kind, rate in expected.items():
        schedule = synth.solve(fabric, kind)
        verdict = synth.verify(schedule)
        assert verdict.errors == ()
        assert (kind, verdict.rate / unit, schedule.bound.rate / unit) == (kind, rate, rate)
        assert schedule.bound.scope is Scope.EVERY_SCHEDULE


def test_few_trees_carry_a_broadcast_of_the_whole_dgx1() -> None:
    """BLINK's question (MLSys 2020, section 4): how few trees give the best rate."""
    schedule = synth.solve(topologies.load("dgx1"), "broadcast", tolerance=Fraction(0))
    assert (schedule.rate / NVLINK, len(schedule.chunks)) == (6, 4)


def two_pairs() -> Topology:
    joined = [(0, 1), (1, 0), (2, 3), (3, 2)]
    return Topology.build("two-pairs", 4, [Link(*pair, Fraction(1)) for pair in joined])


@pytest.mark.parametrize("kind", [kind.value for kind in NAMED_KINDS])
def test_disconnected_pairs_have_a_bound_of_zero_and_name_who_is_cut_off(kind: str) -> None:
    found = synth.bound(two_pairs(), kind)
    assert found.rate == 0
    assert isinstance(found.certificate, Cut)
    assert found.certificate.capacity == 0
    assert found.certificate.side in ({0, 1}, {2, 3})
    with pytest.raises(InfeasibleError, match="2, 3") as caught:
        synth.solve(two_pairs(), kind)
    assert caught.value.proof == found
