"""Translations made larger by one more element, and the independent generators of what comes out.

`joined` is the one step by which `synth.symmetry.translation_search` grows groups: it takes an element that
commutes with the group, says whether both together still move every rank, and finds generators for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arborcast.synth.symmetry.translations import Integers, Translations
from arborcast.synth.topology import Vertex


def joined(group: Translations, images: Sequence[Vertex] | Integers) -> Translations | None:
    """The translations that a group generates together with one more permutation of its vertices.

    Returns:
        None where the permutation is one of them already, does not commute with them, or with it an element
        other than the identity would keep a rank in its place.
    """
    element = np.asarray(images, dtype=np.int64)
    for generator in group.generators:
        other = np.array(generator, dtype=np.int64)
        if not np.array_equal(other[element], element[other]):
            return None
    period = _period(group, element)
    if period is None:
        return None
    # The first power that takes rank 0 back to its orbit must be a translation: then the same is true of
    # every rank, unless one comes back earlier, after a proper divisor of as many.
    returned = int(group.moving(0, int(power(element, period)[0])))
    if not np.array_equal(power(element, period), np.array(group.permutation(returned))):
        return None
    orbit_of = group.orbit_of[: group.ranks]
    for prime in _primes(period):
        early = power(element, period // prime)[: group.ranks]
        if np.any(group.orbit_of[early] == orbit_of):
            return None
    return _with(group, element, period, returned)


def power(images: Integers, exponent: int) -> Integers:
    """A permutation applied so many times."""
    result = np.arange(len(images), dtype=np.int64)
    square = images
    while exponent:
        if exponent & 1:
            result = square[result]
        square = square[square]
        exponent >>= 1
    return result


def _period(group: Translations, element: Integers) -> int | None:
    """After how many applications rank 0 is back in its orbit; None where it never leaves it."""
    home = group.orbit_of[0]
    here, period = int(element[0]), 1
    while group.orbit_of[here] != home:
        here, period = int(element[here]), period + 1
    return period if period > 1 else None


def _primes(number: int) -> list[int]:
    """The prime divisors."""
    primes, candidate = [], 2
    while candidate * candidate <= number:
        if number % candidate == 0:
            primes.append(candidate)
            while number % candidate == 0:
                number //= candidate
        candidate += 1
    return [*primes, number] if number > 1 else primes


def divisors(number: int) -> list[int]:
    """In ascending order, itself the last."""
    found = [1]
    for prime in _primes(number):
        powers = [1]
        while number % (powers[-1] * prime) == 0:
            powers.append(powers[-1] * prime)
        found = [divisor * power for divisor in found for power in powers]
    return sorted(found)


def _with(group: Translations, element: Integers, period: int, returned: int) -> Translations:
    """The group with one more generator, whose power `period` is the translation `returned`."""
    elements = np.arange(group.order, dtype=np.int64)
    roots = np.flatnonzero(group.plus(_multiple(group, elements, period), returned) == 0)
    if roots.size:
        # Corrected by a translation, the new generator is independent of those there are.
        corrected = element[np.array(group.permutation(int(roots[0])))]
        return Translations(
            group.ranks,
            (*group.generators, tuple(corrected.tolist())),
            (*group.orders, period),
            group.size,
        )
    relations = [[0] * len(group.orders) + [period]]
    relations[0][:-1] = [-digit for digit in _digits(group, returned)]
    for position, order in enumerate(group.orders):
        relations.append([order if column == position else 0 for column in range(len(group.orders) + 1)])
    arrays = [*(np.array(images, dtype=np.int64) for images in group.generators), element]
    whole = group.order * period
    generators, orders = [], []
    for exponents, order in _independent(relations):
        if order > 1:
            images = np.arange(group.size, dtype=np.int64)
            for array, exponent in zip(arrays, exponents, strict=True):
                images = power(array, exponent % whole)[images]
            generators.append(tuple(images.tolist()))
            orders.append(order)
    return Translations(group.ranks, tuple(generators), tuple(orders), group.size)


def _digits(group: Translations, element: int) -> list[int]:
    digits = []
    for order in reversed(group.orders):
        element, digit = divmod(element, order)
        digits.append(digit)
    return digits[::-1]


def _multiple(group: Translations, elements: Integers, factor: int) -> Integers:
    """The powers of elements."""
    total = np.zeros_like(elements)
    stride = 1
    for order in reversed(group.orders):
        total += elements // stride % order * factor % order * stride
        stride *= order
    return total


def _independent(relations: list[list[int]]) -> list[tuple[list[int], int]]:
    """Independent generators of an abelian group, from the relations of dependent ones.

    The relations are made diagonal by whole combinations of rows and columns (Smith's normal form, without
    its rule of divisibility); a combination of columns is a change of generators.

    Args:
        relations: rows of exponents whose product is the identity, at least as many as columns.

    Returns:
        For each new generator the exponents of the old ones of which it is the product, and its order.
    """
    width = len(relations[0])
    change = [[int(row == column) for column in range(width)] for row in range(width)]
    for place in range(width):
        while True:
            _, row, column = min(
                (abs(relations[row][column]), row, column)
                for row in range(place, len(relations))
                for column in range(place, width)
                if relations[row][column]
            )
            relations[place], relations[row] = relations[row], relations[place]
            for line in relations:
                line[place], line[column] = line[column], line[place]
            change[place], change[column] = change[column], change[place]
            if _cleared(relations, change, place):
                break
    return [(change[place], abs(relations[place][place])) for place in range(width)]


def _cleared(relations: list[list[int]], change: list[list[int]], place: int) -> bool:
    """Take multiples of the pivot's row and column from the others; whether nothing else is left there."""
    pivot = relations[place][place]
    for row in range(place + 1, len(relations)):
        factor = relations[row][place] // pivot
        relations[row] = [a - factor * b for a, b in zip(relations[row], relations[place], strict=True)]
    for column in range(place + 1, len(change)):
        factor = relations[place][column] // pivot
        for line in relations:
            line[column] -= factor * line[place]
        # What the column loses to the pivot's, the pivot's generator gains of the column's.
        change[place] = [a + factor * b for a, b in zip(change[place], change[column], strict=True)]
    below = any(line[place] for line in relations[place + 1 :])
    return not below and not any(relations[place][place + 1 :])
