"""One run of a grouped program by `torch.distributed.batch_isend_irecv`, on tensors of any device.

On NCCL a batch is one coalesced group; waiting for it makes the current stream wait, not the host, so that
sums and copies follow on the stream and the whole call can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from arborcast.backends.lowering.layout import Buffer, BufferSlice
from arborcast.backends.lowering.program import Operation, Program, Receive, Reduce, Send
from arborcast.backends.p2p.groups import MessageGroup
from arborcast.backends.tensors.torch_reduction import ReductionOperator


class GroupedRun:
    """One run of a program.

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
        self._program = program
        self._groups = groups
        self._group = group
        self._memory = memory
        self._operator = operator

    def run(self) -> None:
        """Group after group, with the sums and copies that each needs before it."""
        operations = self._program.operations
        for group in self._groups:
            for index in group.before:
                combine(operations[index], self._memory, self._operator)
            if not group.messages:
                continue
            self.reached = operations[group.messages[0]]
            works = dist.batch_isend_irecv([self._message(operations[index]) for index in group.messages])
            for work in works:
                work.wait()

    def _message(self, operation: Operation) -> dist.P2POp:
        assert isinstance(operation, Send | Receive), "groups start messages alone"
        start, part = (
            (dist.isend, operation.source) if isinstance(operation, Send) else (dist.irecv, operation.into)
        )
        return dist.P2POp(start, view(self._memory, part), group=self._group, group_peer=operation.peer)


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
