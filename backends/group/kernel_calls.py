"""Which calls of a group the kernel of `backends.device` serves, and what it needs for each schedule.

It serves calls below a size; the others, and what it lacks, grouped messages serve as before. What decides
(collective, length, type, reduction, fabric, options) is the same on all ranks, and what follows from it
stands in what they compare before a call.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_left
from collections.abc import Mapping

import torch
from torch import Tensor

from arborcast.backends.device.cost import messages_us, predicted_us
from arborcast.backends.device.executor import TYPES, DeviceExecutor
from arborcast.backends.device.memory import PeerRanks
from arborcast.backends.device.paths import make_memory
from arborcast.backends.device.plan import DevicePlan
from arborcast.backends.lowering.layout import Buffer
from arborcast.backends.schedules.schedule_table import KernelEntry, ScheduleTable
from arborcast.backends.tensors.torch_reduction import ReductionOperator
from arborcast.synth.formats.sizes import format_size
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.simulation.pieces import PieceRule

log = logging.getLogger(__name__)

PROGRAMS = {"cuda": 16, "cpu": 1}
"""Of each rank, by the type of a device: about NCCL's channels; the interpreter runs one after another."""

MOST_PLANS = 32
"""Schedules and types that a group has memory for: rings of slots of at most 64 KiB for each message of each
program."""

_SIZES = tuple(1 << exponent for exponent in range(10, 31))
"""Bytes among which a limit is looked for; the kernel serves nothing above the last."""

_OPERATIONS = {"sum": "sum", "avg": "sum", "premul_sum": "sum", "max": "max", "min": "min"}
"""Of the kernel, by torch's; factors and divisions come before and after."""


class KernelCalls:
    """The calls of one rank that the kernel serves.

    Args:
        ranks: of the group; they make memory together.
        device: type of the device that tensors lie on.
        below: bytes below which it serves; None for what the cost model says.
        cut: into how many pieces chunks of messages are cut.
    """

    def __init__(self, ranks: PeerRanks, device: str, below: int | None, cut: PieceRule) -> None:
        self._ranks, self._device, self._below, self._cut = ranks, device, below, cut
        self._limits: dict[str, int] = {}
        self._entries: dict[tuple[str, int], KernelEntry] = {}
        self._executors: dict[tuple[str, int, torch.dtype, torch.device], DeviceExecutor] = {}

    def limit(self, table: ScheduleTable) -> int:
        """Bytes below which the kernel serves calls by a table, as far as it has their type and reduction."""
        if self._below is not None:
            return self._below
        if table.digest not in self._limits:
            found = bisect_left(_SIZES, True, key=lambda size: not self._is_faster(table, size))
            limit = self._limits[table.digest] = _SIZES[min(found, len(_SIZES) - 1)]
            if self._ranks.rank == 0:
                kind, name = table.collective.kind, table.topology.name
                log.info("%s on %s: the kernel serves below %s", kind, name, format_size(limit))
        return self._limits[table.digest]

    def entry(
        self, table: ScheduleTable, nbytes: int, tensor: Tensor, operator: ReductionOperator | None
    ) -> KernelEntry | None:
        """What serves a call where the kernel does; None where it does not.

        It has the types of `TYPES`, and of what is not added up every type. Extremes of floating-point
        numbers it leaves to messages, as it would lose NaN; other reductions, and what exceeds `MOST_PLANS`.
        """
        if operator is not None and (
            tensor.dtype not in TYPES
            or operator.name not in _OPERATIONS
            or (operator.name in {"max", "min"} and tensor.dtype.is_floating_point)
        ):
            return None
        if not 0 < nbytes < self.limit(table):
            return None
        found = table.at(nbytes)
        key = table.digest, found.from_bytes
        if (*key, _type(tensor, operator), tensor.device) not in self._executors and (
            len(self._executors) >= MOST_PLANS
        ):
            return None
        return self._entries.setdefault(key, KernelEntry(found.from_bytes, found.schedule))

    def executor(
        self, table: ScheduleTable, entry: KernelEntry, tensor: Tensor, operator: ReductionOperator | None
    ) -> tuple[bytes, DeviceExecutor]:
        """The digest of such a call, and what runs it; made by all ranks together at the first one."""
        dtype = _type(tensor, operator)
        key = table.digest, entry.from_bytes, dtype, tensor.device
        if key not in self._executors:
            plan = self._plan(entry.schedule, dtype.itemsize)
            memory = make_memory(plan, dtype.itemsize, self._ranks, self._device)
            self._executors[key] = DeviceExecutor(plan, self._ranks.rank, memory, dtype)
        digest = hashlib.sha256(f"{table.digest}/{entry.from_bytes}/kernel".encode()).digest()[:8]
        return digest, self._executors[key]

    @staticmethod
    def run(
        executor: DeviceExecutor,
        memory: Mapping[Buffer, Tensor],
        count: int,
        operator: ReductionOperator | None,
    ) -> None:
        """Run a call of `count` elements on the buffers of this rank."""
        op = "sum" if operator is None else _OPERATIONS[operator.name]
        if operator is None:  # only bits travel
            count *= next(iter(memory.values())).itemsize
            memory = {buffer: tensor.view(torch.uint8) for buffer, tensor in memory.items()}
        output = memory.get(Buffer.OUTPUT, memory.get(Buffer.INPUT))
        given = memory.get(Buffer.INPUT, output)
        assert given is not None and output is not None, "every rank has a tensor"
        executor(given, output, count, op)

    def _is_faster(self, table: ScheduleTable, size: int) -> bool:
        """Whether messages are not."""
        schedule = table.at(size).schedule
        return predicted_us(self._plan(schedule), size) <= messages_us(schedule, size, self._cut)

    def _plan(self, schedule: AnySchedule, itemsize: int = 4) -> DevicePlan:
        """The same on all ranks."""
        programs = PROGRAMS[self._device]
        groups = min(programs, schedule.chunk_count)
        return DevicePlan(schedule, groups=groups, lanes=programs // groups, itemsize=itemsize)


def _type(tensor: Tensor, operator: ReductionOperator | None) -> torch.dtype:
    """Of the elements that the kernel is given."""
    return torch.uint8 if operator is None else tensor.dtype
