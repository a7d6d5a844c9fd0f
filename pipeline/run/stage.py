"""What one replica of a stage does with one microbatch: receive, compute, send.

It is a stage of torch.distributed.pipelining, which does the passes and keeps what lies between them. Ours is
all that torch ties to one rank per stage: who the peers are, what each of them gets, that a message is data
only. Private in torch 2.13.0: `_PipelineStageBase`, the names of its methods, and `_stage_meta`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.utils.checkpoint import checkpoint

from arborcast.pipeline.run.batch_norm import DeferredStatistics, statistics_once
from arborcast.pipeline.run.boundary import Boundaries, Wire
from arborcast.pipeline.run.links import Links, Pending
from arborcast.pipeline.run.parcels import Arrival, Parcel, packed, sharing
from arborcast.pipeline.run.place import Place
from arborcast.pipeline.run.recorder import Records

_FORWARD, _BACKWARD = 0, 1


class ReplicaStage(_PipelineStageBase):
    """A stage on this rank, for batches of one shape.

    Args:
        module: the layers.
        place: of this rank.
        boundaries: what crosses.
        sizes: samples of each microbatch.
        links: to the other stages.
        alone: a process group of this rank only: torch asks a group who it is.
        recorder: notes what is done when.
        in_flight: microbatches whose gradients may be on their way at once.
        first_tag: of its messages; the next `2 * len(sizes)` belong to batches of this shape alone, so that
            those of another one, which some rank was given, are not taken for them.
        differentiating: makes the context of backward passes.
        training: whether there are backward passes.
        reduce: called once after the last of them.
        deferred: the running statistics that wait for the end of the batch; None without.
    """

    def __init__(
        self,
        module: nn.Module,
        place: Place,
        boundaries: Boundaries,
        sizes: Sequence[int],
        links: Links,
        *,
        alone: dist.ProcessGroup,
        recorder: Records,
        in_flight: int,
        first_tag: int,
        differentiating: Callable[[], AbstractContextManager[Any]],
        training: bool,
        reduce: Callable[[], None],
        deferred: DeferredStatistics | None,
    ) -> None:
        stages = len(place.plan.stages)
        super().__init__(module, place.stage, stages, torch.device("cpu"), alone)
        self.group_rank, self.group_size = place.stage, stages
        self.chunks = len(sizes)
        self.has_backward = training
        self.place = place
        self.doing = "nothing yet"
        self.seeds: Sequence[int] = ()  # of the random numbers of each microbatch's passes
        self._boundaries = boundaries
        self._links = links
        self._recorder = recorder
        self._in_flight = in_flight
        self._first_tag = first_tag
        self._differentiating = differentiating
        self._before = [() if place.is_first else place.before(size) for size in sizes]
        self._behind = [() if place.is_last else place.behind(size) for size in sizes]
        self._reduce = reduce
        self._deferred = deferred
        self._recomputes = training and place.plan.recompute
        self._microbatch = 0
        self._arrivals: dict[tuple[int, int], tuple[Arrival, list[Pending]]] = {}
        self._outputs: dict[int, list[Pending]] = {}
        self._gradients: deque[list[Pending]] = deque()

    # ------------------------------------------------------------------ messages

    # Torch's runtime expects operations to start and to wait for. Both are done here instead, so that a
    # sent tensor is given back as soon as its microbatch is done with, not at the end of the step.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Post the receives of a microbatch's input."""
        self._post(fwd_chunk_id, _FORWARD, self._boundaries.taken, self._before[fwd_chunk_id])
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Post the receives of the gradient of a microbatch's output."""
        wires = _with_gradients(self._boundaries.given)
        self._post(bwd_chunk_id, _BACKWARD, wires, self._behind[bwd_chunk_id])
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send a microbatch's output."""
        outputs, _ = self.fwd_cache[fwd_chunk_id]
        self._outputs[fwd_chunk_id] = self._send(
            fwd_chunk_id, _FORWARD, self._boundaries.given, outputs, self._behind[fwd_chunk_id]
        )
        if not self.has_backward:
            del self.fwd_cache[fwd_chunk_id]
            self._wait_for_outputs_except(self._in_flight)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradient of a microbatch's input."""
        gradients = self.bwd_cache.pop(bwd_chunk_id)
        taken = self._boundaries.taken
        tensors = [it for it, wire in zip(gradients, taken, strict=True) if wire.needs_gradient]
        parcels = self._before[bwd_chunk_id]
        sent = self._send(bwd_chunk_id, _BACKWARD, _with_gradients(taken), tensors, parcels)
        self._gradients.append(sent)
        # Safe even where a send ends only when it is received: orders are checked with such sends.
        while len(self._gradients) > self._in_flight:
            _wait(self._gradients.popleft())
        return []

    def finish(self) -> None:
        """Wait for all that is still being sent."""
        self._wait_for_outputs_except(0)
        while self._gradients:
            _wait(self._gradients.popleft())

    def _post(self, microbatch: int, phase: int, wires: Sequence[Wire], parcels: Sequence[Parcel]) -> None:
        if not wires:
            return
        what = "gradient" if phase else "input"
        arrival = Arrival(wires, parcels[-1].stop, parcels)
        tag = self._first_tag + 2 * microbatch + phase
        pending = [
            self._links.receive(buffer, parcel.peer, tag, what=what, microbatch=microbatch)
            for buffer, parcel in zip(arrival.buffers, parcels, strict=True)
        ]
        self._arrivals[phase, microbatch] = arrival, pending

    def _arrived(self, microbatch: int, phase: int) -> Arrival:
        arrival, pending = self._arrivals.pop((phase, microbatch))
        _wait(pending)
        return arrival

    def _send(
        self,
        microbatch: int,
        phase: int,
        wires: Sequence[Wire],
        tensors: Sequence[Tensor | None],
        parcels: Sequence[Parcel],
    ) -> list[Pending]:
        if not wires:
            return []
        what = "sending the gradient" if phase else "sending the output"
        tag = self._first_tag + 2 * microbatch + phase
        return [
            self._links.send(
                packed(wires, tensors, parcel), parcel.peer, tag, what=what, microbatch=microbatch
            )
            for parcel in parcels
        ]

    def _wait_for_outputs_except(self, newest: int) -> None:
        while len(self._outputs) > newest:
            _wait(self._outputs.pop(next(iter(self._outputs))))

    # ------------------------------------------------------------------ passes

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """The forward pass of a microbatch."""
        self._microbatch, self.doing = fwd_chunk_id, f"forward pass of microbatch {fwd_chunk_id}"
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layers; torch calls it with the input."""
        torch.default_generator.manual_seed(self.seeds[self._microbatch])  # recomputation begins there again
        self.began_ns = time.perf_counter_ns()
        if self._recomputes:
            output = checkpoint(self._run, *args, use_reentrant=False, context_fn=self._contexts)
        else:
            output = self._run(*args)
        if not self.is_last:
            output = tuple(output) if isinstance(output, tuple) else output  # torch knows no named ones
            self.note_forward()
        return output

    def note_forward(self) -> None:
        """Record the forward pass that ends now; that of the last stage ends with the loss."""
        self._recorder.add("forward", self._microbatch, self.began_ns, time.perf_counter_ns())

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """The backward pass of a microbatch."""
        self._microbatch, self.doing = bwd_chunk_id, f"backward pass of microbatch {bwd_chunk_id}"
        outputs, inputs = self.fwd_cache[bwd_chunk_id]
        ends = [loss] if self.is_last else outputs
        # Torch keeps as many gradients of inputs as it finds here.
        self._stage_meta.inputs = (None,) * len(inputs)  # type: ignore[assignment]
        if any(isinstance(end, Tensor) and end.requires_grad for end in ends):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        else:  # frozen layers from the first on: nothing to differentiate, and torch would raise
            del self.fwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = (None,) * len(inputs)
        # Who sent a gradient back has received the output.
        _wait(self._outputs.pop(bwd_chunk_id, []))
        if self.is_first:
            del self.bwd_cache[bwd_chunk_id]

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Differentiate; torch calls it once the gradient of the output is there."""
        inputs = bwd_kwargs["input_values"]
        if not self.is_last:
            pairs = zip(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], strict=True)
            ends = [(output, gradient) for output, gradient in pairs if gradient is not None]
            if not ends:  # nobody used what this stage made
                return (None,) * len(inputs), None
            outputs, gradients = zip(*ends, strict=True)
            bwd_kwargs = bwd_kwargs | {"stage_output": outputs, "output_grads": gradients}
        with self._recorder.measure("backward", self._microbatch), self._differentiating():
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """All gradients of this rank are there."""
        assert grad_scale_factor == 1, "losses are weighted instead"
        self.doing = f"summing gradients over replicas {', '.join(map(str, sorted(self.place.ranks)))}"
        self._reduce()

    def _run(self, *inputs: Tensor) -> Any:
        if self._boundaries.overwrites and (self._recomputes or self.is_first):  # the batch is the caller's
            return self.submod(*(tensor.clone() for tensor in inputs))
        if self.is_first:
            return self.submod(*inputs)
        return self.submod(*(_entered(tensor) for tensor in inputs))

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), statistics_once(self.submod, self._deferred)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        tensors = self._arrived(fwd_chunk_id, _FORWARD).tensors()
        for tensor, wire in zip(tensors, self._boundaries.taken, strict=True):
            tensor.requires_grad_(wire.needs_gradient and self.has_backward)
        return tensors

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        gradients = iter(self._arrived(bwd_chunk_id, _BACKWARD).gradients())
        return tuple(next(gradients) if wire.needs_gradient else None for wire in self._boundaries.given)

    # ------------------------------------------------------------------ what torch would exchange first

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: shapes are known."""

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def _create_grad_recv_info(self, act_send_info: dict[Any, Any]) -> tuple[Any, ...]:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []


class _Enter(torch.autograd.Function):
    """Identity on the same memory, so that a layer may change what the stage received in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return sharing(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _entered(tensor: Tensor) -> Tensor:
    if not tensor.requires_grad:
        return tensor
    entered: Tensor = _Enter.apply(tensor)  # type: ignore[no-untyped-call]
    return entered


def _with_gradients(wires: Sequence[Wire]) -> tuple[Wire, ...]:
    return tuple(wire for wire in wires if wire.needs_gradient)


def _wait(pending: Sequence[Pending]) -> None:
    for message in pending:
        message.wait()
