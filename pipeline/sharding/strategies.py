"""How an operator may be divided over a mesh, and what each way costs.

A strategy gives each axis one label of the operator, or none (then ranks along it do the same work). Along an
axis that divides a summed label the result must be added up: by an allreduce, or by a reduce-scatter that
divides it anew, which then holds for all that follows. Gradients mirror that: what an operator reads whole
along an axis that divides something else comes back as summands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from arborcast.pipeline.meshes import SUM, Axes, Spec
from arborcast.pipeline.sharding.graph import Graph, MergedOperator, Tensor
from arborcast.pipeline.sharding.resharding import ReshardingPath, ReshardingStep
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.specs import Assignment, divides, local_bytes, refinements, spec_of
from arborcast.synth.collective import Kind


@dataclass(frozen=True, slots=True)
class ReadLayout:
    """How an operator reads a tensor.

    Attributes:
        spec: as it reads it.
        gradient: as the gradient comes back; None where there is none.
    """

    spec: Spec
    gradient: Spec | None


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to divide an operator, or to hold a parameter.

    Attributes:
        before: the label divided along each axis.
        after: the same behind the sum; of a parameter as it is stored.
        demands: on each tensor of `MergedOperator.reads`.
        outputs: how each output lies.
        update: of a parameter, how its gradient, optimizer state and update are divided; else None.
        compute_ps: of a microbatch, forward and backward.
        communication_ps: of a microbatch, inside the operator.
        step_ps: of a step: the update, and gathering what it made.
        memory_bytes: of one rank: weights, gradients, state, what the backward pass needs of all
            microbatches in flight, and of what crosses to another stage a value and its gradient.
    """

    before: Assignment
    after: Assignment
    demands: tuple[ReadLayout, ...]
    outputs: tuple[Spec, ...]
    update: Spec | None = None
    compute_ps: int = 0
    communication_ps: int = 0
    step_ps: int = 0
    memory_bytes: int = 0

    def total_ps(self, microbatches: int) -> int:
        """Of a step."""
        return microbatches * (self.compute_ps + self.communication_ps) + self.step_ps


def strategies(graph: Graph, operator: MergedOperator, setting: Setting) -> tuple[Strategy, ...]:
    """All ways to divide an operator; inputs of the model have none: ranks load what is asked for.

    The one on whole tensors is always among them.
    """
    if operator.given is not None:
        return tuple(_stored(operator, setting)) if operator.given.is_parameter else ()
    found = []
    assignments = list(_assignments(operator, setting.sizes))
    if operator.is_end:  # the last one divides most, and what crosses to other stages is in equal parts
        assignments = assignments[-1:]
    for before in assignments:
        for after in _behind_sum(operator, before, setting.sizes):
            strategy = _priced(graph, operator, before, after, setting)
            if strategy is not None:
                found.append(strategy)
    return tuple(found)


def _assignments(operator: MergedOperator, sizes: tuple[int, ...]) -> Iterator[Assignment]:
    labels = [None, *(label for label, parts in enumerate(operator.parts) if parts > 1)]
    for assignment in product(labels, repeat=len(sizes)):
        if _is_divisible(operator, assignment, sizes):
            yield assignment


def _is_divisible(operator: MergedOperator, assignment: Assignment, sizes: tuple[int, ...]) -> bool:
    return all(
        operator.parts[label] % math.prod(n for n, it in zip(sizes, assignment, strict=True) if it == label)
        == 0
        for label in assignment
        if label is not None
    )


def _behind_sum(operator: MergedOperator, before: Assignment, sizes: tuple[int, ...]) -> Iterator[Assignment]:
    """The same axes, those of summed labels replicated or divided anew."""
    made = [
        None,
        *(label for label in operator.result.labels if label is not None and operator.parts[label] > 1),
    ]
    choices = [made if label in operator.summed else [label] for label in before]
    for after in product(*choices):
        if _is_divisible(operator, after, sizes):
            yield after


def _priced(
    graph: Graph, operator: MergedOperator, before: Assignment, after: Assignment, setting: Setting
) -> Strategy | None:
    """A strategy with its costs; None where links do not allow it."""
    ways = inner_ways(graph, operator, before, after, setting)
    if ways is None:
        return None
    kept = sum(local_bytes(it.size_bytes, spec_of(it, after), setting.sizes) for it in operator.kept)
    messages = local_bytes(operator.result.size_bytes, spec_of(operator.result, after), setting.sizes)
    for tensors, assignment in ((operator.inputs, before), (operator.joined, after)):
        for it in tensors:  # of what others make, the crossing says what is kept
            if it.kept and _is_input(graph, it):
                kept += local_bytes(it.size_bytes, spec_of(it, assignment), setting.sizes)
    return replace(
        strategy_of(graph, operator, before, after),
        compute_ps=sum(setting.kernel_ps(it, before if it.is_first else after) for it in operator.kernels),
        communication_ps=sum(it.path.ps * it.per_microbatch for it in ways),
        memory_bytes=setting.in_flight * kept + (2 * messages if operator.is_end else 0),
    )


def strategy_of(graph: Graph, operator: MergedOperator, before: Assignment, after: Assignment) -> Strategy:
    """The strategy that divides an operator so, without its costs."""
    return Strategy(
        before,
        after,
        (
            *(_demand(graph, it, before, operator.summed) for it in operator.inputs),
            *(_demand(graph, it, after, frozenset()) for it in operator.joined),
        ),
        tuple(spec_of(it, after) for it in operator.outputs),
    )


@dataclass(frozen=True, slots=True)
class CollectiveRuns:
    """Collectives that run so many times.

    Attributes:
        path: the collectives.
        per_microbatch: how often in each microbatch.
        per_step: how often in a step besides.
    """

    path: ReshardingPath
    per_microbatch: int = 0
    per_step: int = 0


def inner_ways(
    graph: Graph, operator: MergedOperator, before: Assignment, after: Assignment, setting: Setting
) -> list[CollectiveRuns] | None:
    """The collectives inside an operator; None where links do not allow them.

    They add up the result, mirror that for its gradient, and add up statistics.
    """
    result, resharder = operator.result, setting.resharder
    trained = any(it.value in graph.trained for it in operator.reads)
    summands = summands_of(operator, before)
    made = tuple(None if at == SUM else at for at in summands)
    ends = spec_of(result, after)
    pairs = [(summands, ends), *([(ends, made)] if trained else [])]
    paths = [resharder.path(result.shape, result.size_bytes, *pair) for pair in pairs]
    for inner in operator.sums:
        axes = tuple(axis for axis, label in enumerate(before) if label in inner.labels)
        if axes:
            parts = math.prod(n for n, it in zip(setting.sizes, before, strict=True) if it in inner.over)
            paths.append(_allreduce(axes, -(-inner.size_bytes // parts), setting))
    found = [CollectiveRuns(path, 1) for path in paths if path is not None]
    return found if len(found) == len(paths) else None


def summands_of(operator: MergedOperator, before: Assignment) -> Spec:
    """How the result of an operator lies before it is added up."""
    return tuple(
        SUM if label in operator.summed else at
        for label, at in zip(before, spec_of(operator.result, before), strict=True)
    )


def _allreduce(axes: Axes, size_bytes: int, setting: Setting) -> ReshardingPath | None:
    ps = setting.prices.ps(Kind.ALLREDUCE, axes, size_bytes)
    spec = (None,) * len(setting.sizes)
    return (
        None if ps is None else ReshardingPath(ps, (ReshardingStep(Kind.ALLREDUCE, axes, size_bytes, spec),))
    )


def _is_input(graph: Graph, tensor: Tensor) -> bool:
    given = graph.operators[graph.maker[tensor.value][0]].given
    return given is not None and not given.is_parameter


def _demand(graph: Graph, tensor: Tensor, assignment: Assignment, summed: frozenset[int]) -> ReadLayout:
    spec = spec_of(tensor, assignment)
    if tensor.value not in graph.trained:
        return ReadLayout(spec, None)
    # Along a summed label the gradient of the result is the same on all ranks: nothing is left to be added.
    gradient = tuple(
        SUM if at is None and label is not None and label not in summed else at
        for at, label in zip(spec, assignment, strict=True)
    )
    return ReadLayout(spec, gradient)


def _stored(operator: MergedOperator, setting: Setting) -> Iterator[Strategy]:
    """A parameter: how it is stored, and how finely its update is divided (ZeRO)."""
    (first, *_) = operator.outputs
    assert operator.given is not None
    dims = range(len(first.shape))
    for stored in refinements((None,) * len(setting.sizes), dims):
        if not divides(stored, first.shape, setting.sizes):
            continue
        outputs = tuple(spec_of(it, stored) for it in operator.outputs)  # labels are dimensions
        held = local_bytes(first.size_bytes, stored, setting.sizes)
        for update in refinements(stored, dims) if operator.given.is_trained else [stored]:
            if not divides(update, first.shape, setting.sizes):
                continue
            gathered = gathering(operator, stored, update, setting)
            if gathered is None:
                continue
            part = local_bytes(first.size_bytes, update, setting.sizes)
            yield Strategy(
                stored,
                stored,
                (),
                outputs,
                update,
                step_ps=gathered.path.ps + setting.update_ps(part) if operator.given.is_trained else 0,
                memory_bytes=(2 * held + math.ceil(part * setting.optimizer_ratio))
                if operator.given.is_trained
                else held,
            )


def gathering(
    operator: MergedOperator, stored: Spec, update: Spec, setting: Setting
) -> CollectiveRuns | None:
    """What brings a parameter from how it was updated to how it is stored."""
    (first, *_) = operator.outputs
    path = setting.resharder.path(first.shape, first.size_bytes, update, stored)
    return None if path is None else CollectiveRuns(path, per_step=1)


@dataclass(frozen=True, slots=True)
class ReshardingCost:
    """What it costs that a tensor is made in one way and read in another.

    Attributes:
        ps: of a microbatch.
        step_ps: of a step.
        memory_bytes: of one rank, that the backward pass needs.
    """

    ps: int
    step_ps: int
    memory_bytes: int

    def total_ps(self, microbatches: int) -> int:
        """Of a step."""
        return microbatches * self.ps + self.step_ps


def crossing(
    graph: Graph, tensor: Tensor, made: Spec, update: Spec | None, demand: ReadLayout, setting: Setting
) -> ReshardingCost | None:
    """The cost between a maker and a reader; None where links do not allow it. As `crossing_ways`."""
    ways = crossing_ways(tensor, made, update, demand, setting)
    if ways is None:
        return None
    held = 0
    maker = graph.operators[graph.maker[tensor.value][0]]
    if update is None and tensor.kept and not (made == demand.spec and _keeps(graph, maker, tensor.value)):
        held = setting.in_flight * local_bytes(tensor.size_bytes, demand.spec, setting.sizes)
    return ReshardingCost(
        sum(it.path.ps * it.per_microbatch for it in ways),
        sum(it.path.ps * it.per_step for it in ways),
        held,
    )


def crossing_ways(
    tensor: Tensor, made: Spec, update: Spec | None, demand: ReadLayout, setting: Setting
) -> list[CollectiveRuns] | None:
    """The collectives between a maker and a reader; None where links do not allow them.

    Weights that are stored more finely than they are read are gathered before each forward pass, and before
    each backward pass that needs them, and their gradients leave in each microbatch (ZeRO-3); else gradients
    are added up where they arise and leave once per step.

    Args:
        tensor: as it is read.
        made: how it lies.
        update: of a parameter, how its update is divided; None of a value.
        demand: how it is read.
        setting: prices.
    """
    there = setting.resharder.path(tensor.shape, tensor.size_bytes, made, demand.spec)
    home = made if update is None else update
    back: ReshardingPath | None = ReshardingPath(0)
    if demand.gradient is not None:
        back = setting.resharder.path(tensor.shape, tensor.size_bytes, demand.gradient, home)
    if there is None or back is None:
        return None
    if update is None or demand.gradient is None:
        return [CollectiveRuns(there, 1), CollectiveRuns(back, 1)]
    return (
        [CollectiveRuns(there, 1 + tensor.kept), CollectiveRuns(back, 1)]
        if there.ps
        else [CollectiveRuns(there, 1), CollectiveRuns(back, per_step=1)]
    )


def _keeps(graph: Graph, operator: MergedOperator, value: str) -> bool:
    """Whether the maker keeps the memory of a value anyway."""
    return any(graph.memory.get(it.value) == graph.memory[value] for it in operator.kept)
