"""Programs of switches that add and multicast: what a relay in their place would do, and no deadlock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.backends.lowering.layout import Buffer, BufferSlice
from arborcast.backends.lowering.lower import lower, lower_rank
from arborcast.backends.lowering.program import Receive, Reduce, Send
from arborcast.backends.measure.program_description import describe_program, program_of
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Schedule
from arborcast.synth.simulation.pieces import SEVERAL_HOSTS, most_messages, switches_in
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Switch, Topology
from arborcast.synth.verification.verifier import verify
from tests.support.deadlock import check_deadlock
from tests.support.definition import define
from tests.support.in_network import one_way, shared_roots, star, turning, two_levels
from tests.support.interpreter import Freedom, interpret

PLAIN = Switch("s", reduces=True, multicasts=True)
LOOPBACK = Switch("s", reduces=True, multicasts=True, loopback=True)
SCHEDULES = [
    turning(star(4)),
    turning(two_levels(2, 3)),
    shared_roots(star(3, PLAIN)),
    shared_roots(star(4, LOOPBACK)),
    one_way(star(4), Kind.REDUCE),
    one_way(star(4), Kind.BROADCAST),
]


def test_a_star_as_drawn() -> None:
    #  piece 0 of three ranks is added as it comes and goes to all of them; slots of scratch are of 2 elements
    first, second, third = (BufferSlice(Buffer.SCRATCH, at, at + 2) for at in (0, 2, 4))
    program = lower_rank(turning(star(3)), 3, 8, pieces=4)
    assert program.operations[:5] == (
        Receive(0, 0, first, 0),
        Receive(0, 1, second, 4),
        Reduce(0, second, first, after=(0, 1)),
        Receive(0, 2, third, 8),
        Reduce(0, third, first, after=(2, 3)),
    )
    sends = [one for one in program.operations if isinstance(one, Send) and one.time == 1]
    assert [(one.peer, one.source, one.after) for one in sends] == [(rank, first, (4,)) for rank in range(3)]
    assert (program.input_elements, program.output_elements) == (0, 0)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: f"{one.collective.kind}-{one.topology.name}")
@given(st.integers(0, 50), st.integers(1, 5), st.integers(1, 3), st.integers(0, 1 << 20))
@settings(max_examples=25)
def test_a_switch_does_what_a_relay_in_its_place_does(
    schedule: Schedule, count: int, pieces: int, window: int, seed: int
) -> None:
    assert verify(schedule).correct
    topology = schedule.topology
    relays = replace(schedule, topology=Topology(topology.name, topology.holders, topology.links))
    programs = lower(schedule, count, pieces=pieces, window=window)
    as_relays = lower(relays, count, pieces=pieces, window=window)
    assert [one.operations for one in programs] == [one.operations for one in as_relays]
    assert all(lower_rank(schedule, one.rank, count, pieces=pieces, window=window) == one for one in programs)
    check_deadlock(programs)
    chance = np.random.default_rng(seed)
    gives = schedule.collective.ranks if schedule.collective.kind.reduces else range(1)
    given = [chance.integers(-99, 99, count) if rank in gives else None for rank in range(topology.holders)]
    # A rank that is only given to has room for what comes, and a reduction's root works in place.
    if schedule.collective.kind is Kind.BROADCAST:
        given[1 : topology.ranks] = [np.zeros(count, np.int64)] * (topology.ranks - 1)
    for freedom in Freedom:
        outputs = interpret(programs, given, freedom=freedom, seed=seed)
        for rank, due in enumerate(define(schedule.collective, given)):
            if due is not None:
                np.testing.assert_array_equal(outputs[rank], due)


def shared_roots_of_one(topology: Topology) -> ImplicitSchedule:
    """Of `shared_roots` the chunk of rank 0, which the rotation takes to the others; the switch stays."""
    whole = shared_roots(topology)
    turn = (*range(1, topology.ranks), 0, topology.ranks)
    group = Translations.generated(topology, [turn])
    own = [transfer for transfer in whole.transfers if transfer.chunk == 0]
    return ImplicitSchedule.build(
        topology,
        Collective.on(topology, Kind.ALLREDUCE),
        whole.method,
        whole.bound,
        group,
        whole.chunks[:1],
        own,
    )


@pytest.mark.parametrize("switch", [PLAIN, LOOPBACK])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_switch_that_translations_keep_has_a_part_in_all_images(ranks: int, switch: Switch) -> None:
    schedule = shared_roots_of_one(star(ranks, switch))
    whole = schedule.expand()
    assert verify(whole).correct
    assert switches_in(schedule) == switches_in(whole) == {ranks}
    assert most_messages(schedule) == most_messages(whole) == most_messages(shared_roots(whole.topology))
    assert lower(schedule, 5 * ranks, pieces=2) == lower(whole, 5 * ranks, pieces=2)


def test_the_program_of_a_switch_is_shown() -> None:
    lines = describe_program(program_of(turning(star(3)), 3, 1 << 20), is_switch=True)
    assert lines[0] == "switch 3: 8 operations"
    assert lines[1:4] == [
        "  sends     3 to 3 ranks, 786432 elements",
        "  receives  3 from 3 ranks, 786432 elements",
        "  local     2 reductions, 0 copies",
    ]
    with pytest.raises(InputError, match=r"must be in 0..3, the ranks of star-3 and its able switches$"):
        program_of(turning(star(3)), 4, 1 << 20)


def test_memory_is_that_of_what_is_under_way() -> None:
    for pieces in (16, 64, 256):
        program = lower_rank(turning(star(4)), 4, 1 << 20, pieces=pieces)
        written = {one.into for one in program.operations if isinstance(one, Reduce)}
        # 8 pieces, and for each the arrivals of 4 ranks, which join their sums and touch no memory
        assert len(written) <= 8 * 4
        assert program.scratch_elements == min(1 << 20, 8 * 4 * (1 << 20) // pieces)


def test_a_switch_that_stores_gets_whole_chunks() -> None:
    storing = Switch("s", reduces=True, multicasts=True, turns=True, stores=True)
    assert SEVERAL_HOSTS.pieces(turning(star(3)), 1 << 24) >= 16
    assert SEVERAL_HOSTS.pieces(turning(star(3, storing)), 1 << 24) == 1
