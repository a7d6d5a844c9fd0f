"""The groups of symmetries under which a problem is worth solving.

A schedule that a group maps to itself is found with as many variables fewer as the group has elements, but
the group must act freely on the chunks (see `synth.chunks.orbits`), and not every group leaves a schedule.
So a few are offered, of clearly different sizes, found by joining automorphisms that act freely each for
itself. Only bandwidths count: latencies play no part in a chunk schedule.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from synth.automorphisms import Automorphisms, automorphisms_of
from synth.chunks.demand_action import DemandAction
from synth.chunks.orbits import Group
from synth.chunks.problem import Problem
from synth.permutations import closure, extended, identity, orbits
from synth.topology import Permutation, Topology

LARGEST_GROUP = 128
"""Elements up to which a group is tried: what a larger one would save, its bookkeeping costs."""

MOST_GROUPS = 4
"""How many groups are offered for one problem."""

POOL = 400
"""Automorphisms from which groups are made; all of them where there are no more."""

STARTS = 12
"""From how many elements a group is grown."""

TRIES = 48
"""How many elements are tried to make a group larger before it is left as it is."""


def useful_groups(
    problem: Problem, chunks: int, *, most: int = MOST_GROUPS, seed: int = 0
) -> tuple[Group, ...]:
    """Groups of automorphisms that map demands to demands and act freely on the chunks, the largest first.

    Args:
        problem: what is to be solved.
        chunks: C, the chunks of each demand.
        most: how many groups to give at most.
        seed: of the elements drawn where there are too many to try all; the same seed gives the same groups
            on any machine.

    Returns:
        At most so many groups without the trivial one, none where there are none or two demands are alike.
        Each has at most half as many elements as the one before, or is the largest that fixes no demand.
    """
    action = DemandAction(problem.topology, problem.demands)
    if not action.distinct:
        return ()
    whole = _automorphisms(problem, action)
    growth = _Growth(action, chunks, whole, random.Random(seed))
    return _chosen(action, growth.groups(), most)


def problem_group(problem: Problem, limit: int = LARGEST_GROUP, *, seed: int = 0) -> Group:
    """A group of automorphisms that map the problem to itself, free on its chunks or not.

    Args:
        problem: what it keeps.
        limit: how many elements it may have, at least 1.
        seed: of the elements drawn where all automorphisms are more.

    Returns:
        All automorphisms of the problem where there are no more than `limit`; otherwise some, such that no
        element tried would leave the group within the limit.
    """
    action = DemandAction(problem.topology, problem.demands)
    whole = _automorphisms(problem, action)
    everything = whole.elements(limit)
    if everything is not None:
        return everything
    chance = random.Random(seed)
    group: Group = (identity(problem.topology.size),)
    known: list[Permutation] = []
    for element in (*whole.generators, *_pool(whole, chance)):
        joined = extended(group, known, element, limit)
        if joined is not None and len(joined) > len(group):
            group = joined
            known.append(element)
    return group


def orbits_of_roots(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """The ranks divided into those that are alike as roots, each orbit in ascending order."""
    return orbits(range(topology.ranks), automorphisms_of(topology, latencies=False).generators)


def _automorphisms(problem: Problem, action: DemandAction) -> Automorphisms:
    return automorphisms_of(problem.topology, latencies=False, colours=action.colours(), keeps=action.keeps)


def _pool(whole: Automorphisms, chance: random.Random) -> Sequence[Permutation]:
    """Elements to make groups from, in an order by chance."""
    everything = whole.elements(POOL)
    if everything is None:
        return list(dict.fromkeys(whole.draw(chance) for _ in range(POOL)))
    elements = list(everything[1:])
    chance.shuffle(elements)
    return elements


class _Growth:
    """Groups that act freely, grown from elements that do.

    Attributes:
        found: the groups met, as sets of elements, each with its elements in order.
    """

    def __init__(
        self, action: DemandAction, chunks: int, whole: Automorphisms, chance: random.Random
    ) -> None:
        self._action = action
        self._chunks = chunks
        self._whole = whole
        self._chance = chance
        self.found: dict[frozenset[Permutation], Group] = {}

    def groups(self) -> list[Group]:
        """All groups met on the way."""
        declared = [element for element in self._free_powers(self._whole.generators)]
        pool = list(self._free_powers(_pool(self._whole, self._chance)))
        pool = list(dict.fromkeys([*declared, *pool]))
        self._grow(declared, pool)
        for start in range(min(STARTS, len(pool))):
            self._grow([pool[start]], self._chance.sample(pool, min(TRIES, len(pool))))
        return list(self.found.values())

    def _grow(self, first: Sequence[Permutation], others: Sequence[Permutation]) -> None:
        """Join elements to a group as long as it stays free and small."""
        group: Group = (identity(self._whole.size),)
        known: list[Permutation] = []
        for element in (*first, *others):
            joined = extended(group, known, element, LARGEST_GROUP)
            if joined is None or len(joined) == len(group):
                continue
            if not self._action.is_free(joined, self._chunks):
                continue
            group = joined
            known.append(element)
            self.found.setdefault(frozenset(group), group)

    def _free_powers(self, elements: Sequence[Permutation]) -> Iterator[Permutation]:
        """Of each element the power that generates the largest free group, if any does."""
        for element in elements:
            cycles = _cycles(element)
            order = math.lcm(*map(len, cycles))
            for exponent in _divisors(order):
                if order // exponent > LARGEST_GROUP:
                    continue
                if exponent == order:
                    break
                power = _power(cycles, exponent, len(element))
                group = closure(len(element), [power], LARGEST_GROUP)
                if group is not None and self._action.is_free(group, self._chunks):
                    yield power
                    break


def _chosen(action: DemandAction, groups: Sequence[Group], most: int) -> tuple[Group, ...]:
    """The largest groups that differ: each at most half as large as the last, or the first to fix nothing."""
    chosen: list[Group] = []
    fixes_nothing = False
    for group in sorted(groups, key=lambda group: (-len(group), int(action.fixing(group).max()))):
        plain = int(action.fixing(group).max()) == 1
        if not chosen or 2 * len(group) <= len(chosen[-1]) or (plain and not fixes_nothing):
            chosen.append(group)
            fixes_nothing = fixes_nothing or plain
        if len(chosen) == most:
            break
    return tuple(chosen)


def _cycles(element: Permutation) -> list[list[int]]:
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
    """In ascending order; the orders of permutations have small prime factors only."""
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
