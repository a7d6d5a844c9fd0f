"""The copies between a device and the ring of host buffers, in one run of a graph.

They run while the engine's thread does something else; what has ended it takes from here, woken by `ring`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping

from torch import Tensor

from arborcast.backends.dataflow.task_graph import GraphTask
from arborcast.backends.errors import ExecutionError
from arborcast.backends.lowering.layout import Buffer, BufferSlice
from arborcast.backends.staging.device import CopyDirection, StagingDevice


class StagedCopies:
    """Those of one run.

    Args:
        memory: the ring, and what lies on the device.
        device: that copies.
        ring: wakes the run; called from any thread.
    """

    def __init__(
        self,
        memory: Mapping[Buffer, Tensor],
        device: StagingDevice,
        ring: Callable[[], None],
    ) -> None:
        self._memory = memory
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
            self._device.copy(way, self._view(action.into), self._view(action.source), done)
        except Exception as error:
            raise _failure(action, error) from error
        self._begun[number] = action

    def _view(self, part: BufferSlice) -> Tensor:
        return self._memory[part.buffer][part.start : part.stop]

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
