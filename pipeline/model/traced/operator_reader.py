"""A captured graph as operators with labelled dimensions (`pipeline.operators`), for a number of samples."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from arborcast.pipeline.model.traced.capture import Captured
from arborcast.pipeline.model.traced.effects import effects, with_defaults
from arborcast.pipeline.model.traced.model import Traced
from arborcast.pipeline.model.traced.rules import PRODUCTS, OperatorCall, RuleResult, form_of
from arborcast.pipeline.model.traced.tensor_sizes import Sizes
from arborcast.pipeline.operators import Given, Operand, OperatorTrace, Primitive, Statistic

_MASKED = {"dropout"}
"""Operators that keep one byte per element for their backward pass."""

_ATTENTION_BACKWARD = 5, 2
"""Five products instead of two: the scores once more, and the gradients of four operands."""


def operator_trace(traced: Traced, samples: int | None = None, *, by_layer: bool = False) -> OperatorTrace:
    """The operators of a traced model in training, its loss among them.

    Constants (masks, positions, buffers) are no operators: every rank has or makes them.

    Args:
        traced: what `trace` gave; its loss too, where it was traced with one.
        samples: of a microbatch; None for those of the example.
        by_layer: whether operators bear the number of their layer, across which none is merged.
    """
    captured = traced.training.captured
    reader = _OperatorReader(captured, Sizes(captured.samples, samples or captured.example))
    places = _places(traced) if by_layer else {}
    return OperatorTrace(traced.name, reader.sizes.samples, *reader.read(places))


class _OperatorReader:
    """Goes through a graph in order."""

    def __init__(self, captured: Captured, sizes: Sizes) -> None:
        self.captured = captured
        self.sizes = sizes
        self.known: dict[str, Given | None] = {}  # values that are not constant; None for made ones
        self.trained: set[str] = set()  # values that get gradients

    def read(self, places: Mapping[str, int]) -> tuple[tuple[Given, ...], tuple[Primitive, ...]]:
        """The given values that are used, and the operators that the outputs need."""
        for node in self.captured.inputs:
            self.known[node.name] = self._given(node)
        nodes = {node.name: node for node in self.captured.module.graph.nodes}
        for name, path in self.captured.parameters.items():
            self.known[name] = self._given(nodes[name], path)
            self.trained.add(name)
        wanted = needed(self.captured)
        made = []
        place = 0
        for node in self.captured.operators:
            place = places.get(node.name, place)
            varies = any(source.name in self.known for source in node.all_input_nodes)
            if varies and node.name in wanted and _tensor(node) is not None:
                made.append(self._primitive(node, place))
        used = {operand.value for it in made for operand in it.inputs}
        return tuple(it for name, it in self.known.items() if it and name in used), tuple(made)

    def _given(self, node: fx.Node, path: str = "") -> Given:
        value = node.meta["val"]
        return Given(
            node.name, self.sizes.shape(value), self.sizes.bytes_of(value), bool(path), bool(path), path
        )

    def _primitive(self, node: fx.Node, place: int) -> Primitive:
        tensors, options = arguments(node)
        read = {name: it for name, it in tensors.items() if it.name in self.known}
        value = _tensor(node)
        assert value is not None
        shape, kind = self.sizes.shape(value), kind_of(node)
        shapes = {name: self.sizes.shape(_tensor(it)) for name, it in tensors.items()}
        form = form_of(kind, OperatorCall(shapes, options, shape), is_pointwise=_is_pointwise(node))
        is_known = form is not None
        form = form or RuleResult({}, (None,) * len(shape), kept=frozenset(read))
        gets = [it for it in read.values() if it.name in self.trained]
        factors = {name for name, it in read.items() if name in form.kept and it.name in self.trained}
        inputs, constants = (
            tuple(
                self._operand(
                    it,
                    form.inputs.get(name, (None,) * len(shapes[name])),
                    name in form.kept and (kind not in PRODUCTS or bool(factors - {name})),
                )
                for name, it in some.items()
            )
            for some in (read, {name: it for name, it in tensors.items() if name not in read})
        )
        has_gradient = value.is_floating_point() and kind != "detach" and self._is_trained_item(node)
        if gets and has_gradient:
            self.trained.add(node.name)
        self.known[node.name] = None
        output = self._operand(node, form.output, "output" in form.kept and node.name in self.trained)
        flops = effects(node, self.sizes).flops
        return Primitive(
            name=node.name,
            kind=kind,
            inputs=inputs,
            output=output,
            parts=_parts(form, shapes, shape),
            summed=form.summed,
            sample=_sample(form, node, read),
            flops=flops,
            backward_flops=_backward(kind, flops, len(gets)),
            dtype=str(value.dtype).removeprefix("torch."),
            is_cheap=form.is_cheap,
            moves=form.moves,
            is_known=is_known,
            extra_bytes=math.prod(shape) if kind in _MASKED else 0,
            statistics=tuple(Statistic(*it) for it in form.statistics),
            place=place,
            module=self.captured.module_of(node),
            constants=constants,
            has_gradient=has_gradient,
        )

    def _is_trained_item(self, node: fx.Node) -> bool:
        """Whether what is taken of tensors that were broadcast has a gradient, as each of them may have."""
        source, *index = node.args
        if not isinstance(source, fx.Node) or kind_of(source) != "broadcast_tensors":
            return True
        (taken,) = index
        one: Any = source.args[0]
        return one[taken].name in self.trained

    def _operand(self, node: fx.Node, dims: tuple[str | None, ...], kept: bool) -> Operand:
        shape = self.sizes.shape(_tensor(node))
        return Operand(node.name, dims, shape, self.sizes.bytes_of(node.meta["val"]), kept)


def _parts(
    form: RuleResult, shapes: Mapping[str, tuple[int, ...]], output: tuple[int, ...]
) -> dict[str, int]:
    """The greatest common divisor of all dimensions of a label, and of what the rule says."""
    found: dict[str, int] = dict(form.parts)
    pairs = [
        (form.output, output),
        *((form.inputs[name], shapes[name]) for name in shapes if name in form.inputs),
    ]
    for dims, shape in pairs:
        for label, size in zip(dims, shape, strict=True):
            if label is not None:
                found[label] = math.gcd(found.get(label, 0), size)
    return found


def _sample(form: RuleResult, node: fx.Node, read: Mapping[str, fx.Node]) -> str | None:
    """The label of the only dimension, of the result or of what is read, whose size depends on samples."""
    values = [
        (form.output, node),
        *((form.inputs[name], it) for name, it in read.items() if name in form.inputs),
    ]
    for dims, it in values:
        counting = [dim for dim, size in enumerate(_tensor(it).shape) if isinstance(size, torch.SymInt)]
        if len(counting) == 1 and dims[counting[0]] is not None:
            return dims[counting[0]]
    return None


def _backward(kind: str, flops: int, gradients: int) -> int:
    """Of an operator that multiplies, one more product of the same size for each operand with a gradient."""
    if kind == "scaled_dot_product_attention":
        return flops * _ATTENTION_BACKWARD[0] // _ATTENTION_BACKWARD[1]
    return flops * min(gradients, 2)


def _places(traced: Traced) -> dict[str, int]:
    """The layer of each operator with a position; what comes behind the last one belongs to it."""
    bounds = [cut.position for cut in traced.cuts]
    return {
        item.name: sum(position <= at for position in bounds)
        for at, item in enumerate(traced.training.placed)
    }


def needed(captured: Captured) -> set[str]:
    """Of what outputs are made, by what operators read; not by what they change in place."""
    found = {node.name for node in captured.outputs}
    for node in reversed(captured.operators):
        if node.name in found:
            found.update(source.name for source in node.all_input_nodes)
    return found


def arguments(node: fx.Node) -> tuple[dict[str, fx.Node], dict[str, Any]]:
    """The tensors that an operator reads by the names of its arguments, and everything else, defaults too.

    Of a list with any, each entry stands alone: `tensors.0`.
    """
    tensors, options = {}, {}
    for name, value in with_defaults(node).items():
        for key, it in _entries(name, value):
            if isinstance(it, fx.Node) and isinstance(_tensor(it), Tensor):
                tensors[key] = it
            else:
                options[key] = it
    return tensors, options


def _entries(name: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple) and any(isinstance(it, fx.Node) for it in value):
        yield from ((f"{name}.{index}", it) for index, it in enumerate(value))
    else:
        yield name, value


def _tensor(node: fx.Node) -> Any:
    """The tensor that a node makes; of several the first."""
    value = node.meta.get("val")
    if isinstance(value, list | tuple):
        return next((it for it in value if isinstance(it, Tensor)), None)
    return value if isinstance(value, Tensor) else None


def kind_of(node: fx.Node) -> str:
    """What an operator is called, in place or not."""
    if node.target is operator.getitem:
        return "getitem"
    name = str(getattr(node.target, "overloadpacket", node.target)).rsplit(".", 1)[-1]
    return name if name.startswith("__") else name.rstrip("_")


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())
