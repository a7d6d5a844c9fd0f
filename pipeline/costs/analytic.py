"""Costs of a model's layers on a device that is not here, from its operators alone; nothing is allocated.

Layers run on fake tensors, which have a shape and no memory; every operator, forward and backward, costs what
its arithmetic and its memory traffic cost on the device (`DeviceRates.operator_us`). The model may be larger
than any machine: build it on the "meta" device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from arborcast.pipeline.costs import layer_pass
from arborcast.pipeline.costs.devices import DeviceRates
from arborcast.pipeline.costs.layer_pass import (
    Example,
    LossFunction,
    OptimizerFactory,
    PassCosts,
    Walk,
    first_samples,
)
from arborcast.pipeline.errors import ProfileError
from arborcast.pipeline.model.layered import Layered
from arborcast.pipeline.model.module_structure import storage_key
from arborcast.pipeline.model.split import SplitBackward
from arborcast.pipeline.profiles import Layer, Profile

aten = torch.ops.aten

_ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""They touch no memory."""

_GATHERS = {aten.embedding, aten.index_select, aten.gather, aten.index}
"""They read no more of their first argument than they write."""


def analyse(
    model: nn.Module | Layered,
    example: Example,
    device: DeviceRates,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerFactory | None = None,
    name: str | None = None,
) -> Profile:
    """Compute what each layer of a model would cost in training on a device.

    A layer's arithmetic is that of `torch.utils.flop_counter`; all other operators cost their memory traffic:
    what they read and write, once. Operators are those of eager torch on a CPU, unfused. Times are a model,
    good for balance between layers; `device.efficiency` sets their scale.

    Args:
        model: any module, on any device, "meta" included; one that is not `Layered` is traced first.
        example: the model's inputs, of which only shapes and types matter; with `loss_fn`, (inputs, targets).
            None for those that a model was traced with, and its loss.
        device: its rates.
        loss_fn: called with the model's output and the targets; its cost goes to the last layer.
        optimizer: makes the optimizer of a list of parameters, for the bytes of its state and what
            its step takes; None for neither.
        name: of the profile; by default the class of the model.

    Raises:
        ProfileError: the example is not what it must be, a layer fails or needs values that fake tensors do
            not have, or the device has no rate for a type.
        PartitionError: tracing fails.
    """
    walk = layer_pass.begin(name, model, example, loss_fn)
    layers: list[Layer] = []
    stayed: tuple[bool, ...] = ()
    with FakeTensorMode(allow_non_fake_inputs=True):
        values = tuple(_fake(value) for value in walk.inputs)
        targets = tuple(_fake(target) for target in walk.targets)
        for index in range(walk.model.depth):
            try:
                cost, result = _analysed(walk, index, values, targets, device, optimizer, stayed)
                values, stayed = result.outputs, result.stayed
            except ProfileError:
                raise
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise ProfileError(
                    f"{walk.where(index)}: must not depend on the values of tensors, which an analysis does "
                    f"not have, got {error.func}"
                ) from error
            except Exception as error:  # a layer may raise anything
                raise walk.failed(index, error) from error
            layers.append(cost)
    return layer_pass.finish(walk, layers, f"{device.name}, from operators")


def _analysed(
    walk: Walk,
    index: int,
    values: Sequence[Tensor],
    targets: Sequence[Tensor],
    device: DeviceRates,
    optimizer: OptimizerFactory | None,
    stayed: Sequence[bool],
) -> tuple[Layer, PassCosts]:
    """The costs of a layer, and of a pass, with what it hands to the next."""
    layer = walk.model.divide(index, index + 1)
    owned: dict[str, Tensor] = {
        key: _fake(it) for key, it in (*layer.named_parameters(), *layer.named_buffers())
    }
    for parameter in owned.values():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)  # gradients add up over microbatches

    def call(*inputs: Tensor) -> Any:
        return functional_call(layer, owned, inputs)

    def run(samples: int, halves: tuple[SplitBackward, OperatorMeter] | None = None) -> PassCosts:
        meters = (OperatorMeter(device), OperatorMeter(device))
        dims = walk.model.sample_dims(index)
        fewer = (
            first_samples(values, dims, samples, walk.samples),
            first_samples(targets, (0,), samples, walk.samples),
        )
        return layer_pass.run_pass(
            walk, index, call, fewer[0], meters, owned.values(), fewer[1], halves=halves, stayed_before=stayed
        )

    passes = {samples: run(samples) for samples in {walk.samples, walk.fewer} - {0}}
    forward = {samples: it.forward_us for samples, it in passes.items()}
    backward = {samples: it.backward_us for samples, it in passes.items()}
    result = passes[walk.samples]
    fewer = passes[walk.fewer].working_bytes if walk.fewer else 0
    split = SplitBackward(owned.values())
    in_halves = run(walk.samples, (split, OperatorMeter(device))) if split.is_needed else None
    cost = walk.cost(
        index, layer, result, forward, backward, optimizer, fewer_working_bytes=fewer, split=in_halves
    )
    if optimizer is not None and cost.gradient_bytes:
        sizes = [layer_pass.size_bytes([it]) for it in layer.parameters() if it.requires_grad]
        ratio = cost.optimizer_bytes / cost.gradient_bytes
        cost = replace(cost, update_us=sum(device.update_us(size, size * ratio) for size in sizes))
    return cost, result


class OperatorMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums what operators would cost on a device.

    Attributes:
        us: time.
        flops: floating-point operations.
        moved_bytes: memory traffic.
    """

    def __init__(self, device: DeviceRates) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.us = 0.0
        self.flops = 0
        self.moved_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator and count it."""
        options = dict(kwargs or {})
        result = func(*args, **options)
        packet = getattr(func, "_overloadpacket", func)
        read = [it for it in tree_leaves((args, options)) if isinstance(it, Tensor)]
        written = [it for it in tree_leaves(result) if isinstance(it, Tensor)]
        if not written or packet in _ALLOCATIONS or _is_view(func, read, written):
            return result
        flops = _flops(packet, args, options, result)
        moved = _moved_bytes(packet, read, written)
        self.flops += flops
        self.moved_bytes += moved
        self.us += self.device.operator_us(flops, moved, _arithmetic(written))
        return result


def _flops(packet: Any, args: Sequence[Any], options: Mapping[str, Any], result: Any) -> int:
    count: Callable[..., int] | None = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **options, out_val=result))


def _is_view(func: Any, read: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
    """Whether an operator only describes anew the memory that it was given."""
    if func._schema.is_mutable:
        return False
    known = {storage_key(it) for it in read}
    return all(storage_key(it) in known for it in written)


def _moved_bytes(packet: Any, read: Sequence[Tensor], written: Sequence[Tensor]) -> int:
    """Bytes read and written; an operator in place both reads and writes what it returns."""
    results = sum(_touched_bytes(it) for it in written)
    if packet in _GATHERS:
        return 2 * results + sum(_touched_bytes(it) for it in read[1:])
    return results + sum(_touched_bytes(it) for it in read)


def _touched_bytes(tensor: Tensor) -> int:
    """Of its elements, or of its memory where elements repeat (expanded tensors)."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _arithmetic(written: Sequence[Tensor]) -> str:
    """The type that an operator calculates in."""
    return str(written[0].dtype).removeprefix("torch.")


def _fake(tensor: Tensor) -> Tensor:
    """A tensor without memory like a given one; inside the fake mode."""
    like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return like.requires_grad_(tensor.requires_grad)
