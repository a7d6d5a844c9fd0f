"""Measurements beside a topology that somebody gave: where it says something else.

Processes on CPUs never reach the rates of NVLinks, so that the pattern is compared: one factor is taken out
of all rates first, the one that fits most pairs, and it is told.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from fractions import Fraction

from arborcast.backends.probe.inference import Miss, keeping, misses
from arborcast.backends.probe.measurements import Flow, Measurements
from arborcast.backends.probe.prediction import Predictor, ratio
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Topology


@dataclass(frozen=True, slots=True)
class Discrepancies:
    """What `compare` found.

    Attributes:
        scale: measured rates over the topology's; what was measured is compared with its rates times this.
        contradictions: one line each.
        unlinked: pairs that the topology does not join without other ranks, and that are slow indeed.
    """

    scale: float
    contradictions: tuple[str, ...]
    unlinked: tuple[Flow, ...]


def compare(
    measured: Measurements,
    topology: Topology,
    *,
    tolerance: float,
    absolute: bool = False,
    name: str | None = None,
) -> Discrepancies:
    """Compare rates, alone and under load; latencies are those of this transport and are not compared.

    A pair without a link must be slower than each pair with one, else that is a contradiction too.

    Args:
        measured: between the ranks of the topology, in its order.
        topology: what was said.
        tolerance: how far a rate may lie outside what was measured, relatively.
        absolute: compare without taking out a factor.
        name: what contradictions call the topology; its own name where None.

    Raises:
        InputError: another number of ranks.
    """
    if topology.ranks != measured.ranks:
        raise InputError(
            f"topology {topology.name}: has {topology.ranks} ranks, and {measured.ranks} processes measured; "
            "choose as many with --ranks"
        )
    measured = keeping(measured, topology.streams)
    name = name or topology.name
    predictor = Predictor(topology)
    said = {flow: predictor.rates([flow]).get(flow) for flow in sorted(measured.solo)}
    scale = 1.0
    linked = {flow: rate for flow, rate in said.items() if rate is not None}
    if linked and not absolute:
        scale = statistics.median(measured.solo[flow].median / rate for flow, rate in linked.items())
    found = [
        _line(miss, name, scale) for miss in misses(_scaled(topology, scale), measured, explained=tolerance)
    ]
    slowest = min((rate * scale for rate in linked.values()), default=0.0)
    unlinked = []
    for flow in sorted(set(said) - set(linked)):
        spread = measured.solo[flow]
        if linked and spread.minimum >= slowest:
            found.append(
                f"{flow[0]}->{flow[1]}: {name} has no link, measured {spread.median:.3g} GB/s, as "
                f"fast as its linked pairs"
            )
        else:
            unlinked.append(flow)
    return Discrepancies(scale, tuple(found), tuple(unlinked))


def _line(miss: Miss, name: str, scale: float) -> str:
    source, destination = miss.flow
    others = len(miss.among) - 1
    beside = f" beside {others} other flow{'s' if others > 1 else ''}" if others else ""
    said = miss.predicted / scale
    scaled = "" if scale == 1 else f" (times {scale:.3g}: {miss.predicted:.3g})"
    direction = "slower" if miss.measured.median < miss.predicted else "faster"
    return (
        f"{source}->{destination}{beside}: {name} says {said:.3g} GB/s{scaled}, measured "
        f"{miss.measured.median:.3g} ({miss.measured.minimum:.3g} to {miss.measured.maximum:.3g}), "
        f"{ratio(miss.measured.median, miss.predicted):.3g} times {direction}"
    )


def _scaled(topology: Topology, scale: float) -> Topology:
    links = (replace(link, bandwidth=link.bandwidth * Fraction(scale)) for link in topology.links)
    return replace(topology, links=tuple(links))
