"""Which operators are the same over and over: blocks of a network, which are then divided alike.

Operators are equal if all is equal but their names and whom they read from. A run of at least two equal
stretches of at least `LEAST` operators is a repeated block. Shorter ones are not: two equal layers in a row
may want to be divided unlike (by columns, then by rows).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arborcast.pipeline.sharding.graph import Graph, MergedOperator, Tensor

LEAST = 4
"""Operators of a block."""


def classes(graph: Graph) -> tuple[int, ...]:
    """For each operator the number of its class: operators at the same place of equal blocks are in one.

    Parameters are in the class of whoever reads them first, at that place. Any partition into classes gives a
    right program; a coarser one has fewer choices. O(n^2) for n operators.
    """
    inner = [number for number, it in enumerate(graph.operators) if it.given is None]
    known: dict[MergedOperator, int] = {}
    nameless = (renamed(graph.operators[number], lambda _: "") for number in inner)
    signs = [known.setdefault(it, len(known)) for it in nameless]
    found = {number: inner[first] for number, first in zip(inner, _folded(signs), strict=True)}
    place: dict[object, int] = {}
    for number in inner:
        for at, tensor in enumerate(graph.operators[number].reads):
            source = graph.maker[tensor.value][0]
            operator = graph.operators[source]
            if operator.given and source not in found:
                key = (found[number], at, replace(operator.given, name="", path=""))
                found[source] = place.setdefault(key, source)
    return tuple(found.get(number, number) for number in range(len(graph.operators)))


def _folded(signs: list[int]) -> list[int]:
    """For each place the first place that it is equal to, as blocks repeat."""
    result = list(range(len(signs)))
    waiting = [(0, len(signs))]
    while waiting:
        start, end = waiting.pop()
        first, period, count = _longest(signs[start:end])
        if count < 2:
            continue
        first += start
        for place in range(first + period, first + period * count):
            result[place] = result[place - period]
        waiting += [(start, first), (first + period * count, end)]
    return result


def _longest(signs: list[int]) -> tuple[int, int, int]:
    """The start, period and count of the run that covers most; of those the one of the shortest period."""
    best = (0, 0, 0)
    for period in range(LEAST, len(signs) // 2 + 1):
        equal = 0
        for at in range(len(signs) - period):
            equal = equal + 1 if signs[at] == signs[at + period] else 0
            count = equal // period + 1
            if count > 1 and count * period > best[1] * best[2]:
                best = (at + 1 - (count - 1) * period, period, count)
    return best


def renamed(operator: MergedOperator, name: Callable[[str], str]) -> MergedOperator:
    """The operator with other names for values, and nothing that tells where in a model it stands."""

    def tensors(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(replace(it, value=name(it.value)) for it in given)

    return replace(
        operator,
        name=name(operator.name),
        module="",
        place=0,
        inputs=tensors(operator.inputs),
        joined=tensors(operator.joined),
        result=tensors((operator.result,))[0],
        outputs=tensors(operator.outputs),
        kept=tensors(operator.kept),
        given=None if operator.given is None else replace(operator.given, name="", path=""),
        made=(),
    )
