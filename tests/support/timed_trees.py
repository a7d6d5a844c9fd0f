"""Every tree of a tiny problem in the time-expanded graph: brute force."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product

from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.collective import Demand

Tree = tuple[tuple[int, int], ...]  # (route, step) by which each rank first gets the block


def all_trees(problem: ChunkProblem, demand: Demand, steps: int) -> Iterator[Tree]:
    """Every way to bring a block to its targets, each rank getting it once or, unless a target, never."""
    others = [rank for rank in range(problem.ranks) if rank not in demand.sources]
    choices = []
    for rank in others:
        arrivals = [(route, step) for route in problem.arriving[rank] for step in range(steps)]
        choices.append(arrivals if rank in demand.targets else [None, *arrivals])
    for arrivals in product(*choices):
        held = dict.fromkeys(demand.sources, 0)
        sends = [send for send in arrivals if send is not None]
        for route, step in sends:
            held[problem.routes[route].dst] = step + 1
        if all(held.get(problem.routes[route].src, steps) <= step for route, step in sends):
            yield tuple(sends)


def cost(problem: ChunkProblem, tree: Tree, lengths: Sequence[Sequence[Fraction]]) -> Fraction:
    """What a tree costs under lengths of the links in each step."""
    return sum(
        (lengths[step][link] for route, step in tree for link in problem.routes[route].links), Fraction(0)
    )
