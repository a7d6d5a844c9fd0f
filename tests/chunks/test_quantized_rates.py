"""Odd rates are counted in a small common unit: what that keeps, what it costs, what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast import synth
from arborcast.synth.api import approach
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.time_reversal import schedule_of
from arborcast.synth.chunks.quantized_rates import FINEST, LARGEST_EXACT, QuantizedRates, coarsest_unit
from arborcast.synth.chunks.trees.column_generation import tree_bound
from arborcast.synth.chunks.trees.tree_schedule import MOST_NEAR, plan_near_it
from arborcast.synth.collective import Collective
from arborcast.synth.deadline import NO_DEADLINE
from arborcast.synth.errors import InfeasibleError, InputError, ScheduleError
from arborcast.synth.formats.schedules import schedule_from_document, schedule_to_document
from arborcast.synth.schedule import Method, Schedule
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Link, Topology
from tests.fuzzing.chunk_search import least_ratio
from tests.fuzzing.replay import objections

SLOT = Fraction(2048, 65)  # PCIe 3.0 with 16 lanes
RATES = st.fractions(min_value=Fraction(1, 10), max_value=100, max_denominator=70)
"""Odd enough: two of them have a common divisor of 1/4830 and more."""


def two_sockets(gpus: int, slot: Fraction = SLOT, between: Fraction = Fraction(10)) -> Topology:
    """Half of the GPUs behind each of two CPUs, joined by one link.

    0 1 .. - cpu0 - cpu1 - .. n-2 n-1
    """
    cables = [(rank, gpus + 2 * rank // gpus, slot) for rank in range(gpus)]
    cables.append((gpus, gpus + 1, between))
    links = [Link(*ends, rate) for a, b, rate in cables for ends in ((a, b), (b, a))]
    return Topology.build("two-sockets", gpus, links, ["cpu0", "cpu1"])


@given(st.lists(RATES, min_size=1, max_size=4), st.fractions(Fraction(1, 40), Fraction(1, 2)))
def test_no_coarser_unit_is_within_the_tolerance(rates: list[Fraction], tolerance: Fraction) -> None:
    unit = coarsest_unit(rates, tolerance)
    assert 0 < unit <= min(rates)
    assert all(rate // unit * unit >= (1 - tolerance) * rate for rate in rates)
    # The best unit divides some rate: between two such units every rate keeps its number of them.
    most = {rate: int(rate / unit) for rate in rates}
    units = {rate / count for rate in rates for count in range(1, most[rate] + 1)}
    for coarser in (each for each in units if unit < each <= min(rates)):
        assert any(rate // coarser * coarser < (1 - tolerance) * rate for rate in rates)


@pytest.mark.parametrize(
    ("rates", "tolerance", "unit", "kept"),
    [
        ((SLOT, Fraction(10)), None, Fraction(10), {SLOT: Fraction(30)}),  # 31.5 loses 1.5, less than 5 %
        ((SLOT, Fraction(10)), Fraction(0), None, {}),
        # 31.5 / 16 = 1.97, of which 5 are 9.85; nothing coarser loses less than 2 %.
        ((SLOT, Fraction(10)), Fraction(1, 50), SLOT / 16, {Fraction(10): SLOT * 5 / 16}),
        ((Fraction(50), Fraction(25), Fraction(25, 2)), None, None, {}),
        ((Fraction(25), Fraction(24)), None, None, {}),  # 25 and 24 chunks a round are few enough
        ((Fraction(25), Fraction(24)), Fraction(1, 20), Fraction(24), {Fraction(25): Fraction(24)}),
        ((Fraction(1000), Fraction(1)), None, None, {}),  # a thousand to one is what it is
    ],
)
def test_the_grid_of_drawn_rates(
    rates: tuple[Fraction, ...],
    tolerance: Fraction | None,
    unit: Fraction | None,
    kept: dict[Fraction, Fraction],
) -> None:
    links = [Link(rank, rank + 1, rate) for rank, rate in enumerate(rates)]
    grid = QuantizedRates.of(Topology.build("line", len(rates) + 1, links), tolerance)
    assert (None if grid is None else grid.unit, {} if grid is None else grid.rates) == (unit, kept)
    if grid is not None:
        assert grid.rounded.bandwidth_unit == grid.unit
        assert [grid.rates.get(rate, rate) for rate in rates] == list(grid.rounded.bandwidth.values())


@pytest.mark.parametrize("tolerance", [Fraction(-1), Fraction(1), FINEST / 2])
def test_a_tolerance_out_of_its_range_is_refused(tolerance: Fraction) -> None:
    with pytest.raises(InputError, match=f"rate tolerance must be 0, or at least {FINEST}"):
        QuantizedRates.of(two_sockets(4), tolerance)


def test_a_schedule_of_the_grid_is_one_of_the_real_fabric() -> None:
    fabric = two_sockets(4)
    # Each of two must get the two blocks of the other side: 2 C chunks at 10 GB/s, one a round.
    found = synth.solve(fabric, "allgather", method="sat", chunks=1, steps=2, rounds=3, cache=False)
    assert (found.topology, found.unit, found.rate) == (fabric, 10, Fraction(40, 3))
    assert found.bound == synth.bound(fabric, "allgather")
    assert synth.verify(found).errors == ()
    assert objections(found) == []
    document = json.loads(json.dumps(schedule_to_document(found)))
    assert document["unit"] == "10"
    assert schedule_from_document(document, "drawn") == found
    # Half the unit allows a link twice as many chunks a round, and says half the rate.
    finer = replace(found, unit=found.unit / 2)
    assert "rate: 40/3 GB/s declared, 20/3 GB/s recomputed" in synth.verify(finer).errors
    coarser = replace(found, unit=found.unit * 2)
    assert any("rounds of 0 allow 0" in error for error in synth.verify(coarser).errors)


def test_a_unit_goes_with_rounds() -> None:
    trees = synth.solve(two_sockets(4), "allgather")
    with pytest.raises(ScheduleError, match="unit must be positive and go with rounds, got 10 GB/s"):
        replace(trees, unit=Fraction(10))


def test_none_is_said_of_the_rounded_rates() -> None:
    words = r"2 steps need at least 2 rounds per chunk.*; rates rounded down to multiples of 10 GB/s: 31.5"
    with pytest.raises(InfeasibleError, match=words):
        synth.solve(two_sockets(4), "allgather", method="sat", chunks=2, steps=2, rounds=3, cache=False)


def test_the_frontier_of_odd_rates_has_few_chunks_and_says_what_it_is_proved_of() -> None:
    fabric = two_sockets(4)
    found = synth.pareto(fabric, "allgather", cache=False)
    assert found.grid is not None and found.grid.rates == {SLOT: 30}
    # 20 GB/s cross between the sockets for each unit of the buffer's half: 10 / (1 / 2), on the grid or not.
    assert found.limits_of_rate == (20, 20)
    for point in found.points:
        assert point.chunks <= LARGEST_EXACT
        assert point.scope == "every schedule at rates rounded down"
        assert synth.verify(point.schedule).errors == ()
        assert point.schedule.bound.rate == 20 >= point.schedule.rate


@pytest.mark.parametrize(
    "kind",
    [
        "reduce-scatter",
        *(
            pytest.param(it, marks=pytest.mark.long)
            for it in ("broadcast", "allgather", "alltoall", "gather", "allreduce")
        ),
    ],
)
def test_two_sockets_of_four_have_a_frontier_of_few_chunks(kind: str) -> None:
    """In C = 325 and 1300 chunks at the rates as they are, where there was memory enough."""
    found = synth.pareto(two_sockets(8), kind, cache=False)
    assert found.grid is not None and found.grid.unit == 10
    many = len(found.collective.ranks) if kind == "allreduce" else 1
    assert len(found.points) > 0 and all(point.chunks <= MOST_NEAR * many for point in found.points)
    for point in found.points:
        assert point.scope.endswith(" at rates rounded down")
        assert synth.verify(point.schedule).errors == ()
        assert point.schedule.rate <= found.limits_of_rate[1] <= found.limits_of_rate[0]
        assert point.least <= point.ratio
    # The cut between the sockets bounds all of these; the best points come near it.
    assert found.points[-1].schedule.rate >= found.limits_of_rate[0] * Fraction(9, 10)


@pytest.mark.parametrize("kind", ["broadcast", "allgather"])
def test_limits_of_the_grid_are_the_least_of_its_rates(kind: str) -> None:
    """Three ranks around a switch at 10, 10 and 2048/65, by a linear program of every tree."""
    links = [
        Link(*ends, rate)
        for rank, rate in enumerate((Fraction(10), Fraction(10), SLOT))
        for ends in ((rank, 3), (3, rank))
    ]
    fabric = Topology.build("star", 3, links, ["hub"])
    found = synth.pareto(fabric, kind, max_steps=3, cache=False)
    assert found.grid is not None and found.limits
    for steps, limit in found.limits.items():
        assert limit.ratio == least_ratio(found.grid.rounded, found.collective, steps)
        # What links carry a round at their own rates is more: its limit is below, and another one.
        true = least_ratio(fabric, found.collective, steps)
        assert true is not None and true / fabric.bandwidth_unit <= limit.ratio / found.grid.unit


def test_candidates_for_a_size_are_schedules_of_the_real_fabric() -> None:
    fabric = two_sockets(4)
    asked = Collective.on(fabric, "allgather")
    found = approach(fabric, asked, "auto", SolveOptions(cache=False), "explicit").selection()
    on_grid = [each for each in found.schedules if isinstance(each, Schedule) and each.unit is not None]
    assert on_grid and all(synth.verify(each).errors == () for each in on_grid)
    assert {each.bound.rate for each in found.schedules} == {20}


def test_packings_are_rounded_to_few_chunks() -> None:
    """56/47 rounds per chunk in two steps from 47 chunks; 6/5 from 5, which is within a twentieth."""
    grid = QuantizedRates.of(two_sockets(8))
    assert grid is not None
    fabric, collective = grid.rounded, Collective.on(grid.rounded, "broadcast")
    problem = ChunkProblem.of(fabric, collective)
    bound = tree_bound(problem, 2, deadline=NO_DEADLINE)
    assert bound.bound.ratio == Fraction(56, 47)
    for most, slack in ((16, Fraction(1, 20)), (3, Fraction(0)), (64, Fraction(0))):
        near = plan_near_it(problem, bound, slack, most_chunks=most)
        assert near is not None
        chunks, plan = near
        ratio = Fraction(sum(plan.rounds), chunks)
        assert chunks <= most and ratio >= bound.bound.ratio
        limit = synth.bound(fabric, collective)
        schedule = schedule_of(fabric, collective, problem, chunks, plan, method=Method("drawn"), bound=limit)
        assert synth.verify(schedule).errors == ()
        if most == 64:
            assert (chunks, ratio) == (47, Fraction(56, 47))
        if slack:
            assert ratio <= bound.bound.ratio * (1 + slack)
