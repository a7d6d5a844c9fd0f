"""From whatever names a model to its profile: what is costed, for which device, and who said so.

Costs come from a profile, from the catalog of networks, or from a module: analysed for what the ranks of the
fabric are without allocating it, or measured on this machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from arborcast.pipeline import zoo
from arborcast.pipeline.costs.devices import DeviceRates, device_named, device_or_none
from arborcast.pipeline.errors import ProfileError
from arborcast.pipeline.planning.formats import read_profile
from arborcast.pipeline.profiles import Profile
from arborcast.topologies.machine import Machine

if TYPE_CHECKING:
    from torch import nn

    from arborcast.pipeline.costs.layer_pass import Example, LossFunction, OptimizerFactory
    from arborcast.pipeline.model.layered import Layered

DEVICE = "v100"
"""What a network that is only named is costed for where nobody says."""

HERE = "here"
"""The device on which a model is measured."""


@dataclass(frozen=True, slots=True)
class Costed:
    """A model's profile and where it comes from.

    Attributes:
        profile: the costs of its layers.
        device: that they are for; None where they were measured here, or stood in a file.
        said_by: who named the device: "caller", "topology" (its ranks are that), "default", or "profile"
            where there was nothing to cost.
        batch: samples of a step unless told otherwise: for a named network its samples on each rank.
    """

    profile: Profile
    device: DeviceRates | None
    said_by: str
    batch: int


def costed(
    model: Profile | str | nn.Module | Layered,
    machine: Machine,
    example: Example | None = None,
    loss_fn: LossFunction | None = None,
    *,
    device: str | None = None,
    optimizer: OptimizerFactory | None = None,
    name: str | None = None,
) -> Costed:
    """The profile of a model for a machine; the arguments are those of `comparison.compare`.

    Raises:
        ProfileError: the model names nothing, a profile is to be costed again, or a module has no example.
        InputError: the file of a profile cannot be read.
    """
    if isinstance(model, str) and model not in zoo.NAMES:
        if not (model.endswith(".json") or Path(model).is_file()):
            raise ProfileError(
                f"model {model}: must be a profile file, one of {', '.join(zoo.NAMES)}, or FILE.py:FUNCTION"
            )
        _refuse_device(device, "a profile file")
        model = read_profile(model)
    if isinstance(model, Profile):
        _refuse_device(device, "a profile")
        return Costed(model, None, "profile", model.samples)
    if isinstance(model, str):
        found, said_by = _device(device, machine, DEVICE)
        if found is None:
            raise ProfileError(f"device {HERE}: a model is measured, and {model} is only a name")
        profile = zoo.analytic_profile(model, found, optimizer=optimizer)
        return Costed(profile, found, said_by, profile.samples * machine.topology.ranks)
    if example is None:
        raise ProfileError("example: a module is costed with inputs, or with (inputs, targets), got None")
    found, said_by = _device(device, machine, None)
    if found is None:
        from arborcast.pipeline.costs.measured import profile as measured

        profile = measured(model, example, loss_fn, optimizer=optimizer, name=name)
    else:
        from arborcast.pipeline.costs.analytic import analyse

        profile = analyse(model, example, found, loss_fn=loss_fn, optimizer=optimizer, name=name)
    return Costed(profile, found, said_by, profile.samples)


def device_for(asked: str | None, machine: Machine) -> DeviceRates:
    """The device that operators are costed for: that asked for, what the ranks are, or the default.

    Raises:
        ProfileError: an unknown device, ranks that differ, or one to be measured.
    """
    found, _ = _device(asked, machine, DEVICE)
    if found is None:
        raise ProfileError(
            f"device {HERE}: operators are costed by rates, and this machine has none; name one"
        )
    return found


def _refuse_device(device: str | None, what: str) -> None:
    if device is not None:
        raise ProfileError(f"device {device}: {what} has its costs already")


def _device(asked: str | None, machine: Machine, default: str | None) -> tuple[DeviceRates | None, str]:
    """What a model is costed for, None for measuring it here; and who says so.

    Raises:
        ProfileError: an unknown device, or ranks that differ.
    """
    if asked is not None:
        return (None if asked == HERE else device_named(asked)), "caller"
    name = machine.topology.name
    kinds = sorted({gpu or "unknown" for gpu in machine.gpus})
    if len(kinds) > 1:
        raise ProfileError(f"{name}: its ranks are {' and '.join(kinds)}; name the device to cost for")
    # Accelerators that are no GPUs have no name there, and go by that of their machine: tpu-v4, trn2, gaudi3.
    known = device_or_none(kinds[0]) or device_or_none(re.split(r"[:\[]", name)[0])
    if known is not None:
        return known, "topology"
    return (None if default is None else device_named(default)), "default"
