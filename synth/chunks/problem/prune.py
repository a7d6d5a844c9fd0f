"""From the sends of a solver's model to a schedule: only what is needed, each chunk at most once to a rank.

A model may send what nobody asked for. What is left here is a tree per chunk, which is also what makes the
mirror image of the schedule a reduction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from arborcast.synth.chunks.problem.instance import Problem
from arborcast.synth.chunks.problem.orbits import ChunkSend
from arborcast.synth.collective import Demand

Arrivals: TypeAlias = dict[int, ChunkSend]
"""The send by which each rank first gets a chunk."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A solution of a problem: the rounds of each step and the sends of every chunk, in order of step."""

    rounds: tuple[int, ...]
    sends: tuple[ChunkSend, ...]


def prune(problem: Problem, chunks: int, rounds: Iterable[int], sends: Iterable[ChunkSend]) -> Plan:
    """Keep the first arrival of each chunk at each rank, and of those what leads to a target.

    Args:
        problem: what the sends solve.
        chunks: C, the chunks of each demand.
        rounds: of each step.
        sends: of every chunk, in any order.

    Raises:
        ValueError: a target never gets some chunk, which only a bug of ours can bring about.
    """
    of_chunk: dict[tuple[int, int], list[ChunkSend]] = defaultdict(list)
    for send in sends:
        of_chunk[send.demand, send.chunk].append(send)
    kept: list[ChunkSend] = []
    for demand, chunk in product(range(len(problem.demands)), range(chunks)):
        arrivals = _arrivals(problem, problem.demands[demand], of_chunk[demand, chunk])
        missing = problem.demands[demand].targets - arrivals.keys()
        if missing:
            raise ValueError(f"demand {demand}, chunk {chunk}: never reaches rank {min(missing)}")
        kept += _useful(problem, problem.demands[demand].targets, arrivals)
    kept.sort(key=lambda send: (send.step, send.demand, send.chunk, send.route))
    return Plan(tuple(rounds), tuple(kept))


def _arrivals(problem: Problem, demand: Demand, sends: Iterable[ChunkSend]) -> Arrivals:
    held_since = dict.fromkeys(demand.sources, 0)
    arrivals: Arrivals = {}
    for send in sorted(sends, key=lambda send: (send.step, send.route)):
        route = problem.routes[send.route]
        if route.dst not in held_since and held_since.get(route.src, send.step + 1) <= send.step:
            held_since[route.dst] = send.step + 1
            arrivals[route.dst] = send
    return arrivals


def _useful(problem: Problem, targets: Iterable[int], arrivals: Mapping[int, ChunkSend]) -> list[ChunkSend]:
    useful: dict[int, ChunkSend] = {}
    for target in sorted(targets):
        rank = target
        while rank in arrivals and rank not in useful:
            useful[rank] = arrivals[rank]
            rank = problem.routes[arrivals[rank].route].src
    return list(useful.values())
