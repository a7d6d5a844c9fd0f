"""Where a rank computes: in host memory, or on a device of an accelerator that torch knows, such as a GPU.

Between stages on devices tensors go by the backend that torch has for them, NCCL for "cuda"; all else that
ranks tell each other stays in host memory and goes by gloo. On a GPU it ran into a deadlock, which is mended,
and has not run since; tests run it on a simulated device, which has values, and which counts what the host
copies or waits for.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.fx.node import map_aggregate

from arborcast.pipeline.model.module_structure import flatten
from arborcast.synth.errors import InputError

HOST = torch.device("cpu")


def device_of(name: str) -> torch.device:
    """The device that a name stands for, which becomes this process's current one.

    Args:
        name: "cpu", or of an accelerator: "cuda" for that with number LOCAL_RANK, as torchrun counts, or
            "cuda:1" for a certain one.

    Raises:
        InputError: there is none, or torch has no backend for its messages.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device: must be one of torch's, got {name}") from error
    if device.type == "cpu":
        return HOST
    module: Any = getattr(torch, device.type, None)
    count = module.device_count() if hasattr(module, "device_count") and module.is_available() else 0
    if not count or device.type not in dist.Backend.default_device_backend_map:
        raise InputError(f"device: must be cpu, or one that there is and torch can send from, got {name}")
    own = int(os.environ.get("LOCAL_RANK") or dist.get_rank() % count)
    number = device.index if ":" in name else own
    if number >= count:
        raise InputError(f"device: number must be below the {count} that there are, got {number}")
    if dist.distributed_c10d._get_default_group().bound_device_id is not None:
        raise InputError(
            "device: init_process_group must be called without device_id, since groups that connect at once "
            f"send one message after another, got {name} and one"
        )
    module.set_device(number)
    return torch.device(device.type, number)


def backend_of(device: torch.device) -> str:
    """Torch's own for tensors there."""
    return dist.Backend.default_device_backend_map[device.type]


def placed(module: nn.Module, device: torch.device, *, is_fake: bool = False) -> nn.Module:
    """The module itself with its tensors on a device; parameters stay the objects that they are.

    Traced code names the device that it was traced on wherever it makes tensors: that becomes this one.

    Args:
        module: which.
        device: where to.
        is_fake: whether its tensors are fake ones, which become other objects: they know their device apart.
    """
    if device == HOST:
        return module
    for part in module.modules():
        for name, tensor in [*part._parameters.items(), *part._buffers.items()] if is_fake else ():
            if tensor is not None:
                other = tensor.detach().to(device)
                is_parameter = isinstance(tensor, nn.Parameter)
                setattr(part, name, nn.Parameter(other, tensor.requires_grad) if is_parameter else other)
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                node.args, node.kwargs = (
                    map_aggregate(it, lambda x: device if isinstance(x, torch.device) else x)
                    for it in (node.args, node.kwargs)
                )
            part.recompile()
    return module if is_fake else module.to(device)


def moved(values: Any, device: torch.device) -> Any:
    """Tensors, in whatever tuples and dicts, on a device; the host does not wait for that."""
    tensors, structure = flatten(values)
    return structure.rebuild(it.to(device, non_blocking=True) for it in tensors)


def drawing_apart(device: torch.device) -> AbstractContextManager[None]:
    """Inside, random numbers are drawn from generators that are as they were afterwards."""
    if device == HOST:
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device.index], device_type=device.type)


def seed(device: torch.device, number: int) -> None:
    """Seed what draws on a device, and on the host."""
    torch.default_generator.manual_seed(number)
    if device != HOST:
        torch.get_device_module(device).manual_seed(number)


def finish(device: torch.device) -> None:
    """Wait until all that was begun there is done."""
    if device != HOST:
        torch.get_device_module(device).synchronize(device)
