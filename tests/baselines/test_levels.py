"""Trees by levels: drawn, timed by hand, on graphs with and without boxes, and what does not fit."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.backends.lowering.additions import adds_alike
from arborcast.synth.baselines.hierarchical_trees import COMPARED, TreeShape, level_schedules, solve_levels
from arborcast.synth.bounds import bound
from arborcast.synth.collective import Collective
from arborcast.synth.deadline import NO_DEADLINE
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.schedule import Schedule
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.topology import Link, Topology
from arborcast.synth.verification.verifier import verify
from tests.support import strategies

BOXES = 6
"""Pairs of ranks (0, 1), (2, 3), ...: 1 us and 4 GB/s inside; 2 us and 2 GB/s to and from a switch, 12."""


@pytest.fixture(scope="module")
def pairs() -> Topology:
    links = []
    for box in range(BOXES):
        inside, outside = (Fraction(4), Fraction(1)), (Fraction(2), Fraction(2))
        ends = [(2 * box, 2 * box + 1, inside), (2 * box, 12, outside), (2 * box + 1, 12, outside)]
        links += [Link(*pair, *what) for a, b, what in ends for pair in ((a, b), (b, a))]
    return Topology.build("pairs", 2 * BOXES, links, ["fabric"])


def solved(fabric: Topology, kind: str, shape: TreeShape, root: int = 0) -> Schedule:
    collective = Collective.on(fabric, kind, root=root)
    schedule = solve_levels(fabric, collective, bound(fabric, collective), 0, NO_DEADLINE, shape)
    assert verify(schedule).errors == ()
    return schedule


def test_lanes_and_copies_as_drawn(pairs: Topology) -> None:
    schedule = solved(pairs, "allreduce", TreeShape(fan_out=2, lanes=2, copies=2))
    down = [
        {f"{t.src}>{t.dst}" for t in schedule.transfers if t.chunk == chunk and not t.reduce and t.via}
        for chunk in range(4)
    ]
    assert down == [
        {"0>2", "0>4", "2>6", "2>8", "4>10"},
        {"6>8", "6>10", "8>0", "8>2", "10>4"},  # the second copy begins at the fourth box
        {"1>3", "1>5", "3>7", "3>9", "5>11"},
        {"7>9", "7>11", "9>1", "9>3", "11>5"},
    ]
    assert {chunk.share for chunk in schedule.chunks} == {Fraction(1, 4)}
    assert adds_alike(schedule)


def test_a_broadcast_by_hand(pairs: Topology) -> None:
    schedule = solved(pairs, "broadcast", TreeShape(fan_out=5, lanes=1, copies=1), root=3)
    # 8,000 bytes. From 3 to 2 by 3 us, over 2's link to the switch five times, 4 us each: the last is at the
    # switch at 3 + 5 x 4 + 2, at its rank 4 + 2 us later, and at that one's neighbour after 2 + 1 us more.
    assert simulate(schedule, 8_000, pieces=1).time_us == pytest.approx(25 + 6 + 3)
    assert solved(pairs, "reduce", TreeShape(fan_out=5, lanes=1, copies=1), root=3).height == 3


def test_one_box_gets_its_lowest_tree() -> None:
    fabric = topologies.load("mesh:5x5")
    schedule = solved(fabric, "allreduce", TreeShape(2, 1, 1))
    assert schedule.chunks[0].owner == 12 and schedule.height == 4  # two each way from the middle


def test_what_is_compared_differs(pairs: Topology) -> None:
    collective = Collective.on(pairs, "allreduce")
    found = list(level_schedules(pairs, collective, bound(pairs, collective), NO_DEADLINE))
    assert 4 <= len(found) < len(COMPARED)  # with six boxes, five below one are as good as eight or twelve
    assert len({schedule.transfers for schedule in found}) == len(found)


@settings(max_examples=30)
@given(
    strategies.topologies(max_ranks=7, switches=2, symmetric=False),
    st.sampled_from(["broadcast", "reduce", "allreduce"]),
    st.sampled_from(COMPARED),
)
def test_random_fabrics(fabric: Topology, kind: str, shape: TreeShape) -> None:
    try:
        schedule = solved(fabric, kind, shape, root=fabric.ranks - 1)
    except InfeasibleError as error:
        assert str(error).startswith(
            "levels: rank" if "no way through" not in str(error) else "levels: no way"
        )
        return
    assert schedule.rate <= schedule.bound.rate
    assert schedule == solved(fabric, kind, shape, root=fabric.ranks - 1)
