"""Meshes and what collectives cost on their axes: groups as drawn, rates by hand, schedules no faster."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.meshes import Mesh, meshes
from arborcast.pipeline.sharding.fabric_prices import FabricPrices
from arborcast.synth.collective import Kind
from arborcast.synth.topology import Link, Topology


def two_boxes() -> Topology:
    """Ranks 0 1 and 2 3, 8 GB/s within a pair, 1 GB/s between 0 and 2, 1 and 3."""
    pairs = {(0, 1): 8, (2, 3): 8, (0, 2): 1, (1, 3): 1}
    links = [
        Link(a, b, Fraction(rate), Fraction(0)) for (x, y), rate in pairs.items() for a, b in ((x, y), (y, x))
    ]
    return Topology.build("two boxes", 4, links)


def test_groups_as_drawn():
    mesh = Mesh((2, 3), (4, 5, 6, 7, 8, 9))  # 4 5 6 above 7 8 9
    assert mesh.groups((0,)) == ((0, 3), (1, 4), (2, 5))
    assert mesh.groups((1,)) == ((0, 1, 2), (3, 4, 5))
    assert mesh.groups((0, 1)) == ((0, 1, 2, 3, 4, 5),)
    assert [str(it) for it in meshes(range(12))] == ["12", "2x6", "3x4", "4x3", "6x2"]
    assert [str(it) for it in meshes([3])] == ["1"]
    with pytest.raises(PlanError, match="mesh 2x3: axes must be at least 2 long and hold 4 ranks"):
        Mesh((2, 3), (0, 1, 2, 3))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_ascending_meshes_have_the_same_groups(data):
    shape = data.draw(st.sampled_from([(), (4,), (2, 2), (2, 3), (3, 2)]))
    mesh = Mesh(shape, tuple(data.draw(st.permutations(range(math.prod(shape))))))

    def ranks(it: Mesh, axis: int) -> list[list[int]]:
        return [[it.ranks[place] for place in group] for group in it.groups((axis,))]

    # each order of the places on each axis
    ascend = set()
    places = dict(zip(product(*map(range, shape)), mesh.ranks, strict=True))
    for names in product(*(permutations(range(size)) for size in shape)):
        renamed = [
            places[tuple(name[it] for name, it in zip(names, at, strict=True))]
            for at in product(*map(range, shape))
        ]
        other = Mesh(shape, tuple(renamed))
        if all(line == sorted(line) for axis in range(len(shape)) for line in ranks(other, axis)):
            ascend.add(other)
    if not ascend:
        with pytest.raises(PlanError, match="in which ranks ascend along every axis, got"):
            mesh.ascending()
        return
    assert ascend == {mesh.ascending()}
    for axis in range(len(shape)):
        assert sorted(map(sorted, ranks(mesh, axis))) == sorted(ranks(mesh.ascending(), axis))


def test_axes_have_the_rates_of_their_links():
    prices = FabricPrices(two_boxes(), Mesh((2, 2), (0, 1, 2, 3)))
    # Two ranks with rate r each way: half of an allreduced or gathered buffer goes each way, at r.
    assert prices.rate(Kind.ALLREDUCE, (1,)) == 8
    assert prices.rate(Kind.ALLREDUCE, (0,)) == 1
    assert prices.rate(Kind.ALLGATHER, (1,)) == prices.rate(Kind.ALLTOALL, (1,)) == 16
    # The whole mesh: a half of the buffer leaves each box over 2 GB/s.
    assert prices.rate(Kind.ALLGATHER, (0, 1)) == 4
    assert prices.ps(Kind.ALLREDUCE, (0,), 1000) == 1_000_000  # 1000 bytes at 1 GB/s
    assert (
        FabricPrices(two_boxes(), prices.mesh, collective_us=Fraction(3)).ps(Kind.ALLREDUCE, (0,), 1000)
        == 4_000_000
    )


def test_groups_of_an_axis_share_links():
    star = topologies.load("star:4")
    alone = FabricPrices(star, Mesh((2,), (0, 1))).rate(Kind.ALLTOALL, (0,))
    both = FabricPrices(star, Mesh((2, 2), (0, 1, 2, 3)))
    assert both.rate(Kind.ALLTOALL, (0,)) == alone  # a switch with full rate for each port
    # 0 1 on a switch, 2 3 on another, 1 GB/s between them: both groups of axis 0 cross that
    ends = [(0, 4, 8), (1, 4, 8), (2, 5, 8), (3, 5, 8), (4, 5, 1)]
    links = [Link(a, b, Fraction(rate), Fraction(0)) for x, y, rate in ends for a, b in ((x, y), (y, x))]
    pair = Topology.build("two switches", 4, links, switches=["a", "b"])
    prices = FabricPrices(pair, Mesh((2, 2), (0, 1, 2, 3)))
    assert prices.rate(Kind.ALLREDUCE, (0,)) == Fraction(1, 2)
    assert prices.rate(Kind.ALLTOALL, (0,)) == 1
    assert prices.rate(Kind.ALLREDUCE, (1,)) == 8
    # On a line 0 - 1 - 2 - 3 nothing leads from 0 to 2 without rank 1, which is in the other group.
    line = Topology.build(
        "line",
        4,
        [Link(a, b, Fraction(1), Fraction(0)) for x in range(3) for a, b in ((x, x + 1), (x + 1, x))],
    )
    prices = FabricPrices(line, Mesh((2, 2), (0, 1, 2, 3)))
    assert prices.rate(Kind.ALLREDUCE, (0,)) == 0
    assert prices.ps(Kind.ALLREDUCE, (0,), 8) is None
    assert prices.rate(Kind.ALLREDUCE, (1,)) == 1


def test_schedules_take_no_less_than_their_rates():
    fabric = topologies.load("ring:4,latency=2")
    for shape in ((4,), (2, 2)):
        mesh = Mesh(shape, (0, 1, 2, 3))
        fast, real = FabricPrices(fabric, mesh), FabricPrices(fabric, mesh, by_schedule=True)
        for kind in (Kind.ALLREDUCE, Kind.ALLTOALL):
            times = [real.ps(kind, (len(shape) - 1,), size) for size in (1 << 20, 3 << 19, 1 << 21)]
            least = [fast.ps(kind, (len(shape) - 1,), size) for size in (1 << 20, 3 << 19, 1 << 21)]
            assert all(
                a is not None and b is not None and a >= b + 2_000_000
                for a, b in zip(times, least, strict=True)
            )
            assert abs(times[1] - (times[0] + times[2]) // 2) <= 1  # type: ignore[operator]
