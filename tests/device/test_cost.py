"""The time model of the kernel: closed forms of small plans, and what no prediction may beat."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from arborcast import synth, topologies
from arborcast.backends.device.cost import COSTS, messages_us, predicted_us
from arborcast.backends.device.plan import DevicePlan
from arborcast.synth.simulation.pieces import ONE_HOST
from arborcast.synth.topology import Link, Topology
from tests.support.drawn_schedules import ring_allreduce

FREE = replace(COSTS, launch_us=0.0, row_us=0.0, flag_us=0.0, block_us=0.0, memory_gbs=1e12)


def chain(ranks: int) -> DevicePlan:
    """A broadcast along a line, whole."""
    ends = [pair for at in range(ranks - 1) for pair in ((at, at + 1), (at + 1, at))]
    fabric = Topology("line", ranks, tuple(Link(*pair, Fraction(1)) for pair in ends))
    return DevicePlan(synth.solve(fabric, "broadcast", method="trees"), piece=1 << 20)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_chain_pays_for_each_hop(ranks: int) -> None:
    """A row for each rank, a flag and the link (1 GB/s: 120 us for 120,000 bytes) between two."""
    hops = ranks - 1
    assert predicted_us(chain(ranks), 120_000, FREE) == pytest.approx(120 * hops)
    flags = replace(FREE, row_us=2.0, flag_us=3.0, launch_us=7.0)
    assert predicted_us(chain(ranks), 120_000, flags) == pytest.approx(7 + 120 * hops + 3 * hops + 2 * ranks)


def test_pieces_follow_each_other() -> None:
    """Of long buffers the links alone count: 1 us for 1,000 bytes, behind the pieces that fill the chain."""
    plan = DevicePlan(chain(4).schedule, piece=1000)
    assert predicted_us(plan, 4_000_000, FREE) == pytest.approx(4000 + 2 * 4, rel=0.01)


@pytest.mark.parametrize("fabric", ["dgx1", "full:4", "ring:5", "dgx-a100", "hypercube:3"])
@pytest.mark.parametrize("push", [True, False])
def test_no_prediction_beats_the_links(fabric: str, push: bool) -> None:
    topology = topologies.load(fabric)
    schedule = synth.solve(topology, "allreduce", method="ring")
    plan = DevicePlan(schedule, groups=2, lanes=2, push=push)
    before = 0.0
    for size in (1 << 10, 1 << 16, 1 << 22, 1 << 26):
        took_us = predicted_us(plan, size)
        assert took_us >= max(before, size / float(1000 * schedule.rate))
        before = took_us


def test_each_cost_counts() -> None:
    plan = DevicePlan(ring_allreduce(4), lanes=2)

    def both_us(**changed: float) -> float:
        """Of a size where latencies count, and of one where bytes do."""
        return sum(predicted_us(plan, size, replace(COSTS, **changed)) for size in (64, 1 << 20))

    for name, worse in (("launch_us", 9.0), ("row_us", 9.0), ("flag_us", 9.0), ("block_us", 900.0)):
        assert both_us(**{name: worse}) > both_us(), name
    assert both_us(memory_gbs=0.001) > both_us()


def test_messages_pay_for_each_group() -> None:
    schedule = ring_allreduce(3)
    free = replace(COSTS, group_us=0.0)
    groups = (messages_us(schedule, 3000, ONE_HOST) - messages_us(schedule, 3000, ONE_HOST, free)) / 8.4
    assert groups == pytest.approx(schedule.steps + ONE_HOST.pieces(schedule, 3000) - 1)
    assert messages_us(schedule, 3000, ONE_HOST, free) >= float(Fraction(3000, 1000) / schedule.rate)
