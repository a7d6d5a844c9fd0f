"""The independent check of several schedules at once: each by itself, all together on every link, the proof.

Loads are recounted from the transfers by `synth.verify`; the certificate is recomputed from its lengths. A
schedule that serves several groups is replayed once; for each other group its images are checked to be a
symmetry of the fabric that takes the one collective to the other, so that they take right to right.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

from arborcast.synth.errors import InputError
from arborcast.synth.features import check_features
from arborcast.synth.groups.result import GroupSchedule, GroupSchedules
from arborcast.synth.groups.sharing_certificate import certified_levels
from arborcast.synth.topology import Hop
from arborcast.synth.verification.group_check import checked_link_images
from arborcast.synth.verification.replay import Errors
from arborcast.synth.verification.verdict import Verdict
from arborcast.synth.verification.verifier import verify


@dataclass(frozen=True)
class JointVerdict:
    """What was found.

    Attributes:
        correct: whether there is nothing to object to.
        worst: the least rate / weight that is declared.
        max_link_load: the fullest link with all groups at their rates, load over bandwidth; 1 is full.
        errors: one line each.
    """

    correct: bool
    worst: Fraction
    max_link_load: Fraction
    errors: tuple[str, ...]


def verify_groups(found: GroupSchedules, *, max_errors: int = 20) -> JointVerdict:
    """Verify each schedule, add up the loads of all of them, recompute the certificate.

    Args:
        found: from `solve_groups` or a folder.
        max_errors: how many objections to spell out, of each schedule and in all.

    Examples:
        >>> fabric = topologies.load("torus:2x2")
        >>> found = groups.solve_groups(fabric, groups.along(fabric, (2, 2), 1, "allgather"))
        >>> groups.verify_groups(found).correct
        True
    """
    check_features(found.topology, "groups")
    errors: list[str] = []
    load: dict[Hop, Fraction] = defaultdict(Fraction)
    verdicts: dict[int, Verdict] = {}
    for number, group in enumerate(found.groups):
        if group.written.topology != found.topology:
            errors.append(f"group {number}: its schedule is of {group.written.topology.name}, another fabric")
            continue
        if objection := _objection_to_images(group):
            errors.append(f"group {number}: {objection}")
            continue
        if id(group.written) not in verdicts:
            verdicts[id(group.written)] = verdict = verify(group.written, max_errors=max_errors)
            errors += [f"group {number}: {error}" for error in verdict.errors]
        images = range(found.topology.size) if group.images is None else group.images
        for (src, dst), share in verdicts[id(group.written)].loads.items():
            load[images[src], images[dst]] += share * group.rate
        if group.rate > group.alone:
            errors.append(f"group {number}: {group.rate} GB/s among others, {group.alone} GB/s alone")
        errors += _strangers(found, number)
    bandwidth = found.topology.bandwidth
    label = found.topology.label
    for (src, dst), amount in sorted(load.items()):
        if amount > bandwidth[src, dst]:
            errors.append(
                f"link {label(src)}->{label(dst)}: carries {amount} GB/s of all groups together, its "
                f"bandwidth is {bandwidth[src, dst]} GB/s"
            )
    errors += _objections_to_levels(found)
    fullest = max((amount / bandwidth[hop] for hop, amount in load.items()), default=Fraction(0))
    dropped = [f"and {len(errors) - max_errors} more"] if len(errors) > max_errors else []
    return JointVerdict(not errors, found.worst, fullest, (*errors[:max_errors], *dropped))


def _objection_to_images(group: GroupSchedule) -> str:
    """Why a schedule is not the group's, or its images do not take it there; nothing where they do."""
    fabric, written, wanted = group.written.topology, group.written.collective, group.collective
    if group.images is None:
        return "" if written == wanted else "its schedule is of another collective"
    images = group.images
    errors = Errors(1)
    checked_link_images("images", images, fabric, errors)
    if errors.lines:
        return errors.lines[0]
    taken = frozenset(images[rank] for rank in written.ranks)
    root = None if written.root is None else images[written.root]
    if (written.kind, taken, root) != (wanted.kind, wanted.members, wanted.root) or written.demands:
        return "images: must take the collective that the schedule is of to that of the group"
    return ""


def _strangers(found: GroupSchedules, number: int) -> list[str]:
    """What a schedule passes although it must not: ranks of other groups, or switches as ranks do."""
    group = found.groups[number]
    if group.written.uses_switches:
        return [f"group {number}: adds or multicasts in switches, which groups that run at once must not"]
    if found.certificate.relays:
        return []
    ends = group.written.columns
    strange = sorted({*ends.src.tolist(), *ends.dst.tolist()} - group.written.collective.members)
    return [f"group {number}: passes rank {strange[0]}, which is not in the group"] if strange else []


def _objections_to_levels(found: GroupSchedules) -> list[str]:
    """What is wrong with the certificate, or with rates beside it."""
    collectives = [group.collective for group in found.groups]
    weights = [group.weight for group in found.groups]
    levels = found.certificate.levels
    try:
        proved = certified_levels(found.topology, collectives, weights, found.certificate)
    except InputError as wrong:
        return [f"certificate: {wrong}"]
    errors = []
    for number, (level, bound) in enumerate(zip(levels, proved, strict=True)):
        if bound != level.bound:
            errors.append(f"level {number}: {level.bound} GB/s declared, its lengths prove {bound} GB/s")
        if level.rate > level.bound:
            errors.append(f"level {number}: rate {level.rate} GB/s is above its bound {level.bound} GB/s")
        if number and level.rate < levels[number - 1].rate:
            errors.append(f"level {number}: rate {level.rate} GB/s is below that of the level before")
        for group in level.groups:
            reached = found.groups[group].rate / found.groups[group].weight
            if reached != level.rate:
                errors.append(
                    f"group {group}: {reached} GB/s per unit of weight, its level says {level.rate} GB/s"
                )
    return errors
