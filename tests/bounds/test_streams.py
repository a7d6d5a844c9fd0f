"""Limits and schedules where ranks have streams: against brute force, closed forms and what others said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import permutations, product
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from arborcast import synth
from arborcast.synth.bounds.layered_flows import with_least_time
from arborcast.synth.bounds.time_limits import time_limit
from arborcast.synth.collective import Collective
from arborcast.synth.errors import InfeasibleError, InputError
from arborcast.synth.formats.any_schedule import any_schedule_from_document
from arborcast.synth.formats.schedules import schedule_to_document
from arborcast.synth.ports import Ports
from arborcast.synth.schedule import Schedule
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.topology import Hop, Link, Switch, Topology
from arborcast.topologies import load
from tests.support.strategies import topologies


def streaming(topology: Topology, *limits: int | None) -> Topology:
    """The topology with streams: one number for all ranks, or one for each."""
    if len(limits) == 1:
        return replace(topology, streams=limits * topology.ranks)
    return replace(topology, streams=limits, symmetries=())


@st.composite
def limited(draw: st.DrawFn, max_ranks: int = 5, switches: int = 2, symmetric: bool = True) -> Topology:
    topology = draw(topologies(max_ranks=max_ranks, switches=switches, symmetric=symmetric))
    streams = draw(
        st.lists(st.sampled_from([1, 1, 2, None]), min_size=topology.ranks, max_size=topology.ranks)
    )
    waits = [Fraction(draw(st.integers(0, 3))) for _ in topology.links]
    links = tuple(replace(link, latency_us=wait) for link, wait in zip(topology.links, waits, strict=True))
    return replace(topology, links=links, streams=tuple(streams))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["allgather", "reduce-scatter", "alltoall", "gather"])
def test_a_full_mesh_is_limited_by_the_streams_of_a_rank(kind: str, count: int) -> None:
    """4/5 of the buffer pass the links that a rank may use at once."""
    mesh = streaming(load("full:5,bandwidth=3"), count)
    limit = synth.bound(mesh, kind)
    assert limit.rate == Fraction(5, 4) * 3 * count
    assert (limit.rate == synth.bound(replace(mesh, streams=()), kind).rate) == (count == 4)


def arborescences(topology: Topology, root: int) -> Iterator[list[Hop]]:
    """All spanning trees out of a rank of a topology without switches."""
    others = [rank for rank in range(topology.ranks) if rank != root]
    for parents in product(*([link.src for link in topology.links if link.dst == rank] for rank in others)):
        tree = list(zip(parents, others, strict=True))
        if nx.is_arborescence(nx.DiGraph(tree)):
            yield tree


def best_broadcast(topology: Topology, root: int) -> float:
    """The best rate of fractions of all trees, where no rank sends or gets more than streams allow."""
    trees = list(arborescences(topology, root))
    ends = [(rank, end) for rank in range(topology.ranks) for end in (0, 1)]
    rows = np.zeros((len(topology.links) + len(ends), len(trees)))
    most = [float(link.bandwidth) for link in topology.links]
    most += [np.inf if topology.streams[rank] is None else float(topology.streams[rank]) for rank, _ in ends]
    place = {(link.src, link.dst): index for index, link in enumerate(topology.links)}
    for column, tree in enumerate(trees):
        for hop in tree:
            rows[place[hop], column] += 1
            for end in (0, 1):
                rows[len(topology.links) + ends.index((hop[end], end)), column] += 1 / most[place[hop]]
    kept = np.isfinite(most)
    found = linprog(-np.ones(len(trees)), A_ub=rows[kept], b_ub=np.array(most)[kept])
    return float(-found.fun)


@pytest.mark.few(25)
@settings(max_examples=80, deadline=None)
@given(limited(max_ranks=4, switches=0, symmetric=False), st.booleans())
def test_no_packing_is_faster_and_alike_links_reach_the_limit(topology: Topology, alike: bool) -> None:
    if alike:
        links = tuple(replace(link, bandwidth=Fraction(2)) for link in topology.links)
        topology = replace(topology, links=links)
    topology = replace(topology, streams=topology.streams or (1,) * topology.ranks)
    limit = synth.bound(topology, "broadcast", root=1)
    best = best_broadcast(topology, 1)
    assert best <= float(limit.rate) * (1 + 1e-9)
    if alike:
        assert best == pytest.approx(float(limit.rate))
        assert synth.solve(topology, "broadcast", root=1, method="trees").is_optimal


@pytest.mark.few(25)
@settings(max_examples=100, deadline=None)
@given(limited(), st.sampled_from(["allreduce", "allgather", "reduce", "alltoall", "scatter"]), st.data())
def test_schedules_are_right_and_above_all_limits(topology: Topology, kind: str, data: st.DataObject) -> None:
    """Beside limits of time; through a file; and no limit is above that of as many streams as links."""
    method = data.draw(st.sampled_from(["auto", "ring", "binary-tree", "mwu"]))
    try:
        schedule = synth.solve(topology, kind, method=method)
    except (InfeasibleError, InputError):
        return
    assert schedule.bound.rate <= synth.bound(replace(topology, streams=()), kind).rate
    assert synth.verify(schedule).correct
    size = data.draw(st.integers(1, 1 << 22))
    timed = schedule
    if any(link.latency_us for link in topology.links):
        limit = with_least_time(topology, schedule.collective, schedule.bound, size)
        timed = replace(schedule, bound=limit)
    read = any_schedule_from_document(schedule_to_document(timed), "file")
    assert read == timed
    assert synth.verify(read).correct
    least = time_limit(topology, timed.collective, timed.bound).at(size)
    assert simulate(timed, size).time_us * (1 + 1e-9) >= float(least)


def test_a_limit_moves_with_its_ports() -> None:
    """Ranks turned round by one, of which some have one stream."""
    ring = streaming(load("full:4,bandwidth=3"), 1, 2, None, 1)
    turned = streaming(load("full:4,bandwidth=3"), 1, 1, 2, None)
    schedule = synth.solve(ring, "allgather", method="trees")
    moved = schedule.relabelled(turned, [1, 2, 3, 0], Collective.on(turned, "allgather"))
    assert synth.verify(moved).correct
    assert moved.rate == schedule.rate


def test_a_rate_that_streams_do_not_allow_is_objected_to() -> None:
    mesh = load("full:4,bandwidth=3")
    fast = synth.solve(mesh, "allgather", method="trees")
    slow = streaming(mesh, 1)
    wrong = replace(fast, topology=slow, bound=synth.bound(slow, "allgather"))
    verdict = synth.verify(wrong)
    assert verdict.rate < fast.rate
    assert any("streams that it has" in error for error in verdict.errors)
    assert synth.verify(wrong.rated()).correct


def test_a_repair_solves_anew() -> None:
    mesh = streaming(load("full:4,bandwidth=3"), 1)
    mended = synth.repair(synth.solve(mesh, "allgather", form="explicit"), without_links=[(0, 1)])
    assert mended.topology.streams == (1,) * 4
    assert synth.verify(mended).correct
    assert ("repaired", "solved anew: its ranks have streams") in mended.method.settings


def lifted_from_ports(schedule: Schedule, topology: Topology, **changes: Any) -> Schedule:
    """A schedule as its ports would have it, changed, and as one of the topology with streams."""
    ports = Ports.of(topology)
    moves = []
    for move in changes.pop("transfers", schedule.transfers):
        ends = ports.out.get(move.src), ports.into.get(move.dst)
        moves.append(replace(move, via=tuple(it for it in ends if it is not None)))
    bound = synth.bound(topology, schedule.collective)
    return ports.lift(replace(schedule, topology=ports.fabric, transfers=moves, bound=bound, **changes))


def test_rounds_are_as_many_as_streams_need() -> None:
    """Three messages of a rank at a time are one round over three links, three over one stream."""
    mesh = load("full:4")
    one = synth.solve(mesh, "allgather", method="ilp", chunks=1, steps=1, rounds=1)
    lifted = lifted_from_ports(one, streaming(mesh, 1))
    assert (one.rounds, lifted.rounds) == ((1,), (3,))
    assert synth.verify(lifted).correct
    assert lifted_from_ports(one, streaming(mesh, 1, 2, None, None)).rounds == (3,)
    # Rounds of twice the bytes of a link's rate take two rounds of that rate each.
    assert lifted_from_ports(one, streaming(mesh, 1), unit=2 * mesh.bandwidth_unit).rounds == (6,)
    few = replace(lifted, rounds=(2,)).rated()
    assert any("needs 3 rounds to send over 1 streams, got 2" in error for error in synth.verify(few).errors)


def test_steps_in_which_nobody_with_streams_takes_part_stay() -> None:
    mesh = load("full:4")
    one = synth.solve(mesh, "broadcast", root=1, method="ilp", chunks=1, steps=1, rounds=1)
    moves = [replace(move, step=int(move.dst == 0)) for move in one.transfers]
    changes: dict[str, Any] = {"transfers": moves, "rounds": (1, 1), "unit": 2 * mesh.bandwidth_unit}
    assert lifted_from_ports(one, streaming(mesh, 1, None, None, None), **changes).rounds == (1, 2)


def test_streams_for_all_links_are_no_port() -> None:
    mesh = load("full:4")
    assert Ports.of(streaming(mesh, 3)).fabric == mesh
    assert len(Ports.of(streaming(mesh, 2)).fabric.switches) == 8


def test_names_of_ports_are_nobodys() -> None:
    links = [Link(a, b, Fraction(1)) for a, b in permutations(range(4), 2)]
    fabric = Topology.build("named", 3, links, [Switch("0 sends")], streams=(1, None, 1))
    named = [switch.name for switch in Ports.of(fabric).fabric.switches]
    assert named == ["0 sends", "0 sends-", "2 sends", "0 receives", "2 receives"]
