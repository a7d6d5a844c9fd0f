"""Schedules made before a link fails: verified when a group is made, there at once when it avoids one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from arborcast.backends.schedules.schedule_table import ScheduleTable, flaw_of
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.selection import Choice
from arborcast.synth.topology import Hop, Topology

if TYPE_CHECKING:
    from arborcast.synth.faults.backup_schedules import BackupSchedules


def fitting_spares(
    given: Sequence[str | os.PathLike[str] | BackupSchedules], healthy: Topology, *, is_whole: bool
) -> tuple[BackupSchedules, ...]:
    """The spares among those given that are for a group.

    Args:
        given: files, each read and verified once in a process, or values.
        healthy: the links among the ranks of the group before any failed.
        is_whole: whether the group is the whole fabric, for which all of them must be.

    Raises:
        InputError: a file cannot be read, a schedule is not correct, or it is for another fabric.
    """
    found = []
    for it in given:
        spares = _read_once(os.fspath(it)) if isinstance(it, str | os.PathLike) else _checked(it, "spares")
        theirs = spares.whole.topology.without_addresses
        # Symmetries follow from the links; of a part they are not declared.
        if replace(theirs, name=healthy.name, symmetries=healthy.symmetries) == healthy:
            found.append(spares)
        elif is_whole:
            raise InputError(f"spares: must be for fabric {healthy.name}, got those of {theirs.name}")
    return tuple(found)


def spare_table(
    spares: Sequence[BackupSchedules], gone: Sequence[Hop], topology: Topology, kind: Kind, root: int | None
) -> ScheduleTable | None:
    """The table of the spare schedule after the links of a group have failed; None where there is none.

    Args:
        spares: of the group's fabric.
        gone: links that have failed, as ranks of the group.
        topology: what is left.
        kind: of the collective.
        root: a rank, for kinds that have one.
    """
    if not spares or not gone:
        return None
    from arborcast.synth.faults.backup_schedules import Failure

    failure = Failure.of(gone)
    for it in spares:
        asked = it.whole.collective
        is_asked = asked.kind is kind and asked.root == root and len(asked.ranks) == topology.ranks
        if is_asked and it.has(failure):
            found = it.after(failure)
            same = replace(
                found.topology.without_addresses, name=topology.name, symmetries=topology.symmetries
            )
            assert same == topology, "both are the same fabric without the same links"
            return ScheduleTable.of([Choice(0, replace(found, topology=topology))])
    return None


def digests_of(spares: Sequence[BackupSchedules]) -> list[str]:
    """Other ones for other schedules; all ranks must have the same."""
    if not spares:
        return []
    from arborcast.synth.faults.backup_documents import digest_of

    return [digest_of(it) for it in spares]


@cache
def _read_once(path: str) -> BackupSchedules:
    from arborcast.synth.faults.backup_documents import read_spares

    return _checked(read_spares(path), path)


@cache
def _checked(spares: BackupSchedules, source: str) -> BackupSchedules:
    """These, whose schedules have been replayed, and add alike on all ranks."""
    for it in spares.differences:
        if flaw := flaw_of(it.applied(spares.whole)):
            raise InputError(f"{source}: {it.failure.words(spares.whole.topology)}: {flaw}")
    return spares
