"""The process group "synth": gloo, except that the great collectives run synthesized schedules.

All collectives that torch has (`collectives`) go to a `Communicator`, one after another on a thread of
their own, and return work with a future as gloo's does. Whatever schedules do not serve (sparse tensors,
sums of complex numbers, other devices' tensors) goes to an inner gloo. Here a group is made, begins sends and
receives, says what it has done, and ends.

This and `collectives` alone know how torch, from 2.11 to 2.15, lets a process group be written in Python.
What goes to `super()` goes by the names that all of these have.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # keeps the default group that it finds: while there is none
from torch import Tensor

from arborcast.backends.errors import ExecutionError
from arborcast.backends.group.arguments import HOST
from arborcast.backends.group.collectives import GroupCollectives
from arborcast.backends.group.communicator import SERVED, Communicator
from arborcast.backends.group.history import write_flights
from arborcast.backends.group.inner_gloo import InnerGloo
from arborcast.backends.group.membership import Membership
from arborcast.backends.group.monitored_barrier import MonitoredBarrier
from arborcast.backends.group.posting import ANYBODY, CablePosting, Posting
from arborcast.backends.group.profiling import ObservedWork, event_of
from arborcast.backends.group.work import WorkQueue
from arborcast.backends.options import MESSAGES, Options
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


@outside_compilers
class SynthGroup(GroupCollectives):
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
        self._devices = HOST | {MESSAGES[self._member.options.p2p]} - {""}
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

        "schedule" and "gloo" count calls that could be either, "kernel" those by schedules that the kernel
        served, "handed over" those that schedules do not serve at all. Of the first two, "bytes" of the whole
        buffers, "seconds" from the begin of each call to its end on this rank, late ranks waited for; and
        "share", of calls by schedules the time that the bound of the fabric would need over that.
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

    def _break(self, reason: str) -> None:
        """Make everything fail from now on, what gloo does as well: nobody may wait for who has given up."""
        if not self._is_broken:
            self._is_broken = True
            self._communicator.abort(reason)
            self._peers.end(reason)
            self._inner.end()
            self._peers.fail()


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
