"""A group's part in what several groups of a job run at once, on the links among its own ranks alone."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from arborcast.backends.schedules.group_fabric import GroupFabric
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.formats.any_schedule import any_schedule_to_document
from arborcast.synth.schedule import Chunk, Method, Transfer
from arborcast.synth.topology import Topology

if TYPE_CHECKING:
    from arborcast.synth.groups.result import GroupSchedules  # solvers come with it


@dataclass(frozen=True)
class JointPart:
    """What a schedule is made of, without a bound.

    Attributes:
        name: of its origin: another one for another schedule.
        topology: of the group: its rank i is rank i of the group.
        collective: of all its ranks.
        method: of the joint schedule, with the number of groups.
        chunks: as of a schedule.
        transfers: likewise.
        rounds: likewise.
    """

    name: str
    topology: Topology
    collective: Collective
    method: Method
    chunks: tuple[Chunk, ...]
    transfers: tuple[Transfer, ...]
    rounds: tuple[int, ...] | None


def joint_part(fabric: GroupFabric, kind: Kind, root: int | None) -> JointPart | None:
    """The schedule among the joint ones that a group is to run; None where there is none for it.

    Args:
        fabric: of the group.
        kind: of the collective.
        root: a rank of the group, for kinds that have one.

    Raises:
        InputError: the schedule passes ranks of other groups.
    """
    place = {vertex: rank for rank, vertex in enumerate(fabric.places)}
    every = ((number, it, joint) for joint in fabric.joint for number, it in enumerate(joint.groups))
    for number, group, joint in every:
        asked = group.collective
        if asked.kind is not kind or asked.members != place.keys():
            continue
        if root is not None and asked.root != fabric.places[root]:
            continue
        whole, own = joint.topology, fabric.topology
        named = {str(own.label(vertex)): vertex for vertex in range(own.ranks, own.size)}
        for vertex in range(whole.ranks, whole.size):
            if str(whole.label(vertex)) in named:
                place[vertex] = named[str(whole.label(vertex))]
        schedule = group.schedule
        try:
            transfers = tuple(
                replace(it, src=place[it.src], dst=place[it.dst], via=tuple(place[via] for via in it.via))
                for it in schedule.transfers
            )
        except KeyError as error:
            raise InputError(
                f"groups: group {number} must pass its own ranks and switches alone, got "
                f"{whole.label(error.args[0])}"
            ) from error
        chunks = tuple(
            replace(it, owner=place[it.owner], target=None if it.target is None else place[it.target])
            for it in schedule.chunks
        )
        settings = (*schedule.method.settings, ("jointly", len(joint.groups)))
        return JointPart(
            f"group {number} of {digest_of(joint)}",
            own,
            Collective.on(own, kind, root=root or 0),
            replace(schedule.method, settings=settings),
            chunks,
            transfers,
            schedule.rounds,
        )
    return None


def digest_of(joint: GroupSchedules) -> str:
    """Another one for other schedules."""
    written = {id(group.written): group.written for group in joint.groups}  # in the order of the groups
    place = {key: number for number, key in enumerate(written)}
    documents = [any_schedule_to_document(it) for it in written.values()]
    moved = [(place[id(group.written)], group.images, group.collective.ranks) for group in joint.groups]
    return hashlib.sha256(json.dumps([documents, moved], sort_keys=True).encode()).hexdigest()[:12]
