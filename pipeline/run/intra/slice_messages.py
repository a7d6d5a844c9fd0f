"""What a divided stage exchanges with the stages before and behind.

    stage 0, mesh of 2          stage 1, mesh of 3
    rank 0  entries [0, 6)  ->  rank 2  [0, 4)            every rank gets its own part of a tensor once,
    rank 1  entries [6, 12) ->  rank 3  [4, 6) [6, 8)     from the ranks that have it; gradients go the
                            ->  rank 4  [8, 12)           same way back (`sharding.slices.messages`)

What autocast makes of values is not in the traced graph: then the first message of a boundary says the types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from arborcast.pipeline.meshes import Mesh
from arborcast.pipeline.run.stage_messages import (
    BoundaryMessages,
    Messenger,
    Pending,
    TagOf,
    absent,
    as_bytes,
    is_absent,
    wait,
)
from arborcast.pipeline.sharding import graph, slices
from arborcast.pipeline.sharding.slices import SliceMessage, parted_dim

TYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""That may cross: a message says them by number."""


@dataclass(frozen=True)
class CrossingTensor:
    """One tensor that crosses a boundary.

    Attributes:
        tensor: as the graph has it.
        dtype: as traced.
        needs_gradient: whether its gradient crosses in the other direction.
    """

    tensor: graph.Tensor
    dtype: torch.dtype
    needs_gradient: bool

    def bytes_of(self, senders: Mesh, receivers: Mesh) -> int:
        """What crosses of it for a microbatch, as traced."""
        dim = parted_dim(self.tensor)
        each = self.tensor.size_bytes // (1 if dim is None else self.tensor.shape[dim])
        ways = [(senders, receivers), *([(receivers, senders)] if self.needs_gradient else [])]
        return sum(each * (it.stop - it.start) for way in ways for it in slices.messages(self.tensor, *way))


@dataclass
class SliceMessages(BoundaryMessages):
    """Between stages whose ranks have slices of tensors, each along a dimension of its own.

    Args:
        tensors: that cross it.
        senders: the mesh of the stage before.
        receivers: of the stage behind.
        rank: this one, of either.
        links: to other ranks.
        says_types: whether types of values are told with the first message.
        tag_of: of the messages of each tensor; the number behind those of all tensors is that of types.
    """

    tensors: Sequence[CrossingTensor]
    senders: Mesh
    receivers: Mesh
    rank: int
    links: Messenger
    says_types: bool
    tag_of: TagOf
    _types: list[torch.dtype] | None = field(default=None, init=False)
    _pending: dict[tuple[int, bool], list[list[tuple[SliceMessage, Tensor, Pending]]]] = field(
        default_factory=dict, init=False
    )

    def send(self, microbatch: int, tensors: Sequence[Tensor | None], *, back: bool) -> list[Pending]:
        """As `BoundaryMessages.send`."""
        sent: list[Pending] = []
        what = "sending the gradient" if back else "sending the output"
        if not back and self.says_types and self._types is None:
            sent += self._say_types(microbatch, [it.dtype for it in tensors if it is not None])
        for number, (crossing, part) in enumerate(zip(self.tensors, tensors, strict=True)):
            if back and not crossing.needs_gradient:
                continue
            dim, (first, _) = parted_dim(crossing.tensor), self._own(crossing)
            for message in self._messages(crossing, back):
                if message.src != self.rank:
                    continue
                if part is None:
                    shape = self._shape(crossing, message.stop - message.start)
                    given = absent(shape, self._type(crossing))
                else:
                    cut = part if dim is None else part.narrow(dim, message.start - first, _length(message))
                    given = as_bytes(cut.resolve_conj().resolve_neg().contiguous())
                tag = self.tag_of(number, microbatch, back)
                sent.append(self.links.send(given, message.dst, tag, what=what, microbatch=microbatch))
        return sent

    def receive(self, microbatch: int, *, back: bool) -> None:
        """As `BoundaryMessages.receive`."""
        if not back and self.says_types and self._types is None:
            self._hear_types(microbatch)
        what, arriving = "gradient" if back else "input", []
        for number, crossing in enumerate(self.tensors):
            parts = []
            for message in self._messages(crossing, back) if crossing.needs_gradient or not back else ():
                if message.dst == self.rank:
                    buffer = torch.empty(self._shape(crossing, _length(message)), dtype=self._type(crossing))
                    tag = self.tag_of(number, microbatch, back)
                    pending = self.links.receive(
                        as_bytes(buffer), message.src, tag, what=what, microbatch=microbatch
                    )
                    parts.append((message, buffer, pending))
            arriving.append(parts)
        self._pending[microbatch, back] = arriving

    def arrived(self, microbatch: int, *, back: bool) -> list[Tensor | None]:
        """As `BoundaryMessages.arrived`."""
        found: list[Tensor | None] = []
        arriving = self._pending.pop((microbatch, back))
        for crossing, parts in zip(self.tensors, arriving, strict=True):
            wait([pending for *_, pending in parts])
            buffers = [it for _, it, _ in sorted(parts, key=lambda part: part[0].start)]
            if back:
                missing = [is_absent(it) for it in buffers]
                if all(missing):
                    found.append(None)
                    continue
                for buffer, lacks in zip(buffers, missing, strict=True):
                    if lacks:
                        buffer.zero_()
            dim = parted_dim(crossing.tensor)
            found.append(buffers[0] if dim is None or len(buffers) == 1 else torch.cat(buffers, dim))
        return found

    def _messages(self, crossing: CrossingTensor, back: bool) -> Iterator[SliceMessage]:
        ends = (self.receivers, self.senders) if back else (self.senders, self.receivers)
        return slices.messages(crossing.tensor, *ends)

    def _own(self, crossing: CrossingTensor) -> tuple[int, int]:
        mesh = self.senders if self.rank in self.senders.ranks else self.receivers
        return slices.part_of(crossing.tensor, mesh, mesh.ranks.index(self.rank))

    def _shape(self, crossing: CrossingTensor, length: int) -> list[int]:
        shape, dim = list(crossing.tensor.shape), parted_dim(crossing.tensor)
        if dim is not None:
            shape[dim] = length
        return shape

    def _type(self, crossing: CrossingTensor) -> torch.dtype:
        return crossing.dtype if self._types is None else self._types[self.tensors.index(crossing)]

    def _say_types(self, microbatch: int, types: list[torch.dtype]) -> list[Pending]:
        self._types = types
        words = torch.tensor([TYPES.index(it) for it in types])
        peers = {
            it.dst: it for one in self.tensors for it in self._messages(one, False) if it.src == self.rank
        }
        tag = self.tag_of(len(self.tensors), microbatch, False)
        return [
            self.links.send(words, peer, tag, what="sending the types", microbatch=microbatch)
            for peer in peers
        ]

    def _hear_types(self, microbatch: int) -> None:
        peers = {
            it.src: it for one in self.tensors for it in self._messages(one, False) if it.dst == self.rank
        }
        tag = self.tag_of(len(self.tensors), microbatch, False)
        for peer in peers:
            words = torch.zeros(len(self.tensors), dtype=torch.int64)
            self.links.receive(words, peer, tag, what="types", microbatch=microbatch).wait()
            self._types = [TYPES[it] for it in words.tolist()]


def _length(message: SliceMessage) -> int:
    return message.stop - message.start
