"""Programs give what the collective is defined to give, whatever the transport does."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.backends import lower
from arborcast.backends.lowering.layout import lay_out
from arborcast.backends.lowering.program import Program, Receive, Reduce, Send
from arborcast.backends.measure.job import Array, Reduction
from arborcast.backends.measure.samples import EXACT_INTEGERS, sample_data, sample_values
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.schedule import Chunk, Schedule, Transfer
from tests.support.definition import define
from tests.support.drawn_schedules import (
    DRAWN,
    make,
    recursive_doubling,
    reductions_before_sends,
    ring_allreduce,
    schedules,
    uneven_allreduce,
)
from tests.support.interpreter import Freedom, interpret

CASES = {
    **DRAWN,
    "sent before it is replaced": reductions_before_sends(),
    "two additions at once": make(
        "reduce-scatter",
        [Chunk(Fraction(1, 3), owner) for owner in range(3)],
        [Transfer(owner, rank, owner, 0, True) for owner in range(3) for rank in range(3) if rank != owner],
        total=3,
    ),
}


def inputs_for(
    schedule: Schedule, programs: tuple[Program, ...], dtype: str, reduction: Reduction
) -> list[Array | None]:
    """Data for every rank that gives some."""
    collective = schedule.collective
    return [
        np.concatenate(
            [
                np.empty(0),
                *(
                    part
                    for _, part in sample_data(
                        collective,
                        program.rank,
                        program.output_elements if program.in_place else program.input_elements,
                        dtype=dtype,
                        reduction=reduction,
                        seed=0,
                    )
                ),
            ]
        ).astype(dtype)
        if _gives(collective, program.rank)
        else None
        for program in programs
    ]


def _gives(collective: Collective, rank: int) -> bool:
    if collective.kind in {Kind.BROADCAST, Kind.SCATTER}:
        return rank == collective.root
    return rank in collective.ranks


def check(
    schedule: Schedule,
    size: int,
    pieces: int,
    freedom: Freedom,
    *,
    seed: int = 0,
    window: int = 8,
    reduction: Reduction = Reduction.SUM,
    dtype: str = "int64",
) -> None:
    programs = lower(schedule, size * lay_out(schedule, 0).blocks, pieces=pieces, window=window)
    inputs = inputs_for(schedule, programs, dtype, reduction)
    expected = define(schedule.collective, inputs, reduction)
    found = interpret(programs, inputs, reduction=reduction, dtype=dtype, freedom=freedom, seed=seed)
    for rank, (wanted, got) in enumerate(zip(expected, found, strict=True)):
        if wanted is None:
            assert not len(got), f"rank {rank} gets nothing"
        else:
            np.testing.assert_array_equal(got, wanted, f"rank {rank}")


@pytest.mark.parametrize("freedom", Freedom)
@pytest.mark.parametrize("name", CASES)
def test_drawn_schedules(name: str, freedom: Freedom) -> None:
    for size in (0, 1, 2, 23):
        for pieces in (1, 3):
            check(CASES[name], size, pieces, freedom, window=2)


@given(
    schedules(),
    st.integers(0, 50),
    st.integers(1, 5),
    st.sampled_from(Freedom),
    st.integers(0, 2**16),
    st.integers(1, 3),
)
@settings(max_examples=250)
def test_random_schedules(
    schedule: Schedule, size: int, pieces: int, freedom: Freedom, seed: int, window: int
) -> None:
    check(schedule, size, pieces, freedom, seed=seed, window=window)


@given(schedules([kind for kind in Kind if kind.reduces]), st.sampled_from(Reduction), st.integers(0, 20))
@settings(max_examples=60)
def test_every_reduction_on_every_type(schedule: Schedule, reduction: Reduction, size: int) -> None:
    for dtype in ("float32", "float64", "int64"):
        check(schedule, size, 2, Freedom.BLOCKING, reduction=reduction, dtype=dtype)


@pytest.mark.parametrize("forgetful", [Send, Receive, Reduce])
def test_a_missing_dependency_shows(forgetful: type[Send | Receive | Reduce]) -> None:
    """The sly transport must find out when operations of one sort do not wait for others."""
    programs = [
        dataclasses.replace(
            program,
            operations=tuple(
                dataclasses.replace(op, after=()) if isinstance(op, forgetful) else op
                for op in program.operations
            ),
        )
        for program in lower(ring_allreduce(4), 8, pieces=2, window=1)
    ]
    inputs = [10**rank * np.arange(1, 9) for rank in range(4)]
    results = [interpret(programs, inputs, freedom=Freedom.DATAFLOW, seed=seed) for seed in range(30)]
    assert any((output != sum(inputs)).any() for outputs in results for output in outputs)


def test_an_average_of_integers_rounds_towards_zero() -> None:
    inputs = [np.array([-7, 7]), np.array([0, 0]), np.array([0, 0])]
    found = interpret(lower(uneven_allreduce(), 2), inputs, reduction=Reduction.AVG)
    assert [array.tolist() for array in found] == [[-2, 2]] * 3


def test_data_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 1: needs 4 elements, got 3"):
        interpret(lower(ring_allreduce(2), 4), [np.zeros(4), np.zeros(3)])


def test_unknown_reductions_are_refused() -> None:
    with pytest.raises(InputError, match="reduction xor: must be one of sum, avg, min, max, product"):
        Reduction.of("xor")


@pytest.mark.parametrize("dtype", EXACT_INTEGERS)
def test_sample_values_add_up_exactly(dtype: str) -> None:
    data = [sample_values(rank, 1000, dtype=dtype, reduction=Reduction.SUM, ranks=8) for rank in range(8)]
    assert np.abs(np.sum(np.abs(data), axis=0)).max() <= EXACT_INTEGERS[dtype]
    assert all((first != second).any() for first in data for second in data if first is not second)
    assert all((row[1:] != row[:-1]).mean() > 0.9 for row in data)


def test_an_exchange_of_two_steps_is_two_high() -> None:
    """Both ends of an exchange start from the state before the step, so that it makes no chain within it."""
    assert recursive_doubling().height == 2
    assert ring_allreduce(4).height == 3
    assert reductions_before_sends().height == 2
