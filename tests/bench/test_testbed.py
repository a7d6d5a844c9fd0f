"""The testbed: rows from what ranks saw, targets, and a small run where root and iproute2 are."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from arborcast import topologies
from arborcast.bench import testbed
from arborcast.bench.contest.cases import (
    CASES,
    KINDS,
    TARGETS,
    case_of,
    targets_of,
)
from arborcast.bench.contest.contenders import RIVALS, Contender, line_up
from arborcast.bench.contest.ranks import Data, Order, Round, pieces_of
from arborcast.bench.contest.rows import Limits, rows_of
from arborcast.bench.emulation.delivery import delivered
from arborcast.bench.emulation.machine import EmulationError, why_not
from arborcast.bench.emulation.plan import at_rates, plan_emulation
from arborcast.bench.harness.document import read_document
from arborcast.synth.api import solve
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.simulation.simulator import simulate
from tests.support.refusals import refuses

WHY_NOT = why_not()
needs_root = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
MIB = 1 << 20


def order_of(spec: str, kind: str, size_bytes: int, *contenders: str, runs: int = 2) -> Order:
    fabric = at_rates(topologies.load(spec), 80)
    collective = Collective.on(fabric, kind)
    return Order(collective, size_bytes, line_up(fabric, collective, contenders).contenders, runs, 60.0)


# ------------------------------------------------------------------------------------- the contenders


@pytest.mark.long
def test_the_line_up_has_every_method_and_says_which_have_no_schedule() -> None:
    fabric = topologies.load("dgx1", ranks=(0, 1, 2, 3, 4))
    line = line_up(fabric, Collective.on(fabric, "allgather"))
    assert [each.name for each in line.contenders] == ["gloo", "selection"]
    by_size = line.contenders[-1]
    assert by_size.table is not None and by_size.schedule is None
    for size in (MIB, 64 * MIB):
        assert by_size.at(size).schedule == by_size.table.at(size).schedule
    assert line.contenders[0].schedule is None
    assert set(line.unavailable) == {*RIVALS} - {"gloo"} and not line.unknown
    assert "no ring exists through ranks 0, 1, 2, 3, 4" in line.unavailable["ring"]
    with pytest.raises(InputError, match=r"^method rings: must be one of gloo, ring, "):
        line_up(fabric, Collective.on(fabric, "allgather"), ["rings"])


def test_exchanges_are_those_that_simulate_fastest_for_the_size() -> None:
    order = order_of("full:4", "allreduce", MIB, "exchange")
    (exchange,) = order.contenders
    for size in (1024, 32 * MIB):
        chosen = exchange.at(size).schedule
        assert chosen is not None and chosen in exchange.candidates and chosen.method.name == "exchange"
        taken = [
            simulate(each, size, pieces=pieces_of(each, replace(order, size_bytes=size))).time_us
            for each in exchange.candidates
        ]
        assert taken[exchange.candidates.index(chosen)] == min(taken)


# ------------------------------------------------------------------------------------------- the data


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spoil", [None, 0, 1234, -1])
def test_every_element_is_checked(kind: Kind, spoil: int | None) -> None:
    order = order_of("full:3", kind, 10_000, "gloo")
    assert order.elements == {Kind.ALLGATHER: 2502}.get(kind, 2500)  # blocks of 834 elements
    ranks = [Data(order, rank) for rank in range(3)]
    for data in ranks:
        data.fill()
        with (
            pytest.raises(RuntimeError, match="what: element 0 must be")
            if kind is Kind.ALLREDUCE
            else _maybe(kind, data is ranks[0])
        ):
            data.check("what")
    before = [data.output.clone() for data in ranks]
    for rank, data in enumerate(ranks):
        match kind:
            case Kind.ALLREDUCE:
                data.output.copy_(before[0] + before[1] + before[2])
            case Kind.BROADCAST:
                data.output.copy_(before[0])
            case _:
                for other in range(3):
                    data.output[other * 834 :][:834] = ranks[other].given
        if spoil is None:
            data.check("what")
            continue
        data.output[spoil] += 1
        with pytest.raises(RuntimeError, match=rf"^rank {rank}: element {spoil % order.elements} must be "):
            data.check(f"rank {rank}")


def _maybe(kind: Kind, is_root: bool):  # type: ignore[no-untyped-def]
    """Before the run the root of a broadcast has what it must have, and nobody else."""
    from contextlib import nullcontext

    if kind is Kind.BROADCAST and is_root:
        return nullcontext()
    return pytest.raises(RuntimeError, match="what: element 0 must be")


# ------------------------------------------------------------------------------------------- the rows


def test_rows_are_worked_out_of_what_ranks_saw() -> None:
    """Full mesh of 4 at 80 Mbit/s: an allreduce of 8 Mbit takes M/2B = 50 ms, a broadcast M/3B."""
    order = order_of("full:4", "allreduce", 10**6, "gloo", "ring", "trees", runs=3)
    plan = plan_emulation(at_rates(topologies.load("full:4"), 80), 80)
    limits = Limits.of(order, plan, dict.fromkeys(plan.topology.bandwidth, 79e6))
    assert limits.nominal_us * 10**6 == pytest.approx(50e3)
    assert limits.delivered_us * 10**6 == pytest.approx(50e3 * 80 / 79, rel=1e-3)
    assert limits.burst_us == pytest.approx(20 * 1024 * 8 / 80)  # 20 KiB at 80 Mbit/s: 2 ms
    seconds = {"gloo": [0.2, 0.3, 0.2], "ring": [0.16, 0.15, 0.14], "trees": [0.05, 0.06, 0.07]}
    ranks = [
        [[Round(each - 0.001 * rank, 0.01, 0.5, 1.0) for each in seconds[name]] for name in seconds]
        for rank in range(4)
    ]
    ranks[2][1] = [Round(0.1, 0.145, 0.5, 1.0)] * 3  # a rank that computes all the time
    for rank in ranks:
        rank[0] = [Round(each.seconds, each.cpu_seconds, 0.04, 1.0) for each in rank[0]]  # a busy machine
    gloo, ring, trees = rows_of(order, plan, limits, ranks)
    assert [row["method"] for row in (gloo, ring, trees)] == ["gloo", "ring", "trees"]
    assert trees["time_us"] == pytest.approx(60e3)
    assert trees["spread"] == pytest.approx(20e3)
    assert trees["runs"] == 3
    assert trees["burst_share"] == pytest.approx(2.048 / 50.6, rel=1e-3)
    assert trees["share_of_nominal"] == pytest.approx((50 - 2.048) / 60)
    assert trees["share_of_optimum"] == pytest.approx((50 * 80 / 79 - 2.048) / 60, rel=1e-3)
    assert trees["speed_up_over_gloo"] == pytest.approx(4.0)  # of 4, 5 and 2.86
    assert trees["speed_up_over_ring"] == pytest.approx(2.5)  # of 3.2, 2.5 and 2
    assert ring["speed_up_over_gloo"] == pytest.approx(10 / 7)
    assert trees["busbw"] == pytest.approx(trees["algbw"] * 1.5)
    assert [row["cpu_limited"] for row in (gloo, ring, trees)] == [True, True, False]
    short = [[[replace(each, idle=0.0, capacity=0.01) for each in runs] for runs in rank] for rank in ranks]
    gloo, ring, trees = rows_of(order, plan, limits, short)
    assert (gloo["idle"], trees["idle"]) == (None, None)
    assert [row["cpu_limited"] for row in (gloo, ring, trees)] == [False, True, False]
    assert gloo["steps"] is None
    assert trees["steps"] == 2


def test_a_link_that_delivers_less_lowers_the_limit() -> None:
    """Star: each rank's bytes cross its link once, so that the slowest link is the limit."""
    order = order_of("star:3", "broadcast", 10**6, "gloo")
    plan = plan_emulation(at_rates(topologies.load("star:3"), 80), 80)
    alone = dict.fromkeys(plan.topology.bandwidth, 79e6) | {(3, 1): 40e6}
    limits = Limits.of(order, plan, alone)
    assert limits.delivered_us * 10**6 == pytest.approx(200e3)
    assert limits.nominal_us * 10**6 == pytest.approx(100e3)


def test_targets_are_met_missed_or_not_measured() -> None:
    def row(topology: str, collective: str, share: float, **more: object) -> dict[str, object]:
        return {
            "topology": topology,
            "collective": collective,
            "method": "selection",
            "bytes": 8 * MIB,
            "share_of_optimum": share,
            "speed_up_over_gloo": None,
        } | more

    found = targets_of(
        [
            row("full:4", "allreduce", 0.96, speed_up_over_gloo=2.95),
            row("full:4", "allreduce", 0.5, bytes=MIB),
            row("full:4", "allreduce", 0.5, method="ring"),
            row("dgx1", "allreduce", 0.95),
            row("two-boxes", "broadcast", 0.91),
            row("two-boxes", "allgather", 0.91),
            row("star:4", "broadcast", 0.99, method="trees"),
        ]
    )
    assert [(one["topology"], one["collective"], one["target"], one["met"]) for one in found] == [
        ("full:4", "allreduce", 0.97, False),
        ("full:4", "allreduce", 2.9, True),
        ("dgx1", "allreduce", 0.95, True),
        ("dgx1", "allreduce", 5.5, None),
        ("two-boxes", "broadcast", 0.90, True),
        ("star:4", "broadcast", 0.95, None),  # the choice itself was not run
    ]
    names = {case.topology.name for case in CASES}
    assert {target.topology for target in TARGETS} <= names | {None}


def test_cases_by_name_and_others_with_a_rate() -> None:
    assert case_of("dgx1[0,1,2]").ranks == (0, 1, 2)
    assert case_of("dgx1", slowest_mbit=7).slowest_mbit == 7
    assert case_of("torus:3x3", slowest_mbit=9).topology.ranks == 9
    assert case_of("dgx1", "0,3", 9).topology.ranks == 2
    with pytest.raises(InputError, match=r"^torus:3x3: needs --mbit, the rate of its slowest link$"):
        case_of("torus:3x3")
    with pytest.raises(InputError, match=r"^--ranks 0,x: must be numbers or ranges .*, got 'x'$"):
        case_of("dgx1", "0,x", 9)


# ---------------------------------------------------------------------------------------------- small runs


@needs_root
def test_a_small_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four ranks, one collective: nothing is faster than the links, and the file holds what was found."""
    out = tmp_path / "results" / "testbed.json"
    words = "--only full:4 --mbit 100 --collectives allreduce --sizes 1MiB --runs 2 --json"
    monkeypatch.setattr(sys, "argv", ["testbed.py", *words.split(), str(out)])
    testbed.main()
    found = read_document(out)
    rows = {row["method"]: row for row in found["rows"]}
    assert list(rows) == [*RIVALS, "selection"]
    for row in rows.values():
        assert (row["topology"], row["collective"], row["bytes"], row["runs"]) == (
            "full:4",
            "allreduce",
            MIB,
            2,
        )
        # The limit is 42 ms; what a link may carry on top after a pause is 20 KiB, that is 1.7 ms.
        assert 0 < row["share_of_nominal"] < 1.1
        assert row["time_us"] > 0
    assert rows["gloo"]["speed_up_over_gloo"] == 1
    assert len(found["links"]["full:4"]) == 12
    assert {link["nominal_mbit"] for link in found["links"]["full:4"]} == {100}
    assert found["targets"] == []  # from 8 MiB on
    assert found["unavailable"] == []
    assert found["emulation"]["mtu"] == 9000
    said = capsys.readouterr()
    assert "levels" in said.out
    assert "full:4, allreduce of 1 MiB:" in said.err


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are measured for a moment only, and whatever they deliver will do."""
    monkeypatch.setattr(testbed, "delivered", partial(delivered, seconds=0.02, settle_s=0.02, passes=1))
    monkeypatch.setattr(testbed, "check_delivery", lambda *_: None)


@needs_root
def test_other_collectives_through_a_switch(hasty: None) -> None:
    """From a root that is not rank 0, in blocks that do not divide the size."""
    result = testbed.measure(
        topologies.load("star:3"),
        ["broadcast", "allgather"],
        [100_000],
        slowest_mbit=80,
        methods=["gloo", "trees"],
        runs=1,
        root=2,
        say=lambda _: None,
    )
    assert [(row["collective"], row["root"]) for row in result.rows] == [
        *[("broadcast", 2)] * 2,
        *[("allgather", None)] * 2,
    ]
    assert {link["from"] for link in result.links["star:3"]} == {0, 1, 2, "switch"}


@needs_root
def test_a_wrong_result_ends_the_run(monkeypatch: pytest.MonkeyPatch, hasty: None) -> None:
    """A schedule that forgets a rank; the verifier would have said so."""
    fabric = at_rates(topologies.load("full:3"), 80)
    right = solve(fabric, "broadcast", method="ring")
    wrong = replace(right, transfers=right.transfers[:1])
    line = type(line_up(fabric, right.collective, []))((Contender("ring", wrong),), {})
    monkeypatch.setattr(testbed, "line_up", lambda *_: line)
    with pytest.raises(
        EmulationError, match=r"^rank \d: RuntimeError: ring: broadcast of 4096 bytes: element 0 must"
    ):
        testbed.measure(
            topologies.load("full:3"), ["broadcast"], [4096], slowest_mbit=80, runs=1, say=lambda _: None
        )


# --------------------------------------------------------------------------------------- the command


@refuses("words", "message")
def test_wrong_words_end_with_one_line(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["testbed.py", *words.split()])
    with pytest.raises(SystemExit) as end:
        testbed.main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_ends_with_2_where_nothing_can_be_emulated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["testbed.py", "--quick"])
    with pytest.raises(SystemExit) as end:
        testbed.main()
    assert end.value.code == 2
    assert (
        capsys.readouterr().err
        == "testbed: links can be emulated by root only (network namespaces): run as root\n"
    )
