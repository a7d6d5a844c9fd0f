"""A captured graph as a table of items: memory, samples, and what every stage computes for itself.

Between torch's graph and the pure rules of `cut_points`: everything that those need to know of an operator is
found here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from networkx.utils import UnionFind
from torch import fx

from arborcast.pipeline.model.traced.capture import Captured
from arborcast.pipeline.model.traced.cut_points import CutPoint, Item, all_cuts
from arborcast.pipeline.model.traced.effects import Effects, effects, is_tensor
from arborcast.pipeline.model.traced.loss import without_loss
from arborcast.pipeline.model.traced.tensor_sizes import Sizes

VIEWS = {
    torch.ops.aten.view,
    torch.ops.aten.reshape,
    torch.ops.aten._unsafe_view,
    torch.ops.aten.flatten,
    torch.ops.aten.unflatten,
}
"""Operators that keep elements in their order."""


@dataclass(frozen=True)
class OperatorTable:
    """A graph with what may be done to it.

    Attributes:
        captured: the graph.
        items: its operators in order, without sizes, those that nobody uses and those of the loss alone.
        inputs: of the model.
        outputs: names of what the last stage makes: what the model returns, or what its loss is made of.
        nodes: of the graph, by name.
        sizes: integers (a, b) of every value that is a * samples + b.
        after: operators that change in place what an item makes or reads, which must run where it does.
        flops: of each item with `sizes.REFERENCE` samples.
        written: bytes that it writes then; none for views.
        held: memory of parameters and buffers.
    """

    captured: Captured
    items: tuple[Item, ...]
    inputs: tuple[Item, ...]
    outputs: tuple[str, ...]
    nodes: dict[str, fx.Node]
    sizes: dict[str, tuple[int, int]]
    after: dict[str, tuple[str, ...]]
    flops: dict[str, int]
    written: dict[str, int]
    held: frozenset[int]

    @cached_property
    def placed(self) -> tuple[Item, ...]:
        """The operators with a position, in order."""
        return tuple(item for item in self.items if not item.copied)

    @cached_property
    def by_name(self) -> dict[str, Item]:
        """Items and inputs."""
        return {item.name: item for item in (*self.inputs, *self.items)}

    @cached_property
    def cuts(self) -> tuple[CutPoint, ...]:
        """Every place between two operators."""
        return all_cuts(self.items, self.inputs, self.outputs, self.held)

    def needed(self, names: Iterable[str], given: Iterable[str] = ()) -> frozenset[str]:
        """What a stage computes that makes these values: them, and all that is copied to it for them.

        Args:
            names: of values.
            given: what crosses into the stage.

        Returns:
            Names of items, sizes, parameters, buffers, literals and subgraphs.
        """
        found: set[str] = set()
        known = frozenset(given)
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name in found or name in known:
                continue
            found.add(name)
            if name not in self.sizes:
                waiting += [source.name for source in self.nodes[name].all_input_nodes]
                waiting += self.after.get(name, ())
        return frozenset(found)


def tabulate(captured: Captured) -> OperatorTable:
    """Find out everything that the rules need to know about a graph."""
    nodes = {node.name: node for node in captured.module.graph.nodes}
    sizes = {
        node.name: linear
        for node in captured.operators
        if (linear := linear_in(node.meta.get("val"), captured.samples)) is not None
    }
    measure = Sizes(captured.samples)
    does = {node.name: effects(node, measure) for node in captured.operators if node.name not in sizes}
    does = _used(does, captured, nodes)
    memory = _memory(does, nodes)
    varying = _varying(does, captured, nodes, memory)
    held = frozenset(memory[name] for name in captured.tensors)
    copied = _copied(does, captured, nodes, varying, memory, held)
    divisible = _divisible(captured, varying)
    items = tuple(
        Item(
            name=name,
            inputs=tuple(source.name for source in nodes[name].all_input_nodes),
            varies=name in varying,
            copied=name in copied,
            sample_dim=divisible[name][0] if name in divisible else None,
            rows=divisible[name][1] if name in divisible else 1,
            size_bytes=measure.bytes_of(nodes[name].meta.get("val")),
            storages=frozenset(_touched(name, nodes, memory)),
            changes=frozenset(memory[source.name] for source in effect.changes),
        )
        for name, effect in does.items()
    )
    inputs = tuple(
        Item(
            name=node.name,
            size_bytes=measure.bytes_of(node.meta["val"]),
            sample_dim=0,
            storages=frozenset((memory[node.name],)),
        )
        for node in captured.inputs
    )
    outputs = tuple(node.name for node in captured.outputs)
    if captured.is_loss:
        is_cheap = {name for name, effect in does.items() if not (effect.flops or effect.random)}
        items, outputs = without_loss(items, inputs, captured.parameters, is_cheap, outputs[0])
    is_view = {name for name, effect in does.items() if effect.shares and not effect.changes}
    return OperatorTable(
        captured,
        items,
        inputs,
        outputs,
        nodes,
        sizes,
        after=_after(items, nodes, memory),
        flops={name: effect.flops for name, effect in does.items()},
        written={item.name: 0 if item.name in is_view else item.size_bytes for item in items},
        held=held,
    )


def linear_in(value: object, samples: Any) -> tuple[int, int] | None:
    """(a, b) where a value is the integer a * samples + b; None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return 0, value
    if not isinstance(value, torch.SymInt):
        return None
    expression = value.node.expr
    slope = expression.coeff(samples, 1)
    rest = expression - slope * samples
    if slope.is_Integer and rest.is_Integer:
        return int(slope), int(rest)
    return None


def _is_size(node: fx.Node, samples: Any) -> bool:
    """Whether a value depends on the number of samples only."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat):
        return bool(value.node.expr.free_symbols <= {samples})
    return isinstance(value, int | float)


def _divisible(captured: Captured, varying: frozenset[str]) -> dict[str, tuple[int, int]]:
    """The values that can be divided by samples: which dimension counts them, and its rows for each.

    That is a dimension as long as there are samples, if no other depends on their number. A first dimension
    that is a multiple of them holds sample after sample if a view made it of one that does, or an operator
    that keeps its length of values of which all do.
    """
    found: dict[str, tuple[int, int]] = {}
    for node in (*captured.inputs, *captured.operators):
        sources = [it for it in node.all_input_nodes if it.name in varying and _counting(it)]
        depends = _counting(node)
        if len(depends) != 1:
            continue
        dim, rows = depends[0][0], linear_in(depends[0][1], captured.samples)
        if rows is None or rows[1] or rows[0] < 1:
            continue
        known = [found.get(it.name, (None, 0)) for it in sources]
        is_view = getattr(node.target, "overloadpacket", None) in VIEWS and all(it[0] == 0 for it in known)
        is_kept = all(it == (0, rows[0]) for it in known)
        if rows[0] == 1 or (dim == 0 and known and (is_view or is_kept)):
            found[node.name] = dim, rows[0]
    return found


def _counting(node: fx.Node) -> list[tuple[int, Any]]:
    """The dimensions of a value that depend on the number of samples."""
    if not is_tensor(node):
        return []
    return [(dim, size) for dim, size in enumerate(node.meta["val"].shape) if isinstance(size, torch.SymInt)]


def _used(does: dict[str, Effects], captured: Captured, nodes: dict[str, fx.Node]) -> dict[str, Effects]:
    """Only the operators that something comes of: an output, a change in place, a random number drawn."""
    live = {node.name for node in captured.outputs}
    for name, effect in reversed(does.items()):
        asserts = nodes[name].meta.get("val") is None  # it returns nothing: it is there for what it does
        if asserts and all(_is_size(source, captured.samples) for source in nodes[name].all_input_nodes):
            continue  # a check that torch.export adds
        if name in live or effect.changes or effect.random or asserts:
            live.add(name)
            live.update(source.name for source in nodes[name].all_input_nodes)
    return {name: effect for name, effect in does.items() if name in live}


def _memory(does: dict[str, Effects], nodes: dict[str, fx.Node]) -> dict[str, int]:
    """A number for each value; those that may share memory have the same."""
    sharing = UnionFind(nodes)
    for name, effect in does.items():
        sharing.union(name, *(source.name for source in effect.shares))
    number = {name: index for index, name in enumerate(nodes)}
    return {name: number[sharing[name]] for name in nodes}


def _touched(name: str, nodes: dict[str, fx.Node], memory: dict[str, int]) -> set[int]:
    return {memory[name], *(memory[source.name] for source in nodes[name].all_input_nodes)}


def _varying(
    does: dict[str, Effects], captured: Captured, nodes: dict[str, fx.Node], memory: dict[str, int]
) -> frozenset[str]:
    """What is made of samples; parameters, constants and what is made of them alone are the same for all."""
    sharing: dict[int, list[str]] = {}
    for name in nodes:
        sharing.setdefault(memory[name], []).append(name)
    found = {node.name for node in captured.inputs}
    for name, effect in does.items():
        if any(source.name in found for source in nodes[name].all_input_nodes):
            # Whatever shares memory that it changes is changed too.
            found |= {name, *(other for it in effect.changes for other in sharing[memory[it.name]])}
    return frozenset(found)


def _copied(
    does: dict[str, Effects],
    captured: Captured,
    nodes: dict[str, fx.Node],
    varying: frozenset[str],
    memory: dict[str, int],
    held: frozenset[int],
) -> frozenset[str]:
    """What every stage that uses it computes for itself: the same for all samples, and harmless to repeat."""

    def bound(name: str, effect: Effects) -> bool:
        return (
            name in varying
            or effect.random
            or nodes[name].meta.get("val") is None
            or any(memory[source.name] in held for source in effect.changes)
        )

    # Whatever a bound operator makes or changes is bound, and so is all that is made of that.
    tied: set[int] = set()
    fixed: set[str] = set()
    while True:
        before = len(fixed)
        for name, effect in does.items():
            sources = {source.name for source in nodes[name].all_input_nodes}
            if bound(name, effect) or sources & fixed or _touched(name, nodes, memory) & tied:
                fixed.add(name)
                changed = {memory[source.name] for source in effect.changes}
                tied |= changed - {memory[node.name] for node in captured.inputs}
        if len(fixed) == before:
            return frozenset(name for name in does if name not in fixed)


def _after(
    items: Iterable[Item], nodes: dict[str, fx.Node], memory: dict[str, int]
) -> dict[str, tuple[str, ...]]:
    """For each copied item: the copied operators that change the memory which it makes."""
    changing: dict[int, list[str]] = {}
    listed = [item for item in items if item.copied]
    for item in listed:
        for storage in item.changes:
            changing.setdefault(storage, []).append(item.name)
    return {item.name: tuple(changing[memory[item.name]]) for item in listed if memory[item.name] in changing}
