"""Exact systems put into their equations, and exact vertices of small programs."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.lp.exact_system import ExactSystem
from arborcast.synth.lp.linear_program import LinearProgram


@st.composite
def systems(draw):
    size = draw(st.integers(1, 9))
    entries = draw(st.lists(st.integers(-3, 3), min_size=size * size, max_size=size * size))
    largest = draw(st.sampled_from([3, 10**6, 2**100]))
    right = draw(st.lists(st.integers(-largest, largest), min_size=size, max_size=size))
    return np.array(entries, dtype=np.int64).reshape(size, size), right


def determinant(matrix: np.ndarray) -> int:
    """By expansion along the first row."""
    if len(matrix) == 1:
        return int(matrix[0, 0])
    return sum(
        (-1) ** k * int(matrix[0, k]) * determinant(np.delete(matrix[1:], k, axis=1))
        for k in range(len(matrix))
        if matrix[0, k]
    )


@settings(max_examples=80)
@given(systems())
def test_solutions_satisfy_their_systems(drawn):
    matrix, right = drawn
    try:
        system = ExactSystem(matrix)
    except ArithmeticError:
        assert len(matrix) > 6 or determinant(matrix) == 0
        return
    x, y = system.solve(right), system.solve_transposed(right)
    size = range(len(right))
    assert [sum(int(matrix[i, j]) * x[j] for j in size) for i in size] == right
    assert [sum(int(matrix[i, j]) * y[i] for i in size) for j in size] == right


def test_singular_systems_are_refused():
    with pytest.raises(ArithmeticError, match="the 2 x 2 basis of the LP is singular"):
        ExactSystem(np.array([[1, 2], [2, 4]]))


def test_a_matrix_that_is_singular_modulo_primes_is_solved_by_another():
    first, second = 2**31 - 1, 2**31 - 19
    system = ExactSystem(np.array([[first, 1, 0], [0, second, 1], [0, 0, 1]]))
    x = system.solve([first + 1, second + 5, 5])
    assert x == [1, 1, 5]
    assert system.solve_transposed([first, second + 1, 2]) == [1, 1, 1]


def test_vertex_and_prices_are_exact():
    # maximise x + y where 3x + y <= 7 and x + 3y <= 7: the vertex is (7/4, 7/4).
    program = LinearProgram((1, 1), scale=7)
    program.add_row([0, 1], [3, 1], upper=7)
    program.add_row([0, 1], [1, 3], upper=7)
    assert program.solve() == pytest.approx([1.75, 1.75])
    vertex = program.exact()
    assert vertex.values == (Fraction(7, 4), Fraction(7, 4))
    assert vertex.prices == (Fraction(1, 4), Fraction(1, 4))
    program.add_row([0], [1], upper=1)  # goes on from there: x = 1, y = 2
    program.solve()
    assert program.exact().values == (1, 2)


def test_programs_without_an_optimum_say_so():
    program = LinearProgram((1,), scale=1)
    program.add_row([0], [1], lower=1)
    with pytest.raises(ArithmeticError, match="HiGHS ended with"):
        program.solve()
