"""A rank's program from the implicit form is its program from the whole schedule."""

from __future__ import annotations

import dataclasses
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.backends.lowering.layout import blocks_in, lay_out
from arborcast.backends.lowering.lower import lower, lower_rank
from arborcast.backends.lowering.program import Receive, Send
from arborcast.backends.lowering.rank_view import images_of, partners_of, transfers_of
from arborcast.backends.measure.job import Reduction
from arborcast.backends.measure.samples import sample_data
from arborcast.synth.collective import Kind
from arborcast.synth.errors import CollectiveError, ScheduleError
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Chunk
from arborcast.synth.simulation.pieces import most_messages
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.verification.verifier import verify
from arborcast.topologies import load
from tests.support.deadlock import check_deadlock
from tests.support.definition import define
from tests.support.drawn_implicit import KINDS, circulant, grid, implicit, implicit_schedules
from tests.support.interpreter import Freedom, interpret

FABRICS = ("torus:3x4", "dgx-a100:boxes=2", "mi250", "fat-tree:2x2x2", "dragonfly:2x2x2")


def of_catalog(spec: str, kind: Kind) -> ImplicitSchedule:
    return implicit(load(spec), kind)


@given(implicit_schedules(), st.integers(0, 40), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=40)
def test_programs_are_those_of_the_whole_schedule(
    schedule: ImplicitSchedule, size: int, pieces: int, window: int
) -> None:
    whole, count = schedule.expand(), size * blocks_in(schedule.collective)
    # The test's own schedules must be right; their bound is there for form's sake.
    assert [error for error in verify(whole).errors if not error.startswith("bound")] == []
    for rank in range(schedule.topology.ranks):
        theirs = lower_rank(whole, rank, count, pieces=pieces, window=window)
        assert lower_rank(schedule, rank, count, pieces=pieces, window=window) == theirs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", FABRICS)
def test_fabrics_of_the_catalog(spec: str, kind: Kind) -> None:
    schedule = of_catalog(spec, kind)
    whole = schedule.expand()
    # 3 elements for a block of two chunks, one with 2 and one with 1 of them: some pieces are empty.
    count = 3 * blocks_in(schedule.collective)
    for rank in range(0, schedule.topology.ranks, 3):
        assert lower_rank(schedule, rank, count, pieces=2) == lower_rank(whole, rank, count, pieces=2)


@given(implicit_schedules())
@settings(max_examples=40)
def test_what_concerns_a_rank_is_what_the_whole_schedule_says(schedule: ImplicitSchedule) -> None:
    whole = schedule.expand()
    assert [image.chunk for _, image in images_of(schedule)] == list(whole.chunks)
    assert most_messages(schedule) == most_messages(whole)
    for rank in range(schedule.topology.ranks):
        assert transfers_of(schedule, rank) == transfers_of(whole, rank)
        assert partners_of(schedule, rank) == partners_of(whole, rank)


@given(implicit_schedules(), st.integers(0, 1000))
@settings(max_examples=40)
def test_layouts_place_each_chunk_as_in_the_whole_schedule(schedule: ImplicitSchedule, size: int) -> None:
    count = size * blocks_in(schedule.collective)
    all_places = lay_out(schedule.expand(), count).places
    assert lay_out(schedule, count).places == all_places
    some = list(all_places)[1::3]
    assert lay_out(schedule, count, some).places == {chunk: all_places[chunk] for chunk in some}


def test_images_in_the_one_block_of_an_allreduce_as_drawn() -> None:
    # Two chunks, of 2/9 and 1/9 of the buffer, and three images of each: 27 elements are cut
    # 0 . . . . . 6 . . . . . 12 . . . . . 18 . . 21 . . 24 . . 27
    # |  chunk 0  |  its image 1 |  image 2  |  3  |  4   |  5   |
    schedule = implicit(circulant(3, {1: 1}), Kind.ALLREDUCE)
    places = lay_out(schedule, 27).places
    assert [(places[chunk].start, places[chunk].stop) for chunk in range(6)] == [
        (0, 6),
        (6, 12),
        (12, 18),
        (18, 21),
        (21, 24),
        (24, 27),
    ]


def test_tags_of_both_ends_of_a_message_are_one() -> None:
    schedule = implicit(grid(2, 3, hubs=True), Kind.ALLGATHER)
    programs = lower(schedule, 60, pieces=2)
    assert [program.rank for program in programs] == list(range(6))
    check_deadlock(programs)
    sent = {(p.rank, o.peer, o.tag) for p in programs for o in p.operations if isinstance(o, Send)}
    came = {(o.peer, p.rank, o.tag) for p in programs for o in p.operations if isinstance(o, Receive)}
    assert sent == came
    # 2 chunks of 6 images over 5 edges each, in 2 pieces; tags are the numbers of messages.
    assert {tag for *_, tag in sent} == set(range(2 * 6 * 5 * 2))


def test_shares_that_do_not_add_up_are_refused() -> None:
    schedule = implicit(circulant(4, {1: 1}), Kind.ALLREDUCE)
    short = dataclasses.replace(schedule, chunks=(schedule.chunks[0], Chunk(Fraction(1, 16), 0)))
    with pytest.raises(ScheduleError, match=r"block with owner any: shares must add up to 1, got 11/12"):
        lower_rank(short, 2, 16)


def test_a_block_that_no_chunk_carries_is_refused() -> None:
    schedule = implicit(circulant(4, {1: 1}), Kind.ALLTOALL)
    chunks = tuple(dataclasses.replace(chunk, target=1) for chunk in schedule.chunks)
    with pytest.raises(ScheduleError, match=r"block with owner 0 and target 1: shares must add up to 1/4"):
        lower_rank(dataclasses.replace(schedule, chunks=chunks), 2, 16)


def test_a_count_that_blocks_do_not_divide_is_refused() -> None:
    with pytest.raises(CollectiveError, match=r"allgather: .* a multiple of its 4 blocks, got 7"):
        lower_rank(implicit(circulant(4, {1: 1}), Kind.ALLGATHER), 0, 7)


def test_without_translations_it_is_its_own_whole() -> None:
    topology = circulant(5, {1: 1, 2: 1})
    schedule = implicit(topology, Kind.ALLTOALL, translations=Translations.trivial(topology))
    assert lower(schedule, 35, pieces=2) == lower(schedule.expand(), 35, pieces=2)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(it, marks=() if it is Kind.ALLREDUCE else pytest.mark.long) for it in KINDS],
)
def test_programs_of_a_torus_lowered_one_by_one_run_together(kind: Kind) -> None:
    """All 64 of an 8x8 torus, with blocking sends, on data in which a mistake cannot hide."""
    schedule = implicit(load("torus:8x8"), kind, shares=[Fraction(1)])
    count = 3 * 64
    programs = [lower_rank(schedule, rank, count) for rank in range(64)]
    inputs = [
        np.concatenate(
            [
                part
                for _, part in sample_data(
                    schedule.collective,
                    program.rank,
                    program.output_elements if program.in_place else program.input_elements,
                    dtype="int64",
                    reduction=Reduction.SUM,
                    seed=0,
                )
            ]
        )
        for program in programs
    ]
    found = interpret(programs, inputs, freedom=Freedom.BLOCKING)
    for rank, wanted in enumerate(define(schedule.collective, inputs)):
        assert wanted is not None
        np.testing.assert_array_equal(found[rank], wanted, f"rank {rank}")


def test_memory_grows_with_a_rank_s_own_part_only() -> None:
    """256 ranks: two trees stand in the schedule, 512 in the whole; counted bytes, so the same everywhere."""
    schedule = of_catalog("torus:16x16", Kind.ALLGATHER)
    lower_rank(schedule, 3, 256)  # whatever is worked out once for a schedule
    tracemalloc.start()
    try:
        program = lower_rank(schedule, 77, 256)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(program.operations) > 256
    # Each of the 2 x 2 x 255 own transfers may take 2 KiB; the whole has 130,560, of 100 bytes and more.
    assert peak < 2 * 2 * 255 * 2048 < schedule.transfer_count * 100
