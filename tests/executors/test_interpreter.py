"""Programs give what the collective is defined to give, whatever the transport does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from arborcast.backends import lower
from arborcast.backends.lowering.program import Receive, Reduce, Send
from arborcast.backends.measure.job import Reduction
from arborcast.backends.measure.samples import EXACT_INTEGERS, sample_values
from arborcast.synth.errors import InputError
from tests.support.drawn_schedules import (
    recursive_doubling,
    reductions_before_sends,
    ring_allreduce,
    uneven_allreduce,
)
from tests.support.interpreter import Freedom, interpret


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
