"""From a stage's sharding back to the strategies that it tells, for the operators of the model at hand.

Nothing is believed: strategies are derived from labels anew, and what they would say must be what is said.
"""

from __future__ import annotations

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.sharding.graph import Graph, Operator, Tensor
from arborcast.pipeline.sharding.specs import SUM, spec_of
from arborcast.pipeline.sharding.stage import OperatorSharding, StageSharding, stage_sharding
from arborcast.pipeline.sharding.strategies import Strategy, strategy_of


def strategies_of(graph: Graph, sharding: StageSharding) -> tuple[Strategy | None, ...]:
    """The strategy of each operator of a graph, without costs; None for inputs.

    Raises:
        PlanError: the sharding is of another model, or contradicts itself; the first such place.
    """
    operators = {it.name: it for it in sharding.operators}
    stored = {it.path: it for it in sharding.parameters}
    chosen: list[Strategy | None] = []
    for operator in graph.operators:
        given = operator.given
        if given is None:
            said = operators.pop(operator.name, None)
            if said is None or (said.kind, said.members) != (operator.kind, operator.members):
                raise _other(graph, f"operator {operator.name} ({operator.kind})", said and said.kind)
            chosen.append(_strategy(graph, operator, said))
        elif given.is_parameter:
            held = stored.pop(given.path, None)
            if held is None:
                raise _other(graph, f"parameter {given.path}", None)
            outputs = tuple(spec_of(it, held.stored) for it in operator.outputs)
            chosen.append(Strategy(held.stored, held.stored, (), outputs, held.update))
        else:
            chosen.append(None)
    for rest in (*operators, *stored):
        raise PlanError(f"sharding: must be of model {graph.name}, which has no {rest}")
    again = stage_sharding(graph, chosen, sharding.mesh)
    for ours, theirs in zip(again.operators, sharding.operators, strict=True):
        if ours != theirs:
            raise PlanError(
                f"sharding: operator {ours.name} of {graph.name} must be divided as {ours}, got {theirs}"
            )
    return tuple(chosen)


def _other(graph: Graph, what: str, got: str | None) -> PlanError:
    return PlanError(f"sharding: must be of model {graph.name}, which has {what}, got {got or 'none'}")


def _strategy(graph: Graph, operator: Operator, said: OperatorSharding) -> Strategy:
    """The labels that specs name: of what is read and made for `before`, of the result for `after`."""
    before: list[int | None] = [None] * len(said.made)
    after: list[int | None] = list(before)
    seen = [*zip(operator.inputs, (it.spec for it in said.reads), strict=False), (operator.result, said.made)]
    for tensor, spec in seen:
        for axis, at in enumerate(spec):
            if at is not None and at != SUM:
                before[axis] = _label(tensor, at)
    for axis, at in enumerate(said.result):
        is_summed = before[axis] in operator.summed
        after[axis] = _label(operator.result, at) if at is not None and is_summed else None
        if not is_summed:
            after[axis] = before[axis]
    return strategy_of(graph, operator, tuple(before), tuple(after))


def _label(tensor: Tensor, at: int) -> int | None:
    return tensor.labels[at] if at < len(tensor.labels) else None
