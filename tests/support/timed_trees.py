"""Every tree of a tiny problem in the time-expanded graph, and the best packing of them: brute force."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product

import numpy as np

from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.collective import Demand
from arborcast.synth.lp.highs import new_model

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


def least_ratio(problem: ChunkProblem, steps: int) -> float:
    """The least R/C over all C: rounds per chunk of all steps in which fractions of trees fit."""
    trees = [
        (index, tree)
        for index, demand in enumerate(problem.demands)
        for tree in all_trees(problem, demand, steps)
    ]
    links = len(problem.topology.links)
    matrix = np.zeros((len(problem.demands) + steps * links, steps + len(trees)))
    for step in range(steps):
        first = len(problem.demands) + step * links
        matrix[first : first + links, step] = problem.capacities
    for column, (demand, tree) in enumerate(trees, start=steps):
        matrix[demand, column] = 1
        for route, step in tree:
            for link in problem.routes[route].links:
                matrix[len(problem.demands) + step * links + link, column] -= 1
    lower = np.zeros(len(matrix))
    lower[: len(problem.demands)] = 1
    model = new_model()
    for column in range(steps + len(trees)):
        model.addVar(0, model.inf)
        model.changeColCost(column, float(column < steps))
    for row, least in zip(matrix, lower, strict=True):
        (columns,) = np.nonzero(row)
        model.addRow(least, model.inf, len(columns), columns.astype(np.int32), row[columns])
    model.run()
    assert model.modelStatusToString(model.getModelStatus()) == "Optimal"
    return float(model.getInfo().objective_function_value)
