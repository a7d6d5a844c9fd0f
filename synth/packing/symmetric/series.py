"""Equal shares: so many trees per root, each grown where those before it have left room.

Where a tree has a choice among alike links it takes the one that is used least, counting the trees before
it; so a few trees together often use every orbit to the last part, which weights found by a linear program
do with enormous denominators.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np

from synth.compiled import Ints
from synth.packing.symmetric.generation import Generation
from synth.packing.symmetric.master import Column
from synth.packing.symmetric.weights import Chosen, filled

_MOST_EDGES = 1 << 18  # tree edges that equal shares are worth


def equal_shares(
    generation: Generation, lengths: Iterable[Ints], denominators: Iterable[int], max_height: int
) -> Chosen | None:
    """The fewest equal shares that reach the target; None where they do not, or are too many.

    All trees that are met are left in the pool of the generation.

    Args:
        generation: whose problem it is.
        lengths: of the orbits: each makes a contraction in which to look.
        denominators: how many trees per group to try.
        max_height: higher trees are no answer.
    """
    problem = generation.problem
    options = list(lengths)
    for parts in denominators:
        if parts * len(problem.groups) * problem.topology.ranks > _MOST_EDGES:
            return None
        generation.deadline.check("the search for equal shares")
        for one in options:
            columns = list(generation.series(one, parts))
            for column in columns:
                generation.pool.add(column)
            loads = np.sum([column.uses for column in columns], axis=0).tolist()
            fits = all(
                load <= math.floor(budget * parts)
                for load, budget in zip(loads, problem.budgets, strict=True)
            )
            if fits and max(column.height for column in columns) <= max_height:
                return _merged(generation, columns, parts)
    return None


def _merged(generation: Generation, columns: list[Column], parts: int) -> Chosen:
    """Trees that came up several times, once with their weights together."""
    first: dict[tuple[int, tuple[int, ...]], Column] = {}
    weight: dict[tuple[int, tuple[int, ...]], Fraction] = {}
    for column in columns:
        key = (column.group, column.uses)
        first.setdefault(key, column)
        weight[key] = weight.get(key, Fraction(0)) + Fraction(1, parts)
    return filled(generation.problem, list(first.values()), [weight[key] for key in first])
