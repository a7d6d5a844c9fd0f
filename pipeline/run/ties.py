"""Parameters that layers on several workers use: every holder keeps a copy, and all copies update alike.

Once a step the gradients are summed over the workers, among all ranks that hold a copy, in one collective for
all ties between the same stages; their values are made equal once, at the start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.run.gradients import Gradients
from arborcast.pipeline.run.initial_weights import broadcast
from arborcast.pipeline.run.prepared_layers import is_sharded, like, local
from arborcast.pipeline.stages import Plan


@dataclass(frozen=True)
class _TieGroup:
    """The ties between the same stages."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None


class TieGroups:
    """The ties of a model that a plan leaves on several stages, and the groups of the ranks that share them.

    Every rank of the job must make it, those without work too: making a group takes all of them.

    Args:
        plan: which layers are on which ranks.
        ties: names of shared parameters and the layers that use them (`Layered.ties`).
        make_group: makes a process group of ranks of the job, in ascending order, on all ranks alike.
        rank: of this process in the job; None asks torch.

    Raises:
        PlanError: a tie names a layer that the plan does not have.
    """

    def __init__(
        self,
        plan: Plan,
        ties: Iterable[tuple[str, tuple[int, ...]]],
        make_group: Callable[[tuple[int, ...]], dist.ProcessGroup | None],
        *,
        rank: int | None = None,
    ) -> None:
        """Make the groups."""
        self._rank = dist.get_rank() if rank is None else rank
        self._plan = plan
        between: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, layers in ties:
            workers = _workers_of(plan, name, layers)
            if len(workers) > 1:
                between[workers].append(name)
        self._groups = []
        for workers, names in sorted(between.items()):
            ranks = tuple(sorted(rank for worker in workers for rank in plan.workers[worker].ranks))
            self._groups.append(_TieGroup(tuple(sorted(names)), ranks, make_group(ranks)))

    @property
    def holders(self) -> dict[str, int]:
        """By name, the number of ranks that hold a parameter of several stages; for `clip_gradients`."""
        return {name: len(group.ranks) for group in self._groups for name in group.names}

    @property
    def mine(self) -> tuple[str, ...]:
        """Names of those on this rank that other stages hold too."""
        return tuple(name for group in self._groups if self._rank in group.ranks for name in group.names)

    def synchronise(self, parameters: Mapping[str, nn.Parameter], buffer: Gradients) -> None:
        """Sum the gradients of shared parameters over the stages: one allreduce per group and data type.

        It follows the replicas' own allreduce (`GradientBuffer.wait`) and precedes `detach_unused`.

        Args:
            parameters: of this rank; at least the shared ones, under the names of the ties.
            buffer: that holds their gradients and knows which are in use.

        Raises:
            PlanError: a shared parameter is missing.
        """
        used = {id(parameter) for parameter in buffer.used()}
        # The replicas of a worker hold the same sum: the first adds it, the others 0, which is exact. Of
        # parameters that are divided over a mesh every rank adds its part of the whole.
        first = any(worker.ranks[0] == self._rank for worker in self._plan.workers)
        for group in self._groups:
            if self._rank not in group.ranks:
                continue
            for members in _by_type(group.names, parameters):
                trainable = [parameter for parameter in members if parameter.requires_grad]
                if trainable:
                    self._sum(trainable, group, buffer, used, adds=first)

    def _sum(
        self,
        parameters: list[nn.Parameter],
        group: _TieGroup,
        buffer: Gradients,
        used: set[int],
        *,
        adds: bool,
    ) -> None:
        flags = [id(parameter) in used for parameter in parameters]
        parts = [_summand(parameter, adds).reshape(-1) for parameter in parameters]
        flat = torch.cat([*parts, torch.tensor(flags).to(parts[0], non_blocking=True)])
        dist.all_reduce(flat, group=group.group)
        sums = torch.split(flat, [*(part.numel() for part in parts), len(flags)])
        for parameter, total, flag in zip(parameters, sums[:-1], sums[-1].cpu().tolist(), strict=True):
            if not flag:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(like(total.view(parameter.shape), parameter))
            buffer.mark_used(parameter)

    def equalise(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give all copies the value of the first rank of the first stage that uses the parameter.

        Args:
            parameters: as for `synchronise`.

        Raises:
            PlanError: a shared parameter is missing.
        """
        for group in self._groups:
            if self._rank not in group.ranks:
                continue
            source = next(rank for rank in self._plan.ranks if rank in group.ranks)
            members = [it for kind in _by_type(group.names, parameters) for it in kind]
            broadcast(members, group.group, source)


def _workers_of(plan: Plan, name: str, layers: tuple[int, ...]) -> tuple[int, ...]:
    for layer in layers:
        if not 0 <= layer < plan.depth:
            raise PlanError(f"tie {name}: layers must be in 0..{plan.depth - 1} of the plan, got {layer}")
    return tuple(
        index
        for index, worker in enumerate(plan.workers)
        if any(
            plan.stages[it].start <= layer < plan.stages[it].end for it in worker.stages for layer in layers
        )
    )


def _summand(parameter: nn.Parameter, adds: bool) -> Tensor:
    """What this rank adds to the whole gradient of a parameter.

    Args:
        parameter: with a gradient, or without; perhaps divided over a mesh, of whose ranks with the same
            part the first adds it.
        adds: whether this rank counts, where the parameter is not divided.
    """
    gradient: Any = parameter.grad
    if parameter.grad is not None and adds and not is_sharded(parameter.grad):
        return parameter.grad
    whole = torch.zeros(parameter.shape, dtype=parameter.dtype, device=local(parameter).device)
    if gradient is None or not is_sharded(gradient):
        return whole
    part = whole
    for axis, placement in enumerate(gradient.placements):
        at, size = gradient.device_mesh.get_local_rank(axis), gradient.device_mesh.size(axis)
        if placement.is_shard():
            part = part.chunk(size, placement.dim)[at]
        elif at:
            return whole
    part.copy_(local(gradient))
    return whole


def _by_type(names: tuple[str, ...], parameters: Mapping[str, nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters, one list per data type, in the order that all holders have."""
    kinds: defaultdict[str, list[nn.Parameter]] = defaultdict(list)
    for name in names:
        if name not in parameters:
            raise PlanError(
                f"tie {name}: this stage uses the parameter and must hold it, got {sorted(parameters)}"
            )
        kinds[str(parameters[name].dtype)].append(parameters[name])
    return [kinds[kind] for kind in sorted(kinds)]
