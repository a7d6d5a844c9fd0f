"""The independent check of several schedules at once: each by itself, all together on every link, the proof.

Loads are recounted from the transfers by `synth.verify`; the certificate is recomputed from its lengths.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

from arborcast.synth.errors import InputError
from arborcast.synth.groups.certificate import certified_levels
from arborcast.synth.groups.result import GroupSchedules
from arborcast.synth.topology import Hop
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
    """
    errors: list[str] = []
    load: dict[Hop, Fraction] = defaultdict(Fraction)
    for number, group in enumerate(found.groups):
        if group.schedule.topology != found.topology:
            errors.append(
                f"group {number}: its schedule is of {group.schedule.topology.name}, another fabric"
            )
            continue
        verdict = verify(group.schedule, max_errors=max_errors)
        errors += [f"group {number}: {error}" for error in verdict.errors]
        for hop, share in verdict.loads.items():
            load[hop] += share * group.rate
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


def _strangers(found: GroupSchedules, number: int) -> list[str]:
    """What a schedule passes although it must not: ranks of other groups, or switches as ranks do."""
    group = found.groups[number]
    if group.schedule.uses_switches:
        return [f"group {number}: adds or multicasts in switches, which groups that run at once must not"]
    if found.certificate.relays:
        return []
    passed = {rank for transfer in group.schedule.transfers for rank in (transfer.src, transfer.dst)}
    strange = sorted(passed - group.collective.members)
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
