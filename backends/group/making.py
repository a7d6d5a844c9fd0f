"""Where torch has a group of this backend made: what it and the caller say, as a `SynthGroup` takes it."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist

from arborcast.backends.group.history import speak_up
from arborcast.backends.group.process_group import SynthGroup
from arborcast.backends.tensors.torch_compat import asked_of_caller, has_nccl, is_of_nccl


def create(options: Any, backend_options: Any = None) -> dist.ProcessGroup:
    """What `torch.distributed` calls for a new group: the class that this version of torch wants.

    Args:
        options: torch's, with the store, the ranks and the timeout.
        backend_options: `Options` where the caller gave `pg_options`, or NCCL's.
    """
    speak_up()
    devices, bound = asked_of_caller("synth")
    nccl_options = None
    if is_of_nccl(backend_options):
        nccl_options, backend_options = backend_options, None
    world = dist.group.WORLD if isinstance(dist.group.WORLD, SynthGroup) else None
    if backend_options is None and world is not None:
        backend_options = world.options  # what the job was told holds for its parts
    global_ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    # While the default group is being made it is not there to be asked, and the group is all there is.
    world_size = dist.get_world_size() if dist.is_initialized() else options.group_size
    group = SynthGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options=backend_options,
        global_ranks=global_ranks,
        world_size=world_size,
        world=world,
        devices=devices,
        nccl_options=nccl_options,
    )
    if bound is not None and has_nccl():  # torch told the group that this one takes the place of
        cast(Any, group).bound_device_id = bound
    return group
