"""Torch's collectives on a process group "synth", in all their forms.

Each goes to the group's `Communicator` in its turn, if schedules serve its tensors; else, once the ranks
agree on it, to the inner gloo, or at once to what serves tensors on other devices. Both ways are at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ScatterOptions,
)

from arborcast.backends.errors import ExecutionError
from arborcast.backends.group.arguments import (
    are_plain_alike,
    bytes_of_parts,
    filled,
    fits,
    fits_single,
    flattened,
    is_one_plain,
    joined,
    listed,
    op_of,
    reduce_options,
    rooted,
    scatter_options,
    serves,
    spread,
    written,
)
from arborcast.backends.group.communicator import Communicator
from arborcast.backends.group.membership import Membership
from arborcast.backends.group.profiling import event_of
from arborcast.backends.group.work import WorkQueue
from arborcast.backends.tensors.torch_compat import outside_compilers
from arborcast.backends.tensors.torch_reduction import name_of
from arborcast.synth.collective import Kind


@dataclass(frozen=True, slots=True)
class Form:
    """A form of a call.

    Attributes:
        kind: of the collective, as counters and disagreements name it.
        method: of a backend of torch that does it.
        title: as torch's profilers name it, behind the backend's.
    """

    kind: Kind
    method: str
    title: str


ALL_REDUCE = Form(Kind.ALLREDUCE, "allreduce", "all_reduce")
BROADCAST = Form(Kind.BROADCAST, "broadcast", "broadcast")
ALL_GATHER = Form(Kind.ALLGATHER, "allgather", "all_gather")
REDUCE_SCATTER = Form(Kind.REDUCE_SCATTER, "reduce_scatter", "reduce_scatter")
ALL_TO_ALL = Form(Kind.ALLTOALL, "alltoall_base", "all_to_all")
REDUCE = Form(Kind.REDUCE, "reduce", "reduce")
GATHER = Form(Kind.GATHER, "gather", "gather")
SCATTER = Form(Kind.SCATTER, "scatter", "scatter")
BARRIER = Form(Kind.CUSTOM, "barrier", "barrier")
"""Where a call has several forms, that of lists of tensors."""

_UNSET = timedelta(0)
_NOTHING = nullcontext()


@outside_compilers
class GroupCollectives(dist.ProcessGroup):
    """The collectives of a group that `SynthGroup` makes and ends."""

    _member: Membership
    _communicator: Communicator
    _queue: WorkQueue
    _devices: Set[str]
    _delegated: Counter[Kind]
    _begun_calls: int

    def _gloo(self) -> Any:
        """The inner gloo, which C++ knows from now on."""
        raise NotImplementedError

    def _break(self, reason: str) -> None:
        """Make everything fail from now on."""
        raise NotImplementedError

    # Nothing that torch's trampoline knows (allreduce, broadcast, allgather, reduce_scatter, the coalesced
    # ones, all_to_all_single, barrier, send, recv) may go to `super()` or be left to it: it holds the GIL
    # while it takes gloo's mutex, and gloo's threads, which release tensors, take them in reverse: deadlock.

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Combine the tensors of all ranks, in place."""
        tensors, op = listed(tensors), op_of(opts)
        if not (is_one_plain(tensors, self._devices) and serves(op, tensors[0])):
            return self._delegate(ALL_REDUCE, tensors, (tensors, reduce_options(op, opts)), opts=opts, op=op)

        def run() -> None:
            with written(tensors[0]) as flat:
                self._communicator.allreduce(flat, op)

        return self._submit(ALL_REDUCE, run, tensors, tensors, opts, timeout)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Combine several tensors of all ranks, in place, as one message."""
        op = op_of(opts)
        if not (are_plain_alike(tensors, self._devices) and serves(op, tensors[0])):
            options = AllreduceCoalescedOptions()
            options.reduceOp = op
            form = replace(ALL_REDUCE, method="allreduce_coalesced")
            return self._delegate(form, tensors, (tensors, options), opts=opts, op=op)
        if len(tensors) == 1:
            return self.allreduce(tensors, opts)

        def run() -> None:
            together = torch.cat([flattened(tensor) for tensor in tensors])
            self._communicator.allreduce(together, op)
            spread(together, tensors)

        return self._submit(ALL_REDUCE, run, list(tensors), tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Fill the tensor on all ranks with the root's."""
        tensors = listed(tensors)
        if not isinstance(opts, BroadcastOptions):
            opts = rooted(BroadcastOptions, opts or 0)
        root = opts.rootRank
        is_usual = opts.rootTensor == 0 and 0 <= root < self.size()
        if not (is_one_plain(tensors, self._devices) and is_usual):
            return self._delegate(BROADCAST, tensors, (tensors, opts), opts=opts, root=root)

        def run() -> None:
            # Only bits travel, so that every type does.
            with written(tensors[0]) as flat:
                self._communicator.broadcast(flat, root)

        return self._submit(BROADCAST, run, tensors, tensors, opts, timeout)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gather the tensors of all ranks on all ranks, each in a tensor of its own."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [list(outputs)], [inputs]
        opts = opts if isinstance(opts, AllgatherOptions) else AllgatherOptions()
        if not (
            is_one_plain(inputs, self._devices) and len(outputs) == 1 and self._fits(outputs[0], inputs[0])
        ):
            return self._delegate(
                ALL_GATHER, inputs, (outputs, inputs, opts), opts=opts, result=outputs, are_alike=False
            )

        def run() -> None:
            with filled(outputs[0]) as together:
                self._communicator.allgather(together, flattened(inputs[0]))

        return self._submit(ALL_GATHER, run, outputs, inputs, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """The same for several tensors of each rank; never by schedules."""
        opts = opts or AllgatherOptions()
        form = replace(ALL_GATHER, method="allgather_coalesced")
        return self._delegate(form, inputs, (outputs, inputs, opts), opts=opts, result=outputs)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        """Gather the tensors of all ranks on all ranks, one after another in one tensor."""
        return self.all_gather_single_coalesced([output], [given], opts)

    _allgather_base = all_gather_single  # type: ignore[assignment]

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """The same for several pairs of tensors."""
        opts = opts or AllgatherOptions()
        pairs = list(zip(outputs, inputs, strict=False))
        if len(outputs) == len(inputs) and all(self._fits_single(*pair) for pair in pairs):
            return self._submit(ALL_GATHER, lambda: self._gather_pairs(pairs), list(outputs), inputs, opts)
        if len(outputs) != len(inputs) or (len(pairs) > 1 and self._is_on_gpu(inputs)):
            self._gloo()
            return super().allgather_into_tensor_coalesced(outputs, inputs, opts)
        form = replace(ALL_GATHER, method="_allgather_base")
        calls = [(*pair, opts) for pair in pairs]
        return self._delegate(form, inputs, *calls, opts=opts, result=outputs, are_alike=False)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def _gather_pairs(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for output, given in pairs:
            with written(output) as flat:
                self._communicator.allgather(flat, flattened(given))

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Combine a tensor per rank of all ranks and give each rank its own."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [list(inputs)]
        op = op_of(opts)
        plain = (
            is_one_plain(outputs, self._devices) and len(inputs) == 1 and self._fits(inputs[0], outputs[0])
        )
        if not (plain and serves(op, outputs[0])):
            arguments = outputs, inputs, scatter_options(op, opts)
            return self._delegate(
                REDUCE_SCATTER, outputs, arguments, opts=opts, op=op, result=outputs, are_alike=plain
            )

        def run() -> None:
            self._scatter_pairs([(outputs[0], joined(inputs[0]))], op)

        return self._submit(REDUCE_SCATTER, run, outputs, inputs[0], opts, timeout)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        """Combine the tensors of all ranks and give each rank its block."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """The same for several pairs of tensors."""
        op = op_of(opts)
        pairs = list(zip(outputs, inputs, strict=False))
        fit = len(outputs) == len(inputs) and all(self._fits_single(given, output) for output, given in pairs)
        if fit and all(serves(op, output) for output in outputs):
            results = list(outputs)
            return self._submit(REDUCE_SCATTER, lambda: self._scatter_pairs(pairs, op), results, inputs, opts)
        options = scatter_options(op, opts)
        if len(outputs) != len(inputs) or (len(pairs) > 1 and self._is_on_gpu(inputs)):
            self._gloo()
            return super().reduce_scatter_tensor_coalesced(outputs, inputs, options)
        form = replace(REDUCE_SCATTER, method="_reduce_scatter_base")
        calls = [(*pair, options) for pair in pairs]
        return self._delegate(form, inputs, *calls, opts=opts, op=op, result=outputs, are_alike=fit)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _scatter_pairs(self, pairs: Sequence[tuple[Tensor, Tensor]], op: dist.ReduceOp) -> None:
        for output, given in pairs:
            with written(output) as flat:
                self._communicator.reduce_scatter(flat, flattened(given), op)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_lengths: Any, given_lengths: Any, opts: Any = None
    ) -> dist.Work:
        """Exchange a part of each rank's tensor with each other rank."""
        opts = opts or AllToAllOptions()
        if are_plain_alike([output, given]):
            sent = bytes_of_parts(given, given_lengths, self.size())
            expected = bytes_of_parts(output, output_lengths, self.size())
            if sent is not None and expected is not None:

                def run() -> None:
                    with written(output) as flat:
                        self._exchange(flat, flattened(given), sent, expected)

                return self._submit(ALL_TO_ALL, run, [output], [given], opts)
        is_even = not output_lengths and not given_lengths
        arguments = output, given, output_lengths, given_lengths, opts
        return self._delegate(ALL_TO_ALL, [given], arguments, opts=opts, result=[output], are_alike=is_even)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """The same with a tensor for each rank."""
        opts = opts or AllToAllOptions()
        if len(outputs) == len(inputs) == self.size() and are_plain_alike([*outputs, *inputs]):
            sent, expected = ([it.numel() * it.itemsize for it in tensors] for tensors in (inputs, outputs))

            def run() -> None:
                with filled(outputs) as together:
                    self._exchange(together, joined(inputs), sent, expected)

            return self._submit(ALL_TO_ALL, run, outputs, list(inputs), opts)
        form = replace(ALL_TO_ALL, method="alltoall")
        return self._delegate(
            form, inputs, (outputs, inputs, opts), opts=opts, result=outputs, are_alike=False
        )

    def _exchange(self, output: Tensor, given: Tensor, sent: Sequence[int], expected: Sequence[int]) -> None:
        """An alltoall of flat tensors, whose bits travel."""
        elements = str(given.dtype).removeprefix("torch.")
        whole = output.view(torch.uint8), given.view(torch.uint8)
        self._communicator.alltoall(*whole, sent, expected, elements)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None) -> dist.Work:  # type: ignore[override]
        """Combine the tensors of all ranks on one, in place there."""
        if not isinstance(opts, ReduceOptions):
            opts = rooted(ReduceOptions, opts or 0)
            opts.reduceOp = op_of(op)
        tensors, op, root = listed(tensors), op_of(opts), opts.rootRank
        is_usual = opts.rootTensor == 0 and 0 <= root < self.size()
        if not (is_one_plain(tensors, self._devices) and serves(op, tensors[0]) and is_usual):
            return self._delegate(REDUCE, tensors, (tensors, opts), opts=opts, op=op, root=root)

        def run() -> None:
            with written(tensors[0]) as flat:
                self._communicator.reduce(flat, root, op)

        return self._submit(REDUCE, run, tensors, tensors, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Gather the tensors of all ranks on one, each in a tensor of its own."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [list(outputs)] if outputs else [], [inputs]
        opts = opts if isinstance(opts, GatherOptions) else rooted(GatherOptions, opts or 0)
        root = opts.rootRank
        if not (is_one_plain(inputs, self._devices) and self._has_list(root, outputs, inputs[0])):
            arguments = outputs, inputs, opts
            return self._delegate(GATHER, inputs, arguments, opts=opts, root=root, result=outputs)

        def run() -> None:
            with filled(outputs[0]) if self.rank() == root else _NOTHING as together:
                self._communicator.gather(together, flattened(inputs[0]), root)

        return self._submit(GATHER, run, outputs, inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Give each rank its tensor of one rank's."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [list(inputs)] if inputs else []
        opts = opts if isinstance(opts, ScatterOptions) else rooted(ScatterOptions, opts or 0)
        root = opts.rootRank
        if not (is_one_plain(outputs, self._devices) and self._has_list(root, inputs, outputs[0])):
            arguments = outputs, inputs, opts
            return self._delegate(SCATTER, outputs, arguments, opts=opts, root=root, result=outputs)

        def run() -> None:
            together = joined(inputs[0]) if self.rank() == root else None
            with written(outputs[0]) as flat:
                self._communicator.scatter(flat, together, root)

        return self._submit(SCATTER, run, outputs, outputs, opts)

    def _has_list(self, root: int, lists: Sequence[Sequence[Tensor]], one: Tensor) -> bool:
        """Whether the root, and nobody else, has a tensor like this one for each rank."""
        if self.rank() != root:
            return 0 <= root < self.size() and not any(lists)
        return len(lists) == 1 and self._fits(lists[0], one)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Complete when all ranks have called it and what they called before is complete, as gloo's does."""
        opts = opts or BarrierOptions()
        device = opts.device or torch.device("cpu")
        if device.type != "cpu":
            work: dist.Work = cast(Any, self._get_backend(device)).barrier(opts)
            return work
        return self._submit(BARRIER, self._communicator.barrier, None, [], opts)

    # ------------------------------------------------------------------ the two ways of a call

    @staticmethod
    def _is_on_gpu(tensors: Sequence[Tensor]) -> bool:
        return any(tensor.device.type != "cpu" for tensor in tensors)

    def _delegate(
        self,
        form: Form,
        tensors: Sequence[Tensor],
        *calls: tuple[Any, ...],
        opts: Any,
        op: dist.ReduceOp | None = None,
        root: int = -1,
        result: Any = None,
        are_alike: bool = True,
    ) -> dist.Work:
        """Have gloo do a call once the ranks agree on it, or at once what serves tensors of another device.

        Args:
            form: of the call.
            tensors: that it takes.
            calls: of the backend's method, each by its arguments, one after another.
            opts: torch's, as they were given.
            op: the reduction.
            root: where there is one.
            result: tensors that hold the result; `tensors` where None.
            are_alike: whether all ranks must have tensors of the same size.
        """
        self._delegated[form.kind] += 1
        self._refuse_after_failure()
        if self._is_on_gpu(tensors):
            backend = self._get_backend(tensors[0].device)
            (arguments,) = calls
            work: dist.Work = getattr(backend, form.method)(*arguments)
            return work
        is_dense = all(tensor.layout == torch.strided for tensor in tensors)
        count = sum(tensor.numel() for tensor in tensors) if is_dense and are_alike else 0
        words = [
            "" if is_dense else "sparse",
            str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            "" if op is None else name_of(op).lower(),
        ]
        elements = " ".join(filter(None, words))

        def run() -> None:
            for arguments in calls:
                start = partial(_start, form.method, arguments)
                self._communicator.delegate(form.kind, root, count, elements, start)

        return self._submit(form, run, tensors if result is None else result, tensors, opts)

    def _submit(
        self,
        form: Form,
        function: Callable[[], None],
        result: Any,
        inputs: Sequence[Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Have a call served in its turn; where the caller waits at once, in its own thread if that is free.

        Args:
            form: of the call.
            function: what serves it.
            result: tensors that hold the result.
            inputs: what profilers show the shapes of.
            opts: torch's: whether the caller waits (they say so since 2.13), and a timeout of this call.
            timeout: of this call, too.
        """
        entering = self._entering(result or inputs)
        within: AbstractContextManager[None] = _NOTHING
        event = event_of(f"synth:{form.title}", inputs)
        limit = timeout or getattr(opts, "timeout", None) or _UNSET
        if limit > _UNSET:
            within = self._member.within(limit.total_seconds())
        self._begun_calls += 1

        def run() -> None:
            try:
                with entering, within:
                    function()
            except BaseException:
                if self._member.failure is not None:
                    self._break(self._member.failure)
                raise
            finally:
                if event is not None:
                    event.end()

        if event is not None:
            event.end_with(run)
        waits = getattr(opts, "asyncOp", True) is False
        return (self._queue.execute if waits else self._queue.submit)(run, result)

    def _entering(self, result: Any) -> AbstractContextManager[None]:
        """For the thread that serves a call: what this one has done to its tensors comes before."""
        carrier = self._communicator.carrier
        if carrier is None:
            return _NOTHING
        while isinstance(result, Sequence) and result:  # lists of lists of tensors on one device
            result = result[0]
        if not isinstance(result, Tensor) or not carrier.holds(result):
            return _NOTHING
        return carrier.entering(result)

    def _refuse_after_failure(self) -> None:
        """Say the first reason: gloo would only say that its connections are closed."""
        if self._member.failure is not None:
            raise ExecutionError(f"rank {self.rank()}: an earlier call failed: {self._member.failure}")

    def _fits(self, many: Sequence[Tensor], one: Tensor) -> bool:
        return fits(many, one, self.size(), self._devices)

    def _fits_single(self, whole: Tensor, block: Tensor) -> bool:
        return fits_single(whole, block, self.size(), self._devices)


def _start(method: str, arguments: tuple[Any, ...], gloo: Any) -> Any:
    return getattr(gloo, method)(*arguments)
