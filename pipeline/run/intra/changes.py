"""Changes in place in a captured graph: which a divided run makes on copies or leaves out, which it refuses.

    y = linear(x)                       y = linear(x)
    relu_ = y.relu_()                   z = y.view(-1)
    return relu_                        mul_ = z.mul_(3)
                                        return y
    on a copy of y, read no more        refused: y has the memory of z

Operators run one by one on values by name, so that a change reaches those alone who read its own result.
"""

from __future__ import annotations

from torch import fx

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.model.traced.capture import Captured
from arborcast.pipeline.model.traced.effects import UNDECLARED_CHANGES, effects
from arborcast.pipeline.model.traced.operators import arguments, kind_of, needed
from arborcast.pipeline.model.traced.sizes import Sizes


def changed_arguments(node: fx.Node) -> tuple[str, ...]:
    """The arguments, as `arguments` names them, that an operator's schema says it changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return ()
    writes = {it.name for it in schema.arguments if it.alias_info is not None and it.alias_info.is_write}
    return tuple(key for key in arguments(node)[0] if key.split(".")[0] in writes)


def check_changes(captured: Captured, sizes: Sizes) -> None:
    """See that nobody on whom outputs depend reads changed memory but through the result of the change.

    Memory of the model and of its inputs outlives the graph: once changed, nobody may read it at all, save
    batch norm its own statistics.

    Raises:
        PlanError: somebody does.
    """
    nodes = list(captured.module.graph.nodes)
    does = {node: effects(node, sizes) for node in captured.operators}
    memory = dict[fx.Node, frozenset[fx.Node]]()  # who made what a value may lie in
    for node in nodes:
        shares = does[node].shares if node in does else ()
        memory[node] = frozenset[fx.Node]().union(*(memory[it] for it in shares)) or frozenset((node,))
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
        if kind_of(node) == "detach":  # changes no values
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


def _statistics(node: fx.Node) -> list[fx.Node]:
    tensors, _ = arguments(node) if node.op == "call_function" else ({}, {})
    return [tensors[key] for key in UNDECLARED_CHANGES if key in tensors]
