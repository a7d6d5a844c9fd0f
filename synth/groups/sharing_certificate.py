"""The proof that no sharing is fairer: link lengths for each level of rates, recomputed in exact arithmetic.

Whatever the groups do, the bandwidth that their data takes, weighed by lengths, is at most what all links
offer: the sum of rate(g) * distance(g) <= the sum of bandwidth * length (weak duality). With the groups of
earlier levels at the rates proved there, that limits the least rate / weight of those that travel at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from arborcast.synth.certification.metric import Metric, Others
from arborcast.synth.collective import Collective
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Topology


@dataclass(frozen=True, slots=True)
class Level:
    """The groups that cannot be faster without making one slower that is no faster than they.

    Attributes:
        rate: GB/s of each of them per unit of its weight.
        bound: what the lengths prove of it: `rate`, unless lengths had to be rounded.
        groups: their numbers, ascending.
        lengths: one per link of the fabric; those groups, and none of later levels, travel a positive way.
    """

    rate: Fraction
    bound: Fraction
    groups: tuple[int, ...]
    lengths: tuple[Fraction, ...]


@dataclass(frozen=True, slots=True)
class JointCertificate:
    """Levels in ascending order of rate, each proved with the earlier ones given.

    Attributes:
        levels: together they hold every group once.
        relays: whether it speaks of schedules that pass ranks outside a group as if they were switches,
            or of those that stay among the ranks of the group (and switches).
    """

    levels: tuple[Level, ...]
    relays: bool

    @property
    def worst(self) -> Fraction:
        """The least rate / weight of all groups, GB/s: proved to be the largest possible."""
        return self.levels[0].bound

    @property
    def is_exact(self) -> bool:
        """Whether every rate is proved to be the best, not only to be nearly so."""
        return all(level.rate == level.bound for level in self.levels)


def certified_levels(
    topology: Topology,
    collectives: Sequence[Collective],
    weights: Sequence[Fraction],
    certificate: JointCertificate,
) -> tuple[Fraction, ...]:
    """What each level's lengths prove of its rate, given the rates of the levels before.

    Raises:
        InputError: a certificate that does not fit the groups, or that proves nothing of what it says.
    """
    named = sorted(group for level in certificate.levels for group in level.groups)
    if named != list(range(len(collectives))):
        raise InputError(f"levels: must name each of the {len(collectives)} groups once, got {named[:16]}")
    given: dict[int, Fraction] = {}
    proved = []
    for number, level in enumerate(certificate.levels):
        bound, travelling = level_bound(
            topology, collectives, weights, given, level.lengths, relays=certificate.relays
        )
        if travelling != level.groups:
            raise InputError(
                f"level {number}: lengths must be of groups {list(level.groups)}, got {list(travelling)}"
            )
        proved.append(bound)
        given |= {group: level.rate * weights[group] for group in level.groups}
    return tuple(proved)


def level_bound(
    topology: Topology,
    collectives: Sequence[Collective],
    weights: Sequence[Fraction],
    given: dict[int, Fraction],
    lengths: tuple[Fraction, ...],
    *,
    relays: bool,
) -> tuple[Fraction, tuple[int, ...]]:
    """The limit of the least rate / weight of groups that have no rate yet, and which of them it concerns.

    Args:
        topology: the whole fabric.
        collectives: of all groups.
        weights: of all groups.
        given: the rates of the groups that have one.
        lengths: one per link of the fabric.
        relays: whether ranks outside a group may forward for it.

    Raises:
        InputError: lengths that do not fit the links, or under which no group without a rate travels.
    """
    metric = Metric.of(topology, lengths)
    others = Others.FORWARD if relays else Others.ABSENT
    offered = sum(
        (link.bandwidth * length for link, length in zip(topology.links, lengths, strict=True)), Fraction(0)
    )
    distances = [metric.distance(collective, others) for collective in collectives]
    taken = sum((rate * distances[group] for group, rate in given.items()), Fraction(0))
    travelling = tuple(group for group, distance in enumerate(distances) if distance and group not in given)
    needed = sum((weights[group] * distances[group] for group in travelling), Fraction(0))
    if not travelling:
        raise InputError("lengths: no group without a rate travels a positive way")
    return (offered - taken) / needed, travelling
