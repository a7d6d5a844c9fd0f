"""Runs schedules on real tensors with the point-to-point calls of torch.distributed (gloo).

An `Executor` belongs to one schedule and one process group of as many ranks as the schedule's topology.
It lowers and plans once per buffer length and type, keeps the result, and then issues the planned calls from
the caller's thread. Reductions go through cached scratch; everything else is received in place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from arborcast.backends.errors import ExecutionError
from arborcast.backends.executors.plan import Act, plan
from arborcast.backends.lowering.layout import Buffer, Slice
from arborcast.backends.lowering.lower import DEFAULT_MAX_PIECES, DEFAULT_WINDOW, lower_rank, pieces_that_fit
from arborcast.backends.lowering.program import Operation, Program, Receive, Send
from arborcast.backends.tensors.checks import check_overlap, check_tensor
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.implicit_schedule import AnySchedule

# Measured on loopback, 4 ranks on 2 cores, in CPU time of all ranks for an allreduce of 16 MiB (ring and
# full mesh, gloo's own = 1): pieces of 1 MiB 1.2, 512 KiB 1.3 to 1.4, 256 KiB 1.8 to 2.2. A message costs
# about 0.1 ms of CPU at both ends together; on slow links smaller pieces pay, in memory larger ones.
DEFAULT_PIECE_BYTES = 512 * 1024
DEFAULT_LOOKAHEAD = 4

_COMBINE: dict[dist.ReduceOp.RedOpType, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: Tensor.add_,
    dist.ReduceOp.AVG: Tensor.add_,  # divided at the end
    dist.ReduceOp.MIN: lambda into, source: torch.minimum(into, source, out=into),
    dist.ReduceOp.MAX: lambda into, source: torch.maximum(into, source, out=into),
    dist.ReduceOp.PRODUCT: Tensor.mul_,
}


class _PointToPoint(Protocol):
    """The calls of a backend that torch's type stubs leave out; half as dear as `isend` and `irecv`."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> dist.Work: ...


@dataclass(frozen=True)
class _Compiled:
    """What stays the same from call to call for one length and type.

    `acts` holds, for each instruction, what to do, the operation's index, and the indices of its slices in
    `slices`: the destination or what is sent, then the source of a reduction or copy.
    """

    program: Program
    slices: tuple[Slice, ...]
    acts: tuple[tuple[Act, int, int, int], ...]


class Executor:
    """Runs one schedule.

    Args:
        schedule: what to run, in either form; correct ones only, `synth.verify` says which are.
        group: gloo process group whose rank i is rank i of the schedule's topology; the default group
            where None. Tags from 0 up to the number of messages are used on it.
        pieces: into how many pieces each chunk is cut; chosen by size where None: see `pieces_for`.
        piece_bytes: the size that a piece of the largest chunk should not fall below.
        max_pieces: the number of pieces that is never exceeded.
        lookahead: logical times that a receive is posted ahead.
        window: receives of one chunk that may wait in scratch.
        timeout_s: after how many seconds a message that does not come raises; the group's where None.
        cache: number of lengths and types whose plans are kept.

    Raises:
        InputError: the group is not as large as the topology, or not gloo.
    """

    def __init__(
        self,
        schedule: AnySchedule,
        group: dist.ProcessGroup | None = None,
        *,
        pieces: int | None = None,
        piece_bytes: int = DEFAULT_PIECE_BYTES,
        max_pieces: int = DEFAULT_MAX_PIECES,
        lookahead: int = DEFAULT_LOOKAHEAD,
        window: int = DEFAULT_WINDOW,
        timeout_s: float | None = None,
        cache: int = 64,
    ) -> None:
        group = group or dist.group.WORLD
        if group is None:
            raise InputError("executor: no process group given and no default group initialised")
        ranks = schedule.topology.ranks
        if group.size() != ranks:
            raise InputError(
                f"executor: the schedule's topology {schedule.topology.name} has {ranks} ranks, "
                f"the process group has {group.size()}"
            )
        self.schedule = schedule
        self.rank = group.rank()
        backend = group._get_backend(torch.device("cpu"))
        if backend.name() != "gloo":
            raise InputError(f"executor: needs a gloo process group, got {backend.name()}")
        self._backend = cast(_PointToPoint, backend)
        self._pieces = pieces
        self._piece_bytes = piece_bytes
        self._max_pieces = max_pieces
        self._lookahead = lookahead
        self._window = window
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._cache_size = cache
        self._cache: OrderedDict[tuple[int, torch.dtype], _Compiled] = OrderedDict()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._failure: str | None = None

    def allreduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Combine the tensors of all ranks, in place."""
        self._check_call(Kind.ALLREDUCE)
        self.run(tensor.numel(), tensor.dtype, output=tensor, op=op)

    def broadcast(self, tensor: Tensor) -> None:
        """Fill the tensor on all ranks with the root's."""
        self._check_call(Kind.BROADCAST)
        self.run(tensor.numel(), tensor.dtype, output=tensor)

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Combine the tensors of all ranks into the root's; those of the others keep their values."""
        self._check_call(Kind.REDUCE)
        at_root = self.rank == self.schedule.collective.root
        given, output = (None, tensor) if at_root else (tensor, None)
        self.run(tensor.numel(), tensor.dtype, given=given, output=output, op=op)

    def allgather(self, output: Tensor, given: Tensor) -> None:
        """Concatenate all ranks' tensors, in the order of the collective's ranks, on all of them."""
        self._check_call(Kind.ALLGATHER)
        self.run(given.numel() * self._ranks, given.dtype, given=given, output=output)

    def reduce_scatter(
        self, output: Tensor, given: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """Combine all ranks' tensors and give each rank its block of the result."""
        self._check_call(Kind.REDUCE_SCATTER)
        self.run(output.numel() * self._ranks, output.dtype, given=given, output=output, op=op)

    def gather(self, output: Tensor | None, given: Tensor) -> None:
        """Concatenate all ranks' tensors at the root; `output` is None on the others."""
        self._check_call(Kind.GATHER)
        self.run(given.numel() * self._ranks, given.dtype, given=given, output=output)

    def scatter(self, output: Tensor, given: Tensor | None) -> None:
        """Give each rank its block of the root's tensor; `given` is None on the others."""
        self._check_call(Kind.SCATTER)
        self.run(output.numel() * self._ranks, output.dtype, given=given, output=output)

    def alltoall(self, output: Tensor, given: Tensor) -> None:
        """Exchange block i of rank j with block j of rank i."""
        self._check_call(Kind.ALLTOALL)
        self.run(given.numel(), given.dtype, given=given, output=output)

    def custom(self, tensor: Tensor) -> None:
        """Fill the blocks of the tensor that this rank must get, in place; it has room for all of them.

        Blocks that it neither holds nor gets keep their values.
        """
        self._check_call(Kind.CUSTOM)
        self.run(tensor.numel(), tensor.dtype, output=tensor)

    def run(
        self,
        count: int,
        dtype: torch.dtype,
        *,
        given: Tensor | None = None,
        output: Tensor | None = None,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> None:
        """Any kind, and the only call for ranks that take no part: all ranks of the topology make it.

        Args:
            count: elements of the whole buffer, as algbw counts it: of all n blocks where there are blocks.
            dtype: of everybody's tensors.
            given: this rank's input, contiguous, never written to; None where it gives none.
            output: what it gets, contiguous; None where it gets nothing. In place (broadcast, allreduce,
                custom, the root of a reduce) it holds the data at the start and there is no input.
            op: how contributions are combined, ignored where none are; AVG is the sum divided by the number
                of ranks, for integers rounded towards zero.

        Raises:
            InputError: tensors that do not fit.
            ExecutionError: a peer died or a deadline passed; no further call will work.
        """
        compiled = self._compile(count, dtype)
        kind = self.schedule.collective.kind
        program, cpu = compiled.program, torch.device("cpu")
        given = check_tensor(f"{kind}: input", given, program.input_elements, dtype, cpu)
        output = check_tensor(f"{kind}: output", output, program.output_elements, dtype, cpu)
        check_overlap(self.schedule.collective, self.rank, given, output)
        self._execute(compiled, given, output, op, dtype)

    def pieces_for(self, count: int, dtype: torch.dtype) -> int:
        """Into how many pieces every chunk of a buffer of that length is cut.

        As many as keep a piece of the largest chunk at `piece_bytes` or more, at least 1, at most
        `max_pieces`; one number for all chunks, so that trees of different weight stay in step.
        """
        if self._pieces is not None:
            return self._pieces
        nbytes = count * dtype.itemsize
        return pieces_that_fit(self.schedule, nbytes, piece_bytes=self._piece_bytes, most=self._max_pieces)

    @property
    def _ranks(self) -> int:
        return len(self.schedule.collective.ranks)

    def _check_call(self, kind: Kind) -> None:
        collective = self.schedule.collective
        if collective.kind is not kind:
            raise InputError(f"executor: its schedule is for {collective.kind}, not for {kind}")
        if self.rank not in collective.ranks:
            raise InputError(f"rank {self.rank}: takes no part in the {kind}; call run(count, dtype) on it")

    def _compile(self, count: int, dtype: torch.dtype) -> _Compiled:
        compiled = self._cache.pop((count, dtype), None)
        if compiled is None:
            program = lower_rank(
                self.schedule,
                self.rank,
                count,
                pieces=self.pieces_for(count, dtype),
                window=self._window,
            )
            compiled = _compile(program, self._lookahead)
            while len(self._cache) >= self._cache_size:
                self._cache.popitem(last=False)
        self._cache[count, dtype] = compiled
        return compiled

    def _scratch_for(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Working space shared by all lengths and types, since only one call runs at a time."""
        needed = elements * dtype.itemsize
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        return self._scratch[:needed].view(dtype)

    def _execute(
        self,
        compiled: _Compiled,
        given: Tensor | None,
        output: Tensor | None,
        op: dist.ReduceOp.RedOpType,
        dtype: torch.dtype,
    ) -> None:
        if self._failure is not None:
            raise ExecutionError(f"rank {self.rank}: an earlier call failed: {self._failure}")
        program = compiled.program
        combine = _combiner(op, dtype) if self.schedule.collective.kind.reduces else None
        memory = {Buffer.SCRATCH: self._scratch_for(program.scratch_elements, dtype)}
        if given is not None:
            memory[Buffer.INPUT] = given
        if output is not None:
            memory[Buffer.OUTPUT] = output
        views = [memory[part.buffer].narrow(0, part.start, part.length) for part in compiled.slices]
        self._issue(compiled, views, combine)
        if combine is not None and op == dist.ReduceOp.AVG and output is not None:
            rounding = None if dtype.is_floating_point else "trunc"
            torch.div(output, program.contributors, rounding_mode=rounding, out=output)

    def _issue(
        self, compiled: _Compiled, views: list[Tensor], combine: Callable[[Tensor, Tensor], Tensor] | None
    ) -> None:
        operations = compiled.program.operations
        backend = self._backend
        works: dict[int, dist.Work] = {}
        operation: Operation | None = None
        try:
            for act, index, into, source in compiled.acts:
                operation = operations[index]
                if act is Act.WAIT:
                    self._wait(works.pop(index))
                elif act is Act.SEND:
                    assert isinstance(operation, Send)
                    works[index] = backend.send([views[into]], operation.peer, operation.tag)
                elif act is Act.POST:
                    assert isinstance(operation, Receive)
                    works[index] = backend.recv([views[into]], operation.peer, operation.tag)
                elif act is Act.REDUCE:
                    assert combine is not None, "only reducing kinds have reductions"
                    combine(views[into], views[source])
                else:
                    views[into].copy_(views[source])
        except BaseException as error:
            # Messages are left half done, so that no later call could know its own from these.
            reason = (str(error) or type(error).__name__).splitlines()[0]
            self._failure = f"rank {self.rank}: {operation}: {reason}"
            if isinstance(error, RuntimeError):
                raise ExecutionError(self._failure) from error
            raise

    def _wait(self, work: dist.Work) -> None:
        if self._timeout is None:
            work.wait()
        else:
            work.wait(self._timeout)


def _compile(program: Program, lookahead: int) -> _Compiled:
    """Number the slices that a plan touches, so that a call makes each view once."""
    numbers: dict[Slice, int] = {}

    def number(part: Slice) -> int:
        return numbers.setdefault(part, len(numbers))

    acts = []
    for instruction in plan(program, lookahead=lookahead):
        operation = program.operations[instruction.operation]
        if isinstance(operation, Send):
            into = source = number(operation.source)
        else:
            into = number(operation.into)
            source = into if isinstance(operation, Receive) else number(operation.source)
        acts.append((instruction.act, instruction.operation, into, source))
    return _Compiled(program, tuple(numbers), tuple(acts))


def _combiner(op: dist.ReduceOp.RedOpType, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    combine = next((function for known, function in _COMBINE.items() if op == known), None)
    if combine is None:
        raise InputError(f"reduction {op}: must be SUM, AVG, MIN, MAX or PRODUCT")
    if dtype.is_complex or dtype == torch.bool:
        raise InputError(f"reduction {op}: needs a real floating or integer type, got {dtype}")
    return combine
