"""Square integer systems solved in exact arithmetic, so that a vertex of a floating LP becomes a proof.

p-adic lifting (Dixon 1982): one inverse modulo a prime, then as many digits as the answer needs, then
fractions from digits; every answer is checked by putting it into the system.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.kernels.compiled import Ints

_PRIMES = (2147483647, 2147483629, 2147483587, 2147483579, 2147483563)  # the largest below 2**31


class ExactSystem:
    """The systems `matrix x = right` and `matrix^T y = right` for one square integer matrix.

    Raises:
        ArithmeticError: the matrix is singular.
    """

    def __init__(self, matrix: Ints) -> None:
        self._matrix = matrix
        for prime in _PRIMES:
            inverse = _inverse(matrix, prime)
            if inverse is not None:
                self._prime, self._inverse = prime, inverse
                return
        raise ArithmeticError(f"the {len(matrix)} x {len(matrix)} basis of the LP is singular")

    def solve(self, right: list[int]) -> list[Fraction]:
        """The x with `matrix x = right`."""
        return _lift(self._matrix, self._inverse, right, self._prime)

    def solve_transposed(self, right: list[int]) -> list[Fraction]:
        """The y with `matrix^T y = right`."""
        return _lift(self._matrix.T, self._inverse.T, right, self._prime)


def solve_basis(
    model: Any,
    matrix: Callable[[Sequence[int], Sequence[int]], Ints],
    side: Callable[[int, object], int],
    gain: Callable[[int], int],
) -> tuple[dict[int, Fraction], dict[int, Fraction]]:
    """The vertex at which HiGHS ended, exactly: values of its basic columns, prices of its tight rows.

    All other values and prices are 0. Tight rows hold exactly, the others up to the tolerance of HiGHS.

    Args:
        model: of HiGHS, after a run.
        matrix: the entries of some rows in some columns.
        side: at which a tight row stands, from its number and the status that HiGHS gives it.
        gain: of a column.

    Raises:
        ArithmeticError: the basis is singular.
    """
    basis = model.getBasis()
    of_column, of_row = list(basis.col_status), list(basis.row_status)  # each access copies all of them
    columns = [column for column, status in enumerate(of_column) if status.name == "kBasic"]
    tight = [row for row, status in enumerate(of_row) if status.name != "kBasic"]
    if len(columns) != len(tight):
        raise ArithmeticError(f"the basis of the LP has {len(columns)} columns and {len(tight)} rows")
    system = ExactSystem(matrix(tight, columns))
    values = system.solve([side(row, of_row[row]) for row in tight])
    prices = system.solve_transposed([gain(column) for column in columns])
    return dict(zip(columns, values, strict=True)), dict(zip(tight, prices, strict=True))


def _lift(matrix: Ints, inverse: Ints, right: list[int], prime: int) -> list[Fraction]:
    size = len(right)
    if size == 0:
        return []
    exact: NDArray[Any] = matrix.astype(object)  # Python integers: the residue starts as large as `right`
    residue = np.array(right, dtype=object)
    digits = np.zeros(size, dtype=object)
    modulus, attempt_at = 1, 4
    for count in range(1, _digits_needed(matrix, right, prime) + 1):
        short = (residue % prime).astype(np.int64)
        digit = ((inverse * short[None, :]) % prime).sum(axis=1) % prime
        digits += digit.astype(object) * modulus
        modulus *= prime
        residue = (residue - exact @ digit.astype(object)) // prime
        if count == attempt_at:
            attempt_at *= 2
            values = _fractions(digits, modulus)
            if values is not None and _solves(exact, values, right):
                return values
    values = _fractions(digits, modulus)
    assert values is not None and _solves(exact, values, right), "enough digits determine the fractions"
    return values


def _digits_needed(matrix: Ints, right: list[int], prime: int) -> int:
    """Digits after which Cramer's rule and Hadamard's bound fix numerators and denominators."""
    rows = sum(math.log2(max(1.0, float((row.astype(float) ** 2).sum()))) / 2 for row in matrix.T)
    size = math.log2(1 + math.sqrt(sum(float(value) ** 2 for value in right)))
    return 4 + math.ceil((2 * rows + size + 2) / math.log2(prime))


def _fractions(digits: NDArray[Any], modulus: int) -> list[Fraction] | None:
    """The fractions of small numerator and denominator that are congruent to the digits."""
    limit = math.isqrt(modulus // 2)
    common = 1
    values = []
    for digit in digits:
        # Components share most of their denominator: only what is new must be found.
        above, below = _reconstruct(int(digit) * common % modulus, modulus, limit)
        common *= below
        if below == 0 or common > limit:
            return None
        values.append(Fraction(above, common))
    return values


def _reconstruct(residue: int, modulus: int, limit: int) -> tuple[int, int]:
    """The numerator up to `limit` and denominator with numerator = residue * denominator (Wang 1981)."""
    larger, smaller = modulus, residue
    before, now = 0, 1
    while smaller > limit:
        quotient = larger // smaller
        larger, smaller = smaller, larger - quotient * smaller
        before, now = now, before - quotient * now
    return (-smaller, -now) if now < 0 else (smaller, now)


def _solves(matrix: NDArray[Any], values: list[Fraction], right: list[int]) -> bool:
    common = math.lcm(*(value.denominator for value in values))
    whole = np.array([value.numerator * (common // value.denominator) for value in values], dtype=object)
    return bool((matrix @ whole == np.array(right, dtype=object) * common).all())


def _inverse(matrix: Ints, prime: int) -> Ints | None:
    """Of a matrix modulo a prime, by Gauss and Jordan; None where it is singular there."""
    size = len(matrix)
    both = np.hstack([matrix % prime, np.eye(size, dtype=np.int64)])
    for column in range(size):
        usable = np.flatnonzero(both[column:, column])
        if not len(usable):
            return None
        pivot = column + int(usable[0])
        both[[column, pivot]] = both[[pivot, column]]
        both[column] = both[column] * pow(int(both[column, column]), -1, prime) % prime
        others = np.flatnonzero(both[:, column])
        others = others[others != column]
        # Bases are sparse: only entries that change are touched. Products stay within 62 bits.
        part = np.ix_(others, np.flatnonzero(both[column]))
        both[part] = (both[part] - both[part[0], column] * both[column, part[1]]) % prime
    return both[:, size:]
