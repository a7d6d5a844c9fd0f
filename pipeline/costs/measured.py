"""Costs of a model's layers, measured on this machine without changing the model.

Every layer runs by itself, forward and backward, on the values that really reach it. What runs is a copy, one
layer at a time: parameters, gradients, running statistics and modes of the model stay as they are, and so do
the states of torch's random generators.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arborcast.pipeline.costs import layer_pass
from arborcast.pipeline.costs.layer_pass import (
    Example,
    LossFunction,
    OptimizerFactory,
    PassCosts,
    Walk,
    first_samples,
)
from arborcast.pipeline.errors import ProfileError
from arborcast.pipeline.model.deferred_init import allocate, tensors_on_meta
from arborcast.pipeline.model.layered import Layered
from arborcast.pipeline.model.split import SplitBackward
from arborcast.pipeline.profiles import Layer, Profile


def profile(
    model: nn.Module | Layered,
    example: Example,
    loss_fn: LossFunction | None = None,
    *,
    repeats: int = 5,
    warmups: int = 1,
    optimizer: OptimizerFactory | None = None,
    name: str | None = None,
    device: torch.device | str | None = None,
    at: int | None = None,
    fixed: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Profile:
    """Measure what each layer of a model costs in training.

    Layers run in the modes (`train`, `eval`) that the model is in, and gradients add up as over the
    microbatches of a batch. Times are medians. Values saved inside operators that hide them from
    `torch.autograd.graph.saved_tensors_hooks` are not seen.

    Args:
        model: any module, on "meta" too; one that is not `Layered` is traced first.
        example: the model's inputs, a tensor or a tuple of tensors; with `loss_fn`, the pair (inputs,
            targets). Samples are counted along dimension 0, in the inputs where the model says.
        loss_fn: called with the model's output and the targets; its time and memory go to the last layer.
        repeats: timed runs of each layer.
        warmups: runs before them that do not count.
        optimizer: makes the optimizer of a list of parameters, for the bytes of its state and its
            time; None for neither.
        name: of the profile; by default the class of the model.
        device: where layers are copied to; by default where the first input is.
        at: measure with the first so many samples of the example; by default with all.
        fixed: measure with half the samples as well: of the line through both, what is left at no samples
            is the fixed part of a time. Without, it is 0.
        group: of ranks on one machine, each of which calls this and gets the same: every layer is measured on
            the first one while the others wait, and then on all at once, which is what `crowding` says; steps
            of the optimizer, which all ranks take together, count as on all at once. None for one rank alone.

    Raises:
        ProfileError: the example is not what it must be, a layer fails, or a number is out of range.
        PartitionError: tracing fails.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        >>> profile = pipeline.profile(model, torch.randn(16, 8))
        >>> [layer.parameter_bytes for layer in profile.layers]  # weights and biases, in float32
        [288, 144]
    """
    for what, value, least in (("repeats", repeats, 1), ("warmups", warmups, 0)):
        if value < least:
            raise ProfileError(f"profile: {what} must be at least {least}, got {value}")
    walk = layer_pass.begin(name, model, example, loss_fn, at, fixed)
    home = walk.inputs[0].device if device is None else torch.device(device)
    values, layers, crowded = walk.inputs, list[Layer](), list[Layer]()
    stayed: tuple[bool, ...] = ()
    accelerators = [] if home.type == "cpu" else [home]
    with torch.random.fork_rng(accelerators, device_type=home.type if accelerators else "cuda"):
        for index in range(walk.model.depth):
            try:
                layer = _with_values(copy.deepcopy(walk.model.divide(index, index + 1))).to(home)
                bench = _Bench(walk, index, layer, tuple(value.to(home) for value in values), stayed)
                if group is None or dist.get_rank(group) == 0:
                    cost, result = _measured(bench, repeats, warmups, optimizer)
                    layers.append(cost)
                if group is not None:
                    dist.barrier(group)
                    cost, result = _measured(bench, repeats, warmups, optimizer)
                    crowded.append(cost)
                    dist.barrier(group)
                values, stayed = result.outputs, result.stayed
            except ProfileError:
                raise
            except Exception as error:  # a layer may raise anything
                raise walk.failed(index, error) from error
    threads = f", {torch.get_num_threads()} threads" if home.type == "cpu" else ""
    found = layer_pass.finish(walk, layers or crowded, f"measured on {home}{threads}, median of {repeats}")
    return found if group is None else _agreed(found, crowded, group)


def _agreed(own: Profile, crowded: Sequence[Layer], group: dist.ProcessGroup) -> Profile:
    """The costs of the first rank alone; what all take at once, as means."""
    times = torch.tensor([[it.forward_us + it.backward_us, it.update_us] for it in crowded])
    dist.all_reduce(times, group=group)
    together_us, updates_us = (times / dist.get_world_size(group)).double().T
    alone_us = sum(it.forward_us + it.backward_us for it in own.layers)
    layers = (replace(it, update_us=us) for it, us in zip(own.layers, updates_us.tolist(), strict=True))
    crowding = max(together_us.sum().item() / alone_us, 1.0) if alone_us else 1.0
    found = [replace(own, layers=tuple(layers), crowding=crowding)]
    dist.broadcast_object_list(found, group=group, group_src=0)
    return found[0]


@dataclass(frozen=True, slots=True)
class _Bench:
    """The copy of a layer, and what it runs on.

    Attributes:
        walk: through the model.
        index: of the layer.
        layer: the copy.
        values: that cross the boundary before it.
        stayed: of each of them, whether an operator before keeps it.
    """

    walk: Walk
    index: int
    layer: nn.Module
    values: tuple[Tensor, ...]
    stayed: tuple[bool, ...]

    def run(
        self, samples: int, watched: bool = False, halves: tuple[SplitBackward, _Clock] | None = None
    ) -> PassCosts:
        """Forward and backward on the first so many samples."""
        values, targets = self.values, self.walk.targets
        home = values[0].device
        if samples < self.walk.samples:
            whole = self.walk.samples
            values = first_samples(values, self.walk.model.sample_dims(self.index), samples, whole)
            targets = first_samples(targets, (0,), samples, whole)
        return layer_pass.run_pass(
            self.walk,
            self.index,
            self.layer,
            values,
            (_Clock(home), _Clock(home)),
            owned=(*self.layer.parameters(), *self.layer.buffers()),
            targets=tuple(target.to(home) for target in targets),
            watched=watched,
            halves=halves,
            stayed_before=self.stayed,
        )


class _Clock:
    """Wall time of what runs while it is entered, all work of an accelerator included."""

    def __init__(self, device: torch.device) -> None:
        self.us = 0.0
        self._device = device
        self._begun = 0.0

    def __enter__(self) -> None:
        self._settle()
        self._begun = time.perf_counter()

    def __exit__(self, *details: object) -> None:
        self._settle()
        self.us = (time.perf_counter() - self._begun) * 1e6

    def _settle(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _with_values(layer: nn.Module) -> nn.Module:
    """One of a model on "meta" with small numbers, so that it runs; the model stays as it is."""
    for tensor in allocate(layer, tensors_on_meta(layer)).values():
        nn.init.normal_(tensor, std=0.02) if tensor.is_floating_point() else nn.init.zeros_(tensor)
    return layer


def _measured(
    bench: _Bench, repeats: int, warmups: int, optimizer: OptimizerFactory | None
) -> tuple[Layer, PassCosts]:
    """The costs of a layer, and of a pass, with what it hands to the next."""
    walk, layer = bench.walk, bench.layer
    for parameter in layer.parameters():
        # As in training after the first microbatch: gradients are added, not stored.
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    first = bench.run(walk.samples, watched=True)
    fewer = bench.run(walk.fewer, watched=True).working_bytes if walk.fewer else 0
    sizes = [walk.samples, *([walk.fewer] if walk.fewer else [])]
    runs: dict[int, list[PassCosts]] = {size: [] for size in sizes}
    split = SplitBackward(layer.parameters())
    clock, in_halves = _Clock(bench.values[0].device), None
    if split.is_needed:
        in_halves = bench.run(walk.samples, watched=True, halves=(split, clock))
    halves: list[tuple[float, float]] = []
    for repeat in range(warmups + repeats):
        for size in sizes:  # in turns, so that a slow moment of the machine meets both
            taken = bench.run(size)
            if repeat >= warmups:
                runs[size].append(taken)
        if split.is_needed:
            first_us = bench.run(walk.samples, halves=(split, clock)).backward_us
            if repeat >= warmups:
                halves.append((first_us, clock.us))
    forward = {size: median(it.forward_us for it in taken) for size, taken in runs.items()}
    backward = {size: median(it.backward_us for it in taken) for size, taken in runs.items()}
    both = (median(it for it, _ in halves), median(it for _, it in halves)) if halves else None
    cost = walk.cost(bench.index, layer, first, forward, backward, optimizer, both, fewer, clock, in_halves)
    return cost, first
