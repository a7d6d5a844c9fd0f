"""Known machines are recognised from noisy measurements under another numbering, and others are not."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise, permutations, product
from random import Random

import pytest

from arborcast import topologies
from arborcast.backends.probe.likeness import likeness, of_catalog, resembling
from arborcast.backends.probe.measurements import Flow
from arborcast.synth.topology import Link, Topology
from tests.support.simulated_fabrics import Fabric, boxes, mesh, star

TOLERANCE = 0.25


def renumbered(fabric: Fabric, seed: int) -> tuple[Fabric, list[int]]:
    """The fabric as somebody else numbers it, and which of its ranks each of theirs is."""
    order = list(range(fabric.ranks))
    Random(seed).shuffle(order)
    other = Fabric(fabric.ranks, fabric.capacity)
    for first, second in permutations(range(fabric.ranks), 2):
        other.passes[first, second] = fabric.passes[order[first], order[second]]
    return other, order


def through(topology: Topology, slow: Fraction | int = 0) -> Fabric:
    """A fabric whose flows pass the shortest ways past no other rank; `slow` GB/s where there is none."""
    fabric = Fabric(topology.ranks)
    ways: dict[Flow, list[str]] = {}
    after: dict[int, list[int]] = {}
    for link in topology.links:
        after.setdefault(link.src, []).append(link.dst)
        fabric.capacity[f"{link.src}-{link.dst}"] = link.bandwidth
    for rank in range(topology.ranks):
        queue = [(rank,)]
        for way in queue:
            for vertex in after.get(way[-1], []):
                if vertex in way:
                    continue
                longer = (*way, vertex)
                if topology.is_switch(vertex):
                    queue.append(longer)
                else:
                    hops = [f"{a}-{b}" for a, b in pairwise(longer)]
                    ways.setdefault((rank, vertex), hops)
    for flow in permutations(range(topology.ranks), 2):
        if flow in ways:
            fabric.passes[flow] = ways[flow]
        else:
            fabric.share(f"slow {flow}", slow, [flow])
    return fabric


def socket_box(slot: int = 32, between: int = 10) -> Topology:
    """8 GPUs, two on each PCIe switch, two of those on each CPU; alone all of a socket are as near."""
    cables = [(rank, 10 + rank // 2, slot) for rank in range(8)]
    cables += [(10 + switch, 8 + switch // 2, slot) for switch in range(4)]
    cables.append((8, 9, between))
    links = [Link(*ends, Fraction(rate)) for a, b, rate in cables for ends in ((a, b), (b, a))]
    return Topology.build("sockets", 8, links, ["cpu0", "cpu1", "p0", "p1", "p2", "p3"])


@pytest.mark.parametrize(
    ("spec", "seed"),
    [
        ("dgx1", 0),
        pytest.param("dgx1", 1, marks=pytest.mark.long),
        pytest.param("dgx1", 2, marks=pytest.mark.long),
        ("torus:3x3", 3),
        pytest.param("mi250", 4, marks=pytest.mark.long),
    ],
)
def test_machines_of_the_catalog_are_recognised_under_any_numbering(spec: str, seed: int) -> None:
    machine = topologies.load(spec)
    slowest = min(link.bandwidth for link in machine.links)
    fabric, order = renumbered(through(machine, slowest / 3), seed)
    found = resembling(fabric.measured(noise=0.04, seed=seed), tolerance=TOLERANCE)
    assert found.found and found.best is not None
    assert spec in (found.best.name, *found.alike) and "ring:8" not in (found.best.name, *found.alike)
    best = likeness(fabric.measured(noise=0.04, seed=seed), machine, spec, TOLERANCE)
    assert best is not None and best.scale == pytest.approx(1, abs=0.05)
    # The numbering found maps links to links of the same rate; it need not be the one that was drawn.
    for one, other in fabric.passes:
        drawn, mapped = (order[one], order[other]), (best.ranks[one], best.ranks[other])
        assert machine.bandwidth.get(drawn) == machine.bandwidth.get(mapped)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_what_shares_a_switch_is_found_by_loads(seed: int) -> None:
    box = socket_box()
    fabric, order = renumbered(through(box), seed)
    found = resembling(fabric.measured(noise=0.03, seed=seed), {"box.xml": box}, tolerance=TOLERANCE)
    assert found.best is not None and (found.best.name, found.found) == ("box.xml", True)
    switches = ((0, 1), (2, 3), (4, 5), (6, 7))
    told = {frozenset(map(found.best.ranks.index, pair)) for pair in switches}
    assert told == {frozenset(map(order.index, pair)) for pair in switches}
    assert [(each.bandwidth, each.pairs) for each in found.best.classes] == [(32, 24), (10, 32)]
    assert all(each.deviation is not None and each.deviation < 0.1 for each in found.best.classes)


def test_a_factor_between_all_rates_is_told() -> None:
    flows = list(permutations(range(4), 2))
    found = resembling(mesh(dict.fromkeys(flows, 3), 4).measured(noise=0.02), tolerance=TOLERANCE)
    assert found.best is not None and found.found and found.best.classes[0].bandwidth is not None
    assert "full:4" in (found.best.name, *found.alike) and "star:4" not in (found.best.name, *found.alike)
    assert found.best.scale == pytest.approx(3 / found.best.classes[0].bandwidth, rel=0.03)


def test_loads_tell_a_star_from_a_mesh() -> None:
    measured = star([10] * 4, [10] * 4).measured(noise=0.02)
    near = likeness(measured, topologies.load("star:4"), "star:4", TOLERANCE)
    far = likeness(measured, topologies.load("full:4"), "full:4", TOLERANCE)
    assert near is not None and near.deviation < 0.1
    # All three flows out of a rank get a third of what links of their own would carry.
    assert far is not None and far.loaded == pytest.approx(2, abs=0.3)


def test_a_fabric_like_none() -> None:
    # Three unlike pairs of boxes: no machine of the catalog has rates of 1, 3, 9 and 27 like this.
    flows = list(permutations(range(5), 2))
    rates: dict[Flow, Fraction | int] = {flow: 3 ** ((flow[0] * 7 + flow[1] * 3) % 4) for flow in flows}
    found = resembling(mesh(rates, 5).measured(noise=0.02), tolerance=TOLERANCE)
    assert not found.found


def test_near_misses_are_told_with_their_deviation() -> None:
    # One link of a DGX-1 is a third slower than it should be.
    machine = topologies.load("dgx1")
    fabric = through(machine, 9)
    fabric.capacity["0-3"] = fabric.capacity["0-3"] * 2 / 3
    found = resembling(fabric.measured(noise=0), tolerance=TOLERANCE)
    assert found.best is not None and not found.found
    assert found.best.deviation == pytest.approx(0.5, abs=0.01)


def test_the_catalog_by_number_of_ranks() -> None:
    names = [name for name, _ in of_catalog(16)]
    assert {"dgx2", "dgx-a100:boxes=2", "mi250", "torus:4x4", "hypercube:4", "ring:16"} <= set(names)
    assert all(topology.ranks == 16 for _, topology in of_catalog(16))
    assert len(names) == len(set(names))


def test_boxes_are_told_from_their_uplinks() -> None:
    for groups, uplink in product(([[0, 1], [2, 3]], [[0, 2], [1, 3]]), (2, 10)):
        measured = boxes(groups, 25, uplink).measured(noise=0.02)
        links = [Link(*ends, Fraction(25)) for ends in ((0, 1), (1, 0), (2, 3), (3, 2))]
        links += [Link(rank, 4 + rank // 2, Fraction(uplink)) for rank in range(4)]
        links += [Link(4 + rank // 2, rank, Fraction(uplink)) for rank in range(4)]
        links += [Link(4, 5, Fraction(uplink)), Link(5, 4, Fraction(uplink))]
        drawn = Topology.build("drawn", 4, links, ["a", "b"])
        found = resembling(measured, {"drawn.yaml": drawn}, tolerance=TOLERANCE)
        assert found.best is not None and (found.best.name, found.found) == ("drawn.yaml", True)
        assert {found.best.ranks[rank] for rank in groups[0]} in ({0, 1}, {2, 3})
