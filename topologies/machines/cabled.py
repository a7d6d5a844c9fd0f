"""Small machines that are cabled to each other, with or without a switch: DGX Spark, Mac Studio.

A machine is one rank. What its ports can carry together may be less than each of them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from arborcast.synth.errors import TopologyError
from arborcast.synth.topology import Topology
from arborcast.topologies.builders import assumed
from arborcast.topologies.entries import DATASHEET, Entry, Parameter, count, one_of
from arborcast.topologies.grids import full, ring, star
from arborcast.topologies.rates import FABRIC_HOP_US, Rates, not_infiniband, pcie_rate

_PORT = Fraction(25)
_SLOTS = 2 * pcie_rate(Fraction(32), 4, Rates.DATASHEET)
"""GB/s each way: one of the two ports of a Spark, and what both of its PCIe 5.0 x4 links carry for them."""

_THUNDERBOLT, _THUNDERBOLTS = Fraction(10), 5
_NEXT = 2 * FABRIC_HOP_US


def _spark(*, name: str, sparks: int, cables: int | None, links: str) -> Topology:
    """Sparks in a ring or around a switch; two of them in a ring are a pair with one cable or two.

    Both ports share two slots, and each port is reached through both: a cable alone has its port's rate, two
    of them half of the slots' each.
    """
    if sparks < 2 or (links == "ring" and sparks > 2 and cables == 1):
        raise TopologyError(f"{name}: must be at least 2 sparks, 3 or more in a ring by 2 cables each")
    used = cables or (2 if links == "ring" and sparks > 2 else 1)
    if used > 2:
        raise TopologyError(f"{name}: cables must be 1 or 2, as a Spark has 2 ports, got {used}")
    rate = min(used * _PORT, _SLOTS)
    if links == "switch":
        hop = FABRIC_HOP_US
        joined = star(name=name, ranks=sparks, in_network="none", bandwidth=rate, latency=hop)
    else:
        each = rate if sparks == 2 else rate / 2
        joined = ring(name=name, ranks=sparks, bandwidth=each, latency=_NEXT)
    return assumed(joined, latency=not_infiniband("Ethernet"))


def _mac(*, name: str, macs: int) -> Topology:
    """Macs each joined to each, as their RDMA over Thunderbolt wants it."""
    if not 2 <= macs <= _THUNDERBOLTS + 1:
        raise TopologyError(
            f"{name}: must be 2..{_THUNDERBOLTS + 1}, as a port leads to each other, got {macs}"
        )
    joined = full(name=name, ranks=macs, bandwidth=_THUNDERBOLT, latency=_NEXT)
    return assumed(joined, latency=not_infiniband("Thunderbolt"))


ENTRIES: Sequence[Entry] = (
    Entry(
        "dgx-spark",
        "DGX Sparks cabled in a pair or a ring, or to a switch (links=switch)",
        _spark,
        (
            Parameter("sparks", "N", count, required=True),
            Parameter("cables", "1|2", count),
            Parameter("links", "ring|switch", one_of("ring", "switch"), "ring"),
        ),
        DATASHEET,
        vendor="cabled",
        source="DGX Spark user guide: ConnectX-7 with two ports of 200 Gb/s; ServeTheHome (2025): it hangs "
        "on two PCIe 5.0 x4, which together carried 160 to 198 Gb/s",
    ),
    Entry(
        "mac-studio",
        "Mac Studios (M3 Ultra), each joined to each by Thunderbolt 5",
        _mac,
        (Parameter("macs", "N", count, required=True),),
        DATASHEET,
        vendor="cabled",
        source="Mac Studio specifications: Thunderbolt 5 with 80 Gb/s each way; J. Geerling (December 2025): "
        "5 of the ports do RDMA",
    ),
)
