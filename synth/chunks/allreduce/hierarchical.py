"""Allreduces whose chunks meet in cores, each at a time of its own: a restriction that has the hierarchies.

    step   0 1 2        3        4        5 6
           gather       exchange, level   spread       of one chunk; another one may gather for one step
           to a core    by level                       and spread for four, over other links

Every chunk is reduced along a forest to the ranks of a core (`synth.chunks.allreduce.cores`), these exchange
what they have, and it is spread along a forest from them. A box that reduces, rails that exchange and the
box again are one such way, rails first another; a reduce-scatter before an allgather is one that meets in
single ranks, all at one time. Ways are mixed by a linear program over those found so far, whose
prices say which are cheap (column generation). Cheap ways are found by insertion, so that no limit follows:
that of every schedule stands beside what is found.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from itertools import combinations, islice, permutations, takewhile
from typing import TypeAlias

import numpy as np

from arborcast.synth.chunks.allreduce.cores import Core, cores_of
from arborcast.synth.chunks.allreduce.partial_sums import ChunkSum, SumOrbits, SumPlan, SumSend
from arborcast.synth.chunks.problem.instance import ChunkProblem, Route
from arborcast.synth.chunks.problem.orbits import ChunkOrbits, Group
from arborcast.synth.chunks.problem.symmetry import problem_group
from arborcast.synth.chunks.trees.cheap_generation import RUINS, CheapGeneration
from arborcast.synth.chunks.trees.insertion import InsertionSearch
from arborcast.synth.chunks.trees.pricing import Prices, TimedTree, cost_of
from arborcast.synth.chunks.trees.rounding import shared_out
from arborcast.synth.chunks.trees.step_master import RestrictedMaster, link_orbits
from arborcast.synth.chunks.trees.whole_trees import admissible_chunk_counts, whole_numbers
from arborcast.synth.collective import Demand
from arborcast.synth.deadline import NO_DEADLINE, Deadline
from arborcast.synth.kernels.compiled import Ints

FIRST_WAYS = 8
"""How often each core is asked before the first linear program."""

LARGEST_GROUP = 64
"""Elements of the group that keeps the schedules: so many chunks are images of one."""

TRIES = 5
"""Numbers of chunks tried by an integer program, from the smallest that can have the R/C of a mixture."""

BEST_TURNS = 3
"""Numbers of chunks at which rounded shares are improved, beside those halved from the most."""

MOST_MOVES = 200
"""Moves of a chunk from one way to another that improve rounded shares."""

MOST_SENDS = 130_000
"""Sends of a schedule: seconds, and tens of megabytes."""

NEAR = Fraction(1, 400)
"""The part of its R/C within which a mixture has the fewest chunks."""

MOST_BESIDE = 30
"""Ways beside those of a mixture of which schedules are made."""

MOST_TIMES = 3
"""Ways of one core, with times that differ, that are given for one set of prices."""

_GRAIN = 1 << 30
_CLOSE = 1e-9

Way: TypeAlias = tuple[SumSend, ...]
"""What one chunk does, as the only member of its class."""


@dataclass(frozen=True)
class Mixture:
    """Ways of chunks, and how long steps last that carry them.

    Attributes:
        ratio: R/C with any number of chunks.
        ways: those that take part, and some that cost little more.
        weights: their shares, 1 together; 0 of the latter.
    """

    ratio: float
    ways: tuple[Way, ...]
    weights: tuple[Fraction, ...]


class HierarchicalAllreduces:
    """Allreduces of one problem that meet in cores, number of steps by number of steps.

    Attributes:
        problem: see `synth.chunks.allreduce.partial_sums.sum_problem`.
        group: keeps every schedule.
        fewest_steps: of any of them.
    """

    def __init__(self, problem: ChunkProblem) -> None:
        self.problem = problem
        members = frozenset(demand.owner for demand in problem.demands)
        # One demand, of which nothing is sent: the master counts what ways do with one chunk.
        self._whole = ChunkProblem(problem.topology, (Demand(members, members),), problem.routes)
        self.group: Group = problem_group(self._whole, LARGEST_GROUP)
        self._sites = [_Site(problem, core, members) for core in cores_of(problem, self.group)]
        self._ways: tuple[Way, ...] = ()
        self.fewest_steps = min(site.fewest_steps for site in self._sites)

    def mixture(self, steps: int, enough: Fraction, deadline: Deadline) -> Mixture | None:
        """The best mixture found in so many steps, which starts from that of the fewer steps asked before.

        Args:
            steps: S.
            enough: R/C that nothing falls below.
            deadline: when to stop.

        Returns:
            None where no core can be reached in time.
        """
        sites = [site for site in self._sites if site.fewest_steps <= steps]
        if not sites:
            return None
        ways: dict[TimedTree, Way] = {}  # a tree of the program for each
        for way in self._ways:
            for idle in range(steps if steps > 1 else 0):
                later = tuple(_later(send, idle) for send in way)
                ways.setdefault(_timed(later), later)
        master = RestrictedMaster(self._whole, steps, self.group)
        for tree in ways:
            master.add(0, tree)

        def cheap_ways(site: _Site, prices: Prices, long: bool) -> list[tuple[int, TimedTree]]:
            found = {_timed(way): way for way in site.cheapest(prices, RUINS[long])}
            for tree, way in found.items():
                ways.setdefault(tree, way)
            return [(0, tree) for tree in found]

        search = CheapGeneration(master, [partial(cheap_ways, site) for site in sites], deadline)
        search.begin(FIRST_WAYS)
        ratio, prices, shares = search.run(float(enough))
        trees = [tree for _, tree in master.trees]
        self._ways = tuple(ways[tree] for tree, weight in zip(trees, master.weights(), strict=True) if weight)
        costs = {tree: float(cost_of(self._whole, tree, prices)) for tree in trees}
        cheap = sorted(trees, key=costs.__getitem__)[:MOST_BESIDE]
        weights = {tree: share for tree, share in zip(trees, shares, strict=True) if share}
        kept = dict.fromkeys([*weights, *cheap])
        return Mixture(
            ratio, tuple(ways[tree] for tree in kept), tuple(weights.get(tree, Fraction(0)) for tree in kept)
        )

    def plan(
        self,
        mixture: Mixture,
        steps: int,
        most_sends: int = MOST_SENDS,
        near: Fraction = NEAR,
        deadline: Deadline = NO_DEADLINE,
    ) -> tuple[int, SumPlan]:
        """A schedule of whole chunks along the ways of a mixture: C and the plan.

        An integer program looks for few chunks with the R/C of the mixture. Where it finds none, shares are
        rounded to whole images of one chunk, of the fewest with which R/C is within `near` of the least that
        is found up to so many sends, or, of one image of each, more. After the deadline they are rounded, and
        no better.
        """
        rounding = _Rounding(self._whole, self.group, steps, mixture)
        most = max(1, most_sends // (len(self.group) * rounding.sends))
        exactly = self._whole_numbers(mixture, steps, most * len(self.group), deadline)
        counts = rounding.few(most, near, deadline) if exactly is None else exactly
        used = [(way, count) for way, count in zip(mixture.ways, counts.tolist(), strict=True) if count]
        chunks, rounds = int(counts.sum()) * len(self.group), rounding.rounds(counts)
        # A schedule ends with a send.
        idle = steps - 1 - max(send.step for way, _ in used for send in way)
        sends = (replace(send, step=send.step + idle) for send in self._orbits(chunks).unfold(_members(used)))
        return _without_copies(chunks, (*rounds[steps - idle :], *rounds[: steps - idle]), sends)

    def _whole_numbers(self, mixture: Mixture, steps: int, most: int, deadline: Deadline) -> Ints | None:
        """How many images of one chunk go along each way in a plan with the R/C of the mixture, if found."""
        ratio = Fraction(mixture.ratio).limit_denominator(most)
        if abs(float(ratio) - mixture.ratio) > _CLOSE:
            return None
        images = len(self.group)
        counts = takewhile(lambda chunks: chunks <= most, admissible_chunk_counts(ratio, steps))
        candidates = [(0, _timed(way)) for way in mixture.ways]
        for chunks in islice((chunks for chunks in counts if chunks % images == 0), TRIES):
            if deadline.has_passed:
                break
            orbits = ChunkOrbits(self._whole, chunks, self.group)
            found = whole_numbers(orbits, steps, int(ratio * chunks), candidates, deadline=deadline)
            if found is not None:
                return np.array(found[0], dtype=np.int64)
        return None

    def _orbits(self, chunks: int) -> SumOrbits:
        return SumOrbits(self.problem, chunks, self.group, (self.group[0],))


def _later(send: SumSend, idle: int) -> SumSend:
    """The same in one step more, in which a step is idle."""
    return SumSend(0, 0, send.route, send.step + (send.step >= idle), send.copies)


def _timed(way: Way) -> TimedTree:
    return tuple((send.route, send.step) for send in way)


def _members(ways: Sequence[tuple[Way, int]]) -> Iterator[SumSend]:
    """What each chunk of the class does, so many along each way."""
    member = 0
    for way, count in ways:
        for _ in range(count):
            for send in way:
                yield SumSend(0, member, send.route, send.step, send.copies)
            member += 1


def _without_copies(chunks: int, rounds: Sequence[int], sends: Iterable[ChunkSum]) -> tuple[int, SumPlan]:
    """The same plan of as few chunks as it may have: what goes the same way k times goes once.

    A way that some elements of the group keep has as many images that are the same.
    """
    paths: dict[int, list[tuple[int, int, bool]]] = defaultdict(list)
    for send in sends:
        paths[send.chunk].append((send.step, send.route, send.copies))
    alike = Counter(tuple(sorted(path)) for path in paths.values())
    copies = math.gcd(*alike.values(), *rounds)
    kept = (path for path, count in alike.items() for _ in range(count // copies))
    sums = sorted(
        (step, chunk, route, passed_on) for chunk, path in enumerate(kept) for step, route, passed_on in path
    )
    plan = tuple(ChunkSum(0, chunk, route, step, passed_on) for step, chunk, route, passed_on in sums)
    return chunks // copies, SumPlan(tuple(length // copies for length in rounds), plan)


class _Rounding:
    """The shares of a mixture as whole numbers, each of so many images of one chunk.

    Attributes:
        sends: of one chunk, in the mean of the mixture.
    """

    def __init__(self, problem: ChunkProblem, group: Group, steps: int, mixture: Mixture) -> None:
        orbits = link_orbits(problem, group)
        sizes = np.bincount(orbits)
        self._capacities = np.array(problem.capacities)[np.unique(orbits, return_index=True)[1]]
        self._weights = np.array([round(weight * _GRAIN) for weight in mixture.weights], dtype=np.int64)
        loads = np.zeros((len(mixture.ways), steps, len(sizes)), dtype=np.int64)
        for way, load in zip(mixture.ways, loads, strict=True):
            for send in way:
                for link in problem.routes[send.route].links:
                    load[send.step, orbits[link]] += len(group)
        self._loads = loads // sizes  # exactly: all links of an orbit are loaded alike
        lengths = np.array(list(map(len, mixture.ways)))
        self.sends = math.ceil(int(self._weights @ lengths) / _GRAIN)

    def few(self, most: int, near: Fraction, deadline: Deadline) -> Ints:
        """How many of each way, in all up to `most`; see `HierarchicalAllreduces.plan`."""
        looked_at = takewhile(lambda turns: turns == 1 or not deadline.has_passed, range(1, most + 1))
        rounded = sorted((self._cost(self._shared(turns)) / turns, turns) for turns in looked_at)
        tried = {most >> halved for halved in range(most.bit_length())}
        tried.update(turns for _, turns in rounded[:BEST_TURNS])
        better = {turns: self._improved(self._shared(turns), deadline) for turns in sorted(tried)}
        ratios = {turns: Fraction(sum(self.rounds(counts)), turns) for turns, counts in better.items()}
        enough = min(ratios.values()) * (1 + near)
        return next(better[turns] for turns, ratio in ratios.items() if ratio <= enough)

    def rounds(self, counts: Ints) -> tuple[int, ...]:
        """As long as the loads of each step need."""
        load = self._load(counts)
        return tuple(max(1, int(need)) for need in (-(-load // self._capacities)).max(axis=1))

    def _shared(self, turns: int) -> Ints:
        """So many shared out by the weights."""
        return shared_out(turns, self._weights, _GRAIN, np.zeros_like(self._weights))

    def _load(self, counts: Ints) -> Ints:
        """Of each orbit of links in each step."""
        ways, *shape = self._loads.shape
        return (counts @ self._loads.reshape(ways, -1)).reshape(shape)

    def _cost(self, counts: Ints) -> float:
        return float(self._costs(self._load(counts)))

    def _costs(self, loads: Ints) -> Prices:
        """Rounds of loads, and, which counts little, how full they are."""
        rounds = np.maximum((-(-loads // self._capacities)).max(axis=-1), 1).sum(axis=-1)
        return np.asarray(rounds + (loads / self._capacities).max(axis=-1).sum(axis=-1) / 1024)

    def _improved(self, counts: Ints, deadline: Deadline) -> Ints:
        """The same with one after the other taken from a way and given to another, while that costs less."""
        counts = counts.copy()
        load = self._load(counts)
        cost = float(self._costs(load))
        for _ in range(MOST_MOVES):
            if deadline.has_passed:
                break
            (given,) = np.nonzero(counts)
            loads = load - self._loads[given][:, None] + self._loads[None]
            costs = self._costs(loads)
            least, best = divmod(int(costs.argmin()), len(counts))
            if costs[least, best] >= cost * (1 - _CLOSE):
                break
            load, cost = loads[least, best], float(costs[least, best])
            counts[given[least]] -= 1
            counts[best] += 1
        return counts


class _Site:
    """A core, and the forests to and from it.

    Attributes:
        fewest_steps: of a way that meets here.
    """

    def __init__(self, problem: ChunkProblem, core: Core, members: frozenset[int]) -> None:
        self._problem = problem
        self._core = core
        inside = frozenset(core.members)
        self._demands = (Demand(inside, members - inside),) if members - inside else ()
        # Routes turned round keep their numbers, and their links: a forest to the core is one from it.
        turned = (Route(r.dst, r.src, r.via[::-1], r.links) for r in problem.routes)
        self._turned = replace(problem, demands=self._demands, routes=tuple(turned))
        self._straight = replace(problem, demands=self._demands)
        self._to, self._from = (
            max(
                away
                for rank, away in enumerate(each.steps_from(inside))
                if rank in members and away is not None
            )
            for each in (self._turned, self._straight)
        )
        self._searches: dict[tuple[bool, int, int], InsertionSearch] = {}
        self.fewest_steps = self._to + len(core.levels) + self._from

    def cheapest(self, prices: Prices, ruins: int) -> list[Way]:
        """Some cheap ways, with times of the levels that make them cheap."""
        steps, count = len(prices), len(self._core.levels)
        costs = self._problem.route_costs(prices)
        exchanges = [_exchange(pairs, costs) for pairs in self._pairs]
        ends = range(self._to, steps - self._from - count + 1)
        gathered = {end: self._gathered(prices, end, ruins) for end in ends}
        spread = {end + count: None for end in ends}
        forests = {start: self._spread(prices, start, ruins) for start in spread}
        found: list[tuple[float, tuple[int, ...]]] = []
        for times in combinations(range(self._to, steps - self._from), count) if count else zip(ends):
            exchanged = sum(cost[time] for (cost, _), time in zip(exchanges, times, strict=False))
            start = times[-1] + 1 if count else times[0]
            found.append((gathered[times[0]][0] + exchanged + forests[start][0], times))
        found.sort()
        return [self._way(times, gathered, exchanges, forests) for _, times in found[:MOST_TIMES]]

    def _way(
        self,
        times: Sequence[int],
        gathered: Mapping[int, tuple[float, TimedTree]],
        exchanges: Sequence[_Exchange],
        forests: Mapping[int, tuple[float, TimedTree]],
    ) -> Way:
        start = times[-1] + 1 if exchanges else times[0]
        sends = [SumSend(0, 0, route, step, False) for route, step in gathered[times[0]][1]]
        for (_, routes), time in zip(exchanges, times, strict=False):
            sends += (SumSend(0, 0, route, time, False) for route in routes[time].tolist())
        sends += (SumSend(0, 0, route, step, True) for route, step in forests[start][1])
        return tuple(sorted(sends, key=lambda send: (send.step, send.route)))

    def _gathered(self, prices: Prices, end: int, ruins: int) -> tuple[float, TimedTree]:
        """A forest to the core in the steps before `end`."""
        cost, tree = self._forest(self._turned, np.ascontiguousarray(prices[:end][::-1]), ruins)
        return cost, tuple((route, end - 1 - step) for route, step in tree)

    def _spread(self, prices: Prices, start: int, ruins: int) -> tuple[float, TimedTree]:
        """A forest from the core in the steps from `start` on."""
        cost, tree = self._forest(self._straight, np.ascontiguousarray(prices[start:]), ruins)
        return cost, tuple((route, start + step) for route, step in tree)

    def _forest(self, problem: ChunkProblem, prices: Prices, ruins: int) -> tuple[float, TimedTree]:
        if not self._demands:
            return 0.0, ()
        key = problem is self._turned, len(prices), ruins
        if key not in self._searches:
            self._searches[key] = InsertionSearch(problem, 0, len(prices), ruins)
        return self._searches[key].run(prices)

    @cached_property
    def _pairs(self) -> list[Ints]:
        """Of each level a row for each two ranks of a block: their routes, the first one repeated."""
        ways = self._problem.between
        most = max(map(len, ways.values()))
        return [
            np.array(
                [
                    ways[pair] + ways[pair][:1] * (most - len(ways[pair]))
                    for block in level
                    for pair in permutations(block, 2)
                ],
                dtype=np.int64,
            )
            for level in self._core.levels
        ]


_Exchange: TypeAlias = tuple[list[float], Ints]
"""What an exchange costs in each step; a row for each step with the cheapest routes."""


def _exchange(pairs: Ints, costs: Prices) -> _Exchange:
    offered = costs[:, pairs]
    chosen = offered.argmin(axis=2)
    routes = np.take_along_axis(np.broadcast_to(pairs, offered.shape), chosen[:, :, None], axis=2)[:, :, 0]
    return offered.min(axis=2).sum(axis=1).tolist(), routes
