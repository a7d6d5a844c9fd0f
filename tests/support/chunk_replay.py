"""What several tests hold against a search for chunk schedules: a replay of its model, and brute force.

Neither shares anything with the encodings: they know of ranks, routes and capacities alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from arborcast.synth.chunks import curve
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkOrbits
from arborcast.synth.chunks.problem.outcome import Feasible, Instance
from arborcast.synth.chunks.problem.prune import ChunkPlan
from arborcast.synth.chunks.solvers.search import Searcher
from arborcast.synth.chunks.step_result import StepOptimum
from arborcast.synth.collective import Collective, Kind
from arborcast.topologies import load

Held = frozenset[int]
State = tuple[tuple[Held, ...], ...]
"""For each demand the ranks that hold each of its chunks, in an order that forgets which chunk is which."""


def no_time_from(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Let the clock jump beyond every deadline when the search on a frontier comes to so many steps."""
    clock, search = time.monotonic, curve.step_optimum  # type: ignore[attr-defined]
    ahead_s = 0.0

    def searched(searcher: Searcher, count: int, *others: Any) -> StepOptimum:
        nonlocal ahead_s
        ahead_s = 1e6 if count >= steps else 0.0
        return search(searcher, count, *others)

    monkeypatch.setattr(time, "monotonic", lambda: clock() + ahead_s)
    monkeypatch.setattr(curve, "step_optimum", searched)


def instance_of(spec: str, kind: str, chunks: int, steps: int, rounds: int, root: int = 0) -> Instance:
    topology = load(spec)
    problem = ChunkProblem.of(topology, Collective.on(topology, Kind(kind), root=root))
    return Instance(ChunkOrbits.trivial(problem, chunks), steps, rounds)


def replay(instance: Instance, found: Feasible) -> None:
    """Unfold the model and carry it out, step by step, looking at every rule."""
    assert len(found.rounds) == instance.steps
    assert sum(found.rounds) == instance.rounds
    assert len(set(found.sends)) == len(found.sends)
    sends = list(instance.orbits.unfold(found.sends))
    replay_plan(instance.orbits.problem, instance.orbits.chunks, ChunkPlan(found.rounds, tuple(sends)))


def replay_plan(problem: ChunkProblem, chunks: int, plan: ChunkPlan) -> None:
    """Held before sent, no link over its capacity, every chunk at every target."""
    assert min(plan.rounds) >= 1
    assert all(0 <= send.step < len(plan.rounds) for send in plan.sends)
    held = {
        (number, chunk): set(demand.sources)
        for number, demand in enumerate(problem.demands)
        for chunk in range(chunks)
    }
    for step, rounds in enumerate(plan.rounds):
        loads: Counter[int] = Counter()
        arrivals = []
        for send in plan.sends:
            if send.step == step:
                route = problem.routes[send.route]
                assert route.src in held[send.demand, send.chunk], f"{send}: sent before it was there"
                arrivals.append((send.demand, send.chunk, route.dst))
                loads.update(route.links)
        for number, chunk, rank in arrivals:
            held[number, chunk].add(rank)
        for link, load_ in loads.items():
            assert load_ <= problem.capacities[link] * rounds, f"step {step}: link {link} is overfull"
    for (number, chunk), ranks in held.items():
        assert problem.demands[number].targets <= ranks, f"demand {number}, chunk {chunk}: targets missed"


def brute_force(problem: ChunkProblem, chunks: int, steps: int, rounds: int) -> bool:
    """Whether there is a schedule, by going through all states that can be reached."""

    @cache
    def can_end(state: State, steps_left: int, rounds_left: int) -> bool:
        if all(
            demand.targets <= held
            for demand, of_demand in zip(problem.demands, state, strict=True)
            for held in of_demand
        ):
            return rounds_left >= steps_left
        if not steps_left:
            return False
        longest = rounds_left - (steps_left - 1)
        return any(
            can_end(after, steps_left - 1, rounds_left - length)
            for length in range(longest, 0, -1)
            for after in states_after(state, length)
        )

    @cache
    def states_after(state: State, length: int) -> frozenset[State]:
        return frozenset(_states_after(problem, state, length))

    start = tuple(tuple([demand.sources] * chunks) for demand in problem.demands)
    return can_end(start, steps, rounds)


def _states_after(problem: ChunkProblem, state: State, length: int) -> Iterator[State]:
    """All states to which a step of so many rounds leads."""
    flat = [(number, held) for number, of_demand in enumerate(state) for held in of_demand]
    wanted = [
        (chunk, rank)
        for chunk, (_, held) in enumerate(flat)
        for rank in range(problem.ranks)
        if rank not in held
    ]
    room = [capacity * length for capacity in problem.capacities]
    got: list[tuple[int, int]] = []

    def choose(position: int) -> Iterator[State]:
        if position == len(wanted):
            yield _joined(state, flat, got)
            return
        yield from choose(position + 1)
        chunk, rank = wanted[position]
        for route in problem.routes:
            if route.dst == rank and route.src in flat[chunk][1] and all(room[link] for link in route.links):
                for link in route.links:
                    room[link] -= 1
                got.append((chunk, rank))
                yield from choose(position + 1)
                got.pop()
                for link in route.links:
                    room[link] += 1

    return choose(0)


def _joined(state: State, flat: list[tuple[int, Held]], got: list[tuple[int, int]]) -> State:
    ranks = [set(held) for _, held in flat]
    for chunk, rank in got:
        ranks[chunk].add(rank)
    chunks = [
        sorted(
            (frozenset(held) for (number, _), held in zip(flat, ranks, strict=True) if number == demand),
            key=sorted,
        )
        for demand in range(len(state))
    ]
    return tuple(map(tuple, chunks))
