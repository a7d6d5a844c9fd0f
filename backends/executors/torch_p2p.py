"""Runs schedules by torch's point-to-point calls: the readable reference of what a program means.

Over gloo a program is followed in its order: a message starts as soon as what it needs is complete, sums and
copies are made when something needs them. Its order is one in which even blocking sends cannot deadlock, and
each of its messages has a tag of its own. `backends.dataflow` does the same with less waiting. NCCL and RCCL
know groups and no tags: `backends.p2p`.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from arborcast.backends.errors import DisagreementError, ExecutionError
from arborcast.backends.lowering.groups import MessageGroup, groups_of
from arborcast.backends.lowering.layout import Buffer
from arborcast.backends.lowering.lower import DEFAULT_MAX_PIECES, lower_rank
from arborcast.backends.lowering.program import Program
from arborcast.backends.lowering.rank_view import digest_of, refuse_switches
from arborcast.backends.p2p.run import ProgramRun
from arborcast.backends.tensors.checks import check_buffers
from arborcast.backends.tensors.torch_reduction import served_operator
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.simulation.pieces import pieces_that_fit

# Measured on loopback, 4 ranks on 2 cores, in CPU time of all ranks for an allreduce of 16 MiB (ring and
# full mesh, gloo's own = 1): pieces of 1 MiB 1.2, 512 KiB 1.3 to 1.4, 256 KiB 1.8 to 2.2. On slow links
# smaller pieces pay, in memory larger ones.
DEFAULT_PIECE_BYTES = 512 * 1024

CPU = torch.device("cpu")
TAGGED = "gloo"
BACKENDS = {"cpu": TAGGED, "cuda": "nccl"}
"""By the device of tensors; RCCL calls itself nccl."""


class Executor:
    """Runs one schedule; making one is a collective call of all ranks of the group.

    The ranks compare their schedules first. All make their calls on the group in the same order; a call is
    complete when it returns.

    Args:
        schedule: what to run, in either form; correct ones only, `synth.verify` says which are. Equal on all
            ranks, like all knobs but `cache`.
        group: whose rank i is rank i of the schedule's topology; gloo serves its CPU tensors, NCCL those of
            CUDA, with no other point-to-point messages in flight. The default group where None.
        pieces: into how many pieces each chunk is cut; chosen by size where None: see `pieces_for`.
        piece_bytes: the size that a piece of the largest chunk should not fall below.
        max_pieces: the number of pieces that is never exceeded.
        cache: number of lengths and types whose programs are kept.
        device: of the tensors.
        grouped: whether messages go in groups without tags; None for where the backend knows nothing else.

    Raises:
        InputError: the group is not as large as the topology, or has another backend for such tensors, or one
            that must have groups is told not to; or a switch adds or copies.
        DisagreementError: another rank has another schedule or other knobs.
    """

    def __init__(
        self,
        schedule: AnySchedule,
        group: dist.ProcessGroup | None = None,
        *,
        pieces: int | None = None,
        piece_bytes: int = DEFAULT_PIECE_BYTES,
        max_pieces: int = DEFAULT_MAX_PIECES,
        cache: int = 64,
        device: torch.device | str = CPU,
        grouped: bool | None = None,
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
        refuse_switches(schedule, "executor")
        here = torch.cuda.current_device() if str(device) == "cuda" else None
        self._device = torch.device(device) if here is None else torch.device("cuda", here)
        wanted = BACKENDS.get(self._device.type)
        if wanted is None:
            raise InputError(f"executor: device must be one of {', '.join(BACKENDS)}, got {self._device}")
        self._backend = group._get_backend(self._device)
        backend = self._backend.name()
        if backend != wanted:
            raise InputError(
                f"executor: needs {wanted} for tensors on {self._device.type}, "
                f"the process group has {backend}"
            )
        if grouped is False and backend != TAGGED:
            raise InputError(f"executor: {backend} has no tags, so that messages must be grouped")
        self._grouped = backend != TAGGED if grouped is None else grouped
        self.schedule = schedule
        self.rank = group.rank()
        self._group = group
        self._pieces = pieces
        self._piece_bytes = piece_bytes
        self._max_pieces = max_pieces
        self._program = lru_cache(cache)(self._lowered)
        self._failure: str | None = None
        self._agree()

    def allreduce(
        self, tensor: Tensor, op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """Combine the tensors of all ranks, in place; see `run`, also for the calls that follow."""
        self._check_call(Kind.ALLREDUCE)
        self.run(tensor.numel(), tensor.dtype, output=tensor, op=op)

    def broadcast(self, tensor: Tensor) -> None:
        """Fill the tensor on all ranks with the root's."""
        self._check_call(Kind.BROADCAST)
        self.run(tensor.numel(), tensor.dtype, output=tensor)

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
    ) -> None:
        """Any kind; all ranks of the topology make the call, also those that take no part.

        Args:
            count: elements of the whole buffer, as algbw counts it: of all n blocks where there are blocks.
            dtype: of everybody's tensors.
            given: this rank's input, contiguous, never written to; None where it gives none.
            output: what it gets, contiguous; None where it gets nothing. In place (broadcast, allreduce,
                custom, the root of a reduce) it holds the data at the start and there is no input.
            op: how contributions are combined, ignored where none are; see `torch_reduction.operator_of`.

        Raises:
            InputError: tensors or an operation that do not fit.
            ExecutionError: a peer died or a deadline passed; no further call will work.
        """
        program, groups = self._program(count, dtype)
        collective = self.schedule.collective
        given, output = check_buffers(collective, program, given, output, dtype, self._device)
        operator = served_operator(op, dtype) if collective.kind.reduces else None
        if self._failure is not None:
            raise ExecutionError(f"rank {self.rank}: an earlier call failed: {self._failure}")
        if operator is not None and program.in_place and output is not None:
            operator.before_in_place(output)
        elif operator is not None and given is not None:
            given = operator.before(given)
        memory = {Buffer.SCRATCH: torch.empty(program.scratch_elements, dtype=dtype, device=self._device)}
        if given is not None:
            memory[Buffer.INPUT] = given
        if output is not None:
            memory[Buffer.OUTPUT] = output
        call = ProgramRun(program, groups, self._backend if groups else self._group, memory, operator)
        try:
            call.run()
        except BaseException as error:
            # Messages are left half done, so that no later call could know its own from these.
            reason = (str(error) or type(error).__name__).splitlines()[0]
            self._failure = f"{collective.kind}, {call.reached}: {reason}"
            if isinstance(error, RuntimeError):
                raise ExecutionError(f"rank {self.rank}: {self._failure}") from error
            raise
        if operator is not None and output is not None:
            operator.after(output, program.contributors)

    def pieces_for(self, count: int, dtype: torch.dtype) -> int:
        """Into how many pieces every chunk of a buffer of that length is cut; see `pieces_that_fit`."""
        if self._pieces is not None:
            return self._pieces
        nbytes = count * dtype.itemsize
        return pieces_that_fit(self.schedule, nbytes, piece_bytes=self._piece_bytes, most=self._max_pieces)

    def _agree(self) -> None:
        """Refuse ranks that would exchange other messages."""
        knobs = [self._pieces, self._piece_bytes, self._max_pieces, self._grouped]
        said = digest_of(self.schedule) + json.dumps(knobs).encode()
        own = int.from_bytes(hashlib.sha256(said).digest()[:7])
        mine = torch.tensor([own], dtype=torch.int64, device=self._device)
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

    def _lowered(self, count: int, dtype: torch.dtype) -> tuple[Program, tuple[MessageGroup, ...]]:
        pieces = self.pieces_for(count, dtype)
        program = lower_rank(self.schedule, self.rank, count, pieces=pieces, grouped=self._grouped)
        return program, groups_of(program) if self._grouped else ()
