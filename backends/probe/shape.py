"""What a fabric may look like, and the topology that each look gives with the rates that were measured.

    direct      0 -> 1                                 every pair has a link of its own
    port        0 -> rank0.out -> 1, 2, ...            flows out of (into) a rank share
    star        0 -> fabric -> 1                       the same, and pairs are limited by nothing else
    shared      0 -> shared.in -> shared.out -> 1      all flows share, as processes on few cores do
    boxes       0 -> box0.up -> box1.down -> 2         flows between groups of ranks share an uplink

Switches with a direction in their name keep flows to one way each, so that nothing is promised over ways that
were not measured.

Numbers are rounded to few digits, and made equal where the measurement cannot tell them apart: exact solvers
like small numbers and symmetric fabrics, and both get lost in noise otherwise (`clustered`).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, permutations
from typing import TypeAlias

from arborcast.backends.probe.measurements import Flow, Measurements, Spread
from arborcast.synth.topology import Link, Topology

_MULTIPLES = 8
"""Rates are made whole multiples of the lowest one up to here; above, anything would be near to one."""


def clustered(values: Sequence[Spread], *, alike: float) -> list[Fraction]:
    """A round number for each value, the same for values that cannot be told apart.

    In ascending order a value joins those before it where it is within `alike` of the last of them and
    within twice that of the first, or where the medians of the first and of it lie in the spread of each
    other. A cluster's number is the median of its medians: as a multiple of the lowest cluster's number where
    it is within `alike` of one, else with two significant digits.

    Args:
        values: all positive.
        alike: relative difference that says nothing.
    """
    order = sorted(range(len(values)), key=lambda index: values[index].median)
    clusters: list[list[int]] = []
    for index in order:
        if clusters and _joins(values[index], [values[member] for member in clusters[-1]], alike):
            clusters[-1].append(index)
        else:
            clusters.append([index])
    numbers = [Fraction(0)] * len(values)
    unit: Fraction | None = None
    for cluster in clusters:
        middle = statistics.median(values[index].median for index in cluster)
        number = rounded(middle) if unit is None else _near_multiple(middle, unit, alike)
        unit = unit or number
        for index in cluster:
            numbers[index] = number
    return numbers


def rounded(value: float) -> Fraction:
    """Two significant digits, in halves of the last one up to 25: at most 2.5 % off.

    3.14 -> 3.1, 12.4 -> 12.5, 0.0208 -> 0.021
    """
    exponent = math.floor(math.log10(value)) - 1
    digits = value / 10.0**exponent
    steps = Fraction(round(2 * digits), 2) if digits < 25 else Fraction(round(digits))
    return steps * Fraction(10) ** exponent


def _joins(value: Spread, cluster: Sequence[Spread], alike: float) -> bool:
    first, last = cluster[0], cluster[-1]
    if value.median <= min(last.median * (1 + alike), first.median * (1 + alike) ** 2):
        return True
    return value.minimum <= first.median and value.median <= first.maximum


def _near_multiple(value: float, unit: Fraction, alike: float) -> Fraction:
    times = round(value / float(unit))
    if 1 <= times <= _MULTIPLES and abs(value / float(times * unit) - 1) <= alike:
        return times * unit
    return rounded(value)


Groups: TypeAlias = tuple[tuple[int, ...], ...]
Label: TypeAlias = int | str  # a rank, or the name of a switch
Way: TypeAlias = tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class ProbedShape:
    """One look of a fabric.

    Attributes:
        groups: the ranks by box; one group where there are no boxes.
        out_ports: ranks whose flows out share a port.
        in_ports: ranks whose flows in share a port.
        stars: groups (by number) inside which ports are the only limits.
        shared: whether all flows inside a group share one resource.
    """

    groups: Groups
    out_ports: frozenset[int] = frozenset()
    in_ports: frozenset[int] = frozenset()
    stars: frozenset[int] = frozenset()
    shared: bool = False

    def group_of(self, rank: int) -> int:
        """The number of the rank's group."""
        return next(number for number, group in enumerate(self.groups) if rank in group)

    def way(self, flow: Flow) -> Way:
        """What a flow passes, from its source to its destination."""
        source, destination = flow
        first, last = self.group_of(source), self.group_of(destination)
        leaves = f"rank{source}.out" if source in self.out_ports else None
        enters = f"rank{destination}.in" if destination in self.in_ports else None
        if first in self.stars:
            leaves = self._name(first, "fabric", "box")
        if last in self.stars:
            enters = self._name(last, "fabric", "box")
        middle: list[str] = []
        if first != last:
            up, down = f"box{first}.up", f"box{last}.down"
            # Of more than two boxes each has one uplink for all the others.
            core = [f"box{first}.away", f"box{last}.back"] if len(self.groups) > 2 else []
            middle = [*([] if first in self.stars else [up]), *core, *([] if last in self.stars else [down])]
        elif self.shared:
            middle = [
                self._name(first, "shared.in", "box", ".in"),
                self._name(first, "shared.out", "box", ".out"),
            ]
        way: list[Label] = [
            source,
            *([leaves] if leaves else []),
            *middle,
            *([enters] if enters else []),
            destination,
        ]
        # A star's switch is the way out of the one and into the other: it stands once.
        return tuple(label for place, label in enumerate(way) if not place or label != way[place - 1])

    def _name(self, group: int, alone: str, prefix: str, suffix: str = "") -> str:
        return alone if len(self.groups) == 1 else f"{prefix}{group}{suffix}"


def capacity(measured: Measurements, among: Callable[[Flow], bool], *, near: float) -> Spread:
    """How much all flows of a kind got at once, at most: what the link that they share can carry.

    The median of the sums that come near the largest one, so that one lucky measurement does not decide; its
    spread is that of all their repeats.

    Args:
        measured: all of it.
        among: whether a flow counts.
        near: how far below the largest sum another still counts, relatively.
    """
    chosen = [[rate for flow, rate in rates.items() if among(flow)] for rates in measured.experiments]
    largest = max(sum(rate.median for rate in rates) for rates in chosen)
    high = [rates for rates in chosen if sum(rate.median for rate in rates) * (1 + near) >= largest]
    return Spread(
        min(sum(rate.minimum for rate in rates) for rates in high),
        statistics.median(sum(rate.median for rate in rates) for rates in high),
        max(sum(rate.maximum for rate in rates) for rates in high),
        len(high),
    )


def build(shape: ProbedShape, measured: Measurements, *, name: str, alike: float) -> Topology:
    """The topology of a shape with the measured rates and latencies, in round numbers.

    Args:
        shape: what it looks like.
        measured: where the numbers come from.
        name: of the topology.
        alike: numbers whose relative difference is below are made equal (see `rounding.clustered`).
    """
    flows = list(permutations(range(measured.ranks), 2))
    ways = {flow: shape.way(flow) for flow in flows}
    users: dict[tuple[Label, Label], set[Flow]] = defaultdict(set)
    for flow, way in ways.items():
        for hop in pairwise(way):
            users[hop].add(flow)
    hops = list(users)
    rates = [
        measured.solo[next(iter(users[hop]))]
        if len(users[hop]) == 1
        else capacity(measured, users[hop].__contains__, near=alike)
        for hop in hops
    ]
    bandwidths = dict(zip(hops, clustered(rates, alike=alike), strict=True))
    times = clustered([measured.latency_us[flow] for flow in flows], alike=alike)
    latencies = _latencies(ways, users, dict(zip(flows, times, strict=True)))
    names = list(dict.fromkeys(label for hop in hops for label in hop if isinstance(label, str)))
    number = {label: measured.ranks + place for place, label in enumerate(names)}
    links = [
        Link(
            number[first] if isinstance(first, str) else first,
            number[second] if isinstance(second, str) else second,
            bandwidths[first, second],
            latencies[first, second],
        )
        for first, second in hops
    ]
    return Topology.build(name, measured.ranks, links, names)


def _latencies(
    ways: dict[Flow, Way],
    users: dict[tuple[Label, Label], set[Flow]],
    measured: dict[Flow, Fraction],
) -> dict[tuple[Label, Label], Fraction]:
    """The time of a flow on its links: halves of it at both ends, what boxes add to it between them."""
    found: dict[tuple[Label, Label], Fraction] = {}
    rest: dict[tuple[Label, Label], list[Fraction]] = defaultdict(list)
    for hop, flows in users.items():
        shortest = min(measured[flow] for flow in flows)
        is_end = [isinstance(label, int) for label in hop]
        found[hop] = shortest if all(is_end) else shortest / 2 if any(is_end) else Fraction(0)
    for flow, way in ways.items():
        if len(way) > 3:
            ends = found[way[0], way[1]] + found[way[-2], way[-1]]
            rest[way[1], way[2]].append(max(Fraction(0), measured[flow] - ends))
    return found | {hop: _middle(times) for hop, times in rest.items()}


def _middle(values: Iterable[Fraction]) -> Fraction:
    return statistics.median_low(list(values))
