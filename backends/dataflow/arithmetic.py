"""The computing of one collective: arriving parts are combined where they lie, slices reduced and copied.

There are two kinds with the same methods. On parts of some KiB the call is what costs, and numpy's calls take
a fifth of the time of torch's; torch knows types that numpy lacks. Both give the same bits, but for which NaN
comes of two: there each takes the one or the other, as the processor's instructions happen to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arborcast.backends.dataflow.task_graph import TaskGraph
from arborcast.backends.lowering.layout import Buffer
from arborcast.backends.tensors.torch_compat import split
from arborcast.backends.tensors.torch_reduction import Operator

_NOTHING: NDArray[Any] = np.empty(0)
_EMPTY = torch.empty(0)


class Arithmetic:
    """Computes on the slices of a graph, which are given by their numbers; by torch, for every type there is.

    Args:
        graph: whose slices are computed on.
        memory: flat tensors of one type for every buffer that the graph computes on.
        operator: how to combine; None where the graph only copies.
    """

    def __init__(self, graph: TaskGraph, memory: Mapping[Buffer, Tensor], operator: Operator | None) -> None:
        self._views = views_of(graph, memory)
        self._dtype = next(iter(memory.values())).dtype
        self._operator = operator

    def combine(self, into: int, source: int, start: int, part: memoryview) -> None:
        """Write to a stretch of `into` what a part gives with the same stretch of `source`.

        Args:
            into: what is written.
            source: what is combined with; may be `into`.
            start: first element of the stretch, which is as long as the part.
            part: bytes of elements.
        """
        assert self._operator is not None, "a graph with reductions comes with an operator"
        arrived = torch.frombuffer(part, dtype=self._dtype)
        out, other = self._views[into], self._views[source]
        length = arrived.numel()
        if length < out.numel():
            out, other = out.narrow(0, start, length), other.narrow(0, start, length)
        self._operator.combine(other, arrived, out)

    def reduce(self, into: int, source: int) -> None:
        """Combine all of `source` into `into`."""
        assert self._operator is not None, "a graph with reductions comes with an operator"
        out = self._views[into]
        self._operator.combine(out, self._views[source], out)

    def copy(self, into: int, source: int) -> None:
        """Copy all of `source` to `into`."""
        self._views[into].copy_(self._views[source])


class NumpyArithmetic(Arithmetic):
    """By a function of numpy, on one thread. Who runs it must silence numpy's warnings: torch has none."""

    def __init__(self, graph: TaskGraph, memory: Mapping[Buffer, Tensor], ufunc: np.ufunc) -> None:
        arrays = {buffer: tensor.numpy() for buffer, tensor in memory.items()}
        self._arrays: list[NDArray[Any]] = [
            arrays.get(part.buffer, _NOTHING)[part.start : part.start + part.length] for part in graph.slices
        ]
        self._type = next(iter(arrays.values())).dtype
        self._ufunc = ufunc

    def combine(self, into: int, source: int, start: int, part: memoryview) -> None:
        """See `Arithmetic.combine`."""
        arrived = np.frombuffer(part, self._type)
        out, other = self._arrays[into], self._arrays[source]
        length = len(arrived)
        if length < len(out):
            out, other = out[start : start + length], other[start : start + length]
        self._ufunc(other, arrived, out)

    def reduce(self, into: int, source: int) -> None:
        """See `Arithmetic.reduce`."""
        out = self._arrays[into]
        self._ufunc(out, self._arrays[source], out)

    def copy(self, into: int, source: int) -> None:
        """See `Arithmetic.copy`."""
        self._arrays[into][:] = self._arrays[source]


def arithmetic(graph: TaskGraph, memory: Mapping[Buffer, Tensor], operator: Operator | None) -> Arithmetic:
    """The faster kind that knows the type and the operator; arguments as for `Arithmetic`."""
    if operator is None or operator.ufunc is None:
        return Arithmetic(graph, memory, operator)
    return NumpyArithmetic(graph, memory, operator.ufunc)


def views_of(graph: TaskGraph, memory: Mapping[Buffer, Tensor]) -> list[Tensor]:
    """Of each slice of a graph, its tensor; an empty one where its buffer is not given.

    Cutting a whole buffer at once takes a quarter of the time of as many single views.
    """
    found: dict[int, Tensor] = {}
    for buffer, tensor in memory.items():
        cuts = graph.cuts.get(buffer, ())
        lengths = [length for length, _ in cuts]
        lengths.append(tensor.numel() - sum(lengths))
        for (_, number), view in zip(cuts, split(tensor, lengths), strict=False):
            found[number] = view
    return [
        found[number] if number in found else memory.get(part.buffer, _EMPTY)[part.start : part.stop]
        for number, part in enumerate(graph.slices)
    ]
