"""The copies between a device and the ring of host buffers, in one run of a graph.

They run while the engine's thread does something else; what has ended it takes from here, woken by `ring`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from arborcast.backends.dataflow.task_graph import GraphTask, TaskGraph
from arborcast.backends.errors import ExecutionError
from arborcast.backends.lowering.layout import Buffer
from arborcast.backends.staging.device import CopyDirection, StagingDevice
from arborcast.backends.tensors.torch_compat import split


class StagedCopies:
    """Those of one run.

    Args:
        graph: with transfers.
        memory: the ring, and what lies on the device.
        device: that copies.
        ring: wakes the run; called from any thread.
    """

    def __init__(
        self,
        graph: TaskGraph,
        memory: Mapping[Buffer, Tensor],
        device: StagingDevice,
        ring: Callable[[], None],
    ) -> None:
        self._views = _views_of(graph, memory)
        self._device = device
        self._ring = ring
        self._begun: dict[int, GraphTask] = {}
        self._ended: deque[tuple[int, BaseException | None]] = deque()
        self._changed = threading.Condition()

    def begin(self, number: int, action: GraphTask) -> None:
        """Begin an action of the graph and return.

        Raises:
            ExecutionError: the device refuses.
        """
        way = CopyDirection.WITHIN
        if Buffer.RING in {action.into.buffer, action.source.buffer}:
            way = CopyDirection.IN if action.into.buffer is Buffer.RING else CopyDirection.OUT

        def done(error: BaseException | None) -> None:
            with self._changed:
                self._ended.append((number, error))
                self._changed.notify()
            self._ring()

        try:
            self._device.copy(way, self._views[action.into_number], self._views[action.source_number], done)
        except Exception as error:
            raise _failure(action, error) from error
        self._begun[number] = action

    def take_ended(self) -> list[int]:
        """The actions that have ended since the last call.

        Raises:
            ExecutionError: one of them failed.
        """
        found = []
        while self._ended:
            number, error = self._ended.popleft()
            action = self._begun.pop(number)
            if error is not None:
                raise _failure(action, error) from error
            found.append(number)
        return found

    def waits_for(self) -> list[str]:
        """What is on its way, as messages show it."""
        return [str(action.operation) for action in self._begun.values()]

    def abandon(self, seconds: float) -> None:
        """Wait until the device touches none of the memory, for so long at most; the run has failed."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ended) == len(self._begun), seconds)


def _failure(action: GraphTask, error: BaseException) -> ExecutionError:
    return ExecutionError(f"{action.operation}: {type(error).__name__}: {error}")


_EMPTY = torch.empty(0)


def _views_of(graph: TaskGraph, memory: Mapping[Buffer, Tensor]) -> list[Tensor]:
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
