"""Amazon's Trainium: boxes that are a torus, and UltraServers of four that are one of three dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

from arborcast.topologies.builders import assumed
from arborcast.topologies.cluster import even_nics
from arborcast.topologies.entries import DATASHEET, Entry
from arborcast.topologies.grids import lattice
from arborcast.topologies.machine import Machine
from arborcast.topologies.machines.boxes import BOXES, nic, rails, several
from arborcast.topologies.rates import NOT_NVLINK, NVLINK_LATENCY_US

_BOTH_WAYS = "of NeuronLink: the published sums taken as both ways, shared evenly by neighbours"
_TRN2 = (
    "Neuron documentation, Trn2 architecture: NeuronLink-v3 1024 GB/s a chip in an instance and 256 across "
    "(taken as both ways, to 4 and to 2 neighbours); EFAv3 3.2 Tb/s for 16 chips"
)
_TRN1 = (
    "Neuron documentation, Trn1/Trn1n architecture: NeuronLink-v2, a torus, 384 or 768 GB/s a chip (taken as "
    "both ways, to 4 neighbours); EFA 800 or 1600 Gb/s for 16 chips"
)


def _instances(
    *, name: str, boxes: int, nic: Fraction, rails: int, inside: int, across: int = 0, nics: int = 16
) -> Machine:
    """Chips in a torus of 4x4 per instance; with a rate across, those of one place in four are a ring."""
    sides, rates = ([4, 4, 4], [across, inside, inside]) if across else ([4, 4], [inside, inside])
    torus = lattice(name, sides, [*map(Fraction, rates)], NVLINK_LATENCY_US, [True] * len(sides))
    torus = assumed(torus, rate=_BOTH_WAYS, latency=NOT_NVLINK)
    hung = even_nics(torus.ranks, nic, nics)
    return several(name, torus, hung, gpu=None, boxes=boxes, rails=rails, host=16, network="EFA")


def _entry(name: str, description: str, port: str, source: str, build: Callable[..., Machine]) -> Entry:
    parameters = (BOXES, nic(Fraction(port)), rails(1))
    return Entry(name, description, build, parameters, DATASHEET, vendor="AWS", source=source)


_ONE = "instances of 16 {} in a torus of 4x4"

ENTRIES: Sequence[Entry] = (
    _entry("trn1", _ONE.format("Trainium"), "12.5", _TRN1, partial(_instances, inside=48, nics=8)),
    _entry(
        "trn1n", _ONE.format("Trainium, with twice the links,"), "12.5", _TRN1, partial(_instances, inside=96)
    ),
    _entry(
        "trn2", "instances of 16 Trainium2 in a torus of 4x4", "25", _TRN2, partial(_instances, inside=128)
    ),
    _entry(
        "trn2-ultra",
        "UltraServers: four trn2 instances in a torus of 4x4x4",
        "25",
        _TRN2,
        partial(_instances, inside=128, across=64, nics=64),
    ),
)
