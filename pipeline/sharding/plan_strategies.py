"""Between strategies that were chosen and what a plan says of a stage: the one from the other, and back."""

from __future__ import annotations

from collections.abc import Sequence

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.meshes import Mesh, shown
from arborcast.pipeline.sharding.graph import Graph, MergedOperator
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.specs import spec_of
from arborcast.pipeline.sharding.strategies import Strategy, strategies, summands_of
from arborcast.pipeline.stage_sharding import (
    OperatorSharding,
    ParameterSharding,
    ReadSharding,
    StageSharding,
)
from arborcast.pipeline.stages import Stage


def stage_sharding(graph: Graph, chosen: Sequence[Strategy | None], mesh: Mesh) -> StageSharding:
    """What a choice of strategies says, one for each operator of a graph, None for its inputs."""
    made = [operator_sharding(it, way) for it, way in zip(graph.operators, chosen, strict=True) if way]
    return StageSharding(
        mesh,
        tuple(it for it in made if isinstance(it, ParameterSharding)),
        tuple(it for it in made if isinstance(it, OperatorSharding)),
    )


def operator_sharding(operator: MergedOperator, way: Strategy) -> OperatorSharding | ParameterSharding:
    """What one strategy says, of an operator or of a parameter."""
    if operator.given is not None:
        stored = spec_of(operator.result, way.before)
        return ParameterSharding(operator.given.path, shown(stored), shown(way.update or stored))
    return OperatorSharding(
        operator.name,
        operator.kind,
        operator.members,
        tuple(
            ReadSharding(tensor.value, shown(it.spec), None if it.gradient is None else shown(it.gradient))
            for tensor, it in zip(operator.reads, way.demands, strict=True)
        ),
        shown(summands_of(operator, way.before)),
        shown(spec_of(operator.result, way.after)),
        tuple((it.value, shown(spec)) for it, spec in zip(operator.outputs, way.outputs, strict=True)),
    )


def strategies_of(stage: Stage, graph: Graph, setting: Setting) -> tuple[Strategy | None, ...]:
    """The strategies that a stage of a plan names, one for each operator of its graph, None for inputs.

    Args:
        stage: of a plan.
        graph: of its layers.
        setting: prices on a mesh of its shape.

    Raises:
        PlanError: the plan is for another model, mesh or number of samples.
    """
    where, sharding = f"plan: stage of layers [{stage.start}, {stage.end})", stage.sharding
    assert sharding is not None, "the caller has seen that the plan divides operators"
    if setting.sizes != sharding.mesh.shape:
        raise PlanError(f"{where}: mesh must be {setting.prices.mesh}, got {sharding.mesh}")
    named = {it.name: it for it in sharding.operators} | {it.path: it for it in sharding.parameters}
    wanted = {_name(it): it for it in graph.operators if it.given is None or it.given.is_parameter}
    for name in (*wanted, *named):
        if (name in wanted) != (name in named):
            what = "lacks" if name in wanted else "has"
            raise PlanError(f"{where}: is for another model: it {what} {name}")
    found: list[Strategy | None] = []
    for operator in graph.operators:
        if _name(operator) not in wanted:
            found.append(None)
            continue
        asked = named[_name(operator)]
        ways = strategies(graph, operator, setting)
        way = next((it for it in ways if operator_sharding(operator, it) == asked), None)
        if way is None:
            raise PlanError(
                f"{where}: {_name(operator)} cannot be divided over mesh {sharding.mesh} as it says"
            )
        found.append(way)
    return tuple(found)


def _name(operator: MergedOperator) -> str:
    return operator.name if operator.given is None else operator.given.path
