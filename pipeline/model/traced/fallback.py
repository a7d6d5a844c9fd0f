"""Where a model cannot be traced but is sequential, and the user says so: its children as layers."""

from __future__ import annotations

from typing import Literal

from torch import nn

from arborcast.pipeline.errors import PartitionError
from arborcast.pipeline.model.layered import Layered


def children(model: nn.Module, layers: int | Literal["all"] | None, error: PartitionError) -> Layered:
    """The children of a sequential model as layers.

    Args:
        model: an `nn.Sequential`, or what is layered already.
        layers: as asked of `trace`.
        error: why it could not be traced.

    Raises:
        PartitionError: it is not sequential, or has another number of children than layers were asked for.
    """
    from arborcast.pipeline.model.divisible import Divisible

    if isinstance(model, Layered):
        made: Layered = model
    elif isinstance(model, nn.Sequential):
        made = Divisible(*model)
    else:
        raise PartitionError(f"{error} (no sequential fallback: it is no nn.Sequential)") from error
    if layers not in (None, "all", made.depth):
        raise PartitionError(
            f"model {type(model).__name__}: layers must be {made.depth}, the number of its children, as it "
            f"cannot be traced, got {layers}"
        ) from error
    return made
