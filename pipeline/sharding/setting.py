"""What a sharding is priced by: the mesh with its collectives, the device, and how the stage is run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from arborcast.pipeline.costs.devices import DeviceRates
from arborcast.pipeline.sharding.fabric_prices import FabricPrices
from arborcast.pipeline.sharding.graph import MemberOperator
from arborcast.pipeline.sharding.resharding import Resharder


@dataclass(frozen=True)
class Setting:
    """All but the operators.

    Attributes:
        prices: of collectives on the mesh.
        device: of each rank.
        microbatches: of a step; gradients are added up over them.
        in_flight: of how many microbatches a rank holds activations.
        optimizer_ratio: bytes of the optimizer's state for each byte of weights (Adam: 2).
    """

    prices: FabricPrices
    device: DeviceRates
    microbatches: int = 1
    in_flight: int = 1
    optimizer_ratio: Fraction = Fraction(2)
    _times: dict[tuple[MemberOperator, tuple[int, ...]], int] = field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def resharder(self) -> Resharder:
        """Of the mesh."""
        return Resharder(self.prices)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the axes."""
        return self.prices.mesh.shape

    def kernel_ps(self, kernel: MemberOperator, divided: Sequence[int | None]) -> int:
        """A kernel forward and backward on one rank's part, when axes divide these labels.

        Backward it moves twice the bytes: values and gradients in, gradients out.
        """
        key = kernel, tuple(-1 if it is None else it for it in divided)
        if key not in self._times:
            labels = {label for present, _ in kernel.touched for label in present}
            parts = self._parts(labels, divided)
            moved = sum(size / self._parts(present, divided) for present, size in kernel.touched)
            us = self.device.operator_us(kernel.flops / parts, moved, kernel.dtype)
            if kernel.is_trained:
                us += self.device.operator_us(kernel.backward_flops / parts, 2 * moved, kernel.dtype)
            self._times[key] = round(us * 10**6)
        return self._times[key]

    def update_ps(self, size_bytes: int) -> int:
        """The update of weights of so many bytes."""
        return round(self.device.update_us(size_bytes, float(size_bytes * self.optimizer_ratio)) * 10**6)

    def _parts(self, labels: set[int] | tuple[int, ...], divided: Sequence[int | None]) -> int:
        return math.prod(size for size, label in zip(self.sizes, divided, strict=True) if label in labels)
