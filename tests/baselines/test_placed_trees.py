"""Trees placed in time: correct on any fabric, as fast as expected, within the deadline."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.synth.api import approach
from arborcast.synth.baselines import placed_trees
from arborcast.synth.baselines.placed_trees import KINDS, placed, placed_schedules
from arborcast.synth.bounds import bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import NO_DEADLINE, Deadline
from arborcast.synth.errors import TimedOutError
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load
from tests.support.strategies import topologies


def line(ranks: int, latency_us: int = 0) -> Topology:
    """Ranks in a row, 1 GB/s each way."""
    ends = [(rank, rank + 1) for rank in range(ranks - 1)]
    links = [Link(u, v, Fraction(1), Fraction(latency_us)) for a, b in ends for u, v in ((a, b), (b, a))]
    return Topology.build("line", ranks, links)


def on(topology: Topology, kind: str, size_bytes: int, trees: int = 1) -> synth.Schedule:
    collective = Collective.on(topology, kind)
    return placed(topology, collective, bound(topology, collective), size_bytes, trees, NO_DEADLINE)


@pytest.mark.parametrize(
    ("topology", "kind", "size", "time_us"),
    [
        # Each half crosses the pair once to be added and once as the sum; both ways are always busy.
        (line(2, latency_us=1), "allreduce", 2000, 4),
        # Chunks of 1 us follow each other: the last one leaves rank 0 at 2 us and rank 1 at 3.
        (line(3), "broadcast", 3000, 4),
        (line(3), "reduce", 3000, 4),
        # What rank 1 gets from both sides is on after it has sent its own: two chunks over each link.
        (line(3), "allgather", 3000, 2),
        (line(3), "reduce-scatter", 3000, 2),
    ],
)
def test_the_time_is_the_expected_one(topology: Topology, kind: str, size: int, time_us: int) -> None:
    schedule = on(topology, kind, size)
    assert synth.verify(schedule).correct
    assert synth.simulate(schedule, size, pieces=1).time_us == pytest.approx(time_us)


@settings(max_examples=60)
@given(st.data())
def test_every_schedule_is_correct(data: st.DataObject) -> None:
    topology = data.draw(topologies(symmetric=data.draw(st.booleans())))
    latencies = st.sampled_from([Fraction(0), Fraction(7, 10), Fraction(3)])
    links = tuple(replace(link, latency_us=data.draw(latencies)) for link in topology.links)
    topology = replace(topology, links=links)
    kind = data.draw(st.sampled_from(KINDS))
    size, trees = data.draw(st.integers(1, 1 << 20)), data.draw(st.integers(1, 2))
    root = data.draw(st.integers(0, topology.ranks - 1))
    collective = Collective.on(topology, kind, root=root)
    limit = bound(topology, collective)
    found = placed(topology, collective, limit, size, trees, NO_DEADLINE)
    verdict = synth.verify(found)
    assert verdict.correct, verdict
    again = placed(topology, collective, limit, size, trees, NO_DEADLINE)
    assert again.transfers == found.transfers


def test_a_second_chance_makes_no_schedule_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = load("mi250").subset([rank for rank in range(16) if rank != 5])
    times = []
    for passes in (0, 2):
        monkeypatch.setattr(placed_trees, "PASSES", passes)
        times.append(synth.simulate(on(fabric, "allreduce", 64 << 10), 64 << 10, pieces=1).time_us)
    assert times[1] <= times[0]


def test_one_is_made_for_each_design_where_that_takes_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = line(4)
    whole = Collective.on(fabric, "allgather")
    settings_of = [dict(found.method.settings) for found in placed_schedules(fabric, whole, NO_DEADLINE)]
    assert [(each["bytes"], each["trees"]) for each in settings_of] == list(placed_trees.DESIGNS)
    some = Collective.on(fabric, "allgather", ranks=[0, 1])
    blocks = Collective.on(fabric, "alltoall")
    for collective in (some, blocks):
        assert not list(placed_schedules(fabric, collective, NO_DEADLINE))
    monkeypatch.setattr(placed_trees, "MOST_WAYS", 24)  # 6 ways between neighbours, for each of 4 ranks
    assert len(list(placed_schedules(fabric, whole, NO_DEADLINE))) == 1
    with pytest.raises(TimedOutError, match="the placement of trees"):
        list(placed_schedules(fabric, whole, Deadline(1.0, 0.0)))


def test_they_serve_small_messages_between_boxes() -> None:
    chosen = approach(load("dgx1:boxes=2"), "broadcast").selection()
    assert chosen.fastest(64 << 10).method.name == "placed"
    assert all(
        each.method.name != "placed" for each in approach(load("dgx1"), "broadcast").selection().schedules
    )


def test_kinds_are_those_along_trees() -> None:
    assert set(KINDS) == {*Kind} - {Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL, Kind.CUSTOM}
