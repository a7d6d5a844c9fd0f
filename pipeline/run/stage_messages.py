"""What crosses a boundary for one microbatch, as one message for each pair of ranks, and who sends it.

Ranks have slices of tensors, each along one dimension: replicas shares of the samples, ranks that divide
operators parts along any. What goes from one rank to another travels behind each other, of larger types
first, so that each may be read where it begins:

    | entries [a, b) of tensor 1 | entries [c, d) of tensor 0 | ...

Both sides know all shapes, so nothing but data travels. A single tensor whose first dimension is divided is
sent and received in place, slice by slice. Where there is no gradient, as of what nobody uses, bytes travel
that no arithmetic makes: then parameters are left alone as in serial training, where the optimizer skips what
has no gradient and would not skip zeros. On devices the host would have to wait for such bytes, and is told
beside them, by a message of its own, which gradients there are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from arborcast.pipeline.errors import PartitionError
from arborcast.pipeline.run.batches import described
from arborcast.pipeline.run.boundary import TensorSpec
from arborcast.pipeline.run.devices import HOST
from arborcast.pipeline.run.failures import TrainingError, words_of
from arborcast.pipeline.run.recorder import PassRecorder

ABSENT = 255
"""Each byte of a tensor that there is not: a NaN with all bits set, where arithmetic makes others."""
_WATCHERS = 16
"""Threads that note when messages end, where that is recorded."""


@dataclass(frozen=True, slots=True)
class PeerSlice:
    """The entries [start, stop) of what this rank has of a tensor, to or from a rank of the job."""

    peer: int
    start: int
    stop: int


def packed(
    pieces: Iterable[tuple[TensorSpec, Tensor | None, PeerSlice]], device: torch.device = HOST
) -> Tensor:
    """The bytes of a message: of tensors that cross what a peer gets; None where there is no gradient."""
    parts = []
    for wire, tensor, part in pieces:
        if tensor is None:
            parts.append(absent(wire.shape_of(part.stop - part.start), wire.dtype, device))
        else:
            cut = wire.narrowed(tensor, part.start, part.stop)
            parts.append(as_bytes(cut.resolve_conj().resolve_neg().contiguous()))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8)


def sharing(tensor: Tensor) -> Tensor:
    """Another tensor with the same memory, for which autograd keeps separate books.

    A view would not do: what is written to one view counts as a change of all others.
    """
    return tensor.data


def absent(shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST) -> Tensor:
    """The bytes that stand for a gradient that there is not."""
    return torch.full((math.prod(shape) * dtype.itemsize,), ABSENT, dtype=torch.uint8, device=device)


def is_absent(tensor: Tensor) -> bool:
    """Whether it stands for no gradient; told by the first byte as a rule."""
    raw = as_bytes(tensor)
    return raw.numel() > 0 and raw[0].item() == ABSENT and bool((raw == ABSENT).all())


@dataclass
class MessageCounts:
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
        ways: for tensors on devices, of all ranks, too: one from lower ranks to higher ones, one back. They
            know no tags: messages from one rank to another are received in the order in which they are sent.
        device: where tensors between stages are.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        recorder: PassRecorder,
        ways: Sequence[dist.ProcessGroup] = (),
        device: torch.device = HOST,
    ) -> None:
        self._group, self._ways, self.device = group, ways, device
        self._met: set[int] = set()
        self._name = name
        self._recorder = recorder
        self._watchers = ThreadPoolExecutor(_WATCHERS) if recorder.is_on else None
        self.messages = MessageCounts()

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
        work = self._posted(words, dist.isend, tensor, peer, tag, is_up=peer > dist.get_rank())
        if self._watchers is None:
            return Pending(work, tensor, words)
        return Pending(self._watchers.submit(self._watch, work, microbatch, begin, peer), tensor, words)

    def receive(self, tensor: Tensor, peer: int, tag: int, *, what: str, microbatch: int) -> Pending:
        """Begin to receive a contiguous tensor; arguments as for `send`."""
        self.messages.received += 1
        self.messages.received_bytes += tensor.nbytes
        words = f"{self._name}: waiting for the {what} of microbatch {microbatch} from rank {peer}"
        work = self._posted(words, dist.irecv, tensor, peer, tag, is_up=peer < dist.get_rank())
        return Pending(work, tensor, words)

    def connect(self, peers: Iterable[int]) -> None:
        """Meet with ranks that these messages are for, which come here, too.

        Backends of devices connect two ranks when both first come to a message between them, and until then
        the host waits, which no order of passes reckons with. Ranks meet two by two, all in one order.
        """
        if not self._ways:
            return
        own, byte = dist.get_rank(), torch.zeros(1, dtype=torch.uint8, device=self.device)
        for low, high in sorted((min(own, it), max(own, it)) for it in {*peers} - self._met):
            peer = low + high - own
            for is_up in (True, False):
                operation = dist.isend if is_up == (own == low) else dist.irecv
                words = f"{self._name}: connecting to rank {peer}"
                self._posted(words, operation, byte, peer, 0, is_up=is_up).wait()
            self._met.add(peer)

    def close(self) -> None:
        """End the threads."""
        if self._watchers is not None:
            self._watchers.shutdown(wait=False, cancel_futures=True)

    def _posted(
        self, words: str, operation: object, tensor: Tensor, peer: int, tag: int, *, is_up: bool
    ) -> dist.Work:
        assert callable(operation)
        group = self._group if tensor.device == HOST else self._ways[0 if is_up else 1]
        try:
            work = operation(tensor, peer, group=group, tag=tag)
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
"""Of a message over one boundary: by 0 or (what types come) 1, the microbatch, and whether of gradients."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    """What is being received of a microbatch.

    Attributes:
        parts: of each tensor, by number: where a part begins, the part, and which gradients there are, with
            its place among them, where that is told apart.
        pending: the messages.
        whole: of one tensor that is received in place.
    """

    parts: dict[int, list[tuple[int, Tensor, tuple[Tensor, int] | None]]]
    pending: list[Pending]
    whole: Tensor | None


SlicesOf = Callable[[int, int, bool], Sequence[PeerSlice]]
"""By the number of a tensor, the microbatch, and whether of gradients: with whom this rank exchanges what."""


@dataclass(eq=False)
class BoundaryMessages:
    """What a stage on this rank exchanges with the one before or behind, for batches of one shape.

    Args:
        where: the stage, for errors.
        wires: what crosses.
        slices: of this rank's part of each.
        links: to other ranks.
        tag_of: of its messages.
        samples: of this rank's share of each microbatch, which outputs are checked for; None for no check.
    """

    where: str
    wires: Sequence[TensorSpec]
    slices: SlicesOf
    links: Messenger
    tag_of: TagOf
    samples: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Nothing is on its way."""
        self._arrivals: dict[tuple[int, bool], _Arrival] = {}

    def peers(self, microbatches: int) -> set[int]:
        """With whom it exchanges something in a batch."""
        ways = ((m, back) for m in range(microbatches) for back in (False, True))
        return {peer for way in ways for peer in self._parcels(*way)}

    def receive(self, microbatch: int, *, back: bool) -> None:
        """Post the receives of this rank's part of a microbatch's tensors, or (`back`) of their gradients."""
        tag, what = self.tag_of(0, microbatch, back), "gradient" if back else "input"
        arrival = self._arrivals[microbatch, back] = _Arrival({}, [], self._in_place(microbatch, back))
        for peer, pieces in self._parcels(microbatch, back).items():
            sizes = [(self.wires[number], part.stop - part.start) for number, part in pieces]
            if arrival.whole is not None:
                views = [sizes[0][0].narrowed(arrival.whole, pieces[0][1].start, pieces[0][1].stop)]
                buffer = as_bytes(views[0])
            else:
                lengths = [wire.bytes_of(entries) for wire, entries in sizes]
                buffer = torch.empty(sum(lengths), dtype=torch.uint8, device=self.links.device)
                views = [
                    sharing(raw.view(wire.dtype).view(wire.shape_of(entries)))
                    for raw, (wire, entries) in zip(torch.split(buffer, lengths), sizes, strict=True)
                ]
            told: Tensor | None = None
            if back and self.links.device != HOST:
                told, head = torch.empty(len(pieces), dtype=torch.bool), self.tag_of(1, microbatch, back)
                arrival.pending.append(self.links.receive(told, peer, head, what=what, microbatch=microbatch))
            for at, ((number, part), view) in enumerate(zip(pieces, views, strict=True)):
                said = None if told is None else (told, at)
                arrival.parts.setdefault(number, []).append((part.start, view, said))
            pending = self.links.receive(buffer, peer, tag, what=what, microbatch=microbatch)
            arrival.pending.append(pending)

    def arrived(self, microbatch: int, *, back: bool) -> Sequence[Tensor | None]:
        """What was received, once it is here, one for each tensor; None for a gradient that there is not.

        A gradient that some ranks have and others not is zero where it is not.
        """
        arrival = self._arrivals.pop((microbatch, back))
        wait(arrival.pending)
        found: list[Tensor | None] = []
        for number, wire in enumerate(self.wires):
            parts = sorted(arrival.parts.get(number, ()), key=lambda it: it[0])
            views = [view for _, view, _ in parts]
            missing = [
                back and (is_absent(view) if said is None else not said[0][said[1]])
                for _, view, said in parts
            ]
            if all(missing):
                found.append(None)
                continue
            for view, lacks in zip(views, missing, strict=True):
                if lacks:
                    view.zero_()
            if arrival.whole is not None:
                found.append(arrival.whole)
            else:  # nothing is copied where one part is all
                found.append(views[0] if wire.dim is None or len(views) == 1 else torch.cat(views, wire.dim))
        return found

    def send(self, microbatch: int, tensors: Sequence[Tensor | None], *, back: bool) -> list[Pending]:
        """Begin to send what a pass made, one for each tensor that crosses.

        Raises:
            PartitionError: a tensor is not of the shape that its samples should give.
        """
        if not back and self.samples is not None:
            self._check(tensors, self.samples[microbatch])
        words = f"sending the {'gradient' if back else 'output'}"
        tag = self.tag_of(0, microbatch, back)
        sent = []
        for peer, pieces in self._parcels(microbatch, back).items():
            if back and self.links.device != HOST:
                told, head = (
                    [tensors[number] is not None for number, _ in pieces],
                    self.tag_of(1, microbatch, back),
                )
                sent.append(
                    self.links.send(torch.tensor(told), peer, head, what=words, microbatch=microbatch)
                )
            each = ((self.wires[number], tensors[number], part) for number, part in pieces)
            message = packed(each, self.links.device)
            sent.append(self.links.send(message, peer, tag, what=words, microbatch=microbatch))
        return sent

    def _crossing(self, back: bool) -> list[int]:
        """Which tensors do: of gradients those that have some."""
        return [number for number, it in enumerate(self.wires) if it.needs_gradient or not back]

    def _in_place(self, microbatch: int, back: bool) -> Tensor | None:
        """Memory for a tensor that comes alone, of whose first dimension peers have slices; else None."""
        numbers = self._crossing(back)
        if len(numbers) != 1 or self.wires[numbers[0]].dim != 0:
            return None
        length = max(it.stop for it in self.slices(numbers[0], microbatch, back))
        wire = self.wires[numbers[0]]
        return torch.empty(wire.shape_of(length), dtype=wire.dtype, device=self.links.device)

    def _parcels(self, microbatch: int, back: bool) -> dict[int, list[tuple[int, PeerSlice]]]:
        """By peer what goes there or comes from there, in the order of the message."""
        found: dict[int, list[tuple[int, PeerSlice]]] = {}
        for number in sorted(self._crossing(back), key=lambda it: -self.wires[it].dtype.itemsize):
            for part in self.slices(number, microbatch, back):
                found.setdefault(part.peer, []).append((number, part))
        return found

    def _check(self, tensors: Sequence[Tensor | None], samples: int) -> None:
        for wire, tensor in zip(self.wires, tensors, strict=True):
            assert tensor is not None, "outputs there are"
            shape = wire.shape_of(samples)
            if tuple(tensor.shape) != shape:
                raise PartitionError(
                    f"{self.where}: {samples} samples must give shape {list(shape)}, in proportion to "
                    f"others, got {described(tensor)}"
                )
