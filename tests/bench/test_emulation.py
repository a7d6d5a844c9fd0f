"""Emulated links: what is planned, what the machine makes of it, and that nothing is ever left of it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from fractions import Fraction
from itertools import pairwise, permutations
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.bench.emulation import machine, network
from arborcast.bench.emulation.delivery import _batches, check_delivery, delivered
from arborcast.bench.emulation.machine import EmulationError, new_namespace, why_not
from arborcast.bench.emulation.plan import RETURN_SHARE, at_rates, plan_emulation
from arborcast.bench.emulation.processes import run_inside
from arborcast.synth.api import solve
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Link, Topology
from tests.support import emulated_ranks
from tests.support.strategies import topologies as drawn_topologies

WHY_NOT = why_not()
needs_root = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
HOME = Path(__file__).resolve().parents[2]

# ------------------------------------------------------------------------------------------- the plan


@given(st.one_of(drawn_topologies(), drawn_topologies(symmetric=False)), st.integers(1, 500))
def test_every_link_is_a_wire_at_its_rate(topology: Topology, mbit: int) -> None:
    plan = plan_emulation(topology, mbit)
    rates = {(src, dst): Fraction(plan.rate(src, dst)) for src, dst in topology.bandwidth}
    slowest = min(topology.bandwidth.values())
    for link, bandwidth in topology.bandwidth.items():
        assert 0 <= bandwidth / slowest * mbit * 10**6 - rates[link] < 1
    assert sorted(wire.ends for wire in plan.wires) == sorted({tuple(sorted(link)) for link in rates})
    for wire in plan.wires:
        ends = wire.ends
        assert wire.links == (ends in rates, ends[::-1] in rates)
        for direction, is_link in zip((ends, ends[::-1]), wire.links, strict=True):
            if not is_link:  # for acknowledgements only
                assert plan.rate(*direction) == int(rates[direction[::-1]] * RETURN_SHARE) or (
                    abs(plan.rate(*direction) - rates[direction[::-1]] * RETURN_SHARE) < 1
                )


@given(st.one_of(drawn_topologies(), drawn_topologies(symmetric=False)))
def test_packets_take_the_way_with_the_fewest_ranks_on_it(topology: Topology) -> None:
    """Dijkstra of networkx on weights that are digits of one number: ghosts, ranks on the way, links."""
    plan = plan_emulation(topology, 10)
    size = topology.size
    graph: nx.DiGraph = nx.DiGraph()
    for src, dst in topology.bandwidth:
        graph.add_edge(src, dst, ghost=0)
    for src, dst in topology.bandwidth:
        if (dst, src) not in topology.bandwidth:
            graph.add_edge(dst, src, ghost=1)

    def cost(path: tuple[int, ...]) -> int:
        ghosts = sum(graph.edges[hop]["ghost"] for hop in pairwise(path))
        relays = sum(vertex < topology.ranks for vertex in path[1:-1])
        return (ghosts * size + relays) * size + len(path)

    for src, dst in permutations(range(size), 2):
        path = plan.path(src, dst)
        assert (path[0], path[-1]) == (src, dst)
        assert len(set(path)) == len(path), "a loop"
        assert all((hop in plan.wire_of) for hop in pairwise(path))
        if size <= 5:
            assert cost(path) == min(map(cost, nx.all_simple_paths(graph, src, dst)))


def test_routes_prefer_switches_to_ranks_and_wide_links_to_narrow_ones() -> None:
    links = [(0, 1, 9), (1, 2, 9), (0, 3, 1), (3, 4, 1), (4, 2, 1)]  # 3 and 4 are switches
    both = [Link(a, b, Fraction(w)) for u, v, w in links for a, b in ((u, v), (v, u))]
    plan = plan_emulation(Topology.build("detour", 3, both, ["s", "t"]), 10)
    assert plan.path(0, 2) == (0, 3, 4, 2)
    assert plan.path(0, 1) == (0, 1)
    links = [(0, 2, 1), (2, 1, 1), (0, 3, 1), (3, 1, 1), (0, 4, 2), (4, 1, 2)]
    both = [Link(a, b, Fraction(w)) for u, v, w in links for a, b in ((u, v), (v, u))]
    plan = plan_emulation(Topology.build("three ways", 2, both, ["s", "t", "wide"]), 10)
    assert plan.path(0, 1) == (0, 4, 1)


def test_ways_that_addresses_cannot_tell_apart_are_said() -> None:
    """Between two ranks of a host there is a cable and a switch, and the schedule uses both."""
    both = [
        Link(a, b, Fraction(w)) for u, v, w in [(0, 1, 2), (0, 2, 1), (1, 2, 1)] for a, b in ((u, v), (v, u))
    ]
    fabric = Topology.build("cable and switch", 2, both, ["sw"])
    plan = plan_emulation(fabric, 10)
    strays = plan.strays(solve(fabric, "broadcast", method="trees"))
    assert strays == ("0 -> 1 goes by (0, 1), not by (0, 2, 1)",)
    assert (
        plan_emulation(topologies.load("dgx1"), 10).strays(solve(topologies.load("dgx1"), "allreduce")) == ()
    )


@given(drawn_topologies(), st.integers(1, 500))
def test_a_topology_at_rates_is_what_its_wires_have(topology: Topology, mbit: int) -> None:
    rated = at_rates(topology, mbit)
    plan = plan_emulation(topology, mbit)
    for link, bandwidth in rated.bandwidth.items():
        assert 0 <= bandwidth * 8 * 10**9 - plan.rate(*link) < 1
    assert plan_emulation(rated, mbit).wires == plan.wires
    assert len(rated.symmetries) == len(topology.symmetries)


@pytest.mark.parametrize(
    ("topology", "mbit", "message"),
    [
        (topologies.load("ring:65"), 10, "ring:65: at most 64 ranks and switches can be had, got 65"),
        (Topology.build("alone", 1, []), 10, "alone: must have links to be emulated, and has none"),
        (topologies.load("full:3"), 0, "rate 0: must be a positive number of Mbit/s"),
        (
            topologies.load(str(HOME / "topologies/examples/two-pairs.yaml")),
            10,
            "two-pairs: rank 2 has no way to rank 0",
        ),
    ],
)
def test_what_cannot_be_planned(topology: Topology, mbit: int, message: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        plan_emulation(topology, mbit)


# ---------------------------------------------------------------------------- what is not there, and said


def test_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(
        InputError, match=r"^links can be emulated by root only \(network namespaces\): run as root$"
    ):
        machine.check_machine()


def test_who_lacks_iproute2_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(InputError, match=r"iproute2 only, and there is no command tc: install iproute2$"):
        machine.check_machine()


@needs_root
def test_a_kernel_without_the_queue_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_TRIAL", {"tc": "qdisc add dev lo root nosuchqueue"})
    with pytest.raises(InputError, match=r"^links cannot be emulated here: tc: Error"):
        machine.check_machine()


# ------------------------------------------------------------------------------------------ delivery


def test_a_link_that_is_too_slow_is_named_with_both_figures() -> None:
    plan = plan_emulation(topologies.load("star:3"), 100)
    alone = dict.fromkeys(plan.topology.bandwidth, 99e6)
    heard: list[str] = []
    check_delivery(plan, {"alone": alone, "together": alone}, heard.append)
    assert not heard
    check_delivery(plan, {"alone": alone, "together": alone | {(3, 1): 80e6}}, heard.append)
    assert heard == [
        "warning: star:3: link switch -> 1 delivers 80 Mbit/s when all links are busy, less than 0.9 of its "
        "99 Mbit/s alone: the processors, not the links, may be the limit"
    ]
    slow = alone | {(0, 3): 89e6, (3, 1): 70e6}
    expected = (
        "star:3: link switch -> 1 delivers 70 Mbit/s alone, which must be at least 0.9 of its 100 Mbit/s"
    )
    with pytest.raises(EmulationError, match=f"^{expected}"):
        check_delivery(plan, {"alone": slow, "together": slow}, heard.append)


@given(drawn_topologies(symmetric=False), st.integers(1, 400))
def test_links_measured_side_by_side_share_no_wire(topology: Topology, mbit: int) -> None:
    plan = plan_emulation(topology, mbit)
    links = list(topology.bandwidth)
    batches = _batches(plan, links)
    assert sorted(link for batch in batches for link in batch) == sorted(links)
    for batch in batches:
        wires = {plan.wire_of[link] for link in batch}
        assert len(wires) == len(batch)
        assert len(batch) == 1 or sum(plan.rate(*link) for link in batch) <= 1e9


@needs_root
def test_links_are_as_slow_as_they_were_set_to() -> None:
    """One-way links and unequal ones among them; ways back of one-way links are no links."""
    fabric = topologies.load(str(HOME / "topologies/examples/one-way.yaml"))
    plan = plan_emulation(fabric, 5)
    with network.emulate(plan) as emulation:
        found = delivered(emulation, seconds=0.05, settle_s=0.05, passes=1)
    for rates in found.values():
        assert rates.keys() == fabric.bandwidth.keys()
        for link, rate in rates.items():
            assert 0 < rate < 2 * plan.rate(*link)  # a pair without a limit carries a thousand times as much


# ------------------------------------------------------------------------------------------ processes


@needs_root
def test_each_rank_is_a_process_in_a_namespace_of_its_own() -> None:
    plan = plan_emulation(topologies.load("star:3"), 10)
    with network.emulate(plan) as emulation:
        found = run_inside(emulation, emulated_ranks.where)
    assert [rank for rank, *_ in found] == [0, 1, 2]
    assert [address for _, address, *_ in found] == ["10.99.0.1", "10.99.0.2", "10.99.0.3"]
    namespaces = {namespace for _, _, namespace, _ in found}
    assert len(namespaces) == 3
    assert emulated_ranks.namespace_of() not in namespaces
    assert {interface for *_, interface in found} == {"lo"}


@needs_root
@pytest.mark.parametrize("spec", ["star:3", "ring:4", str(HOME / "topologies/examples/one-way.yaml")])
def test_gloo_runs_unmodified_also_where_there_are_no_links(spec: str) -> None:
    fabric = topologies.load(spec)
    with network.emulate(plan_emulation(fabric, 50)) as emulation:
        found = run_inside(emulation, emulated_ranks.summed, fabric.ranks, timeout_s=120)
    assert found == [fabric.ranks * (fabric.ranks - 1) / 2] * fabric.ranks


@needs_root
def test_a_rank_that_fails_dies_or_hangs_ends_all() -> None:
    with network.emulate(plan_emulation(topologies.load("full:2"), 10)) as emulation:
        with pytest.raises(EmulationError, match=r"^rank 1: ValueError: no reason") as failure:
            run_inside(emulation, emulated_ranks.fail)
        assert "in fail" in failure.value.__notes__[0]
        with pytest.raises(EmulationError, match=r"^rank 1 ended without an answer$"):
            run_inside(emulation, emulated_ranks.die)
        with pytest.raises(EmulationError, match=r"^ranks \[0, 1\] did not finish within 1 s$"):
            run_inside(emulation, emulated_ranks.sleep, timeout_s=1)
        inside = {emulation.namespaces[vertex].run(emulated_ranks.own_namespace) for vertex in range(2)}
        assert not _processes_in(inside)


@needs_root
def test_what_a_tool_refuses_is_said_in_one_line() -> None:
    namespace = new_namespace()
    try:
        with pytest.raises(EmulationError, match=r"^ip: .*nosuchdevice") as refusal:
            namespace.batch("ip", ["link set nosuchdevice up"])
        assert "\n" not in str(refusal.value)
        with pytest.raises(EmulationError, match="no_such_setting"):
            namespace.set("net/ipv4/no_such_setting", "1")
    finally:
        namespace.close()


def _hear_interrupts() -> None:
    """A shell starts what it puts into the background deaf to Ctrl-C, and so would be all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@needs_root
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_however_it_ends(ending: signal.Signals) -> None:
    """No process, no namespace (and so no device), no file; Ctrl-C goes to all processes of the terminal."""
    files = set(os.listdir("/tmp"))  # noqa: PTH208
    starter = subprocess.Popen(
        [sys.executable, "-m", "tests.support.emulated_ranks"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=HOME,
        env={**os.environ, "PYTHONPATH": str(HOME)},
        start_new_session=True,
        preexec_fn=_hear_interrupts,  # noqa: PLW1509 - this process has no thread that could hold a lock
    )
    assert starter.stdout is not None
    said = [starter.stdout.readline().split() for _ in range(4 + 3)]
    namespaces = {words[-1] for words in said}
    ranks = [int(words[2]) for words in said if words[0] == "rank"]
    assert len(namespaces) == 4
    assert len(ranks) == 3
    assert set(ranks) <= _processes_in(namespaces)
    if ending is signal.SIGINT:
        os.killpg(starter.pid, ending)
    else:
        starter.send_signal(ending)
    status = starter.wait(60)
    assert status == (130 if ending is signal.SIGINT else -ending)
    deadline = time.monotonic() + 60
    while (left := _processes_in(namespaces) | _of_session(starter.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    # Other tests may run schedules meanwhile, each in a folder of its own.
    others = {name for name in set(os.listdir("/tmp")) - files if "arborcast" in name}  # noqa: PTH208
    assert not {name for name in others if not name.startswith("arborcast-run-")}


def _processes_in(namespaces: set[str]) -> set[int]:
    """Those that run in one of them or hold it open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        for held in (process / "ns" / "net", *_descriptors(process)):
            try:
                if str(held.readlink()) in namespaces:
                    found.add(int(process.name))
            except OSError:
                continue
    return found - {os.getpid()}


def _descriptors(process: Path) -> list[Path]:
    try:
        return list((process / "fd").iterdir())
    except OSError:
        return []


def _of_session(session: int) -> set[int]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(after_name[3]) == session and after_name[0] != "Z":
            found.add(int(process.name))
    return found
