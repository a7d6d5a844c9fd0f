"""Allreduces through switches that add and multicast, on large regular fabrics, in implicit form.

What is gathered along a tree over all ranks is spread along it again, and the images of a tree under all
translations carry equal parts: only its uses of orbits of links and adders count. A linear program weighs
trees; its prices ask for others, one for each choice among the orbits of switches where it may branch. That
no other trees are better is not proved here, but by the bound where the rate reaches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain, combinations, islice, product
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from arborcast.synth.bounds import bound
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError, TimedOutError
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.in_network.spanning import Spanning
from arborcast.synth.in_network.steiner_tree import Column, Rows
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.lp.tree_program import CLOSE, TreeProgram, TreeRows, Weighed, few, whole_prices
from arborcast.synth.packing.in_network import moves_of
from arborcast.synth.request import DEFAULTS, Request
from arborcast.synth.routes.reachability import who_is_cut_off
from arborcast.synth.schedule import Chunk, Method, Transfer
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Permutation, Topology, Vertex

if TYPE_CHECKING:
    from arborcast.synth.methods import ImplicitMethod

_MOST_CHOICES = 64
"""Sets of orbits of switches that are tried under each prices."""

_FINEST = 1 << 20  # prices are whole parts of the largest one

_SEARCH_LIMIT = 2000  # vertices of a branch and bound for few trees

_MOST_GROUPS = 512
"""Groups of translations that are looked at for one with fewer images."""


def solve_symmetric_in_network(
    topology: Topology,
    collective: Collective,
    request: Request = DEFAULTS,
    *,
    forwarding: ImplicitMethod,
    translations: Translations,
) -> ImplicitSchedule:
    """The better of trees through able switches and of trees that only pass them.

    Args:
        topology: the fabric, some of whose switches are able; all ranks take part.
        collective: an allreduce; others are what `forwarding` finds.
        request: as in `solve_symmetric`.
        forwarding: what answers where switches only forward.
        translations: automorphisms of the topology.

    Returns:
        The schedule of the higher rate, of equal ones the one with fewer transfers. Its translations are as
        few of those given as keep the rate.

    Raises:
        As `solve_symmetric`.
    """
    deadline = Deadline.after(request.deadline_s)
    limit = bound(topology, collective)
    if limit.rate == 0:
        raise InfeasibleError(who_is_cut_off(topology, collective), limit)
    try:
        plain = forwarding(topology.forwarding, collective, request, translations=translations)
    except TimedOutError as error:
        if isinstance(error.best, ImplicitSchedule):
            best = replace(error.best, topology=topology, bound=limit)
            raise TimedOutError(str(error), best) from error
        raise
    first = replace(plain, topology=topology, bound=limit)
    does_both = any(switch.reduces and switch.multicasts for switch in topology.switches)
    if collective.kind is not Kind.ALLREDUCE or not does_both or not topology.is_symmetric:
        return first
    found = _Generation(topology, collective, translations, limit, deadline).schedule(request)
    best = first if found is None else min(first, found, key=lambda one: (-one.rate, one.transfer_count))
    if deadline.has_passed:
        raise TimedOutError(f"{collective.kind}: {deadline} passed", best)
    return best


@dataclass(frozen=True, eq=False)
class _Orbits:
    """Links and limited adders by orbit, under some group of translations."""

    topology: Topology
    translations: Translations
    limit: Fraction

    @cached_property
    def of_row(self) -> Ints:
        """The orbit of each row of `Rows`: links first, then adders."""
        links = self.translations.link_orbits(self.topology)
        adders = self.translations.orbit_of[list(Rows(self.topology).of_adder)]
        behind = np.unique(adders, return_inverse=True)[1] + links.max() + 1
        return np.concatenate([links, behind.astype(np.int64)])

    @cached_property
    def rows(self) -> TreeRows:
        """What an orbit offers, if one tree and its images carry all of the limit."""
        capacities = Rows(self.topology).capacities
        sizes = np.bincount(self.of_row).tolist()
        first = np.unique(self.of_row, return_index=True)[1].tolist()
        offered = (capacities[row] * size / self.limit for row, size in zip(first, sizes, strict=True))
        return TreeRows(tuple(offered), (0,))

    def used(self, of_row: Mapping[int, int]) -> dict[int, int]:
        """Uses of rows as uses of orbits."""
        orbits = self.of_row[list(of_row)]
        counts = np.bincount(orbits, weights=list(of_row.values()), minlength=len(self.rows.capacities))
        return {orbit: int(counts[orbit]) for orbit in np.flatnonzero(counts).tolist()}

    def spread(self, prices: Ints) -> list[int]:
        """Prices of orbits as prices of rows."""
        return [int(price) for price in prices[self.of_row]]


class _Generation:
    """Trees that the prices ask for, until they ask for none, and what they come to."""

    def __init__(
        self,
        topology: Topology,
        collective: Collective,
        translations: Translations,
        limit: Bound,
        deadline: Deadline,
    ) -> None:
        self.topology, self.collective, self.translations = topology, collective, translations
        self.limit, self.deadline = limit, deadline
        self.orbits = _Orbits(topology, translations, limit.rate)
        self.spanning = Spanning(topology)
        self.links = Rows(topology)
        self.choices = _choices(topology, translations)
        turning = (v for v, switch in enumerate(topology.switches, topology.ranks) if switch.turns)
        self.roots = (*range(topology.ranks), *turning)
        self.columns: dict[tuple[tuple[int, int], ...], Column] = {}

    def schedule(self, request: Request) -> ImplicitSchedule | None:
        """The best that is found; None where nothing keeps to what is asked of trees."""
        slowest = min(link.bandwidth for link in self.topology.links)
        found = self._grow([int(_FINEST * slowest / link.bandwidth) for link in self.topology.links])
        program = TreeProgram(self.orbits.rows, found)
        weighed = program.solve()
        while found and weighed.rate < 1 - CLOSE and not self.deadline.has_passed:
            found = self._grow(
                self.orbits.spread(whole_prices(weighed.prices, _FINEST))[: len(self.topology.links)]
            )
            for column in found:
                program.add(column)
            weighed = program.solve()
        columns = self._asked_for(request, weighed)
        if not columns:
            return None
        program = TreeProgram(self.orbits.rows, columns)
        weights = program.exact(program.solve())
        weighty = [(column, weight) for column, weight in zip(columns, weights, strict=True) if weight]
        return self._written(weighty, request.seed)

    def _asked_for(self, request: Request, weighed: Weighed) -> list[Column]:
        """The columns that may be used: low enough, and few where few are wanted."""
        columns = [
            column
            for column in self.columns.values()
            if request.max_height is None or all(tree.height <= request.max_height for tree in column.trees)
        ]
        wanted: list[tuple[int | None, float | None]] = []
        if request.tolerance is not None:
            wanted.append((None, weighed.rate * float(1 - request.tolerance)))
        if request.max_trees is not None:
            wanted.append((request.max_trees, None))
        for most, rate in wanted if columns else ():
            chosen, _ = few(
                self.orbits.rows,
                columns,
                most=most,
                rate=rate,
                start=[],
                search_limit=_SEARCH_LIMIT,
                seed=request.seed,
                seconds=self.deadline.left_s,
            )
            if chosen is not None and (request.max_trees is None or len(chosen) <= request.max_trees):
                return [columns[index] for index in chosen]
        return [] if wanted else columns

    def _written(self, columns: Sequence[tuple[Column, Fraction]], seed: int) -> ImplicitSchedule:
        """A chunk for each column, and the fewest translations that spread all of them as evenly."""
        topology, total = self.topology, sum(weight for _, weight in columns)
        group = next(group for group in _subgroups(self.translations) if self._fits(group, columns))
        chunks, transfers = [], []
        for index, (column, weight) in enumerate(columns):
            root = column.trees[0].root
            owner = root if root < topology.ranks else group.representatives[0]
            element = int(group.minus(0, int(group.place[owner])))
            images = group.permutation(element)
            chunks.append(Chunk(weight / total / group.order, images[owner]))
            for src, dst, step, reduce, via in moves_of(column):
                way = tuple(images[vertex] for vertex in via)
                transfers.append(Transfer(index, images[src], images[dst], step, reduce, way))
        settings = (("through", "able switches"), ("columns", len(self.columns)))
        method = Method("symmetric", seed, settings)
        return ImplicitSchedule.build(topology, self.collective, method, self.limit, group, chunks, transfers)

    def _fits(self, group: Translations, columns: Sequence[tuple[Column, Fraction]]) -> bool:
        """Whether no link carries more than under all translations."""
        orbits = _Orbits(self.topology, group, self.limit.rate)
        under = [
            replace(column, used=orbits.used(self.links.used(column.out, column.into)))
            for column, _ in columns
        ]
        return orbits.rows.fullest(under, [weight for _, weight in columns]) <= 1

    def _grow(self, lengths: Sequence[int]) -> list[Column]:
        """The trees that are new among the cheapest ones."""
        found = []
        for through in self.choices:
            if self.columns and self.deadline.has_passed:
                break
            tree = self.spanning.cheapest(np.array(lengths, dtype=np.int64) + 1, through)
            rooted = tree.rooted(self.topology, tree.centre(self.roots))
            of_row = self.links.used(rooted, rooted)
            column = Column(0, rooted, rooted, self.orbits.used(of_row))
            key = tuple(sorted(column.used.items()))
            if key not in self.columns:
                self.columns[key] = column
                found.append(column)
        return found


def _choices(topology: Topology, translations: Translations) -> list[tuple[Vertex, ...]]:
    """Sets of orbits of switches that add and multicast: all sets of few, of many those near none or all."""
    orbits: dict[int, list[Vertex]] = {}
    for vertex, switch in enumerate(topology.switches, topology.ranks):
        if switch.reduces and switch.multicasts:
            orbits.setdefault(int(translations.orbit_of[vertex]), []).append(vertex)
    count = len(orbits)
    sizes: Iterable[int] = range(count + 1)
    if 1 << count > _MOST_CHOICES:
        sizes = (0, 1, count - 1, count)
    chosen = chain.from_iterable(combinations(orbits.values(), size) for size in sizes)
    return [tuple(chain.from_iterable(some)) for some in chosen]


def _subgroups(translations: Translations) -> Iterator[Translations]:
    """Groups that powers of the generators generate, the smallest first, and at last the whole."""
    divisors = ([n for n in range(1, order + 1) if order % n == 0] for order in translations.orders)
    for orders in sorted(islice(product(*divisors), _MOST_GROUPS), key=prod):
        powers = zip(translations.generators, translations.orders, orders, strict=True)
        generators = tuple(_power(images, whole // order) for images, whole, order in powers if order > 1)
        proper = tuple(order for order in orders if order > 1)
        yield Translations(translations.ranks, generators, proper, translations.size)
    yield translations


def _power(images: Permutation, count: int) -> Permutation:
    moved = tuple(range(len(images)))
    for _ in range(count):
        moved = tuple(images[vertex] for vertex in moved)
    return moved
