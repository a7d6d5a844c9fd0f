"""Runs schedules by torch's point-to-point calls, one group call per logical time: over gloo, over NCCL.

NCCL has no tags, so that the order of a pair's messages is all that tells them apart;
`backends.executors.grouped_plan` makes plans for such transports. CPU tensors over gloo go the same
way, with one tag for all messages: plans, order and arithmetic are tested there on real processes.

    caller's stream   ... tensors ready >                               > tensors ready ...
    own stream              >  wait | reduce, copy | wait | reduce, ... >
    NCCL's stream                group 0           group 1

What only CUDA tensors reach is written after torch 2.13 and NCCL's documentation and HAS NOT RUN on a GPU
yet: the own stream and its waits (`_own_stream`, the end of `run`), `record_stream`, futures with devices,
one work for a coalesced call, the digests' exchange as the first call of a communicator.
`tests/executors/test_torch_p2p.py` has tests of all of it for one GPU, which the ranks share; `bench/nccl.py`
measures.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from arborcast.backends.errors import DisagreementError, ExecutionError
from arborcast.backends.executors.grouped_plan import GroupedPlan, Local, Phase, plan_groups
from arborcast.backends.lowering.layout import Buffer, Slice
from arborcast.backends.lowering.lower import DEFAULT_MAX_PIECES, lower_rank, pieces_that_fit
from arborcast.backends.lowering.program import Receive, Reduce, Send
from arborcast.backends.lowering.rank_view import digest_of, switches_in
from arborcast.backends.tensors.checks import check_buffers
from arborcast.backends.tensors.torch_compat import work_of
from arborcast.backends.tensors.torch_reduction import Operator, served_operator
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.implicit_schedule import AnySchedule

# Measured on loopback, 4 ranks on 2 cores, in CPU time of all ranks for an allreduce of 16 MiB (ring and
# full mesh, gloo's own = 1): pieces of 1 MiB 1.2, 512 KiB 1.3 to 1.4, 256 KiB 1.8 to 2.2. On slow links
# smaller pieces pay, in memory larger ones.
DEFAULT_PIECE_BYTES = 512 * 1024

_TAG = 0  # of all messages, on gloo, which matches equal tags of a pair in order; NCCL ignores it
_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


class Executor:
    """Runs one schedule; making one is a collective call of all ranks of the group.

    The ranks compare their schedules first. On NCCL this also makes the group's communicator, which
    point-to-point calls of only some ranks could not.

    On CUDA tensors a call returns at once: all its work waits in streams, and nothing in it waits for the GPU
    on the host, except that NCCL connects two ranks when they first exchange a message. All ranks make their
    calls on the group in the same order, as NCCL wants it. A rank whose count or type differs from the
    others' is not found out here: NCCL's watchdog ends the call after the group's timeout, as it does for
    NCCL's own collectives. With TORCH_NCCL_BLOCKING_WAIT set the host does wait, call by call.

    Args:
        schedule: what to run, in either form; correct ones only, `synth.verify` says which are. Equal on all
            ranks, like all knobs but `cache`.
        group: whose rank i is rank i of the schedule's topology; NCCL serves its CUDA tensors or gloo its CPU
            tensors, with no other point-to-point messages in flight. The default group where None.
        device: of all tensors; the CPU where None. CUDA devices need their index.
        pieces: into how many pieces each chunk is cut; chosen by size where None: see `pieces_for`.
        piece_bytes: the size that a piece of the largest chunk should not fall below.
        max_pieces: the number of pieces that is never exceeded.
        cache: number of lengths and types whose plans are kept.

    Raises:
        InputError: the group is not as large as the topology, or has another backend for the device; or a
            switch has to execute a program.
        DisagreementError: another rank has another schedule or other knobs.
    """

    def __init__(
        self,
        schedule: AnySchedule,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | None = None,
        pieces: int | None = None,
        piece_bytes: int = DEFAULT_PIECE_BYTES,
        max_pieces: int = DEFAULT_MAX_PIECES,
        cache: int = 64,
    ) -> None:
        group = group or dist.group.WORLD
        if group is None:
            raise InputError("executor: no process group given and no default group initialised")
        device = device or torch.device("cpu")
        ranks = schedule.topology.ranks
        if group.size() != ranks:
            raise InputError(
                f"executor: the schedule's topology {schedule.topology.name} has {ranks} ranks, "
                f"the process group has {group.size()}"
            )
        if switches := sorted(switches_in(schedule)):
            raise InputError(
                f"executor: switch {schedule.topology.label(switches[0])} has to execute a program, which "
                "torch's messages cannot make it; the engine can (ARBORCAST_AGGREGATORS)"
            )
        if device.type not in _BACKENDS or (device.type == "cuda" and device.index is None):
            raise InputError(f"executor: the device must be cpu or cuda with its index, got {device}")
        backend = group._get_backend(device)
        if backend.name() != _BACKENDS[device.type]:
            raise InputError(
                f"executor: needs {_BACKENDS[device.type]} for tensors on {device}, "
                f"the process group has {backend.name()}"
            )
        self.schedule = schedule
        self.rank = group.rank()
        self.device = device
        self._group = group
        self._coalesces = backend.supports_coalescing
        self._stream = _new_stream(device) if device.type == "cuda" else None
        self._pieces = pieces
        self._piece_bytes = piece_bytes
        self._max_pieces = max_pieces
        self._plan = lru_cache(cache)(self._make_plan)
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)
        self._failure: str | None = None
        self._agree()

    def allreduce(
        self,
        tensor: Tensor,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        *,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Combine the tensors of all ranks, in place; see `run`, also for the calls that follow."""
        self._check_call(Kind.ALLREDUCE)
        return self.run(tensor.numel(), tensor.dtype, output=tensor, op=op, async_op=async_op)

    def broadcast(self, tensor: Tensor, *, async_op: bool = False) -> dist.Work | None:
        """Fill the tensor on all ranks with the root's."""
        self._check_call(Kind.BROADCAST)
        return self.run(tensor.numel(), tensor.dtype, output=tensor, async_op=async_op)

    def allgather(self, output: Tensor, given: Tensor) -> None:
        """Concatenate all ranks' tensors, in the order of the collective's ranks, on all of them."""
        self._check_call(Kind.ALLGATHER)
        ranks = len(self.schedule.collective.ranks)
        self.run(given.numel() * ranks, given.dtype, given=given, output=output)

    def reduce_scatter(
        self, output: Tensor, given: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """Combine all ranks' tensors and give each rank its block of the result."""
        self._check_call(Kind.REDUCE_SCATTER)
        ranks = len(self.schedule.collective.ranks)
        self.run(output.numel() * ranks, output.dtype, given=given, output=output, op=op)

    def run(
        self,
        count: int,
        dtype: torch.dtype,
        *,
        given: Tensor | None = None,
        output: Tensor | None = None,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Any kind; all ranks of the topology make the call, also those that take no part.

        Args:
            count: elements of the whole buffer, as algbw counts it: of all n blocks where there are blocks.
            dtype: of everybody's tensors.
            given: this rank's input, contiguous, never written to; None where it gives none.
            output: what it gets, contiguous; None where it gets nothing. In place (broadcast, allreduce,
                custom, the root of a reduce) it holds the data at the start and there is no input.
            op: how contributions are combined, ignored where none are; see `torch_reduction.operator_of`.
            async_op: whether to return a work (with a future of the outputs) instead of letting the current
                stream wait. Waiting for it lets the stream that is current then wait, not the host. On CPU
                tensors the call is complete when it returns, either way.

        Raises:
            InputError: tensors or an operation that do not fit.
            ExecutionError: a peer died or a deadline passed; no further call will work. On CUDA it is NCCL's
                watchdog that finds this out, later.
        """
        plan = self._plan(count, dtype)
        collective = self.schedule.collective
        given, output = check_buffers(collective, plan.program, given, output, dtype, self.device)
        operator = served_operator(op, dtype) if collective.kind.reduces else None
        if self._failure is not None:
            raise ExecutionError(f"rank {self.rank}: an earlier call failed: {self._failure}")
        future: torch.futures.Future[list[Tensor]] | None = None
        with self._own_stream(given, output):
            self._execute(plan, given, output, operator, dtype)
            if async_op:
                # A future with devices remembers where their current streams are: here, our own.
                future = torch.futures.Future(devices=None if self._stream is None else [self.device])
                future.set_result([] if output is None else [output])
        if future is not None:
            return work_of(future)
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return None

    def pieces_for(self, count: int, dtype: torch.dtype) -> int:
        """Into how many pieces every chunk of a buffer of that length is cut; see `pieces_that_fit`."""
        if self._pieces is not None:
            return self._pieces
        nbytes = count * dtype.itemsize
        return pieces_that_fit(self.schedule, nbytes, piece_bytes=self._piece_bytes, most=self._max_pieces)

    def _agree(self) -> None:
        """Refuse ranks that would exchange other messages; the one place that waits for the GPU."""
        knobs = [self._pieces, self._piece_bytes, self._max_pieces]
        said = digest_of(self.schedule) + json.dumps(knobs).encode()
        own = int.from_bytes(hashlib.sha256(said).digest()[:7])
        mine = torch.tensor([own], dtype=torch.int64, device=self.device)
        everybody = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(everybody, mine, group=self._group)
        for rank, digest in enumerate(everybody):
            other = int(digest.item())
            if other != own:
                raise DisagreementError(
                    f"rank {self.rank}: its schedule and knobs (digest {own:014x}) are not those of "
                    f"rank {rank} ({other:014x})"
                )

    def _check_call(self, kind: Kind) -> None:
        collective = self.schedule.collective
        if collective.kind is not kind:
            raise InputError(f"executor: its schedule is for {collective.kind}, not for {kind}")
        if self.rank not in collective.ranks:
            raise InputError(f"rank {self.rank}: takes no part in the {kind}; call run(count, dtype) on it")

    def _make_plan(self, count: int, dtype: torch.dtype) -> GroupedPlan:
        pieces = self.pieces_for(count, dtype)
        return plan_groups(lower_rank(self.schedule, self.rank, count, pieces=pieces))

    @contextlib.contextmanager
    def _own_stream(self, *tensors: Tensor | None) -> Iterator[None]:
        """Make our stream the current one, after all that the caller's stream has been given so far.

        All calls share the stream and the scratch that belongs to it, whatever stream each comes from.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self._stream)  # the caller may free it while our stream works on it
        with torch.cuda.stream(self._stream):
            yield

    def _execute(
        self,
        plan: GroupedPlan,
        given: Tensor | None,
        output: Tensor | None,
        operator: Operator | None,
        dtype: torch.dtype,
    ) -> None:
        program = plan.program
        phase: Phase | None = None
        try:
            if operator is not None and program.in_place and output is not None:
                operator.before_in_place(output)
            elif operator is not None and given is not None:
                given = operator.before(given)
            memory = {Buffer.SCRATCH: self._scratch_for(plan.scratch_elements, dtype)}
            if given is not None:
                memory[Buffer.INPUT] = given
            if output is not None:
                memory[Buffer.OUTPUT] = output
            views = {part: memory[part.buffer].narrow(0, part.start, part.length) for part in plan.slices}
            for current in plan.phases:
                phase = current
                works = self._start(phase, views)
                _do(phase.during, views, operator)
                for work in works:
                    work.wait()
                _do(phase.after, views, operator)
            if operator is not None and output is not None:
                operator.after(output, program.contributors)
        except BaseException as error:
            # Messages are left half done, so that no later call could know its own from these.
            reason = (str(error) or type(error).__name__).splitlines()[0]
            self._failure = f"{self.schedule.collective.kind}{_described(phase)}: {reason}"
            if isinstance(error, RuntimeError):
                raise ExecutionError(f"rank {self.rank}: {self._failure}") from error
            raise

    def _start(self, phase: Phase, views: Mapping[Slice, Tensor]) -> list[dist.Work]:
        """Issue one group call; what to wait for."""
        group = self._group
        if not phase.messages:
            return []
        if self._coalesces:
            group._start_coalescing(self.device)
        works = [group.recv([views[m.into]], m.peer, _TAG) for m in phase.messages if isinstance(m, Receive)]
        works += [group.send([views[m.source]], m.peer, _TAG) for m in phase.messages if isinstance(m, Send)]
        if self._coalesces:
            # The calls have only been noted; there is one work for all, on NCCL's stream.
            works = [group._end_coalescing(self.device)]
        return works

    def _scratch_for(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Working space shared by all lengths and types, since calls follow one another in one stream."""
        needed = elements * dtype.itemsize
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8, device=self.device)
        return self._scratch[:needed].view(dtype)


def _do(operations: Sequence[Local], views: Mapping[Slice, Tensor], operator: Operator | None) -> None:
    for operation in operations:
        into, source = views[operation.into], views[operation.source]
        if isinstance(operation, Reduce):
            assert operator is not None, "only reducing kinds have reductions"
            operator.combine(into, source, into)
        else:
            into.copy_(source)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return cast(torch.cuda.Stream, cast(Any, torch.cuda.Stream)(device))


def _described(phase: Phase | None) -> str:
    if phase is None:
        return ""
    peers = sorted({message.peer for message in phase.messages})
    return f", messages of time {phase.time} with ranks {', '.join(map(str, peers))}"
