"""One run of a program by torch's messages, on tensors of any device: in groups, or each by itself.

On NCCL a group is one coalesced call; waiting for it makes the current stream wait, not the host, so that
sums and copies follow on the stream and the whole call can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from arborcast.backends.lowering.groups import MessageGroup
from arborcast.backends.lowering.layout import Buffer, BufferSlice
from arborcast.backends.lowering.program import Operation, Program, Receive, Reduce, Send
from arborcast.backends.tensors.torch_reduction import ReductionOperator

Message: TypeAlias = tuple[str, Tensor, int]
"""The method of a backend of torch that begins it ("send", "recv"), its elements, the peer."""


def exchange(backend: Any, messages: Sequence[Message]) -> None:
    """Have messages begin together, and wait for them; as bytes, because NCCL knows few types.

    Args:
        backend: of torch; what takes several messages as one call, as NCCL must, is given them so.
        messages: in the order in which it takes them.
    """
    if backend.supports_coalescing:
        backend._start_coalescing()
    works = [getattr(backend, method)([part.view(torch.uint8)], peer, 0) for method, part, peer in messages]
    for work in [backend._end_coalescing()] if backend.supports_coalescing else works:
        work.wait()


class ProgramRun:
    """One run of a program.

    Args:
        program: of this rank.
        groups: of its messages; empty where each is by itself, known by its tag, and waited for when
            something needs it.
        backend: of torch, or a group of it where messages are by themselves.
        memory: the buffers of the program.
        operator: None where nothing is added up.

    Attributes:
        reached: the operation that is started or waited for.
    """

    def __init__(
        self,
        program: Program,
        groups: Sequence[MessageGroup],
        backend: Any,
        memory: Mapping[Buffer, Tensor],
        operator: ReductionOperator | None,
    ) -> None:
        self.reached: Operation | None = None
        self._operations = program.operations
        self._groups = groups
        self._backend = backend
        self._memory = memory
        self._operator = operator
        self._works: dict[int, Any] = {}
        self._complete: set[int] = set()

    def run(self) -> None:
        """Start all messages in their turn, with what each needs before it, then complete what is left."""
        for together in self._groups:
            self._complete_all(together.before)
            if together.messages:
                self.reached = self._operations[together.messages[0]]
                exchange(self._backend, [self._message(index) for index in together.messages])
                self._complete.update(together.messages)
        for index, operation in enumerate(() if self._groups else self._operations):
            if isinstance(operation, Send | Receive):
                self._complete_all(operation.after)
                self.reached = operation
                method, part, peer = self._message(index)
                self._works[index] = getattr(self._backend, method)([part], peer, operation.tag)
        self._complete_all(range(len(self._operations)))

    def _message(self, index: int) -> Message:
        operation = self._operations[index]
        assert isinstance(operation, Send | Receive), "groups hold messages"
        if isinstance(operation, Send):
            return "send", view(self._memory, operation.source), operation.peer
        return "recv", view(self._memory, operation.into), operation.peer

    def _complete_all(self, indices: Iterable[int]) -> None:
        """Wait for messages; do sums and copies, which need messages and few others before them."""
        for index in indices:
            if index in self._complete:
                continue
            operation = self._operations[index]
            if index in self._works:
                self.reached = operation
                self._works.pop(index).wait()
            else:
                self._complete_all(operation.after)
                combine(operation, self._memory, self._operator)
            self._complete.add(index)


def combine(
    operation: Operation, memory: Mapping[Buffer, Tensor], operator: ReductionOperator | None
) -> None:
    """Do a sum or a copy."""
    assert not isinstance(operation, Send | Receive), "messages are started, not combined"
    into, source = view(memory, operation.into), view(memory, operation.source)
    if isinstance(operation, Reduce):
        assert operator is not None, "only reducing kinds have reductions"
        operator.combine(into, source, into)
    else:
        into.copy_(source)


def view(memory: Mapping[Buffer, Tensor], part: BufferSlice) -> Tensor:
    """The elements of a slice."""
    return memory[part.buffer].narrow(0, part.start, part.length)
