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

from arborcast.pipeline.model.module_structure import storage_key
from arborcast.pipeline.model.traced.tensor_sizes import Sizes

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
    return Effects(shares, tuple(_changed(node)), is_random(node), flops)


def is_tensor(node: fx.Node) -> bool:
    """Whether an operator's value is one tensor."""
    return isinstance(node.meta.get("val"), Tensor)


def _rehearsed(node: fx.Node, sizes: Sizes) -> tuple[tuple[fx.Node, ...], int]:
    """The inputs whose memory the value shares, and FLOPs: found by running it on tensors without data."""
    inputs = [source for source in node.all_input_nodes if "val" in source.meta]
    try:
        if isinstance(node.target, torch._ops.OpOverload):
            numbers, flops = _rehearse(node, node.target, inputs, sizes)
            return tuple(inputs[number] for number in numbers), flops
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            mine = set(_storages(_rehearse_as_traced(node)))
        shares = tuple(source for source in inputs if mine & set(_storages(source.meta["val"])))
        return shares, sizes.of(counter.get_total_flops())
    except Exception:  # any operator may be here, with errors of its own
        # Nothing is lost but precision: then it counts as sharing memory with all it reads.
        log.debug("operator %s cannot be rehearsed", node.name, exc_info=True)
        return tuple(inputs), 0


_KNOWN: dict[tuple[torch._ops.OpOverload, str], tuple[tuple[int, ...], int]] = {}
"""What operators do with what they are given, by sizes: of blocks that repeat, one stands for all."""


def _rehearse(
    node: fx.Node, target: torch._ops.OpOverload, inputs: list[fx.Node], sizes: Sizes
) -> tuple[tuple[int, ...], int]:
    """The numbers of the inputs whose memory the value shares, and FLOPs, found without data."""
    given = {it: tree_map(sizes.stand_in, it.meta["val"]) for it in inputs}
    said = {
        it: (number, tree_map_only(Tensor, lambda x: (x.size(), x.stride(), x.dtype), given[it]))
        for number, it in enumerate(inputs)
    }
    key = target, repr(fx.map_arg((node.args, node.kwargs), lambda source: str(said[source])))
    if key not in _KNOWN:
        args, kwargs = tree_map_only(
            torch.device,
            lambda _: torch.device("meta"),
            fx.map_arg((node.args, node.kwargs), given.__getitem__),
        )
        with torch.no_grad(), FlopCounterMode(display=False) as counter, torch.device("meta"):
            mine = set(_storages(target(*args, **kwargs)))
        numbers = (number for number, it in enumerate(inputs) if mine & set(_storages(given[it])))
        _KNOWN[key] = tuple(numbers), int(counter.get_total_flops())
    return _KNOWN[key]


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
            yield storage_key(leaf)


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


def named(node: fx.Node) -> dict[str, Any]:
    """The arguments that an operator is called with, by name; those of Python's own are self, self1, ..."""
    schema = getattr(node.target, "_schema", None)
    names = (
        [it.name for it in schema.arguments] if schema else [f"self{i or ''}" for i in range(len(node.args))]
    )
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def with_defaults(node: fx.Node) -> dict[str, Any]:
    """The same, and what it is called with by default."""
    schema = getattr(node.target, "_schema", None)
    given = named(node)
    for it in schema.arguments if schema else ():
        if it.has_default_value():
            given.setdefault(it.name, it.default_value)
    return given


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or any(
        is_random(inner) for graph in _subgraphs(node) for inner in graph.nodes
    )


def _subgraphs(node: fx.Node) -> Iterator[fx.Graph]:
    """The graphs that a control-flow operator runs."""
    for source in node.all_input_nodes:
        if source.op == "get_attr" and source.graph.owning_module is not None:
            owned = getattr(source.graph.owning_module, str(source.target), None)
            if isinstance(owned, fx.GraphModule):
                yield owned.graph
