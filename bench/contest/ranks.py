"""What every rank of the testbed runs: all contenders in turns, each result checked element by element.

All ranks begin a run at the same instant of the clock that they share, and the run has ended when the last of
them is done. It is timed by that clock, so that a rank which comes late counts as time that the run took.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from arborcast.bench.contest.contenders import Contender
from arborcast.bench.harness.payload import Payload, torch_call
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.schedule import Schedule

if TYPE_CHECKING:
    import torch

    from arborcast.backends.lowering.layout import Buffer

LEAD_S = 0.01
"""From the word to begin until the begin: it must have reached every rank by then."""

LOOK_S = 0.001
"""Before the begin, when the processors' clocks are read: long enough for that, and not long beside a run."""

ITEM_BYTES = 4


@dataclass(frozen=True)
class Round:
    """What a rank saw of one run.

    Attributes:
        seconds: from the common begin to its own end.
        cpu_seconds: of all its threads.
        idle: seconds of all processors meanwhile that nobody used, or only somebody of less priority.
        capacity: seconds of all processors.
    """

    seconds: float
    cpu_seconds: float
    idle: float
    capacity: float


@dataclass(frozen=True)
class Order:
    """What the ranks are to do.

    Attributes:
        collective: among all of them.
        size_bytes: asked for; see `elements`.
        contenders: in turns.
        runs: rounds after the first, which is not counted.
        timeout_s: without progress.
    """

    collective: Collective
    size_bytes: int
    contenders: tuple[Contender, ...]
    runs: int
    timeout_s: float

    @property
    def elements(self) -> int:
        """Of the whole buffer: as many as the size holds, rounded up to blocks of one length."""
        unit = len(self.collective.ranks) if self.collective.kind is Kind.ALLGATHER else 1
        return -(-self.size_bytes // (ITEM_BYTES * unit)) * unit


def run_order(rank: int, address: str, store_path: str, order: Order) -> list[list[Round]]:
    """Of each contender, the rounds of this rank; for `bench.emulation.processes.run_inside`.

    Raises:
        RuntimeError: a result is wrong; the message says where.
    """
    participant = Participant(rank, address, store_path, order)
    found = participant.rounds()
    participant.close()
    return found


class Participant:
    """A rank with its groups, its channels and its data.

    Attributes:
        data: its buffers.

    Args:
        rank: this one.
        address: its own, where it listens.
        store_path: of a file that all ranks share.
        order: what to do.
    """

    def __init__(
        self,
        rank: int,
        address: str,
        store_path: str,
        order: Order,
    ) -> None:
        import torch.distributed as dist

        from arborcast.backends.dataflow.engine import Engine
        from arborcast.backends.executors.engine_runner import peers_of
        from arborcast.backends.tensors.torch_compat import FileStore, PrefixStore
        from arborcast.backends.transport.network import Network

        self.rank = rank
        self.order = order
        size = len(order.collective.ranks)
        store = FileStore(store_path, size)
        timeout = timedelta(seconds=order.timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        network = Network(
            PrefixStore("channels", store),
            rank,
            size,
            timeout_s=order.timeout_s,
            transport="sockets",
            address=address,
        )
        schedules = [each.schedule for each in order.contenders if each.schedule is not None]
        network.connect(peers_of(schedules, rank, size))
        self._network = network
        self._engine = Engine(rank, network, timeout_s=order.timeout_s)
        self._calls = 0
        self.data = Data(order, rank)

    def close(self) -> None:
        """Leave in good order."""
        self._network.close()
        self._engine.close()

    def rounds(self) -> list[list[Round]]:
        """Those of all contenders, each round with another one first."""
        calls = [self.call(each) for each in self.order.contenders]
        count = len(calls)
        found: list[list[Round]] = [[] for _ in calls]
        for turn in range(1 + self.order.runs):
            for place in range(count):
                index = (turn + place) % count
                seen = self.timed(calls[index], self.order.contenders[index].name)
                if turn:
                    found[index].append(seen)
        return found

    def call(self, contender: Contender) -> Callable[[], object]:
        """What one run of a contender calls."""
        if contender.schedule is None:
            collective, data = self.order.collective, self.data
            asked = torch_call(collective.kind, self.order.elements, collective.root)
            return partial(asked, data.output, data.given)
        if contender.by_messages:
            return self._by_messages(contender.schedule)
        return self._by_engine(contender, contender.schedule)

    def timed(self, call: Callable[[], object], what: str) -> Round:
        """One run, after which the data are checked."""
        import torch.distributed as dist

        self.data.fill()
        begin = self._agree_on_begin()
        _sleep_until(begin - LOOK_S)  # the wait for the begin would count as idle, a third of a short run
        idle, capacity = _processors()
        cpu = time.process_time()
        _sleep_until(begin)
        call()
        end = time.perf_counter()
        cpu = time.process_time() - cpu
        dist.barrier()  # before the processors are used for anything else
        idle_after, capacity_after = _processors()
        self.data.check(f"{what}: {self.order.collective.kind} of {self.order.size_bytes} bytes")
        return Round(end - begin, cpu, idle_after - idle, capacity_after - capacity)

    def _agree_on_begin(self) -> float:
        import torch
        import torch.distributed as dist

        dist.barrier()
        at = torch.tensor([time.perf_counter() + LEAD_S], dtype=torch.float64)
        dist.broadcast(at, 0)
        return at.item()

    def _by_engine(self, contender: Contender, schedule: Schedule) -> Callable[[], object]:
        import torch
        import torch.distributed as dist

        from arborcast.backends.dataflow.task_graph import compile_graph
        from arborcast.backends.lowering.lower import lower_rank
        from arborcast.backends.tensors.torch_reduction import operator_of
        from arborcast.backends.transport.fingerprint import CollectiveFingerprint

        kind, root = self.order.collective.kind, self.order.collective.root
        operator = operator_of(dist.ReduceOp.SUM, torch.float32) if kind.reduces else None
        pieces = pieces_of(schedule, self.order)
        graph = compile_graph(lower_rank(schedule, self.rank, self.order.elements, pieces=pieces))
        opening = CollectiveFingerprint(
            0,
            self.order.elements,
            -1 if root is None else root,
            kind,
            "float32" if operator is None else f"float32 {operator.name}",
            _digest_of(contender),
        )

        def call() -> None:
            self._calls += 1
            opened = replace(opening, sequence=self._calls)
            self._engine.run(graph, self.data.memory, opened, operator)

        return call

    def _by_messages(self, schedule: Schedule) -> Callable[[], object]:
        from arborcast.backends import Executor

        data, executor = self.data, Executor(schedule, pieces=pieces_of(schedule, self.order))
        match schedule.collective.kind:
            case Kind.ALLREDUCE:
                return lambda: executor.allreduce(data.output)
            case Kind.BROADCAST:
                return lambda: executor.broadcast(data.output)
            case _:
                return lambda: executor.allgather(data.output, data.given)


class Data:
    """The buffers of a rank."""

    def __init__(self, order: Order, rank: int) -> None:
        import torch

        collective = order.collective
        self._payload = Payload(
            collective.kind, order.elements, rank, len(collective.ranks), root=collective.root
        )
        self.given = self._payload.given
        self.output: torch.Tensor = torch.empty_like(self._payload.initial)

    @property
    def memory(self) -> dict[Buffer, torch.Tensor]:
        """What the engine works on."""
        from arborcast.backends.lowering.layout import Buffer

        found = {Buffer.OUTPUT: self.output}
        if self.given.numel():
            found[Buffer.INPUT] = self.given
        return found

    def fill(self) -> None:
        """The state before a run."""
        self.output.copy_(self._payload.initial)

    def check(self, what: str) -> None:
        """Raise where any element is not what it must be."""
        self._payload.check(self.output, what)


def _digest_of(contender: Contender) -> bytes:
    """What calls name its schedule by."""
    return hashlib.sha256(contender.name.encode()).digest()[:8]


def pieces_of(schedule: Schedule, order: Order) -> int:
    """As the process group cuts between hosts."""
    from arborcast.synth.simulation.pieces import SEVERAL_HOSTS

    return SEVERAL_HOSTS.pieces(schedule, order.elements * ITEM_BYTES)


def _sleep_until(instant: float) -> None:
    while (left := instant - time.perf_counter()) > 0:
        time.sleep(left)


def _processors() -> tuple[float, float]:
    """Seconds since the start of the machine that its processors were idle or did niced work, and in all."""
    line = Path("/proc/stat").read_text().split("\n", 1)[0]
    user, nice, system, idle, waiting, *stolen = (int(word) for word in line.split()[1:9])
    return (nice + idle + waiting) / 100, (user + nice + system + idle + waiting + sum(stolen)) / 100
