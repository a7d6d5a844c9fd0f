"""Counts and orders in clauses, against all assignments of their literals."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pysat.solvers import Cadical195

from arborcast.synth.chunks.encodings.cardinality import FEW, Clauses, not_before


def allowed(clauses: Clauses, literals: list[int]) -> set[tuple[bool, ...]]:
    """The values of the literals that some model has."""
    found = set()
    with Cadical195(bootstrap_with=clauses.clauses) as solver:
        for values in product([False, True], repeat=len(literals)):
            chosen = [literal if value else -literal for literal, value in zip(literals, values, strict=True)]
            if solver.solve(assumptions=chosen):
                found.add(values)
    return found


@given(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=8), st.integers(0, 5))
def test_a_bound_on_a_count(variables: int, listed: list[int], most: int) -> None:
    """Literals listed twice count twice, negated ones when they are false."""
    clauses = Clauses()
    literals = [clauses.new() for _ in range(variables)]
    signed = [
        (-1 if number % 2 else 1) * literals[number % variables] for number in listed
    ]  # some negated, some more than once
    clauses.at_most(signed, most)
    expected = {
        values
        for values in product([False, True], repeat=variables)
        if sum(values[abs(literal) - 1] == (literal > 0) for literal in signed) <= most
    }
    assert allowed(clauses, literals) == expected


@given(st.integers(0, 6), st.integers(1, 7))
def test_one_count_serves_every_bound(variables: int, most: int) -> None:
    clauses = Clauses()
    literals = [clauses.new() for _ in range(variables)]
    counted = clauses.count(literals, most)
    assert len(counted) == min(variables, most)
    for bound, output in enumerate(counted):
        with Cadical195(bootstrap_with=[*clauses.clauses, [-output]]) as solver:
            for values in product([False, True], repeat=variables):
                chosen = [lit if value else -lit for lit, value in zip(literals, values, strict=True)]
                assert solver.solve(assumptions=chosen) is (sum(values) <= bound)


@pytest.mark.parametrize("variables", [0, 1, 2, FEW, FEW + 1, FEW + 3])
def test_at_most_one(variables: int) -> None:
    clauses = Clauses()
    literals = [clauses.new() for _ in range(variables)]
    clauses.at_most_one(literals)
    assert {sum(values) for values in allowed(clauses, literals)} == set(range(min(variables, 1) + 1))
    assert len(allowed(clauses, literals)) == variables + 1


@pytest.mark.parametrize("length", range(5))
def test_an_order_is_that_of_numbers(length: int) -> None:
    clauses = Clauses()
    literals = [clauses.new() for _ in range(2 * length)]
    for clause in not_before(literals[:length], literals[length:], negate=int.__neg__, new=clauses.new):
        clauses.add(*clause)
    expected = {
        values
        for values in product([False, True], repeat=2 * length)
        if values[:length] >= values[length:]  # tuples of truth values compare like numbers in base two
    }
    assert allowed(clauses, literals) == expected


def test_an_empty_clause_never_holds() -> None:
    clauses = Clauses()
    clauses.add()
    assert allowed(clauses, [clauses.new()]) == set()
