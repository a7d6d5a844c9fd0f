"""From measurements to the simplest topology that explains them, and what it does not explain.

Flows that get less when they run together than alone share something. Which flows do decides among the
shapes of `probe.shape`: every candidate is built, asked for the rate of every flow in every experiment
(`probe.prediction`), and the one that misses least wins, where every shared link must earn its place. Nothing
else is tried: a fabric of another shape gives warnings, each with both numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations, permutations

from arborcast.backends.probe.measurements import Flow, Measurements, Spread
from arborcast.backends.probe.prediction import Predictor, agrees, fair_rates, ratio
from arborcast.backends.probe.shape import Groups, ProbedShape, build, capacity, clustered, rounded
from arborcast.synth.topology import Link, Topology
from arborcast.topologies.builders import joined

ALIKE = 0.06
"""Rates and latencies that differ by less are made equal."""

EXPLAINED = 0.2
"""A prediction may miss the spread of a measurement by this part of it."""

LEAST_US = 0.01
"""Of what a message costs: clocks see no less."""

_WORTH = 0.02
"""A link to or from a switch must lower the error (sum of log ratios beyond EXPLAINED) by this."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A measurement that a topology does not explain.

    Attributes:
        flow: whose rate it is.
        among: all flows that ran; the flow alone where it ran alone.
        measured: GB/s.
        predicted: GB/s by the topology.
    """

    flow: Flow
    among: tuple[Flow, ...]
    measured: Spread
    predicted: float

    def __str__(self) -> str:
        """One line."""
        others = len(self.among) - 1
        beside = f" beside {others} other{'s' if others > 1 else ''}" if others else ""
        return (
            f"{self.flow[0]}->{self.flow[1]}{beside}: measured {self.measured.median:.3g} GB/s "
            f"({self.measured.minimum:.3g} to {self.measured.maximum:.3g}), "
            f"the topology says {self.predicted:.3g}"
        )


@dataclass(frozen=True, slots=True)
class Inference:
    """What `infer` found: the topology, the shape it has, and the worst that it does not explain."""

    topology: Topology
    shape: ProbedShape
    misses: tuple[Miss, ...]


def streams_of(measured: Measurements, *, explained: float = EXPLAINED) -> tuple[int | None, ...]:
    """How many flows of each rank go well at once, out of it and into it; None for any number.

    One more, or fewer than that, clearly got less in sum than one after the other: the most that they got, by
    more than `explained` below the least of what they got alone.
    """
    found: list[int | None] = [None] * measured.ranks
    for load in measured.loads:
        for end in (0, 1):
            ranks = {flow[end] for flow in load.rates}
            alone = [measured.solo[flow].minimum for flow in load.rates]
            in_turn = len(alone) / sum(1 / rate for rate in alone)
            together = sum(rate.maximum for rate in load.rates.values())
            if len(ranks) == 1 < len(alone) and together * (1 + explained) < in_turn:
                rank = ranks.pop()
                found[rank] = min(found[rank] or len(alone), len(alone) - 1)
    return tuple(found)


def keeping(measured: Measurements, streams: Sequence[int | None]) -> Measurements:
    """Without loads in which a rank sends, or gets, more than its streams: no topology explains those."""
    limits = {rank: count for rank, count in enumerate(streams) if count is not None}
    kept = [
        load
        for load in measured.loads
        if all(
            count <= limits.get(rank, count)
            for end in (0, 1)
            for rank, count in Counter(flow[end] for flow in load.rates).items()
        )
    ]
    return replace(measured, loads=tuple(kept))


def infer(
    measured: Measurements,
    *,
    name: str = "measured",
    alike: float = ALIKE,
    explained: float = EXPLAINED,
    streams: bool = False,
) -> Inference:
    """The simplest topology that explains what was measured.

    Args:
        measured: of at least two ranks.
        name: of the topology.
        alike: relative difference below which numbers are made equal.
        explained: how far a prediction may be outside the spread of a measurement.
        streams: whether ranks may have streams (`streams_of`).
    """
    limits = streams_of(measured, explained=explained) if streams else ()
    measured = keeping(measured, limits)
    best: tuple[float, Topology, ProbedShape] | None = None
    for shape in candidates(measured, explained=explained):
        topology = fitted(build(shape, measured, name=name, alike=alike), measured, explained=explained)
        links = sum(_joins_switch(topology, link) for link in topology.links)
        cost = error(topology, measured, explained=explained) + _WORTH * links
        if best is None or cost < best[0] - 1e-9:  # the first, which is the simplest, among equals
            best = cost, topology, shape
    assert best is not None  # there is always the shape of direct links
    topology = replace(best[1], streams=limits)
    if measured.message_us is not None:
        topology = replace(topology, message_us=rounded(max(measured.message_us.median, LEAST_US)))
    return Inference(topology, best[2], misses(topology, measured, explained=explained))


def candidates(measured: Measurements, *, explained: float) -> Iterator[ProbedShape]:
    """The shapes worth a try, simple ones first."""
    everyone = tuple(range(measured.ranks))
    for groups in ((everyone,), *partitions(measured, explained=explained)):
        plain = ProbedShape(groups)
        yield plain
        ported = _with_ports(plain, measured, explained=explained)
        stars = _stars(ported, measured, explained=explained)
        if stars:
            yield replace(ported, stars=stars)
        if ported != plain:
            yield ported
        yield replace(plain, shared=True)


def error(topology: Topology, measured: Measurements, *, explained: float, together: bool = False) -> float:
    """By how much the topology's rates miss what was measured, in sum: logarithms beyond what is allowed.

    Of each flow, or with `together` of all flows of an experiment in sum.
    """
    predictor = Predictor(topology)
    missed = 0.0
    for rates in measured.experiments:
        said = predictor.rates(rates)
        pairs = [(said[flow], rates[flow].minimum, rates[flow].maximum) for flow in said]
        if together:
            pairs = [(sum(p[0] for p in pairs), sum(p[1] for p in pairs), sum(p[2] for p in pairs))]
        for predicted, minimum, maximum in pairs:
            near = min(max(predicted, minimum), maximum)
            missed += max(0.0, math.log(ratio(predicted, near) / (1 + explained)))
    return missed


def fitted(topology: Topology, measured: Measurements, *, explained: float) -> Topology:
    """The topology with the rates around switches moved, in steps, to where they explain most.

    A shared link's capacity is first the most that was ever seen through it, which luck can make too much;
    and where one flow alone cannot fill a port that several fill together, no rate fits both. What all
    flows of an experiment get together counts, however unfairly they share it. Links that are equal stay so.
    """
    best = error(topology, measured, explained=explained, together=True)
    rates = {link.bandwidth for link in topology.links if _joins_switch(topology, link)}
    for rate in sorted(rates):
        for step in (Fraction(9, 10), Fraction(10, 9)):
            now, factor = rate, step
            while best > 0 and Fraction(1, 4) < factor < 4:
                to = rounded(float(rate * factor))
                moved = _with_rate(topology, now, to)
                missed = error(moved, measured, explained=explained, together=True)
                if missed > best - _WORTH or to in rates:
                    break
                topology, best, now, factor = moved, missed, to, factor * step
            if now != rate:
                break
    return topology


def _with_rate(topology: Topology, before: Fraction, after: Fraction) -> Topology:
    links = [
        replace(link, bandwidth=after) if link.bandwidth == before and _joins_switch(topology, link) else link
        for link in topology.links
    ]
    return replace(topology, links=tuple(links))


def _joins_switch(topology: Topology, link: Link) -> bool:
    return topology.is_switch(link.src) or topology.is_switch(link.dst)


def misses(topology: Topology, measured: Measurements, *, explained: float) -> tuple[Miss, ...]:
    """What is not explained, at most one of each flow: its rate alone if that is not, else the worst load."""
    predictor = Predictor(topology)
    worst: dict[Flow, Miss] = {}
    for rates in measured.experiments:
        for flow, predicted in predictor.rates(rates).items():
            spread = rates[flow]
            if agrees(predicted, spread.minimum, spread.maximum, explained):
                continue
            miss = Miss(flow, tuple(sorted(rates)), spread, predicted)
            before = worst.get(flow)
            if before is None or (len(before.among) > 1 and _size(miss) > _size(before)):
                worst[flow] = miss
    return tuple(worst[flow] for flow in sorted(worst))


def _size(miss: Miss) -> float:
    return ratio(miss.measured.median, miss.predicted)


def _with_ports(shape: ProbedShape, measured: Measurements, *, explained: float) -> ProbedShape:
    """A port for each rank whose flows inside its group slow each other down when all run at once."""
    out_ports, in_ports = set(), set()
    for load in measured.loads:
        inside = [flow for flow in load.flows if shape.group_of(flow[0]) == shape.group_of(flow[1])]
        alone = sum(measured.solo[flow].median for flow in inside)
        together = sum(load.rates[flow].median for flow in inside)
        if together * (1 + explained) >= alone:
            continue
        sources, destinations = {flow[0] for flow in load.flows}, {flow[1] for flow in load.flows}
        if len(sources) == 1:
            out_ports |= sources
        if len(destinations) == 1:
            in_ports |= destinations
    return replace(shape, out_ports=frozenset(out_ports), in_ports=frozenset(in_ports))


def _stars(shape: ProbedShape, measured: Measurements, *, explained: float) -> frozenset[int]:
    """The groups of which all ranks have both ports, and no pair another limit."""
    found = set()
    for number, group in enumerate(shape.groups):
        if len(group) < 2 or not set(group) <= shape.out_ports & shape.in_ports:
            continue
        limits = [
            (frozenset(flows), capacity(measured, flows.__contains__, near=explained).median)
            for rank in group
            for flows in (
                {(rank, other) for other in range(measured.ranks)},
                {(other, rank) for other in range(measured.ranks)},
            )
        ]
        if all(
            agrees(fair_rates([flow], limits)[flow], spread.minimum, spread.maximum, explained)
            for flow in permutations(group, 2)
            for spread in [measured.solo[flow]]
        ):
            found.add(number)
    return frozenset(found)


def partitions(measured: Measurements, *, explained: float) -> list[Groups]:
    """Ways to group the ranks that something speaks for: hosts, rates, latencies, flows that share.

    Each has at least two groups, one of them of several ranks.
    """
    ranks = measured.ranks
    pairs = list(combinations(range(ranks), 2))
    found: list[Groups] = [
        _groups(ranks, [pair for pair in pairs if measured.hosts[pair[0]] == measured.hosts[pair[1]]])
    ]
    slower = [
        min(measured.solo[a, b], measured.solo[b, a], key=lambda spread: spread.median) for a, b in pairs
    ]
    levels = dict(zip(pairs, clustered(slower, alike=explained), strict=True))
    for level in sorted(set(levels.values())):
        found.append(_groups(ranks, [pair for pair in pairs if levels[pair] >= level]))
    times = dict(
        zip(pairs, clustered([measured.latency_us[pair] for pair in pairs], alike=explained), strict=True)
    )
    for time in sorted(set(times.values())):
        found.append(_groups(ranks, [pair for pair in pairs if times[pair] <= time]))
    found.append(_groups(ranks, _same_side(measured, explained=explained)))
    return [groups for groups in dict.fromkeys(found) if 1 < len(groups) < ranks]


def _same_side(measured: Measurements, *, explained: float) -> Iterator[Flow]:
    """Pairs of ranks on one side of an uplink: sources, and destinations, of disjoint flows that share."""
    for load in measured.loads:
        if len(load.rates) != 2:
            continue
        (a, b), (c, d) = load.flows
        alone = measured.solo[a, b].median + measured.solo[c, d].median
        together = sum(rate.median for rate in load.rates.values())
        if len({a, b, c, d}) == 4 and together * (1 + explained) < alone:
            yield a, c
            yield b, d


def _groups(ranks: int, pairs: Iterable[Flow]) -> Groups:
    return tuple(joined(ranks, pairs))
