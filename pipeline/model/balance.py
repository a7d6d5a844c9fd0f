"""Consecutive items in parts whose largest is as small as possible: exact, and cheap where it can choose.

So `traced.layers` merges the operators of a trace, and RaNNC's planner layers into blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from arborcast.pipeline.errors import PartitionError


def balanced_cuts(
    weights: Sequence[float],
    parts: int,
    *,
    costs: Sequence[float] | None = None,
    slack: float = 0.0,
) -> tuple[int, ...]:
    """Where to cut a sequence into parts, none empty, so that the heaviest part is as light as possible.

    Args:
        weights: of the items, not negative.
        parts: how many.
        costs: of a cut before each item (the first is not used); None for no difference.
        slack: the heaviest part may weigh up to (1 + slack) times the least possible where cheaper cuts are
            to be had.

    Returns:
        The items before which it is cut, `parts - 1` of them: the cheapest choice; on a tie the last cut is
        as early as possible, then the one before it.

    Raises:
        PartitionError: fewer items than parts, or a weight out of range.

    The limit is found by bisection over attained sums, in integers, so that it is exact; the cuts by a
    dynamic program over the parts that fit the limit.
    """
    if not 1 <= parts <= len(weights):
        raise PartitionError(f"balance: parts must be in 1..{len(weights)}, the number of items, got {parts}")
    for index, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise PartitionError(f"balance: weight {index} must be finite and not negative, got {weight}")
    sums = _integer_sums(weights)
    limit = _least_limit(sums, parts)
    if slack:
        limit = max(limit, math.floor(limit * (1 + Fraction(slack))))
    return _cheapest(sums, parts, limit, [0.0] * len(weights) if costs is None else costs)


def _integer_sums(weights: Sequence[float]) -> list[int]:
    """Sums of the first 0, 1, ... weights, in a unit in which all of them are whole."""
    exact = [Fraction(weight) for weight in weights]
    unit = math.lcm(*(weight.denominator for weight in exact))
    return list(accumulate((int(weight * unit) for weight in exact), initial=0))


def _least_limit(sums: Sequence[int], parts: int) -> int:
    """The least sum that no part has to exceed."""
    low = max(after - before for before, after in pairwise(sums))
    high = sums[-1]
    while low < high:
        limit = (low + high) // 2
        heaviest, overflow, used = 0, high, 1
        begin = 0
        for end in range(1, len(sums)):
            if sums[end] - sums[begin] > limit:
                overflow = min(overflow, sums[end] - sums[begin])
                begin, used = end - 1, used + 1
            heaviest = max(heaviest, sums[end] - sums[begin])
        if used <= parts:
            high = heaviest
        else:
            low = overflow  # any limit below it makes the same greedy parts
    return low


def _cheapest(sums: Sequence[int], parts: int, limit: int, costs: Sequence[float]) -> tuple[int, ...]:
    """The cheapest cuts into parts that weigh at most the limit; one exists."""
    count = len(sums) - 1
    best: list[float] = [0.0] + [math.inf] * count  # of the first items, in as many parts as rounds so far
    choice: list[list[int]] = []
    for part in range(parts):
        row = [math.inf] * (count + 1)
        chosen = [0] * (count + 1)
        for end in range(part + 1, count - (parts - part - 1) + 1):
            for begin in range(end - 1, part - 1, -1):
                if sums[end] - sums[begin] > limit:
                    break
                cost = best[begin] + (costs[begin] if begin else 0.0)
                if cost <= row[end]:  # on a tie the earlier cut
                    row[end], chosen[end] = cost, begin
        best = row
        choice.append(chosen)
    cuts = [count]
    for chosen in reversed(choice):
        cuts.append(chosen[cuts[-1]])
    return tuple(reversed(cuts[1:-1]))
