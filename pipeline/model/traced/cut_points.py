"""Where a trace may be cut and what crosses there, as a pure function over its operators in order.

    items      embed   scale   mask*   attend   loss        * copied to every stage that uses it
    position   0       1               2        3
    cut               1       2               3             a cut lies before the item at its position

Everything that crosses a legal cut is made of samples, with one dimension that counts them (or rows of them,
sample after sample), so that any number of replicas on either side can divide it. What is changed in place
stays on one side of its changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """An operator of a trace with the value that it makes, or an input of the model.

    Attributes:
        name: of the value, unique.
        inputs: names of the values that it reads: of items, of the model's inputs, of parameters and buffers.
        varies: whether it is made of samples, so that it is divided among replicas with them.
        copied: whether every stage that uses the value computes it again; such an item has no position.
        sample_dim: the one dimension that counts samples; None where the value cannot be divided by samples.
        rows: how long that dimension is for each sample.
        size_bytes: of the value, with a number of samples that is the same for all.
        storages: memory that it reads, makes or changes (values that share memory have one number).
        changes: memory that it changes in place.
    """

    name: str
    inputs: tuple[str, ...] = ()
    varies: bool = True
    copied: bool = False
    sample_dim: int | None = 0
    rows: int = 1
    size_bytes: int = 0
    storages: frozenset[int] = frozenset()
    changes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A place between two operators.

    Attributes:
        position: how many operators with a position lie before it.
        values: names of what crosses it, in the order in which they were made.
        size_bytes: of all of them.
        fault: why the trace must not be cut here; "" for a legal cut.
    """

    position: int
    values: tuple[str, ...]
    size_bytes: int
    fault: str = ""


def all_cuts(
    items: Sequence[Item],
    inputs: Sequence[Item],
    outputs: Sequence[str],
    held: frozenset[int] = frozenset(),
) -> tuple[CutPoint, ...]:
    """Every place between two operators, legal or not.

    Args:
        items: in an order in which each comes after what it reads.
        inputs: the model's inputs.
        outputs: names of what the model returns.
        held: memory of parameters and buffers: where one is changed, all its uses stay together.

    Complexity: the number of operators times that of the values alive at once.
    """
    placed = [item for item in items if not item.copied]
    born = {item.name: -1 for item in inputs} | {item.name: at for at, item in enumerate(placed)}
    values = {item.name: item for item in (*inputs, *placed)}
    last_use = dict.fromkeys(born, -1)
    for at, item in enumerate(placed):
        for name in item.inputs:
            if name in born:
                last_use[name] = at
    for name in outputs:
        if name in born:
            last_use[name] = len(placed)
    crossing: list[list[Item]] = [[] for _ in range(len(placed) + 1)]
    for name, value in values.items():  # inputs first, then in the order of the trace
        for position in range(max(born[name] + 1, 1), last_use[name] + 1):
            crossing[position].append(value)
    torn = _torn(placed, inputs, held)
    for at, item in enumerate(placed):
        if item.changes and last_use[item.name] < 0:  # it only counts for the operator behind it
            torn.setdefault(at + 1, f"{item.name} belongs to the operator behind it")
    return tuple(
        CutPoint(
            position,
            tuple(value.name for value in crossing[position]),
            sum(value.size_bytes for value in crossing[position]),
            _fault(crossing[position]) or torn.get(position, ""),
        )
        for position in range(1, len(placed))
    )


def _fault(crossing: Sequence[Item]) -> str:
    if not crossing:
        return "nothing crosses"
    for value in crossing:
        if not value.varies:
            return f"{value.name} is not made of samples"
        if value.sample_dim is None:
            return f"{value.name} has no one dimension that counts samples"
    return ""


def _torn(placed: Sequence[Item], inputs: Sequence[Item], held: frozenset[int]) -> dict[int, str]:
    """Positions at which a cut would part a change in place from what shares the memory."""
    first: dict[int, int] = {storage: -1 for item in inputs for storage in item.storages}
    last: dict[int, int] = {}
    changed: dict[int, tuple[int, str]] = {}
    for at, item in enumerate(placed):
        for storage in item.storages | item.changes:
            first.setdefault(storage, at)
            last[storage] = at
        for storage in item.changes:
            changed[storage] = (at, item.name)
    faults: dict[int, str] = {}
    for storage, (at, name) in changed.items():
        # A batch value may cross after its last change; a buffer lives on one stage.
        end = last[storage] if storage in held else at
        for position in range(max(first[storage] + 1, 1), end + 1):
            faults[position] = f"{name} changes in place what is used on both sides"
    return faults
