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
    """Leaf switches for some hosts each, and one core over the leaves, or over spines of some leaves each.

    All NICs of a leaf's hosts are on it; by rails, a pod of hosts has a leaf for NIC 0 of each, one for NIC
    1, and so on. A leaf's way to the core carries what its NICs carry, divided by `oversubscription`. The
    switches that a folded Clos network has in place of a spine or the core are one vertex.

    Attributes:
        oversubscription: at least 1.
        hosts: under each leaf, or in each pod; None for the largest divisor of their number that is at most
            its square root, and by rails for all of them.
        in_network: what leaves and core can do, a word of `IN_NETWORK`.
        by_rails: see above.
        spines: of three tiers how much less a spine's way up carries than those of its leaves, and how many
            leaves it has; None for two tiers.
    """

    oversubscription: Fraction
    hosts: int | None = None
    in_network: str = "none"
    by_rails: bool = False
    spines: tuple[Fraction, int] | None = None

    def wire(self, name: str, nics: Sequence[Sequence[Fraction]]) -> Wiring:
        """See `Fabric`."""
        total = len(nics)
        root = total if self.by_rails else math.isqrt(total)
        under = self.hosts or next(part for part in range(root, 0, -1) if total % part == 0)
        rails = max(map(len, nics)) if self.by_rails else 1
        leaves = -(-total // under) * rails
        if leaves < 2:
            each = f" and {rails} NIC each" if self.by_rails else ""
            raise TopologyError(
                f"{name}: a fat tree must have at least 2 leaves, got {total} hosts with {under} under a leaf"
                f"{each}"
            )
        carried = [Fraction(0)] * leaves
        for host, rates in enumerate(nics):
            for nic, rate in enumerate(rates):
                carried[host // under * rails + nic % rails] += rate
        names = [
            f"pod{leaf // rails}.rail{leaf % rails}" if self.by_rails else f"leaf{leaf}"
            for leaf in range(leaves)
        ]
        cables: list[tuple[int, int, Fraction]] = []
        tiers = [(self.oversubscription, leaves)]
        if self.spines is not None:
            thinner, width = self.spines
            if not 2 <= width < leaves:
                raise TopologyError(
                    f"{name}: a spine must have 2..{leaves - 1} of the {leaves} leaves, got {width}"
                )
            tiers = [(self.oversubscription, width), (thinner, -(-leaves // width))]
        for ratio, width in tiers:
            first, above = len(names) - len(carried), len(names)
            ways = [rate / ratio for rate in carried]
            cables += [(first + at, above + at // width, rate) for at, rate in enumerate(ways) if rate]
            carried = [sum(ways[at : at + width], Fraction(0)) for at in range(0, len(ways), width)]
            names += ["core"] if len(carried) == 1 else [f"spine{at}" for at in range(len(carried))]
        return Wiring(
            tuple(switch_that(own, self.in_network) for own in names),
            lambda host, nic: host // under * rails + nic % rails,
            tuple(cables),
            tuple(dict.fromkeys((under, under * max(1, tiers[0][1] // rails)))),
        )


FORMS = (
    "rail, rail:N, full, fat-tree:RATIO, fat-tree:RATIO:HOSTS, fat-tree:RATIO:HOSTS:RATIO:LEAVES or "
    "rail-tree: with the same numbers, +sharp after any of them"
)


def fabric_named(text: str) -> Fabric:
    """The fabric that a text names.

    `rail` has a switch for every NIC of a host, `rail:N` N of them, `full` one; `fat-tree:RATIO:HOSTS` so
    many hosts under each leaf, `fat-tree:RATIO:HOSTS:RATIO:LEAVES` so many of these under each spine, whose
    way up is RATIO times thinner; `rail-tree` the same with a leaf for every NIC of so many hosts. With
    `+sharp` after it, its switches reduce, multicast and turn, as those of InfiniBand with SHARP do (Graham
    et al., COMHPC 2016).

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
            case "fat-tree" | "rail-tree", [ratio, *rest] if len(rest) in {0, 1, 3}:
                under = _whole(rest[0]) if rest else None
                spines = (_ratio(rest[1]), _whole(rest[2])) if len(rest) > 1 else None
                return FatTree(_ratio(ratio), under, in_network, kind == "rail-tree", spines)
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
