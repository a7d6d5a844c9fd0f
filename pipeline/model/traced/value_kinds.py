"""What kind of value each operator of a graph makes, by RaNNC's rules: which may cross between stages.

A pure function over names, so that graphs can be drawn by hand. A batch value can be divided among replicas;
a loss cannot be cut (backward needs the samples behind it) and a parameter need not be (it would be
replicated work); constants and parameters are the same for every sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class ValueKind(Enum):
    """What a value holds."""

    BATCH = "batch"
    PARAMETER = "parameter"
    LOSS = "loss"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class TracedOperator:
    """An operator of a graph and the one value that it makes.

    Attributes:
        name: of the value.
        inputs: names of the values that it reads.
        scalar: whether the value is a tensor without dimensions.
        changes: values whose contents it changes in place: if it makes a batch or a loss, so are they from
            then on.
    """

    name: str
    inputs: tuple[str, ...]
    scalar: bool = False
    changes: tuple[str, ...] = ()


def kind_of(inputs: Iterable[ValueKind], *, scalar: bool) -> ValueKind:
    """The kind of what an operator makes of inputs of these kinds (RaNNC, section 5.2.1)."""
    given = list(inputs)
    batches = given.count(ValueKind.BATCH)
    if (scalar and batches >= 2) or (ValueKind.LOSS in given and not batches):
        return ValueKind.LOSS
    if batches:
        return ValueKind.BATCH
    return ValueKind.PARAMETER if given.count(ValueKind.PARAMETER) == 1 else ValueKind.CONSTANT


def kinds(
    operators: Iterable[TracedOperator],
    *,
    batch: Iterable[str] = (),
    parameters: Iterable[str] = (),
    constants: Iterable[str] = (),
) -> dict[str, ValueKind]:
    """The kind of every value of a graph, by name.

    Args:
        operators: in an order in which each comes after what it reads.
        batch: the inputs of the graph that hold samples.
        parameters: the inputs that are parameters.
        constants: all other inputs: buffers, literals, sizes.
    """
    found = dict.fromkeys(batch, ValueKind.BATCH)
    found |= dict.fromkeys(parameters, ValueKind.PARAMETER)
    found |= dict.fromkeys(constants, ValueKind.CONSTANT)
    for operator in operators:
        kind = kind_of((found[name] for name in operator.inputs), scalar=operator.scalar)
        found[operator.name] = kind
        if kind in (ValueKind.BATCH, ValueKind.LOSS):
            found |= dict.fromkeys(operator.changes, kind)
    return found
