"""How every value of a stage gets from who makes it to who reads it, and its gradient back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.meshes import Spec
from arborcast.pipeline.sharding import evaluation
from arborcast.pipeline.sharding.evaluation import Reading
from arborcast.pipeline.sharding.graph import Graph, MergedOperator
from arborcast.pipeline.sharding.resharding import ReshardingPath
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.specs import spec_of
from arborcast.pipeline.sharding.strategies import (
    ReadLayout,
    Strategy,
    inner_ways,
    summands_of,
)

Leg = tuple[Spec, ReshardingPath]
"""How a tensor lies, and the path that it takes from there."""


@dataclass(frozen=True)
class ValueRoute:
    """How a value gets to readers that ask alike, and its gradient back.

    Attributes:
        there: of the value.
        back: of its gradient; None where it has none.
        is_gathered: whether it is a parameter that is brought there anew for each pass.
    """

    there: Leg
    back: Leg | None
    is_gathered: bool


@dataclass(eq=False)
class PreparedRead:
    """A value as some operators read it alike; itself alone is equal to it.

    Attributes:
        value: its name.
        spec: how it lies then.
        maker: the number of the operator that makes it.
        source: that operator.
        route: from there; None of an input of the model, which every rank has.
        readers: how many operators read it so.
    """

    value: str
    spec: Spec
    maker: int
    source: MergedOperator
    route: ValueRoute | None
    readers: int = 0


def readings(
    graph: Graph, chosen: Sequence[Strategy | None], setting: Setting, several: Collection[str]
) -> list[tuple[PreparedRead, ...]]:
    """What every operator reads, in its order, of which those that read alike have the same.

    Args:
        graph: the operators of the stage.
        chosen: a strategy for each; None for inputs.
        setting: whose prices choose the paths.
        several: names of values that are several tensors.

    Raises:
        PlanError: no links lead from a maker to a reader, or several tensors would have to move.
    """
    moves = {(it.tensor.value, it.demand): it for it in evaluation.readings(graph, chosen, setting)}
    known: dict[tuple[str, ReadLayout], PreparedRead] = {}
    found: list[tuple[PreparedRead, ...]] = []
    for operator, way in zip(graph.operators, chosen, strict=True):
        own = []
        pairs = () if way is None or operator.given else zip(operator.reads, way.demands, strict=True)
        for tensor, demand in pairs:
            key = tensor.value, demand
            if key not in known:
                number, _ = graph.maker[tensor.value]
                route = _route(moves[key], chosen[number]) if key in moves else None
                if route is not None and route.there[1].steps and tensor.value in several:
                    raise PlanError(
                        f"operator {operator.name}: cannot move {tensor.value}, which is several tensors"
                    )
                known[key] = PreparedRead(tensor.value, demand.spec, number, graph.operators[number], route)
            known[key].readers += 1
            own.append(known[key])
        found.append(tuple(own))
    return found


def _route(it: Reading, maker: Strategy | None) -> ValueRoute:
    there, back = (runs.path for runs in it.ways)
    is_weight = maker is not None and maker.update is not None
    home = None if it.demand.gradient is None else (it.demand.gradient, back)
    return ValueRoute((it.made, there), home, is_weight and there.ps > 0)


def additions(
    graph: Graph, chosen: Sequence[Strategy | None], setting: Setting
) -> Iterator[tuple[Leg, Leg | None]]:
    """The way of each operator's result from its summands, and of its gradient, if it has one."""
    for operator, way in zip(graph.operators, chosen, strict=True):
        if way is None or operator.given is not None:
            yield ((), ReshardingPath(0)), None
            continue
        begins = summands_of(operator, way.before)
        ends = spec_of(operator.result, way.after)
        ways = inner_ways(graph, operator, way.before, way.after, setting)
        assert ways is not None, "links allowed it"
        is_trained = any(it.value in graph.trained for it in operator.reads)
        yield (begins, ways[0].path), (ends, ways[1].path) if is_trained else None
