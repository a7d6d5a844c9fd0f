"""Schedules exported as programs: right by the interpreter, within limits, and schedules again."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.backends.programs.as_schedule import as_schedule
from arborcast.backends.programs.exporting.export import export_program, rounded
from arborcast.backends.programs.msccl.reader import read
from arborcast.backends.programs.msccl.writer import KINDS, file_steps, write
from arborcast.backends.programs.program import ProgramError
from arborcast.synth.collective import Kind
from arborcast.synth.nccl_protocol import Protocol
from arborcast.synth.schedule import Chunk, Method, Transfer
from arborcast.synth.topology import Topology
from arborcast.topologies import load
from tests.support.program_mutants import interpret_all
from tests.support.strategies import topologies


@pytest.mark.parametrize("kind", KINDS)
def test_exports_move_every_element_where_it_belongs(kind: Kind) -> None:
    for spec, protocol in (("ring:4", Protocol.SIMPLE), ("star:3", Protocol.LL)):
        for in_place in (True, False):
            _check_export(load(spec), kind, protocol, in_place)


@pytest.mark.long
@settings(max_examples=60)
@given(
    topologies(max_ranks=5, max_bandwidth=3),
    st.sampled_from(list(KINDS)),
    st.sampled_from([Protocol.SIMPLE, Protocol.LL]),
    st.booleans(),
)
def test_exports_from_any_fabric_are_right(
    topology: Topology, kind: Kind, protocol: Protocol, in_place: bool
) -> None:
    _check_export(topology, kind, protocol, in_place)


def _check_export(topology: Topology, kind: Kind, protocol: Protocol, in_place: bool) -> None:
    schedule = synth.solve(topology, kind)
    try:
        program = export_program(schedule, in_place=in_place, protocol=protocol)
    except ProgramError as error:
        # Exchanges in place may need more room than FIFOs have; nothing else may be missing.
        assert kind is Kind.ALLTOALL and in_place, error
        return
    back = read(write(program), root=program.root)
    assert back.parts == program.parts
    assert interpret_all(back, range(5)).correct
    again = as_schedule(program, topology)  # verified; programs do not say which way through switches
    assert again.rate == schedule.rate or len({transfer.via for transfer in schedule.transfers}) > 1


def test_in_place_nothing_is_written_over_what_is_still_to_be_sent() -> None:
    pair = load("full:2")
    collective = synth.Collective.on(pair, "alltoall")
    chunks = [Chunk(Fraction(1, 2), 0, 1), Chunk(Fraction(1, 2), 1, 0)]
    transfers = [Transfer(0, 0, 1, 0), Transfer(1, 1, 0, 1)]  # one after the other
    bound = synth.bound(pair, "alltoall")
    schedule = synth.Schedule.build(pair, collective, Method("drawn"), bound, chunks, transfers)
    program = export_program(schedule)
    drawn = [[str(step) for block in part.blocks for step in block.operations] for part in program.parts]
    assert drawn == [["s i1", "r o1"], ["r s0", "s i0", "cpy s0 -> o0"]]
    assert interpret_all(program, range(10)).correct


def test_an_export_is_drawn() -> None:
    program = export_program(synth.solve(load("ring:3"), "broadcast", max_trees=1))
    drawn = [
        [(block.receive, block.send, *map(str, block.operations)) for block in part.blocks]
        for part in program.parts
    ]
    assert drawn == [[(None, 1, "s o0"), (None, 2, "s o0")], [(0, None, "r o0")], [(0, None, "r o0")]]


def test_what_does_not_fit_names_the_limit_and_by_how_much() -> None:
    broadcast = synth.solve(load("ring:3"), "broadcast")
    with pytest.raises(ProgramError, match=r"over 2 channels rank 0 has a block of 71 steps, 7 beyond 64"):
        export_program(broadcast, chunks=10_000)
    with pytest.raises(ProgramError, match=r"40000 chunks, 7233 more than offsets go to \(32767\)"):
        export_program(broadcast, chunks=40_000)
    relayed = synth.solve(load("dgx1"), "allreduce", ranks=[0, 1, 2])
    with pytest.raises(ProgramError, match=r"all ranks take part .* 5 are relays \(3, 4, 5, 6, 7\)"):
        export_program(relayed)


def test_blocks_stay_within_64_steps_and_64_blocks() -> None:
    program = export_program(synth.solve(load("torus:4x4"), "alltoall"), in_place=False)
    assert max(file_steps(block) for part in program.parts for block in part.blocks) <= 64
    assert max(len(part.blocks) for part in program.parts) <= 64
    assert program.channels <= 32


def test_shares_are_rounded_to_as_many_chunks_as_asked_for() -> None:
    schedule = synth.solve(load("dgx1"), "allreduce")
    short = rounded(schedule, 16)
    assert synth.verify(short).correct
    assert sum(chunk.share for chunk in short.chunks) == 1
    assert {chunk.share.denominator for chunk in short.chunks} <= {1, 2, 4, 8, 16}
    program = export_program(schedule, chunks=16)
    assert program.chunks == 16
    assert as_schedule(program, schedule.topology).rate == short.rate < schedule.rate


def test_a_foreign_program_becomes_a_schedule_with_its_own_rate() -> None:
    from tests.programs.drawn import drawn
    from tests.programs.test_checker import RING

    topology = load("ring:3,bandwidth=2")
    found = as_schedule(drawn(RING, chunks=3), topology)
    # Each link carries four thirds of the buffer at 2 GB/s.
    assert found.rate == Fraction(3, 2)
    assert found.steps == 4
    with pytest.raises(ProgramError, match=re.escape("the program is for 3 ranks, ring:4 has 4")):
        as_schedule(drawn(RING, chunks=3), load("ring:4"))


ALL_PAIRS = """
    0>1<1: s i0; r s0 !
    0>2<2: s i0; r s1 !
    0: re s0 i0 @0.1 @1.1; re s1 i0
    1>0<0: s i0; r s0 !
    1>2<2: s i0; r s1 !
    1: re s0 i0 @0.1 @1.1; re s1 i0
    2>0<0: s i0; r s0 !
    2>1<1: s i0; r s1 !
    2: re s0 i0 @0.1 @1.1; re s1 i0
"""


def test_what_is_sent_before_it_is_added_to_stays_what_it_was() -> None:
    """Programs that add out of scratch once all has come used to be no set of steps."""
    from tests.programs.drawn import drawn

    found = as_schedule(drawn(ALL_PAIRS, scratch=2), load("full:3"))
    assert (found.steps, found.transfer_count, found.rate) == (1, 6, 1)
    apart = ALL_PAIRS.replace("re s0 i0 @0.1 @1.1; re s1 i0", "re s0 s1 @0.1 @1.1; re s1 i0", 1)
    assert as_schedule(drawn(apart, scratch=2), load("full:3")).rate == 1
    two_sums = """
        0>1<1: r s0 !; s s3 @2.3
        0>2<2: r s1 !; s s2 @2.1
        0: cpy i0 s2; re s0 s2 @0.0 !; cpy i0 s3; re s1 s3 @1.0 !; re s0 i0; re s1 i0
        1>0<0: s i0; rrc i0 i0
        2>0<0: s i0; rrc i0 i0
    """
    with pytest.raises(ProgramError, match="rank 0 keeps several sums of one chunk"):
        as_schedule(drawn(two_sums, scratch=4), load("full:3"))
