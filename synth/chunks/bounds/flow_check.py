"""What flows and the messages of an allreduce prove of S steps, recomputed from certificates alone, exactly.

Knows nothing of how they are found: rules are checked, shortest ways walked step by step, and that there are
no cheaper messages is asked of CaDiCaL in a formula of its own.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import count
from typing import Any, TypeAlias, TypeVar

from arborcast.synth.chunks.bounds.step_certificate import (
    FlowDual,
    MessageDual,
    PairDual,
    Pairs,
    RouteLengths,
    StepLengths,
)
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Permutation

Way: TypeAlias = tuple[int, ...]
"""Vertices one after the other."""

Ends: TypeAlias = tuple[tuple[Way, int], ...]
"""The sources and the target of all that a flow takes, in ascending order."""

Thing = TypeVar("Thing", Way, Ends)


def ratio_of_flows(problem: ChunkProblem, steps: int, certificate: FlowDual) -> Fraction:
    """The R/C that `FlowDual` or `PairDual` proves.

    Raises:
        InputError: it does not fit the problem, or breaks a rule.
    """
    check_links(problem, steps, certificate.links)
    for element in certificate.symmetries:
        _check_symmetry(problem, element)
    ways = [(route.src, *route.via, route.dst) for route in problem.routes]
    alike: dict[Way, Way] = {}
    for way in ways:
        if way not in alike:
            alike |= dict.fromkeys(_orbit(way, certificate.symmetries, _moved_way), way)
    total: dict[tuple[int, Way], Fraction] = defaultdict(Fraction)
    ratio = Fraction(0)
    for number, (pairs, lengths) in enumerate(certificate.flows):
        ends = _ends(problem, number, pairs)
        if isinstance(certificate, PairDual) and len(ends) > 1:
            raise InputError(f"certificate: flow {number}: a contribution flows alone, got {len(ends)}")
        images = len(_orbit(ends, certificate.symmetries, _moved_ends))
        own = _lengths(problem, steps, number, lengths)
        for (step, route), length in own.items():
            total[step, alike[ways[route]]] += images * length
        away = {target: _distances(problem, steps, own, target) for target in {end for _, end in ends}}
        for sources, target in ends:
            nearest = min((away[target][rank] for rank in sources if rank in away[target]), default=None)
            if nearest is None:
                raise InputError(f"certificate: flow {number} cannot reach rank {target} in {steps} steps")
            ratio += images * nearest
    allowed: dict[tuple[int, Way], Fraction] = defaultdict(Fraction)
    for step, row in enumerate(certificate.links):
        for number, way in enumerate(ways):
            allowed[step, alike[way]] += sum(row[link] for link in problem.routes[number].links)
    for (step, way), length in total.items():
        if length > allowed[step, way]:
            raise InputError(
                f"certificate: step {step}, route {ways.index(way)}: lengths must add up to at most "
                f"{allowed[step, way]}, got {length}"
            )
    return ratio


def _ends(problem: ChunkProblem, number: int, pairs: Pairs) -> Ends:
    """What a flow takes where; raises InputError where that is not asked of it."""
    if len({demand for demand, _ in pairs}) < len(pairs):
        raise InputError(f"certificate: flow {number}: must name each demand once")
    for demand, target in pairs:
        if not 0 <= demand < len(problem.demands) or target not in problem.demands[demand].targets:
            raise InputError(f"certificate: flow {number}: demand {demand} is not for rank {target}")
    return tuple(sorted((tuple(sorted(problem.demands[demand].sources)), end) for demand, end in pairs))


def _lengths(
    problem: ChunkProblem, steps: int, number: int, lengths: RouteLengths
) -> dict[tuple[int, int], Fraction]:
    own: dict[tuple[int, int], Fraction] = {}
    for step, route, length in lengths:
        is_exact = isinstance(length, Fraction | int) and length >= 0
        if not 0 <= step < steps or not 0 <= route < len(problem.routes) or not is_exact:
            raise InputError(
                f"certificate: flow {number}: there is no length {length} of route {route} in step {step}"
            )
        own[step, route] = own.get((step, route), Fraction(0)) + length
    return own


def _check_symmetry(problem: ChunkProblem, element: Permutation) -> None:
    """Raise InputError unless a permutation of the vertices keeps capacities and what is asked."""
    topology = problem.topology
    if sorted(element) != list(range(topology.size)):
        raise InputError("certificate: a symmetry must be a permutation of the vertices")
    units = {(a.src, a.dst): units for a, units in zip(topology.links, problem.capacities, strict=True)}
    if any(units.get((element[src], element[dst])) != here for (src, dst), here in units.items()):
        raise InputError("certificate: a symmetry must map links to links of the same capacity")
    if any(topology.is_switch(vertex) != topology.is_switch(element[vertex]) for vertex in element):
        raise InputError("certificate: a symmetry must map switches to switches")
    demands = Counter((demand.sources, demand.targets) for demand in problem.demands)

    def moved(ranks: frozenset[int]) -> frozenset[int]:
        return frozenset(element[rank] for rank in ranks)

    if Counter({(moved(a), moved(b)): times for (a, b), times in demands.items()}) != demands:
        raise InputError("certificate: a symmetry must map the demands to each other")


def _orbit(
    thing: Thing, symmetries: Sequence[Permutation], moved: Callable[[Thing, Permutation], Thing]
) -> set[Thing]:
    """All to which the symmetries map it."""
    found, stack = {thing}, [thing]
    while stack:
        here = stack.pop()
        for element in symmetries:
            image = moved(here, element)
            if image not in found:
                found.add(image)
                stack.append(image)
    return found


def _moved_way(way: Way, element: Permutation) -> Way:
    return tuple(element[vertex] for vertex in way)


def _moved_ends(ends: Ends, element: Permutation) -> Ends:
    return tuple(sorted((tuple(sorted(_moved_way(sources, element))), element[end]) for sources, end in ends))


def ratio_of_messages(problem: ChunkProblem, steps: int, certificate: MessageDual) -> Fraction:
    """The R/C that `MessageDual` prove, which is the cost that they name where nothing is cheaper.

    Raises:
        InputError: they do not fit the problem, break a rule, or there are cheaper messages.
    """
    members = frozenset[int]().union(*(demand.sources for demand in problem.demands))
    if any(
        len(demand.sources) > 1 or demand.sources | demand.targets != members for demand in problem.demands
    ):
        raise InputError("certificate: messages limit what all ranks add up, not what is copied")
    check_links(problem, steps, certificate.lengths)
    scale = math.lcm(*(length.denominator for row in certificate.lengths for length in row))
    most = math.ceil(certificate.cost * scale) - 1
    if _is_reachable(problem, steps, certificate.lengths, scale, most):
        raise InputError(
            f"certificate: every contribution reaches every rank at a cost of {Fraction(most, scale)} or "
            f"less, it says {certificate.cost}"
        )
    return certificate.cost


def check_links(problem: ChunkProblem, steps: int, lengths: StepLengths) -> None:
    """The rule that makes lengths a proof: in each step the capacities of links times them are at most 1.

    Raises:
        InputError: they break it, or are no fractions for each link and step.
    """
    links = problem.topology.links
    if len(lengths) != steps or any(len(row) != len(links) for row in lengths):
        raise InputError(f"certificate: needs a length for each of {len(links)} links in {steps} steps")
    for step, row in enumerate(lengths):
        for link, length in zip(links, row, strict=True):
            if not isinstance(length, Fraction | int) or length < 0:
                raise InputError(
                    f"certificate: step {step}, link {link.src}->{link.dst}: a length must be a fraction and "
                    f"not negative, got {length!s}"
                )
        used = sum(length * capacity for length, capacity in zip(row, problem.capacities, strict=True))
        if used > 1:
            raise InputError(
                f"certificate: step {step}: capacities times lengths must add up to at most 1, got {used}"
            )


def _distances(
    problem: ChunkProblem, steps: int, lengths: Mapping[tuple[int, int], Fraction], target: int
) -> dict[int, Fraction]:
    """The shortest way from each rank at the start to one at the end; a route without a length is free."""
    away = {target: Fraction(0)}
    for step in range(steps - 1, -1, -1):
        before = dict(away)
        for index, route in enumerate(problem.routes):
            if route.dst in away:
                way = away[route.dst] + lengths.get((step, index), Fraction(0))
                before[route.src] = min(before.get(route.src, way), way)
        away = before
    return away


def _is_reachable(problem: ChunkProblem, steps: int, lengths: StepLengths, scale: int, most: int) -> bool:
    """Whether messages that cost no more than `most` parts of `scale` bring everything to everybody."""
    from pysat.solvers import Cadical195

    if most < 0:
        return False
    solver: Any = Cadical195()
    numbers = count(1)
    message = {(step, route): next(numbers) for step in range(steps) for route in range(len(problem.routes))}
    members = sorted(rank for demand in problem.demands for rank in demand.sources)
    for contributor in members:
        known = {(time, rank): next(numbers) for time in range(steps + 1) for rank in range(problem.ranks)}
        for rank in range(problem.ranks):
            solver.add_clause([known[0, rank] if rank == contributor else -known[0, rank]])
            if rank in members:
                solver.add_clause([known[steps, rank]])
        for step in range(steps):
            ways: dict[int, list[int]] = {rank: [known[step, rank]] for rank in range(problem.ranks)}
            for index, route in enumerate(problem.routes):
                way = next(numbers)
                solver.add_clause([-way, message[step, index]])
                solver.add_clause([-way, known[step, route.src]])
                ways[route.dst].append(way)
            for rank, possible in ways.items():
                solver.add_clause([-known[step + 1, rank], *possible])
    costs = {
        literal: int(sum(lengths[step][link] for link in problem.routes[index].links) * scale)
        for (step, index), literal in message.items()
    }
    _limit(solver, numbers, costs, most)
    return bool(solver.solve())


def _limit(solver: Any, numbers: Iterator[int], costs: Mapping[int, int], most: int) -> None:
    """Say that the literals that are true cost no more than `most`, by sums of two and two of them."""
    # Each literal of a sum is true where what is below it costs at least so much.
    sums = [{min(cost, most + 1): literal} for literal, cost in costs.items() if cost]
    while len(sums) > 1:
        merged = []
        for left, right in zip(sums[::2], sums[1::2], strict=False):
            both: dict[int, int] = {}
            for one, first in [(0, 0), *left.items()]:
                for other, second in [(0, 0), *right.items()]:
                    if together := min(one + other, most + 1):
                        both[together] = both.get(together) or next(numbers)
                        inputs = (-literal for literal in (first, second) if literal)
                        solver.add_clause([both[together], *inputs])
            merged.append(both)
        sums = merged + sums[len(merged) * 2 :]
    if sums and most + 1 in sums[0]:
        solver.add_clause([-sums[0][most + 1]])
