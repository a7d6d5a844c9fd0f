"""Whether sums have the same bits on all ranks: what is said of a schedule beside what its programs give."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from math import lcm

import numpy as np
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from arborcast.backends.errors import ExecutionError
from arborcast.backends.lowering.additions import adds_alike
from arborcast.backends.lowering.lower import lower
from arborcast.backends.measure.job import Reduction
from arborcast.backends.schedules.simple import simple_table
from arborcast.backends.schedules.synthesis import tables
from arborcast.synth.api import solve
from arborcast.synth.bounds import bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import CollectiveError, InfeasibleError
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.methods import METHODS, NEED_SIZE
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Topology
from arborcast.topologies import load
from tests.support import strategies
from tests.support.drawn_implicit import circulant, implicit_schedules
from tests.support.drawn_schedules import make, schedules
from tests.support.in_network import shared_roots, star, turning, two_levels
from tests.support.interpreter import interpret


def gives_equal_bits(schedule: Schedule) -> bool:
    """By trying: all ranks' sums of random numbers, many of them in each chunk."""
    count = 64 * lcm(*(chunk.share.denominator for chunk in schedule.chunks))
    members = schedule.collective.ranks
    chance = np.random.default_rng(count)
    own = [
        chance.normal(size=count).astype(np.float32) if rank in members else None
        for rank in range(schedule.topology.holders)
    ]
    sums = interpret(lower(schedule, count), own, reduction=Reduction.SUM, dtype=np.float32)
    return all(np.array_equal(sums[rank], sums[members[0]]) for rank in members)


def drawn(*transfers: tuple[int, int, int], total: int, copies: int = 0) -> Schedule:
    """One chunk; source, destination and step of each transfer; the last so many copy, the others add."""
    moves = [
        Transfer(0, src, dst, step, number < len(transfers) - copies)
        for number, (src, dst, step) in enumerate(transfers)
    ]
    return make("allreduce", [Chunk(Fraction(1), 0)], moves, total=total)


EXPLICIT = "arborcast.synth.candidates.Candidates.explicit"

UNLIKE = drawn((1, 0, 0), (2, 0, 0), (0, 2, 0), (1, 2, 1), (0, 1, 2), total=3, copies=1)
"""Rank 0 adds (0 + 1) + 2 at once, rank 2 adds (0 + 2) + 1 in two steps."""

UNLIKE_BATCHES = drawn(
    *((src, dst, 0) for src, dst in ((0, 2), (1, 2), (0, 3), (1, 3), (2, 3), (3, 2))),
    *((2, 0, 1), (3, 1, 1)),
    total=4,
    copies=2,
)
"""Ranks 2 and 3 exchange: rank 2 adds ((2 + 0) + 1) + 3, of which 3 comes after it has sent; rank 3 adds
((0 + 1) + 2) + 3, all of which comes before it sends."""


LATER_SUMS = drawn(
    *((2, 0, 0), (0, 2, 0), (3, 0, 1), (1, 3, 1), (1, 0, 2), (2, 3, 2), (0, 1, 3), (0, 2, 3)),
    total=4,
    copies=2,
)
"""Rank 0 adds ((0 + 2) + 3) + 1, rank 3 adds (3 + 1) + (2 + 0)."""


def test_drawn_orders() -> None:
    everybody = [(src, dst, 0) for src in range(3) for dst in range(3) if src != dst]
    assert adds_alike(drawn(*everybody, total=3))  # (0 + 1) + 2 on all
    pairs = [(0, 1, 0), (1, 0, 0), (2, 3, 0), (3, 2, 0), (0, 2, 1), (2, 0, 1), (1, 3, 1), (3, 1, 1)]
    assert adds_alike(drawn(*pairs, total=4))  # (0 + 1) + (2 + 3) on all
    pairs = [(src, dst, 0) for a, b in ((0, 5), (1, 4), (2, 3)) for src, dst in ((a, b), (b, a))]
    three = [(src, dst, 1) for src, dst in permutations(range(3), 2)]
    sums = drawn(*pairs, *three, *((0, dst, 2) for dst in range(3, 6)), total=6, copies=3)
    assert adds_alike(sums) and gives_equal_bits(sums)  # in the order of ranks: ((0 + 5) + (1 + 4)) + (2 + 3)
    assert not adds_alike(UNLIKE)
    for unlike in (UNLIKE_BATCHES, LATER_SUMS):
        assert not adds_alike(unlike) and not gives_equal_bits(unlike)
    assert adds_alike(solve(load("ring:3"), "reduce-scatter"))  # each sum is one rank's


def test_one_chunk_of_several_is_enough() -> None:
    alike = drawn((0, 2, 0), (1, 2, 1), (2, 0, 2), (2, 1, 2), total=3, copies=2)
    halves = [Chunk(Fraction(1, 2), 0), Chunk(Fraction(1, 2), 0)]
    moves = [
        replace(move, chunk=chunk) for chunk, one in enumerate((alike, UNLIKE)) for move in one.transfers
    ]
    both = make("allreduce", halves, moves, total=3)
    assert adds_alike(alike) and not adds_alike(both) and not gives_equal_bits(both)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_all_exchange_by_translations(ranks: int) -> None:
    """Two add one pair; of three, the images' programs order what they get by who they are."""
    fabric = circulant(ranks, {1: 1})
    group = Translations.generated(fabric, fabric.symmetries)
    moves = [Transfer(0, src, dst, 0, True) for src, dst in permutations(range(ranks), 2)]
    collective = Collective.on(fabric, Kind.ALLREDUCE)
    limit = bound(fabric, collective)
    chunks = [Chunk(Fraction(1, ranks), 0)]
    schedule = ImplicitSchedule.build(fabric, collective, Method("drawn"), limit, group, chunks, moves)
    assert adds_alike(schedule) == (ranks == 2)


@st.composite
def sums(draw: st.DrawFn) -> Schedule:
    """Ranks add some of what they may, in two steps; those that lack something copy from one with all."""
    ranks = draw(st.integers(2, 5))
    held = [{rank} for rank in range(ranks)]
    moves: list[tuple[int, int, int]] = []
    for step in range(2):
        before = [set(have) for have in held]
        pairs = st.lists(st.sampled_from(list(permutations(range(ranks), 2))), unique=True, min_size=ranks)
        for src, dst in draw(pairs):
            if not before[src] & held[dst]:
                moves.append((src, dst, step))
                held[dst] |= before[src]
    whole = next((rank for rank in range(ranks) if len(held[rank]) == ranks), None)
    assume(whole is not None)
    copies = [(whole, rank, 2) for rank in range(ranks) if whole is not None and len(held[rank]) < ranks]
    return drawn(*moves, *copies, total=ranks, copies=len(copies))


@given(st.one_of(sums(), schedules([Kind.ALLREDUCE])))
@settings(max_examples=100)
def test_what_is_said_is_what_programs_give(schedule: Schedule) -> None:
    event(f"alike: {adds_alike(schedule)}")
    assert adds_alike(schedule) == gives_equal_bits(schedule)


@pytest.mark.parametrize(
    "schedule", [UNLIKE, turning(star(4)), turning(two_levels(2, 3)), shared_roots(star(4))]
)
def test_drawn_sums_by_trying(schedule: Schedule) -> None:
    assert adds_alike(schedule) == gives_equal_bits(schedule) == (schedule is not UNLIKE)


@given(implicit_schedules())
@settings(max_examples=20)
def test_what_is_said_of_implicit_schedules_holds(schedule: ImplicitSchedule) -> None:
    if adds_alike(schedule) and schedule.collective.kind is Kind.ALLREDUCE:
        assert gives_equal_bits(schedule.expand())


NAMED = [method for method in METHODS if method not in NEED_SIZE and method != "routes"]


@pytest.mark.parametrize("method", NAMED)
@given(strategies.topologies())
@settings(max_examples=8)
def test_every_method_that_a_group_may_be_told(method: str, fabric: Topology) -> None:
    with contextlib.suppress(InfeasibleError, CollectiveError):
        schedule = solve(fabric, "allreduce", method=method)
        assert isinstance(schedule, Schedule)
        assert adds_alike(schedule) and gives_equal_bits(schedule)


@given(strategies.topologies())
@settings(max_examples=20)
def test_what_serves_until_a_table_is_found(fabric: Topology) -> None:
    table = simple_table(fabric, Collective.on(fabric, Kind.ALLREDUCE))
    if table is not None:
        schedule = table.entries[0].schedule
        assert isinstance(schedule, Schedule)
        assert adds_alike(schedule) and gives_equal_bits(schedule)


def check_group(fabric: Topology) -> None:
    for table in tables(fabric, Collective.on(fabric, Kind.ALLREDUCE), "auto", SolveOptions()):
        for entry in table.entries:
            assert isinstance(entry.schedule, Schedule)
            assert gives_equal_bits(entry.schedule), entry


@pytest.mark.parametrize("spec", ["ring:3", pytest.param("ring:5", marks=pytest.mark.long)])
def test_what_serves_a_group_on_a_ring(spec: str) -> None:
    """The best schedule for small sums of 5 has 3 steps, and adds in an order of its own on each rank."""
    check_group(load(spec))


@pytest.mark.long
@given(strategies.topologies())
@settings(max_examples=15)
def test_what_serves_a_group_on_random_fabrics(fabric: Topology) -> None:
    check_group(fabric)


def test_a_schedule_that_adds_in_several_orders_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    unlike = replace(UNLIKE, bound=bound(UNLIKE.topology, UNLIKE.collective))
    monkeypatch.setattr(EXPLICIT, lambda *_, **__: iter([unlike]))
    asked = (UNLIKE.topology, UNLIKE.collective, "auto", SolveOptions())
    with pytest.raises(ExecutionError, match="method drawn made a schedule whose ranks add in different"):
        next(tables(*asked))
    ring = solve(UNLIKE.topology, "allreduce", method="ring")
    monkeypatch.setattr(EXPLICIT, lambda *_, **__: iter([unlike, ring]))
    assert [[entry.schedule for entry in table.entries] for table in tables(*asked)] == [[ring], [ring]]
