"""Intel's Gaudi boxes: eight accelerators, each joined to each by Ethernet."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import partial

from arborcast.topologies.builders import assumed
from arborcast.topologies.cluster import even_nics
from arborcast.topologies.entries import DATASHEET, Entry
from arborcast.topologies.machine import Machine
from arborcast.topologies.machines.boxes import BOXES, meshed, nic, rails, several
from arborcast.topologies.rates import NOT_NVLINK

_SOURCE = (
    "Gaudi documentation, Network Configuration: 3 ports to each of the 7 others of a box, 3 to the fabric"
)


def _gaudi(*, name: str, boxes: int, nic: Fraction, rails: int, port: Fraction) -> Machine:
    """Boxes in which three ports lead to each other accelerator; the NIC is the three that are left."""
    box = assumed(meshed(name, 8, 3 * port), latency=NOT_NVLINK)
    return several(name, box, even_nics(8, nic, 8), gpu=None, boxes=boxes, rails=rails, network="Ethernet")


def _entry(name: str, description: str, port: Fraction) -> Entry:
    return Entry(
        name,
        description,
        partial(_gaudi, port=port),
        (BOXES, nic(3 * port), rails(1)),
        DATASHEET,
        vendor="Intel",
        source=_SOURCE,
    )


ENTRIES: Sequence[Entry] = (
    _entry("gaudi2", "boxes of 8 Gaudi 2, ports of 100 Gb/s, 3 of them to each other", Fraction("12.5")),
    _entry("gaudi3", "boxes of 8 Gaudi 3, ports of 200 Gb/s, 3 of them to each other", Fraction(25)),
)
