"""`synth probe --cables`: which interfaces are ends of a cable, and a fabric found in network namespaces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from arborcast.backends.errors import ExecutionError
from arborcast.backends.probe.cables import (
    FoundCables,
    _check_joined,
    _concluded,
    lanes_of,
    matched,
    probe_cables,
    shared,
)
from arborcast.backends.probe.interfaces import Interface, interfaces
from arborcast.backends.probe.measurements import Load, Measurements, Spread
from arborcast.backends.probe.measuring import Effort
from arborcast.backends.probe.plan import cable_loads
from arborcast.backends.probe.report import cables_file
from arborcast.backends.probe.traffic import Period
from arborcast.bench.emulation.machine import why_not
from arborcast.bench.emulation.network import emulate
from arborcast.bench.emulation.plan import plan_emulation
from arborcast.bench.emulation.processes import run_inside
from arborcast.topologies.files import load_file
from tests.support.cabled import FABRICS, STORE, cut

WHY_NOT = why_not()
needs_root = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def at(name: str, address: str, prefix: int = 24) -> Interface:
    return Interface(name, address, prefix, 1500, None)


MEETING = "10.0.0.0/24"


def ranks(*own: list[Interface]) -> list[list[Interface]]:
    """Interfaces of ranks, beside that of the network in which they meet and that of a bridge inside."""
    return [
        [at("mgmt", f"10.0.0.{rank + 1}"), at("docker0", "172.17.0.1", 16), *each]
        for rank, each in enumerate(own)
    ]


def test_two_ends_of_a_subnet_are_a_cable() -> None:
    cables, notes = matched(
        ranks([at("a", "10.1.0.1")], [at("b", "10.1.0.2"), at("c", "10.2.0.1")], [at("d", "10.2.0.9")]),
        MEETING,
    )
    assert [(cable.ranks, cable.addresses) for cable in cables] == [
        ((0, 1), ("10.1.0.1", "10.1.0.2")),
        ((1, 2), ("10.2.0.1", "10.2.0.9")),
    ]
    assert cables[1].of(2) == ("10.2.0.9", "10.2.0.1")
    assert notes == []
    assert str(cables[0]) == "a (10.1.0.1/24, MTU 1500) of rank 0 to b (10.1.0.2/24, MTU 1500) of rank 1"


@pytest.mark.parametrize(
    ("own", "note"),
    [
        (
            ([at("a", "10.1.0.1")], [at("b", "10.1.0.2"), at("c", "10.1.0.3")], [at("d", "10.1.0.4")]),
            "subnet 10.1.0.0/24 is left out, as a cable must have one of its own with an end at two ranks, "
            "got a of rank 0, b of rank 1, c of rank 1, d of rank 2",
        ),
        (([at("a", "10.1.0.1"), at("b", "10.1.0.2")], [], []), "got a of rank 0, b of rank 0"),
    ],
)
def test_what_is_no_cable_is_said_in_a_line(own: tuple[list[Interface], ...], note: str) -> None:
    cables, notes = matched(ranks(*own), MEETING)
    assert len(notes) == 1 and note in notes[0]
    assert not cables


def test_ranks_without_a_cable_and_two_on_a_host_are_refused() -> None:
    cables, notes = matched(ranks([at("a", "10.1.0.1")], [at("b", "10.1.0.2")], []), MEETING)
    _check_joined(cables, 2, notes)
    with pytest.raises(ExecutionError, match="no cables lead from rank 0 to rank 2; one was silent"):
        _check_joined(cables, 3, ["one was silent"])
    word = {"where": "here", "at": "10.0.0.1", "interfaces": []}
    with pytest.raises(ExecutionError, match="must run once on each host, got ranks 0 and 1"):
        _concluded([word, word])


def test_several_cables_of_two_ranks_are_flows_of_their_own() -> None:
    cables, notes = matched(
        ranks([at("a", "10.1.0.1"), at("b", "10.2.0.1")], [at("c", "10.1.0.2"), at("d", "10.2.0.2")], []),
        MEETING,
    )
    assert [cable.ranks for cable in cables] == [(0, 1), (0, 1)] and not notes
    assert lanes_of(cables, 3) == [(0, 1), (3, 4)]
    flows = [(0, 1), (1, 0), (3, 4), (4, 3)]
    assert cable_loads(flows, 3) == [((0, 1), (3, 4)), ((1, 0), (4, 3)), tuple(flows)]


def test_cables_that_share_a_slot_are_said() -> None:
    def rate(value: float) -> Spread:
        return Spread(value, value, value, 1)

    flows = [(0, 1), (1, 0), (0, 2), (2, 0)]
    loads = (Load({(0, 1): rate(5), (0, 2): rate(5)}), Load({(1, 0): rate(9), (2, 0): rate(9)}))
    solo = dict.fromkeys(flows, rate(9))
    measured = Measurements(3, dict.fromkeys(flows, rate(10)), solo, loads, ("a", "b", "c"), {})
    assert list(shared(measured)) == [
        "cables out of rank 0 share something: 10 GB/s together, 18 in sum of each alone; the topology does "
        "not say so"
    ]


def test_interfaces_of_this_host_are_those_that_linux_tells() -> None:
    for each in interfaces():
        assert each.mtu >= 68 and 0 < each.prefix <= 32
        assert each.subnet.endswith(f"/{each.prefix}")
        assert not each.address.startswith("127.")


# ---------------------------------------------------------------------------------- in network namespaces


def probed(rank: int, address: str, store: str, size: int, file: str) -> tuple[int, list[str]]:
    host, port = STORE
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    notes: list[str] = []

    def conclude(found: FoundCables) -> int:
        Path(file).write_text(cables_file(found, found.topology("found")), encoding="utf-8")
        notes.extend(found.notes)
        return 0

    effort = Effort(10, 2, 1, Period(window_s=0.05, warmup_s=0.05), timeout_s=30)
    return probe_cables(prepare=lambda _: 0, conclude=conclude, effort=effort), notes


@needs_root
def test_probe_finds_several_cables_of_two_hosts(tmp_path: Path) -> None:
    plan = plan_emulation(FABRICS["pair by 4 cables"](), 20)
    file = tmp_path / "found.yaml"
    with emulate(plan, has_cables=True) as emulation:
        got = run_inside(emulation, probed, 2, str(file), timeout_s=120)
    assert got[0] == (0, [])
    found = load_file(file)
    assert not found.notes  # that links stand twice
    expected = {it.addresses: float(it.bandwidth) * 0.02 / 80 for it in plan.cabled.cables}  # 20 Mbit/s of 10
    rates = {it.addresses: float(it.bandwidth) for it in found.topology.cables}
    assert rates.keys() == expected.keys()
    assert all(0.5 < rates[ends] / expected[ends] < 1.5 for ends in expected), rates
    assert {(link.src, link.dst) for link in found.topology.links} == {(0, 1), (1, 0)}


@needs_root
def test_probe_finds_the_cables_of_a_ring(tmp_path: Path) -> None:
    plan = plan_emulation(FABRICS["ring of 4"](), 200)
    file = tmp_path / "found.yaml"
    with emulate(plan, has_cables=True) as emulation:
        cut(emulation, 2, 3)
        got = run_inside(emulation, probed, 4, str(file), timeout_s=120)
    assert [status for status, _ in got] == [0] * 4
    note, *others = got[0][1]
    assert note.startswith("cable does not answer and is left out: w3 (10.1.3.1/24, MTU 9000")
    assert all("share something" in other for other in others)  # as on a machine that is busy otherwise
    found = load_file(file).topology
    expected = {(it.src, it.dst): it.addresses for it in plan.cabled.links if {it.src, it.dst} != {2, 3}}
    assert {(link.src, link.dst): link.addresses for link in found.links} == expected
    assert all(0.5 < float(link.bandwidth) / 0.025 < 1.2 for link in found.links)  # 200 Mbit/s
