"""The passes of a divided stage in order, and what it exchanges with the stages before and behind.

    stage 0, mesh of 2          stage 1, mesh of 3
    rank 0  entries [0, 6)  ->  rank 2  [0, 4)            every rank gets its own part of a tensor once,
    rank 1  entries [6, 12) ->  rank 3  [4, 6) [6, 8)     from the ranks that have it; gradients go the
                            ->  rank 4  [8, 12)           same way back (`sharding.slices.messages`)

What autocast makes of values is not in the traced graph: then the first message of a boundary says the types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from arborcast.pipeline.order.actions import Action, Phase
from arborcast.pipeline.order.pass_messages import WorkerStep
from arborcast.pipeline.run.intra.divided_stage import DividedStage
from arborcast.pipeline.run.loop import Loop, wait
from arborcast.pipeline.run.stage_messages import Messenger, Pending, absent, as_bytes, is_absent
from arborcast.pipeline.sharding import graph, slices
from arborcast.pipeline.sharding.fabric_prices import Mesh
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
class Boundary:
    """Where this rank's stage meets the one before or behind.

    Args:
        tensors: that cross it.
        senders: the mesh of the stage before.
        receivers: of the stage behind.
        rank: this one, of either.
        links: to other ranks.
        says_types: whether types of values are told with the first message.
        tag_of: a number for each tensor and microbatch, in either direction.
    """

    tensors: Sequence[CrossingTensor]
    senders: Mesh
    receivers: Mesh
    rank: int
    links: Messenger
    says_types: bool
    tag_of: Callable[[int, int, bool], int]
    _types: list[torch.dtype] | None = field(default=None, init=False)
    _pending: dict[tuple[int, bool], list[list[tuple[SliceMessage, Tensor, Pending]]]] = field(
        default_factory=dict, init=False
    )

    def send(self, microbatch: int, parts: Sequence[Tensor | None], *, back: bool) -> list[Pending]:
        """Begin to send this rank's parts, of gradients those of `trained`; None where there is none."""
        sent: list[Pending] = []
        what = "sending the gradient" if back else "sending the output"
        if not back and self.says_types and self._types is None:
            sent += self._say_types(microbatch, [it.dtype for it in parts if it is not None])
        for number, (crossing, part) in enumerate(zip(self._crossing(back), parts, strict=True)):
            dim, (first, _) = parted_dim(crossing.tensor), self._own(crossing)
            for message in self._messages(crossing, back):
                if message.src != self.rank:
                    continue
                if part is None:
                    shape = self._shape(crossing, message.stop - message.start)
                    given = absent(shape, self._type(crossing))
                else:
                    cut = part if dim is None else part.narrow(dim, message.start - first, _length(message))
                    given = as_bytes(cut.contiguous())
                tag = self.tag_of(number, microbatch, back)
                sent.append(self.links.send(given, message.dst, tag, what=what, microbatch=microbatch))
        return sent

    def receive(self, microbatch: int, *, back: bool) -> None:
        """Post the receives of this rank's parts."""
        if not back and self.says_types and self._types is None:
            self._hear_types(microbatch)
        what, arriving = "gradient" if back else "input", []
        for number, crossing in enumerate(self._crossing(back)):
            parts = []
            for message in self._messages(crossing, back):
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
        """This rank's parts, once they are here; None of a gradient that there is not."""
        found: list[Tensor | None] = []
        arriving = self._pending.pop((microbatch, back))
        for crossing, parts in zip(self._crossing(back), arriving, strict=True):
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

    def _crossing(self, back: bool) -> list[CrossingTensor]:
        return [it for it in self.tensors if it.needs_gradient or not back]

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


@dataclass
class _Kept:
    """Of a forward pass, until the backward pass."""

    received: Mapping[str, Tensor]
    sent: Mapping[str, Tensor]
    loss: Tensor | None


class DividedLoop(Loop):
    """The passes of this rank's stage.

    Args:
        stage: divided.
        steps: of its worker.
        in_flight: as of `Loop`.
        before: the boundary to the stage before; None of the first one.
        behind: to the stage behind; None of the last one.
        weigh: makes of a microbatch's loss what its backward pass begins with.

    Attributes:
        losses: of the microbatches of the last batch, on the last stage.
        doing: what this rank did last, in words.
    """

    def __init__(
        self,
        stage: DividedStage,
        steps: Sequence[WorkerStep],
        in_flight: int,
        before: Boundary | None,
        behind: Boundary | None,
        weigh: Callable[[Tensor], Tensor],
    ) -> None:
        self.steps, self.in_flight = steps, in_flight
        self.losses: dict[int, Tensor] = {}
        self.doing = "waiting for the others"
        self._stage, self._before, self._behind, self._weigh = stage, before, behind, weigh
        self._kept: dict[int, _Kept] = {}
        self._gradients: dict[int, list[Tensor | None]] = {}

    def run(self, parts: Sequence[Sequence[Tensor]], step: int) -> None:
        """All passes of a batch; `finish` is to follow.

        Args:
            parts: the inputs of each microbatch, whole.
            step: of the training, for random numbers.
        """
        self._kept, self._gradients, self.losses = {}, {}, {}
        self._parts, self._step, self._training = parts, step, torch.is_grad_enabled()
        self._stage.begin(parts)
        self.walk(training=self._training)
        self._parts = ()

    def receive(self, action: Action) -> None:
        """As `Loop.receive`."""
        back = action.phase is Phase.BACKWARD
        self._end(back).receive(action.microbatch, back=back)

    def compute(self, action: Action) -> None:
        """As `Loop.compute`."""
        if action.phase is Phase.FORWARD:
            self._forward(action.microbatch)
        else:
            self._backward(action.microbatch)

    def send(self, action: Action) -> list[Pending]:
        """As `Loop.send`."""
        back, m = action.phase is Phase.BACKWARD, action.microbatch
        end = self._end(not back)
        if back:
            return end.send(m, self._gradients.pop(m), back=True)
        kept = self._kept[m] if self._training else self._kept.pop(m)
        return end.send(m, [kept.sent[it.tensor.value].detach() for it in end.tensors], back=False)

    def _end(self, is_behind: bool) -> Boundary:
        end = self._behind if is_behind else self._before
        assert end is not None, "the order has no messages beyond the ends"
        return end

    def _forward(self, m: int) -> None:
        self.doing = f"forward pass of microbatch {m}"
        received: dict[str, Tensor] = {}
        if self._before is not None:
            arrived = self._before.arrived(m, back=False)
            for crossing, part in zip(self._before.tensors, arrived, strict=True):
                assert part is not None, "values always come"
                needs = crossing.needs_gradient and self._training and part.is_floating_point()
                received[crossing.tensor.value] = part.requires_grad_(needs)
        sent, loss = self._stage.forward(self._parts[m], received, step=self._step, microbatch=m)
        if loss is not None:
            self.losses[m] = loss.detach()
        if self._training or self._behind is not None:
            self._kept[m] = _Kept(received, sent, loss)

    def _backward(self, m: int) -> None:
        self.doing = f"backward pass of microbatch {m}"
        kept = self._kept.pop(m)
        roots: list[Tensor] = []
        given: list[Tensor | None] = []
        if self._behind is not None:
            crossing = [it for it in self._behind.tensors if it.needs_gradient]
            for it, gradient in zip(crossing, self._behind.arrived(m, back=True), strict=True):
                part = kept.sent[it.tensor.value]
                if gradient is not None and part.requires_grad:
                    roots.append(part)
                    given.append(gradient)
        if kept.loss is not None and kept.loss.requires_grad:
            roots.append(self._weigh(kept.loss))
            given.append(None)
        if roots:
            with torch.autocast("cpu", enabled=False):  # types follow those of the forward pass
                torch.autograd.backward(roots, given)
        if self._before is not None:
            names = (it.tensor.value for it in self._before.tensors if it.needs_gradient)
            self._gradients[m] = [kept.received[name].grad for name in names]
