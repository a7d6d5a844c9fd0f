"""Changes in place in a captured graph: which a divided run makes on copies or leaves out, which it refuses.

    y = linear(x)                       y = linear(x)
    relu_ = y.relu_()                   z = y.view(-1)
    return relu_                        mul_ = z.mul_(3)
                                        return y
    on a copy of y, read no more        refused: y has the memory of z

Operators run one by one on values by name, so that a change reaches those alone who read its own result. What
depends on no sample and no parameter may be filled in place before others read it, as masks often are: it is
made as a whole, in the order of the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.model.traced.capture import Captured
from arborcast.pipeline.model.traced.effects import UNDECLARED_CHANGES, Effects, effects, is_tensor
from arborcast.pipeline.model.traced.operator_reader import arguments, kind_of, needed
from arborcast.pipeline.model.traced.tensor_sizes import Sizes


def changed_arguments(node: fx.Node) -> tuple[str, ...]:
    """The arguments, as `arguments` names them, that an operator's schema says it changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return ()
    writes = {it.name for it in schema.arguments if it.alias_info is not None and it.alias_info.is_write}
    return tuple(key for key in arguments(node)[0] if key.split(".")[0] in writes)


def check_changes(captured: Captured, sizes: Sizes, drawn: Collection[str]) -> dict[str, tuple[fx.Node, ...]]:
    """See that nobody on whom outputs depend reads changed memory but through the result of the change.

    Memory of the model and of its inputs outlives the graph: once changed, nobody may read it at all, save
    batch norm its own statistics.

    Args:
        captured: the graph.
        sizes: of its values.
        drawn: names of random numbers, and of what is made of them.

    Returns:
        Constants that are filled in place before anything else reads them: for each the operators that make
        all values in its memory, in order.

    Raises:
        PlanError: somebody reads changed memory.
    """
    nodes = list(captured.module.graph.nodes)
    does = {node: effects(node, sizes) for node in captured.operators}
    memory = dict[fx.Node, frozenset[fx.Node]]()  # who made what a value may lie in
    for node in nodes:
        shares = does[node].shares if node in does else ()
        memory[node] = frozenset[fx.Node]().union(*(memory[it] for it in shares)) or frozenset((node,))
        source = shares[0] if shares else node
        is_one = source is not node and kind_of(node) == "getitem" and not is_tensor(source)
        if is_one and memory[source] == {source} and all(kind_of(it) == "getitem" for it in source.users):
            # of several new tensors
            memory[node] = frozenset((next(it for it in source.users if it.args == node.args),))
    filled = _filled(captured, does, memory, drawn)
    lasting = frozenset(node for node in nodes if node.op != "call_function")
    places, wanted = {node: at for at, node in enumerate(nodes)}, needed(captured)
    reads = [
        (reader, value)
        for reader in does
        if reader.name in wanted
        for value in reader.all_input_nodes
        if value not in _statistics(reader)
    ]
    reads += [(nodes[-1], it) for it in captured.outputs]
    for node, effect in does.items():
        if kind_of(node) == "detach" or node.name in filled:  # changes no values, or nobody saw others
            continue
        for source in effect.changes:
            is_lasting = bool(memory[source] & lasting)
            for reader, value in reads:
                is_behind = places[value] < places[node] < places[reader]
                if memory[value] & memory[source] and (is_lasting or is_behind):
                    raise PlanError(
                        f"operator {node}: cannot be run on parts, as it changes {source} in place, "
                        + ("which belongs to the model or its inputs and " if is_lasting else "whose memory ")
                        + ("the model returns" if reader is nodes[-1] else f"{reader} reads")
                        + ("" if is_lasting else f" afterwards as {value}")
                    )
    return filled


def _filled(
    captured: Captured,
    does: Mapping[fx.Node, Effects],
    memory: Mapping[fx.Node, frozenset[fx.Node]],
    drawn: Collection[str],
) -> dict[str, tuple[fx.Node, ...]]:
    """By name the operators of the same memory, of constants that are filled before others read them."""
    varying = {*drawn, *captured.parameters, *(it.name for it in captured.inputs)}
    for node in does:
        if any(it.name in varying for it in node.all_input_nodes):
            varying.add(node.name)
    places = {node: at for at, node in enumerate(memory)}
    found: dict[str, tuple[fx.Node, ...]] = {}
    for base in {it for node, effect in does.items() for source in effect.changes for it in memory[source]}:
        group = [node for node in does if base in memory[node]]
        if any(memory[node] != {base} or node.name in varying for node in group) or base not in does:
            continue
        last = max(places[node] for node in group if does[node].changes)
        others = {reader for node in group for reader in node.users if reader not in group}
        if all(places[reader] > last for reader in others):
            found |= dict.fromkeys((node.name for node in group), tuple(group))
    return found


def _statistics(node: fx.Node) -> list[fx.Node]:
    tensors, _ = arguments(node) if node.op == "call_function" else ({}, {})
    return [tensors[key] for key in UNDECLARED_CHANGES if key in tensors]
