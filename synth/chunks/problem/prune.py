"""From the sends of a solver's model to a schedule: only what is needed, each chunk at most once to a rank.

A model may send what nobody asked for. What is left here is a tree per chunk, which is also what makes the
mirror image of the schedule a reduction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkSend
from arborcast.synth.collective import Demand

TimedRoute: TypeAlias = tuple[int, int]
"""The index of a route and the step in which a tree uses it."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """A solution of a problem: the rounds of each step and the sends of every chunk, in order of step."""

    rounds: tuple[int, ...]
    sends: tuple[ChunkSend, ...]


def prune(problem: ChunkProblem, chunks: int, rounds: Iterable[int], sends: Iterable[ChunkSend]) -> ChunkPlan:
    """Keep the first arrival of each chunk at each rank, and of those what leads to a target.

    Raises:
        ValueError: a target never gets some chunk, which only a bug of ours can bring about.
    """
    of_chunk: dict[tuple[int, int], list[TimedRoute]] = defaultdict(list)
    for send in sends:
        of_chunk[send.demand, send.chunk].append((send.route, send.step))
    kept: list[ChunkSend] = []
    for demand, chunk in product(range(len(problem.demands)), range(chunks)):
        useful = useful_sends(problem, problem.demands[demand], of_chunk[demand, chunk])
        missing = problem.demands[demand].targets - {problem.routes[route].dst for route, _ in useful}
        if missing:
            raise ValueError(f"demand {demand}, chunk {chunk}: never reaches rank {min(missing)}")
        kept += (ChunkSend(demand, chunk, route, step) for route, step in useful)
    kept.sort(key=lambda send: (send.step, send.demand, send.chunk, send.route))
    return ChunkPlan(tuple(rounds), tuple(kept))


def useful_sends(problem: ChunkProblem, demand: Demand, sends: Iterable[TimedRoute]) -> set[TimedRoute]:
    """Of the sends of one chunk the first arrival at each rank, and of those what leads to a target."""
    held_since = dict.fromkeys(demand.sources, 0)
    arrivals: dict[int, TimedRoute] = {}
    for index, step in sorted(sends, key=lambda send: (send[1], send[0])):
        route = problem.routes[index]
        if route.dst not in held_since and held_since.get(route.src, step + 1) <= step:
            held_since[route.dst] = step + 1
            arrivals[route.dst] = (index, step)
    useful: set[TimedRoute] = set()
    for target in demand.targets:
        rank = target
        while rank in arrivals and arrivals[rank] not in useful:
            useful.add(arrivals[rank])
            rank = problem.routes[arrivals[rank][0]].src
    return useful
