"""Allreduces through switches that add and multicast, on large regular fabrics, in implicit form.

What is gathered along a tree over all ranks is spread along it again, and the images of a tree under all
translations carry equal parts: only its uses of orbits of links and adders count. A linear program weighs
trees; its prices ask for others, one for each choice among the orbits of switches where it may branch. That
no other trees are better is not proved here, but by the bound where the rate reaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain, combinations, islice, product
from math import prod

import numpy as np

from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import TimedOutError
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.in_network.column_moves import moves_of
from arborcast.synth.in_network.steiner_tree import Rows, SteinerColumn
from arborcast.synth.in_network.switch_trees import Spanning
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.lp.choice import TreeCandidates
from arborcast.synth.lp.master import Master
from arborcast.synth.lp.sparsify import few_as_asked
from arborcast.synth.lp.tree_program import TreeProgram, TreeRows, Weighed, whole_prices
from arborcast.synth.schedule import Chunk, Method, Settings, Transfer
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.symmetry.abelian import divisors, power
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Topology, Vertex

_MOST_CHOICES = 64
"""Sets of orbits of switches that are tried under each prices."""

_FINEST = 1 << 20  # prices are whole parts of the largest one

_MOST_GROUPS = 512
"""Groups of translations that are looked at for one with fewer images."""


def solve_symmetric_in_network(
    topology: Topology,
    collective: Collective,
    options: SolveOptions,
    limit: Bound,
    *,
    forwarding: Callable[..., ImplicitSchedule],
    translations: Translations,
) -> ImplicitSchedule:
    """The better of trees through able switches and of trees that only pass them.

    Args:
        topology: the fabric, some of whose switches are able; all ranks take part.
        collective: an allreduce; others are what `forwarding` finds.
        options: as in `solve_symmetric`.
        limit: of the rate.
        forwarding: what answers where switches only forward.
        translations: automorphisms of the topology.

    Returns:
        The schedule of the higher rate, of equal ones the one with fewer transfers. Its translations are as
        few of those given as keep the rate.

    Raises:
        As `solve_symmetric`.
    """
    deadline = Deadline.after(options.deadline_s)
    try:
        plain = forwarding(topology.forwarding, collective, options, translations=translations)
    except TimedOutError as error:
        if isinstance(error.best, ImplicitSchedule):
            best = replace(error.best, topology=topology, bound=limit)
            raise TimedOutError(str(error), best) from error
        raise
    first = replace(plain, topology=topology, bound=limit)
    found = images_of_trees(topology, collective, options, limit, translations, deadline)
    best = first if found is None else min(first, found, key=lambda one: (-one.rate, one.transfer_count))
    if deadline.has_passed:
        raise TimedOutError(f"{collective.kind}: {deadline} passed", best)
    return best


def images_of_trees(
    topology: Topology,
    collective: Collective,
    options: SolveOptions,
    limit: Bound,
    translations: Translations,
    deadline: Deadline,
) -> ImplicitSchedule | None:
    """An allreduce through able switches; None where these cannot do all of it, and for other collectives.

    Arguments as for `solve_symmetric_in_network`; the deadline is when to be content with the best so far.
    """
    does_both = any(switch.reduces and switch.multicasts for switch in topology.switches)
    if collective.kind is not Kind.ALLREDUCE or not does_both or not topology.is_symmetric:
        return None
    return _Packing(topology, collective, translations, limit, options, deadline).schedule()


@dataclass(frozen=True, eq=False)
class _LinkOrbits:
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
        offered = (capacities[row] * size for row, size in zip(first, sizes, strict=True))
        return TreeRows.of(offered, self.limit)

    def used(self, of_row: Mapping[int, int]) -> dict[int, int]:
        """Uses of rows as uses of orbits."""
        orbits = self.of_row[list(of_row)]
        counts = np.bincount(orbits, weights=list(of_row.values()), minlength=len(self.rows.capacities))
        return {orbit: int(counts[orbit]) for orbit in np.flatnonzero(counts).tolist()}


@dataclass(frozen=True, eq=False)
class _Packing:
    """Trees that the prices ask for, until they ask for none, and what they come to."""

    topology: Topology
    collective: Collective
    translations: Translations
    limit: Bound
    options: SolveOptions
    deadline: Deadline

    def schedule(self) -> ImplicitSchedule | None:
        """The best that is found; None where nothing keeps to what is asked of trees."""
        orbits = _LinkOrbits(self.topology, self.translations, self.limit.rate)
        master: Master[SteinerColumn] = Master(orbits.rows)
        slowest = min(link.bandwidth for link in self.topology.links)
        first = np.array([int(_FINEST * slowest / link.bandwidth) for link in self.topology.links])
        master.add_helpful(self._trees(orbits, first, master), None)

        def priced(weighed: Weighed) -> Iterator[SteinerColumn]:
            prices = whole_prices(weighed.prices, _FINEST)[orbits.of_row]
            return self._trees(orbits, prices[: len(self.topology.links)], master)

        master.run([priced], self.deadline)
        most = self.options.max_height
        low = [
            column
            for column in master.columns
            if most is None or all(tree.height <= most for tree in column.trees)
        ]
        if not low:
            return None
        options = self.options
        if options.tolerance is None and options.max_trees is None:
            program = TreeProgram(orbits.rows, low)
            weights = dict(enumerate(program.exact(program.solve())))
        else:
            every = range(len(low))
            weights, _ = few_as_asked(TreeCandidates(orbits.rows, tuple(low)), every, options, self.deadline)
        chosen = [(low[index], weight) for index, weight in weights.items() if weight]
        return self._written(chosen, (("columns", len(master.columns)),))

    def _trees(
        self, orbits: _LinkOrbits, lengths: Ints, master: Master[SteinerColumn]
    ) -> Iterator[SteinerColumn]:
        """The cheapest tree that is found for each choice of switches."""
        spanning, rows = Spanning(self.topology), Rows(self.topology)
        turning = (v for v, switch in enumerate(self.topology.switches, self.topology.ranks) if switch.turns)
        roots = (*range(self.topology.ranks), *turning)
        for through in _choices(self.topology, self.translations):
            if master.columns and self.deadline.has_passed:
                break
            tree = spanning.cheapest(lengths + 1, through)
            rooted = tree.rooted(self.topology, tree.centre(roots))
            yield SteinerColumn(0, rooted, rooted, orbits.used(rows.used(rooted, rooted)))

    def _written(
        self, columns: Sequence[tuple[SteinerColumn, Fraction]], facts: Settings
    ) -> ImplicitSchedule:
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
        method = Method("symmetric", self.options.seed, (("through", "able switches"), *facts))
        return ImplicitSchedule.build(topology, self.collective, method, self.limit, group, chunks, transfers)

    def _fits(self, group: Translations, columns: Sequence[tuple[SteinerColumn, Fraction]]) -> bool:
        """Whether no link carries more than under all translations."""
        orbits, rows = _LinkOrbits(self.topology, group, self.limit.rate), Rows(self.topology)
        under = [
            replace(column, used=orbits.used(rows.used(column.out, column.into))) for column, _ in columns
        ]
        return orbits.rows.fullest(under, [weight for _, weight in columns]) <= 1


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
    every = product(*map(divisors, translations.orders))
    for orders in sorted(islice(every, _MOST_GROUPS), key=prod):
        powers = zip(translations.generators, translations.orders, orders, strict=True)
        generators = tuple(
            tuple(power(np.array(images, dtype=np.int64), whole // order).tolist())
            for images, whole, order in powers
            if order > 1
        )
        proper = tuple(order for order in orders if order > 1)
        yield Translations(translations.ranks, generators, proper, translations.size)
    yield translations
