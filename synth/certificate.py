"""What proves a bound: a cut, a partition of the ranks, or link lengths (an LP dual); of a time, tolls.

These are the values; `synth.bounds` finds them and `synth.certification` recomputes, in exact
arithmetic and from the certificate alone, the rate that each one proves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from typing import TypeAlias

from arborcast.synth.ports import ported_alike
from arborcast.synth.topology import Permutation, Topology, Vertex


class Scope(StrEnum):
    """Over which schedules a bound holds: of those that ask of switches what they can do, and no more."""

    EVERY_SCHEDULE = "every schedule"
    TREES = "schedules that reduce and broadcast along trees"


@dataclass(frozen=True, slots=True)
class Cut:
    """A set of vertices that data must leave: `capacity` is the GB/s of the links that go out of `side`.

    The rate it proves is the capacity over the share of the buffer that must leave: the whole of it where
    the root broadcasts from inside, the inside ranks' blocks for an allgather, and so on.
    """

    side: frozenset[Vertex]
    capacity: Fraction


@dataclass(frozen=True, slots=True)
class Partition:
    """Disjoint sets that cover all vertices, each with a rank that takes part (Nash-Williams).

    It limits an allreduce, and on symmetric links without switches some partition does so exactly.
    `capacity` is half the GB/s of the links between different sets (each pair of opposite links counted
    once); the rate it proves is capacity / (number of sets - 1).
    """

    blocks: tuple[frozenset[Vertex], ...]
    capacity: Fraction


@dataclass(frozen=True, slots=True)
class Dual:
    """Link lengths, and prices of adders: what every unit of the buffer must travel, against what all offer.

    Moving a unit of the buffer costs at least `distance` under `lengths` (one per link of the topology, in
    its order): the cheapest arborescence for a broadcast, the cheapest pair of in- and out-arborescence
    for an allreduce, the mean shortest distance for an alltoall, the mean over its blocks of the shortest way
    to the farthest target for a custom collective. Trees also join and fork at relays and at switches that
    reduce or multicast, and a sum that a switch makes costs the price of its adder: `adders` has one for each
    of `Topology.limited_adders`, in that order, or is empty where all are zero. `capacity` is the sum of
    bandwidth times length, and of what adders make times their price. The rate it proves is capacity /
    distance (weak LP duality).
    """

    lengths: tuple[Fraction, ...]
    capacity: Fraction
    distance: Fraction
    adders: tuple[Fraction, ...] = ()


Certificate: TypeAlias = Cut | Partition | Dual


@dataclass(frozen=True, slots=True)
class TollFlow:
    """What all that depends on one rank, or that one rank depends on, must pay on its way.

    Attributes:
        terminal: where it begins (`outward`) or ends.
        outward: whether it goes from the terminal to others, or from others to the terminal.
        others: the ranks at the other end.
        tolls: link (its index in the topology), interval in which it is entered, and toll, whole and
            positive; all other passages are free.
    """

    terminal: Vertex
    outward: bool
    others: tuple[Vertex, ...]
    tolls: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Tolls:
    """What every schedule can deliver within a time at most: tolls on links in intervals of the time.

    Time is cut into intervals and latencies are rounded down to whole ones. What passes pays the tolls of the
    flows and what the lengths of the rate's certificate say; all that a buffer must pay is set against what
    all links could carry (`synth.certification.tolls`). Only ratios of tolls and weight matter.

    Attributes:
        step_us: of an interval.
        intervals: into which the time is cut.
        flows: whose tolls are added up.
        weight: of the rate's certificate beside them.
        symmetries: automorphisms that take the flows of one rank to those of others; none where a flow
            speaks for no other.
        bytes: of the largest buffer that any schedule could finish in that time.
    """

    step_us: Fraction
    intervals: int
    flows: tuple[TollFlow, ...]
    weight: Fraction
    symmetries: tuple[Permutation, ...]
    bytes: Fraction

    @property
    def time_us(self) -> Fraction:
        """Of all intervals: larger buffers take longer."""
        return self.step_us * self.intervals

    def at(self, size_bytes: int) -> Fraction:
        """The least time of a buffer: smaller ones in proportion, as intervals may be shorter."""
        return self.time_us * min(Fraction(1), size_bytes / self.bytes)

    def relabelled(self, before: Topology, after: Topology, images: Sequence[Vertex]) -> Tolls:
        """The tolls of a topology that is the same by renumbering (`Bound.relabelled`)."""
        place = {(link.src, link.dst): index for index, link in enumerate(after.links)}
        link_images = [place[images[link.src], images[link.dst]] for link in before.links]
        flows = (
            replace(
                flow,
                terminal=images[flow.terminal],
                others=tuple(images[rank] for rank in flow.others),
                tolls=tuple((link_images[link], interval, toll) for link, interval, toll in flow.tolls),
            )
            for flow in self.flows
        )
        back = {image: vertex for vertex, image in enumerate(images)}
        moved = (
            tuple(images[symmetry[back[vertex]]] for vertex in range(after.size))
            for symmetry in self.symmetries
        )
        return replace(self, flows=tuple(flows), symmetries=tuple(moved))


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven limit.

    Attributes:
        rate: algbw in GB/s of the whole buffer that no schedule in `scope` exceeds.
        certificate: what proves it.
        scope: over which schedules it holds.
        times: that were asked for, and proved beside the rate: no schedule in `scope` takes less.
    """

    rate: Fraction
    certificate: Certificate
    scope: Scope = Scope.EVERY_SCHEDULE
    times: tuple[Tolls, ...] = ()

    def relabelled(self, before: Topology, after: Topology, images: Sequence[Vertex]) -> Bound:
        """The bound of a topology that is the same by renumbering.

        Args:
            before: whose bound this is.
            after: the other one.
            images: the vertex of `after` that each vertex of `before` becomes.
        """
        before, after, images = ported_alike(before, after, images)

        def moved(side: frozenset[Vertex]) -> frozenset[Vertex]:
            return frozenset(images[vertex] for vertex in side)

        certificate: Certificate
        match self.certificate:
            case Cut(side, capacity):
                certificate = Cut(moved(side), capacity)
            case Partition(blocks, capacity):
                certificate = Partition(tuple(map(moved, blocks)), capacity)
            case Dual(lengths, capacity, distance, adders):
                of_link = {
                    (images[link.src], images[link.dst]): length
                    for link, length in zip(before.links, lengths, strict=True)
                }
                there = tuple(of_link[link.src, link.dst] for link in after.links)
                of_switch = {
                    images[vertex]: price
                    for vertex, price in zip(before.limited_adders, adders, strict=False)
                }
                priced = tuple(of_switch[vertex] for vertex in after.limited_adders) if adders else ()
                certificate = Dual(there, capacity, distance, priced)
        times = tuple(tolls.relabelled(before, after, images) for tolls in self.times)
        return replace(self, certificate=certificate, times=times)
