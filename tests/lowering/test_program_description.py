"""The program of one rank as people and tools see it."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from arborcast.backends.lowering.lower import lower_rank
from arborcast.backends.measure.program_description import describe_program, program_document, program_of
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.schedule import Chunk, Transfer
from tests.support.drawn_implicit import circulant, implicit
from tests.support.drawn_schedules import make, ring_allreduce
from tests.support.refusals import refuses

CHAIN = make(
    "reduce", [Chunk(Fraction(1), 0)], [Transfer(0, 2, 1, 0, True), Transfer(0, 1, 0, 1, True)], total=3
)


def test_in_words_as_drawn() -> None:
    assert describe_program(program_of(CHAIN, 1, 24, pieces=2)) == [
        "rank 1: 6 operations",
        "  sends     2 to 1 rank, 6 elements",
        "  receives  2 from 1 rank, 6 elements",
        "  local     2 reductions, 0 copies",
        "  elements  input 6, output 0, scratch 6",
        "  number  time  operation",
        "       0     0  receive scratch[0:3] from rank 2 (tag 0)",
        "       1     0  reduce input[0:3] into scratch[0:3], after 0",
        "       2     1  receive scratch[3:6] from rank 2 (tag 1)",
        "       3     1  reduce input[3:6] into scratch[3:6], after 2",
        "       4     1  send scratch[0:3] to rank 0 (tag 2), after 1",
        "       5     2  send scratch[3:6] to rank 0 (tag 3), after 3",
    ]


def test_long_programs_are_cut_and_say_so() -> None:
    program = program_of(CHAIN, 1, 24, pieces=2)
    assert describe_program(program, most=2)[-2:] == [
        "       1     0  reduce input[0:3] into scratch[0:3], after 0",
        "  ... and 4 more",
    ]
    assert "more" not in describe_program(program, most=None)[-1]
    assert describe_program(program_of(CHAIN, 1, 0)) == [
        "rank 1: 0 operations",
        "  sends     0 to 0 ranks, 0 elements",
        "  receives  0 from 0 ranks, 0 elements",
        "  local     0 reductions, 0 copies",
        "  elements  input 0, output 0, scratch 0",
    ]


def test_as_json() -> None:
    document = program_document(program_of(CHAIN, 1, 24, pieces=1))
    assert json.loads(json.dumps(document)) == {
        "rank": 1,
        "input_elements": 6,
        "output_elements": 0,
        "scratch_elements": 6,
        "in_place": False,
        "contributors": 3,
        "operations": [
            {"do": "receive", "peer": 2, "into": ["scratch", 0, 6], "tag": 0, "time": 0, "after": []},
            {"do": "reduce", "from": ["input", 0, 6], "into": ["scratch", 0, 6], "time": 0, "after": [0]},
            {"do": "send", "peer": 0, "from": ["scratch", 0, 6], "tag": 1, "time": 1, "after": [1]},
        ],
    }


def test_both_forms_give_one_program() -> None:
    schedule = implicit(circulant(7, {1: 1, 2: 1}), Kind.ALLGATHER)
    # 703 bytes are 175 elements of 4 bytes, 25 for each of 7 ranks.
    assert (
        program_of(schedule, 3, 703) == program_of(schedule.expand(), 3, 703) == lower_rank(schedule, 3, 175)
    )


def test_pieces_are_those_of_a_run() -> None:
    # Chunks of 4 MiB are cut into pieces of 1 MiB.
    program = program_of(ring_allreduce(4), 0, 16 << 20, dtype="float64")
    assert program == lower_rank(ring_allreduce(4), 0, 2 << 20, pieces=4)


@refuses("arguments", "message")
def test_what_there_is_not_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        program_of(CHAIN, **{"rank": 0, "size_bytes": 8, **arguments})  # type: ignore[arg-type]
