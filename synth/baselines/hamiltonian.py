"""Rings through all ranks: a search with a budget first, an integer program where the search gives up.

A ring is a directed Hamiltonian cycle whose edges are ways through switches; links have a capacity in
rings, which ways of one ring may use up together (a trunk between two switches).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

from synth.baselines.clock import Budget, BudgetError, Clock
from synth.baselines.paths import Hop, Path, Paths
from synth.errors import TimedOutError

Ring: TypeAlias = tuple[Path, ...]
SEARCH_STEPS = 2_000
SEARCHES = 6
PROGRAM_VARIABLES = 20_000
PROGRAM_ROUNDS = 20
PROGRAM_CASES = 50


@dataclass(frozen=True)
class Fabric:
    """What rings are made of: the ranks, the ways between them, and how many rings each link carries."""

    ranks: tuple[int, ...]
    paths: Paths
    capacity: Mapping[Hop, int]

    def restricted(self, capacity: Mapping[Hop, int]) -> Fabric:
        """The same with other capacities and without the ways that no longer fit."""
        fitting = {
            pair: kept
            for pair, ways in self.paths.items()
            if (kept := tuple(way for way in ways if all(capacity[hop] for hop in way.hops)))
        }
        return Fabric(self.ranks, fitting, capacity)


def links_of(ring: Ring) -> Counter[Hop]:
    """How often a ring passes each link."""
    return Counter(hop for path in ring for hop in path.hops)


def find_ring(fabric: Fabric, *, start: int, rng: Random, clock: Clock, program: bool = True) -> Ring | None:
    """A ring that the capacities allow, or None where there is none.

    Args:
        fabric: what to make it of.
        start: where the search begins; different starts find different rings.
        rng: breaks ties.
        clock: the deadline.
        program: whether to go on with an integer program where the search gives up.

    Raises:
        BudgetError: neither the search nor the program came to an answer.
    """
    for _ in range(SEARCHES):
        budget = Budget(SEARCH_STEPS, clock)
        try:
            return next(rings_of(fabric, start=start, budget=budget, rng=rng), None)
        except BudgetError:  # an unlucky turn early on costs all steps; other luck may find it at once
            start = rng.choice(fabric.ranks)
    if not program:
        raise BudgetError
    return _ring_by_program(fabric, rng, clock)


def rings_of(fabric: Fabric, *, start: int, budget: Budget, rng: Random) -> Iterator[Ring]:
    """Every ring once, by depth-first search with the widest ways and the hardest ranks first.

    Raises:
        BudgetError: the steps ran out before the search was complete.
    """
    left = dict(fabric.capacity)
    choices = _choices(fabric, left, rng)
    visited = {start}
    chosen: list[Path] = []
    open_ways = [iter(choices(start, visited))]
    while open_ways:
        way = next(open_ways[-1], None)
        if way is None:
            open_ways.pop()
            if chosen:
                last = chosen.pop()
                visited.discard(last.dst)
                _count(left, last, 1)
            continue
        budget.spend()
        if way.dst == start:
            if len(visited) == len(fabric.ranks) and _fits(left, way):
                yield (*chosen, way)
        elif way.dst not in visited and _fits(left, way):
            _count(left, way, -1)
            visited.add(way.dst)
            chosen.append(way)
            blocked = _is_dead_end(fabric, left, visited, start, way.dst)
            open_ways.append(iter(() if blocked else choices(way.dst, visited)))


def _choices(fabric: Fabric, left: Mapping[Hop, int], rng: Random) -> Callable[[int, set[int]], list[Path]]:
    onward: dict[int, list[Path]] = {rank: [] for rank in fabric.ranks}
    for (src, _), ways in fabric.paths.items():
        onward[src].extend(ways)
    luck = {way: rng.random() for ways in onward.values() for way in ways}

    def choose(rank: int, visited: set[int]) -> list[Path]:
        """Ways on, those with most room first, among them the rank with the fewest ways on (Warnsdorff)."""
        exits = {
            way.dst: sum(1 for after in onward[way.dst] if after.dst not in visited) for way in onward[rank]
        }
        room = {way: min(left[hop] for hop in way.hops) for way in onward[rank]}
        return sorted(onward[rank], key=lambda way: (-room[way], exits[way.dst], luck[way]))

    return choose


def _fits(left: Mapping[Hop, int], way: Path) -> bool:
    return all(left[hop] > 0 for hop in way.hops)


def _count(left: dict[Hop, int], way: Path, times: int) -> None:
    for hop in way.hops:
        left[hop] += times


def _is_dead_end(
    fabric: Fabric, left: Mapping[Hop, int], visited: set[int], start: int, current: int
) -> bool:
    """Whether some rank that is still to come cannot be entered, or not be left."""
    if len(fabric.ranks) > 64:  # looking at every pair would cost more than it saves
        return False
    unvisited = [rank for rank in fabric.ranks if rank not in visited]
    targets = [*unvisited, start]
    sources = [*unvisited, current]

    def joined(src: int, dst: int) -> bool:
        return any(_fits(left, way) for way in fabric.paths.get((src, dst), ()))

    return any(
        not any(joined(rank, target) for target in targets if target != rank)
        or not any(joined(source, rank) for source in sources if source != rank)
        for rank in unvisited
    ) or not any(joined(source, start) for source in sources)


def _ring_by_program(fabric: Fabric, rng: Random, clock: Clock) -> Ring | None:
    """One way in and one out of each rank; cuts against shorter cycles are added until none is left."""
    ways = [way for pair in sorted(fabric.paths) for way in fabric.paths[pair]]
    if len(ways) > PROGRAM_VARIABLES:
        raise BudgetError
    model = _model(fabric, ways, rng)
    for _ in range(PROGRAM_ROUNDS):
        chosen = _optimum(model, ways, clock)
        if chosen is None:
            return None
        cycles = _cycles(chosen)
        if len(cycles) == 1:
            return cycles[0]
        for cycle in cycles:
            inside = {way.src for way in cycle}
            leaving = [i for i, way in enumerate(ways) if way.src in inside and way.dst not in inside]
            model.addRow(1.0, float(len(ways)), len(leaving), leaving, [1.0] * len(leaving))
    raise BudgetError


def _model(fabric: Fabric, ways: Sequence[Path], rng: Random) -> Any:
    import highspy

    model = highspy.Highs()  # type: ignore[no-untyped-call]
    model.silent()
    model.setOptionValue("threads", 1)  # the same way through the tree of cases on every machine
    model.setOptionValue("mip_max_nodes", PROGRAM_CASES)
    for column, way in enumerate(ways):
        # Scarce links are dear; the random part keeps many like solutions from slowing the program down.
        scarcity = sum(1.0 / fabric.capacity[hop] for hop in way.hops)
        model.addVar(0.0, 1.0)
        model.changeColCost(column, scarcity * (1.0 + 0.1 * rng.random()))
        model.changeColIntegrality(column, highspy.HighsVarType.kInteger)
    for rank in fabric.ranks:
        for columns in (
            [i for i, way in enumerate(ways) if way.src == rank],
            [i for i, way in enumerate(ways) if way.dst == rank],
        ):
            model.addRow(1.0, 1.0, len(columns), columns, [1.0] * len(columns))
    through: dict[Hop, list[int]] = {}
    for column, way in enumerate(ways):
        for hop in way.hops:
            through.setdefault(hop, []).append(column)
    for hop, columns in through.items():
        if fabric.capacity[hop] < min(len(columns), len(fabric.ranks)):
            room = float(fabric.capacity[hop])
            model.addRow(0.0, room, len(columns), columns, [1.0] * len(columns))
    return model


def _optimum(model: Any, ways: Sequence[Path], clock: Clock) -> list[Path] | None:
    if clock.left_s is not None:
        model.setOptionValue("time_limit", max(clock.left_s, 0.001))
    model.run()
    status = model.modelStatusToString(model.getModelStatus())
    if status == "Time limit reached":
        raise TimedOutError("the search for a ring did not end within its deadline")
    if status == "Infeasible":
        return None
    if status != "Optimal":  # out of cases
        raise BudgetError
    values = model.getSolution().col_value
    return [way for way, value in zip(ways, values, strict=True) if value > 0.5]


def _cycles(ways: Sequence[Path]) -> list[Ring]:
    following = {way.src: way for way in ways}
    cycles: list[Ring] = []
    while following:
        start = min(following)
        cycle = [following.pop(start)]
        while cycle[-1].dst != start:
            cycle.append(following.pop(cycle[-1].dst))
        cycles.append(tuple(cycle))
    return cycles
