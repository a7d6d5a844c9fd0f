"""Small groups grown from single elements of a large one, as long as they keep some rule.

A group of automorphisms may be astronomically large and its good subgroups few, so elements are drawn, of
each the largest power taken that keeps the rule, and powers joined one after the other.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from arborcast.synth.chunks.problem.orbits import Group
from arborcast.synth.symmetry.automorphisms import Automorphisms
from arborcast.synth.symmetry.permutations import closure, extended, identity
from arborcast.synth.topology import Permutation

POOL = 200
"""Elements from which groups are made; all of them where there are no more."""

STARTS = 10
"""From how many elements a group is grown."""

TRIES = 30
"""How many elements are tried to make a group larger before it is left as it is."""


def grown_groups(
    whole: Automorphisms, allows: Callable[[Group], bool], *, limit: int, chance: random.Random
) -> list[Group]:
    """Subgroups that a rule allows, none twice, without the trivial one.

    Args:
        whole: the group they are part of; its declared generators are joined before any others.
        allows: the rule. Whatever it allows, it allows the subgroups of, too.
        limit: how many elements a subgroup may have.
        chance: what draws the elements where there are too many to take all.
    """
    growth = _Growth(whole, allows, limit)
    declared = growth.powers(whole.generators)
    pool = list(dict.fromkeys([*declared, *growth.powers(_drawn(whole, chance))]))
    growth.grow([*declared, *chance.sample(pool, min(TRIES, len(pool)))])
    # Elements of few cycles move much, and that is what large groups are made of; others lead elsewhere.
    few_cycles = sorted(pool, key=lambda element: len(cycles_of(element)))
    for start in dict.fromkeys([*few_cycles[: STARTS // 2], *pool[-STARTS // 2 :]]):
        growth.grow([start, *chance.sample(pool, min(TRIES, len(pool)))])
    return list(growth.found.values())


def _drawn(whole: Automorphisms, chance: random.Random) -> Sequence[Permutation]:
    everything = whole.elements(POOL)
    if everything is None:
        return [whole.draw(chance) for _ in range(POOL)]
    elements = list(everything[1:])
    chance.shuffle(elements)
    return elements


class _Growth:
    """Groups grown so far.

    Attributes:
        found: all groups met, by the sets of their elements.
    """

    def __init__(self, whole: Automorphisms, allows: Callable[[Group], bool], limit: int) -> None:
        self._trivial: Group = (identity(whole.size),)
        self._allows = allows
        self._limit = limit
        self.found: dict[frozenset[Permutation], Group] = {}

    def grow(self, elements: Sequence[Permutation]) -> None:
        """Join elements one after the other to a group, leaving out those that break the rule."""
        group = self._trivial
        known: list[Permutation] = []
        for element in elements:
            if 2 * len(group) > self._limit:
                return
            joined = extended(group, known, element, self._limit)
            if joined is None or len(joined) == len(group) or not self._allows(joined):
                continue
            group = joined
            known.append(element)
            self.found.setdefault(frozenset(group), group)

    def powers(self, elements: Sequence[Permutation]) -> list[Permutation]:
        """Of each element the power that generates the largest group that the rule allows."""
        powers = (self._largest_power(element) for element in elements)
        return list(dict.fromkeys(power for power in powers if power is not None))

    def _largest_power(self, element: Permutation) -> Permutation | None:
        cycles = cycles_of(element)
        order = math.lcm(*map(len, cycles))
        for exponent in _divisors(order)[:-1]:
            if order // exponent <= self._limit:
                power = _power(cycles, exponent, len(element))
                group = closure(len(element), [power], self._limit)
                if group is not None and self._allows(group):
                    return power
        return None


def cycles_of(element: Permutation) -> list[list[int]]:
    """The cycles of a permutation, those of one vertex too."""
    cycles = []
    seen: set[int] = set()
    for vertex in element:
        if vertex in seen:
            continue
        cycle = [vertex]
        while (image := element[cycle[-1]]) != vertex:
            cycle.append(image)
        seen.update(cycle)
        cycles.append(cycle)
    return cycles


def _power(cycles: Sequence[Sequence[int]], exponent: int, size: int) -> Permutation:
    images = [0] * size
    for cycle in cycles:
        for position, vertex in enumerate(cycle):
            images[vertex] = cycle[(position + exponent) % len(cycle)]
    return tuple(images)


def _divisors(number: int) -> list[int]:
    """In ascending order; by trial, since the orders of permutations have small prime factors only."""
    divisors = [1]
    rest, prime = number, 2
    while rest > 1:
        powers = [1]
        while rest % prime == 0:
            rest //= prime
            powers.append(powers[-1] * prime)
        divisors = [divisor * power for divisor in divisors for power in powers]
        prime += 1
    return sorted(divisors)
