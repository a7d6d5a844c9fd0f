"""A replay of what a search for chunk schedules found, which knows of ranks, routes and capacities alone."""

from __future__ import annotations

import time
from collections import Counter
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
