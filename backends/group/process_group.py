"""The process group "synth": gloo, except that the great collectives run synthesized schedules.

All collectives that torch has, in all their forms, go to a `Communicator`, one after another on a thread of
their own, and return work with a future as gloo's does. Whatever schedules do not serve (sparse tensors,
sums of complex numbers, other devices' tensors) goes to an inner gloo.

This is the one module that knows how torch, from 2.11 to 2.15, lets a process group be written in Python.
What goes to `super()` goes by the names that all of these have.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # keeps the default group that it finds: while there is none
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
    HOST,
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
from arborcast.backends.group.communicator import SERVED, Communicator
from arborcast.backends.group.history import write_flights
from arborcast.backends.group.inner_gloo import InnerGloo
from arborcast.backends.group.membership import Membership
from arborcast.backends.group.monitored_barrier import MonitoredBarrier
from arborcast.backends.group.posting import ANYBODY, CablePosting, Posting
from arborcast.backends.group.profiling import ObservedWork, event_of
from arborcast.backends.group.work import WorkQueue
from arborcast.backends.options import Options
from arborcast.backends.schedules.group_fabric import GroupFabric
from arborcast.backends.tensors.torch_compat import (
    PeerCalls,
    PrefixStore,
    Store,
    has_nccl,
    new_holder_of_names,
    new_nccl,
    outside_compilers,
)
from arborcast.backends.tensors.torch_reduction import name_of
from arborcast.synth.collective import Kind

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""How long a group that is destroyed waits for calls in flight."""

_announced: set[str] = set()
"""What this process has said of fabrics."""

_groups: weakref.WeakSet[SynthGroup] = weakref.WeakSet()


def _leave_groups() -> None:
    """At exit: what `destroy_process_group` does, for groups of which nobody has called it."""
    for group in list(_groups):
        group.leave()


atexit.register(_leave_groups)


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
class SynthGroup(dist.ProcessGroup):
    """A process group on CPU tensors.

    Args:
        store: of this group.
        rank: this rank in the group.
        size: ranks of the group.
        timeout: after which a call without progress fails.
        options: where None, what the environment says.
        global_ranks: of the group's ranks.
        world_size: ranks of the default group.
        world: the default group, where that is one of this class and another.
        devices: whose tensors it is to serve by schedules, where it can; None for all. Others go to gloo or
            NCCL.
        nccl_options: for the NCCL that serves what schedules do not.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        options: Options | None = None,
        global_ranks: Sequence[int],
        world_size: int,
        world: SynthGroup | None = None,
        devices: Set[str] | None = None,
        nccl_options: Any = None,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stubs know the next version's
        self._member: Membership = Membership(
            store,
            rank,
            size,
            options=options,
            global_ranks=global_ranks,
            world_size=world_size,
            timeout_s=timeout.total_seconds(),
            world=None if world is None else world._member,
        )
        member = self._member
        self._communicator: Communicator = Communicator(member)
        self._store = store = member.store
        self._make_posting(timeout)
        types = dist.ProcessGroup.BackendType
        self._set_default_backend(types.GLOO)
        cast(Any, self)._register_backend(torch.device("cpu"), types.GLOO)  # none yet
        self._register_backend(torch.device("meta"), types.CUSTOM, new_holder_of_names(rank, size))
        self._nccl: Any = None
        if has_nccl():
            self._nccl = new_nccl(PrefixStore("nccl", store), rank, size, timeout, nccl_options)
            self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, self._nccl)
        self._peer_calls = PeerCalls(self._nccl)
        self._delegated: Counter[Kind] = Counter()
        self._devices = HOST | {"cuda"} if self._member.options.p2p == "cuda" else HOST
        if devices is not None:
            self._devices &= devices
        self._queue = WorkQueue("synth")
        member.engine.when_begun = self._queue.leave
        self._begun_calls = 0
        self._monitored = MonitoredBarrier(PrefixStore("monitored", store), rank, size, self._answer)
        self._process = os.getpid()
        _groups.add(self)
        is_whole = len(global_ranks) == world_size
        if global_ranks[rank] == 0 and size > 1:
            _announce(self._member.fabric, is_whole)
        if is_whole and world is None:  # a further group finds what this one has kept
            for kind in self._member.options.prepare:
                if Kind(kind) in SERVED:
                    self._communicator.prepare(kind, waits=False)
        else:
            self._communicator.agree_on_start()

    def _make_posting(self, timeout: timedelta) -> None:
        """Have what carries sends and receives, and what schedules do not serve."""
        rank, size, ends = self.rank(), self.size(), self._member.cables
        store = PrefixStore(f"life/{self._member.life}", self._member.own_store)
        self._inner = InnerGloo(PrefixStore("inner", store), rank, size, timeout)
        self._knows_gloo = self._is_broken = False
        self._peers: Posting | CablePosting = Posting(self._inner, set(range(size)) - {rank})
        if ends is not None:  # of several cables of a rank they take the fastest
            fastest = {peer: ends[peer] for peer in ends if peer < size}
            self._peers = CablePosting(PrefixStore("cables", store), rank, fastest, timeout)
        self._member.engine.while_waiting = self._answer

    def _answer(self) -> None:
        self._peers.answer()

    # ------------------------------------------------------------------ what torch asks of a group

    # Nothing that torch's trampoline knows (allreduce, broadcast, allgather, reduce_scatter, the coalesced
    # ones, all_to_all_single, barrier, send, recv) may go to `super()` or be left to it: it holds the GIL
    # while it takes gloo's mutex, and gloo's threads, which release tensors, take them in reverse: deadlock.

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """What `torch.distributed.get_backend` says."""
        return "synth"

    def _get_backend(self, device: torch.device) -> Any:
        """What serves tensors of a device where schedules do not; gloo is made when it is first asked for."""
        if torch.device(device).type == "cpu":
            return self._gloo()
        return super()._get_backend(device)

    def _gloo(self) -> Any:
        """The inner gloo, which C++ knows from now on."""
        gloo = self._inner.get()
        if not self._knows_gloo:
            gloo.timeout_changed = self.set_timeout
            name, description = self.group_name, self.group_desc  # which C++ asks of any one backend
            self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            self._set_group_name(name)
            self._set_group_desc(description)
            self._knows_gloo = True
        return gloo

    def get_group_store(self) -> Store:
        """The store that the group was made with."""
        return self._store

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

    def send(self, tensors: Any, dst: int, tag: int) -> dist.Work:
        """Send a tensor to one rank."""
        return self._with_peer(tensors, "send", dst, tag)

    def recv(self, tensors: Any, src: int, tag: int) -> dist.Work:
        """Receive a tensor from one rank."""
        return self._with_peer(tensors, "recv", src, tag)

    def recv_anysource(self, tensors: Any, tag: int) -> dist.Work:
        """Receive a tensor from any rank."""
        return self._begin("recv_anysource", "recvAnySource", ANYBODY, tensors, tag)

    def _with_peer(self, tensors: Sequence[Tensor], method: str, peer: int, tag: int) -> dist.Work:
        if self._nccl is None or not self._is_on_gpu(tensors):
            return self._begin(method, method, peer, tensors, tag)
        self._refuse_after_failure()
        return cast(dist.Work, self._peer_calls.call(method, tensors, peer, tag))  # torch takes None as well

    def _begin(self, method: str, title: str, peer: int, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        """Have the backend do what only some ranks take part in."""
        self._refuse_after_failure()
        event = event_of(f"synth:{title}", tensors)
        work: dist.Work
        if self._is_on_gpu(tensors):
            arguments = (tensors, tag) if peer == ANYBODY else (tensors, peer, tag)
            work = getattr(self._get_backend(tensors[0].device), method)(*arguments)
        else:
            work = self._peers.post(method, tensors, peer, tag, self._member.timeout_s)
        return work if event is None else ObservedWork(work, event)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Return when all ranks have called it; where some do not come, every rank hears which.

        Args:
            timeout: how long rank 0 waits; the group's where None.
            wait_all_ranks: whether to name all that do not come, and not only the first.
        """
        limit_s = self._member.timeout_s if timeout is None else timeout.total_seconds()
        self._refuse_after_failure()
        self._monitored.wait(limit_s, name_all=wait_all_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        """After how long without progress calls fail from now on; torch's `_set_pg_timeout` does the same."""
        self._communicator.set_timeout(timeout.total_seconds())
        self._inner.set_timeout(timeout)
        self._peers.set_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: all ranks begin with 0."""

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives have been called."""
        return self._begun_calls

    def abort(self) -> None:
        """Make all ranks' calls fail, those in flight too."""
        self._break(f"rank {self.rank()} aborted the group")
        if self._nccl is not None:
            self._nccl.abort()
        self._queue.close("the group was aborted", wait_s=0)

    def shutdown(self) -> None:
        """Finish what is in flight and end the connections; `destroy_process_group` calls it."""
        self._end()
        if self._nccl is not None:
            self._nccl.shutdown()
        if self._communicator.carrier is not None:
            self._communicator.carrier.close()

    def leave(self) -> None:
        """The same when the process ends; not in a child that it forked, whose locks nobody releases.

        NCCL sees to its own end, as it does for torch's groups.
        """
        if os.getpid() == self._process:
            self._end()

    def _end(self) -> None:
        _groups.discard(self)
        self._peers.end("the group was destroyed")
        self._peers.join()
        if self._queue.close("the group was destroyed", wait_s=CLOSE_S):
            self._communicator.close()
        else:
            self._break(f"rank {self.rank()} destroyed the group with calls in flight")

    # ------------------------------------------------------------------ what ours has beyond that

    def explain(self, nbytes: int, kind: Kind | str = Kind.ALLREDUCE, root: int = 0) -> str:
        """What serves calls of that size, in one line; see `Communicator.explain`."""
        return self._communicator.explain(nbytes, kind, root)

    def counters(self) -> dict[str, dict[str, int | float]]:
        """What this rank's calls of each collective were until now.

        "schedule" and "gloo" count calls that could be either, "handed over" those that schedules do not
        serve at all. Of the first two, "bytes" of the whole buffers, "seconds" from the begin of each call to
        its end on this rank, late ranks waited for; and "share", of calls by schedules the time that the
        bound of the fabric would need over that.
        """
        counts = self._communicator.history.counters()
        for kind, calls in self._delegated.items():
            counts.setdefault(str(kind), {"schedule": 0, "gloo": 0})["handed over"] = calls
        return counts

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Write the last calls of this process's groups, and what each waits for, as JSON; from any thread.

        Where TORCH_FR_DUMP_TEMP_FILE is set, a group that fails or is aborted does it by itself.

        Raises:
            InputError: the file cannot be written.
        """
        write_flights(Path(path))

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Write what the calls of the block send, receive and add here, for Perfetto or chrome://tracing.

        Every rank that does so needs a path of its own. Calls take somewhat longer meanwhile.

        Raises:
            InputError: the file cannot be written.
        """
        tracer = self._queue.submit(self._communicator.begin_trace).result()
        try:
            yield
        finally:
            with suppress(ExecutionError):  # of a group that has ended meanwhile
                self._queue.submit(self._communicator.end_trace).wait()
            tracer.write(Path(path))

    def avoid(self, first: int, second: int) -> None:
        """Use the link between two ranks of the fabric no more; all ranks make this call."""
        self._queue.submit(lambda: self._communicator.avoid(first, second), None).wait()

    def go_on(self) -> None:
        """After a call has failed because a cable was lost: join again along the others; all ranks call it.

        What calls since the last one that succeeded everywhere have left in tensors is undefined.

        Raises:
            InputError: links have no addresses, or those that are left do not join all ranks.
            ExecutionError: a rank has ended, or did not come in time.
        """
        self._queue.submit(self._communicator.go_on, None).wait()
        self._make_posting(timedelta(seconds=self._member.timeout_s))

    def prepare(self, kind: Kind | str, root: int = 0) -> None:
        """Find the schedules of a collective now; all ranks make this call."""
        self._queue.submit(lambda: self._communicator.prepare(kind, root), None).wait()

    @property
    def options(self) -> Options:
        """What the group was told, by code and by the environment."""
        return self._member.options

    @property
    def fabric(self) -> str:
        """The links among the ranks of this group, and where that knowledge comes from, in one line."""
        return str(self._member.fabric)

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

    def _break(self, reason: str) -> None:
        """Make everything fail from now on, what gloo does as well: nobody may wait for who has given up."""
        if not self._is_broken:
            self._is_broken = True
            self._communicator.abort(reason)
            self._peers.end(reason)
            self._inner.end()
            self._peers.fail()

    def _fits(self, many: Sequence[Tensor], one: Tensor) -> bool:
        return fits(many, one, self.size(), self._devices)

    def _fits_single(self, whole: Tensor, block: Tensor) -> bool:
        return fits_single(whole, block, self.size(), self._devices)


def _start(method: str, arguments: tuple[Any, ...], gloo: Any) -> Any:
    return getattr(gloo, method)(*arguments)


def _with_gloo(name: str) -> Callable[..., Any]:
    """A method of torch's group that C++ hands to the backend, which must be there for it."""
    theirs = getattr(dist.ProcessGroup, name)

    def method(self: SynthGroup, *arguments: Any, **named: Any) -> Any:
        self._refuse_after_failure()
        self._gloo()
        return theirs(self, *arguments, **named)

    return method


for _name in (
    "_start_coalescing",
    "_end_coalescing",
    "_wait_for_pending_works",
    "_enable_collectives_timing",
):
    setattr(SynthGroup, _name, _with_gloo(_name))


def _announce(fabric: GroupFabric, is_whole: bool) -> None:
    """Say once what the fabric of the job is; that it is only assumed is said of whichever group is first."""
    key = "assumed" if fabric.is_assumed else str(fabric)
    if key not in _announced and (is_whole or fabric.is_assumed):
        _announced.add(key)
        log.log(
            logging.WARNING if fabric.is_assumed else logging.INFO, "process group synth: fabric %s", fabric
        )
