"""Rates, bounds and sets of vertices in words, for the commands, notebooks and the viewer alike."""

from __future__ import annotations

from fractions import Fraction

from arborcast.synth.certificate import Bound, Cut, Partition, Scope
from arborcast.synth.ports import ported
from arborcast.synth.topology import PLANNED, Topology, Vertex

MOST_NAMED = 24
"""Vertices of a set, and sets of a partition, that are named one by one."""


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun: 1 rank, 2 switches."""
    return f"{number} {one if number == 1 else many or one + ('es' if one.endswith('ch') else 's')}"


def gigabytes(rate: Fraction) -> str:
    """A rate for people: the exact fraction, with a decimal where it is not whole."""
    exact = f"{rate} GB/s"
    return exact if rate.denominator == 1 else f"{exact} ({float(rate):.4g})"


def share(part: Fraction, whole: Fraction) -> str:
    """A rate as a percentage of another, rounded down so that 100 % means equal."""
    if whole == 0:
        return "0 %"
    return f"{int(part / whole * 100_000) / 1000:g} %"


def of_bound(part: Fraction, whole: Fraction, topology: Topology) -> str:
    """A rate as a percentage of what is proved, or of what NCCL's planning rates give: they prove nothing."""
    limit = f"limit by {PLANNED}" if topology.is_planned else "proven bound"
    return f"{share(part, whole)} of the {limit}"


def at_most(rate: Fraction, topology: Topology) -> str:
    """A limit of a rate for people: what is proved, or what NCCL's planning rates give."""
    return f"by {PLANNED} {gigabytes(rate)}" if topology.is_planned else f"at most {gigabytes(rate)}"


def proof(bound: Bound, topology: Topology | None = None) -> str:
    """The certificate of a bound.

    Args:
        bound: to tell about.
        topology: that names its switches; without, vertices are numbers.
    """
    topology = None if topology is None else ported(topology)
    match bound.certificate:
        case Cut(side, capacity):
            return f"cut: {gigabytes(capacity)} leave {vertices(side, topology)}"
        case Partition(blocks, capacity):
            sets = [vertices(block, topology) for block in blocks[:MOST_NAMED]]
            sets += ["..."] if len(blocks) > MOST_NAMED else []
            return f"partition: {gigabytes(capacity)} between the {len(blocks)} sets {' '.join(sets)}"
        case dual:
            return (
                f"link lengths: {dual.capacity} offered, {dual.distance} needed for each unit of the buffer"
            )


def every_schedule(bound: Bound) -> str:
    """Over which schedules a time is the least that rests on a bound of the rate, in its scope."""
    return "every schedule" + (" along trees" if bound.scope is Scope.TREES else "")


def assumed(what: str, topology: Topology) -> str:
    """How many links have an assumed "rate" or "latency", and why; empty where none has.

    Planning constants, which are no capacities, are said to be some.
    """
    whys = {why: count for (of, why), count in topology.assumptions.items() if of == what}
    if not whys:
        return ""
    if what == "rate" and topology.is_planned:
        return f"{PLANNED}: what it counts on, no capacities"
    count, links = sum(whys.values()), len(topology.cables)
    how_many = f"all {links}" if count == links else f"{count} of {links}"
    return f"{how_many} {'latencies are' if what == 'latency' else 'are'} assumed: {'; '.join(whys)}"


def vertices(some: frozenset[Vertex], topology: Topology | None = None) -> str:
    """Vertices in braces: all of them where they are few, else those that are missing, else some of them."""
    if topology is not None:
        some -= topology.parallels.keys()
        missing = frozenset(range(topology.size)) - some - topology.parallels.keys()
        if len(some) > MOST_NAMED >= len(missing):
            return f"all but {vertices(missing, topology)}"
    shown = sorted(some)[:MOST_NAMED]
    named = [str(vertex if topology is None else topology.label(vertex)) for vertex in shown]
    more = f", ... of {len(some)}" if len(some) > MOST_NAMED else ""
    return "{" + ", ".join(named) + more + "}"
