"""Amazon's Trainium2: boxes that are a torus, and UltraServers of four that are one of three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import partial

from arborcast.topologies.builders import assumed
from arborcast.topologies.cluster import own_nics
from arborcast.topologies.entries import DATASHEET, Entry
from arborcast.topologies.grids import lattice
from arborcast.topologies.machine import Machine
from arborcast.topologies.machines.boxes import BOXES, nic, rails, several
from arborcast.topologies.rates import NOT_NVLINK, NVLINK_LATENCY_US

_INSIDE, _ACROSS = Fraction(128), Fraction(64)
_BOTH_WAYS = "of NeuronLink: the published sums taken as both ways, shared evenly by neighbours"


def _trn2(*, name: str, boxes: int, nic: Fraction, rails: int, instances: int) -> Machine:
    """Chips in a torus of 4x4 per instance; those of the same place in four instances are a ring."""
    sides = [4, 4] if instances == 1 else [instances, 4, 4]
    rates = [_INSIDE] * 2 if instances == 1 else [_ACROSS, _INSIDE, _INSIDE]
    torus = lattice(name, sides, rates, NVLINK_LATENCY_US, [True] * len(sides))
    torus = assumed(torus, rate=_BOTH_WAYS, latency=NOT_NVLINK)
    chips = own_nics(torus.ranks, nic)
    return several(name, torus, chips, gpu=None, boxes=boxes, rails=rails, host=16, network="EFA")


def _entry(name: str, description: str, instances: int) -> Entry:
    return Entry(
        name,
        description,
        partial(_trn2, instances=instances),
        (BOXES, nic(Fraction(25)), rails(1)),
        DATASHEET,
        vendor="AWS",
        source="Neuron documentation, Trn2 architecture: NeuronLink-v3 1024 GB/s a chip inside an instance "
        "and 256 across (taken as both ways, to 4 and to 2 neighbours); EFAv3 3.2 Tb/s for 16 chips",
    )


ENTRIES: Sequence[Entry] = (
    _entry("trn2", "instances of 16 Trainium2 in a torus of 4x4", 1),
    _entry("trn2-ultra", "UltraServers: four trn2 instances in a torus of 4x4x4", 4),
)
