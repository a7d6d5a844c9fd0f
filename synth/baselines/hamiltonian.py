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

from arborcast.synth.baselines.budget import Budget, BudgetError
from arborcast.synth.baselines.switch_paths import Path, Paths
from arborcast.synth.deadline import Deadline
from arborcast.synth.lp.highs import new_model, run
from arborcast.synth.topology import Hop

Ring: TypeAlias = tuple[Path, ...]
SEARCH_STEPS = 2_000
SEARCHES = 6
MANY_WAYS = 32
PROGRAM_RANKS = 64
PROGRAM_VARIABLES = 20_000
PROGRAM_ROUNDS = 20
PROGRAM_CASES = 50


@dataclass(frozen=True)
class RingFabric:
    """What rings are made of: the ranks, the ways between them, and how many rings each link carries."""

    ranks: tuple[int, ...]
    paths: Paths
    capacity: Mapping[Hop, int]

    def restricted(self, capacity: Mapping[Hop, int]) -> RingFabric:
        """The same with other capacities and without the ways that no longer fit."""
        fitting = {
            pair: kept
            for pair, ways in self.paths.items()
            if (kept := tuple(way for way in ways if all(capacity[hop] for hop in way.hops)))
        }
        return RingFabric(self.ranks, fitting, capacity)


def links_of(ring: Ring) -> Counter[Hop]:
    """How often a ring passes each link."""
    return Counter(hop for path in ring for hop in path.hops)


def find_ring(
    fabric: RingFabric, *, start: int, rng: Random, deadline: Deadline, program: bool = True
) -> Ring | None:
    """A ring that the capacities allow, or None where there is none.

    Different starts find different rings. Where the search gives up, `program` says whether an integer
    program goes on.

    Raises:
        BudgetError: neither the search nor the program came to an answer.
    """
    if not _is_connected(fabric):
        return None
    for _ in range(SEARCHES):
        budget = Budget(SEARCH_STEPS, deadline)
        try:
            return next(rings_of(fabric, start=start, budget=budget, rng=rng), None)
        except BudgetError:  # an unlucky turn early on costs all steps; other luck may find it at once
            start = rng.choice(fabric.ranks)
    if not program:
        raise BudgetError
    return _ring_by_program(fabric, rng, deadline)


def _is_connected(fabric: RingFabric) -> bool:
    """Whether every rank reaches every other: what a ring needs first, and what is quickly seen."""
    for end in (0, 1):
        onward: dict[int, list[int]] = {rank: [] for rank in fabric.ranks}
        for pair in fabric.paths:
            onward[pair[end]].append(pair[1 - end])
        reached = {fabric.ranks[0]}
        waiting = [fabric.ranks[0]]
        while waiting:
            for rank in onward[waiting.pop()]:
                if rank not in reached:
                    reached.add(rank)
                    waiting.append(rank)
        if len(reached) < len(fabric.ranks):
            return False
    return True


def rings_of(fabric: RingFabric, *, start: int, budget: Budget, rng: Random) -> Iterator[Ring]:
    """Every ring once, by depth-first search with the widest ways and the hardest ranks first.

    Raises:
        BudgetError: the steps ran out before the search was complete.
    """
    left = dict(fabric.capacity)
    choices = _choices(fabric, left, start, rng)
    dead_end = _dead_end_test(fabric, left, start)
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
        if way.dst == start:
            if _fits(left, way):
                yield (*chosen, way)
        elif _fits(left, way):
            budget.spend()
            _count(left, way, -1)
            visited.add(way.dst)
            chosen.append(way)
            blocked = dead_end(visited, way.dst)
            open_ways.append(iter(() if blocked else choices(way.dst, visited)))


def _choices(
    fabric: RingFabric, left: Mapping[Hop, int], start: int, rng: Random
) -> Callable[[int, set[int]], list[Path]]:
    onward: dict[int, list[Path]] = {rank: [] for rank in fabric.ranks}
    for (src, _), ways in fabric.paths.items():
        onward[src].extend(ways)
    luck = {way: rng.random() for ways in onward.values() for way in ways}

    def exits(rank: int, visited: set[int]) -> int:
        """Ways on; where there are many, some will be left, and counting them would take too long."""
        ways = onward[rank]
        return MANY_WAYS if len(ways) > MANY_WAYS else sum(1 for way in ways if way.dst not in visited)

    def choose(rank: int, visited: set[int]) -> list[Path]:
        """Ways on, those with most room first, among them the rank with the fewest exits (Warnsdorff)."""
        all_visited = len(visited) == len(fabric.ranks)
        open_ways = [
            way for way in onward[rank] if (way.dst == start if all_visited else way.dst not in visited)
        ]
        ranked = [
            (-min(left[hop] for hop in way.hops), exits(way.dst, visited), luck[way], way)
            for way in open_ways
        ]
        return [way for *_, way in sorted(ranked, key=lambda entry: entry[:3])]

    return choose


def _fits(left: Mapping[Hop, int], way: Path) -> bool:
    return all(left[hop] > 0 for hop in way.hops)


def _count(left: dict[Hop, int], way: Path, times: int) -> None:
    for hop in way.hops:
        left[hop] += times


def _dead_end_test(
    fabric: RingFabric, left: Mapping[Hop, int], start: int
) -> Callable[[set[int], int], bool]:
    out_of: dict[int, list[Path]] = {rank: [] for rank in fabric.ranks}
    into: dict[int, list[Path]] = {rank: [] for rank in fabric.ranks}
    for (src, dst), ways in fabric.paths.items():
        out_of[src].extend(ways)
        into[dst].extend(ways)

    def is_dead_end(visited: set[int], current: int) -> bool:
        """Whether some rank that is still to come cannot be entered, or not be left, or the start."""

        def may_enter(rank: int) -> bool:
            return any(
                (way.src == current or way.src not in visited) and _fits(left, way) for way in into[rank]
            )

        def may_leave(rank: int) -> bool:
            return any(
                (way.dst == start or way.dst not in visited) and _fits(left, way) for way in out_of[rank]
            )

        unvisited = [rank for rank in fabric.ranks if rank not in visited]
        return not may_enter(start) or not all(may_enter(rank) and may_leave(rank) for rank in unvisited)

    return is_dead_end


def _ring_by_program(fabric: RingFabric, rng: Random, deadline: Deadline) -> Ring | None:
    """One way in and one out of each rank; cuts against shorter cycles are added until none is left."""
    ways = [way for pair in sorted(fabric.paths) for way in fabric.paths[pair]]
    if len(fabric.ranks) > PROGRAM_RANKS or len(ways) > PROGRAM_VARIABLES:
        raise BudgetError
    model = _model(fabric, ways, rng)
    for _ in range(PROGRAM_ROUNDS):
        values = _optimum(model, deadline)
        if values is None:
            return None
        cycles = _cycles([way for way, value in zip(ways, values, strict=True) if value])
        if len(cycles) == 1:
            return cycles[0]
        for cycle in cycles:
            inside = {way.src for way in cycle}
            leaving = [i for i, way in enumerate(ways) if way.src in inside and way.dst not in inside]
            model.addRow(1.0, float(len(ways)), len(leaving), leaving, [1.0] * len(leaving))
    raise BudgetError


def _model(fabric: RingFabric, ways: Sequence[Path], rng: Random) -> Any:
    import highspy

    model = new_model(mip_max_nodes=PROGRAM_CASES)
    for column, way in enumerate(ways):
        # Scarce links are dear; the random part keeps many like solutions from slowing the program down.
        scarcity = sum(1.0 / fabric.capacity[hop] for hop in way.hops)
        model.addVar(0.0, 1.0)
        model.changeColCost(column, scarcity * (1.0 + 0.1 * rng.random()))
        model.changeColIntegrality(column, highspy.HighsVarType.kInteger)
    for end in ("src", "dst"):
        columns_of: dict[int, list[int]] = {rank: [] for rank in fabric.ranks}
        for column, way in enumerate(ways):
            columns_of[getattr(way, end)].append(column)
        for columns in columns_of.values():
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


def _optimum(model: Any, deadline: Deadline) -> list[int] | None:
    """The best values, or None where there are none.

    Raises:
        BudgetError: the program ran out of the cases that it may look at.
        TimedOutError: the deadline passed.
    """
    status = run(model, deadline, what="the search for a ring")
    if status == "Infeasible":
        return None
    if status != "Optimal":  # out of cases
        raise BudgetError
    return [round(value) for value in model.getSolution().col_value]


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
