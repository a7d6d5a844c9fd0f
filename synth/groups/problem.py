"""Groups on a fabric as the columns of a linear program: who may use which link, up to symmetry.

A *layer* is what one group does in one direction: it spreads, or gathers for its allreduce, or sends the
blocks of one source along paths. A column is an orbit of pairs of a layer and a link under the symmetries
that permute the groups, so that 128 groups that are all alike need the columns of one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from arborcast.synth.bounds.capacity_lp import most_central
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.groups.view import GroupView, spreading_kind, view_of
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.symmetry.permutations import least_images
from arborcast.synth.topology import Topology


@dataclass(frozen=True, slots=True)
class GroupDemand:
    """One direction or one source of one group.

    Attributes:
        group: whose.
        gathers: whether trees lead to their roots, along the links of the view.
        source: for what moves along paths the rank (of the view) it comes from, else None.
        is_mirrored: whether each link's share is also taken of the link back, by the trees turned round.
    """

    group: int
    gathers: bool = False
    source: int | None = None
    is_mirrored: bool = False


class GroupsProblem:
    """Collectives with weights on a fabric.

    Attributes:
        topology: the whole fabric.
        collectives: of the groups.
        weights: of the groups, positive.
        relays: whether ranks outside a group may forward for it.
        layers: of all groups.
    """

    def __init__(
        self,
        topology: Topology,
        collectives: Sequence[Collective],
        weights: Sequence[Fraction],
        *,
        relays: bool,
    ) -> None:
        self.topology = topology
        self._graph = LinkGraph(topology)
        self.collectives = tuple(collectives)
        self.weights = tuple(weights)
        self.relays = relays
        self._views: dict[int, GroupView] = {}
        # Turning a whole schedule of allreduces and alltoalls round gives another one: loads may be equal
        # both ways, and then gathering along the trees on which a group spreads loses nothing.
        kinds = {collective.kind for collective in collectives}
        self.is_mirrored = topology.is_symmetric and kinds <= {Kind.ALLREDUCE, Kind.ALLTOALL}
        self.layers: tuple[GroupDemand, ...] = tuple(
            layer for group in range(len(collectives)) for layer in self._layers_of(group)
        )

    def _layers_of(self, group: int) -> list[GroupDemand]:
        collective = self.collectives[group]
        match spreading_kind(collective.kind):
            case Kind.ALLREDUCE if self.is_mirrored:
                return [GroupDemand(group, is_mirrored=True)]
            case Kind.ALLREDUCE:
                return [GroupDemand(group), GroupDemand(group, gathers=True)]
            case Kind.ALLTOALL:
                return [GroupDemand(group, source=rank) for rank in range(len(collective.ranks))]
            case Kind.SCATTER:
                assert collective.root is not None, "checked by the collective"
                return [GroupDemand(group, source=collective.ranks.index(collective.root))]
            case _:
                return [GroupDemand(group)]

    def view(self, group: int) -> GroupView:
        """What a group sees of the fabric; that of a representative is all that most questions need."""
        if group not in self._views:
            self._views[group] = view_of(self.topology, self.collectives[group], relays=self.relays)
        return self._views[group]

    def of_group(self, group: int) -> list[int]:
        """The layers of one group."""
        return [number for number, layer in enumerate(self.layers) if layer.group == group]

    @cached_property
    def _symmetry(self) -> tuple[Ints, list[GroupSymmetry]]:
        """For each layer and link the least pair (layer * links + link) of its orbit; moves that suffice."""
        count = len(self.topology.links)
        orbit = np.arange(len(self.layers) * count, dtype=np.int64)
        kept: list[GroupSymmetry] = []
        images: list[Ints] = []
        for move in moves(self.topology, self.collectives, self.weights):
            image = (self._layer_images(move)[:, None] * count + self._link_images(move)[None, :]).ravel()
            if np.array_equal(orbit[image], orbit):
                continue
            kept.append(move)
            images.append(image)
            orbit = least_images(orbit, images)
        return orbit.reshape(len(self.layers), count), kept

    def _link_images(self, move: GroupSymmetry) -> Ints:
        return self._graph.numbers(move.vertices[self._graph.tails], move.vertices[self._graph.heads])

    def _layer_images(self, move: GroupSymmetry) -> Ints:
        number = {(layer.group, layer.gathers, layer.source): i for i, layer in enumerate(self.layers)}
        images = []
        for layer in self.layers:
            group, source = int(move.groups[layer.group]), layer.source
            if source is not None:
                there = int(move.vertices[self.collectives[layer.group].ranks[source]])
                source = self.collectives[group].ranks.index(there)
            images.append(number[group, layer.gathers, source])
        return np.array(images, dtype=np.int64)

    @property
    def pairs(self) -> Ints:
        """For each layer (row) and link the number of the orbit of the pair."""
        return self._symmetry[0]

    @cached_property
    def origin(self) -> tuple[tuple[int, Ints], ...]:
        """For each group the one that stands for its orbit, and a symmetry that takes that one to it."""
        identity = np.arange(self.topology.size, dtype=np.int64)
        found: dict[int, tuple[int, Ints]] = {}
        steps = [(move.vertices, move.groups) for move in self._symmetry[1]]
        steps += [(np.argsort(vertices), np.argsort(groups)) for vertices, groups in steps]
        for first in range(len(self.collectives)):
            if first in found:
                continue
            found[first] = (first, identity)
            queue = [first]
            for group in queue:
                for vertices, groups in steps:
                    there = int(groups[group])
                    if there not in found:
                        found[there] = (first, vertices[found[group][1]])
                        queue.append(there)
        return tuple(found[group] for group in range(len(self.collectives)))

    @property
    def representatives(self) -> tuple[int, ...]:
        """The first group of each orbit."""
        return tuple(dict.fromkeys(first for first, _ in self.origin))

    @cached_property
    def link_orbits(self) -> Ints:
        """The orbit of each link, by its first link; with its reverse where all do the same both ways.

        What moves along paths loads a link and its reverse equally too in some optimum, but not each source.
        """
        images = [self._link_images(move) for move in self._symmetry[1]]
        if all(layer.is_mirrored for layer in self.layers):
            images.append(self._graph.reverse)
        return least_images(np.arange(len(self.topology.links), dtype=np.int64), images)

    def roots(self, group: int) -> tuple[tuple[int, ...], ...]:
        """Ranks of the view from which trees start; those of one tuple have trees of equal weight."""
        view = self.view(group)
        match view.collective.kind:
            case Kind.BROADCAST:
                assert view.collective.root is not None, "checked by the collective"
                return ((view.collective.root,),)
            case Kind.ALLGATHER:
                return (view.collective.ranks,)
        orbits = self._rank_orbits(group)
        if self.is_mirrored:  # one root serves as well as any mixture, and so do its images
            central = most_central(view.topology, view.collective.ranks)
            return tuple(orbit for orbit in orbits if central in orbit)
        return orbits

    def _rank_orbits(self, group: int) -> tuple[tuple[int, ...], ...]:
        """Ranks of a view that symmetries of the fabric and the groups take to each other."""
        count, size = len(self.collectives), self.topology.size
        steps = [(move.groups[:, None] * size + move.vertices[None, :]).ravel() for move in self._symmetry[1]]
        orbit = least_images(np.arange(count * size, dtype=np.int64), steps).reshape(count, size)[group]
        ranks: dict[int, list[int]] = {}
        for position, rank in enumerate(self.collectives[group].ranks):
            ranks.setdefault(int(orbit[rank]), []).append(position)
        return tuple(map(tuple, ranks.values()))


MOST_ELEMENTS = 4096
"""So many products of the declared symmetries are looked at; fewer symmetries make a larger program."""


@dataclass(frozen=True, eq=False)
class GroupSymmetry:
    """A symmetry of the fabric that takes groups to groups.

    Attributes:
        vertices: the image of each vertex.
        groups: the image of each group.
    """

    vertices: Ints
    groups: Ints


def moves(
    topology: Topology, collectives: Sequence[Collective], weights: Sequence[Fraction]
) -> Iterator[GroupSymmetry]:
    """The symmetries that are found, without the identity."""
    places: dict[object, list[int]] = defaultdict(list)
    for index, (collective, weight) in enumerate(zip(collectives, weights, strict=True)):
        places[collective.kind, collective.members, collective.root, weight].append(index)
    # Of groups that are alike in everything, the first becomes the first, the second the second.
    rank_among = {index: position for found in places.values() for position, index in enumerate(found)}
    for images in _elements(topology):
        groups = np.empty(len(collectives), dtype=np.int64)
        for index, (collective, weight) in enumerate(zip(collectives, weights, strict=True)):
            members = frozenset(images[list(collective.ranks)].tolist())
            root = None if collective.root is None else int(images[collective.root])
            alike = places.get((collective.kind, members, root, weight), [])
            if rank_among[index] >= len(alike):
                break
            groups[index] = alike[rank_among[index]]
        else:
            yield GroupSymmetry(images, groups)


def _elements(topology: Topology) -> Iterator[Ints]:
    """Products of the declared symmetries, each once, by their number of factors; not the identity."""
    generators = [np.array(images, dtype=np.int64) for images in topology.symmetries]
    identity = np.arange(topology.size, dtype=np.int64)
    seen = {identity.tobytes()}
    queue = [identity]
    for element in queue:  # grows while it is walked
        for generator in generators:
            product = generator[element]
            if product.tobytes() not in seen and len(seen) < MOST_ELEMENTS:
                seen.add(product.tobytes())
                queue.append(product)
                yield product
