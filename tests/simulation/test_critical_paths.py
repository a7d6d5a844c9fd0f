"""What a run takes at least, against runs in every order of service."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.api import solve
from arborcast.synth.bounds import bound
from arborcast.synth.collective import Collective
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.simulation.simulator import Runs, lay_out, simulate
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load
from tests.support.strategies import topologies


@pytest.mark.few(15)
@settings(max_examples=60)
@given(
    topologies(min_ranks=3, max_ranks=5),
    st.sampled_from(["allgather", "allreduce", "broadcast", "alltoall"]),
    st.integers(1, 1 << 24),
    st.sampled_from([1, 2, 5]),
)
def test_no_run_is_faster(fabric: Topology, kind: str, size: int, pieces: int) -> None:
    try:
        schedule = solve(fabric, kind, cache=False)
    except InfeasibleError:
        return
    hops = lay_out(schedule)
    least_us = max(hops.least_us(size, pieces), hops.least_us(size, 3 * pieces))  # of finer ones, too
    for service in ("priority", "fifo", "random:1", "engine"):
        took_us = simulate(schedule, size, pieces=pieces, service=service).time_us
        assert least_us <= took_us * (1 + 1e-9)
    assert Runs(schedule).least_us(size) <= simulate(schedule, size).time_us


@pytest.mark.parametrize("kind", ["allreduce", "allgather"])
@pytest.mark.parametrize(
    "spec", ["dgx-h100", pytest.param("dgx-h100:boxes=2", marks=pytest.mark.long), "dgx-a100"]
)
def test_no_run_is_faster_where_switches_pass_on_frames(spec: str, kind: str) -> None:
    schedule = solve(load(spec), kind, cache=False)
    for size in (1 << 10, 1 << 16, 1 << 22):
        assert Runs(schedule).least_us(size) <= simulate(schedule, size).time_us


def test_a_chain_takes_what_is_proved() -> None:
    """Two pieces of 2 us over links of 1 us: the second waits for the first, the last hop follows it."""
    fabric = Topology.build(
        "chain", 3, [Link(0, 1, Fraction(1), Fraction(1)), Link(1, 2, Fraction(1), Fraction(1))]
    )
    collective = Collective.on(fabric, "broadcast")
    moves = [Transfer(0, 0, 1, 0), Transfer(0, 1, 2, 1)]
    limit, method = bound(fabric, collective), Method("drawn")
    schedule = Schedule.build(fabric, collective, method, limit, [Chunk(Fraction(1), 0)], moves)
    assert (
        lay_out(schedule).least_us(4000, 2) == simulate(schedule, 4000, pieces=2).time_us == 2 + 2 + 1 + 2 + 1
    )
    # A link of other chunks, too, is busy for all of them, from the first to the last.
    halves = [Chunk(Fraction(1, 2), 0)] * 2
    twice = [Transfer(chunk, move.src, move.dst, move.step) for chunk in (0, 1) for move in moves]
    schedule = Schedule.build(fabric, collective, method, limit, halves, twice)
    assert lay_out(schedule).least_us(4000, 1) == simulate(schedule, 4000, pieces=1).time_us == 2 + 1 + 4 + 1
