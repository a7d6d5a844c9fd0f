"""What crosses a boundary for one microbatch, as one message for each pair of replicas, and who sends it.

A single tensor whose first dimension counts samples is sent and received in place, slice by slice. Several
tensors, or other dimensions, travel packed behind each other:

    | samples [a, b) of tensor 0 | pad | samples [a, b) of tensor 1 | pad | ...

Both sides know all shapes, so nothing but data travels. Where there is no gradient, as of what nobody uses,
bytes travel that no arithmetic makes: then parameters are left alone as in serial training, where the
optimizer skips what has no gradient and would not skip zeros.
"""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from arborcast.pipeline.errors import PartitionError
from arborcast.pipeline.run.batches import described
from arborcast.pipeline.run.boundary import TensorSpec
from arborcast.pipeline.run.failures import TrainingError, words_of
from arborcast.pipeline.run.recorder import NullRecorder, PassRecorder

ALIGNMENT = 64
"""Bytes at whose multiples tensors begin in a message: every data type may be read there."""
ABSENT = 255
"""Each byte of a tensor that there is not: a NaN with all bits set, where arithmetic makes others."""
_WATCHERS = 16
"""Threads that note when messages end, where that is recorded."""


@dataclass(frozen=True, slots=True)
class SampleSlice:
    """The samples [start, stop) of a replica's own share, to or from a rank of the job."""

    peer: int
    start: int
    stop: int


def travels_in_place(wires: Sequence[TensorSpec]) -> bool:
    """Whether slices of the tensor itself are what is sent."""
    return len(wires) == 1 and wires[0].dim == 0


def packed(wires: Sequence[TensorSpec], tensors: Sequence[Tensor | None], parcel: SampleSlice) -> Tensor:
    """The bytes of a parcel, to be sent; None where there is no gradient."""
    samples = parcel.stop - parcel.start
    if travels_in_place(wires):
        if tensors[0] is None:
            return absent(wires[0].shape_of(samples), wires[0].dtype)
        part = wires[0].narrowed(tensors[0], parcel.start, parcel.stop)
        return as_bytes(part.resolve_conj().resolve_neg().contiguous())
    buffer = torch.empty(_size(wires, samples), dtype=torch.uint8)
    for view, wire, tensor in zip(_views(wires, samples, buffer), wires, tensors, strict=True):
        if tensor is None:
            as_bytes(view).fill_(ABSENT)
        else:
            view.copy_(wire.narrowed(tensor, parcel.start, parcel.stop))
    return buffer


class ReceiveTarget:
    """Where the parcels of one microbatch arrive.

    Args:
        wires: what crosses; at least one.
        samples: of the replica's share.
        parcels: that make it up, in the order of samples.
    """

    def __init__(self, wires: Sequence[TensorSpec], samples: int, parcels: Sequence[SampleSlice]) -> None:
        self._wires = wires
        self._parcels = parcels
        self._whole: Tensor | None = None
        if travels_in_place(wires):
            self._whole = torch.empty(wires[0].shape_of(samples), dtype=wires[0].dtype)
            self.buffers = [
                as_bytes(wires[0].narrowed(self._whole, parcel.start, parcel.stop)) for parcel in parcels
            ]
        else:
            self.buffers = [
                torch.empty(_size(wires, parcel.stop - parcel.start), dtype=torch.uint8) for parcel in parcels
            ]

    def tensors(self) -> tuple[Tensor, ...]:
        """What arrived, once all parcels have; nothing is copied where one parcel is all."""
        if self._whole is not None:
            return (self._whole,)
        parts = [
            _views(self._wires, parcel.stop - parcel.start, buffer)
            for parcel, buffer in zip(self._parcels, self.buffers, strict=True)
        ]
        if len(parts) == 1:
            return tuple(parts[0])
        return tuple(
            torch.cat(pieces, dim=wire.dim)
            for wire, pieces in zip(self._wires, zip(*parts, strict=True), strict=True)
        )

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Likewise, None where no parcel has a gradient; zeros where only others have."""
        if self._whole is not None:
            found = [[self._wires[0].narrowed(self._whole, it.start, it.stop) for it in self._parcels]]
        else:
            parts = [
                _views(self._wires, parcel.stop - parcel.start, buffer)
                for parcel, buffer in zip(self._parcels, self.buffers, strict=True)
            ]
            found = [list(pieces) for pieces in zip(*parts, strict=True)]
        absent = [[is_absent(piece) for piece in pieces] for pieces in found]
        for piece, missing in zip(itertools.chain(*found), itertools.chain(*absent), strict=True):
            if missing:
                piece.zero_()
        tensors = zip(self.tensors(), absent, strict=True)
        return tuple(None if all(missing) else tensor for tensor, missing in tensors)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8)


def sharing(tensor: Tensor) -> Tensor:
    """Another tensor with the same memory, for which autograd keeps separate books.

    A view would not do: what is written to one view counts as a change of all others.
    """
    other = torch.empty(0, dtype=tensor.dtype)
    other.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return other


def _views(wires: Sequence[TensorSpec], samples: int, buffer: Tensor) -> list[Tensor]:
    views, offset = [], 0
    for wire in wires:
        size = wire.bytes_of(samples)
        part = buffer[offset : offset + size].view(wire.dtype).view(wire.shape_of(samples))
        views.append(sharing(part))
        offset += _padded(size)
    return views


def absent(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The bytes that stand for a gradient that there is not."""
    return torch.full((math.prod(shape) * dtype.itemsize,), ABSENT, dtype=torch.uint8)


def is_absent(tensor: Tensor) -> bool:
    """Whether it stands for no gradient; told by the first byte as a rule."""
    raw = as_bytes(tensor)
    return raw.numel() > 0 and raw[0].item() == ABSENT and bool((raw == ABSENT).all())


def _size(wires: Sequence[TensorSpec], samples: int) -> int:
    return sum(_padded(wire.bytes_of(samples)) for wire in wires)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass
class Messages:
    """What a rank sent to and received from other stages so far."""

    sent: int = 0
    received: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class Pending:
    """A message on its way; keeps its tensor alive."""

    def __init__(self, work: dist.Work | Future[None], tensor: Tensor, words: str) -> None:
        self._work = work
        self._tensor = tensor
        self._words = words

    def wait(self) -> None:
        """Return once the tensor was received, or may be written again.

        Raises:
            TrainingError: the peer is gone, or a deadline passed.
        """
        try:
            if isinstance(self._work, Future):
                self._work.result()
            else:
                self._work.wait()
        except RuntimeError as error:
            raise TrainingError(f"{self._words}: {words_of(error)}") from error


class Messenger:
    """Point-to-point messages of a rank.

    Args:
        group: gloo, of all ranks of the job: tags tell messages apart whatever their order.
        name: of this rank in errors.
        recorder: notes when messages begin and end.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, recorder: PassRecorder) -> None:
        self._group = group
        self._name = name
        self._recorder = recorder
        self._watchers = None if isinstance(recorder, NullRecorder) else ThreadPoolExecutor(_WATCHERS)
        self.messages = Messages()

    def send(self, tensor: Tensor, peer: int, tag: int, *, what: str, microbatch: int) -> Pending:
        """Begin to send a contiguous tensor to a rank of the job.

        Args:
            tensor: must not change until the send is waited for.
            peer: where to.
            tag: of no other message to this rank at the time.
            what: in words, for errors and records.
            microbatch: that it belongs to.
        """
        self.messages.sent += 1
        self.messages.sent_bytes += tensor.nbytes
        words = f"{self._name}: {what} of microbatch {microbatch} to rank {peer}"
        begin = time.perf_counter_ns()
        work = self._posted(words, dist.isend, tensor, peer, tag)
        if self._watchers is None:
            return Pending(work, tensor, words)
        return Pending(self._watchers.submit(self._watch, work, microbatch, begin, peer), tensor, words)

    def receive(self, tensor: Tensor, peer: int, tag: int, *, what: str, microbatch: int) -> Pending:
        """Begin to receive a contiguous tensor; arguments as for `send`."""
        self.messages.received += 1
        self.messages.received_bytes += tensor.nbytes
        words = f"{self._name}: waiting for the {what} of microbatch {microbatch} from rank {peer}"
        return Pending(self._posted(words, dist.irecv, tensor, peer, tag), tensor, words)

    def close(self) -> None:
        """End the threads."""
        if self._watchers is not None:
            self._watchers.shutdown(wait=False, cancel_futures=True)

    def _posted(self, words: str, operation: object, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        assert callable(operation)
        try:
            work = operation(tensor, peer, group=self._group, tag=tag)
        except RuntimeError as error:
            raise TrainingError(f"{words}: {words_of(error)}") from error
        assert isinstance(work, dist.Work), "only ranks outside the group get none"
        return work

    def _watch(self, work: dist.Work, microbatch: int, begin: int, peer: int) -> None:
        work.wait()
        self._recorder.add("communication", microbatch, begin, time.perf_counter_ns(), peer)


def wait(pending: Sequence[Pending]) -> None:
    """Until all of these have ended."""
    for message in pending:
        message.wait()


TagOf = Callable[[int, int, bool], int]
"""Of a message over one boundary: by a number of the tensor, the microbatch, and whether it is a gradient."""


class BoundaryMessages(ABC):
    """What a stage on this rank exchanges with the one before or behind, for batches of one shape."""

    @abstractmethod
    def receive(self, microbatch: int, *, back: bool) -> None:
        """Post the receives of this rank's part of a microbatch's tensors, or (`back`) of their gradients."""

    @abstractmethod
    def arrived(self, microbatch: int, *, back: bool) -> Sequence[Tensor | None]:
        """What was received, once it is here, one for each tensor; None for a gradient that there is not."""

    @abstractmethod
    def send(self, microbatch: int, tensors: Sequence[Tensor | None], *, back: bool) -> list[Pending]:
        """Begin to send what a pass made, one for each tensor that crosses."""


@dataclass(eq=False)
class SampleMessages(BoundaryMessages):
    """Between stages whose replicas have shares of the samples.

    Args:
        where: the stage, for errors.
        wires: what crosses.
        slices: by microbatch, who has which samples of this rank's share.
        links: to other ranks.
        tag_of: of its messages.
    """

    where: str
    wires: Sequence[TensorSpec]
    slices: Sequence[Sequence[SampleSlice]]
    links: Messenger
    tag_of: TagOf

    def __post_init__(self) -> None:
        """Nothing is on its way."""
        self._arrivals: dict[tuple[int, bool], tuple[ReceiveTarget, list[Pending]]] = {}

    def receive(self, microbatch: int, *, back: bool) -> None:
        """As `BoundaryMessages.receive`."""
        wires, slices = self._crossing(back), self.slices[microbatch]
        if not wires:
            return
        target = ReceiveTarget(wires, slices[-1].stop, slices)
        tag, what = self.tag_of(0, microbatch, back), "gradient" if back else "input"
        pending = [
            self.links.receive(buffer, part.peer, tag, what=what, microbatch=microbatch)
            for buffer, part in zip(target.buffers, slices, strict=True)
        ]
        self._arrivals[microbatch, back] = target, pending

    def arrived(self, microbatch: int, *, back: bool) -> Sequence[Tensor | None]:
        """As `BoundaryMessages.arrived`."""
        target, pending = self._arrivals.pop((microbatch, back))
        wait(pending)
        if not back:
            return target.tensors()
        found = iter(target.gradients())
        return [next(found) if wire.needs_gradient else None for wire in self.wires]

    def send(self, microbatch: int, tensors: Sequence[Tensor | None], *, back: bool) -> list[Pending]:
        """As `BoundaryMessages.send`.

        Raises:
            PartitionError: a tensor is not of the shape that its samples should give.
        """
        slices = self.slices[microbatch]
        if not back:
            self._check(tensors, slices[-1].stop)
        pairs = zip(tensors, self.wires, strict=True)
        given = [tensor for tensor, wire in pairs if wire.needs_gradient or not back]
        words, wires = f"sending the {'gradient' if back else 'output'}", self._crossing(back)
        tag = self.tag_of(0, microbatch, back)
        return [
            self.links.send(packed(wires, given, part), part.peer, tag, what=words, microbatch=microbatch)
            for part in slices
            if wires
        ]

    def _crossing(self, back: bool) -> Sequence[TensorSpec]:
        return [it for it in self.wires if it.needs_gradient] if back else self.wires

    def _check(self, tensors: Sequence[Tensor | None], samples: int) -> None:
        for wire, tensor in zip(self.wires, tensors, strict=True):
            assert tensor is not None, "outputs there are"
            shape = wire.shape_of(samples)
            if tuple(tensor.shape) != shape:
                raise PartitionError(
                    f"{self.where}: {samples} samples must give shape {list(shape)}, in proportion to "
                    f"others, got {described(tensor)}"
                )
