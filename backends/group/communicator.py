"""The collectives of one group: for each call the schedule that serves its size, or gloo.

A communicator belongs to one group of ranks; all of them make the same calls in the same order, each from
one thread at a time. Schedules come from the fabric: rank 0 finds those of a collective when it is first
needed, all others take them from it. What serves a call depends on nothing but the collective, the root and
the number of bytes, so that all ranks decide alike; before a byte moves they check that they did.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ScatterOptions,
)

from arborcast.backends.dataflow.task_graph import TaskGraph
from arborcast.backends.errors import DisagreementError, ExecutionError
from arborcast.backends.group.arguments import SUM, reduce_options, rooted
from arborcast.backends.group.gathering import Gathering
from arborcast.backends.group.history import Call, History
from arborcast.backends.group.inner_gloo import InnerGloo
from arborcast.backends.group.membership import Membership
from arborcast.backends.group.trace import Tracer
from arborcast.backends.lowering.groups import MessageGroup
from arborcast.backends.lowering.layout import Buffer
from arborcast.backends.lowering.program import Program
from arborcast.backends.options import MESSAGES
from arborcast.backends.p2p.carriers import CudaCarrier, HostCarrier, MessageCarrier
from arborcast.backends.p2p.run import ProgramRun
from arborcast.backends.schedules.combined import joint_part
from arborcast.backends.schedules.exchange import Exchange, Exchanges, Sizes
from arborcast.backends.schedules.held import Schedules
from arborcast.backends.schedules.schedule_table import KernelEntry, ScheduleTable
from arborcast.backends.schedules.spare import spare_table
from arborcast.backends.tensors.torch_compat import PrefixStore, future_of
from arborcast.backends.tensors.torch_reduction import ReductionOperator, name_of, served_operator
from arborcast.backends.transport.fingerprint import OF_A_PAIR, CollectiveFingerprint, ExchangeFingerprint
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.formats.sizes import format_size

if TYPE_CHECKING:
    from arborcast.backends.device.executor import DeviceExecutor
    from arborcast.backends.group.kernel_calls import KernelCalls

log = logging.getLogger(__name__)

Memory: TypeAlias = Mapping[Buffer, Tensor]
"""Flat tensors in host memory."""

SERVED = (
    Kind.ALLREDUCE,
    Kind.BROADCAST,
    Kind.ALLGATHER,
    Kind.REDUCE_SCATTER,
    Kind.REDUCE,
    Kind.GATHER,
    Kind.SCATTER,
)
"""The collectives that schedules serve here."""

GLOO_BELOW = 0
"""Bytes of the whole buffer below which gloo serves where nobody says otherwise.

Measured on loopback (`bench/loopback.py`), gloo is nowhere faster once the ranks have agreed on a call, which
they must do before gloo begins: it ends the process where lengths differ.
"""


MARKS_S = 0.0005
"""How often a call on a GPU asks whether it is done there."""


class Communicator:
    """The collectives of one rank of a group.

    Attributes:
        member: this rank in the group, by which it reaches the others.
        carrier: of the messages of calls that torch's own backend carries; None where none are.
        history: what has been served, and how fast.

    Args:
        member: as above.
    """

    def __init__(self, member: Membership) -> None:
        self.member = member
        self.rank, self.size = rank, size = member.rank, member.size
        # Not the one of the group: gloo knows calls by their order, and that serves other threads.
        timeout = timedelta(seconds=member.timeout_s)
        device = MESSAGES[member.options.p2p]
        own = PrefixStore("small", member.own_store)
        self._gloo = InnerGloo(own, rank, size, timeout, has_ring=device != "cpu")
        self.carrier: MessageCarrier | None = None
        if device == "cpu":
            self.carrier = HostCarrier(self._gloo.of_timeout)
        elif device == "cuda":
            self.carrier = CudaCarrier(PrefixStore("p2p", member.own_store), rank, size)
        self._generation = 0
        self._schedules = self._new_schedules()
        self._kernels = self._new_kernels()
        self._exchanges: Exchanges | None = None
        self.history = History(
            rank, member.global_ranks, member.waits_for, lambda: member.failure is not None
        )
        self._tracer: Tracer | None = None
        self._sequence = 0

    # ------------------------------------------------------------------ collectives

    def allreduce(self, tensor: Tensor, op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> None:
        """Combine the flat tensors of all ranks, in place; what `serves` says no to is refused."""
        operator = served_operator(op, tensor.dtype)
        operator.before_in_place(tensor)
        call = self._call(Kind.ALLREDUCE, -1, tensor.numel(), tensor.dtype, operator)
        self._run(
            call,
            tensor.dtype,
            {Buffer.OUTPUT: tensor},
            operator,
            lambda gloo, host: gloo.allreduce([host[Buffer.OUTPUT]], reduce_options(_gloo_op(op))),
        )
        operator.after(tensor, self.size)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Fill the flat tensor with the root's."""
        call = self._call(Kind.BROADCAST, root, tensor.numel(), tensor.dtype)

        def by_gloo(gloo: Any, host: Memory) -> Any:
            # As bytes, because gloo knows few types.
            return gloo.broadcast([host[Buffer.OUTPUT].view(torch.uint8)], rooted(BroadcastOptions, root))

        self._run(call, tensor.dtype, {Buffer.OUTPUT: tensor}, None, by_gloo)

    def reduce(self, tensor: Tensor, root: int, op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> None:
        """Combine the flat tensors of all ranks on one, in place."""
        operator = served_operator(op, tensor.dtype)
        is_root = self.rank == root
        if is_root:
            operator.before_in_place(tensor)
        else:
            tensor = operator.before(tensor)
        call = self._call(Kind.REDUCE, root, tensor.numel(), tensor.dtype, operator)

        def by_gloo(gloo: Any, host: Memory) -> Any:
            options = rooted(ReduceOptions, root)
            options.reduceOp = _gloo_op(op)
            return gloo.reduce(list(host.values()), options)

        memory = {Buffer.OUTPUT if is_root else Buffer.INPUT: tensor}
        self._run(call, tensor.dtype, memory, operator, by_gloo)
        if is_root:
            operator.after(tensor, self.size)

    def gather(self, output: Tensor | None, given: Tensor, root: int) -> None:
        """Concatenate the flat tensors of all ranks on one, in their order; the others have no output."""
        memory = {Buffer.INPUT: given}
        if output is not None:
            memory = {Buffer.INPUT: _apart_from(output, given), Buffer.OUTPUT: output}
        call = self._call(Kind.GATHER, root, self.size * given.numel(), given.dtype)

        def by_gloo(gloo: Any, host: Memory) -> Any:
            outputs = [] if output is None else [self._blocks(host[Buffer.OUTPUT])]
            return gloo.gather(outputs, [host[Buffer.INPUT].view(torch.uint8)], rooted(GatherOptions, root))

        self._run(call, given.dtype, memory, None, by_gloo)

    def scatter(self, output: Tensor, given: Tensor | None, root: int) -> None:
        """Give each rank its block of one rank's flat tensor; the others have no input."""
        memory = {Buffer.OUTPUT: output}
        if given is not None:
            memory[Buffer.INPUT] = _apart_from(output, given)
        call = self._call(Kind.SCATTER, root, self.size * output.numel(), output.dtype)

        def by_gloo(gloo: Any, host: Memory) -> Any:
            inputs = [] if given is None else [self._blocks(host[Buffer.INPUT])]
            return gloo.scatter([host[Buffer.OUTPUT].view(torch.uint8)], inputs, rooted(ScatterOptions, root))

        self._run(call, output.dtype, memory, None, by_gloo)

    def _blocks(self, whole: Tensor) -> list[Tensor]:
        """The bytes of each rank's block."""
        return list(whole.view(torch.uint8).view(self.size, whole.nbytes // self.size))

    def allgather(self, output: Tensor, given: Tensor) -> None:
        """Concatenate the flat tensors of all ranks, in their order."""
        own = output.data_ptr() + self.rank * given.numel() * given.itemsize
        if given.data_ptr() != own:  # in its own block it may lie, and stays as it is
            given = _apart_from(output, given)
        self._gather(output, given)

    def _gather(self, output: Tensor, given: Tensor, shown: CollectiveFingerprint | None = None) -> None:
        call = self._call(Kind.ALLGATHER, -1, output.numel(), output.dtype)
        if shown is not None:  # ranks compare this one where they agree on schedules first
            call = replace(call, elements=f"{shown.elements} {shown.kind}")
        memory = {Buffer.INPUT: given, Buffer.OUTPUT: output}
        self._run(
            call,
            output.dtype,
            memory,
            None,
            lambda gloo, host: gloo._allgather_base(
                host[Buffer.OUTPUT].view(torch.uint8),
                host[Buffer.INPUT].view(torch.uint8),
                AllgatherOptions(),
            ),
            shown=shown,
        )

    def reduce_scatter(
        self, output: Tensor, given: Tensor, op: dist.ReduceOp | dist.ReduceOp.RedOpType
    ) -> None:
        """Combine the flat tensors of all ranks and give each its block of the result."""
        operator = served_operator(op, given.dtype)
        given = _apart_from(output, operator.before(given))
        call = self._call(Kind.REDUCE_SCATTER, -1, given.numel(), given.dtype, operator)
        totals: list[Tensor] = []

        def by_gloo(gloo: Any, host: Memory) -> Any:
            # What gloo's own does inside, too; but the work of that has no future.
            totals.append(host[Buffer.INPUT].clone())
            return gloo.allreduce(totals, reduce_options(_gloo_op(op)))

        memory = {Buffer.INPUT: given, Buffer.OUTPUT: output}
        self._run(call, given.dtype, memory, operator, by_gloo)
        for total in totals:
            output.copy_(total[self.rank * output.numel() :][: output.numel()])
        operator.after(output, self.size)

    def alltoall(
        self, output: Tensor, given: Tensor, sent: Sequence[int], expected: Sequence[int], elements: str
    ) -> None:
        """Send each rank its part of the flat input, and take a part of each into the flat output; all bytes.

        Args:
            output: the parts of all ranks, in their order.
            given: the parts for all ranks, in their order.
            sent: bytes for each rank.
            expected: bytes from each rank.
            elements: of what type they are.

        Raises:
            DisagreementError: a rank sends another one more or less than that expects. Where all ranks know
                all sizes it is raised on all, and the group may go on.
        """
        given = _apart_from(output, given)
        if self.size == 1:
            output.copy_(given)
            return
        if self._exchanges is None:
            fabric = self.member.fabric
            self._exchanges = Exchanges(
                fabric.topology,
                self.rank,
                self.member.cut,
                is_known=not fabric.is_assumed,
                gone=fabric.apart,
                lanes=self.member.lanes,
            )
        memory = {Buffer.INPUT: given, Buffer.OUTPUT: output}
        if not (self._exchanges.may_plan or self.member.options.gloo_below):
            call = CollectiveFingerprint(self._next(), sum(sent), OF_A_PAIR, Kind.ALLTOALL, elements)
            exchange = self._exchanges.straight(tuple(sent), tuple(expected))
            self._exchange(exchange, memory, call, ExchangeFingerprint(call, sent, expected))
            return
        sizes = self._agreed_sizes(sent, expected, elements)
        nbytes = -(-sum(map(sum, sizes)) // self.size)
        if self._reason_for_gloo(nbytes) is not None:

            def start(gloo: Any) -> Any:
                return gloo.alltoall_base(output, given, list(expected), list(sent), AllToAllOptions())

            opening = CollectiveFingerprint(self._next(), nbytes, -1, Kind.ALLTOALL, elements)
            with self.history.begin(opening, nbytes, None):
                self._by_gloo(opening, start)
            return
        exchange = self._exchanges.of(sizes)
        call = CollectiveFingerprint(
            self._next(), nbytes, -1, Kind.ALLTOALL, elements, schedule=exchange.digest
        )
        self._exchange(exchange, memory, call, call)

    def _exchange(
        self,
        exchange: Exchange,
        memory: Memory,
        call: CollectiveFingerprint,
        opening: CollectiveFingerprint | ExchangeFingerprint,
    ) -> None:
        """Run an alltoall over the connections that its opening and its graph need."""
        graph, apart = exchange.graph, isinstance(opening, ExchangeFingerprint)
        try:
            self.member.network.connect(range(self.size) if apart else {*graph.sends, *graph.receives})
        except ExecutionError as error:
            self.abort(f"rank {self.rank}: {Kind.ALLTOALL} ({call.elements}): {error}")
            raise
        with self._noted(self.history.begin(call, call.count, exchange.served), graph):
            self.member.engine.run(graph, memory, opening, None)

    def _agreed_sizes(self, sent: Sequence[int], expected: Sequence[int], elements: str) -> Sizes:
        """Bytes from each rank to each: every rank tells all others what it sends and what it expects."""
        own = torch.tensor([*sent, *expected])
        gathered = torch.empty(self.size * own.numel(), dtype=own.dtype)
        self._gather(gathered, own, CollectiveFingerprint(0, 0, -1, Kind.ALLTOALL, elements))
        of_ranks = gathered.view(self.size, 2, self.size).tolist()
        sizes = tuple(tuple(sends) for sends, _ in of_ranks)
        for target, (_, expects) in enumerate(of_ranks):
            for source, nbytes in enumerate(expects):
                if nbytes != (sends := sizes[source][target]):
                    raise DisagreementError(
                        f"rank {self.rank}: alltoall ({elements}): rank {source} sends {sends} bytes to rank "
                        f"{target}, which expects {nbytes}"
                    )
        return sizes

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._meet(CollectiveFingerprint(0, 1, -1, Kind.ALLREDUCE, "barrier"))

    def _meet(self, shown: CollectiveFingerprint) -> None:
        """Return when all ranks have made this call: an allreduce of one number in its name."""
        number = torch.zeros(1)
        call = CollectiveFingerprint(self._sequence, 1, -1, Kind.ALLREDUCE, "barrier")
        self._run(
            call,
            number.dtype,
            {Buffer.OUTPUT: number},
            served_operator(SUM, number.dtype),
            lambda gloo, host: gloo.allreduce([host[Buffer.OUTPUT]], reduce_options(SUM)),
            shown=shown,
        )

    def delegate(self, kind: Kind, root: int, count: int, elements: str, start: Callable[[Any], Any]) -> None:
        """Have gloo, or allgathers along cables, do what schedules never serve, once all ranks agree on it.

        Args:
            kind: of the call.
            root: -1 where there is none.
            count: elements that all ranks must have alike; 0 where ranks may differ.
            elements: type and reduction.
            start: begins it, on the gloo that is given; what it raises is raised here.
        """
        call = CollectiveFingerprint(0, count, root, kind, elements)
        # All of them, not only neighbours: gloo connects ranks at their first message, and once it does so
        # it waits for one that does not come until the group's timeout.
        self._meet(call)
        if self.member.cables is not None and self.size > 1:
            start(Gathering(self.rank, self.size, self.allgather))
            return
        opening = replace(call, sequence=self._next())
        with self.history.begin(opening, 0, None, is_counted=False):
            self._by_gloo(opening, start, is_alike=True, must_succeed=False)

    # ------------------------------------------------------------------ around them

    def prepare(self, kind: Kind | str, root: int = 0, *, waits: bool = True) -> None:
        """Find the schedules of a collective now, or begin to look for them; all ranks make this call."""
        kind = Kind(kind)
        call = CollectiveFingerprint(0, 0, root if kind.has_root else -1, kind, "")
        self._schedules.table(call, self._next, waits=waits)

    def agree_on_start(self) -> None:
        """See that all ranks have made the group; all make this call.

        Raises:
            ExecutionError: a rank died meanwhile, or did not come in time.
        """
        if self.size > 1:
            begin = CollectiveFingerprint(self._next(), 0, -1, Kind.CUSTOM, "begin together")
            self.member.engine.agree(begin)

    def explain(self, nbytes: int, kind: Kind | str = Kind.ALLREDUCE, root: int = 0) -> str:
        """What serves calls of that size, in one line; without a word to the other ranks.

        Args:
            nbytes: of the whole buffer: of all blocks for kinds that have one for each rank.
            kind: one of `SERVED`, or an alltoall.
            root: of kinds that have one.
        """
        kind = Kind(kind)
        if kind is Kind.ALLTOALL:
            if (reason := self._reason_for_gloo(nbytes)) is not None:
                return f"{kind}: gloo, {reason}"
            may_plan = not self.member.fabric.is_assumed or self.member.fabric.gone
            planned = ", or by ways planned for its sizes where that saves more than it costs"
            return f"{kind}: pairwise{planned if may_plan else ''}"
        of = f"{kind} of {format_size(nbytes)}" if nbytes else f"{kind} of 0 B"
        if (reason := self._reason_for_gloo(nbytes)) is not None:
            return f"{of}: gloo, {reason}"
        table = self._schedules.known(kind, root if kind.has_root else -1)
        if table is None:
            return f"{of}: a schedule, found at the first such call"
        if isinstance(table, str):
            return f"{of}: gloo, {table}"
        until = ", until others are found" if self._schedules.is_to_change(table) else ""
        if self._kernels is not None:
            until += f"; by the kernel below {format_size(self._kernels.limit(table))}, else by messages"
        elif self.member.options.p2p.startswith("kernel"):
            until += "; by messages, as ranks are on several hosts"
        return f"{of}: {table.at(nbytes)} on {self.member.fabric.topology.name}{until}"

    def begin_trace(self) -> Tracer:
        """Note all messages of the calls from now on, which takes time of its own, until `end_trace`."""
        self._tracer = Tracer(self.rank, self.member.global_ranks, self.member.network.channels)
        return self._tracer

    def end_trace(self) -> None:
        """Note no more of them."""
        self._tracer = None

    def avoid(self, first: int, second: int) -> None:
        """Leave out the link between two ranks of the fabric from now on; all ranks make this call.

        Ranks are those of the fabric, as its file numbers them, not those of the job or of the group.

        Raises:
            InputError: there is no such link.
        """
        self.member.avoid(first, second)
        self._plan_anew()

    def go_on(self) -> None:
        """Join again along the cables that answer, after a call has failed; all ranks make this call.

        Raises:
            InputError: links have no addresses, or those that are left do not join all ranks.
            ExecutionError: a rank has ended, or did not come in time.
        """
        self.member.join_again()
        self._sequence = 0
        self._plan_anew()

    def _plan_anew(self) -> None:
        """Forget all schedules: the fabric, or the connections, are others."""
        self._generation += 1
        self._schedules.close()
        self._schedules = self._new_schedules()
        self._kernels = self._new_kernels()
        self._exchanges = None

    def set_timeout(self, timeout_s: float) -> None:
        """After how many seconds without progress calls fail from the next one on."""
        self.member.timeout_s = timeout_s
        self._gloo.set_timeout(timedelta(seconds=timeout_s))

    def abort(self, reason: str) -> None:
        """Make all ranks' calls fail, now and later."""
        self.history.fail(reason)
        self.member.engine.give_up(reason)
        self._gloo.end()
        if self.carrier is not None:
            self.carrier.end()

    def close(self) -> None:
        """End the connections; others that still work with what this rank sent are not disturbed."""
        self._schedules.close()
        self.member.close()

    # ------------------------------------------------------------------ one call

    def _call(
        self, kind: Kind, root: int, count: int, dtype: torch.dtype, operator: ReductionOperator | None = None
    ) -> CollectiveFingerprint:
        elements = str(dtype).removeprefix("torch.")
        if operator is not None:
            elements += f" {operator.name}"
        return CollectiveFingerprint(self._sequence, count, root, kind, elements)

    def _run(
        self,
        call: CollectiveFingerprint,
        dtype: torch.dtype,
        memory: dict[Buffer, Tensor],
        operator: ReductionOperator | None,
        by_gloo: Callable[[Any, Memory], Any],
        *,
        shown: CollectiveFingerprint | None = None,
    ) -> None:
        """Serve a call by a schedule, or begin it `by_gloo`; in the name of another, it is not counted."""
        is_counted = shown is None
        nbytes = call.count * dtype.itemsize
        # What ranks meet for before gloo begins may not be gloo's.
        is_by_schedule = self._reason_for_gloo(nbytes) is None or (shown is not None and self.size > 1)
        if is_by_schedule:
            table = self._schedules.table(call, self._next)
            if not isinstance(table, str):
                asked = call.kind, call.root, nbytes, call.count
                carrier = self._carrier_of(memory) if is_counted else None
                entry, graph = table.at(nbytes), None
                by_kernel = None
                if carrier is not None and self._kernels is not None:
                    by_kernel = self._kernels.entry(table, nbytes, next(iter(memory.values())), operator)
                if carrier is None:
                    digest, graph = self._schedules.graph(*asked)
                    serve = partial(self.member.engine.run, graph, memory)
                elif by_kernel is None:
                    digest, grouped = self._schedules.groups(*asked)
                    serve = partial(self._by_messages, carrier, grouped, memory)
                else:
                    entry = by_kernel
                    digest, executor = self._executor_of(call, table, by_kernel, memory, operator)
                    serve = partial(self._by_kernel, carrier, executor, memory)
                opening = replace(shown or call, sequence=self._next(), schedule=digest)
                begun = self.history.begin(opening, nbytes, entry, is_counted)
                with self._noted(begun, graph, dtype.itemsize):
                    serve(opening, operator)
                return
        # Gloo takes tensors in host memory, and leaves those that lie there where they are.
        host = {buffer: tensor.cpu() for buffer, tensor in memory.items()}
        opening = replace(shown or call, sequence=self._next())
        with self._noted(self.history.begin(opening, nbytes, None, is_counted)):
            self._by_gloo(opening, lambda gloo: by_gloo(gloo, host))
        if Buffer.OUTPUT in host and host[Buffer.OUTPUT] is not memory[Buffer.OUTPUT]:
            memory[Buffer.OUTPUT].copy_(host[Buffer.OUTPUT])

    @contextmanager
    def _noted(self, call: Call, graph: TaskGraph | None = None, item_bytes: int = 1) -> Iterator[None]:
        """The time of a call, for the history and, where one is made, the trace."""
        if self._tracer is not None:
            self._tracer.watch()
        with call:
            yield
        if self._tracer is not None:
            self._tracer.add(call, graph, item_bytes)

    def _carrier_of(self, memory: Memory) -> MessageCarrier | None:
        """Who carries the messages of a call on these tensors; None where the engine does."""
        carrier = self.carrier
        return carrier if carrier and all(carrier.holds(tensor) for tensor in memory.values()) else None

    def _by_messages(
        self,
        carrier: MessageCarrier,
        grouped: tuple[Program, Sequence[MessageGroup]],
        memory: Memory,
        opening: CollectiveFingerprint,
        operator: ReductionOperator | None,
    ) -> None:
        """Serve a call by a program's groups of messages, once the ranks agree on it."""
        program, groups = grouped
        self.member.engine.agree(opening)
        given = next(iter(memory.values()))
        scratch = torch.empty(program.scratch_elements, dtype=given.dtype, device=given.device)
        backend = carrier.backend(self.member.engine.timeout_s)
        call = ProgramRun(program, groups, backend, {**memory, Buffer.SCRATCH: scratch}, operator)
        try:
            call.run()
            # A peer may die meanwhile.
            self.member.engine.wait_external(carrier.mark(given), look_every_s=MARKS_S)
        except BaseException as error:
            carrier.end()  # or the device would wait for ever for a peer, and this thread for the device
            if isinstance(error, RuntimeError) and not isinstance(error, ExecutionError):
                self.member.engine.blame(opening, f"{call.reached}: {str(error).splitlines()[0]}")
            raise

    def _executor_of(
        self,
        call: CollectiveFingerprint,
        table: ScheduleTable,
        entry: KernelEntry,
        memory: Memory,
        operator: ReductionOperator | None,
    ) -> tuple[bytes, DeviceExecutor]:
        """What runs a call by the kernel, and its digest; who cannot have its memory gives up."""
        assert self._kernels is not None, "it has the entry"
        try:
            return self._kernels.executor(table, entry, next(iter(memory.values())), operator)
        except (RuntimeError, InputError, OSError) as error:
            if self.member.failure is None:
                self.abort(f"rank {self.rank}: {call.kind}: memory of the kernel: {error}")
            raise

    def _exchanged(self, said: str) -> list[str]:
        """What all ranks have said, where they make memory for the kernel."""
        text = said.encode()

        def gathered(own: Tensor) -> Tensor:
            found = torch.empty(self.size * own.numel(), dtype=torch.uint8)
            self._gather(found, own, CollectiveFingerprint(0, 0, -1, Kind.ALLGATHER, "kernel memory"))
            return found.view(self.size, -1)

        lengths = gathered(torch.tensor([len(text)]).view(torch.uint8)).view(torch.int64).flatten().tolist()
        padded = bytearray(text.ljust(max(1, *lengths), b"\0"))
        rows = gathered(torch.frombuffer(padded, dtype=torch.uint8)).tolist()
        return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]

    def _by_kernel(
        self,
        carrier: MessageCarrier,
        executor: DeviceExecutor,
        memory: Memory,
        opening: CollectiveFingerprint,
        operator: ReductionOperator | None,
    ) -> None:
        """Serve a call by the kernel, once the ranks agree on it."""
        assert self._kernels is not None, "it has the executor"
        engine = self.member.engine
        is_over: Callable[[], bool] = lambda: True  # noqa: E731
        engine.agree(opening)
        executor.timeout_s = engine.timeout_s
        try:
            call = partial(self._kernels.run, executor, memory, opening.count, operator)
            is_over = carrier.launch(call, next(iter(memory.values())))
            engine.wait_external(is_over, look_every_s=MARKS_S, needed=range(self.size))
            executor.finish()
        except BaseException as error:
            executor.abort()
            carrier.end()
            with suppress(Exception):  # the same again
                while not is_over():
                    time.sleep(MARKS_S)
            if isinstance(error, RuntimeError) and self.member.failure is None:
                engine.blame(opening, str(error).splitlines()[0])
            raise

    def _by_gloo(
        self,
        opening: CollectiveFingerprint,
        start: Callable[[Any], Any],
        *,
        is_alike: bool = False,
        must_succeed: bool = True,
    ) -> None:
        """Have gloo serve a call once the ranks agree on it, if it is not known to be alike on all of them.

        Where it must succeed, an error of gloo ends the group; else it may be an argument that gloo refuses
        on all ranks.
        """
        if self.member.cables is not None and self.size > 1:
            raise InputError(
                f"{opening.kind} of {opening.elements}: must be served by a schedule where links have "
                f"addresses, not by gloo (method {self.member.options.method})"
            )
        if self.size == 1:
            start(self._gloo.get()).wait()
            return
        # Not before the ranks agree: gloo ends the process when more bytes come than it expects.
        self.member.engine.begin(opening, has_agreed=is_alike)
        self.member.engine.wait_external()
        work = start(self._gloo.of_timeout(self.member.engine.timeout_s))  # that of this call
        try:
            # gloo works in threads of its own: meanwhile a peer that gives up is noticed here.
            ended = threading.Event()

            def end(_: object) -> None:
                ended.set()
                self.member.engine.ring()

            future = future_of(work)
            if future is not None:
                future.add_done_callback(end)
                self.member.engine.wait_external(ended.is_set)
            work.wait()
        except ExecutionError:
            raise
        except RuntimeError as error:
            if not must_succeed:
                raise
            self.member.engine.blame(opening, str(error).splitlines()[0])

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    def _reason_for_gloo(self, nbytes: int) -> str | None:
        """Why gloo serves such a call whatever the schedules are; None where it does not."""
        if self.size == 1:
            return "a group of one rank"
        below = self.member.options.gloo_below
        below = GLOO_BELOW if below is None else below
        if nbytes < below:
            return f"which serves below {format_size(below)} (gloo_below)"
        return None

    def _new_kernels(self) -> KernelCalls | None:
        """What the kernel serves on the present fabric; None where it is not asked for, or cannot."""
        member, options = self.member, self.member.options
        if not options.p2p.startswith("kernel") or member.cores is None:
            return None
        from arborcast.backends.device.memory import PeerRanks
        from arborcast.backends.group.kernel_calls import KernelCalls

        name = f"{member.name}/kernel/{self._generation}"
        store = PrefixStore(f"kernel/{self._generation}", member.own_store)
        ranks = PeerRanks.by_store(store, name, self.rank, self.size, self._exchanged)
        return KernelCalls(ranks, MESSAGES[options.p2p], options.kernel_below, member.cut)

    def _new_schedules(self) -> Schedules:
        """None yet, for the present fabric."""
        member, fabric = self.member, self.member.fabric
        return Schedules(
            fabric.asked,
            member.options,
            PrefixStore(f"schedules/{self._generation}", member.own_store),
            member.network,
            member.engine,
            member.cut,
            partial(joint_part, fabric),
            partial(spare_table, fabric.spares, fabric.gone, fabric.topology),
            member.cores if fabric.is_assumed else None,
            member.lanes,
        )


def _apart_from(output: Tensor, given: Tensor) -> Tensor:
    """An input that no write to the output changes: itself, or a copy where the two share memory."""
    start, out = given.data_ptr(), output.data_ptr()
    ends = start + given.numel() * given.itemsize, out + output.numel() * output.itemsize
    return given.clone() if start < ends[1] and out < ends[0] else given


def _gloo_op(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> dist.ReduceOp:
    """What gloo is asked for: factors have been applied before, and averages are divided after it."""
    name = name_of(op)
    return dist.ReduceOp(getattr(dist.ReduceOp, "SUM" if name in {"PREMUL_SUM", "AVG"} else name))
