"""Google's TPU slices: 3D tori and twisted tori of v4, v5p and 7x, 2D grids of v5e and v6e.

Where a slice wraps round is Google's rule: one of three dimensions in each of them if it is whole cubes
(4x4x4), through optical switches, a smaller one nowhere; one of two where it has the 16 chips of its pod.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from arborcast.synth.errors import TopologyError
from arborcast.synth.topology import Topology
from arborcast.topologies.builders import assumed
from arborcast.topologies.entries import DATASHEET, Entry, Parameter, extents
from arborcast.topologies.grids import lattice
from arborcast.topologies.rates import NOT_NVLINK, NVLINK_LATENCY_US

_CUBE = 4
_POD_SIDE = 16
_TWISTED = "_twisted"


@dataclass(frozen=True, slots=True)
class Slice:
    """A shape as Google writes it: 4x4x8, 4x4x8_twisted."""

    extents: tuple[int, ...]
    twisted: bool = False

    def __str__(self) -> str:
        """As Google writes it."""
        return "x".join(map(str, self.extents)) + _TWISTED * self.twisted

    @classmethod
    def read(cls, text: str) -> Slice:
        """The slice of that text; ValueError with the rule otherwise."""
        plain = text.lower().replace("-", "_")
        return cls(extents(plain.removesuffix(_TWISTED)), plain.endswith(_TWISTED))


def _cubes(*, name: str, shape: Slice, rate: Fraction, pod: int) -> Topology:
    """A slice of v4, v5p or 7x, which is one cube or less, or made of whole cubes."""
    sides = shape.extents
    whole = all(side % _CUBE == 0 for side in sides)
    if len(sides) != 3 or not (whole or all(side <= _CUBE for side in sides)):
        raise TopologyError(
            f"{name}: must be AxBxC with each side a multiple of {_CUBE}, or none larger than {_CUBE}"
        )
    if math.prod(sides) > pod:
        raise TopologyError(f"{name}: must have at most {pod} chips, got {math.prod(sides)}")
    twists = _twists(name, sides) if shape.twisted else None
    slices = lattice(name, sides, [rate] * 3, NVLINK_LATENCY_US, [whole] * 3, twists)
    return assumed(slices, latency=NOT_NVLINK)


def _twists(name: str, sides: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """What a step over the end of each short side adds: half of every long side.

    Shapes n x n x 2n and n x 2n x 2n only (TPU v4, ISCA 2023). These are the lattice graphs of Camarero,
    Martinez and Beivide (IEEE Transactions on Computers 2013), in which all dimensions are alike.
    """
    short = min(sides)
    if short % _CUBE or set(sides) != {short, 2 * short}:
        raise TopologyError(f"{name}: twisted must be n x n x 2n or n x 2n x 2n in whole cubes")
    twist = tuple(side - short for side in sides)
    return {dimension: twist for dimension, side in enumerate(sides) if side == short}


def _flat(*, name: str, shape: tuple[int, ...], rate: Fraction) -> Topology:
    """A slice of v5e or v6e: part of a pod of 16x16."""
    if len(shape) != 2 or max(shape) > _POD_SIDE:
        raise TopologyError(f"{name}: must be AxB with sides of at most {_POD_SIDE}")
    wraps = [side == _POD_SIDE for side in shape]
    return assumed(lattice(name, shape, [rate] * 2, NVLINK_LATENCY_US, wraps), latency=NOT_NVLINK)


def _solid(name: str, rate: int, pod: int, source: str) -> Entry:
    return Entry(
        name,
        f"slices of TPU {name[4:]}: 4x4x4 cubes wrap round, smaller ones do not; 4x4x8_twisted",
        partial(_cubes, rate=Fraction(rate), pod=pod),
        (Parameter("extents", "4x4x8", Slice.read, required=True, keyword="shape"),),
        DATASHEET,
        vendor="Google",
        source=source,
    )


def _plane(name: str, rate: int, source: str) -> Entry:
    return Entry(
        name,
        f"slices of TPU {name[4:]}: a side of 16 wraps round",
        partial(_flat, rate=Fraction(rate)),
        (Parameter("extents", "4x8", extents, required=True, keyword="shape"),),
        DATASHEET,
        vendor="Google",
        source=source,
    )


# Google's own book (jax-ml.github.io/scaling-book) plans with 45 GB/s for 50 and 90 for 100, what links
# deliver; the documents count here, as data sheets do for all other machines.
ENTRIES: Sequence[Entry] = (
    _solid("tpu-v4", 50, 4096, "TPU v4 (ISCA 2023), table 4: 6 links of 50 GB/s"),
    _solid("tpu-v5p", 100, 8960, "Cloud TPU documentation, v5p: 1200 GB/s both ways over 6 links"),
    _solid("tpu-7x", 100, 9216, "Cloud TPU documentation, TPU7x: 1200 GB/s both ways over 6 links"),
    _plane("tpu-v5e", 50, "Cloud TPU documentation, v5e: 400 GB/s both ways over 4 links"),
    _plane("tpu-v6e", 100, "Cloud TPU documentation, v6e: 800 GB/s both ways over 4 links"),
)
