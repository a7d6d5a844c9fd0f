"""One run of a program by torch's messages, on tensors of any device: in groups, or each by itself.

Groups go by `torch.distributed.batch_isend_irecv`. On NCCL a batch is one coalesced group; waiting for it
makes the current stream wait, not the host, so that sums and copies follow on the stream and the whole call
can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch.distributed as dist
from torch import Tensor

from arborcast.backends.lowering.layout import Buffer, BufferSlice
from arborcast.backends.lowering.program import Operation, Program, Receive, Reduce, Send
from arborcast.backends.p2p.groups import MessageGroup
from arborcast.backends.tensors.torch_reduction import ReductionOperator

Start: TypeAlias = Callable[..., Any]
"""Of torch: begins a send or a receive."""


class ProgramRun:
    """One run of a program.

    Args:
        program: of this rank.
        groups: of its messages; empty where each is by itself, known by its tag, and waited for when
            something needs it.
        group: of processes.
        memory: the buffers of the program.
        operator: None where nothing is added up.

    Attributes:
        reached: the operation that is started or waited for.
    """

    def __init__(
        self,
        program: Program,
        groups: Sequence[MessageGroup],
        group: dist.ProcessGroup,
        memory: Mapping[Buffer, Tensor],
        operator: ReductionOperator | None,
    ) -> None:
        self.reached: Operation | None = None
        self._operations = program.operations
        self._groups = groups
        self._group = group
        self._memory = memory
        self._operator = operator
        self._works: dict[int, dist.Work] = {}
        self._complete: set[int] = set()

    def run(self) -> None:
        """Start all messages in their turn, with what each needs before it, then complete what is left."""
        for together in self._groups:
            self._complete_all(together.before)
            if together.messages:
                self.reached = self._operations[together.messages[0]]
                for work in dist.batch_isend_irecv([self._batched(index) for index in together.messages]):
                    work.wait()
                self._complete.update(together.messages)
        for index, operation in enumerate(() if self._groups else self._operations):
            if isinstance(operation, Send | Receive):
                self._complete_all(operation.after)
                self.reached = operation
                start, part = self._message(operation, self._group.send, self._group.recv)
                self._works[index] = start([part], operation.peer, operation.tag)
        self._complete_all(range(len(self._operations)))

    def _message(self, operation: Operation, send: Start, receive: Start) -> tuple[Start, Tensor]:
        """What starts a message, and its elements."""
        if isinstance(operation, Send):
            return send, view(self._memory, operation.source)
        return receive, view(self._memory, operation.into)

    def _batched(self, index: int) -> dist.P2POp:
        operation = cast("Send | Receive", self._operations[index])
        start, part = self._message(operation, dist.isend, dist.irecv)
        return dist.P2POp(start, part, group=self._group, group_peer=operation.peer)

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
