"""A schedule as an operation on tensors, without a process group of ours: a custom operator of torch.

`torch.compile` traces it, and engines that bring their own groups call it. All ranks call alike, in one
order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from arborcast.backends.device.executor import OPERATIONS, DeviceExecutor, refuse_compiled
from arborcast.backends.device.memory import PeerRanks
from arborcast.backends.device.paths import make_memory
from arborcast.backends.device.plan import DevicePlan
from arborcast.backends.lowering.layout import lay_out
from arborcast.synth.errors import InputError
from arborcast.synth.formats.any_schedule import any_schedule_to_document
from arborcast.synth.implicit_schedule import AnySchedule

_NUMBERS = count()

_MADE: WeakValueDictionary[str, Operation] = WeakValueDictionary()
"""By names, which a traced graph holds as constants."""


class Operation:
    """One rank's calls of a schedule; see `compile`."""

    def __init__(
        self,
        plan: DevicePlan,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        op: str,
        device: str,
        timeout_s: float,
    ) -> None:
        self._collective, self._op = plan.schedule.collective, op
        self._rank, self._ranks = group.rank(), len(self._collective.ranks)
        memory = make_memory(plan, dtype.itemsize, PeerRanks.of(group), device)
        self._executor = DeviceExecutor(plan, self._rank, memory, dtype, timeout_s=timeout_s)
        unit = lay_out(plan.schedule, self._ranks)
        self._result_blocks = unit.output_elements(self._rank)
        self._gives_blocks = self._collective.kind.gathers
        self.name = f"{self._collective.kind} {next(_NUMBERS)}"
        _MADE[self.name] = self

    def __call__(self, tensor: Tensor) -> Tensor:
        """What this rank gets, as a new tensor.

        Args:
            tensor: what it gives; of the same shape on ranks that give nothing. Blocks are parts of the first
                dimension, a multiple of the ranks where the collective divides it.

        Returns:
            A tensor without elements on ranks that get nothing.

        Raises:
            InputError: no dimension, one that does not divide, another type, elsewhere, or not contiguous.
            ExecutionError: a peer did not come in time; see `DeviceExecutor`.
        """
        found: Tensor = torch.ops.arborcast.collective(tensor, self.name)
        return found

    def prepare(self, shape: tuple[int, ...]) -> None:
        """Make tables and compile for tensors of a shape, so that a graph may capture the call."""
        self._executor.prepare(self._elements(torch.empty(shape, device="meta")), self._op)

    def finish(self) -> None:
        """Wait for the calls on the current stream; errors as for `DeviceExecutor.finish`."""
        self._executor.finish()

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Of the result."""
        first, *others = tensor.shape
        blocks = 1 if self._gives_blocks else self._ranks
        return (first * self._result_blocks // blocks, *others)

    def run(self, tensor: Tensor) -> Tensor:
        """What the operator does."""
        if not tensor.dim() or (
            not self._gives_blocks and tensor.shape[0] * self._result_blocks % self._ranks
        ):
            raise InputError(
                f"device: {self._collective.kind} needs a first dimension that {self._ranks} ranks divide, "
                f"got shape {tuple(tensor.shape)}"
            )
        result = tensor.new_empty(self.shape_of(tensor))
        self._executor(tensor, result, self._elements(tensor), self._op)
        return result

    def _elements(self, tensor: Tensor) -> int:
        """Of the whole buffer."""
        return tensor.numel() * (self._ranks if self._gives_blocks else 1)


def compile(  # noqa: A001 - as torch names what it does
    schedule: AnySchedule,
    group: dist.ProcessGroup | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    op: str = "sum",
    device: str = "cuda",
    timeout_s: float = 600.0,
    **cut: Any,
) -> Operation:
    """A schedule as an operation on tensors; all ranks of the group call this together.

    Args:
        schedule: a correct one, for as many ranks as the group has, relays included.
        group: of torch, with any backend; None for the default one.
        dtype: of the tensors, one of `executor.TYPES`.
        op: how contributions are combined: "sum", "max" or "min".
        device: "cuda" for GPUs of which neighbours in the schedule reach each other; "cpu" for a trial
            in Triton's interpreter.
        timeout_s: of a call, after which it fails on all ranks.
        cut: `groups`, `lanes`, `piece` and `push` of `DevicePlan`; the same on all ranks.

    Raises:
        InputError: another number of ranks, an unknown operation, a schedule that the kernel does not serve,
            ranks that were given different things, neighbours in the schedule whose GPUs do not reach each
            other, or a CPU without the interpreter.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise InputError("device: needs a group: call torch.distributed.init_process_group first")
    text = json.dumps(any_schedule_to_document(schedule), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    asked = {"schedule": digest, "dtype": str(dtype), "op": op, "device": device, **cut}
    _check_alike(asked, group)  # before anything that one rank alone may refuse
    if group.size() != schedule.topology.ranks:
        raise InputError(
            f"device: the schedule is for {schedule.topology.ranks} ranks, the group has {group.size()}"
        )
    if op not in OPERATIONS:
        raise InputError(f"device: operation must be one of {', '.join(OPERATIONS)}, got {op}")
    if device == "cpu":
        refuse_compiled("device: cpu")
    plan = DevicePlan(schedule, itemsize=dtype.itemsize, **cut)
    return Operation(plan, group, dtype, op, device, timeout_s)


def _check_alike(asked: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Raise where ranks were given different things."""
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, asked, group=group)
    for rank, other in enumerate(of_ranks):
        for name in sorted({*asked, *other}):
            if asked.get(name) != other.get(name):
                raise InputError(
                    f"device: {name} must be the same on all ranks, differs on {group.rank()} and {rank}"
                )


@torch.library.custom_op("arborcast::collective", mutates_args=())
def _collective(tensor: Tensor, name: str) -> Tensor:
    return _MADE[name].run(tensor)


@_collective.register_fake
def _(tensor: Tensor, name: str) -> Tensor:
    return tensor.new_empty(_MADE[name].shape_of(tensor))
