"""What a stage does with the results of its forward passes, as its plan says: keep, recompute, or offload.

Recomputed segments are checkpoints (`torch.utils.checkpoint`), which begin again with the same random
numbers. Offload goes by `torch.autograd.graph.saved_tensors_hooks`: what autograd keeps of an offloaded layer
is copied to host memory, memory by memory (views of one are one), by a thread of its own while the layer
behind it runs, and back while that one runs backward. On CPU ranks host memory is other memory of the same
machine: the mechanism is the same, and only what autograd holds becomes less. On devices copies go to pinned
memory and back on a stream of their own, for which only that thread waits; it was never run on a GPU.

What a layer hands on counts as the next layer's, so that it stays or goes with that; what a stage takes in
stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from arborcast.pipeline.costs.saved_bytes import Segment, Segments, Treatment, units
from arborcast.pipeline.model.layered import Layered
from arborcast.pipeline.model.module_structure import flatten, several, storage_key
from arborcast.pipeline.run.boundary import check_overwritten
from arborcast.pipeline.run.devices import HOST
from arborcast.pipeline.run.initial_weights import Stages

Contexts: TypeAlias = Callable[[nn.Module], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""In which a checkpoint of a module runs forward, and again."""


class SegmentedStage(Stages):
    """The segments of a stage, one after another.

    Attributes:
        segments: of each of its modules.
    """

    def __init__(self, model: Layered, segments: Segments) -> None:
        super().__init__([model.divide(it.start, it.end) for it in segments])
        self.segments = segments

    def forward(self, *inputs: Tensor) -> Any:
        """What the last one returns."""
        *before, last = self.stages
        for module in before:
            inputs = several(module(*inputs))
        return last(*inputs)

    def begin_loss(self, labels: Sequence[Tensor], samples: int) -> None:
        """See `Segment.begin_loss` of traced models."""
        self.stages[-1].begin_loss(labels, samples)  # type: ignore[operator]

    def loss(self, outputs: Any, labels: Sequence[Tensor]) -> Tensor:
        """Likewise."""
        result: Tensor = self.stages[-1].loss(outputs, labels)  # type: ignore[operator]
        return result


def divided(model: Layered, segments: Segments) -> nn.Module:
    """The layers of a stage as a module; one of several segments knows them.

    Where some are offloaded, each layer that is not recomputed is a segment of its own.
    """
    parts = segments
    if any(it.treatment is Treatment.OFFLOAD for it in segments):
        parts = tuple(units(segments))
    if len(parts) == 1:
        return model.divide(parts[0].start, parts[0].end)
    return SegmentedStage(model, parts)


@dataclass(eq=False)
class TreatedPasses:
    """Forward passes of a stage in training that treat results as the plan says.

    Args:
        module: as `divided` gives it.
        segments: of the stage.
        contexts: of recomputed segments.

    Attributes:
        moved_bytes: of results that were offloaded so far.
    """

    module: nn.Module
    segments: Segments
    contexts: Contexts
    moved_bytes: int = 0

    def __post_init__(self) -> None:
        """Nothing is offloaded yet."""
        parts: list[nn.Module] = [self.module]
        if isinstance(self.module, SegmentedStage):
            parts, self.segments = list(self.module.stages), self.module.segments
        self._parts = list(zip(self.segments, parts, strict=True))
        self._overwrites: list[bool | None] = [None] * len(parts)  # whether a segment changes what it takes

    def forward(
        self, inputs: tuple[Tensor, ...], enter: Callable[..., tuple[Tensor, ...]], end: Callable[[Any], Any]
    ) -> Any:
        """Go through all segments.

        Args:
            inputs: of the stage.
            enter: `enter(again, *inputs)`, what the first segment takes of them; `again` in a checkpoint.
            end: what to make of the result of the last segment, and with it, such as a loss.
        """
        if all(it.treatment is not Treatment.OFFLOAD for it, _ in self._parts):
            return self._through(inputs, enter, end, None)
        stays = {storage_key(it) for it in (*self.module.parameters(), *self.module.buffers(), *inputs)}
        offloads = Offloads(stays)
        with torch.autograd.graph.saved_tensors_hooks(offloads.pack, _unpacked):
            made = self._through(inputs, enter, end, offloads)
            self.moved_bytes += offloads.end()
        return made

    def _through(
        self,
        inputs: tuple[Tensor, ...],
        enter: Callable[..., tuple[Tensor, ...]],
        end: Callable[[Any], Any],
        offloads: Offloads | None,
    ) -> Any:
        values, made, last = inputs, None, len(self._parts) - 1
        for index, (segment, module) in enumerate(self._parts):
            again = segment.treatment is Treatment.RECOMPUTE
            begin = partial(enter, again) if index == 0 else None
            run = partial(self._run, index, begin, end if index == last else several)
            if again:
                contexts = partial(self.contexts, module)
                made = checkpoint(run, *values, use_reentrant=False, context_fn=contexts)
            else:
                made = run(*values)
            if offloads is not None:
                offloads.behind(segment, values, made)
            values = several(made)
        return made

    def _run(
        self,
        index: int,
        enter: Callable[..., tuple[Tensor, ...]] | None,
        end: Callable[[Any], Any],
        *inputs: Tensor,
    ) -> Any:
        """A segment; if it is to begin with the same values again, on copies of what it changes in place."""
        segment, module = self._parts[index]
        if enter is not None:
            return end(module(*enter(*inputs)))
        if segment.treatment is not Treatment.RECOMPUTE or self._overwrites[index] is False:
            return end(module(*inputs))
        given = [it.clone() for it in inputs]
        before = [it._version for it in given]
        made = end(module(*given))
        overwritten = [it._version != version for it, version in zip(given, before, strict=True)]
        check_overwritten(f"layers [{segment.start}, {segment.end})", inputs, overwritten)
        self._overwrites[index] = any(overwritten)
        return made


class OffloadedMemory:
    """One memory that autograd keeps, as bytes on the device or on the host."""

    __slots__ = ("__weakref__", "device", "host", "there_is", "work")

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.untyped_storage().nbytes() // tensor.itemsize
        whole = tensor.detach().as_strided((size,), (1,), 0)
        self.there_is: Tensor | None = whole.view(torch.uint8)
        self.device = tensor.device
        self.host: Tensor | None = None
        self.work: Future[Tensor] | None = None

    def send(self) -> None:
        """Begin to copy it to the host, behind all that was begun on the device."""
        assert self.there_is is not None
        begun = None
        if self.device != HOST:
            begun = torch.accelerator.current_stream(self.device).record_event()
        self.work = _copier().submit(_copied, [self.there_is], HOST, begun)

    def sent(self) -> int:
        """Wait for that, and let go of it on the device; its bytes."""
        assert self.work is not None
        self.host, self.work, self.there_is = self.work.result(), None, None
        return self.host.numel()

    def call(self) -> None:
        """Begin to copy it back, unless that has begun."""
        if self.host is not None and self.work is None:
            self.work = _copier().submit(_copied, [self.host], self.device, None)

    def there(self) -> Tensor:
        """On the device."""
        if self.there_is is None:
            self.call()
            assert self.work is not None
            self.there_is = self.work.result()
            if self.device != HOST:  # made on the stream of copies, used on this one
                self.there_is.record_stream(torch.accelerator.current_stream(self.device))
            self.host, self.work = None, None
        return self.there_is


class Offloads:
    """Of one forward pass, what autograd keeps.

    Args:
        stays: memory that does not leave.
    """

    def __init__(self, stays: set[int]) -> None:
        self._stays, self._moved_bytes = stays, 0
        self._held: dict[int, OffloadedMemory] = {}  # by memory, those on the device
        self._seen: set[int] = set()  # kept by the layer that runs
        self._sending: list[OffloadedMemory] = []  # of the layer before
        self._before: list[weakref.ref[OffloadedMemory]] = []  # likewise, to be called back

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps instead of a tensor."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return tensor
        key = storage_key(tensor)
        if key in self._stays:
            return tensor
        if key not in self._held:
            self._held[key] = OffloadedMemory(tensor)
        self._seen.add(key)
        return self._held[key], tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def behind(self, segment: Segment, inputs: Sequence[Tensor], made: Any) -> None:
        """A segment has run: what is sent of the one before it has gone, and its own begins to go."""
        self._wait()
        outputs, _ = flatten(made)
        self._call_before(outputs)
        if segment.treatment is Treatment.OFFLOAD:
            taken = {storage_key(it) for it in inputs}
            handed = {storage_key(it) for it in outputs}
            goes = [key for key in self._held if key in self._seen | taken and key not in handed]
            self._sending = [self._held.pop(key) for key in goes]
            self._before = [weakref.ref(it) for it in self._sending]
            for it in self._sending:
                it.send()
        self._seen.clear()

    def end(self) -> int:
        """Wait for the last copies, and leave to autograd what stays: it has `pack` as long as any value.

        Returns:
            Bytes that went to host memory.
        """
        self._wait()
        self._held.clear()
        return self._moved_bytes

    def _wait(self) -> None:
        for it in self._sending:
            self._moved_bytes += it.sent()
        self._sending = []

    def _call_before(self, outputs: Sequence[Tensor]) -> None:
        """Let the results of the segment before come back when this one begins its backward pass."""
        before, self._before = self._before, []

        def call(gradient: Tensor) -> None:
            for it in before:
                held = it()
                if held is not None:
                    held.call()

        if before:
            for output in outputs:
                if output.requires_grad:
                    output.register_hook(call)  # type: ignore[no-untyped-call]


def _unpacked(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    held, dtype, size, stride, offset = packed
    whole = held.there()
    values = whole[: whole.numel() - whole.numel() % dtype.itemsize].view(dtype)
    made: Tensor = values.as_strided(size, stride, offset)
    return made


def _copied(sources: list[Tensor], device: torch.device, begun: Any) -> Tensor:
    source = sources.pop()  # what executes may keep arguments for longer than the copy takes
    away = source.device if device == HOST else device
    if away == HOST:
        return torch.empty_like(source).copy_(source)
    stream = _stream(away)
    if begun is not None:
        stream.wait_event(begun)
    with stream:
        made = torch.empty_like(source, device=device, pin_memory=device == HOST)
        made.copy_(source, non_blocking=True)
    stream.synchronize()
    return made


@cache
def _stream(device: torch.device) -> torch.Stream:
    """Of copies from and to a device."""
    return torch.Stream(device)


@cache
def _copier() -> ThreadPoolExecutor:
    """Of this process: copies go one after another, as over one link."""
    return ThreadPoolExecutor(1, thread_name_prefix="offload")
