"""No published measurement is above a bound of ours, at the rates of data sheets."""

from __future__ import annotations

import csv
from fractions import Fraction
from pathlib import Path

import pytest

from arborcast.synth.bounds import bound
from arborcast.synth.collective import Collective
from arborcast.topologies import Rates, load
from arborcast.topologies.processors import crossing

TABLE = Path(__file__).parents[2] / "bench" / "published.tsv"


def busbw_of_one(collective: str, ranks: int) -> Fraction:
    """GB/s of busbw for each of algbw (nccl-tests, doc/PERFORMANCE.md)."""
    each = {"allreduce": Fraction(2 * (ranks - 1), ranks), "broadcast": Fraction(1)}
    return each.get(collective, Fraction(ranks - 1, ranks))


def rows() -> list[dict[str, str]]:
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines, delimiter="\t"))


def specs(row: dict[str, str]) -> list[str]:
    """The machine as the catalog has it; where two sockets are known, also with what joins these."""
    if not row["processors"]:
        return [row["spec"]]
    vendor, family, model = row["processors"].split()
    way = crossing("x86_64", vendor, int(family), int(model), Rates.DATASHEET)
    assert not way.assumed
    return [row["spec"], f"{row['spec']}:between={way.rate}"]


SLOW = ("oci-h100:boxes=2", "p5:boxes=2", "hgx-h20:boxes=2")  # switches that add, in two boxes
ROWS = [
    pytest.param(
        row,
        marks=pytest.mark.long if row["spec"] in SLOW else (),
        id=f"{row['spec']}-{row['collective']}-{row['busbw']}",
    )
    for row in rows()
]


@pytest.mark.parametrize("row", ROWS)
def test_no_published_figure_is_above_a_bound(row: dict[str, str]) -> None:
    chosen = [int(rank) for rank in row["ranks"].split(",")] if row["ranks"] else None
    for spec in specs(row):
        topology = load(spec, ranks=chosen)
        measured = Fraction(row["busbw"]) / busbw_of_one(row["collective"], topology.ranks)
        assert measured <= bound(topology, Collective.on(topology, row["collective"])).rate


def test_the_table_has_what_refuted_planning_constants() -> None:
    """Boxes of two sockets, whose bounds were NCCL's constants: measured up to several times of these."""
    refuted = [row for row in rows() if row["processors"]]
    assert len(refuted) >= 5
    for row in refuted:
        planned = load(row["spec"], rates="nccl")
        measured = Fraction(row["busbw"]) / busbw_of_one(row["collective"], planned.ranks)
        if row["ranks"] == "" and "rtx5090" in row["spec"]:
            assert measured > bound(planned, Collective.on(planned, row["collective"])).rate
        assert planned.is_planned
