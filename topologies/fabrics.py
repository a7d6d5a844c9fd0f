"""Networks between hosts: which switches there are, which of them each NIC is cabled to, what joins them.

A fabric knows nothing of hosts but their NICs. `topologies.cluster` makes vertices and links of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.numerals import parse_number, shorten
from arborcast.synth.topology import Switch
from arborcast.topologies.builders import switch_that

SWITCH_HOP_US = Fraction(13, 100)
"""From one switch of a network to the next: 130 ns port to port (NVIDIA Quantum data sheet)."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """A fabric for given hosts.

    Attributes:
        switches: their names, or what else they can do.
        port: the index of the switch that a NIC is cabled to, by the number of its host and its own.
        cables: pairs of switches with their GB/s each way.
        blocks: runs of so many hosts stand alike, from small to large; for the search for symmetries.
    """

    switches: tuple[str | Switch, ...]
    port: Callable[[int, int], int]
    cables: tuple[tuple[int, int, Fraction], ...] = ()
    blocks: tuple[int, ...] = ()


class Fabric(Protocol):
    """What joins hosts."""

    def wire(self, name: str, nics: Sequence[Sequence[Fraction]]) -> Wiring:
        """The switches and cables for the NICs of each host, given by their GB/s each way.

        Raises:
            TopologyError: it does not fit these hosts; begins with the name.
        """


@dataclass(frozen=True, slots=True)
class Rails:
    """Switches that never meet: NIC i of every host goes to switch i modulo their number.

    One switch is the fabric that blocks nothing, as many as NICs the rail-optimised one, in which traffic
    changes the rail inside a host.

    Attributes:
        count: of switches; None for as many as the host with most of them has NICs.
        in_network: what the switches can do, a word of `IN_NETWORK`.
    """

    count: int | None = None
    in_network: str = "none"

    def wire(self, name: str, nics: Sequence[Sequence[Fraction]]) -> Wiring:
        """See `Fabric`."""
        most = max(map(len, nics))
        count = self.count or most
        if most % count:
            raise TopologyError(f"{name}: rails must divide the {most} NICs of a host, got {count}")
        names = ["fabric"] if count == 1 else [f"fabric{rail}" for rail in range(count)]
        switches = tuple(switch_that(name, self.in_network) for name in names)
        return Wiring(switches, lambda host, nic: nic % count)


@dataclass(frozen=True, slots=True)
class FatTree:
    """A leaf switch for some hosts each, all NICs of them on it, and one core over the leaves.

    A leaf's way to the core carries what its NICs carry, divided by `oversubscription`. The switches that a
    folded Clos network has in place of the core are one vertex.

    Attributes:
        oversubscription: at least 1.
        hosts: under each leaf; None for the largest divisor of their number that is at most its square root.
        in_network: what leaves and core can do, a word of `IN_NETWORK`.
    """

    oversubscription: Fraction
    hosts: int | None = None
    in_network: str = "none"

    def wire(self, name: str, nics: Sequence[Sequence[Fraction]]) -> Wiring:
        """See `Fabric`."""
        total = len(nics)
        root = math.isqrt(total)
        under = self.hosts or next(part for part in range(root, 0, -1) if total % part == 0)
        leaves = -(-total // under)
        if leaves < 2:
            raise TopologyError(
                f"{name}: a fat tree must have at least 2 leaves, got {total} hosts with {under} under a leaf"
            )
        sums = [
            sum((rate for rates in nics[leaf * under : (leaf + 1) * under] for rate in rates), Fraction(0))
            for leaf in range(leaves)
        ]
        return Wiring(
            tuple(
                switch_that(name, self.in_network)
                for name in (*(f"leaf{leaf}" for leaf in range(leaves)), "core")
            ),
            lambda host, nic: host // under,
            tuple((leaf, leaves, rate / self.oversubscription) for leaf, rate in enumerate(sums) if rate),
            (under,),
        )


@dataclass(frozen=True, slots=True)
class RailTree:
    """Rail-optimised leaves under one core: NIC i of the hosts of a pod goes to leaf i of this pod.

    A leaf's way to the core carries what its NICs carry, divided by `oversubscription`.

    Attributes:
        oversubscription: at least 1.
        hosts: in each pod; None for all in one.
        in_network: what leaves and core can do, a word of `IN_NETWORK`.
    """

    oversubscription: Fraction
    hosts: int | None = None
    in_network: str = "none"

    def wire(self, name: str, nics: Sequence[Sequence[Fraction]]) -> Wiring:
        """See `Fabric`."""
        rails, under = max(map(len, nics)), self.hosts or len(nics)
        if rails * -(-len(nics) // under) < 2:
            raise TopologyError(f"{name}: a tree of rails must have at least 2 leaves, got 1 NIC a host")
        sums: dict[int, Fraction] = {}
        for host, rates in enumerate(nics):
            for rail, rate in enumerate(rates):
                leaf = host // under * rails + rail
                sums[leaf] = sums.get(leaf, Fraction(0)) + rate
        leaves = rails * -(-len(nics) // under)
        names = [*(f"pod{leaf // rails}.rail{leaf % rails}" for leaf in range(leaves)), "core"]
        return Wiring(
            tuple(switch_that(own, self.in_network) for own in names),
            lambda host, nic: host // under * rails + nic,
            tuple((leaf, leaves, rate / self.oversubscription) for leaf, rate in sums.items() if rate),
            (under,),
        )


FORMS = (
    "rail, rail:N, full, fat-tree:RATIO, fat-tree:RATIO:HOSTS, rail-tree:RATIO or rail-tree:RATIO:HOSTS, "
    "+sharp after any of them"
)


def fabric_named(text: str) -> Fabric:
    """The fabric that a text names.

    `rail` has a switch for every NIC of a host, `rail:N` N of them, `full` one; `fat-tree:RATIO:HOSTS` so
    many hosts under each leaf; `rail-tree:RATIO:HOSTS` a leaf for every NIC of so many hosts. With `+sharp`
    after it, its switches reduce, multicast and turn, as those of InfiniBand with SHARP do (Graham et al.,
    COMHPC 2016).

    Raises:
        TopologyError: none has this name, or its numbers break a rule.
    """
    wiring, plus, able = text.lower().replace("_", "-").partition("+")
    kind, *numbers = wiring.split(":")
    if plus and able != "sharp":
        raise TopologyError(f"fabric {shorten(text)}: must be {FORMS}")
    in_network = "turn" if plus else "none"
    try:
        match kind, numbers:
            case "full", []:
                return Rails(1, in_network)
            case "rail" | "rails", []:
                return Rails(None, in_network)
            case "rail" | "rails", [count]:
                return Rails(_whole(count), in_network)
            case "fat-tree", [ratio, *hosts] if len(hosts) <= 1:
                return FatTree(_ratio(ratio), _whole(hosts[0]) if hosts else None, in_network)
            case "rail-tree", [ratio, *hosts] if len(hosts) <= 1:
                return RailTree(_ratio(ratio), _whole(hosts[0]) if hosts else None, in_network)
    except ValueError as error:
        raise TopologyError(f"fabric {shorten(text)}: {error}") from error
    raise TopologyError(f"fabric {shorten(text)}: must be {FORMS}")


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:10]) < 1 << 16):
        raise ValueError(f"must have a whole number in 1..65535, got {shorten(text)}")
    return int(text)


def _ratio(text: str) -> Fraction:
    ratio = parse_number(text)
    if not 1 <= ratio <= 10**6:
        raise ValueError(f"RATIO must be at least 1 and at most 1e6, got {shorten(text)}")
    return ratio
