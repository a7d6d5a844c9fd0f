"""What a choice of strategies costs: added up edge by edge, without the program that made the choice.

A tensor that several operators read in the same way is brought there once, and so is its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.sharding.graph import Graph, Tensor
from arborcast.pipeline.sharding.resharding import Path
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.specs import Spec, spec_of
from arborcast.pipeline.sharding.strategies import Crossing, Demand, Strategy, crossing


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
        forward: the way of the values.
        backward: the way of gradients; None where there are none.
    """

    tensor: Tensor
    made: Spec
    demand: Demand
    cost: Crossing
    forward: Path
    backward: Path | None


def readings(graph: Graph, chosen: Sequence[Strategy | None], setting: Setting) -> Iterator[Reading]:
    """All ways between operators that a choice asks for, each once.

    Raises:
        PlanError: links do not allow one.
    """
    seen: dict[tuple[str, Demand], int] = {}
    for number, operator in enumerate(graph.operators):
        strategy = chosen[number]
        if strategy is None or operator.given is not None:
            continue
        for tensor, demand in zip(operator.reads, strategy.demands, strict=True):
            source, which = graph.maker[tensor.value]
            made = chosen[source]
            # Of two that read alike, one may keep what it reads: that one counts.
            if made is None or seen.get((tensor.value, demand), 0) >= _weight(tensor):
                continue
            again = (tensor.value, demand) in seen
            seen[tensor.value, demand] = _weight(tensor)
            update = made.update
            if update is not None:
                update = spec_of(graph.operators[source].outputs[which], update)
            spec = made.outputs[which]
            cost = crossing(graph, tensor, spec, update, demand, setting)
            there = setting.resharder.path(tensor.shape, tensor.size_bytes, spec, demand.spec)
            if cost is None or there is None:
                raise PlanError(f"operator {operator.name}: no links lead to {tensor.value} as {demand.spec}")
            back = None
            if demand.gradient is not None:
                target = spec if update is None else update
                back = setting.resharder.path(tensor.shape, tensor.size_bytes, demand.gradient, target)
            if again:
                cost, there, back = Crossing(0, 0, cost.memory_bytes), Path(0), None
            yield Reading(tensor, spec, demand, cost, there, back)


def _weight(tensor: Tensor) -> int:
    return 1 + tensor.kept


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
