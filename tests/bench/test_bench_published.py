"""What others measured refutes no bound, and prices are near it, also without a machine's own rows."""

from __future__ import annotations

import json
import statistics
from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest

from arborcast.bench import published
from arborcast.bench.harness.script import KEPT
from arborcast.bench.published import Published, fit, rows, told
from arborcast.synth.bounds import bound
from arborcast.synth.bounds.time_limits import time_limit
from arborcast.synth.collective import Collective
from arborcast.synth.simulation.prices import PRICES
from arborcast.topologies import load

SLOW = ("oci-h100:boxes=2", "p5:boxes=2", "hgx-h20:boxes=2")  # switches that add, in two boxes
UNEXPLAINED = 0.4
"""Beyond this part of the measured time a price needs an explanation."""

EXPLAINED = {
    "a3-mega:boxes=2--allreduce-1K-": "no other machine has TCPX: priced as EFA",
    "mi250--allgather-1K-": "before RCCL was tuned for it, as its source says",
    "dgx-spark:sparks=2--allreduce-8K-": "no other machine has a time on Ethernet: priced as InfiniBand",
    "dgx-a100:boxes=2-0,8-allreduce-8-": "no other machine has a time on InfiniBand: priced as Ethernet",
}
"""Why prices without a machine's own rows miss what was measured there."""

NEAR = 1.2
"""Machines whose published times differ by less than this factor may be in any order."""


def named(row: Published) -> str:
    return f"{row.spec}-{row.ranks}-{row.collective}-{row.busbw or row.size}-{row.by}"


ROWS = [
    pytest.param(row, marks=pytest.mark.long if row.spec in SLOW else (), id=named(row)) for row in rows()
]


@pytest.mark.parametrize("row", ROWS)
def test_no_published_figure_refutes_a_bound(row: Published) -> None:
    """Neither of the rate nor of the time, with any way between sockets."""
    for topology in (load(row.spec, ranks=row.chosen), row.topology):
        limit = bound(topology, row.asked)
        assert row.bytes / (1000 * float(limit.rate)) <= row.measured_us
        assert float(time_limit(topology, row.asked, limit).at(row.bytes)) <= row.measured_us


def test_the_table_has_what_refuted_planning_constants() -> None:
    """Boxes of two sockets, whose bounds were NCCL's constants: measured up to several times of these."""
    refuted = [row for row in rows() if row.processors]
    assert len(refuted) >= 5
    for row in refuted:
        planned = load(row.spec, rates="nccl")
        if row.ranks == "" and "rtx5090" in row.spec and row.collective == "alltoall":
            measured = Fraction(row.bytes) / Fraction(1000 * row.measured_us)
            assert measured > bound(planned, Collective.on(planned, row.collective)).rate
        assert planned.is_planned


@pytest.fixture(scope="module")
def judged() -> dict[str, dict[str, Any]]:
    """Every row that is priced, by its name."""
    found = published.judged(rows())
    names = [named(row) for row in rows() if row.is_priced]
    assert len(set(names)) == len(names) == len(found)
    return dict(zip(names, found, strict=True))


@pytest.mark.long
def test_prices_without_a_machines_own_rows_are_near(judged: dict[str, dict[str, Any]]) -> None:
    errors = {name: abs(row["error"]) for name, row in judged.items()}
    assert statistics.median(errors.values()) <= 0.15
    assert {name for name, error in errors.items() if error > UNEXPLAINED} == set(EXPLAINED)


@pytest.mark.long
def test_the_figures_that_are_kept_are_those_of_today(judged: dict[str, dict[str, Any]]) -> None:
    kept = json.loads((KEPT / "published.json").read_text())["rows"]
    assert [row["priced_us"] for row in kept] == pytest.approx([row["priced_us"] for row in judged.values()])


@pytest.mark.long
@pytest.mark.parametrize("by", ["", "kernel"])
def test_machines_are_in_the_published_order_at_1_kib(judged: dict[str, dict[str, Any]], by: str) -> None:
    small = [
        (row["measured_us"], row["priced_with_it_us"], row["topology"])
        for row in judged.values()
        if (row["bytes"], row["by"], row["collective"]) == (1 << 10, by, "allreduce")
    ]
    assert len(small) >= 5
    for one, other in combinations(sorted(small), 2):
        assert one[1] < other[1] or other[0] < NEAR * one[0], (one, other)


@pytest.mark.long
def test_prices_are_what_they_say_they_are_fitted_to() -> None:
    found = [one for row in rows() if (one := told(row)) is not None]
    fitted = fit(found)
    for figure, near in (("forwards", 0.03), ("adds", 0.04), ("message_us", 0.3)):
        for medium in {one.medium for one in found if one.figure == figure}:
            has, wanted = (float(getattr(each[medium], figure)) for each in (PRICES, fitted))
            assert has == pytest.approx(wanted, rel=0.05, abs=near), f"{medium}: {figure}"
