"""Layouts that people use, as restrictions of what may be chosen: the best of each, on the same costs.

data parallel   samples along every axis, weights whole, one allreduce of gradients
zero-3          the same with weights, gradients and state divided, gathered for each pass
megatron        samples along the first axis, heads and columns or rows of weights along the second, values
                between blocks replicated along it (Shoeybi et al. 2019)

Each is a subset of the strategies of the program, so that what it chooses freely is never worse. Operators
without samples, or with fewer than ranks, stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from arborcast.pipeline.sharding.graph import MergedOperator
from arborcast.pipeline.sharding.sharding_program import Allowed
from arborcast.pipeline.sharding.specs import Assignment
from arborcast.pipeline.sharding.strategies import Strategy


def _samples(operator: MergedOperator, sizes: tuple[int, ...]) -> Assignment:
    """Samples along as many of the axes as they can be divided by."""
    if operator.sample is None or operator.parts[operator.sample] % math.prod(sizes):
        return (None,) * len(sizes)
    return (operator.sample,) * len(sizes)


def data_parallel(sizes: tuple[int, ...]) -> Allowed:
    """Only copies that each work on a share of the samples."""

    def allowed(operator: MergedOperator, strategy: Strategy) -> bool:
        if operator.given is not None:
            return not any(it is not None for it in (*strategy.before, *(strategy.update or ())))
        return strategy.before == _samples(operator, sizes) and not _is_scattered(operator, strategy)

    return allowed


def zero_3(sizes: tuple[int, ...]) -> Allowed:
    """The same, with every parameter stored in as many parts as one of its dimensions allows."""

    def allowed(operator: MergedOperator, strategy: Strategy) -> bool:
        if operator.given is None:
            return data_parallel(sizes)(operator, strategy)
        can = any(length % math.prod(sizes) == 0 for length in operator.outputs[0].shape)
        stored = set(strategy.before)
        whole = not can and stored == {None} and set(strategy.update or ()) == {None}
        return whole or (can and None not in stored and len(stored) == 1)

    return allowed


def megatron(sizes: tuple[int, ...]) -> Allowed:
    """Samples along all axes but the last; along that one weights, with sums made whole at once.

    Operators without weights are divided by anything but samples there, such as heads and classes.
    """

    def allowed(operator: MergedOperator, strategy: Strategy) -> bool:
        if operator.given is not None:
            return strategy.update == strategy.before and set(strategy.before[:-1]) <= {None}
        first = strategy.before[:-1] == _samples(operator, sizes[:-1])
        inner = strategy.before[-1]
        weights = [it for it in operator.reads if operator.sample not in it.labels]
        is_weight = inner is None or any(inner in it.labels for it in weights)
        is_value = not weights and inner != operator.sample
        return first and (is_weight or is_value) and not _is_scattered(operator, strategy)

    return allowed


def _is_scattered(operator: MergedOperator, strategy: Strategy) -> bool:
    return any(
        label in operator.summed and after is not None
        for label, after in zip(strategy.before, strategy.after, strict=True)
    )


LAYOUTS: Mapping[str, Callable[[tuple[int, ...]], Allowed]] = {
    "data-parallel": data_parallel,
    "zero-3": zero_3,
    "megatron": megatron,
}
"""By name: from the sizes of the mesh to what is allowed."""
