"""The least time: drawn, recomputed over all pairs of ranks by networkx, and below whatever is simulated."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import networkx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.synth.alltoallv.block_planner import AlltoallvPlanner
from arborcast.synth.api import solve
from arborcast.synth.baselines import BASELINES
from arborcast.synth.bounds import bound
from arborcast.synth.bounds.time_limits import time_limit
from arborcast.synth.certificate import Cut, Dual, Partition
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import CollectiveError, InfeasibleError
from arborcast.synth.methods import method_for
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Topology
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
        # The middle link: two ranks send two quarters each over it, and none is there in the last 5 us.
        ("alltoall", 800_000, 5 + 400),
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
    pairs = [(u, v) for u in ranks for v in ranks if u != v]
    if kind in {Kind.BROADCAST, Kind.SCATTER}:
        pairs = [(u, v) for u, v in pairs if u == root]
    if kind in {Kind.REDUCE, Kind.GATHER}:
        pairs = [(u, v) for u, v in pairs if v == root]
    whole = Fraction(size) if kind in {Kind.BROADCAST, Kind.REDUCE, Kind.ALLREDUCE} else None
    part = dict.fromkeys(pairs, Fraction(size, len(ranks)))
    if collective.sizes:
        part = {
            (u, v): Fraction(size * len(ranks) * collective.sizes[u][v], collective.total) for u, v in pairs
        }
    times = [window_us(fabric, collective, far, size)]
    for (u, v), own in part.items():
        if own:
            coming = sum(part[w, x] for w, x in pairs if x == v and far[w][v] >= far[u][v])
            going = sum(part[w, x] for w, x in pairs if w == u and far[u][x] >= far[u][v])
            bytes_in = coming if kind in {"allgather", "gather", "alltoall"} else whole or own
            bytes_out = going if kind in {"reduce-scatter", "scatter", "alltoall"} else whole or own
            times += [far[u][v] + bytes_in / into[v] / 1000, far[u][v] + bytes_out / out[u] / 1000]
    return max(times)


def window_us(fabric: Topology, collective: Collective, far: Any, size: int) -> Fraction:
    """When the lengths of the rate's certificate are paid for, each link added as its window begins."""
    found = bound(fabric, collective).certificate
    everyone = set(collective.ranks)
    sources = {collective.root} if collective.kind in {Kind.BROADCAST, Kind.SCATTER} else everyone
    targets = {collective.root} if collective.kind in {Kind.REDUCE, Kind.GATHER} else everyone
    if collective.root in sources and len(sources) == 1:
        targets = everyone - sources
    if collective.root in targets and len(targets) == 1:
        sources = everyone - targets
    links = list(fabric.links)
    match found:
        case Cut(side, capacity):
            lengths = [int(link.src in side and link.dst not in side) for link in links]
            sources, targets = sources & side, targets - side
        case Partition(blocks, capacity):
            lengths = [int(not any({link.src, link.dst} <= block for block in blocks)) for link in links]
            capacity *= 2
        case Dual(lengths, capacity, _):
            pass
    starts = {
        link: min(far[rank].get(link.src, 10**9) for rank in sources)
        + link.latency_us
        + min(far[link.dst].get(rank, 10**9) for rank in targets)
        for link in links
    }
    left = size * capacity / bound(fabric, collective).rate
    now, rate = Fraction(0), Fraction(0)
    for link, length in sorted(zip(links, lengths, strict=True), key=lambda pair: starts[pair[0]]):
        if length:
            if rate and now + left / rate <= starts[link]:
                break
            left -= (starts[link] - now) * rate
            now, rate = starts[link], rate + 1000 * length * link.bandwidth
    return now + left / rate


@st.composite
def fabrics(draw: st.DrawFn) -> Topology:
    """Up to 5 ranks and 2 switches, each link with a latency of its own."""
    fabric = draw(strategies.topologies(max_ranks=5, switches=2, symmetric=False, min_ranks=2))
    latencies = draw(st.lists(st.integers(0, 9), min_size=len(fabric.links), max_size=len(fabric.links)))
    links = [
        replace(link, latency_us=Fraction(us, 2)) for link, us in zip(fabric.links, latencies, strict=True)
    ]
    return Topology.build(fabric.name, fabric.ranks, links, fabric.switches)


def sizes_on(fabric: Topology) -> st.SearchStrategy[list[list[int]]]:
    row = st.lists(st.integers(0, 9), min_size=fabric.ranks, max_size=fabric.ranks)
    return st.lists(row, min_size=fabric.ranks, max_size=fabric.ranks)


@settings(max_examples=90)
@given(fabrics(), st.sampled_from([*KINDS, *[None] * 5]), st.data())
def test_over_all_pairs(fabric: Topology, kind: Kind | None, data: st.DataObject) -> None:
    """And each line is the highest at some size: the longer it waits, the slower it rises."""
    if kind:
        collective = Collective.on(fabric, kind, root=fabric.ranks - 1)
    else:
        sizes = data.draw(sizes_on(fabric))
        assume(any(size for at, row in enumerate(sizes) for to, size in enumerate(row) if at != to))
        collective = Collective.alltoallv(fabric, sizes)
    limit = bound(fabric, collective)
    if limit.rate:
        found = time_limit(fabric, collective, limit)
        for size in SIZES:
            assert found.at(size) == recomputed_us(fabric, collective, size)
        for line, later in pairwise(found.lines):
            assert line.latency_us > later.latency_us and line.us_per_byte < later.us_per_byte


@settings(max_examples=40)
@given(fabrics(), st.sampled_from(KINDS))
def test_nothing_simulates_faster(fabric: Topology, kind: Kind) -> None:
    collective = Collective.on(fabric, kind)
    limit = bound(fabric, collective)
    found = []
    for method in ("auto", *BASELINES):
        with suppress(InfeasibleError, CollectiveError):
            found.append(method_for(method, fabric, collective)(fabric, collective, SolveOptions()))
    assert found or not limit.rate
    for schedule in found:
        for size in SIZES:
            least_us = float(time_limit(fabric, collective, limit).at(size))
            for pieces in (1, 7):
                assert simulate(schedule, size, pieces=pieces).time_us >= least_us * (1 - 1e-9)


@settings(max_examples=40)
@given(fabrics(), st.data())
def test_no_exchange_of_blocks_that_differ_simulates_faster(fabric: Topology, data: st.DataObject) -> None:
    sizes = data.draw(sizes_on(fabric))
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
