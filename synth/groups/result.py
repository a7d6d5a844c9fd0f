"""What several groups do at once: a schedule and a rate for each, and the proof that no sharing is fairer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from arborcast.synth.collective import Collective
from arborcast.synth.groups.sharing_certificate import JointCertificate
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Topology, Vertex
from arborcast.synth.transfers import in_order


@dataclass(frozen=True)
class GroupSchedule:
    """One group among others.

    Attributes:
        weight: its rate counts in proportion to it.
        rate: algbw in GB/s while all groups run, each at its rate.
        alone: the best rate under the same rules with the fabric to itself; for comparison, not proved here.
        collective: what the group does.
        written: its schedule, or that of a group which `images` takes to this one.
        images: which vertex each vertex becomes, a symmetry of the fabric; None for the identity.
    """

    weight: Fraction
    rate: Fraction
    alone: Fraction
    collective: Collective
    written: Schedule
    images: tuple[Vertex, ...] | None = None

    @cached_property
    def schedule(self) -> Schedule:
        """On the whole fabric, every transfer written out.

        Its own `rate` is what it reaches with the fabric to itself, its `bound` is proved for that.

        Raises:
            ScheduleError: the images are not those of a symmetry of the fabric.
        """
        images, written = self.images, self.written
        if images is None:
            return written
        moved = written.relabelled(written.topology, images, self.collective)
        return replace(moved, transfers=in_order(moved.transfers))


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
