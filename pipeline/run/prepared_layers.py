"""A stage whose layers several ranks share: torch's own tensor parallelism and FSDP2 inside it.

The ranks of a stage are a mesh: along "data" lie its replicas, along "tensor" the ranks that share one of
them. All ranks of a replica compute the same microbatches and exchange the same tensors with other stages,
each with the rank at its own place:

    stage 0, ranks 0..3     0 1   replica 0        stage 1, ranks 4..7     4 5
                            2 3   replica 1                                6 7
    sends to                0 -> 4, 1 -> 5, 2 -> 6, 3 -> 7

A function of the user's makes of a stage one whose parameters are `DTensor`s along either axis. Gradients
that FSDP2 sums over "data" are left to it; all others are summed by the trainer, each rank its own shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.stages import Plan, Stage
from arborcast.synth.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("data", "tensor")

Prepare: TypeAlias = Callable[[nn.Module, "DeviceMesh"], nn.Module]
"""Makes of the layers of a stage, and the mesh of its ranks, layers that these share."""


def column(plan: Plan, tensor_ranks: int, rank: int) -> Plan:
    """The plan with the ranks alone that lie where `rank` does along "tensor", or first if it has no work.

    Raises:
        PlanError: the ranks of a stage do not divide.
    """
    for index, stage in enumerate(plan.stages):
        if stage.replicas % tensor_ranks:
            raise PlanError(
                f"plan: stage {index} must have a multiple of tensor_ranks {tensor_ranks} as ranks, got "
                f"{stage.replicas}"
            )
    mine = next((it.ranks.index(rank) % tensor_ranks for it in plan.stages if rank in it.ranks), 0)
    stages = (Stage(it.start, it.end, it.ranks[mine::tensor_ranks]) for it in plan.stages)
    return replace(plan, stages=tuple(stages))


def prepared(module: nn.Module, mesh: DeviceMesh, prepare: Prepare) -> nn.Module:
    """What a user's function makes of a stage.

    Raises:
        InputError: it changes names, or shards some parameters along "data" and others not.
    """
    before = {name: tuple(it.shape) for name, it in module.state_dict().items()}
    made = prepare(module, mesh)
    after = {name: tuple(it.shape) for name, it in made.state_dict().items()}
    if before != after:
        lost = sorted(name for name, shape in before.items() if after.get(name) != shape)
        new = sorted(after.keys() - before.keys())
        raise InputError(
            "prepare: must keep the names and shapes of parameters and buffers, got "
            + (f"{after.get(lost[0], 'none')} for {lost[0]} {before[lost[0]]}" if lost else f"also {new[0]}")
        )
    parameters = dict(made.named_parameters())
    apart = [name for name, it in parameters.items() if not is_over_data(it)]
    if apart and len(apart) < len(parameters):
        raise InputError(
            f"prepare: fully_shard must shard all {len(parameters)} parameters of a stage or none, got "
            f"{len(apart)} left out, {apart[0]} among them"
        )
    parts: list[Any] = [] if apart else list(made.modules())
    for part in parts:
        if hasattr(part, "set_gradient_divide_factor"):
            part.set_gradient_divide_factor(1.0)  # losses are divided by all samples already
            part.set_force_sum_reduction_for_comms(True)
    return made


def is_sharded(tensor: Any) -> bool:
    """Whether it is a `DTensor`."""
    return hasattr(tensor, "placements")


def is_over_data(tensor: Any) -> bool:
    """Whether its gradient is summed along "data" by what sharded it: FSDP2."""
    return is_sharded(tensor) and AXES[0] in (tensor.device_mesh.mesh_dim_names or ())


def local(tensor: Tensor) -> Tensor:
    """The part that this rank holds."""
    sharded: Any = tensor
    return sharded.to_local() if is_sharded(tensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The values of all ranks that share it; all of them call it."""
    sharded: Any = tensor
    return sharded.full_tensor() if is_sharded(tensor) else tensor


def like(given: Tensor, wanted: Any) -> Tensor:
    """The part of whole values that a rank holds of a tensor of that shape; copied where it is one."""
    if not is_sharded(wanted) or given.shape != wanted.shape or is_sharded(given):
        return given
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(given, wanted.device_mesh, wanted.placements, src_data_rank=None)


def over(part: Tensor, wanted: Any) -> Tensor:
    """The local part of a gradient as a gradient of `wanted`, without a copy."""
    if not is_sharded(wanted):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        wanted.device_mesh,
        wanted.placements,
        run_check=False,
        shape=wanted.shape,
        stride=wanted.stride(),
    )
