"""Any module as layers, cut by its graph: unmodified models for the trainer (RaNNC's rules).

    layered = trace(model, example)
    first, second = layered.divide(0, 5), layered.divide(5, layered.depth)

From the call to the layers: `capture` (torch.export, once per mode), `operator_table` (what each operator
does, by `effects`), `cut_points` (where it may be cut), `layers` (where it is), `model` and `segments`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from arborcast.pipeline.errors import PartitionError
from arborcast.pipeline.model.traced.capture import Arguments, Captured, capture, checked_example
from arborcast.pipeline.model.traced.layers import chosen_cuts
from arborcast.pipeline.model.traced.loss_partition import loss_code, loss_inputs
from arborcast.pipeline.model.traced.model import BoundaryTensor, Traced
from arborcast.pipeline.model.traced.modes import partners
from arborcast.pipeline.model.traced.operator_table import OperatorTable, tabulate
from arborcast.pipeline.model.traced.parameter_registry import holdings

__all__ = ["BoundaryTensor", "Traced", "trace"]


def trace(
    model: nn.Module,
    example: Any,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    *,
    layers: int | Literal["all"] | None = None,
    evaluation: bool = True,
) -> Traced:
    """Partition a model by its graph into layers that a pipeline can cut between.

    A cut is legal where all that crosses are batch values with one dimension that counts samples (exactly as
    many as samples: tokens of several samples in one dimension are not cut). What depends on parameters and
    constants only (masks, positions, transposed weights) is computed by every stage that uses it.

    The graph holds for any number of samples and for the devices that the model's code names now: move the
    model first. Samples may depend on each other through batch norm only, as anywhere where batches are
    divided. Parameters and buffers are the model's own: training the layers trains the model.

    A model that returns its loss (one number, or among several the one called `loss`) ends with what that is
    made of; nothing else that it returns is computed. `Segment.loss` of the last layer is the rest.

    Args:
        model: any module that takes and returns tensors, also in dicts, tuples and dataclasses; it is traced
            in training and in evaluation, and stays in the mode in which it is.
        example: its inputs, at least 2 samples: a tensor, a tuple, or a dict of named arguments, among them
            what it is told in words and numbers (`use_cache=False`). Dimension 0 of a tensor is the sample.
            With `loss_fn`, the pair (inputs, targets).
        loss_fn: of output and targets, traced with the model as if the model returned it: any loss that sums
            over parts of a batch can be put together from, as one would write it for serial training. What it
            reads besides stays as it is now.
        layers: how many; "all" for one per legal cut; None for at most 64 at cuts that few bytes cross.
        evaluation: whether it is traced in evaluation too, which takes as long again; without, it can be
            planned for and trained, not evaluated.

    Raises:
        PartitionError: the model cannot be traced (names the construct and its line), returns something that
            cannot be divided by samples, or has fewer legal cuts than asked for.

    Source: RaNNC's partitioning, section 5.2.1.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> traced = pipeline.trace(model, torch.randn(4, 8), layers=2)
        >>> traced.depth
        2
    """
    given = checked_example(model, example, loss_fn)
    training = tabulate(capture(model, given, training=True, loss_fn=loss_fn))
    name = type(model).__name__
    _check_outputs(name, training)
    other = (
        _evaluation(model, given, training, loss_fn)
        if evaluation
        else f"model {name}: must be traced with evaluation=True to be evaluated"
    )
    return Traced(
        model=model,
        training=training,
        evaluation=other,
        cuts=chosen_cuts(training, name, layers),
        holdings=holdings(model),
        arguments=replace(given, tensors=()),
        **_losses(name, [training, *([] if isinstance(other, str) else other[:1])]),
    )


def _losses(name: str, tables: list[OperatorTable]) -> dict[str, Any]:
    """The losses in both modes, and which inputs they read."""
    if not tables[0].captured.is_loss:
        return {}
    read = [{table.inputs.index(table.by_name[it]) for it in loss_inputs(table)} for table in tables]
    labels = tuple(sorted(set().union(*read))) or (0,)
    losses = (loss_code(name, table, [table.inputs[index].name for index in labels]) for table in tables)
    return {"losses": tuple(losses), "labels": labels}


def _evaluation(
    model: nn.Module,
    example: Arguments,
    training: OperatorTable,
    loss_fn: Callable[[Any, Any], Any] | None,
) -> tuple[OperatorTable, dict[str, str]] | str:
    """The graph of the other mode with the partners of the values, or why there is none."""
    try:
        captured: Captured = capture(model, example, training=False, loss_fn=loss_fn)
    except PartitionError as error:
        return f"in evaluation, {error}"
    table = tabulate(captured)
    names = partners(training, table)
    return names if isinstance(names, str) else (table, names)


def _check_outputs(name: str, table: OperatorTable) -> None:
    """Every output must be divisible by samples, as the trainer gives samples to replicas.

    Raises:
        PartitionError: one has no dimension that counts samples.
    """
    paths = table.captured.structure.paths
    for index, output in enumerate(table.outputs):
        item = table.by_name.get(output)
        if item is None or item.sample_dim is None:
            raise PartitionError(
                f"model {name}: output {paths[index] or index} ({output}) must have one dimension as long as "
                "there are samples"
            )
