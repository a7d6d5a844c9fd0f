"""What the certificates of an allreduce in S steps prove, recomputed from them alone in exact arithmetic.

Knows nothing of how they are found: rules are checked, shortest ways walked step by step, and that there are
no cheaper messages is asked of CaDiCaL in a formula of its own.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import count
from typing import Any, TypeAlias

from arborcast.synth.chunks.bounds.step_certificate import MessageDual, PairDual, StepLengths
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Permutation

Way: TypeAlias = tuple[int, ...]
"""Vertices one after the other."""


def ratio_of_pairs(problem: ChunkProblem, steps: int, certificate: PairDual) -> Fraction:
    """The R/C that `PairDual` prove.

    Raises:
        InputError: they do not fit the problem, or break a rule.
    """
    _check_links(problem, steps, certificate.links)
    members = {rank for demand in problem.demands for rank in demand.sources}
    for element in certificate.symmetries:
        _check_symmetry(problem, members, element)
    every = [(one, other) for one in members for other in members if one != other]
    alike = _orbits(every, certificate.symmetries)
    ways = [(route.src, *route.via, route.dst) for route in problem.routes]
    alike_ways = _orbits(ways, certificate.symmetries)
    total: dict[tuple[int, Way], Fraction] = defaultdict(Fraction)
    named = [alike.get(pair[:2]) for pair in certificate.pairs]
    if len(set(named)) < len(named):
        raise InputError("certificate: a pair of ranks must be named once, and one of those that are alike")
    sizes = Counter(alike.values())
    ratio = Fraction(0)
    for contributor, receiver, lengths in certificate.pairs:
        if (contributor, receiver) not in alike:
            raise InputError(f"certificate: {contributor} to {receiver} is no pair of ranks that take part")
        pairs = sizes[alike[contributor, receiver]]
        own: dict[tuple[int, int], Fraction] = {}
        for step, route, length in lengths:
            if not 0 <= step < steps or not 0 <= route < len(problem.routes) or length < 0:
                raise InputError(
                    f"certificate: {contributor} to {receiver}: there is no length {length} of route {route} "
                    f"in step {step}"
                )
            own[step, route] = length
            total[step, alike_ways[ways[route]]] += pairs * length
        ratio += pairs * _shortest(problem, steps, own, contributor, receiver)
    allowed: dict[tuple[int, Way], Fraction] = defaultdict(Fraction)
    for step, row in enumerate(certificate.links):
        for number, way in enumerate(ways):
            allowed[step, alike_ways[way]] += sum(row[link] for link in problem.routes[number].links)
    for (step, way), length in total.items():
        if length > allowed[step, way]:
            raise InputError(
                f"certificate: step {step}, route {ways.index(way)}: lengths must add up to at most "
                f"{allowed[step, way]}, got {length}"
            )
    return ratio


def _check_symmetry(problem: ChunkProblem, members: set[int], element: Permutation) -> None:
    """Raise InputError unless a permutation of the vertices keeps capacities and who takes part."""
    topology = problem.topology
    if sorted(element) != list(range(topology.size)):
        raise InputError("certificate: a symmetry must be a permutation of the vertices")
    units = {(a.src, a.dst): units for a, units in zip(topology.links, problem.capacities, strict=True)}
    if any(units.get((element[src], element[dst])) != here for (src, dst), here in units.items()):
        raise InputError("certificate: a symmetry must map links to links of the same capacity")
    if {element[rank] for rank in members} != members or any(
        topology.is_switch(vertex) != topology.is_switch(element[vertex]) for vertex in range(topology.size)
    ):
        raise InputError("certificate: a symmetry must keep the ranks that take part, and the switches")


def _orbits(things: Iterable[Way], symmetries: Sequence[Permutation]) -> dict[Way, Way]:
    """Of each sequence of vertices one that stands for all to which the symmetries map it."""
    stands: dict[Way, Way] = {}
    for thing in things:
        if thing in stands:
            continue
        stands[thing] = thing
        stack = [thing]
        while stack:
            here = stack.pop()
            for element in symmetries:
                image = tuple(element[vertex] for vertex in here)
                if image not in stands:
                    stands[image] = thing
                    stack.append(image)
    return stands


def ratio_of_messages(problem: ChunkProblem, steps: int, certificate: MessageDual) -> Fraction:
    """The R/C that `MessageDual` prove, which is the cost that they name where nothing is cheaper.

    Raises:
        InputError: they do not fit the problem, break a rule, or there are cheaper messages.
    """
    _check_links(problem, steps, certificate.lengths)
    scale = math.lcm(*(length.denominator for row in certificate.lengths for length in row))
    most = math.ceil(certificate.cost * scale) - 1
    if _is_reachable(problem, steps, certificate.lengths, scale, most):
        raise InputError(
            f"certificate: every contribution reaches every rank at a cost of {Fraction(most, scale)} or "
            f"less, it says {certificate.cost}"
        )
    return certificate.cost


def _check_links(problem: ChunkProblem, steps: int, lengths: StepLengths) -> None:
    links = problem.topology.links
    if len(lengths) != steps or any(len(row) != len(links) for row in lengths):
        raise InputError(f"certificate: needs a length for each of {len(links)} links in {steps} steps")
    for step, row in enumerate(lengths):
        if any(length < 0 for length in row):
            raise InputError(f"certificate: step {step}: a length must not be negative, got {min(row)}")
        used = sum(length * capacity for length, capacity in zip(row, problem.capacities, strict=True))
        if used > 1:
            raise InputError(
                f"certificate: step {step}: capacities times lengths must add up to at most 1, got {used}"
            )


def _shortest(
    problem: ChunkProblem, steps: int, lengths: dict[tuple[int, int], Fraction], origin: int, end: int
) -> Fraction:
    """The shortest way of a contribution to a rank; a route without a length costs nothing."""
    reached = {origin: Fraction(0)}
    for step in range(steps):
        after = dict(reached)
        for index, route in enumerate(problem.routes):
            if route.src in reached:
                way = reached[route.src] + lengths.get((step, index), Fraction(0))
                after[route.dst] = min(after.get(route.dst, way), way)
        reached = after
    if end not in reached:
        raise InputError(f"certificate: rank {origin} cannot reach rank {end} in {steps} steps")
    return reached[end]


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
