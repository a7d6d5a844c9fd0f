"""The least time: drawn, recomputed over all pairs of ranks by networkx, and below whatever is simulated."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.synth.alltoallv.block_planner import AlltoallvPlanner
from arborcast.synth.api import solve
from arborcast.synth.baselines import BASELINES
from arborcast.synth.bounds import bound
from arborcast.synth.bounds.time_limits import time_limit
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import CollectiveError, InfeasibleError
from arborcast.synth.methods import method_for
from arborcast.synth.request import Request
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.topology import Link, Topology
from tests.support import strategies

KINDS = [kind for kind in Kind if kind is not Kind.CUSTOM]
SIZES = (1 << 10, 1 << 16, 1 << 24)


def least_us(fabric: Topology, kind: str, size: int) -> Fraction:
    collective = Collective.on(fabric, kind)
    return time_limit(fabric, collective, bound(fabric, collective)).at(size)


@pytest.mark.parametrize(
    ("kind", "size", "time_us"),
    [
        ("broadcast", 8_000, 3 * 5 + 4),  # a chain 0-1-2-3 of 5 us and 2 GB/s: three hops, then 4 us of bytes
        ("reduce", 8_000, 3 * 5 + 4),
        ("allreduce", 8_000, 3 * 5 + 4),
        ("allgather", 8_000, 3 * 5 + 1),  # into an end, from three hops away: a quarter of the buffer
        ("allgather", 80_000, 5 + 30),  # three quarters of it behind one hop
        ("gather", 80_000, 5 + 30),
        ("reduce-scatter", 80_000, 5 + 30),
        ("scatter", 80_000, 5 + 30),
        ("alltoall", 800_000, 400),  # the middle link: two ranks send two quarters each over it
        ("allreduce", 8_000_000, 15 + 4_000),  # up on the links of one direction, down on the others
    ],
)
def test_a_chain_by_hand(kind: str, size: int, time_us: int) -> None:
    chain = topologies.load("mesh:1x4,bandwidth=2,latency=5")
    assert least_us(chain, kind, size) == time_us


def recomputed_us(fabric: Topology, collective: Collective, size: int) -> Fraction:
    """The rule of each kind over all pairs and all thresholds, without an envelope of lines."""
    graph = networkx.DiGraph()
    for link in fabric.links:
        graph.add_edge(link.src, link.dst, latency=link.latency_us, rate=link.bandwidth)
    far = dict(networkx.all_pairs_dijkstra_path_length(graph, weight="latency"))
    into = dict(graph.in_degree(weight="rate"))
    out = dict(graph.out_degree(weight="rate"))
    ranks, root, kind = collective.ranks, collective.root, collective.kind
    part = size * (
        Fraction(1) if kind in {Kind.BROADCAST, Kind.REDUCE, Kind.ALLREDUCE} else Fraction(1, len(ranks))
    )
    pairs = [(u, v) for u in ranks for v in ranks if u != v]
    if kind in {Kind.BROADCAST, Kind.SCATTER}:
        pairs = [(u, v) for u, v in pairs if u == root]
    if kind in {Kind.REDUCE, Kind.GATHER}:
        pairs = [(u, v) for u, v in pairs if v == root]
    times = [size / bound(fabric, collective).rate / 1000]
    for u, v in pairs:
        arriving = [far[w][v] for w, x in pairs if x == v]
        leaving = [far[u][x] for w, x in pairs if w == u]
        at_least = far[u][v]
        blocks_in = (
            sum(each >= at_least for each in arriving) if kind in {"allgather", "gather", "alltoall"} else 1
        )
        blocks_out = (
            sum(each >= at_least for each in leaving)
            if kind in {"reduce-scatter", "scatter", "alltoall"}
            else 1
        )
        times += [at_least + blocks_in * part / into[v] / 1000, at_least + blocks_out * part / out[u] / 1000]
    return max(times)


@st.composite
def fabrics(draw: st.DrawFn) -> Topology:
    """Up to 5 ranks and 2 switches, each link with a latency of its own."""
    fabric = draw(strategies.topologies(max_ranks=5, switches=2, symmetric=False, min_ranks=2))
    latencies = draw(st.lists(st.integers(0, 9), min_size=len(fabric.links), max_size=len(fabric.links)))
    links = [
        replace(link, latency_us=Fraction(us, 2)) for link, us in zip(fabric.links, latencies, strict=True)
    ]
    return Topology.build(fabric.name, fabric.ranks, links, fabric.switches)


@settings(max_examples=60)
@given(fabrics(), st.sampled_from(KINDS))
def test_over_all_pairs(fabric: Topology, kind: Kind) -> None:
    collective = Collective.on(fabric, kind, root=fabric.ranks - 1)
    limit = bound(fabric, collective)
    if limit.rate:
        for size in SIZES:
            assert time_limit(fabric, collective, limit).at(size) == recomputed_us(fabric, collective, size)


@settings(max_examples=40)
@given(fabrics(), st.sampled_from(KINDS))
def test_nothing_simulates_faster(fabric: Topology, kind: Kind) -> None:
    collective = Collective.on(fabric, kind)
    limit = bound(fabric, collective)
    found = []
    for method in ("auto", *BASELINES):
        with suppress(InfeasibleError, CollectiveError):
            found.append(method_for(method, fabric, collective)(fabric, collective, Request()))
    assert found or not limit.rate
    for schedule in found:
        for size in SIZES:
            least_us = float(time_limit(fabric, collective, limit).at(size))
            for pieces in (1, 7):
                assert simulate(schedule, size, pieces=pieces).time_us >= least_us * (1 - 1e-9)


def test_blocks_that_differ_by_hand() -> None:
    """A chain 0-1-2 of 1 and 500 us: what goes between 0 and 1 alone never waits for the far rank."""
    links = [(0, 1, 1), (1, 0, 1), (1, 2, 500), (2, 1, 500)]
    fabric = Topology.build("far", 3, [Link(a, b, Fraction(1), Fraction(us)) for a, b, us in links])
    near = Collective.alltoallv(fabric, [[0, 1000, 0], [1000, 0, 0], [0, 0, 0]])
    whole = near.mean_bytes  # 667, of which 666 2/3 are 2/3 of 1000 B
    assert time_limit(fabric, near, bound(fabric, near)).at(whole) == 1 + Fraction(whole * 3, 2000)
    far = Collective.alltoallv(fabric, [[0, 0, 600], [0, 0, 300], [0, 0, 0]])
    assert time_limit(fabric, far, bound(fabric, far)).at(300) == max(
        501 + Fraction(6, 10), 500 + Fraction(9, 10)
    )


@settings(max_examples=40)
@given(fabrics(), st.data())
def test_no_exchange_of_blocks_that_differ_simulates_faster(fabric: Topology, data: st.DataObject) -> None:
    row = st.lists(st.integers(0, 9), min_size=fabric.ranks, max_size=fabric.ranks)
    sizes = data.draw(st.lists(row, min_size=fabric.ranks, max_size=fabric.ranks))
    with suppress(InfeasibleError, CollectiveError):
        plan = AlltoallvPlanner(fabric).plan(sizes)
        schedule = plan.schedule()
        for size in SIZES:
            least_us = float(time_limit(fabric, plan.collective, plan.bound).at(size))
            assert simulate(schedule, size).time_us >= least_us * (1 - 1e-9)


def test_switches_that_add_and_copy_do_not_go_below_it() -> None:
    fabric = topologies.load("dgx-h100")
    collective = Collective.on(fabric, "allreduce")
    schedule = solve(fabric, collective)
    assert schedule.uses_switches
    for size in SIZES:
        assert simulate(schedule, size).time_us >= time_limit(fabric, collective, schedule.bound).at(size)
