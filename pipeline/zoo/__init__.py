"""Networks with names, to build and to plan for without building; any other is planned for as a module.

    model, example, loss_fn = networks.build("bert-large", samples=8)       # on "meta": nothing is allocated
    profile = networks.analytic_profile("bert-large", "v100", samples=8)

Written from the papers, each as a `Divisible` of blocks; parameter counts and their sources stand with each.
The names load without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from arborcast.pipeline.errors import ProfileError

if TYPE_CHECKING:
    import torch

    from arborcast.pipeline.costs.devices import DeviceRates
    from arborcast.pipeline.costs.layer_pass import Example, LossFunction, OptimizerFactory
    from arborcast.pipeline.model.divisible import Divisible
    from arborcast.pipeline.profiles import Profile

SAMPLES: Mapping[str, int] = {
    "vgg19": 32,
    "bert-large": 8,
    "bert-base": 8,
}
"""Samples of a profile unless told otherwise: a batch that one GPU of 16 GB trains."""

NAMES = tuple(SAMPLES)
"""Of all networks; the last one is the small one."""


class TrainingCase(NamedTuple):
    """A network with something to train it on; its last two parts are what `pipeline.profile` takes.

    Attributes:
        model: to train.
        example: (inputs, targets) of the right shapes and types; values are not data.
        loss_fn: of the model's output and the targets, a mean over samples.
    """

    model: Divisible
    example: Example
    loss_fn: LossFunction


def build(name: str, *, samples: int | None = None, device: torch.device | str = "meta") -> TrainingCase:
    """Make a network and a batch for it.

    Args:
        name: one of `NAMES`.
        samples: of the batch; `SAMPLES[name]` by default.
        device: "meta" allocates nothing; "cpu" initialises the network from torch's generator.

    Raises:
        ProfileError: there is no such network, or no sample.
    """
    if name not in NAMES:
        raise ProfileError(f"network {name}: must be one of {', '.join(NAMES)}")
    samples = SAMPLES[name] if samples is None else samples
    if samples < 1:
        raise ProfileError(f"network {name}: samples must be at least 1, got {samples}")
    import torch

    from arborcast.pipeline.zoo.catalog import CATALOG

    with torch.device(device):
        model = CATALOG[name].make()
        example, loss_fn = CATALOG[name].batch(samples)
    return TrainingCase(model, example, loss_fn)


def analytic_profile(
    name: str,
    device: DeviceRates | str = "v100",
    *,
    samples: int | None = None,
    optimizer: OptimizerFactory | None = None,
) -> Profile:
    """What a network's layers would cost in training on a device, in float32; nothing is allocated.

    Args:
        name: one of `NAMES`.
        device: or its name.
        samples: of the batch; `SAMPLES[name]` by default.
        optimizer: of a list of parameters; by default stochastic gradient descent with momentum for images,
            Adam for language.

    Raises:
        ProfileError: there is no such network or device, or no sample.
    """
    from arborcast.pipeline.costs.analytic import analyse
    from arborcast.pipeline.costs.devices import device_named
    from arborcast.pipeline.zoo.catalog import CATALOG

    machine = device_named(device) if isinstance(device, str) else device
    network = build(name, samples=samples)
    return analyse(
        network.model,
        network.example,
        machine,
        loss_fn=network.loss_fn,
        optimizer=optimizer or CATALOG[name].optimizer,
        name=name,
    )
