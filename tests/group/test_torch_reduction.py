"""Torch's reduce operations on tensors against their definition on exact numbers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist

from arborcast.backends.tensors.torch_reduction import ReductionOperator, name_of, operator_of
from tests.support.group_cases import DTYPES, FACTOR, OPS, values

# Which of them schedules serve: S, and which are gloo's to do or to refuse: the dots.
SERVED = """
              float16 bfloat16 float32 float64 uint8 int8 int32 int64 bool complex64
SUM           S       S        S       S       S     S    S     S     S    .
AVG           S       S        S       S       S     S    S     S     .    .
PRODUCT       S       S        S       S       S     S    S     S     S    .
MIN           S       S        S       S       S     S    S     S     S    .
MAX           S       S        S       S       S     S    S     S     S    .
BAND          .       .        .       .       S     S    S     S     S    .
BOR           .       .        .       .       S     S    S     S     S    .
BXOR          .       .        .       .       S     S    S     S     S    .
PREMUL_SUM    S       S        S       S       .     .    .     .     .    .
"""
CASES = [
    (name, dtype, mark == "S")
    for line in SERVED.splitlines()[2:]
    for name, *marks in [line.split()]
    for dtype, mark in zip(SERVED.split()[:10], marks, strict=True)
]
SERVED_CASES = [(name, dtype) for name, dtype, served in CASES if served]

DEFINITIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "SUM": sum,
    "AVG": lambda numbers: sum(numbers) / len(numbers),
    "PRODUCT": functools.partial(functools.reduce, operator.mul),
    "MIN": min,
    "MAX": max,
    "BAND": functools.partial(functools.reduce, operator.and_),
    "BOR": functools.partial(functools.reduce, operator.or_),
    "BXOR": functools.partial(functools.reduce, operator.xor),
    "PREMUL_SUM": lambda numbers: sum(Fraction(FACTOR) * number for number in numbers),
}


def served(name: str, dtype: str) -> ReductionOperator:
    found = operator_of(OPS[name], DTYPES[dtype])
    assert found is not None
    return found


def test_table_is_complete() -> None:
    assert {(name, dtype) for name, dtype, _ in CASES} == {(name, dtype) for name in OPS for dtype in DTYPES}


@pytest.mark.parametrize(("name", "dtype", "served"), CASES)
def test_what_schedules_serve(name: str, dtype: str, served: bool) -> None:
    found = operator_of(OPS[name], DTYPES[dtype])
    assert (found is not None) == served
    if found is not None:
        assert found.name == name.lower()


@pytest.mark.parametrize(("name", "dtype"), SERVED_CASES)
@pytest.mark.parametrize("contributors", [1, 2, 5, 8])
def test_against_the_definition(name: str, dtype: str, contributors: int) -> None:
    reduction = served(name, dtype)
    given = [values(rank, 64, DTYPES[dtype], name) for rank in range(contributors)]
    kept = [tensor.clone() for tensor in given]
    total = reduction.before(given[0]).clone()
    for tensor in given[1:]:
        reduction.combine(total, reduction.before(tensor), total)
    reduction.after(total, contributors)
    exact = (Fraction, int)[not DTYPES[dtype].is_floating_point]
    expected = [
        DEFINITIONS[name]([exact(number) for number in column])
        for column in zip(*(tensor.tolist() for tensor in given), strict=True)
    ]
    wanted = torch.tensor([float(number) for number in expected], dtype=torch.float64).to(DTYPES[dtype])
    # A quotient may be off by the last bit: torch may multiply by the reciprocal.
    is_quotient = name == "AVG" and DTYPES[dtype].is_floating_point
    tolerance = torch.finfo(DTYPES[dtype]).eps if is_quotient else 0
    torch.testing.assert_close(total, wanted, rtol=tolerance, atol=0)
    for tensor, before in zip(given, kept, strict=True):
        assert torch.equal(tensor, before), "contributions must not change"


@pytest.mark.parametrize("contributors", [100, 127, 128, 129, 255, 256, 257, 1000])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_more_contributors_than_elements_can_count(dtype: torch.dtype, contributors: int) -> None:
    info = torch.iinfo(dtype)
    result = torch.arange(info.min, info.max + 1, dtype=dtype)
    wanted = [int(Fraction(number, contributors)) for number in result.tolist()]
    served("AVG", str(dtype).removeprefix("torch.")).after(result, contributors)
    assert result.tolist() == wanted


@pytest.mark.parametrize(("name", "dtype"), SERVED_CASES)
def test_where_the_result_goes(name: str, dtype: str) -> None:
    reduction = served(name, dtype)
    first, second = (values(rank, 33, DTYPES[dtype], name) for rank in (0, 1))
    fresh = torch.empty_like(first)
    reduction.combine(first, second, fresh)
    into_first, into_second = first.clone(), second.clone()
    reduction.combine(into_first, second, into_first)
    reduction.combine(first, into_second, into_second)
    assert torch.equal(fresh, into_first)
    assert torch.equal(fresh, into_second)
    swapped = torch.empty_like(first)
    reduction.combine(second, first, swapped)
    assert torch.equal(fresh, swapped)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_factor(dtype: str) -> None:
    contribution = values(0, 17, DTYPES[dtype])
    expected = contribution * 0.25
    for factor in (0.25, torch.tensor([0.25], dtype=torch.float64)):
        reduction = operator_of(dist._make_nccl_premul_sum(factor), DTYPES[dtype])  # type: ignore[attr-defined]
        assert reduction is not None
        before = reduction.before(contribution)
        assert before.dtype == DTYPES[dtype]
        assert torch.equal(before, expected)
        assert before.data_ptr() != contribution.data_ptr()
        in_place = contribution.clone()
        reduction.before_in_place(in_place)
        assert torch.equal(in_place, expected)


def test_only_what_needs_it_is_copied_or_divided() -> None:
    contribution = torch.ones(3)
    total = served("SUM", "float32")
    assert total.before(contribution) is contribution
    total.before_in_place(contribution)
    total.after(contribution, 7)
    assert contribution.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "uint16", "uint64", "int16", "complex128"])
@pytest.mark.parametrize("name", list(OPS))
def test_other_types_are_served_only_where_torch_can_combine_them(name: str, dtype: str) -> None:
    reduction = operator_of(OPS[name], getattr(torch, dtype))
    if reduction is not None:
        given = torch.tensor([1, 2, 3]).to(getattr(torch, dtype))
        reduction.combine(reduction.before(given), reduction.before(given), torch.empty_like(given))


def test_names() -> None:
    assert name_of(dist.ReduceOp.BXOR) == "BXOR"
    assert name_of(dist.ReduceOp(dist.ReduceOp.MIN)) == "MIN"
    assert name_of(OPS["PREMUL_SUM"]) == "PREMUL_SUM"


def test_premul_sum_without_a_factor() -> None:
    assert operator_of(dist.ReduceOp.PREMUL_SUM, torch.float32) is None
