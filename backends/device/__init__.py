"""A schedule as tables that one kernel goes through on every GPU. It ran on one, which all ranks shared.

`plan.DevicePlan` makes an instruction of each value that a chunk has on a rank, and of these, for buffers of
one length, the `Tables` of each rank. `kernel` does what they say in Triton, `memory` is what ranks reach of
each other, of which `paths` chooses, and `executor.DeviceExecutor` one rank's calls. Flags and slots in such
memory are all that ranks share. `compile` makes a schedule an operation on tensors, which calls that; `cost`
says how long it takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arborcast.lazy import loader

if TYPE_CHECKING:
    from arborcast.backends.device.operation import compile as compile  # noqa: A004

_HOMES = {"compile": "arborcast.backends.device.operation"}

__all__ = list(_HOMES)

__getattr__ = loader(__name__, _HOMES)
