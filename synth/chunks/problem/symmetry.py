"""The groups of symmetries under which a problem is worth solving.

A schedule that a group maps to itself is found with as many variables fewer as the group has elements, but
the group must act freely on the chunks (see `synth.chunks.problem.orbits`), and not every group leaves a
schedule: where k elements keep a link, chunks pass it k at a time, so that a link whose capacity k does not
divide is never used to the full. Groups without such links come first. Only bandwidths count: latencies play
no part in a chunk schedule.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.chunks.problem.demand_action import DemandAction
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import Group
from arborcast.synth.symmetry.abelian import divisors, power
from arborcast.synth.symmetry.automorphisms import Automorphisms, automorphisms_of
from arborcast.synth.symmetry.permutations import closure, compose, extended, identity, inverse, orbits
from arborcast.synth.symmetry.translations import order_of
from arborcast.synth.topology import Permutation

LARGEST_GROUP = 128
"""Elements up to which a group is tried: what a larger one would save, its bookkeeping costs."""

MOST_GROUPS = 4
"""How many groups are offered for one problem."""


def useful_groups(
    problem: ChunkProblem, chunks: int, *, most: int = MOST_GROUPS, seed: int = 0
) -> tuple[Group, ...]:
    """Groups of automorphisms that map demands to demands and act freely on the chunks, the largest first.

    All of them leave every link its whole capacity, where there are such groups.

    Args:
        problem: what is to be solved.
        chunks: C, the chunks of each demand.
        most: how many groups to give at most.
        seed: of the elements drawn where there are too many to try all; the same seed gives the same groups
            on any machine.

    Returns:
        At most so many groups without the trivial one; none where there are none.
        Each has at most half as many elements as the one before, or is the largest that fixes no demand.
    """
    action = DemandAction(problem.topology, problem.demands)
    links = _LinkAction(problem)
    whole = _automorphisms(problem, action)

    def is_free(group: Group) -> bool:
        return action.is_free(np.array(group), chunks)

    def is_free_and_lossless(group: Group) -> bool:
        images = np.array(group)
        return action.is_free(images, chunks) and links.is_lossless(images)

    for rule in (is_free_and_lossless, is_free):
        limit = min(LARGEST_GROUP, len(problem.demands) * chunks)
        groups = grown_groups(whole, rule, limit=limit, chance=random.Random(seed))
        if groups:
            return _chosen(action, groups, most)
    return ()


def problem_group(problem: ChunkProblem, limit: int = LARGEST_GROUP, *, seed: int = 0) -> Group:
    """A group of automorphisms that map the problem to itself, free on its chunks or not.

    Args:
        problem: what it keeps.
        limit: how many elements it may have, at least 1.
        seed: of the elements drawn where all automorphisms are more.

    Returns:
        All automorphisms of the problem where there are no more than `limit`; otherwise, of the groups
        grown from some, one with the fewest orbits of links, and of those one with the fewest elements.
    """
    whole = _automorphisms(problem, DemandAction(problem.topology, problem.demands))
    everything = whole.elements(limit)
    if everything is not None:
        return everything
    links = _LinkAction(problem)
    trivial: Group = (identity(problem.topology.size),)
    groups = grown_groups(whole, lambda group: True, limit=limit, chance=random.Random(seed))
    return min([trivial, *groups], key=lambda group: (links.orbits(np.array(group)), len(group)))


def subgroups(problem: ChunkProblem, limit: int = LARGEST_GROUP, *, seed: int = 0) -> tuple[Group, ...]:
    """Groups of automorphisms that keep the problem, free on its chunks or not, without the trivial one.

    Args:
        problem: what they keep.
        limit: how many elements each may have.
        seed: of the elements drawn where there are too many to try all.
    """
    whole = _automorphisms(problem, DemandAction(problem.topology, problem.demands))
    return tuple(grown_groups(whole, lambda group: True, limit=limit, chance=random.Random(seed)))


def small_subgroups(group: Group, limit: int) -> tuple[Group, ...]:
    """The subgroups that one element or two that commute generate, without the trivial one.

    Of those that are conjugates only the first is given.

    Args:
        group: all its elements, the identity first.
        limit: how many elements each may have.
    """
    size = len(group[0])
    cyclic: dict[frozenset[Permutation], Permutation] = {}
    for element in group[1:]:
        powers = closure(size, [element], limit)
        if powers is not None:
            cyclic.setdefault(frozenset(powers), element)
    joined = (
        closure(size, (one, other), limit)
        for (powers, one), (others, other) in combinations(cyclic.items(), 2)
        if len(powers) * len(others) <= limit and compose(one, other) == compose(other, one)
    )
    seen: set[frozenset[Permutation]] = set()
    found: list[Group] = []
    for elements in dict.fromkeys([*cyclic, *(frozenset(each) for each in joined if each is not None)]):
        if elements not in seen:
            found.append((group[0], *sorted(elements - {group[0]})))
            seen.update(
                frozenset(compose(compose(by, each), inverse(by)) for each in elements) for by in group
            )
    return tuple(found)


def _automorphisms(problem: ChunkProblem, action: DemandAction) -> Automorphisms:
    return automorphisms_of(problem.topology, latencies=False, colours=action.colours(), keeps=action.keeps)


def _chosen(action: DemandAction, groups: Sequence[Group], most: int) -> tuple[Group, ...]:
    """The largest groups that differ: each at most half as large as the last, or the first to fix nothing."""
    fixing = {group: int(action.fixing(np.array(group)).max()) for group in groups}
    chosen: list[Group] = []
    for group in sorted(groups, key=lambda group: (-len(group), fixing[group])):
        first_to_fix_nothing = fixing[group] == 1 and all(fixing[other] > 1 for other in chosen)
        if not chosen or 2 * len(group) <= len(chosen[-1]) or first_to_fix_nothing:
            chosen.append(group)
    return tuple(chosen[:most])


class _LinkAction:
    """How groups act on the links of a problem's topology."""

    def __init__(self, problem: ChunkProblem) -> None:
        self._size = problem.topology.size
        ends = [(link.src, link.dst) for link in problem.topology.links]
        self._src, self._dst = np.array(ends, dtype=np.int64).reshape(-1, 2).T
        self._capacities = np.array(problem.capacities, dtype=np.int64)

    def is_lossless(self, images: NDArray[np.int64]) -> bool:
        """Whether the number of elements that keep a link divides its capacity, for every link.

        Args:
            images: a row for each element of the group, the image of each vertex.
        """
        kept = np.ascontiguousarray((images == np.arange(self._size)).T)
        keeping = np.count_nonzero(kept[self._src] & kept[self._dst], axis=1)
        return not bool((self._capacities % keeping).any())

    def orbits(self, images: NDArray[np.int64]) -> int:
        """How many orbits the links have under a group; see `is_lossless`."""
        moved = images[:, self._src] * self._size + images[:, self._dst]
        return len(np.unique(moved.min(axis=0)))


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
    few_cycles = sorted(pool, key=lambda element: len(orbits(range(whole.size), [element])))
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
        order = order_of(element, len(element))
        for exponent in divisors(order)[:-1]:
            if order // exponent <= self._limit:
                raised = tuple(power(np.array(element, dtype=np.int64), exponent).tolist())
                group = closure(len(element), [raised], self._limit)
                if group is not None and self._allows(group):
                    return raised
        return None
