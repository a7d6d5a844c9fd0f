"""One schedule run by the engine of the process group "synth", without the group around it.

The same connections, piece sizes, openings and data flow as in training, for schedules that the group would
not have chosen: any kind, relays included. `backends.measure.sweep` measures through it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from arborcast.backends.dataflow.engine import Engine
from arborcast.backends.dataflow.task_graph import TaskGraph, compile_graph
from arborcast.backends.lowering.layout import Buffer
from arborcast.backends.lowering.lower import lower_rank
from arborcast.backends.lowering.rank_view import digest_of, partners_of
from arborcast.backends.options import Options
from arborcast.backends.schedules.rendezvous import are_on_one_host
from arborcast.backends.tensors.checks import check_buffers
from arborcast.backends.tensors.torch_compat import PrefixStore, Store
from arborcast.backends.tensors.torch_reduction import served_operator
from arborcast.backends.transport.fingerprint import CollectiveFingerprint
from arborcast.backends.transport.network import Network
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.simulation.pieces import ONE_HOST, SEVERAL_HOSTS

GRAPHS_KEPT = 8


class EngineRunner:
    """Runs one schedule; every rank of its topology makes one at the same time.

    Args:
        schedule: a correct one whose switches only forward, in either form.
        store: that all ranks share.
        rank: of this process in the schedule's topology.
        timeout_s: to connect within, and without any progress in a call.

    Transport, address and piece size are those of the environment, as for a process group.

    Raises:
        InputError: variables that break a rule.
        ExecutionError: a rank did not come in time.
    """

    def __init__(self, schedule: AnySchedule, store: Store, rank: int, *, timeout_s: float) -> None:
        self.rank = rank
        self.schedule = schedule
        options = Options.from_environment()
        size = schedule.topology.ranks
        rule = ONE_HOST if are_on_one_host(PrefixStore("hosts", store), rank, size) else SEVERAL_HOSTS
        self._cut = replace(rule, piece_bytes=options.piece_bytes or rule.piece_bytes)
        self._digest = digest_of(schedule)[:8]
        self._network = Network(
            PrefixStore("channels", store),
            rank,
            size,
            timeout_s=timeout_s,
            transport=options.transport,
            address=options.address,
        )
        self._network.connect(peers_of([schedule], rank, size))
        self._engine = Engine(rank, self._network, timeout_s=timeout_s)
        self._graph = lru_cache(GRAPHS_KEPT)(self._compile)
        self._sequence = 0

    def run(
        self,
        count: int,
        dtype: torch.dtype,
        *,
        given: Tensor | None = None,
        output: Tensor | None = None,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> None:
        """One call; arguments as for `backends.executors.torch_p2p.Executor.run`.

        Raises:
            InputError: tensors that do not fit, or a reduction that the group leaves to gloo (truth values).
            ExecutionError: a peer died, or nothing happened for too long; no further call will work.
        """
        collective = self.schedule.collective
        graph = self._graph(count, dtype)
        program = graph.program
        given, output = check_buffers(collective, program, given, output, dtype, torch.device("cpu"))
        operator = served_operator(op, dtype) if collective.kind.reduces else None
        memory = {Buffer.INPUT: given, Buffer.OUTPUT: output}
        elements = str(dtype).removeprefix("torch.") + ("" if operator is None else f" {operator.name}")
        root = -1 if collective.root is None else collective.root
        opening = CollectiveFingerprint(self._sequence, count, root, collective.kind, elements, self._digest)
        self._sequence += 1
        held = {buffer: tensor for buffer, tensor in memory.items() if tensor is not None}
        self._engine.run(graph, held, opening, operator, dtype=dtype)
        if operator is not None and output is not None:
            operator.after(output, program.contributors)

    def close(self) -> None:
        """Leave in good order."""
        self._network.close()
        self._engine.close()

    def give_up(self, reason: str) -> None:
        """Tell the other ranks why this one ends early."""
        self._engine.give_up(reason)

    def _compile(self, count: int, dtype: torch.dtype) -> TaskGraph:
        pieces = self._cut.pieces(self.schedule, count * dtype.itemsize)
        return compile_graph(lower_rank(self.schedule, self.rank, count, pieces=pieces))


def peers_of(schedules: Iterable[AnySchedule], rank: int, size: int) -> set[int]:
    """Whom a rank exchanges messages with.

    Args:
        schedules: that are to be run.
        rank: the one that asks.
        size: ranks of the group; neighbours in their circle compare openings, whatever the schedules.
    """
    neighbours = {(rank + 1) % size, (rank - 1) % size}
    return neighbours.union(*(partners_of(schedule, rank) for schedule in schedules)) - {rank}
