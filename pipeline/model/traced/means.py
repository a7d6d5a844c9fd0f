"""Whether the loss of a batch is the mean of those of its microbatches, read off the operators of a graph.

cross_entropy(logits, targets) + 0.1 * (y ** 2).mean()    means over samples, and what is linear in them
(y - t).pow(2).sum()                                      a sum: the mean over m microbatches is 1/m of it
(rows * mask).sum() / mask.sum()                          each microbatch has another divisor
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from arborcast.pipeline.model.traced.capture import Captured
from arborcast.pipeline.model.traced.loss_partition import (
    ADDITIVE,
    AVERAGED,
    LINEAR,
    MEAN,
    SCALING,
    SUM,
    WEIGHED,
)
from arborcast.pipeline.model.traced.operator_reader import arguments, needed
from arborcast.pipeline.model.traced.operator_table import linear_in
from arborcast.pipeline.model.traced.trace_failures import line_of

_ATEN = torch.ops.aten
_DIVISIONS = {_ATEN.div, _ATEN.div_, _ATEN.divide}


class _Is(Enum):
    """What a value of a batch is of those of its microbatches, when these are of equal size."""

    SAME = "the same whatever the batch"
    SAMPLES = "theirs, one after another"
    MEAN = "the mean"
    SUM = "the sum"


def why_no_mean(captured: Captured, is_weighed: Callable[[fx.Node], bool]) -> str:
    """Why the loss of a batch is not the mean of those of its equal microbatches; empty if it is.

    Operators that keep samples apart by the shape of what they make count as doing so by value too.

    Args:
        captured: a graph that gives a loss.
        is_weighed: whether a mean over targets that count is taken over those of the whole batch.
    """
    reader, wanted = _MeanReader(captured, is_weighed), needed(captured)
    try:
        for node in captured.operators:
            if node.name in wanted:
                reader.read(node)
    except _NoMeanError as error:
        return str(error)
    found = reader.found.get(captured.outputs[0].name, _Is.SAME)
    return "" if found in (_Is.MEAN, _Is.SAME) else f"it is {found.value} of theirs"


class _NoMeanError(Exception):
    """An operator whose result is none of `_Is`."""


class _MeanReader:
    """Goes through a graph in order."""

    def __init__(self, captured: Captured, is_weighed: Callable[[fx.Node], bool]) -> None:
        self.found = {node.name: _Is.SAMPLES for node in captured.inputs}
        self._samples, self._is_weighed = captured.samples, is_weighed

    def read(self, node: fx.Node) -> None:
        """Find out what one operator makes; of numbers nothing."""
        tensors = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
        if tensors:
            self.found[node.name] = self._made(node, tensors)

    def _made(self, node: fx.Node, tensors: list[Tensor]) -> _Is:
        read = {self._is(it) for it in node.all_input_nodes} - {_Is.SAME}
        counts = any(_is_number(it) for it in node.all_input_nodes)
        shapes: list[tuple[Any, ...]] = [tuple(it.shape) for it in tensors]  # of numbers and symbols
        counting = [[size for size in shape if isinstance(size, torch.SymInt)] for shape in shapes]
        if any(counting):
            pairs = [linear_in(size, self._samples) for sizes in counting for size in sizes]
            if max(map(len, counting)) > 1:
                raise _refused(node, "compares samples with each other")
            if not all(it and it[0] > 0 and not it[1] for it in pairs):
                raise _refused(node, "does not treat all samples alike")
            if read & {_Is.MEAN, _Is.SUM}:
                raise _refused(node, "uses a sum or mean over all samples for each of them")
            if counts and torch.Tag.pointwise in getattr(node.target, "tags", ()):
                raise _refused(node, "computes with the number of samples")
            return _Is.SAMPLES
        if read == {_Is.SAMPLES} and not counts:
            return self._reduced(node)
        if len(read) == 1 and _Is.SAMPLES not in read:
            return self._linear(node, next(iter(read)), counts)
        if read or counts:
            raise _refused(node, "is neither a mean over samples nor linear in such means")
        return _Is.SAME

    def _is(self, node: Any) -> _Is:
        return self.found.get(node.name, _Is.SAME) if isinstance(node, fx.Node) else _Is.SAME

    def _reduced(self, node: fx.Node) -> _Is:
        packet = getattr(node.target, "overloadpacket", None)
        if packet in WEIGHED | AVERAGED:
            reduction = arguments(node)[1].get("reduction", MEAN)
            if reduction == MEAN and (packet in AVERAGED or self._is_weighed(node)):
                return _Is.MEAN
            if reduction == SUM:
                return _Is.SUM
        if packet is _ATEN.mean:
            return _Is.MEAN
        if packet in (_ATEN.sum, _ATEN.dot):
            return _Is.SUM
        raise _refused(node, "is neither a sum nor a mean over samples")

    def _linear(self, node: fx.Node, what: _Is, counts: bool) -> _Is:
        """What is made of a sum or a mean over samples, or of several of the same sort."""
        packet = getattr(node.target, "overloadpacket", None)
        both = node.args[:2]
        if counts:
            divisor = both[-1].meta.get("val") if isinstance(both[-1], fx.Node) else None
            pair = linear_in(divisor, self._samples)
            if (
                what is _Is.SUM
                and packet in _DIVISIONS
                and self._is(both[0]) is what
                and pair
                and not pair[1]
            ):
                return _Is.MEAN  # so many numbers for each sample
        elif packet in ADDITIVE:
            operands = tree_leaves(both[:1] if packet in (_ATEN.stack, _ATEN.cat) else both)
            if what is _Is.MEAN or all(self._is(it) is what for it in operands):
                return what
        elif packet in SCALING:
            ours = [self._is(it) is what for it in both]
            if ours == [True, False] or (ours == [False, True] and packet not in _DIVISIONS):
                return what
        elif packet in LINEAR or node.target is operator.getitem:
            return what
        raise _refused(node, f"is not linear in {what.value}s over samples")


def _is_number(node: fx.Node) -> bool:
    """Whether a value is a number that depends on the batch."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def _refused(node: fx.Node, why: str) -> _NoMeanError:
    return _NoMeanError(f"{node.target}{line_of(node)} {why}")
