"""Which operators of the evaluation graph are which of the training graph, so that both have the same cuts.

A model runs the same operators in both modes, with other arguments (dropout, batch norm); in training some
more: that only change a buffer, or give the values of their input, which evaluation may leave out. A model
that does something else can be trained in stages, but not evaluated.
"""

from __future__ import annotations

import torch

from arborcast.pipeline.model.traced.cut_points import Item
from arborcast.pipeline.model.traced.operator_table import OperatorTable

IDENTITIES = {
    torch.ops.aten.dropout,
    torch.ops.aten.dropout_,
    torch.ops.aten.feature_dropout,
    torch.ops.aten.feature_dropout_,
    torch.ops.aten.alpha_dropout,
    torch.ops.aten.alpha_dropout_,
    torch.ops.aten.contiguous,  # of what attention gives in training only
}
"""What gives the values of its input, in evaluation at least."""


def partners(training: OperatorTable, evaluation: OperatorTable) -> dict[str, str] | str:
    """The name in the evaluation graph of each value of the training graph that has one.

    Returns:
        The names, or in words the first operator of either graph without a partner in the other.
    """
    names = _common(training, evaluation)
    silent = _silent(training)
    position = 0
    for item in training.items:
        other = evaluation.items[position] if position < len(evaluation.items) else None
        if other is not None and _is_same(item, training, other, evaluation, names):
            names[item.name] = other.name
            position += 1
        elif getattr(training.nodes[item.name].target, "overloadpacket", None) in IDENTITIES:
            names[item.name] = names[item.inputs[0]]
        elif item.name not in silent:
            return f"in training it runs {_words(item, training)}"
    if position < len(evaluation.items):
        return f"in evaluation it runs {_words(evaluation.items[position], evaluation)}"
    if tuple(names.get(name) for name in training.outputs) != evaluation.outputs:
        return "it returns other values"
    return names


def _silent(table: OperatorTable) -> set[str]:
    """Operators that change something in place and give their value only to others of that kind."""
    found = {item.name for item in table.items if item.changes} - set(table.outputs)
    for item in reversed(table.items):
        if item.name not in found:
            found -= set(item.inputs)
    return found


def _common(training: OperatorTable, evaluation: OperatorTable) -> dict[str, str]:
    """Partners among inputs of the graphs."""
    names = {ours.name: theirs.name for ours, theirs in zip(training.inputs, evaluation.inputs, strict=True)}
    held = {target: name for name, target in evaluation.captured.tensors.items()}
    names |= {name: held[target] for name, target in training.captured.tensors.items() if target in held}
    return names | dict(zip(training.captured.literals, evaluation.captured.literals, strict=False))


def _is_same(
    item: Item, training: OperatorTable, other: Item, evaluation: OperatorTable, names: dict[str, str]
) -> bool:
    mine = [training.sizes.get(name) or names.get(name) for name in _values(item, training)]
    theirs = [evaluation.sizes.get(name) or name for name in _values(other, evaluation)]
    return (
        training.nodes[item.name].target == evaluation.nodes[other.name].target
        and mine == theirs
        and item.sample_dim == other.sample_dim
        and not (other.copied is False and item.copied)
    )


def _values(item: Item, table: OperatorTable) -> list[str]:
    return [name for name in item.inputs if table.nodes[name].op != "get_attr"]


def _words(item: Item, table: OperatorTable) -> str:
    return f"{table.nodes[item.name].target} ({item.name})"
