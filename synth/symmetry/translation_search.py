"""The translations of a topology: the largest abelian group of automorphisms found that moves every rank.

The declared symmetries come first, and where they reach every rank from every other nothing else is looked
at. Otherwise groups are grown element by element (`synth.symmetry.commuting`), each as long as the colours of
the graph leave room for a larger one. Effort is counted, never timed: every machine finds the same.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np

from arborcast.synth.errors import TopologyError
from arborcast.synth.symmetry.abelian import divisors, joined, power
from arborcast.synth.symmetry.commuting import ChoiceOrder, Commuting
from arborcast.synth.symmetry.refinement import SpentError
from arborcast.synth.symmetry.translations import Translations, order_of
from arborcast.synth.topology import Permutation, Topology

REPEATS, RANKS_A_REPEAT, LEAST_EFFORT, MOST_EFFORT = 500, 4, 200_000, 32_000_000
"""How often a search looks at each end of each link, on average, unless told otherwise; within limits.

More often where ranks are many: 2,048 ranks in boxes take 2.8 s to be joined, 4,096 take 15 s.
"""

WIDTHS = (2, 6, 6, 24, 24, 1 << 20, 1 << 20)
"""Images of the first rank tried per pass, one pass after the other, for each group grown.

In every other pass what is alike is taken in turn; in the others, many of a kind come first.
"""

MOST_POWERS = 64
"""How many elements made out of the declared symmetries are joined, where these do not fit together."""


def translations_of(
    topology: Topology, *, ranks: Iterable[int] | None = None, seed: int = 0, effort: int | None = None
) -> Translations:
    """The largest group of translations found, declared or not; of several, one with the fewest link orbits.

    Args:
        topology: the fabric; links must be alike in bandwidth and latency.
        ranks: those that take part, which translations must map to each other; all where None.
        seed: which of alike choices come first where symmetries must be searched for; by number with 0.
        effort: how many ends of links to look at beyond the declared symmetries, about a million a second;
            None for as many as `REPEATS` and `RANKS_A_REPEAT` say.

    Returns:
        `Translations.trivial` where there is none.

    Raises:
        TopologyError: a rank is none of the topology's.
    """
    members = None if ranks is None else frozenset(ranks)
    for rank in sorted(members or ()):
        if not 0 <= rank < topology.ranks:
            raise TopologyError(
                f"topology {topology.name}: rank must be in 0..{topology.ranks - 1}, got {rank}"
            )
    return _translations_of(topology, members, seed, effort)


@lru_cache(maxsize=4)  # a comparison asks for those of the same fabric in several methods
def _translations_of(
    topology: Topology, members: frozenset[int] | None, seed: int, effort: int | None
) -> Translations:
    declared = _declared(topology, members)
    if declared.order == topology.ranks:
        return declared
    if effort is None:
        repeats = max(REPEATS, topology.ranks // RANKS_A_REPEAT)
        effort = min(MOST_EFFORT, max(LEAST_EFFORT, 2 * len(topology.links) * repeats))
    search = _Search(topology, members, declared, seed)
    with contextlib.suppress(SpentError):
        search.run(effort)
    return search.best


def _declared(topology: Topology, members: frozenset[int] | None) -> Translations:
    """The translations that the declared symmetries generate, as many of them as fit together."""
    trivial = Translations.trivial(topology)
    symmetries = [images for images in topology.symmetries if _keeps(images, members)]
    together = _all_of(trivial, symmetries)
    if together.order == topology.ranks or not symmetries:
        return together
    pool = list(dict.fromkeys(_powers(trivial, symmetries)))[:MOST_POWERS]
    starts = (_all_of(trivial, [start, *pool]) for start in pool)
    return max((together, *starts), key=lambda group: group.order)


def _keeps(images: Permutation, members: frozenset[int] | None) -> bool:
    return members is None or all(images[rank] in members for rank in members)


def _all_of(group: Translations, elements: Iterable[Sequence[int]]) -> Translations:
    """A group with those of some elements that can join it, one after the other."""
    for element in elements:
        group = joined(group, element) or group
    return group


def _powers(trivial: Translations, symmetries: Sequence[Permutation]) -> Iterator[Permutation]:
    """Of each symmetry, then of each product of two, the least power that moves every rank."""
    arrays = [np.array(images, dtype=np.int64) for images in symmetries]
    products = (first[second] for first in arrays for second in arrays if first is not second)
    for images in (*arrays, *products):
        for exponent in divisors(order_of(images.tolist(), len(images)))[:-1]:
            element = power(images, exponent)
            if joined(trivial, element) is not None:
                yield tuple(element.tolist())
                break


class _Search:
    """The search beyond the declared symmetries.

    Attributes:
        best: the largest group so far.
    """

    def __init__(
        self, topology: Topology, members: frozenset[int] | None, declared: Translations, seed: int
    ) -> None:
        self._topology = topology
        self._members = members
        self._declared = declared
        self._chance = random.Random(seed)
        self._turns = list(range(topology.size))
        self._many_first = True
        if seed:
            self._chance.shuffle(self._turns)
        self._goal = topology.ranks
        self.best = declared
        self._orbits: int | None = None

    def run(self, effort: int) -> None:
        """Grow groups from the declared one and from nothing, wider in each pass, until there is no room.

        Raises:
            SpentError: the effort was spent; `best` is what was found until then.
        """
        trivial = Translations.trivial(self._topology)
        whole = self._around(trivial, effort)
        self._goal, effort = whole.limit, whole.refiner.left
        for width in WIDTHS:
            for start in dict.fromkeys((self._declared, trivial)):
                if self.best.order == self._goal:
                    return
                effort = self._grow(self._around(start, effort), width)
            self._many_first = not self._many_first
            self._chance.shuffle(self._turns)

    def _grow(self, commuting: Commuting, width: int) -> int:
        """Make a group larger by each element found, those first that leave as much room as before.

        Returns:
            The effort left.
        """
        group = commuting.group
        self._consider(group)
        narrower: list[tuple[int, Translations]] = []
        if group.order == commuting.limit:
            return commuting.refiner.left
        for element in commuting.elements(width):
            larger = joined(group, element)
            if larger is None:
                continue
            self._consider(larger)
            if self._is_done(commuting):
                return commuting.refiner.left
            further = self._around(larger, commuting.refiner.left)
            if further.limit == commuting.limit:
                commuting.refiner.left = self._grow(further, width)
                if self._is_done(commuting):
                    return commuting.refiner.left
                continue
            commuting.refiner.left = further.refiner.left
            narrower.append((further.limit, larger))
        effort = commuting.refiner.left
        for limit, larger in sorted(narrower, key=lambda entry: (-entry[0], -entry[1].order))[:width]:
            if limit > self.best.order:
                effort = self._grow(self._around(larger, effort), width)
        return effort

    def _is_done(self, commuting: Commuting) -> bool:
        """Whether no group that contains one can be larger than the best."""
        return self.best.order >= commuting.limit

    def _around(self, group: Translations, effort: int) -> Commuting:
        return Commuting(
            self._topology, group, self._members, ChoiceOrder(tuple(self._turns), self._many_first), effort
        )

    def _consider(self, group: Translations) -> None:
        if group.order > self.best.order:
            self.best, self._orbits = group, None
        elif group.order == self.best.order > 1 and group != self.best:
            if self._orbits is None:
                self._orbits = self._link_orbits(self.best)
            orbits = self._link_orbits(group)
            if orbits < self._orbits:
                self.best, self._orbits = group, orbits

    def _link_orbits(self, group: Translations) -> int:
        return int(group.link_orbits(self._topology).max(initial=-1)) + 1
