"""Layers into consecutive parts whose largest cost is least: exact, for any cost of a range.

GPipe's stages balance time alone; those of other orders leave out ranges that memory cannot hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf

from arborcast.pipeline.errors import PlanError


def balanced(costs: Sequence[float], parts: int) -> tuple[tuple[int, int], ...]:
    """The ranges [start, end) of `parts` consecutive parts of the layers, the dearest as cheap as possible.

    Raises:
        PlanError: there are fewer layers than parts.
    """
    sums = list(accumulate(costs, initial=0.0))
    return balanced_by(lambda _, start, end: sums[end] - sums[start], len(costs), parts)


def balanced_by(
    cost: Callable[[int, int, int], float], depth: int, parts: int
) -> tuple[tuple[int, int], ...]:
    """As `balanced`, where `cost(part, start, end)` may depend on the part; infinite where it must not be.

    A dynamic program over (part, layers so far): O(parts depth^2) costs. Of equals, the later cuts.

    Raises:
        PlanError: there are fewer layers than parts, or no division has a finite cost.
    """
    if depth < parts:
        raise PlanError(f"balance: {parts} parts need at least as many layers, got {depth}")
    least = [0.0, *[inf] * depth]  # by the number of layers in the parts so far
    cuts: list[list[int]] = []
    for part in range(parts):
        found, cut = [inf] * (depth + 1), [0] * (depth + 1)
        last = part == parts - 1
        for end in [depth] if last else range(part + 1, depth - (parts - 1 - part) + 1):
            for start in range(end - 1, part - 1, -1):
                if least[start] >= found[end]:
                    continue  # this range cannot improve it
                now = max(least[start], cost(part, start, end))
                if now < found[end]:
                    found[end], cut[end] = now, start
        least = found
        cuts.append(cut)
    if least[depth] == inf:
        raise PlanError(f"balance: no division of {depth} layers into {parts} parts is allowed")
    bounds = [depth]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return tuple(pairwise(reversed(bounds)))
