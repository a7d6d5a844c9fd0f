"""What a choice of strategies costs: added up edge by edge, without the program that made the choice.

A tensor that several operators read in the same way is brought there once, and so is its gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.meshes import Axes, Spec
from arborcast.pipeline.sharding.graph import Graph, MergedOperator, Tensor
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.specs import local_bytes, spec_of
from arborcast.pipeline.sharding.strategies import (
    CollectiveRuns,
    ReadLayout,
    ReshardingCost,
    Strategy,
    crossing,
    crossing_ways,
    gathering,
    inner_ways,
)
from arborcast.synth.collective import Kind


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one rank.

    Attributes:
        compute_ps: of a microbatch, forward and backward.
        communication_ps: of a microbatch.
        step_ps: once per step: gradients, updates.
        memory_bytes: weights, gradients, optimizer state, activations in flight.
    """

    compute_ps: int
    communication_ps: int
    step_ps: int
    memory_bytes: int

    @property
    def microbatch_ps(self) -> int:
        """Of a microbatch."""
        return self.compute_ps + self.communication_ps

    def total_ps(self, microbatches: int) -> int:
        """Of a step."""
        return microbatches * self.microbatch_ps + self.step_ps


@dataclass(frozen=True, slots=True)
class Reading:
    """A tensor made in one way and read in another, by one operator or by several alike.

    Attributes:
        tensor: as it is read.
        made: how it lies.
        demand: how it is read.
        cost: of the way between.
        ways: the collectives between.
    """

    tensor: Tensor
    made: Spec
    demand: ReadLayout
    cost: ReshardingCost
    ways: tuple[CollectiveRuns, ...]


def readings(graph: Graph, chosen: Sequence[Strategy | None], setting: Setting) -> Iterator[Reading]:
    """All ways between operators that a choice asks for, each once.

    Raises:
        PlanError: links do not allow one.
    """
    wanted: dict[tuple[str, ReadLayout], tuple[MergedOperator, Tensor]] = {}
    for operator, strategy in zip(graph.operators, chosen, strict=True):
        if strategy is None or operator.given is not None:
            continue
        for tensor, demand in zip(operator.reads, strategy.demands, strict=True):
            known = wanted.setdefault((tensor.value, demand), (operator, tensor))
            if tensor.kept and not known[1].kept:  # of those that read alike, one that keeps it counts
                wanted[tensor.value, demand] = operator, tensor
    for (value, demand), (operator, tensor) in wanted.items():
        source, which = graph.maker[value]
        made = chosen[source]
        if made is None:
            continue
        spec, update = made.outputs[which], made.update
        if update is not None:
            update = spec_of(graph.operators[source].outputs[which], update)
        cost = crossing(graph, tensor, spec, update, demand, setting)
        ways = crossing_ways(tensor, spec, update, demand, setting)
        if cost is None or ways is None:
            raise PlanError(f"operator {operator.name}: no links lead to {value} as {demand.spec}")
        yield Reading(tensor, spec, demand, cost, tuple(ways))


def cost_of(graph: Graph, chosen: Sequence[Strategy | None], setting: Setting) -> Cost:
    """The cost of a strategy for each operator (None for inputs of the model).

    Raises:
        PlanError: links do not allow it.
    """
    taken = [it for it in chosen if it is not None]
    between = [it.cost for it in readings(graph, chosen, setting)]
    return Cost(
        sum(it.compute_ps for it in taken),
        sum(it.communication_ps for it in taken) + sum(it.ps for it in between),
        sum(it.step_ps for it in taken) + sum(it.step_ps for it in between),
        sum(it.memory_bytes for it in taken) + sum(it.memory_bytes for it in between),
    )


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """Equal collectives of a plan.

    Attributes:
        kind: of collective.
        axes: along which.
        size_bytes: of the whole buffer of a group.
        per_microbatch: how many in each microbatch.
        per_step: how many in a step besides.
    """

    kind: Kind
    axes: Axes
    size_bytes: int
    per_microbatch: int
    per_step: int


def calls(graph: Graph, chosen: Sequence[Strategy | None], setting: Setting) -> tuple[CollectiveCall, ...]:
    """Every collective that a choice asks for, equal ones together, in the order of kind, axes and size.

    Raises:
        PlanError: links do not allow it.
    """
    ways: list[CollectiveRuns] = [way for it in readings(graph, chosen, setting) for way in it.ways]
    for operator, strategy in zip(graph.operators, chosen, strict=True):
        if strategy is None:
            continue
        if strategy.update is not None:
            gathered = gathering(operator, strategy.before, strategy.update, setting)
            ways += (
                [gathered] if gathered is not None and operator.given and operator.given.is_trained else []
            )
        else:
            ways += inner_ways(graph, operator, strategy.before, strategy.after, setting) or []
    counted: defaultdict[tuple[Kind, Axes, int], list[int]] = defaultdict(lambda: [0, 0])
    for way in ways:
        for step in way.path.steps:
            if step.kind is not None:
                count = counted[step.kind, step.axes, step.size_bytes]
                count[0] += way.per_microbatch
                count[1] += way.per_step
    return tuple(CollectiveCall(*key, *counted[key]) for key in sorted(counted))


def fixed_bytes(graph: Graph, chosen: Sequence[Strategy | None]) -> tuple[int, int]:
    """Bytes of a rank whatever is in flight, of parameters and of messages."""
    parameters = messages = 0
    for operator, way in zip(graph.operators, chosen, strict=True):
        if way is not None and operator.is_end:
            messages += way.memory_bytes
        elif way is not None and operator.given is not None:
            parameters += way.memory_bytes
    return parameters, messages


def updates_ps(graph: Graph, chosen: Sequence[Strategy | None], setting: Setting) -> int:
    """What the updates of a rank's parameters take, of a step."""
    return sum(
        setting.update_ps(local_bytes(it.given.size_bytes, way.update, setting.sizes))
        for it, way in zip(graph.operators, chosen, strict=True)
        if way is not None and way.update is not None and it.given is not None and it.given.is_trained
    )
