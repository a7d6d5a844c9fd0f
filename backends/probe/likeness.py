"""Which known machine a measured fabric resembles: the pattern of its rates, whoever numbered the ranks.

Switches are no part of the comparison: of both fabrics the rates of pairs alone are taken, by the widest way
past no other rank, and sorted into as many classes as the known one has. Where renumbering maps the classes
of one to those of the other, rates and totals under load are compared, one factor between all of them taken
out first (see `probe.comparison`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

from arborcast.backends.probe.measurements import Flow, Measurements
from arborcast.backends.probe.prediction import Predictor, ratio
from arborcast.synth.errors import TopologyError
from arborcast.synth.symmetry.isomorphism import ComparableTopology
from arborcast.synth.topology import Link, Topology
from arborcast.topologies.catalog import catalog
from arborcast.topologies.entries import Entry

MOST_RANKS = 32
"""Ranks up to which the catalog is looked through: seconds."""

MOST_EXCHANGED = 8
"""Ranks up to which numberings with the same rates alone are told apart by loads."""

_APART = 1.06
"""Pairs of one class must be faster than those of the next by this factor, or nothing tells them apart."""


@dataclass(frozen=True, slots=True)
class LinkClass:
    """Pairs to which a known machine gives about the same rate.

    Attributes:
        bandwidth: GB/s that it gives them; None where it has no way between them past no other rank.
        pairs: how many, each direction counted.
        measured: the median of their rates, GB/s.
        deviation: of the pair furthest off, as a part of its rate after the factor; None without one.
    """

    bandwidth: float | None
    pairs: int
    measured: float
    deviation: float | None


@dataclass(frozen=True, slots=True)
class Likeness:
    """How near a known machine comes.

    Attributes:
        name: its spec.
        ranks: which of its ranks each measured rank is.
        scale: measured rates over its rates.
        classes: from the fastest pairs to the slowest.
        loaded: by which part the total of some flows that ran at once is off, at most.
    """

    name: str
    ranks: tuple[int, ...]
    scale: float
    classes: tuple[LinkClass, ...]
    loaded: float

    @property
    def unlinked(self) -> int:
        """Pairs whose rate it does not explain, each direction counted: it gives them no link."""
        return sum(each.pairs for each in self.classes if each.bandwidth is None)

    @property
    def deviation(self) -> float:
        """The largest of all."""
        return max([self.loaded, *(each.deviation for each in self.classes if each.deviation is not None)])


@dataclass(frozen=True, slots=True)
class Resemblance:
    """What `resembling` found.

    Attributes:
        best: the nearest machine of those with the same pattern; None where there is none.
        alike: names of others that are as near.
        tolerance: how far off a machine may be.
    """

    best: Likeness | None
    alike: tuple[str, ...]
    tolerance: float

    @property
    def found(self) -> bool:
        """Whether the best is near enough."""
        return self.best is not None and self.best.deviation <= self.tolerance


def resembling(
    measured: Measurements, given: Mapping[str, Topology] | None = None, *, tolerance: float
) -> Resemblance:
    """The known machine that a fabric resembles most: of the catalog, or one of those given.

    Of those within the tolerance, the one that explains the rates of most pairs; then the nearest.

    Args:
        measured: the fabric.
        given: more machines by name, of as many ranks, which go before the catalog's where both are as near.
        tolerance: how far off rates may be, as a part of the machine's.
    """
    known = [*(given or {}).items(), *of_catalog(measured.ranks)]
    found = [each for name, topology in known if (each := likeness(measured, topology, name, tolerance))]

    def nearness(each: Likeness) -> tuple[bool, int, float]:
        is_far = each.deviation > tolerance
        return is_far, 0 if is_far else each.unlinked, round(each.deviation, 2)

    found.sort(key=nearness)
    best = found[0] if found else None
    alike = (each.name for each in found[1:] if best and nearness(each) == nearness(best))
    return Resemblance(best, tuple(alike), tolerance)


def of_catalog(ranks: int) -> Iterator[tuple[str, Topology]]:
    """The machines and shapes of the catalog with so many ranks, by their specs."""
    for entry in catalog() if ranks <= MOST_RANKS else ():
        for arguments in _arguments(entry, ranks):
            try:
                topology = entry.build(arguments)
            except TopologyError:  # no such machine
                continue
            if topology.ranks == ranks:
                yield topology.name, topology


def _arguments(entry: Entry, ranks: int) -> Iterator[str]:
    """What may follow the name of an entry to get so many ranks."""
    required = [parameter.key for parameter in entry.parameters if parameter.required]
    match required:
        case []:
            yield ""
            if any(parameter.key == "boxes" for parameter in entry.parameters):
                yield from (f"boxes={boxes}" for boxes in range(2, ranks // 2 + 1) if ranks % boxes == 0)
        case ["ranks"]:
            yield str(ranks)
        case ["dimension"]:
            yield str(ranks.bit_length() - 1)
        case ["extents"]:
            yield from ("x".join(map(str, sides)) for sides in _sides(ranks, 3) if len(sides) > 1)
        case _:
            return


def _sides(product: int, most: int, least: int = 2) -> Iterator[tuple[int, ...]]:
    """Up to so many numbers in ascending order with a product."""
    if product >= least:
        yield (product,)
    if most > 1:
        for side in range(least, math.isqrt(product) + 1):
            if product % side == 0:
                yield from ((side, *rest) for rest in _sides(product // side, most - 1, side))


def likeness(measured: Measurements, topology: Topology, name: str, tolerance: float) -> Likeness | None:
    """How near a topology of as many ranks comes to what was measured; None where the pattern is another.

    Rates of the topology that differ by less than the tolerance are one class. Where several numberings have
    the same rates alone, ranks are exchanged as long as that brings totals under load nearer.
    """
    predictor = Predictor(topology)
    rates = {flow: predictor.rates([flow]).get(flow) for flow in sorted(measured.solo)}
    said = _classes(rates, tolerance)
    seen = _sorted_alike(measured, said)
    if seen is None:
        return None
    try:
        image = ComparableTopology(_pattern(measured.ranks, seen)).isomorphism(
            ComparableTopology(_pattern(measured.ranks, said))
        )
    except TopologyError:  # too large to be compared
        return None
    if image is None:
        return None
    linked = {flow: rate for flow, rate in rates.items() if rate is not None}
    if not linked:
        return None
    ranks = _best_numbering(measured, predictor, said, seen, image, tolerance)
    scale = statistics.median(
        measured.solo[flow].median / rate
        for flow in measured.solo
        if (rate := rates[_mapped(flow, ranks)]) is not None
    )
    classes = []
    for number in sorted(set(seen.values())):
        flows = [flow for flow in sorted(seen) if seen[flow] == number]
        pairs = [(measured.solo[flow].median, rates[_mapped(flow, ranks)]) for flow in flows]
        off = [ratio(median, rate * scale) - 1 for median, rate in pairs if rate is not None]
        middle = statistics.median(median for median, _ in pairs)
        of_class = [rate for _, rate in pairs if rate is not None]
        rate = statistics.median(of_class) if of_class else None
        classes.append(LinkClass(rate, len(flows), middle, max(off) if off else None))
    loaded = max((math.exp(off) - 1 for off in _off_under_load(measured, predictor, ranks, scale)), default=0)
    return Likeness(name, ranks, scale, tuple(classes), loaded)


def _classes(rates: Mapping[Flow, float | None], tolerance: float) -> dict[Flow, int]:
    """The class of each pair, 1 for the fastest; pairs without a way are the last."""
    number: dict[float | None, int] = {}
    first = math.inf
    for rate in sorted({rate for rate in rates.values() if rate is not None}, reverse=True):
        is_new = not number or first > rate * (1 + tolerance)
        number[rate] = max(number.values(), default=0) + is_new
        first = rate if is_new else first
    number[None] = max(number.values(), default=0) + 1
    return {flow: number[rate] for flow, rate in rates.items()}


def _sorted_alike(measured: Measurements, said: Mapping[Flow, int]) -> dict[Flow, int] | None:
    """The measured pairs in classes of the same sizes; None where nothing separates two of them."""
    medians = {flow: spread.median for flow, spread in measured.solo.items()}
    order = sorted(medians, key=lambda flow: -medians[flow])
    seen = dict(zip(order, sorted(said.values()), strict=True))
    for slower, faster in zip(order[1:], order, strict=False):
        if seen[faster] != seen[slower] and medians[faster] < _APART * medians[slower]:
            return None
    return seen


def _pattern(ranks: int, classes: Mapping[Flow, int]) -> Topology:
    links = (Link(*flow, Fraction(number)) for flow, number in classes.items())
    return Topology.build("pattern", ranks, links)


def _mapped(flow: Flow, ranks: Sequence[int]) -> Flow:
    return ranks[flow[0]], ranks[flow[1]]


def _best_numbering(
    measured: Measurements,
    predictor: Predictor,
    said: Mapping[Flow, int],
    seen: Mapping[Flow, int],
    image: Sequence[int],
    tolerance: float,
) -> tuple[int, ...]:
    """A numbering that keeps the classes, with which no exchange of two ranks fits the loads better.

    The first one stays where it is near enough, and for more than `MOST_EXCHANGED` ranks.
    """
    best, off = tuple(image), list(_off_under_load(measured, predictor, image, None))
    least = sum(off)
    improves = measured.ranks <= MOST_EXCHANGED and max(off, default=0) > math.log1p(tolerance / 2)
    around = _links_around(predictor.topology)
    while improves:
        improves = False
        for one, other in combinations(range(measured.ranks), 2):
            tried = list(best)
            tried[one], tried[other] = tried[other], tried[one]
            if around(tried[one], tried[other]) == around(tried[other], tried[one]):
                continue  # they are alike in all, so that nothing changes
            touched = (flow for flow in seen if {one, other} & set(flow))
            if all(said[_mapped(flow, tried)] == seen[flow] for flow in touched):
                now = sum(_off_under_load(measured, predictor, tried, None))
                if now < least * 0.999:
                    best, least, improves = tuple(tried), now, True
    return best


def _links_around(topology: Topology) -> Callable[[int, int], object]:
    """Of a rank what joins it to all vertices but another one: equal for two that may be exchanged."""
    into: dict[int, dict[int, Fraction]] = {rank: {} for rank in range(topology.ranks)}
    out: dict[int, dict[int, Fraction]] = {rank: {} for rank in range(topology.ranks)}
    for link in topology.links:
        if link.src in out:
            out[link.src][link.dst] = link.bandwidth
        if link.dst in into:
            into[link.dst][link.src] = link.bandwidth

    def around(rank: int, other: int) -> object:
        return [{end: rate for end, rate in ends[rank].items() if end != other} for ends in (into, out)]

    return around


def _off_under_load(
    measured: Measurements, predictor: Predictor, ranks: Sequence[int], scale: float | None
) -> Iterable[float]:
    """The logarithm of how far the total of each load is off, without a factor given after the best one."""
    logs = []
    for load in measured.loads:
        said = predictor.rates(_mapped(flow, ranks) for flow in load.flows)
        flows = [flow for flow in load.flows if _mapped(flow, ranks) in said]
        if flows and len(flows) == len(load.flows):
            total = sum(load.rates[flow].median for flow in flows)
            logs.append(math.log(total / sum(said.values())))
    middle = statistics.median(logs) if scale is None and logs else math.log(scale or 1)
    return [abs(each - middle) for each in logs]
