"""Size sweeps: what overhead costs, by hand; which way speed-ups point; what is missing says why."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest

from arborcast import topologies
from arborcast.bench import sweeps
from arborcast.bench.clusters.candidates import candidates
from arborcast.bench.clusters.machines import Planning, load, network_switches, planning
from arborcast.bench.clusters.overhead import Overhead
from arborcast.bench.clusters.words import (
    KEYS,
    MEASURES,
    SELECTION,
    WITH_OVERHEAD,
    Sweep,
    format_table,
    summary,
)
from arborcast.bench.sweeps import sweep
from arborcast.synth.api import solve
from arborcast.synth.baselines import solve_baseline
from arborcast.synth.baselines.nccl_model import NOT_RUN, NcclSetup, nccl_times
from arborcast.synth.bounds import bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.formats.results import document
from arborcast.synth.nccl_protocol import Protocol
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Topology

SIZES = (1 << 10, 1 << 20, 1 << 26)
HERE = "a fabric of the tests"


def by_hand(fabric: Topology, kind: str, moves: str) -> Schedule:
    """A schedule of one chunk: `0>1 0>2 | 1>3` are two transfers in step 0 and one in step 1."""
    collective = Collective.on(fabric, kind)
    transfers = [
        Transfer(0, int(src), int(dst), step, kind == "reduce")
        for step, together in enumerate(moves.split("|"))
        for src, dst in (move.split(">") for move in together.split())
    ]
    limit = bound(fabric, collective)
    return Schedule.build(fabric, collective, Method("drawn"), limit, [Chunk(Fraction(1), 0)], transfers)


@pytest.mark.parametrize(
    ("moves", "channels", "hops"),
    [
        ("0>1 | 1>2 | 2>3", 1, 3),  # a chain
        ("0>1 0>2 0>3", 1, 3),  # a star: rank 0 sends three messages one after the other
        ("0>1 0>2 0>3", 3, 1),  # the same with a channel for each
        ("0>1 | 0>2 1>3", 1, 2),
        ("0>1 | 1>2 1>3", 4, 2),
    ],
)
def test_latency_is_the_longest_chain_or_the_busiest_rank(moves: str, channels: int, hops: int) -> None:
    schedule = by_hand(topologies.load("full:4"), "broadcast", moves)
    overhead = Overhead(schedule, NcclSetup(channels, Fraction(1)), frozenset())
    assert overhead.latency_us(Protocol.LL) == pytest.approx(6.8 + hops * 0.6)
    assert overhead.latency_us(Protocol.SIMPLE) == pytest.approx(8.4 + hops * 4.0)


def test_a_ring_pays_what_the_model_of_the_ring_pays() -> None:
    fabric = topologies.load("ring:6")
    collective = Collective.on(fabric, "allreduce")
    ring = solve_baseline(fabric, collective, "ring")
    plan = NcclSetup(2, Fraction(1))
    overhead = Overhead(ring, plan, frozenset())
    for protocol in Protocol:
        model = nccl_times(fabric, collective, [8], plan=plan, protocol=protocol)[0]
        assert overhead.latency_us(protocol) == pytest.approx(model.latency_us)


def test_messages_of_one_step_between_two_ranks_are_one() -> None:
    fabric = topologies.load("full:2")
    collective = Collective.on(fabric, "broadcast")
    chunks = [Chunk(Fraction(1, 2), 0)] * 2
    moves = [Transfer(0, 0, 1, 0), Transfer(1, 0, 1, 0)]
    schedule = Schedule.build(fabric, collective, Method("drawn"), bound(fabric, collective), chunks, moves)
    overhead = Overhead(schedule, NcclSetup(1, Fraction(1)), frozenset())
    assert overhead.latency_us(Protocol.LL) == pytest.approx(6.8 + 0.6)


def test_a_hop_across_the_network_costs_more() -> None:
    fabric = load("dgx-a100:boxes=2")
    network = network_switches(fabric)
    assert [fabric.label(switch) for switch in sorted(network)] == ["fabric0", "fabric1"]
    collective = Collective.on(fabric, "broadcast", ranks=(0, 8))
    moves = [Transfer(0, 0, 8, 0, False, (min(network),))]
    schedule = Schedule.build(
        fabric, collective, Method("drawn"), bound(fabric, collective), [Chunk(Fraction(1), 0)], moves
    )
    overhead = Overhead(schedule, NcclSetup(8, Fraction(24), 2), network)
    assert overhead.latency_us(Protocol.LL) == pytest.approx(6.8 + 5.0)
    # 1.7 us of wire are paid at the full rate, the other 10 us at the half of it that LL carries.
    charge = overhead.charge(11.7)
    assert charge.protocol is Protocol.LL128 or charge.time_us == pytest.approx(6.8 + 5.0 + 1.7 + 20)
    assert charge.time_us == pytest.approx(min(6.8 + 5.0 + 1.7 + 20, 14.0 + 8.5 + 1.7 + 10 / 0.92))


def test_what_reduces_along_trees_carries_what_nccls_tree_does() -> None:
    fabric = topologies.load("full:4")
    plan = NcclSetup(1, Fraction(1))
    tree = Overhead(by_hand(fabric, "reduce", "1>0 2>0 3>0"), plan, frozenset())
    copy = Overhead(by_hand(fabric, "broadcast", "0>1 0>2 0>3"), plan, frozenset())
    assert tree.shares[Protocol.SIMPLE] == Fraction(92, 100) * Fraction(85, 100)
    assert copy.shares[Protocol.SIMPLE] == 1
    assert copy.shares[Protocol.LL] == Fraction(1, 2)


def test_switches_that_add_pay_as_ranks_do() -> None:
    fabric = load("dgx-h100")
    collective = Collective.on(fabric, "allreduce")
    schedule = solve(fabric, collective)
    assert schedule.uses_switches
    plan = planning(fabric, collective).plan
    assert plan is not None
    # To the switch and back: two hops.
    overhead = Overhead(schedule, plan, frozenset())
    assert overhead.latency_us(Protocol.LL) >= 6.8 + 2 * 0.6
    assert overhead.shares[Protocol.SIMPLE] < 1


def test_who_adds_one_at_a_time_carries_what_nccls_ring_does() -> None:
    fabric = topologies.load("full:4")
    collective = Collective.on(fabric, "allreduce")
    plan = NcclSetup(1, Fraction(1))
    halving = Overhead(solve_baseline(fabric, collective, "halving-doubling"), plan, frozenset())
    assert halving.shares[Protocol.SIMPLE] == 1
    # Two exchanges each way; in LL128 a hop of the ring takes longer than one of the tree.
    assert halving.latency_us(Protocol.LL128) == pytest.approx(14.0 + 4 * 1.9)
    one_after_the_other = Overhead(by_hand(fabric, "reduce", "1>0 | 2>0 | 3>0"), plan, frozenset())
    assert one_after_the_other.shares[Protocol.SIMPLE] == 1


def test_both_sides_reach_nics_at_the_rate_of_the_slot() -> None:
    for spec, inside, outside in (("dgx-a100:boxes=2", 240, 24), ("dgx-h100:boxes=2", 370.8, 48)):
        fabric = load(spec)
        assert {float(link.bandwidth) for link in fabric.links} == {inside, outside}
        plan = planning(fabric, Collective.on(fabric, "allreduce")).plan
        assert plan is not None and plan.channels == 8 and plan.channel_rate == outside


def test_machines_that_nccl_does_not_plan_get_its_formulas() -> None:
    torus = load("torus:4x4,bandwidth=25")
    found = planning(torus, Collective.on(torus, "allreduce"))
    assert found.plan is not None and found.plan.bandwidth == 100
    assert "this machine's links" in found.plan.source
    assert found.why_no_tree is not None
    boxes = load("mi250:boxes=2")
    plan = planning(boxes, Collective.on(boxes, "allreduce")).plan
    assert plan is not None and plan.hosts == 2 and plan.bandwidth == 256
    star = load("star:4")
    assert "NCCL's plan for star:4 with its switches is not known" in str(
        planning(star, Collective.on(star, "allreduce")).why_not
    )


def times(swept: Sweep) -> Mapping[tuple[str, int], Any]:
    return {(row["method"], row["bytes"]): row for row in swept.rows}


def test_rows_of_a_small_machine() -> None:
    fabric = topologies.load("full:4,bandwidth=20,latency=0.7")
    swept = sweep(fabric, Collective.on(fabric, "allreduce"), SIZES, deadline_s=None)
    document(HERE, swept.rows, keys=KEYS, measures=MEASURES)  # raises where keys are missing or double
    rows = times(swept)
    methods = {method for method, _ in rows}
    assert {SELECTION, WITH_OVERHEAD, "ring", "nccl-ring-model", "nccl-tree-model"} <= methods
    for size in SIZES:
        ours = rows[WITH_OVERHEAD, size]
        charged = "time_us_with_nccl_overhead"
        others = [row[charged] for (method, at), row in rows.items() if at == size and "selec" not in method]
        assert ours["speed_up"] == pytest.approx(min(others) / ours[charged])
        assert ours[charged] <= rows[SELECTION, size][charged]
        assert rows[SELECTION, size]["time_us"] <= ours["time_us"] < ours[charged]
        assert rows["nccl-ring-model", size]["model"].startswith("model, without NVLS")
    assert "served by" in format_table(swept)
    assert NOT_RUN in format_table(swept)


def test_runs_that_are_left_out_change_no_choice_and_no_speed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = topologies.load("full:4,bandwidth=20,latency=0.7")
    collective = Collective.on(fabric, "allreduce")
    left_out = times(sweep(fabric, collective, SIZES[1:], deadline_s=None))
    monkeypatch.setattr(sweeps, "_is_beaten", lambda *_: False)
    every = times(sweep(fabric, collective, SIZES[1:], deadline_s=None))
    assert len(left_out) < len(every)
    assert all(row == every[key] for key, row in left_out.items())


def test_where_nccl_has_no_plan_the_table_shows_times_of_links_alone() -> None:
    fabric = topologies.load("star:3,bandwidth=25")
    swept = sweep(fabric, Collective.on(fabric, "allreduce"), SIZES[:1], deadline_s=None)
    titles, row = (line.split() for line in format_table(swept).splitlines()[1:3])
    ours = times(swept)[SELECTION, SIZES[0]]
    assert titles[1] == "ours" and "without overhead" in format_table(swept)
    assert NOT_RUN not in format_table(swept)
    assert row[2] == f"{ours['time_us']:.1f}" and row[2 + titles.index("ring") - 1] != "-"
    assert f"{ours['speed_up_over_baselines_links_only']:.2f}" in row


def test_the_implicit_form_pays_as_much_as_what_it_stands_for() -> None:
    fabric = load("dgx-a100:boxes=2")
    schedule = solve(fabric, "allreduce", form="implicit")
    plan, switches = NcclSetup(8, Fraction(24), 2), network_switches(fabric)
    implicit, explicit = (Overhead(form, plan, switches) for form in (schedule, schedule.expand()))
    for time_us in (20.0, 2000.0):
        assert implicit.charge(time_us) == explicit.charge(time_us)


@pytest.mark.parametrize(("rate", "sign"), [(Fraction(10**6), "losses"), (Fraction(1, 100), "wins")])
def test_speed_up_is_below_one_where_we_lose(
    rate: Fraction, sign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A model of links a million times as fast, and of ones far slower than those simulated.
    monkeypatch.setattr(sweeps, "planning", lambda *_: Planning(NcclSetup(1, rate)))
    fabric = topologies.load("full:3,bandwidth=20")
    swept = sweep(fabric, Collective.on(fabric, "allreduce"), (1 << 26,), deadline_s=None)
    row = times(swept)[SELECTION, 1 << 26]
    assert (row["speed_up_over_nccl"] < 1) == (sign == "losses")
    if sign == "losses":
        assert row["speed_up"] < 1
        assert all(entry["losses"] == 1 for entry in summary(swept.rows))
        assert len(summary(swept.rows)) == 2


def test_summary_counts_each_method_apart() -> None:
    def row(method: str, size: int, ratio: float | None) -> dict[str, Any]:
        return {
            "topology": "x", "collective": "allreduce", "method": method, "bytes": size, "speed_up": ratio
        }  # fmt: skip

    rows = [
        row(SELECTION, 1, 0.5),
        row(SELECTION, 2, 1.001),
        row(SELECTION, 3, 2.0),
        row(WITH_OVERHEAD, 1, 1.5),
        row(WITH_OVERHEAD, 2, None),
    ]
    first, second = summary(rows)
    assert [first[key] for key in ("wins", "even", "losses", "least_speed_up")] == [1, 1, 1, 0.5]
    assert [second[key] for key in ("method", "wins", "losses")] == [WITH_OVERHEAD, 1, 0]


def test_without_time_everything_is_listed_as_skipped() -> None:
    fabric = topologies.load("full:4")
    swept = sweep(fabric, Collective.on(fabric, "allreduce"), SIZES, deadline_s=0.0)
    assert {row["method"] for row in swept.rows} == {"nccl-ring-model", "nccl-tree-model"}
    reasons = {entry["method"]: entry["reason"] for entry in swept.skipped}
    assert {"others", "ring", "binary-tree"} <= set(reasons)
    assert "the deadline of 0 s passed" in reasons.pop("others")
    assert all("the deadline of 0 s had passed" in reason for reason in reasons.values())


def test_a_large_schedule_leaves_sizes_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "MANY_HOPS", 1)
    fabric = topologies.load("full:3")
    swept = sweep(fabric, Collective.on(fabric, "broadcast"), SIZES, deadline_s=None)
    entry = next(entry for entry in swept.skipped if entry["method"] == SELECTION)
    assert entry["sizes"] == [SIZES[1]]
    assert {row["bytes"] for row in swept.rows if row["method"] == SELECTION} == {SIZES[0], SIZES[2]}


def test_a_machine_that_takes_too_long_costs_one_line() -> None:
    swept = sweeps.in_own_process("dgx-a100:boxes=2", Kind.ALLREDUCE, 0.05)
    assert not swept.rows
    (entry,) = swept.skipped
    assert (entry["topology"], entry["method"]) == ("dgx-a100:boxes=2", "all")
    assert entry["reason"] == "killed after 0.1 s"
    assert "killed after 0.1 s" in format_table(swept)


def test_a_machine_that_fails_costs_one_line() -> None:
    (entry,) = sweeps.in_own_process("dgx-a100:boxes=zero", Kind.ALLREDUCE, 60).skipped
    assert entry["reason"].startswith("exit status 2: sweeps: dgx-a100: boxes: must be")


def test_patterns_beyond_the_simulator_are_left_out_by_rule() -> None:
    fabric = topologies.load("torus:24x24")  # a ring of 576 ranks: 576 * 575 * 2 transfers
    collective = Collective.on(fabric, "allreduce")
    limit = bound(fabric, collective)
    late = Deadline.after(0.0)
    found = {candidate.name: candidate.why_not for candidate in candidates(fabric, collective, limit, late)}
    for pattern in ("ring", "multiring"):
        assert found[pattern] == "not simulated above 500000 transfers, 576 ranks need at least 662400"
    assert "chunks" not in found
