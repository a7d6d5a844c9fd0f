"""Least times by flows through intervals: against all message patterns, against the simulator, and changed.

The exact optimum of the model in intervals is a linear program over all minimal sets of messages that do what
a collective asks, worked out here for graphs of 3 and 4 ranks by looking at all sets.
"""

from __future__ import annotations

import itertools
import random
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import networkx
import numpy as np
import pytest
from scipy.optimize import linprog

from arborcast import topologies
from arborcast.synth import read_schedule, solve, verify, write_schedule
from arborcast.synth.baselines import BASELINES
from arborcast.synth.bounds import bound
from arborcast.synth.bounds.layered_flows import best_tolls, least_time, why_no_tolls
from arborcast.synth.bounds.time_limits import time_limit
from arborcast.synth.certificate import Tolls
from arborcast.synth.certification.tolls import certified_bytes, check_tolls
from arborcast.synth.collective import Collective, Demand, Kind
from arborcast.synth.errors import CollectiveError, InfeasibleError, InputError
from arborcast.synth.methods import method_for
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Link, Switch, Topology
from tests.support.commands import Command

KINDS = [kind for kind in Kind if kind is not Kind.CUSTOM]
CONNECTED = [
    graph
    for graph in networkx.graph_atlas_g()
    if graph.number_of_nodes() in (3, 4) and networkx.is_connected(graph)
]

Pairs = list[tuple[int, int]]


def contents(kind: Kind, ranks: int) -> list[tuple[Pairs, Fraction]]:
    """What is sent apart from all else: who must hear from whom (the root is 0), and its share."""
    every = list(itertools.permutations(range(ranks), 2))
    from_root, to_root = ([pair for pair in every if pair[end] == 0] for end in (0, 1))
    by_source, by_target = ([[p for p in every if p[end] == v] for v in range(ranks)] for end in (0, 1))
    asked: dict[Kind, list[Pairs]] = {
        Kind.BROADCAST: [from_root],
        Kind.REDUCE: [to_root],
        Kind.ALLREDUCE: [every],
        Kind.ALLGATHER: by_source,
        Kind.REDUCE_SCATTER: by_target,
        Kind.GATHER: [[pair] for pair in to_root],
        Kind.SCATTER: [[pair] for pair in from_root],
        Kind.ALLTOALL: [[pair] for pair in every],
    }
    part = Fraction(1) if len(asked[kind]) == 1 else Fraction(1, ranks)
    return [(pairs, part) for pairs in asked[kind]]


def minimal_patterns(passages: list[tuple[int, int, int, int]], ranks: int, asked: Pairs) -> np.ndarray:
    """Rows: sets of (from, to, entered, arrived) of which none can be left out, for what is asked."""
    sets = np.arange(1 << len(passages))
    heard = {(v, 0): np.full(len(sets), 1 << v) for v in range(ranks)}
    for time in range(1 + max(arrived for *_, arrived in passages)):
        for v in range(ranks):
            heard[v, time] = heard[v, max(0, time - 1)] | heard.get((v, time), 0)
        for bit, (u, v, entered, arrived) in enumerate(passages):
            if entered == time:
                news = np.where(sets >> bit & 1, heard[u, time], 0)
                heard[v, arrived] = heard.get((v, arrived), 0) | news
    enough = np.ones(len(sets), dtype=bool)
    for u, v in asked:
        enough &= (heard[v, time] >> u & 1).astype(bool)
    minimal = enough.copy()
    for bit in range(len(passages)):
        minimal &= ~((sets >> bit & 1).astype(bool) & enough[sets & ~(1 << bit)])
    return np.array([sets[minimal] >> bit & 1 for bit in range(len(passages))]).T


def most_in_time(fabric: Topology, kind: Kind, intervals: int, bits: int) -> float | None:
    """The largest buffer in bytes, over all patterns; None where there are too many."""
    passages = [
        (link.src, link.dst, entered, entered + int(link.latency_us))
        for link in fabric.links
        for entered in range(intervals - int(link.latency_us))
    ]
    if not passages or len(passages) > bits:
        return None
    blocks = contents(kind, fabric.ranks)
    patterns = [minimal_patterns(passages, fabric.ranks, asked) for asked, _ in blocks]
    if not all(len(each) for each in patterns):
        return None
    owner = np.repeat(np.arange(len(blocks)), [len(each) for each in patterns])
    shares = np.array([float(share) for _, share in blocks])
    delivered = np.hstack([(owner == np.arange(len(blocks))[:, None]).astype(float), -shares[:, None]])
    used = np.hstack([np.vstack(patterns).T.astype(float), np.zeros((len(passages), 1))])
    cost = np.zeros(used.shape[1])
    cost[-1] = -1
    found = linprog(cost, used, np.ones(len(passages)), delivered, np.zeros(len(blocks)), method="highs")
    return float(-1000 * found.fun)


def with_latencies(graph: networkx.Graph, latencies: tuple[int, ...]) -> Topology:
    links = [
        Link(*ends, Fraction(1), Fraction(us))
        for (u, v), us in zip(graph.edges, latencies, strict=True)
        for ends in ((u, v), (v, u))
    ]
    return Topology.build("small", graph.number_of_nodes(), links)


def compared(bits: int, latencies: tuple[int, ...]) -> dict[Kind, list[float]]:
    """Proved over exact, by kind, on all graphs with all latencies and all numbers of intervals."""
    found: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
    for graph in CONNECTED:
        for chosen in itertools.product(latencies, repeat=graph.number_of_edges()):
            fabric = with_latencies(graph, chosen)
            for kind, intervals in itertools.product(KINDS, range(2, 7)):
                exact = most_in_time(fabric, kind, intervals, bits)
                if exact is not None:
                    collective = Collective.on(fabric, kind)
                    limit = bound(fabric, collective)
                    tolls = best_tolls(fabric, collective, limit, Fraction(1), intervals)
                    assert tolls is not None
                    check_tolls(fabric, collective, limit, tolls)
                    found[kind].append(float(tolls.bytes) / exact)
    return found


@pytest.mark.parametrize(
    ("bits", "cases", "loose"), [(10, 150, 0), pytest.param(16, 700, 14, marks=pytest.mark.long)]
)
def test_no_pattern_of_messages_delivers_more_and_the_best_nearly_always_as_much(
    bits: int, cases: int, loose: int
) -> None:
    found = compared(bits, (1, 2))
    every = [ratio for ratios in found.values() for ratio in ratios]
    assert all(found.values())
    assert len(every) >= cases
    assert min(every) >= 1 - 1e-9
    assert sum(ratio > 1 + 1e-4 for ratio in every) <= loose
    assert max(every) < 4 / 3


def drawn(chance: random.Random) -> Topology:
    """Up to 5 ranks and 2 switches, some of which add or copy, each link with its own rate and latency."""
    ranks, count = chance.randint(2, 5), chance.choice((0, 0, 1, 2))
    size = ranks + count
    order = chance.sample(range(size), size)
    ends = {*itertools.pairwise([*order, order[0]])}
    ends |= {tuple(chance.sample(range(size), 2)) for _ in range(chance.randint(0, 2 * size))}
    links = [
        Link(u, v, Fraction(chance.randint(1, 4)), Fraction(chance.randint(0, 6), 2)) for u, v in sorted(ends)
    ]
    ables = [(chance.random() < 0.3, chance.random() < 0.3) for _ in range(count)]
    ables.sort(key=any, reverse=True)  # able ones come first
    switches = [
        Switch(f"s{number}", reduces=adds, multicasts=copies) for number, (adds, copies) in enumerate(ables)
    ]
    return Topology.build("drawn", ranks, links, switches)


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.long)])
def test_nothing_simulates_faster(count: int) -> None:
    chance = random.Random(37)
    proved = 0
    for _ in range(count):
        fabric = drawn(chance)
        kind = chance.choice(KINDS)
        collective = Collective.on(fabric, kind, root=chance.randrange(fabric.ranks))
        limit = bound(fabric, collective)
        if not limit.rate or why_no_tolls(fabric, collective):
            continue
        size = 1 << chance.randint(8, 15)
        tolls = least_time(fabric, collective, limit, size)
        if tolls is None:
            continue
        check_tolls(fabric, collective, limit, tolls)
        least_us = float(tolls.at(size))
        assert least_us > float(time_limit(fabric, collective, limit).at(size))
        proved += 1
        for method in ("auto", *BASELINES):
            with suppress(InfeasibleError, CollectiveError):
                schedule = method_for(method, fabric, collective)(fabric, collective, SolveOptions())
                for pieces in (1, 7):
                    assert simulate(schedule, size, pieces=pieces).time_us >= least_us * (1 - 1e-9)
    assert proved >= count // 8


def proved(spec: str, kind: str) -> tuple[Topology, Collective, Tolls]:
    """Tolls that say more of 64 KiB than lines do."""
    fabric = topologies.load(spec)
    collective = Collective.on(fabric, kind)
    tolls = least_time(fabric, collective, bound(fabric, collective), 1 << 16)
    assert tolls is not None
    return fabric, collective, tolls


def test_symmetries_are_checked() -> None:
    fabric, collective, tolls = proved("dgx1", "alltoall")
    limit = bound(fabric, collective)
    for wrong in ((1, 2, 3, 4, 5, 6, 7, 0), (0, 0, 2, 3, 4, 5, 6, 7), (0, 1, 2)):
        with pytest.raises(InputError, match="symmetry"):
            check_tolls(fabric, collective, limit, replace(tolls, symmetries=(*tolls.symmetries, wrong)))
    alone = replace(tolls, symmetries=())
    assert certified_bytes(fabric, collective, limit.certificate, alone) > tolls.bytes


def test_what_has_no_tolls_says_why() -> None:
    fabric = topologies.load("dgx1")
    custom = Collective.custom(fabric, [Demand(frozenset({0}), frozenset({5}))])
    assert why_no_tolls(fabric, custom) == "blocks that differ have no limit by flows through intervals"
    at_once = Topology.build("at once", 2, [Link(0, 1, Fraction(1)), Link(1, 0, Fraction(1))])
    assert "latencies" in str(why_no_tolls(at_once, Collective.on(at_once, "allreduce")))


def test_times_travel_in_schedule_files(tmp_path: Path) -> None:
    fabric, collective, tolls = proved("dgx1", "reduce-scatter")
    found = solve(fabric, collective)
    schedule = replace(found, bound=replace(found.bound, times=(tolls,)))
    write_schedule(schedule, tmp_path / "timed.json")
    again = read_schedule(tmp_path / "timed.json")
    assert again == schedule
    assert verify(again).correct
    images = (3, 2, 1, 0, 7, 6, 5, 4)
    turned = topologies.load("dgx1").reordered(images)
    back = tuple(images.index(rank) for rank in range(8))
    moved = schedule.relabelled(turned, back, collective)
    assert verify(moved).correct
    assert moved.bound.times != schedule.bound.times
    assert time_limit(fabric, collective, schedule.bound).at(1 << 16) == tolls.at(1 << 16)
    lie = replace(tolls, bytes=tolls.bytes / 2)
    wrong = replace(schedule, bound=replace(schedule.bound, times=(lie,)))
    assert any("tolls: prove" in error for error in verify(wrong).errors)


def test_commands_say_the_least_time(command: Command, tmp_path: Path) -> None:
    said = command("bound", "dgx-a100", "allreduce", "--size", "64KiB").out
    assert "at       64 KiB: every schedule takes at least 1.5 us" in said
    assert "tolls on" in said
    plain = command("bound", "ring:4", "allreduce", "--size", "64KiB").out
    assert "(without latencies there are no intervals)" in plain
    file = tmp_path / "found.json"
    found = command("solve", "dgx-a100", "broadcast", "--size", "64KiB", "--prove-time", "-o", str(file)).out
    assert "every schedule takes at least 1.5 us" in found
    assert read_schedule(file).bound.times
    refused = command("solve", "dgx1", "broadcast", "--prove-time").err
    assert refused == "synth: --prove-time: needs --size, of which the time is\n"
