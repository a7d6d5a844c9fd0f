"""What the simulator says of each row, under several orders of service, at the rates that links delivered.

Rows of results that were written before can be given the same columns: their schedules are made anew, and a
row whose schedule is not the one that ran stays without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from arborcast.bench.contest.cases import FROM_BYTES, METHOD, SERVICES, case_of, column, worst_column
from arborcast.bench.contest.contenders import CHUNKS, KNOWN, Contender, line_up
from arborcast.bench.contest.ranks import ITEM_BYTES, Order, pieces_of
from arborcast.bench.contest.rows import delivered_fabric
from arborcast.bench.emulation.plan import at_rates
from arborcast.synth.collective import Collective
from arborcast.synth.formats.results import Row
from arborcast.synth.schedule import Schedule
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.topology import Topology

ORDERS = 10
"""Random orders of which the slowest is kept, of what the process group chooses."""


def predict(contender: Contender, order: Order, fabric: Topology, *, orders: int = ORDERS) -> dict[str, Any]:
    """The columns of a contender's row; none where it has no schedule of ours.

    Args:
        contender: with the schedule for the size.
        order: what was measured.
        fabric: with the rates that its links delivered.
        orders: as `ORDERS`.
    """
    schedule = contender.schedule
    if schedule is None:
        return {}
    assert isinstance(schedule, Schedule), "a testbed has few ranks: its schedules are written out"
    moved = replace(schedule, topology=fabric)
    size, pieces = order.elements * ITEM_BYTES, pieces_of(schedule, order)

    def time_us(service: str) -> float:
        return simulate(moved, size, pieces=pieces, service=service).time_us

    found = {column(service): time_us(service) for service in SERVICES}
    if contender.name == METHOD and size >= FROM_BYTES:
        found[worst_column("random")] = time_us(f"worst:{orders}")
        # Where no two ranks share a link, the engine leaves no order open.
        found[worst_column("engine")] = time_us(f"engine-worst:{orders if fabric.switches else 1}")
    return found


def predict_results(document: Mapping[str, Any], *, orders: int = ORDERS) -> tuple[dict[str, Any], list[str]]:
    """A results file with the columns of `predict`, and the rows without: their schedule is another one now.

    Args:
        document: as `bench.testbed.results_document` makes it.
        orders: as `ORDERS`.
    """
    rows = [dict(row) for row in document["rows"]]
    changed: list[str] = []
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}  # those of `Topology.name` and collective
    for row in rows:
        cases.setdefault((row["topology"], row["collective"]), []).append(row)
    for (topology, kind), found in cases.items():
        case = case_of(topology)
        fabric = at_rates(case.topology, case.slowest_mbit)
        collective = Collective.on(fabric, kind, root=found[0]["root"] or 0)
        links = _rates(document["links"][topology], fabric)
        line = {each.name: each for each in line_up(fabric, collective, _methods(found)).contenders}
        for row in found:
            contender = line.get(row["method"])
            if row["pieces"] is None:
                continue
            at = None if contender is None else contender.at(row["bytes"])
            order = Order(collective, row["bytes"], (), 1, 1.0)
            if at is None or not _is_the_same(at, order, row):
                changed.append(f"{topology} {kind} of {row['bytes']} bytes by {row['method']}")
            else:
                row.update(predict(at, order, delivered_fabric(fabric, links), orders=orders))
    return {**document, "rows": rows}, changed


def _methods(rows: Sequence[Row]) -> list[str]:
    """Those of the rows, as `line_up` knows them."""
    names = {CHUNKS if row["method"].startswith(CHUNKS) else row["method"] for row in rows}
    return [name for name in KNOWN if name in names]


def _is_the_same(contender: Contender, order: Order, row: Row) -> bool:
    schedule = contender.schedule
    return schedule is not None and (schedule.steps, len(schedule.chunks), pieces_of(schedule, order)) == (
        row["steps"],
        row["chunks"],
        row["pieces"],
    )


def _rates(links: Sequence[Mapping[str, Any]], fabric: Topology) -> dict[tuple[int, int], float]:
    """Bits per second that each link delivered alone."""
    number = {fabric.label(vertex): vertex for vertex in range(fabric.size)}
    return {(number[each["from"]], number[each["to"]]): 1e6 * each["alone_mbit"] for each in links}
