"""What the layers of a model cost: the values between whoever measures and whoever plans.

A `Profile` is taken at one number of samples; times and activation sizes for any other follow from it in
proportion, except for the fixed part of each time. Files are in `pipeline/planning/formats.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import accumulate

from arborcast.pipeline.errors import ProfileError


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer costs with `Profile.samples` samples; a layer is what lies between two cut points.

    Attributes:
        name: of the layer in the model, unique.
        forward_us: of one forward pass.
        backward_us: of one backward pass, without the forward that recomputation adds.
        output_bytes: what crosses the boundary behind this layer, one way; gradients are as many.
        saved_bytes: what autograd keeps from the forward pass until the backward pass, the input included.
        parameter_bytes: of parameters and buffers, those shared with other layers included.
        gradient_bytes: of the gradients of its trainable parameters: what an allreduce carries.
        optimizer_bytes: of the state that the optimizer keeps for them.
        forward_fixed_us: the part of `forward_us` that does not shrink with fewer samples.
        backward_fixed_us: likewise of `backward_us`.
        weights_us: the part of `backward_us` that computes gradients of parameters, and so can wait where
            an order splits backward passes. None where nobody measured it: then half of it, as of a product
            of matrices, in a layer with gradients, and nothing in one without.
        working_bytes: what a pass needs besides `saved_bytes`, at the fullest moment: results that are not
            kept, gradients on their way.
        working_fixed_bytes: the part of it that does not shrink with fewer samples: gradients of parameters
            before they are added.
        update_bytes: what the optimizer needs besides its state while it steps; one parameter at a time.
        update_us: of the optimizer's step for its parameters; 0 where nobody said which optimizer.
        passing_bytes: the part of `saved_bytes` that is input which no operator keeps, of this layer or the
            one before: it stays only where a stage begins with this layer.
        split_us: by how much a backward pass takes longer in two halves, each by its part.
        split_bytes: what a microbatch keeps between these halves besides `saved_bytes`: gradients that those
            of parameters are made of.
        tail_bytes: the part of `saved_bytes` that goes with the first half where a stage ends behind this
            layer.
        split_working_bytes: as `working_bytes`, of the first half, while all that layers behind had saved is
            still there.
    """

    name: str
    forward_us: float
    backward_us: float
    output_bytes: int
    saved_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int = 0
    forward_fixed_us: float = 0.0
    backward_fixed_us: float = 0.0
    weights_us: float | None = None
    working_bytes: int = 0
    working_fixed_bytes: int = 0
    update_bytes: int = 0
    passing_bytes: int = 0
    update_us: float = 0.0
    split_us: float = 0.0
    split_bytes: int = 0
    tail_bytes: int = 0
    split_working_bytes: int = 0

    @property
    def weights_share(self) -> float:
        """The part of a backward pass that gradients of parameters take, from 0 to 1."""
        if self.weights_us is None:
            return 0.5 if self.gradient_bytes else 0.0
        return self.weights_us / self.backward_us if self.backward_us else 0.0


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several layers use: kept on one stage, or its gradients summed over their stages.

    Attributes:
        name: of the parameter.
        size_bytes: of the parameter.
        layers: indices of the layers that use it, at least two, ascending.
    """

    name: str
    size_bytes: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Profile:
    """The costs of all layers of a model, in their order.

    Attributes:
        model: what reports call it.
        samples: of the batch that the costs are for.
        layers: at least one.
        ties: parameters that several layers share.
        source: how the costs were found, in words ("measured on 1 CPU, median of 5", "V100, from FLOPs").
        crowding: how many times as long a pass takes while all other ranks compute, too: those of one machine
            share its caches and memory. Of some of them it is their part of what is above 1.

    Raises:
        ProfileError: a number is negative or not finite, or a tie names a layer that there is not.
    """

    model: str
    samples: int
    layers: tuple[Layer, ...]
    ties: tuple[Tie, ...] = ()
    source: str = ""
    crowding: float = 1.0

    def __post_init__(self) -> None:
        """Check every rule of the docstrings."""
        if self.samples < 1:
            raise ProfileError(f"profile {self.model}: samples must be at least 1, got {self.samples}")
        if not (math.isfinite(self.crowding) and self.crowding >= 1):
            raise ProfileError(
                f"profile {self.model}: crowding must be finite and at least 1, got {self.crowding}"
            )
        if not self.layers:
            raise ProfileError(f"profile {self.model}: must have at least one layer, got none")
        names = [layer.name for layer in self.layers]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ProfileError(f"profile {self.model}: names of layers must be unique, got {twice} twice")
        for index, layer in enumerate(self.layers):
            where = f"profile {self.model}: layer {index} ({layer.name})"
            for field in fields(layer)[1:]:
                value = getattr(layer, field.name)
                if value is not None and not (math.isfinite(value) and value >= 0):
                    raise ProfileError(f"{where}: {field.name} must be finite and not negative, got {value}")
            for part, whole in (
                ("forward_fixed_us", "forward_us"),
                ("backward_fixed_us", "backward_us"),
                ("weights_us", "backward_us"),
                ("working_fixed_bytes", "working_bytes"),
                ("passing_bytes", "saved_bytes"),
                ("tail_bytes", "saved_bytes"),
            ):
                some, total = getattr(layer, part), getattr(layer, whole)
                if some is not None and some > total:
                    raise ProfileError(f"{where}: {part} must be at most {whole}, got {some} and {total}")
        for tie in self.ties:
            if len(tie.layers) < 2 or list(tie.layers) != sorted(set(tie.layers)):
                raise ProfileError(
                    f"tie {tie.name}: must name at least two layers, ascending, got {tie.layers}"
                )
            if not 0 <= tie.layers[0] <= tie.layers[-1] < self.depth:
                raise ProfileError(f"tie {tie.name}: layers must be in 0..{self.depth - 1}, got {tie.layers}")

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def forward_us(self, start: int, end: int, samples: float) -> float:
        """Time of one forward pass of the layers [start, end) with so many samples."""
        return self._scaled(((it.forward_us, it.forward_fixed_us) for it in self.layers[start:end]), samples)

    def backward_us(self, start: int, end: int, samples: float) -> float:
        """Time of one backward pass of the layers [start, end) with so many samples."""
        return self._scaled(
            ((it.backward_us, it.backward_fixed_us) for it in self.layers[start:end]), samples
        )

    def halves_us(self, start: int, end: int, samples: float) -> tuple[float, float]:
        """Time of both halves of a split backward pass; the second one computes gradients of parameters."""
        layers = [
            (it, 1 + it.split_us / it.backward_us if it.backward_us else 1.0) for it in self.layers[start:end]
        ]
        whole = self._scaled(((it.backward_us * n, it.backward_fixed_us * n) for it, n in layers), samples)
        shares = ((it, n * it.weights_share) for it, n in layers)
        second = self._scaled(((it.backward_us * n, it.backward_fixed_us * n) for it, n in shares), samples)
        return whole - second, second

    def output_bytes(self, cut: int, samples: float) -> float:
        """Bytes that cross, one way, the boundary before layer `cut` (0 < cut < depth)."""
        return self.layers[cut - 1].output_bytes * samples / self.samples

    def kept_bytes(self, start: int, end: int) -> int:
        """Bytes that a forward pass of these layers keeps for its backward pass, with all samples."""
        passing = sum(it.passing_bytes for it in self.layers[start + 1 : end])
        return sum(it.saved_bytes for it in self.layers[start:end]) - passing

    def update_bytes(self, start: int, end: int) -> int:
        """Bytes that an update needs besides the optimizer's state, where these layers are a stage.

        Of parameters that other stages share, gradients are copied to be summed.
        """
        shared = sum(
            2 * it.size_bytes
            for it in self.ties
            if 0 < sum(start <= layer < end for layer in it.layers) < len(it.layers)
        )
        return max(shared, *(it.update_bytes for it in self.layers[start:end]))

    def parameter_bytes(self, start: int, end: int) -> int:
        """Bytes of parameters and buffers of the layers [start, end), shared ones once."""
        return self.bytes_once("parameter_bytes", [(start, end)])

    def gradient_bytes(self, start: int, end: int) -> int:
        """Bytes of gradients of the layers [start, end), shared parameters once."""
        return self.bytes_once("gradient_bytes", [(start, end)])

    def optimizer_bytes(self, start: int, end: int) -> int:
        """Bytes of the optimizer's state for the layers [start, end), of shared parameters once."""
        return self.optimizer_once([(start, end)])

    def update_us(self, ranges: Sequence[tuple[int, int]]) -> float:
        """Time in which the optimizer steps for several ranges of layers, shared parameters once."""
        time_us = sum(it.update_us for start, end in ranges for it in self.layers[start:end])
        return float(time_us * self._trained_once(ranges))

    def optimizer_once(self, ranges: Sequence[tuple[int, int]]) -> int:
        """Bytes of the optimizer's state for several ranges of layers, of shared parameters once."""
        size = sum(it.optimizer_bytes for start, end in ranges for it in self.layers[start:end])
        return math.ceil(size * self._trained_once(ranges))

    def ties_across(self, cuts: Iterable[int]) -> tuple[Tie, ...]:
        """Shared parameters whose layers lie in several stages, where stages begin at `cuts`."""
        bounds = sorted(cuts)

        def stage(layer: int) -> int:
            return sum(layer >= cut for cut in bounds)

        return tuple(tie for tie in self.ties if stage(tie.layers[0]) != stage(tie.layers[-1]))

    def prefix(self, field: str) -> list[float]:
        """Sums of a field over the first 0, 1, ... layers: for programs that ask for many ranges."""
        return list(accumulate((getattr(layer, field) for layer in self.layers), initial=0))

    def _trained_once(self, ranges: Sequence[tuple[int, int]]) -> Fraction:
        """The part of all trained parameters of these layers that is left where shared ones count once."""
        size = sum(it.gradient_bytes for start, end in ranges for it in self.layers[start:end])
        return Fraction(self.bytes_once("gradient_bytes", ranges), size) if size else Fraction(1)

    def _scaled(self, times: Iterable[tuple[float, float]], samples: float) -> float:
        share = samples / self.samples
        return sum(fixed + (total - fixed) * share for total, fixed in times)

    def bytes_once(self, field: str, ranges: Sequence[tuple[int, int]]) -> int:
        """A field of parameters or of gradients, summed over ranges of layers, of shared parameters once."""
        total = sum(getattr(it, field) for start, end in ranges for it in self.layers[start:end])
        for tie in self.ties:
            uses = sum(start <= layer < end for start, end in ranges for layer in tie.layers)
            total -= tie.size_bytes * max(uses - 1, 0)
        return int(total)
