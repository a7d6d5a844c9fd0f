"""What running an operator of a graph does besides making a value: memory shared and changed, random numbers.

Schemas say most of it. What they leave out is asked of the operator itself, run on tensors without data
(which memory its value shares), and of a short list (batch norm's statistics).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from arborcast.pipeline.model.traced.sizes import Sizes

log = logging.getLogger(__name__)

UNDECLARED_CHANGES = ("running_mean", "running_var")
"""Arguments that norms change in training, which their schemas do not say."""


@dataclass(frozen=True, slots=True)
class Effects:
    """What running one operator does.

    Attributes:
        shares: inputs whose memory its value shares.
        changes: inputs that it changes in place.
        random: whether it draws random numbers, so that it must run exactly once.
        flops: of one forward pass with the samples of `sizes`.
    """

    shares: tuple[fx.Node, ...]
    changes: tuple[fx.Node, ...]
    random: bool
    flops: int


def effects(node: fx.Node, sizes: Sizes) -> Effects:
    """What running an operator does; `node.meta["val"]` of its inputs are tensors without data."""
    shares, flops = _rehearsed(node, sizes)
    return Effects(shares, tuple(_changed(node)), _is_random(node), flops)


def is_tensor(node: fx.Node) -> bool:
    """Whether an operator's value is one tensor."""
    return isinstance(node.meta.get("val"), Tensor)


def _rehearsed(node: fx.Node, sizes: Sizes) -> tuple[tuple[fx.Node, ...], int]:
    """The inputs whose memory the value shares, and FLOPs: found by running it on tensors without data."""
    inputs = [source for source in node.all_input_nodes if "val" in source.meta]
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    known = {
        it.name: tree_map(sizes.stand_in, it.meta["val"]) if is_operator else it.meta["val"] for it in inputs
    }
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            made = _rehearse(node, known)
    except Exception:  # any operator may be here, with errors of its own
        # Nothing is lost but precision: then it counts as sharing memory with all it reads.
        log.debug("operator %s cannot be rehearsed", node.name, exc_info=True)
        return tuple(inputs), 0
    mine = set(_storages(made))
    shares = tuple(source for source in inputs if mine & set(_storages(known[source.name])))
    return shares, sizes.of(counter.get_total_flops())


def _rehearse(node: fx.Node, stand_in: dict[str, Any]) -> Any:
    """The value of an operator for these inputs, on the device that holds no data."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return _rehearse_as_traced(node)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: stand_in[source.name])
    args, kwargs = tree_map_only(torch.device, lambda _: torch.device("meta"), (args, kwargs))
    with torch.device("meta"):
        return node.target(*args, **kwargs)


def _rehearse_as_traced(node: fx.Node) -> Any:
    """The same for control flow and Python's operators, on the tensors of the trace itself."""

    def value(source: fx.Node) -> Any:
        if source.op == "get_attr":
            return getattr(source.graph.owning_module, str(source.target))
        return source.meta["val"]

    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    assert callable(node.target)
    fake = (leaf.fake_mode for leaf in tree_leaves((args, kwargs)) if hasattr(leaf, "fake_mode"))
    with next(fake, nullcontext()):
        return node.target(*args, **kwargs)


def _storages(value: object) -> Iterator[int]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf.untyped_storage()._cdata


def _changed(node: fx.Node) -> Iterator[fx.Node]:
    if any(_is_changing(inner) for graph in _subgraphs(node) for inner in graph.nodes):
        yield from (source for source in node.all_input_nodes if source.op != "get_attr")
        return
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return
    for index, argument in enumerate(schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or argument.name in UNDECLARED_CHANGES:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, fx.Node))


def _is_changing(node: fx.Node) -> bool:
    return node.op == "call_function" and next(_changed(node), None) is not None


def _is_random(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or any(
        _is_random(inner) for graph in _subgraphs(node) for inner in graph.nodes
    )


def _subgraphs(node: fx.Node) -> Iterator[fx.Graph]:
    """The graphs that a control-flow operator runs."""
    for source in node.all_input_nodes:
        if source.op == "get_attr" and source.graph.owning_module is not None:
            owned = getattr(source.graph.owning_module, str(source.target), None)
            if isinstance(owned, fx.GraphModule):
                yield owned.graph
