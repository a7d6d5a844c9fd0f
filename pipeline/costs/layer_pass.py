"""One layer, forward and backward, as the profiler times it and the analysis adds it up.

Both walk the layers of a model with the values that really cross its boundaries, and both end with the same
costs: only the meter differs (a clock, or the operators' work on a device).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from arborcast.pipeline.costs.live import LiveBytes
from arborcast.pipeline.errors import ProfileError, first_line
from arborcast.pipeline.model.layered import Layered
from arborcast.pipeline.model.module_structure import Structure, flatten, storage_key
from arborcast.pipeline.model.split import Second, SplitBackward
from arborcast.pipeline.profiles import Layer, Profile, Tie

Example: TypeAlias = Any
"""A tensor, a tuple or a dict of the model's arguments; with a loss, a pair of such: inputs and targets."""

LossFunction: TypeAlias = Callable[..., Tensor]
"""From the model's output and the targets."""

OptimizerFactory: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""From parameters, such as `functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)`."""


UPDATES = 3
"""Steps of the optimizer that are measured; the median counts."""


class Meter(Protocol):
    """Measures what runs while it is entered."""

    us: float

    def __enter__(self) -> Any:
        """Begin."""
        ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> Any:
        """End, and set `us`."""
        ...


@dataclass(frozen=True, slots=True)
class Walk:
    """A model with all that is needed to go through its layers.

    Attributes:
        name: of the model, for errors and for the profile.
        model: the model.
        inputs: of its first layer.
        targets: of the loss, empty without one.
        loss_fn: runs with the last layer.
        samples: of `inputs`.
        fewer: samples of the second measurement, which tells the fixed part of times; 0 for none.
    """

    name: str
    model: Layered
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss_fn: LossFunction | None
    samples: int
    fewer: int

    def where(self, index: int) -> str:
        """A layer, as errors name it."""
        return f"profile {self.name}: layer {index} ({self.model.layer_names[index]})"

    def failed(self, index: int, why: BaseException) -> ProfileError:
        """What is raised when a layer cannot run."""
        return ProfileError(
            f"{self.where(index)}: must run on {self.samples} samples"
            f"{f' and on {self.fewer}' if self.fewer else ''}, got {first_line(why)}"
        )

    def cost(
        self,
        index: int,
        layer: nn.Module,
        result: PassCosts,
        forward_us: Mapping[int, float],
        backward_us: Mapping[int, float],
        optimizer: OptimizerFactory | None,
        halves_us: tuple[float, float] | None = None,
        fewer_working_bytes: int = 0,
        update: Meter | None = None,
        split: PassCosts | None = None,
    ) -> Layer:
        """The costs of a layer.

        Args:
            index: of the layer.
            layer: its module, or one with as large parameters.
            result: of one pass.
            forward_us: of the forward pass, by samples.
            backward_us: of the backward pass, by samples.
            optimizer: of its parameters.
            halves_us: of a split backward pass; the second one takes gradients of parameters. None for the
                rule.
            fewer_working_bytes: of a pass with fewer samples.
            update: measures a step of the optimizer; None for none.
            split: of a pass whose backward pass is split; None where there are no two halves.

        Raises:
            ProfileError: the optimizer fails.
        """
        state_bytes = update_bytes = 0
        if optimizer is not None:
            try:
                state_bytes, update_bytes = optimizer_bytes(optimizer, layer.parameters(), update)
            except Exception as error:  # an optimizer may raise anything
                raise ProfileError(
                    f"{self.where(index)}: its optimizer must take steps with small gradients, got "
                    f"{first_line(error)}"
                ) from error
        fixed = [
            _fixed_part(self.samples, times[self.samples], self.fewer, times.get(self.fewer, 0.0))
            for times in (forward_us, backward_us)
        ]
        working, whole_us = result.working_bytes, backward_us[self.samples]
        return Layer(
            name=self.model.layer_names[index],
            forward_us=forward_us[self.samples],
            backward_us=whole_us,
            output_bytes=result.output_bytes,
            saved_bytes=result.saved_bytes,
            parameter_bytes=size_bytes((*layer.parameters(), *layer.buffers())),
            gradient_bytes=size_bytes(it for it in layer.parameters() if it.requires_grad),
            optimizer_bytes=state_bytes,
            forward_fixed_us=fixed[0],
            backward_fixed_us=fixed[1],
            weights_us=None if halves_us is None else whole_us * halves_us[1] / max(sum(halves_us), 1e-9),
            split_us=0.0 if halves_us is None else max(sum(halves_us) - whole_us, 0.0),
            working_bytes=working,
            passing_bytes=result.passing_bytes,
            split_bytes=0 if split is None else split.split_bytes,
            tail_bytes=0 if split is None else split.tail_bytes,
            split_working_bytes=working if split is None else split.split_working_bytes,
            working_fixed_bytes=int(_fixed_part(self.samples, working, self.fewer, fewer_working_bytes)),
            update_bytes=update_bytes,
            update_us=0.0 if update is None else update.us,
        )


@dataclass(frozen=True, slots=True)
class PassCosts:
    """What one pass through a layer took and made.

    Attributes:
        outputs: copies of the layer's, without gradients but with `requires_grad` as they came; none of the
            last one, nor where nothing was watched.
        output_bytes: of all outputs.
        forward_us: of the forward pass.
        backward_us: of the backward pass.
        saved_bytes: of the memory that autograd keeps and of the layer's inputs, each counted once, without
            parameters, and without what the layer hands on: the next layer counts that as its input. So
            the sum over a stage counts nothing twice; it is too much by inputs that no operator keeps.
        working_bytes: the most that lived at once during both passes, inputs included, less `saved_bytes`.
        passing_bytes: of inputs that neither this layer's operators nor those before keep.
        stayed: of each output, whether some operator keeps it.
        split_bytes: of gradients that wait for the second half of a split backward pass.
        tail_bytes: the part of `saved_bytes` that goes with its first half: of operators behind the last one
            with parameters.
        split_working_bytes: with halves the most that lived at once during the first one, inputs included,
            less `saved_bytes` and outputs that some operator keeps: the next layer counts these, whose second
            half is still to come.
    """

    outputs: tuple[Tensor, ...]
    output_bytes: int
    forward_us: float
    backward_us: float
    saved_bytes: int
    working_bytes: int
    passing_bytes: int
    stayed: tuple[bool, ...]
    split_bytes: int
    tail_bytes: int
    split_working_bytes: int


def begin(
    name: str | None,
    model: nn.Module | Layered,
    example: Example,
    loss_fn: LossFunction | None,
    at: int | None = None,
    fixed: bool = True,
) -> Walk:
    """Check what the user gave, and trace the model where it cannot be cut yet.

    Args:
        name: of the profile; None for the class of the model.
        model: to be walked through.
        example: inputs, or with a loss (inputs, targets); None for those that the model was traced with.
        loss_fn: None for no loss.
        at: take only the first so many samples.
        fixed: whether to measure with half the samples too.

    Raises:
        ProfileError: the example is not what it must be.
        PartitionError: tracing fails.
    """
    name = name or _name_of(model)
    if example is None and hasattr(model, "crossing"):
        return _walk_of_traced(name or _name_of(model), model, fixed)
    given, wanted = example, None
    targets: tuple[Tensor, ...] = ()
    if loss_fn is not None or getattr(getattr(model, "arguments", None), "targets", None) is not None:
        if not (isinstance(example, (tuple, list)) and len(example) == 2):
            raise ProfileError(f"profile {name}: with a loss, example must be (inputs, targets)")
        given, wanted = example
    layered: Any = _layered(model, given)
    if getattr(layered, "losses", ()):
        if loss_fn is not None:
            raise ProfileError(f"profile {name}: loss_fn must be None, as the model returns its loss")
        inputs = layered.tensors_of(given, wanted)
        targets, loss_fn = tuple(inputs[index] for index in layered.labels), _own_loss(layered)
    else:
        takes_all = hasattr(layered, "tensors_of")
        inputs = layered.tensors_of(given) if takes_all else tensors_of(given, f"profile {name}: inputs")
        if loss_fn is not None and isinstance(wanted, Mapping):
            found, structure = flatten(dict(wanted))
            targets, loss_fn = tuple(found), _of_named(loss_fn, structure)
        elif loss_fn is not None:
            targets = tensors_of(wanted, f"profile {name}: targets")
    dims = layered.sample_dims(0)
    samples = inputs[0].shape[dims[0]] if inputs[0].dim() else 0
    if samples < 1:
        raise ProfileError(
            f"profile {name}: the first input must hold a sample, got {tuple(inputs[0].shape)}"
        )
    if at is not None:
        if not 1 <= at <= samples:
            raise ProfileError(f"profile {name}: at must be in 1..{samples}, the samples given, got {at}")
        inputs = first_samples(inputs, dims, at, samples)
        targets = first_samples(targets, (0,), at, samples)
        samples = at
    return Walk(name, layered, inputs, targets, loss_fn, samples, samples // 2 if fixed else 0)


def _walk_of_traced(name: str, model: Any, fixed: bool) -> Walk:
    """Of a traced model with tensors like those of its example, on "meta"; with the loss that it has."""
    inputs = tuple(
        torch.empty(it.shape, dtype=getattr(torch, it.dtype.removeprefix("torch.")), device="meta")
        for it in model.crossing(0)
    )
    has_loss = bool(model.losses)
    targets = tuple(inputs[index] for index in model.labels) if has_loss else ()
    samples = model.training.captured.example
    loss = _own_loss(model) if has_loss else None
    return Walk(name, model, inputs, targets, loss, samples, samples // 2 if fixed else 0)


def _of_named(loss_fn: LossFunction, structure: Structure) -> LossFunction:
    """A loss of targets in a dict as one of tensors."""
    return lambda output, targets: loss_fn(output, structure.rebuild(_several(targets)))


def _own_loss(layered: Any) -> LossFunction:
    """The loss that a traced model computes itself, of all samples given."""
    last = layered.divide(layered.depth - 1, layered.depth)

    def loss(output: Any, targets: Any) -> Tensor:
        labels = _several(targets)
        last.begin_loss(labels, labels[0].shape[0])
        result: Tensor = last.loss(output, labels)
        return result

    return loss


def _several(values: Any) -> tuple[Tensor, ...]:
    return (values,) if isinstance(values, Tensor) else tuple(values)


def _name_of(model: nn.Module | Layered) -> str:
    """Its class; a traced model says whose graph it is."""
    own = None if isinstance(model, nn.Module) else getattr(model, "name", None)
    return own if isinstance(own, str) else type(model).__name__


def _layered(model: nn.Module | Layered, inputs: Any) -> Layered:
    if isinstance(model, Layered):
        return model
    from arborcast.pipeline.model.traced import trace

    return trace(model, inputs)


def tensors_of(values: Any, what: str) -> tuple[Tensor, ...]:
    """A tensor or several as a tuple.

    Raises:
        ProfileError: it is something else.
    """
    several = tuple(values) if isinstance(values, (tuple, list)) else (values,)
    if not several:
        raise ProfileError(f"{what} must be a tensor or a tuple of tensors, got none")
    for value in several:
        if not isinstance(value, Tensor):
            raise ProfileError(f"{what} must be a tensor or a tuple of tensors, got {type(value).__name__}")
    return several


def first_samples(
    values: Sequence[Tensor], dims: Sequence[int], samples: int, whole: int
) -> tuple[Tensor, ...]:
    """The first so many samples of every tensor; `requires_grad` as it was.

    Args:
        values: the tensors.
        dims: the dimension of each that counts samples, of several rows each where tokens lie in it too; the
            last one for all further tensors.
        samples: how many.
        whole: how many there are.
    """

    def first(value: Tensor, dim: int) -> Tensor:
        rows = value.shape[dim] // whole
        return value.detach().narrow(dim, 0, samples * rows).requires_grad_(value.requires_grad)

    return tuple(first(value, dims[min(place, len(dims) - 1)]) for place, value in enumerate(values))


def run_pass(
    walk: Walk,
    index: int,
    call: Callable[..., Any],
    values: Sequence[Tensor],
    meters: tuple[Meter, Meter],
    owned: Iterable[Tensor] = (),
    targets: Sequence[Tensor] = (),
    watched: bool = True,
    halves: tuple[SplitBackward, Meter] | None = None,
    stayed_before: Sequence[bool] = (),
) -> PassCosts:
    """Run a layer forward and backward, the last one with the loss.

    Args:
        walk: what is being walked.
        index: of the layer.
        call: the layer, or a stand-in for it.
        values: that cross the boundary before it.
        meters: of the forward and of the backward pass.
        owned: its parameters and buffers, which do not count as saved.
        targets: of the loss.
        watched: whether to find `saved_bytes`, which costs time; 0 if not.
        halves: splits the backward pass, so that the second meter takes its first half only, and this one
            the other; None for a whole one.
        stayed_before: of each of the values, whether an operator before keeps it.
    """
    last = index == walk.model.depth - 1
    # Copies, outside the meters: layers that work in place may not change a leaf, nor the next run's input.
    given = [value.detach().requires_grad_(value.requires_grad).clone() for value in values]
    watch: AbstractContextManager[list[Tensor]] = _saved() if watched else nullcontext([])
    memory = given[0].untyped_storage().device.type  # "meta" of fake tensors
    live = LiveBytes(memory)
    seen: AbstractContextManager[Any] = live if watched else nullcontext()
    with seen, watch as saved, meters[0]:
        made = call(*given)
        # What the model returns may be put together in any way; between layers tensors cross.
        several = flatten(made)[0] if last else made
        outputs = tensors_of(several, f"{walk.where(index)}: its output")
        ends = outputs
        if last and walk.loss_fn is not None:
            wanted = targets[0] if len(targets) == 1 else tuple(targets)
            ends = tensors_of(walk.loss_fn(made, wanted), f"{walk.where(index)}: the loss")
    taken, kept, handed = _memory(given), _memory((*given, *saved) if watched else ()), _memory(outputs)
    stays = {storage_key(it) for it in saved}
    counted_next = sum(size for key, size in handed.items() if key in stays and not last)
    stays |= {storage_key(it) for it, stayed in zip(given, stayed_before, strict=False) if stayed}
    passing = sum(size for key, size in taken.items() if key in kept and key not in stays)
    stayed = tuple(storage_key(it) in stays for it in outputs)
    elsewhere = {storage_key(it) for it in (*owned, *(() if last else outputs))}
    saved_bytes = sum(size for key, size in kept.items() if key not in elsewhere)  # outputs: the next layer's
    trained = [end for end in ends if end.requires_grad]
    roots = [get_gradient_edge(end) for end in trained]
    size = size_bytes(outputs)
    plain = tuple(
        it.detach().clone().requires_grad_(it.requires_grad)
        for it in (() if last or not watched else outputs)
    )
    with seen:
        gradients = [torch.ones_like(end) for end in trained]
    # As in training, where only autograd keeps them.
    del made, several, outputs, ends, trained, saved[:]
    later: Second = []
    found: list[Tensor | None] = []
    live.peak = live.now if halves is not None else live.peak
    with seen, meters[1]:
        if roots and halves is None:
            torch.autograd.backward(roots, gradients)
        elif roots and halves is not None:
            found, later = halves[0].first(roots, gradients, given)
    del roots, gradients
    inside = sum(taken.values()) - saved_bytes
    back = _memory(it for it in found if it is not None)
    left = sum((_memory(it for _, own, _ in later for it in own) | back).values()) - sum(back.values())
    tail = left + sum(back.values()) - live.now - inside
    if halves is not None:
        with halves[1]:
            SplitBackward.second(later)
    return PassCosts(
        plain,
        size,
        meters[0].us,
        meters[1].us,
        saved_bytes,
        max(inside + live.peak, 0) if watched else 0,
        passing_bytes=min(passing, saved_bytes),
        stayed=stayed,
        split_bytes=left,
        tail_bytes=min(max(tail, 0), saved_bytes) if watched else 0,
        split_working_bytes=max(inside + live.peak - counted_next, 0) if watched else 0,
    )


def _memory(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the memory behind tensors, once where several share it."""
    return {storage_key(it): it.untyped_storage().nbytes() for it in tensors}


def size_bytes(tensors: Iterable[Tensor]) -> int:
    """Of their elements."""
    return sum(it.numel() * it.element_size() for it in tensors)


def optimizer_bytes(
    factory: OptimizerFactory, parameters: Iterable[Tensor], meter: Meter | None = None
) -> tuple[int, int]:
    """What the optimizer keeps for parameters of these shapes, and what it needs besides while it steps.

    Found by steps with small gradients; those of zero take some processors longer. `meter` is told of more.
    """
    stand_ins = [nn.Parameter(torch.full_like(it, 0.02)) for it in parameters if it.requires_grad]
    if not stand_ins:
        return 0, 0
    for parameter in stand_ins:
        parameter.grad = torch.full_like(parameter, 0.001)
    optimizer = factory(stand_ins)
    optimizer.step()
    with LiveBytes(stand_ins[0].untyped_storage().device.type) as live:
        optimizer.step()
    if meter is not None:
        times = []
        for _ in range(UPDATES):
            with meter:
                optimizer.step()
            times.append(meter.us)
        meter.us = median(times)
    states = (it for state in optimizer.state.values() for it in state.values() if isinstance(it, Tensor))
    return sum(_memory(states).values()), live.peak


def finish(walk: Walk, layers: Sequence[Layer], source: str) -> Profile:
    """The profile of the layers, with the model's shared parameters."""
    return Profile(walk.name, walk.samples, tuple(layers), tuple(_ties(walk.model)), source)


def _fixed_part(samples: int, time_us: float, fewer: int, less_us: float) -> float:
    """Of the straight line through two measurements, the time at no samples, in [0, `time_us`]."""
    if not 0 < fewer < samples:
        return 0.0
    slope = (time_us - less_us) / (samples - fewer)
    return min(max(time_us - slope * samples, 0.0), time_us)


def _ties(model: Layered) -> Iterator[Tie]:
    """Shared parameters that are trained: of frozen ones there is no gradient to sum."""
    for name, layers in model.ties:
        size, trained = _tied(model, name, layers)
        if trained and len(layers) > 1:
            yield Tie(name, size, tuple(layers))


def _tied(model: Layered, name: str, layers: Sequence[int]) -> tuple[int, bool]:
    for index in layers:
        found = dict(model.divide(index, index + 1).named_parameters(remove_duplicate=False)).get(name)
        if found is not None:
            return size_bytes([found]), found.requires_grad
    raise ProfileError(f"tie {name}: must be a parameter of layers {tuple(layers)}, got none of that name")


@contextmanager
def _saved() -> Iterator[list[Tensor]]:
    """What autograd keeps of all that runs inside."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor.detach()  # an operator that keeps what it returns would keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
