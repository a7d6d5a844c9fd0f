"""What cannot be divided among stages or replicas as a plan says: refused at the start, not trained wrongly.

Batch norm over replicas and parameters that several stages use are taken care of elsewhere; here stands what
nobody takes care of, because its result depends on all samples of a batch or on the order of all its calls.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.model.layered import Layered
from arborcast.pipeline.stages import Plan

_ATEN = torch.ops.aten


def check_divisible(model: Layered, plan: Plan) -> None:
    """See that every stage of a plan computes what the whole model would.

    Raises:
        PlanError: a norm with running statistics is used by two stages, or a replicated stage holds a
            module whose result depends on the samples of the other replicas.
    """
    check_shared_statistics(model, plan)
    for index, stage in enumerate(plan.stages):
        if stage.replicas == 1:
            continue
        for name, why in _dependent(model.divide(stage.start, stage.end)):
            raise PlanError(
                f"plan: stage {index}: {name} {why}, so that the stage must have one rank, "
                f"got {stage.replicas}"
            )


def check_shared_statistics(model: Layered, plan: Plan) -> None:
    """Every copy of a norm would count only what passes its own stage.

    Raises:
        PlanError: there is one with several copies.
    """
    seen: dict[int, tuple[int, str]] = {}
    ranges = [(it.start, it.end) for it in plan.stages]
    for index, bounds in enumerate(ranges):
        for name, module in model.divide(*bounds).named_modules():
            if not isinstance(module, _NormBase) or module.running_mean is None:
                continue
            first, known = seen.setdefault(id(module.running_mean), (index, name))
            if first != index:
                raise PlanError(
                    f"plan: {known} and {name} share their running statistics and must be on one stage, "
                    f"got stages {first} and {index}"
                )


def _dependent(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Parts whose result for some samples depends on the others, each with why."""
    for name, part in module.named_modules():
        match part:
            case _InstanceNorm() if part.track_running_stats:
                yield name, "keeps running statistics of all samples"
            case nn.Embedding() | nn.EmbeddingBag() if part.max_norm is not None:
                yield name, "changes its weights by the samples that it sees (max_norm)"
            case nn.Embedding() | nn.EmbeddingBag() if part.scale_grad_by_freq:
                yield name, "divides gradients by how often the whole batch names a row (scale_grad_by_freq)"
            case fx.GraphModule():
                yield from _dependent_operators(part)


def _dependent_operators(graph: fx.GraphModule) -> Iterator[tuple[str, str]]:
    for at in graph.graph.nodes:
        if at.op != "call_function":
            continue
        if at.target is _ATEN.embedding_renorm_.default:
            yield at.name, "changes its weights by the samples that it sees (max_norm)"
        elif at.target is _ATEN.embedding.default and (
            (len(at.args) > 3 and at.args[3]) or at.kwargs.get("scale_grad_by_freq")
        ):
            yield at.name, "divides gradients by how often the whole batch names a row (scale_grad_by_freq)"
        elif at.target is _ATEN.instance_norm.default and at.args[3] is not None:
            yield at.name, "keeps running statistics of all samples"
