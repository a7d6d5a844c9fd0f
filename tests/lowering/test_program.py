"""Lowering: layout, operations, dependencies, freedom from deadlock."""

from __future__ import annotations

import dataclasses
import pickle
from collections import defaultdict
from fractions import Fraction
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.backends.lowering.layout import Buffer, BufferSlice, lay_out
from arborcast.backends.lowering.lower import lower, lower_rank
from arborcast.backends.lowering.program import Copy, Program, Receive, Reduce, Send
from arborcast.backends.measure.job import Reduction
from arborcast.backends.measure.program_description import program_of
from arborcast.synth.api import solve
from arborcast.synth.certificate import Bound, Cut
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import CollectiveError, ScheduleError
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.simulation.pieces import pieces_that_fit
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load
from tests.support.deadlock import check_deadlock
from tests.support.definition import define, inputs_of
from tests.support.drawn_schedules import (
    allgather_over_relay,
    direct,
    make,
    recursive_doubling,
    ring_allreduce,
    schedules,
    tree_broadcast,
    uneven_allreduce,
)
from tests.support.grouped_messages import run_grouped
from tests.support.interpreter import Freedom, interpret


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100, 1009])
def test_chunks_partition_the_buffer_whatever_divides_what(count: int) -> None:
    places = list(lay_out(uneven_allreduce(), count).places.values())
    assert places[0].start == 0 and places[-1].stop == count
    assert all(before.stop == after.start for before, after in pairwise(places))


def test_layout_of_an_alltoall() -> None:
    layout = lay_out(direct("alltoall", 3), 12)
    schedule = direct("alltoall", 3)
    chunk = next(i for i, c in enumerate(schedule.chunks) if (c.owner, c.target) == (0, 2))
    assert layout.initial(0, chunk) == BufferSlice(Buffer.INPUT, 8, 12)
    assert layout.final(2, chunk) == BufferSlice(Buffer.OUTPUT, 0, 4)
    assert layout.initial(1, chunk) is None and layout.final(1, chunk) is None
    assert layout.kept(1) == (BufferSlice(Buffer.INPUT, 4, 8), BufferSlice(Buffer.OUTPUT, 4, 8))


def test_blocks_follow_the_order_of_the_ranks() -> None:
    layout = lay_out(allgather_over_relay(), 10)
    assert layout.final(0, 0) == BufferSlice(Buffer.OUTPUT, 0, 5)
    assert layout.final(2, 1) == BufferSlice(Buffer.OUTPUT, 5, 10)
    assert layout.input_elements(1) == layout.output_elements(1) == 0


ONE = [Chunk(Fraction(1), 0)]
REFUSED = {
    "a multiple of its 2 blocks, got 7": (allgather_over_relay(), 7),
    "shares must add up to 1, got 1/2": (
        make("broadcast", [Chunk(Fraction(1, 2), 0)], [Transfer(0, 0, 1, 0)], total=2),
        4,
    ),
    "step 3: rank 1 sends chunk 0 before it holds it": (
        make("broadcast", ONE, [Transfer(0, 1, 2, 3)], total=3),
        4,
    ),
    "step 1: rank 2 receives chunk 0 twice": (
        make("broadcast", ONE, [Transfer(0, 0, 1, 0), Transfer(0, 0, 2, 1), Transfer(0, 1, 2, 1)], total=3),
        4,
    ),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_schedules_that_cannot_be_lowered_are_refused(rule: str) -> None:
    schedule, count = REFUSED[rule]
    with pytest.raises((CollectiveError, ScheduleError), match=rule):
        lower(schedule, count)


@pytest.mark.parametrize("adds", [(True, False), (False, True)])
def test_a_copy_and_a_reduction_that_meet_are_refused(adds: tuple[bool, bool]) -> None:
    both = [Transfer(0, src, 0, 0, reduce) for src, reduce in zip((1, 2), adds, strict=True)]
    with pytest.raises(ScheduleError, match="step 0: rank 0 receives chunk 0 twice"):
        lower(make("reduce", ONE, both, total=3), 4)


def test_a_pipelined_chain_as_drawn() -> None:
    chain = make("broadcast", ONE, [Transfer(0, 0, 1, 0), Transfer(0, 1, 2, 1)], total=3)

    def piece(index: int) -> BufferSlice:
        return BufferSlice(Buffer.OUTPUT, 4 * index, 4 * index + 4)

    assert lower_rank(chain, 1, 12, pieces=3).operations == (
        Receive(0, 0, piece(0), 0),
        Receive(1, 0, piece(1), 1),
        Send(1, 2, piece(0), 3, after=(0,)),
        Receive(2, 0, piece(2), 2),
        Send(2, 2, piece(1), 4, after=(1,)),
        Send(3, 2, piece(2), 5, after=(3,)),
    )


def test_chunks_are_whole_unless_pieces_are_asked_for() -> None:
    schedule = solve(load("mesh:1x3"), "broadcast")
    assert lower(schedule, 12) == lower(schedule, 12, pieces=1) != lower(schedule, 12, pieces=2)


def test_an_exchange_adds_only_after_its_own_send() -> None:
    whole, arrived = BufferSlice(Buffer.OUTPUT, 0, 6), BufferSlice(Buffer.SCRATCH, 0, 6)
    # Rank 1 receives from rank 0 before it sends to it, so the sum must wait.
    assert lower_rank(recursive_doubling(), 1, 6, window=1).operations[:3] == (
        Receive(0, 0, arrived, 0),
        Send(0, 0, whole, 1),
        Reduce(0, arrived, whole, after=(0, 1)),
    )


def test_inputs_are_never_written() -> None:
    schedule = make("reduce", ONE, [Transfer(0, 2, 1, 0, True), Transfer(0, 1, 0, 1, True)], total=3)
    for program in lower(schedule, 9, pieces=2):
        written = [op.into.buffer for op in program.operations if not isinstance(op, Send)]
        assert Buffer.INPUT not in written


@pytest.mark.parametrize(
    ("nbytes", "piece_bytes", "most", "pieces"),
    [
        (1000, 100, 32, 5),  # the largest chunk of three has half of the buffer
        (1000, 101, 32, 4),
        (1000, 100, 3, 3),
        (100, 100, 32, 1),
        (0, 100, 32, 1),
    ],
)
def test_pieces_that_fit(nbytes: int, piece_bytes: int, most: int, pieces: int) -> None:
    assert pieces_that_fit(tree_broadcast(), nbytes, piece_bytes=piece_bytes, most=most) == pieces


def test_no_more_than_32_pieces_unless_asked() -> None:
    assert len(program_of(tree_broadcast(), 3, 1 << 30).operations) == 32 * 4  # of three chunks, one goes on


def test_without_chunks_there_is_one_piece() -> None:
    nothing = dataclasses.replace(tree_broadcast(), chunks=(), transfers=())
    assert pieces_that_fit(nothing, 1000, piece_bytes=10, most=32) == 1


@pytest.mark.parametrize(("pieces", "window"), [(0, 1), (1, 0), (-1, 2)])
def test_numbers_below_one_are_refused(pieces: int, window: int) -> None:
    with pytest.raises(ValueError, match=f"must be at least 1, got {pieces} and {window}"):
        lower(tree_broadcast(), 12, pieces=pieces, window=window)


@given(schedules(), st.integers(0, 20), st.integers(1, 4), st.integers(1, 3), st.booleans())
@settings(max_examples=150)
def test_programs_end_with_what_is_defined(
    schedule: Schedule, size: int, pieces: int, window: int, grouped: bool
) -> None:
    count = size * lay_out(schedule, 0).blocks
    programs = lower(schedule, count, pieces=pieces, window=window, grouped=grouped)
    check_deadlock(programs)
    for program in programs:
        assert program == lower_rank(
            schedule, program.rank, count, pieces=pieces, window=window, grouped=grouped
        )
        _check_form(program)
    inputs = inputs_of(schedule, count, "int64", Reduction.SUM)
    run = run_grouped if grouped else partial(interpret, freedom=Freedom.DATAFLOW)
    for want, got in zip(
        define(schedule.collective, inputs, Reduction.SUM), run(programs, inputs, seed=size), strict=True
    ):
        assert want is None or np.array_equal(want, got)


def _check_form(program: Program) -> None:
    """Operations come after whoever wrote what they read, and after whoever last used what they write."""
    tags = [op.tag for op in program.operations if isinstance(op, Send | Receive)]
    assert len(tags) == len(set(tags))
    written: dict[tuple[Buffer, int], set[int]] = defaultdict(set)
    read: dict[tuple[Buffer, int], set[int]] = defaultdict(set)
    for index, operation in enumerate(program.operations):
        after: set[int] = set()
        for part in _slices(operation):
            assert 0 <= part.start < part.stop <= program.elements(part.buffer)
        for place in _elements(None if isinstance(operation, Receive) else operation.source):
            after |= written[place]
            read[place].add(index)
        for place in _elements(None if isinstance(operation, Send) else operation.into):
            after |= read[place] - {index} or written[place]
            written[place], read[place] = {index}, set()
        assert operation.after == tuple(sorted(after))


def _elements(part: BufferSlice | None) -> list[tuple[Buffer, int]]:
    return [] if part is None else [(part.buffer, at) for at in range(part.start, part.stop)]


def _slices(operation: Send | Receive | Reduce | Copy) -> list[BufferSlice]:
    match operation:
        case Send():
            return [operation.source]
        case Receive():
            return [operation.into]
        case _:
            assert operation.source.length == operation.into.length
            return [operation.source, operation.into]


@pytest.mark.parametrize("window", [1, 8, 1000])
def test_scratch_stays_within_the_message(window: int) -> None:
    for schedule in (ring_allreduce(4), uneven_allreduce(), recursive_doubling()):
        for pieces in (1, 4, 16):
            for program in lower(schedule, 10_000, pieces=pieces, window=window):
                assert program.scratch_elements <= 10_000


def test_used_slots_are_used_again() -> None:
    wide = lower_rank(ring_allreduce(4), 0, 16_000, pieces=16, window=16)
    narrow = lower_rank(ring_allreduce(4), 0, 16_000, pieces=16, window=2)
    default = lower_rank(ring_allreduce(4), 0, 16_000, pieces=16)
    assert default.scratch_elements == 3 * 4000 * 8 // 16
    assert wide.scratch_elements == 3 * 4000  # three of the four chunks pass here to be summed
    assert narrow.scratch_elements == 3 * 4000 * 2 // 16
    grouped = lower_rank(ring_allreduce(4), 0, 16_000, pieces=16, window=2, grouped=True)
    assert narrow.scratch_elements <= grouped.scratch_elements < wide.scratch_elements


def test_what_a_relay_has_passed_on_makes_room() -> None:
    relay = lower_rank(allgather_over_relay(), 1, 16_000, pieces=16, window=2)
    assert relay.scratch_elements == 2 * 2 * 500  # two slots of a piece for each of two chunks


def test_a_final_value_comes_where_it_stays_though_its_rank_still_sends_what_it_had() -> None:
    """Rank 2 sends its input on in the step in which its block of a reduce-scatter comes from rank 1."""
    chunks = [Chunk(Fraction(1, 3), rank) for rank in range(3)]
    added = [Transfer(2, 0, 1, 0, True), Transfer(2, 2, 1, 0, True)]
    schedule = make("reduce-scatter", chunks, [*added, Transfer(2, 1, 2, 1), Transfer(2, 2, 0, 1)], total=3)
    program = lower_rank(schedule, 2, 300)
    assert [type(operation) for operation in program.operations] == [Send, Receive, Send]
    assert program.scratch_elements == 0


def test_summands_that_meet_while_their_rank_sends_its_own_keep_apart() -> None:
    """Rank 2 adds what 0 and 1 send to its input, which it sends to rank 3 in the same step."""
    chunks = [Chunk(Fraction(1, 4), rank) for rank in range(4)]
    met = [Transfer(2, 0, 2, 0, True), Transfer(2, 1, 2, 0, True), Transfer(2, 2, 3, 0)]
    program = lower_rank(make("reduce-scatter", chunks, met, total=4), 2, 400)
    kinds = [type(operation) for operation in program.operations]
    assert kinds == [Receive, Receive, Send, Reduce, Reduce]
    first, second, sent, *sums = program.operations
    assert isinstance(first, Receive) and isinstance(second, Receive) and isinstance(sent, Send)
    assert first.into == BufferSlice(Buffer.OUTPUT, 0, 100) and second.into == BufferSlice(
        Buffer.SCRATCH, 0, 100
    )
    assert sent.source == BufferSlice(Buffer.INPUT, 200, 300)
    assert [(it.source, it.into) for it in sums if isinstance(it, Reduce)] == [
        (sent.source, first.into),
        (second.into, first.into),
    ]


def test_ranks_that_exchange_summands_add_them_in_the_order_of_ranks() -> None:
    """Rank 0 gives rank 1 its own in the step in which those of 2 and 1 come; inputs are not written.

    What is written out of a symmetric form has its transfers in such an order.
    """
    met = [Transfer(0, 2, 0, 0, True), Transfer(0, 1, 0, 0, True), Transfer(0, 0, 1, 0, True)]
    chunks = [Chunk(Fraction(1, 3), rank) for rank in range(3)]
    schedule = dataclasses.replace(make("reduce-scatter", chunks, met, total=3), transfers=tuple(met))
    program = lower_rank(schedule, 0, 300)
    own, output, scratch = (BufferSlice(buffer, 0, 100) for buffer in Buffer)
    assert program.operations == (
        Receive(0, 2, output, 0),
        Receive(0, 1, scratch, 1),
        Send(0, 1, own, 2),
        Reduce(0, own, scratch, (1,)),
        Reduce(0, scratch, output, (0, 3)),
    )


@pytest.mark.parametrize("grouped", [False, True])
def test_in_a_group_nothing_replaces_what_is_sent_from_there(grouped: bool) -> None:
    """Rank 0 sends what the next message of the same time would replace; alone, that one waits for it."""
    moves = [Transfer(0, 0, 2, 0, True), Transfer(0, 1, 0, 0)]
    schedule = make("allreduce", [Chunk(Fraction(1), 1)], moves, total=3)
    whole, aside = BufferSlice(Buffer.OUTPUT, 0, 6), BufferSlice(Buffer.SCRATCH, 0, 6)
    assert lower_rank(schedule, 0, 6, grouped=grouped).operations == (
        (Send(0, 2, whole, 0), Receive(0, 1, aside, 1), Copy(0, aside, whole, (0, 1)))
        if grouped
        else (Send(0, 2, whole, 0), Receive(0, 1, whole, 1, (0,)))
    )


def test_what_had_to_wait_for_a_send_makes_room_once_it_is_copied() -> None:
    """Rank 2 sends its value on in the step in which the sum comes, which must not overwrite it before."""
    moves = [
        Transfer(0, 0, 1, 0, True),
        Transfer(0, 2, 1, 0, True),
        Transfer(0, 1, 2, 1),
        Transfer(0, 2, 0, 1),
    ]
    schedule = make("allreduce", [Chunk(Fraction(1), 1)], moves, total=3)
    assert lower_rank(schedule, 2, 1600, pieces=16, window=2).scratch_elements == 2 * 100


def test_a_sum_that_a_relay_replaces_makes_room() -> None:
    """Relay 3 adds up for rank 2 and hands the whole sum down: five slots serve all pieces."""
    up = [Transfer(0, 0, 3, 0, True), Transfer(0, 1, 3, 0, True), Transfer(0, 3, 2, 1, True)]
    down = [Transfer(0, 2, 3, 2), Transfer(0, 3, 0, 3), Transfer(0, 3, 1, 3)]
    schedule = make("allreduce", [Chunk(Fraction(1), 2)], up + down, total=4, ranks=[0, 1, 2])
    assert lower_rank(schedule, 3, 1600, pieces=16, window=2).scratch_elements == 5 * 100


def test_a_relay_that_adds_has_so_many_slots_for_each_input() -> None:
    """Relay 4 adds what three ranks send to the fourth; there the sum takes one, as would its summands."""
    over = [Transfer(0, rank, 4, 0, True) for rank in range(3)]
    chunks, ranks = [Chunk(Fraction(1), 3)], [0, 1, 2, 3]
    schedule = make("reduce", chunks, [*over, Transfer(0, 4, 3, 1, True)], total=5, ranks=ranks, root=3)
    slots = [lower_rank(schedule, rank, 1600, pieces=16, window=2).scratch_elements // 100 for rank in (4, 3)]
    assert slots == [3 * 2, 2]
    met = make("reduce", chunks, [Transfer(0, rank, 3, 0, True) for rank in range(3)], total=4, root=3)
    assert lower_rank(met, 3, 1600, pieces=16, window=4).scratch_elements == 4 * 100


def test_what_comes_twice_is_copied_where_it_is_sent_on_meanwhile() -> None:
    """By one slot, which stays one; what nobody sends on comes where it stays, in a group as well."""
    twice = [Transfer(0, 0, 1, 0), Transfer(0, 0, 1, 1)]
    program = lower_rank(
        make("broadcast", ONE, [*twice, Transfer(0, 1, 2, 1)], total=3),
        *(1, 80),
        pieces=8,
        window=1,
    )
    assert {it.source for it in program.operations if isinstance(it, Copy)} == {
        BufferSlice(Buffer.SCRATCH, 0, 10)
    }
    for grouped in (False, True):
        schedule = make("broadcast", ONE, twice, total=2)
        assert lower_rank(schedule, 1, 6, grouped=grouped).scratch_elements == 0


def test_new_slots_are_taken_up_to_the_length_of_the_message() -> None:
    """Halves of 100 elements; rank 0 adds one half from four ranks in turn, the other comes already added."""
    chunks = [Chunk(Fraction(1, 2), 0), Chunk(Fraction(1, 2), 0)]
    one_by_one = [Transfer(0, rank, 0, rank - 1, True) for rank in range(1, 5)]
    along_a_chain = [Transfer(1, rank, rank - 1, 4 - rank, True) for rank in range(4, 0, -1)]
    schedule = make("reduce", chunks, one_by_one + along_a_chain, total=5)
    # Two new slots for the first half, which its third and fourth summand use again, and one for the second.
    assert lower_rank(schedule, 0, 200).scratch_elements == 300


def test_only_reductions_have_contributors() -> None:
    assert {program.contributors for program in lower(tree_broadcast(), 60)} == {1}
    assert {program.contributors for program in lower(ring_allreduce(4), 60)} == {4}


def test_a_rank_that_sends_to_itself_is_refused() -> None:
    links = [Link(u, v, Fraction(1)) for rank in range(2) for u, v in ((rank, 2), (2, rank))]
    topology = Topology.build("star", 2, links, ["hub"])
    schedule = Schedule.build(
        topology,
        Collective.on(topology, Kind.BROADCAST),
        Method("drawn"),
        Bound(Fraction(1), Cut(frozenset({0}), Fraction(1))),
        [Chunk(Fraction(1), 0)],
        [Transfer(0, 0, 1, 0, via=(2,)), Transfer(0, 1, 1, 1, via=(2,))],
    )
    with pytest.raises(ScheduleError, match="transfer 1: rank 1 sends chunk 0 to itself"):
        lower(schedule, 4)


def test_empty_buffers_need_no_operations() -> None:
    assert all(not program.operations for program in lower(tree_broadcast(), 0, pieces=4))


@pytest.mark.parametrize("kind", [Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL])
def test_own_blocks_are_copied(kind: Kind) -> None:
    copies = [op for op in lower_rank(direct(kind, 3), 0, 9).operations if isinstance(op, Copy)]
    assert len(copies) == 1 and copies[0].source.length == 3 and copies[0].time == 0


def test_programs_are_plain_values() -> None:
    programs = lower(ring_allreduce(3), 10, pieces=2)
    assert pickle.loads(pickle.dumps(programs)) == programs
