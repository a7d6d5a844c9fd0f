"""NCCL's model against the values that NCCL itself prints, and its formulas at the edges."""

from __future__ import annotations

from fractions import Fraction

import pytest

from arborcast import topologies
from arborcast.synth.baselines.nccl_model import (
    AMPERE,
    RING,
    TREE,
    Medium,
    ModelTime,
    NcclSetup,
    nccl_plan,
    nccl_times,
)
from arborcast.synth.collective import Collective
from arborcast.synth.errors import CollectiveError, InfeasibleError, InputError
from arborcast.synth.nccl_protocol import Protocol
from arborcast.topologies.rates import Rates


def rows(spec: str, kind: str, *sizes: int, **options: object) -> tuple[ModelTime, ...]:
    fabric = topologies.load(spec)
    return nccl_times(fabric, Collective.on(fabric, kind), sizes, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "algbw"),
    [
        ("dgx1", "480/7"),  # 6 channels x 20 GB/s x 8/14 = 68.6
        ("dgx-a100", "960/7"),  # 12 x 20 x 8/14 = 137.1
        ("dgx-h100", "1440/7"),  # 12 x 30 x 8/14 = 205.7
    ],
)
def test_ring_allreduce_of_eight_gpus(spec: str, algbw: str) -> None:
    ring = rows(spec, "allreduce", 1 << 30, protocol=Protocol.SIMPLE)[0]
    assert ring.method == RING
    assert ring.rate == Fraction(algbw)
    assert ring.latency_us == pytest.approx(56.0)  # 8.4 + 14 x 3.4
    assert ring.time_us == pytest.approx(56.0 + (1 << 30) / 1000 / float(Fraction(algbw)))


def test_allgather_takes_half_the_steps() -> None:
    (ring,) = rows("dgx1", "allgather", 1 << 20, protocol=Protocol.SIMPLE)
    assert ring.rate == Fraction(960, 7)
    assert ring.latency_us == pytest.approx(8.4 + 7 * 3.4)


def test_tree_of_one_host_is_a_chain() -> None:
    tree = rows("dgx-a100", "allreduce", 1 << 20, protocol=Protocol.SIMPLE)[1]
    assert tree.method == TREE
    assert tree.latency_us == pytest.approx(8.4 + 2 * 7 * 4.0)
    # min(0.92 x 240, 12 x 24) / 2 x 0.85
    assert tree.rate == Fraction(92, 100) * 240 / 2 * Fraction(85, 100)


def test_tree_and_ring_across_hosts() -> None:
    plan = NcclSetup(4, Fraction(25), hosts=4, generation=AMPERE)
    fabric = topologies.load("full:32")
    ring, tree = nccl_times(
        fabric, Collective.on(fabric, "allreduce"), [1 << 20], plan=plan, protocol=Protocol.SIMPLE
    )
    assert ring.latency_us == pytest.approx(8.4 + 56 * 3.4 + 6 * 14.0)
    assert tree.latency_us == pytest.approx(8.4 + 2 * (7 * 4.0 + 2 * 14.0))
    assert tree.rate == 4 * Fraction("17.8") / 2 * Fraction(85, 100)


def test_protocols() -> None:
    ll = rows("dgx-a100", "allreduce", 8, protocol=Protocol.LL)[0]
    ll128 = rows("dgx-a100", "allreduce", 8, protocol=Protocol.LL128)[0]
    assert ll.rate == Fraction("87.7") * 8 / 14  # the cap, below 240 / 2
    assert ll128.rate == Fraction("220.8") * 8 / 14  # 0.92 x 240, below 12 x 20
    assert ll.latency_us == pytest.approx(6.6 + 14 * 0.6)


def test_each_size_takes_its_fastest_protocol() -> None:
    small, large = rows("dgx1", "allreduce", 8, 1 << 30)[:2]
    assert small.protocol is Protocol.LL
    assert large.protocol is Protocol.SIMPLE


def test_busbw_follows_nccl_tests() -> None:
    ring = rows("dgx1", "allreduce", 1 << 30)[0]
    assert ring.algbw == pytest.approx((1 << 30) / ring.time_us / 1000)
    assert ring.busbw == pytest.approx(ring.algbw * 14 / 8)


def test_a_fragment_is_planned_on_its_link_disjoint_rings() -> None:
    fabric = topologies.load("dgx1", rates=Rates.NCCL).subset([0, 1, 2, 3, 4, 5])
    plan = nccl_plan(fabric, Collective.on(fabric, "allreduce"))
    assert (plan.channels, plan.channel_rate) == (2, 20)
    assert "2 link-disjoint rings of dgx1[0,1,2,3,4,5]" in plan.source


def test_a_fragment_without_a_ring_needs_a_plan() -> None:
    fabric = topologies.load("dgx1").subset([0, 3, 4])
    collective = Collective.on(fabric, "allreduce")
    with pytest.raises(InfeasibleError, match="no ring exists through ranks 0, 1, 2"):
        nccl_times(fabric, collective, [8])
    pcie = NcclSetup(1, Fraction(12), medium=Medium.PCIE)
    ring = nccl_times(fabric, collective, [8], plan=pcie, protocol=Protocol.SIMPLE)[0]
    assert ring.latency_us == pytest.approx(8.4 + 4 * 5.7)


def test_what_is_not_modelled_is_refused() -> None:
    with pytest.raises(CollectiveError, match="broadcast: the NCCL model covers only allreduce"):
        rows("dgx1", "broadcast", 8)
    with pytest.raises(InputError, match="hosts must divide the 8 ranks evenly, got 3"):
        rows("dgx1", "allreduce", 8, plan=NcclSetup(1, Fraction(1), hosts=3))
    with pytest.raises(InputError, match="channels must be positive, got 0"):
        NcclSetup(0, Fraction(1))
    with pytest.raises(InputError, match="size must not be negative, got -1 bytes"):
        rows("dgx1", "allreduce", -1)


def test_rings_of_a_cluster_go_through_every_nic() -> None:
    # 2 boxes of 8 A100: 8 rings x 24 GB/s x 16/30; 28 steps inside, each at least 3 x 2.0 us on AMD hosts
    fabric = topologies.load("dgx-a100:boxes=2", rates=Rates.NCCL)
    plan = nccl_plan(fabric, Collective.on(fabric, "allreduce"))
    assert (plan.channels, plan.channel_rate, plan.hosts) == (8, 24, 2)
    ring, tree = rows("dgx-a100:boxes=2", "allreduce", 1 << 30, protocol=Protocol.SIMPLE)
    assert ring.rate == Fraction(192 * 16, 30)
    assert ring.latency_us == pytest.approx(8.4 + 28 * 6.0 + 2 * 14.0)
    assert tree.rate == 8 * Fraction("23.6") / 2  # 0.92 x 240 = 220.8 is above the limit of the channels
    assert tree.latency_us == pytest.approx(8.4 + 2 * (7 * 4.0 + 1 * 14.0))


def test_many_hosts_of_a_cluster() -> None:
    # 128 boxes of A100: 2046 steps, 254 of them between hosts; a step inside takes 2.0 us, not 0.6
    ring, tree = rows("dgx-a100:boxes=128", "allreduce", 1 << 10, protocol=Protocol.LL)
    assert ring.latency_us == pytest.approx(6.6 + 1792 * 2.0 + 254 * 2.7)
    assert ring.rate == Fraction(19) * 1024 / 2046  # most in LL on AMD hosts, below 192 / 2
    assert tree.latency_us == pytest.approx(6.8 + 2 * (7 * 0.6 + 7 * 5.0))
    assert tree.rate == Fraction(19, 2)  # below 8 x 17.8 / 3.8
    (gathered,) = rows("dgx-a100:boxes=128", "allgather", 1 << 30, protocol=Protocol.SIMPLE)
    assert gathered.rate == Fraction(192 * 1024, 1023)


def test_cluster_of_h100_has_intel_hosts() -> None:
    ring, tree = rows("dgx-h100:boxes=16", "allreduce", 1 << 20, protocol=Protocol.SIMPLE)
    assert ring.rate == Fraction(8 * 48 * 128, 254)
    assert ring.latency_us == pytest.approx(8.4 + 224 * 3.4 + 30 * 14.0)  # 3 x 1.0 us is below 3.4
    assert tree.rate == 8 * Fraction(36) / 2
    ll = rows("dgx-h100:boxes=2", "allreduce", 8, protocol=Protocol.LL)[0]
    assert ll.rate == Fraction(39) * 16 / 30


def test_a_part_of_a_cluster_is_not_taken_for_the_whole() -> None:
    fabric = topologies.load("dgx-a100:boxes=2", rates=Rates.NCCL)
    plan = nccl_plan(fabric, Collective.on(fabric, "allreduce", ranks=range(8)))
    assert "link-disjoint rings" in plan.source


def test_halves_of_four_boxes_are_not_two_boxes() -> None:
    """Both have 16 GPUs; two whole boxes of the four are planned as two boxes are."""
    four = [first + gpu for first in range(0, 32, 8) for gpu in range(4)]
    halves = topologies.load("dgx-a100:boxes=4", ranks=four)
    assert "link-disjoint rings" in nccl_plan(halves, Collective.on(halves, "allreduce")).source
    wholes = topologies.load("dgx-a100:boxes=4", ranks=[*range(8), *range(16, 24)])
    two = topologies.load("dgx-a100:boxes=2")
    assert nccl_plan(wholes, Collective.on(wholes, "allreduce")) == nccl_plan(
        two, Collective.on(two, "allreduce")
    )


def test_a_tree_needs_a_positive_rate() -> None:
    with pytest.raises(InputError, match="plan: tree rate must be positive, got 0"):
        NcclSetup(1, Fraction(1), tree_rate=Fraction(0))
