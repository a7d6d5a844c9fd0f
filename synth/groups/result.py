"""What several groups do at once: a schedule and a rate for each, and the proof that no sharing is fairer."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from arborcast.synth.collective import Collective
from arborcast.synth.groups.certificate import JointCertificate
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Topology


@dataclass(frozen=True)
class GroupSchedule:
    """One group among others.

    Attributes:
        weight: its rate counts in proportion to it.
        rate: algbw in GB/s while all groups run, each at its rate.
        alone: the best rate under the same rules with the fabric to itself; for comparison, not proved here.
        schedule: on the whole fabric; its own `rate` is what it reaches with the fabric to itself, its
            `bound` is proved for that.
    """

    weight: Fraction
    rate: Fraction
    alone: Fraction
    schedule: Schedule

    @property
    def collective(self) -> Collective:
        """What the group does."""
        return self.schedule.collective


@dataclass(frozen=True)
class GroupSchedules:
    """Several groups on one fabric.

    Attributes:
        topology: the whole fabric.
        groups: in the order in which they were given.
        certificate: proves that no sharing is fairer.
    """

    topology: Topology
    groups: tuple[GroupSchedule, ...]
    certificate: JointCertificate

    @property
    def rates(self) -> tuple[Fraction, ...]:
        """Algbw of each group in GB/s while all run."""
        return tuple(group.rate for group in self.groups)

    @property
    def worst(self) -> Fraction:
        """The least rate / weight."""
        return min(group.rate / group.weight for group in self.groups)
