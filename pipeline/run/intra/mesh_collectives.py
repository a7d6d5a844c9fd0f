"""Carries out paths of collectives on the parts that a rank holds, along the axes of a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from arborcast.pipeline.meshes import SUM, Axes, Mesh, Spec
from arborcast.pipeline.sharding.resharding import ReshardingPath, ReshardingStep
from arborcast.synth.collective import Kind

MakeGroup = Callable[[Sequence[int]], dist.ProcessGroup | None]
"""Makes a group of some ranks; None on ranks outside. Every rank of the job calls it."""

_c10d: Any = torch.ops._c10d_functional


@dataclass(frozen=True)
class AxisRanks:
    """The ranks along some axes among which this one is.

    Attributes:
        group: of torch, whose ranks ascend.
        order: for each place along the axes the rank in the group.
    """

    group: dist.ProcessGroup
    order: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """Whether the mesh has the ranks in the order of the group."""
        return self.order == tuple(range(len(self.order)))


class MeshCollectives:
    """All groups of a mesh, which `connect` makes.

    Args:
        mesh: of the stage.

    Attributes:
        mesh: the same groups, in which ranks ascend along every axis, as torch's groups have them.
        lines: along each axis and along all, once connected.
        coordinates: of this rank on the axes; None outside of the mesh.

    Raises:
        PlanError: there is no such mesh.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh = mesh.ascending()
        rank = dist.get_rank()
        self.lines: dict[Axes, AxisRanks] = {}
        self.coordinates: tuple[int, ...] | None = None
        if rank in mesh.ranks:
            self.coordinates = tuple(map(int, np.unravel_index(mesh.ranks.index(rank), mesh.shape)))

    def connect(self, make: MakeGroup) -> None:
        """Make the groups; every rank of the job calls it."""
        for axes in self.mesh.ways if self.mesh.shape else ():
            for places in self.mesh.groups(axes):
                ranks = [self.mesh.ranks[place] for place in places]
                ascending = sorted(ranks)
                group = make(ascending)
                if dist.get_rank() in ranks and group is not None:
                    self.lines[axes] = AxisRanks(group, tuple(ascending.index(it) for it in ranks))

    def index(self, axes: Axes) -> int:
        """This rank's place along some axes."""
        assert self.coordinates is not None, "only ranks of the mesh ask"
        places, sizes = ([of[axis] for axis in axes] for of in (self.coordinates, self.mesh.shape))
        return int(np.ravel_multi_index(places, sizes)) if axes else 0

    def part(self, tensor: Tensor, spec: Spec) -> Tensor:
        """What this rank holds of a whole tensor."""
        for axis, at in enumerate(spec):
            if at is not None and at != SUM:
                tensor = self._slice(tensor, (axis,), at)
        return tensor

    def follow(self, tensor: Tensor, source: Spec, path: ReshardingPath) -> Tensor:
        """This rank's part after a path, from its part before."""
        for step in path.steps:
            tensor = self._step(tensor, source, step)
            source = step.spec
        return tensor

    def allreduce(self, tensor: Tensor, axes: Axes, op: str = "sum") -> Tensor:
        """The sum (or "max") over all ranks along some axes."""
        given = tensor.contiguous()
        return _waited(_c10d.all_reduce(given, op, self.lines[axes].group.group_name))

    def _step(self, tensor: Tensor, source: Spec, step: ReshardingStep) -> Tensor:
        at, to = source[step.axes[0]], step.spec[step.axes[0]]
        match step.kind:
            case None:
                assert to is not None
                return self._slice(tensor, step.axes, to)
            case Kind.ALLREDUCE:
                return self.allreduce(tensor, step.axes)
            case Kind.ALLGATHER:
                assert at is not None
                return self._allgather(tensor, self.lines[step.axes], at)
            case Kind.REDUCE_SCATTER:
                assert to is not None
                return self._reduce_scatter(tensor, self.lines[step.axes], to)
            case Kind.ALLTOALL:
                assert at is not None and to is not None
                return self._alltoall(tensor, self.lines[step.axes], at, to)
            case _:
                raise AssertionError(f"no path has {step.kind}")

    def _slice(self, tensor: Tensor, axes: Axes, to: int) -> Tensor:
        length = tensor.size(to) // self.mesh.size(axes)
        return tensor.narrow(to, self.index(axes) * length, length)

    def _allgather(self, tensor: Tensor, line: AxisRanks, at: int) -> Tensor:
        count = len(line.order)
        # 0-dimensional blocks cannot be; one dimension is divided.
        made = _waited(_c10d.all_gather_into_tensor(tensor.contiguous(), count, line.group.group_name))
        if at == 0 and line.is_plain:
            return made
        blocks = made.view(count, *tensor.shape)
        return torch.cat([blocks[it] for it in line.order], at)

    def _reduce_scatter(self, tensor: Tensor, line: AxisRanks, to: int) -> Tensor:
        given = _stacked(tensor, line, to)
        shape = given.shape[1:]
        flat = given.view(math.prod(given.shape[:2]), *given.shape[2:])
        made = _c10d.reduce_scatter_tensor(flat, "sum", len(line.order), line.group.group_name)
        return _waited(made).view(shape)

    def _alltoall(self, tensor: Tensor, line: AxisRanks, at: int, to: int) -> Tensor:
        given = _stacked(tensor, line, to)
        count, rows = given.shape[:2]
        sizes = [rows] * count
        flat = given.view(count * rows, *given.shape[2:])
        made = _waited(_c10d.all_to_all_single(flat, sizes, sizes, line.group.group_name)).view(given.shape)
        return torch.cat([made[it] for it in line.order], at)


def _stacked(tensor: Tensor, line: AxisRanks, to: int) -> Tensor:
    """The parts along a dimension, one behind the other as the group has its ranks."""
    parts = tensor.chunk(len(line.order), to)
    return torch.stack([parts[line.order.index(it)] for it in range(len(line.order))])


def _waited(tensor: Tensor) -> Tensor:
    result: Tensor = _c10d.wait_tensor(tensor)
    return result


class _Moved(torch.autograd.Function):
    """A tensor along one path, its gradient along another."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        collectives: MeshCollectives,
        there: tuple[Spec, ReshardingPath],
        back: tuple[Spec, ReshardingPath],
    ) -> Tensor:
        ctx.collectives, ctx.back = collectives, back
        made = collectives.follow(tensor, *there)
        return made.view_as(made) if made is tensor else made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.collectives.follow(gradient, *ctx.back), None, None, None


def moved(
    tensor: Tensor,
    collectives: MeshCollectives,
    there: tuple[Spec, ReshardingPath],
    back: tuple[Spec, ReshardingPath] | None,
) -> Tensor:
    """A part after a path; its gradient comes back along another. Paths stand behind where they begin.

    Args:
        tensor: this rank's part.
        collectives: that carry it out.
        there: of the tensor.
        back: of its gradient; None where it has none.
    """
    if back is None or not tensor.requires_grad:
        return collectives.follow(tensor, *there)
    if not there[1].steps and not back[1].steps:
        return tensor
    result: Tensor = _Moved.apply(tensor, collectives, there, back)  # type: ignore[no-untyped-call]
    return result
