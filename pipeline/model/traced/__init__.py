"""Any module as layers, cut by its graph: unmodified models for the trainer (RaNNC's rules).

    layered = trace(model, example)
    first, second = layered.divide(0, 5), layered.divide(5, layered.depth)

From the call to the layers: `capture` (torch.export, once per mode), `table` (what each operator does, by
`effects` and `kinds`), `cuts` (where it may be cut), `layers` (where it is), `traced` and `segments`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from arborcast.pipeline.errors import PartitionError
from arborcast.pipeline.model.traced.capture import Captured, capture, checked_example
from arborcast.pipeline.model.traced.holdings import holdings
from arborcast.pipeline.model.traced.kinds import Kind
from arborcast.pipeline.model.traced.layers import chosen_cuts
from arborcast.pipeline.model.traced.model import BoundaryTensor, Traced
from arborcast.pipeline.model.traced.modes import partners
from arborcast.pipeline.model.traced.table import Table, tabulate

__all__ = ["BoundaryTensor", "Traced", "trace"]


def trace(
    model: nn.Module,
    example: Tensor | Sequence[Tensor],
    *,
    layers: int | Literal["all"] | None = None,
    strict: bool = False,
) -> Traced:
    """Partition a model by its graph into layers that a pipeline can cut between.

    A cut is legal where all that crosses are batch values with one dimension that counts samples (exactly as
    many as samples: tokens of several samples in one dimension are not cut). What depends on parameters and
    constants only (masks, positions, transposed weights) is computed by every stage that uses it.

    The graph holds for any number of samples and for the devices that the model's code names now: move the
    model first. Samples may depend on each other through batch norm only, as anywhere where batches are
    divided. Parameters and buffers are the model's own: training the layers trains the model.

    Args:
        model: any module whose inputs and outputs are tensors; it is traced in training and in evaluation,
            and stays in the mode in which it is.
        example: its inputs, at least 2 samples; dimension 0 of each is the sample.
        layers: how many; "all" for one per legal cut; None for at most 64 at cuts that few bytes cross.
        strict: whether torch.export analyses bytecode instead of running the model.

    Raises:
        PartitionError: the model cannot be traced (names the construct and its line), returns something that
            cannot be divided by samples, or has fewer legal cuts than asked for.

    Source: RaNNC's partitioning, section 5.2.1.
    """
    given = checked_example(model, example)
    training = tabulate(capture(model, given, training=True, strict=strict))
    name = type(model).__name__
    _check_outputs(name, training)
    return Traced(
        model=model,
        training=training,
        evaluation=_evaluation(model, given, training, strict=strict),
        cuts=chosen_cuts(training, name, layers),
        holdings=holdings(model),
    )


def _evaluation(
    model: nn.Module, example: tuple[Tensor, ...], training: Table, *, strict: bool
) -> tuple[Table, dict[str, str]] | str:
    """The graph of the other mode with the partners of the values, or why there is none."""
    try:
        captured: Captured = capture(model, example, training=False, strict=strict)
    except PartitionError as error:
        return f"in evaluation, {error}"
    table = tabulate(captured)
    names = partners(training, table)
    return names if isinstance(names, str) else (table, names)


def _check_outputs(name: str, table: Table) -> None:
    """Every output must be divisible by samples, as the trainer gives samples to replicas.

    Raises:
        PartitionError: one is a loss, or has no dimension that counts samples.
    """
    for index, output in enumerate(table.outputs):
        item = table.by_name.get(output)
        if item is not None and item.kind is Kind.LOSS:
            raise PartitionError(
                f"model {name}: output {index} ({output}) is a loss, which cannot be divided by samples; "
                "return the predictions and give the loss to the trainer"
            )
        if item is None or item.sample_dim is None:
            raise PartitionError(
                f"model {name}: output {index} ({output}) must have one dimension as long as there are "
                "samples"
            )
