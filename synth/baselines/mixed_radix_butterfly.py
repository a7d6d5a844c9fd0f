"""Exchanges by digits: ranks are numbered by what moves them, and each step exchanges along one digit.

Where the ranks of a box are joined pairwise, and those of one place in all boxes, a fabric's translations
number its ranks: (box, place), each with digits of a radix of its own. In one step every rank exchanges with
all that differ from it in one digit. Blocks that spread begin with the digits of the narrowest links, so that
each passes those once, and what is added ends there:

    shared    allgather, reduce-scatter, or the second and then the first: the best rate in few steps
    whole     an allreduce in which all send all they have: half of the steps, for the smallest sizes
    mixed     shared along the widest links, whole along the others

Radix 2 is recursive halving and doubling with the boxes in their place, the whole order of a generator a
direct exchange, what is between a multi-level one (recursive multiplying: Ruefenacht, Bull and Booth 2017).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

import numpy as np

from arborcast.synth.baselines.cyclic import Edge, along, digits
from arborcast.synth.baselines.switch_paths import Path, switch_paths, widest
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Topology, Vertex

RADICES = (2, 4, 8, 16)
"""Of which the digits may be, and the whole order of a generator up to the last of them."""

MOST_TRANSFERS = 70_000
"""Of a schedule in which all send all they have, which is written out."""

KINDS = (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE)


@dataclass(frozen=True)
class _Numbered:
    """A fabric whose translations take its first rank to every other, each over switches or a link.

    Attributes:
        topology: the fabric.
        translations: as many as ranks.
        ways: of each rank those from the first rank to it, equally wide.
        dimensions: the generators, those of the narrowest and longest ways first.
    """

    topology: Topology
    translations: Translations
    ways: Mapping[int, tuple[Path, ...]]
    dimensions: tuple[int, ...]

    @classmethod
    def of(cls, topology: Topology, translations: Translations) -> _Numbered | None:
        """None where no link or switch joins the first rank to one that is elsewhere in one dimension."""
        if translations.order != topology.ranks or topology.ranks < 2:
            return None
        paths = switch_paths(topology, range(topology.ranks), sources=[0])
        ways = {dst: widest(found) for (_, dst), found in paths.items()}
        latency = topology.latency_us
        orders = translations.orders
        strides = [math.prod(orders[dimension + 1 :]) for dimension in range(len(orders))]
        alike = [
            stride * digit for order, stride in zip(orders, strides, strict=True) for digit in range(1, order)
        ]
        if not ways.keys() >= set(translations.apply(np.array(alike, dtype=np.int64), 0).tolist()):
            return None

        def narrowest_first(dimension: int) -> tuple[Fraction, Fraction]:
            way = ways[int(translations.apply(strides[dimension], 0))][0]
            return way.width, -sum((latency[hop] for hop in way.hops), Fraction(0))

        return cls(topology, translations, ways, tuple(sorted(range(len(orders)), key=narrowest_first)))

    @property
    def lanes(self) -> int:
        """Into how many parts a chunk is cut, for as many ways side by side."""
        return max(map(len, self.ways.values()))

    def stride(self, dimension: int) -> int:
        """What one more in a dimension adds to the number of an element."""
        return math.prod(self.translations.orders[dimension + 1 :])

    def way(self, src: int, dst: int, lane: int) -> tuple[Vertex, ...]:
        """The switches from one rank to another: the image of a way from the first rank."""
        moved, place = self.translations.apply, int(self.translations.place[src])
        ways = self.ways[int(moved(self.translations.moving(src, dst), 0))]
        via = ways[lane % len(ways)].via
        return tuple(moved(place, np.array(via, dtype=np.int64)).tolist()) if via else ()

    def places(self, dimensions: Sequence[int]) -> list[int]:
        """The elements that are 0 in all but some dimensions."""
        found = [0]
        for dimension in dimensions:
            order, stride = self.translations.orders[dimension], self.stride(dimension)
            found = [place + digit * stride for place in found for digit in range(order)]
        return sorted(found)

    def over(self, transfer: Transfer, chunk: int, lane: int, element: int = 0) -> Transfer:
        """A transfer between elements, moved by one, as one between ranks, of a chunk."""
        moved = self.translations.plus(np.array((transfer.src, transfer.dst), dtype=np.int64), element)
        src, dst = self.translations.apply(moved, 0).tolist()
        return replace(transfer, chunk=chunk, src=src, dst=dst, via=self.way(src, dst, lane))


def exchange_schedules(
    topology: Topology, collective: Collective, bound: Bound, translations: Translations, deadline: Deadline
) -> Iterator[AnySchedule]:
    """Schedules of several radices: the shared ones in implicit form, then the whole ones, written out.

    Nothing is found for collectives with a root, where relays are, and where translations do not number all
    ranks or lead to some that are not joined.

    Raises:
        TimedOutError: the deadline passed.
    """
    if collective.kind not in KINDS or len(collective.ranks) < topology.ranks:
        return
    fabric = _Numbered.of(topology, translations)
    if fabric is None:
        return
    orders = translations.orders
    narrow = fabric.dimensions[: max(1, len(orders) - 1)]  # the widest is left by one step or by halving
    choices = [
        {min(radix, order) for radix in RADICES if radix < order or order <= RADICES[-1]}
        if dimension in narrow
        else {2, min(order, RADICES[-1])}
        for dimension, order in enumerate(orders)
    ]
    every = list(product(*(sorted(choice, reverse=True) for choice in choices)))
    for radices in every:
        deadline.check("exchanges by digits")
        yield _shared(fabric, collective, bound, radices)
    if collective.kind is Kind.ALLREDUCE:
        widest_radix = max(radices[fabric.dimensions[-1]] for radices in every)
        for radices in every:
            if radices[fabric.dimensions[-1]] < widest_radix and len(orders) > 1:
                continue
            for shared in range(len(orders)):
                deadline.check("exchanges by digits")
                found = _whole(fabric, collective, bound, radices, fabric.dimensions[len(orders) - shared :])
                if found is not None:
                    yield found


def _tree(fabric: _Numbered, radices: Sequence[int], dimensions: Sequence[int]) -> tuple[list[Edge], int]:
    """From element 0 along some dimensions: edges, and how many steps they take."""
    edges: list[Edge] = []
    held, after = [0], 0
    for dimension in dimensions:
        order, stride = fabric.translations.orders[dimension], fabric.stride(dimension)
        inside = digits(order, radices[dimension], far_first=True)
        edges += (
            (holder + src * stride, holder + dst * stride, after + step)
            for src, dst, step in inside
            for holder in held
        )
        held = [holder + place * stride for holder in held for place in range(order)]
        after += 1 + max(step for _, _, step in inside)
    return edges, after


def _shared(
    fabric: _Numbered, collective: Collective, bound: Bound, radices: Sequence[int]
) -> ImplicitSchedule:
    """What the first rank's block does, on its tree; translations move it to all others."""
    edges = _tree(fabric, radices, fabric.dimensions)[0]
    moves = along(collective.kind, edges, 0)
    lanes = range(fabric.lanes)
    return ImplicitSchedule.build(
        fabric.topology,
        collective,
        _method("shared", fabric, radices),
        bound,
        fabric.translations,
        [Chunk(Fraction(1, len(lanes) * fabric.topology.ranks), 0) for _ in lanes],
        [fabric.over(move, lane, lane) for lane in lanes for move in moves],
    )


def _whole(
    fabric: _Numbered, collective: Collective, bound: Bound, radices: Sequence[int], shared: Sequence[int]
) -> Schedule | None:
    """All exchange all they have along one digit after the other, once some dimensions have shared it out.

    Returns:
        None where it takes more than `MOST_TRANSFERS`.
    """
    orders, ranks = fabric.translations.orders, fabric.topology.ranks
    others = [dimension for dimension in reversed(fabric.dimensions) if dimension not in shared]
    factors = {dimension: _factors(orders[dimension], radices[dimension]) for dimension in others}
    holders = fabric.places(others)
    exchanged = len(holders) * sum(factor - 1 for each in factors.values() for factor in each)
    if (exchanged + 2 * ranks) * (ranks // len(holders)) > MOST_TRANSFERS:
        return None
    edges, after = _tree(fabric, radices, shared)
    moves: list[Transfer] = []
    for holder in holders:
        moves += along(
            Kind.REDUCE_SCATTER, [(holder + src, holder + dst, step) for src, dst, step in edges], 0
        )
    step = after
    for dimension in others:
        unit = fabric.stride(dimension)
        for factor in factors[dimension]:
            for holder in holders:
                digit = holder // unit % factor
                alike = (holder + (other - digit) * unit for other in range(factor) if other != digit)
                moves += (Transfer(0, holder, other, step, reduce=True) for other in alike)
            unit *= factor
            step += 1
    for holder in holders:
        moves += (Transfer(0, holder + src, holder + dst, step + late) for src, dst, late in edges)
    chunks: list[Chunk] = []
    transfers: list[Transfer] = []
    owners = fabric.places(shared)
    for lane in range(fabric.lanes):
        for owner in owners:
            transfers += (fabric.over(move, len(chunks), lane, owner) for move in moves)
            chunks.append(
                Chunk(Fraction(1, fabric.lanes * len(owners)), int(fabric.translations.apply(owner, 0)))
            )
    method = _method("mixed" if shared else "whole", fabric, radices)
    return Schedule.build(fabric.topology, collective, method, bound, chunks, transfers)


def _method(what: str, fabric: _Numbered, radices: Sequence[int]) -> Method:
    named = "x".join(str(radices[dimension]) for dimension in fabric.dimensions)
    return Method("exchange", settings=(("what", what), ("radices", named)))


def _factors(order: int, radix: int) -> tuple[int, ...]:
    """Factors of a number, each the largest up to the radix that is left, or the least prime above it."""
    found: list[int] = []
    while order > 1:
        fitting = [factor for factor in range(radix, 1, -1) if order % factor == 0]
        found.append(fitting[0] if fitting else min(f for f in range(2, order + 1) if order % f == 0))
        order //= found[-1]
    return tuple(found)
