"""How permutations of vertices act on the demands of a problem: which they keep, which demands they fix.

Sets of ranks that serve many demands (an alltoall of 32 ranks has 992 demands but 32 sets) are moved once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.collective import Demand
from arborcast.synth.topology import Permutation, Topology


class DemandAction:
    """The action on some demands over the vertices of a topology.

    Of demands that are alike a permutation does not say which goes where: the first of them goes to the first
    of those that are their images, the second to the second, so that products act as they should.
    """

    def __init__(self, topology: Topology, demands: Sequence[Demand]) -> None:
        self._size = topology.size
        self._sets = tuple(
            dict.fromkeys(ranks for demand in demands for ranks in (demand.sources, demand.targets))
        )
        self._index = {ranks: position for position, ranks in enumerate(self._sets)}
        self._pairs = [(self._index[demand.sources], self._index[demand.targets]) for demand in demands]
        self._alike: dict[tuple[int, int], list[int]] = {}
        self._place: list[int] = []  # of each demand among those alike
        for position, pair in enumerate(self._pairs):
            same = self._alike.setdefault(pair, [])
            self._place.append(len(same))
            same.append(position)

    def colours(self) -> tuple[int, ...]:
        """A number for each vertex; no permutation that keeps the demands takes one to another number."""
        roles: list[Counter[tuple[int, int, bool]]] = [Counter() for _ in range(self._size)]
        for (sources, targets), count in Counter(self._pairs).items():
            for number, is_source in ((sources, True), (targets, False)):
                role = (len(self._sets[sources]), len(self._sets[targets]), is_source)
                for rank in self._sets[number]:
                    roles[rank][role] += count
        keys = [tuple(sorted(counter.items())) for counter in roles]
        numbers = {key: number for number, key in enumerate(sorted(set(keys)))}
        return tuple(numbers[key] for key in keys)

    def keeps(self, element: Permutation) -> bool:
        """Whether a permutation maps the demands to demands, alike ones to as many alike ones."""
        moved = self._moved(element)
        images = Counter((moved[sources], moved[targets]) for sources, targets in self._pairs)
        return images == Counter(self._pairs)

    def images(self, element: Permutation) -> tuple[int, ...]:
        """The demand to which a permutation maps each.

        Raises:
            ValueError: it does not map every demand to a demand.
        """
        moved = self._moved(element)
        try:
            return tuple(
                self._alike[moved[sources], moved[targets]][place]
                for (sources, targets), place in zip(self._pairs, self._place, strict=True)
            )
        except (KeyError, IndexError):  # IndexError: not so many are alike there
            raise ValueError("the group must map every demand to a demand") from None

    def fixing(self, images: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each demand, how many of some permutations that keep the demands map it to itself.

        `images` has a row for each permutation, the image of each vertex.
        """
        sources, targets = self._ends
        points, vertices = self._points
        kept = np.zeros((len(self._sets), len(images)), dtype=np.bool_)
        kept[points] = (images[:, vertices] == vertices).T
        for position in {*sources, *targets}.difference(points):
            kept[position] = self._masks[position][images[:, self._masks[position]]].all(axis=1)
        return np.asarray(np.count_nonzero(kept[sources] & kept[targets], axis=1), dtype=np.int64)

    def is_free(self, images: NDArray[np.int64], chunks: int) -> bool:
        """Whether a group that keeps the demands can act freely on so many chunks of each of them.

        That is so where the order of the stabiliser of each demand divides the number of chunks.

        `images` has a row for each element of the group, the image of each vertex.
        """
        return not bool((chunks % self.fixing(images)).any())

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """The numbers of the two sets that a permutation must keep to fix each demand, a row of either.

        Where no two demands have the same sources, these alone tell them apart.
        """
        sources, targets = np.array(self._pairs, dtype=np.int64).T
        return np.stack([sources, sources if len(set(sources)) == len(sources) else targets])

    @cached_property
    def _points(self) -> tuple[list[int], NDArray[np.int64]]:
        """The numbers of the sets of one vertex, which are moved all at once, and these vertices."""
        points = [position for position, ranks in enumerate(self._sets) if len(ranks) == 1]
        return points, np.array([min(self._sets[position]) for position in points], dtype=np.int64)

    @cached_property
    def _masks(self) -> NDArray[np.bool_]:
        """Which vertices each set has."""
        masks = np.zeros((len(self._sets), self._size), dtype=np.bool_)
        for position, ranks in enumerate(self._sets):
            masks[position, sorted(ranks)] = True
        return masks

    def _moved(self, element: Permutation) -> list[int]:
        """The number of the image of each set, -1 where it is none of them."""
        return [self._index.get(frozenset([element[rank] for rank in ranks]), -1) for ranks in self._sets]
