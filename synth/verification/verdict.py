"""What checkers of either form share: the verdict, the check of a bound, and the words of objections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from arborcast.synth.certificate import Scope
from arborcast.synth.collective import Collective
from arborcast.synth.errors import InputError
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.topology import Hop, Topology
from arborcast.synth.verification.replay import Errors


@dataclass(frozen=True)
class Verdict:
    """What the replay found.

    Attributes:
        correct: whether there is nothing to object to.
        rate: algbw in GB/s, recomputed; zero where the schedule moves nothing or its rounds make no sense.
        max_link_load: the fullest link at the declared rate, load over bandwidth; 1 is full.
        errors: one line each, at most `max_errors` and a count of the rest.
        loads: the share of the buffer that passes each link that is used.
    """

    correct: bool
    rate: Fraction
    max_link_load: Fraction
    errors: tuple[str, ...]
    loads: Mapping[Hop, Fraction]


def check_bound(schedule: AnySchedule, rate: Fraction, errors: Errors) -> None:
    """Recompute the bound, and the times beside it, from certificates; the rate must not exceed it."""
    from arborcast.synth.certification import (  # compiled kernels come with them
        certified_rate,
        certified_scope,
        check_tolls,
    )

    bound = schedule.bound
    try:
        proved = certified_rate(schedule.topology, schedule.collective, bound.certificate)
        scope = certified_scope(schedule.topology, schedule.collective, bound.certificate)
        for tolls in bound.times:
            check_tolls(schedule.topology, schedule.collective, bound, tolls)
    except InputError as wrong:
        errors.add(f"bound: {wrong}")
        return
    if proved != bound.rate:
        errors.add(f"bound: {bound.rate} GB/s declared, its certificate proves {proved} GB/s")
    elif bound.scope is Scope.EVERY_SCHEDULE and scope is not bound.scope:
        errors.add(f"bound: declared for {bound.scope}, its certificate speaks of {scope}")
    elif rate > bound.rate and (scope is Scope.EVERY_SCHEDULE or _follows_trees(schedule)):
        errors.add(f"bound: {bound.rate} GB/s declared for {scope}, this one reaches {rate} GB/s")


def _follows_trees(schedule: AnySchedule) -> bool:
    """Whether additions lead from all ranks to one place for each chunk, and copies from it to all ranks.

    That place is the chunk's owner or a switch that turns. What a switch that reduces passes on is a sum,
    even where its transfer is a copy.
    """
    topology, members = schedule.topology, schedule.collective.members
    switches = list(enumerate(topology.switches, topology.ranks))
    adding = {vertex for vertex, switch in switches if switch.reduces}
    turning = [vertex for vertex, switch in switches if switch.turns]
    reached = [[({place}, {place}) for place in (chunk.owner, *turning)] for chunk in schedule.chunks]
    in_order = sorted(schedule.transfers, key=lambda transfer: transfer.step)
    for transfer in in_order:
        for spread, _ in reached[transfer.chunk]:
            if not transfer.reduce and transfer.src in spread:
                spread.add(transfer.dst)
    for transfer in reversed(in_order):
        for _, gathered in reached[transfer.chunk]:
            if (transfer.reduce or transfer.src in adding) and transfer.dst in gathered:
                gathered.add(transfer.src)
    return all(any(members <= spread and members <= gathered for spread, gathered in way) for way in reached)


def describe(collective: Collective) -> str:
    """The collective as error lines name it."""
    return f"{collective.kind} " + (
        f"among {len(collective.ranks)} ranks" if collective.root is None else f"with root {collective.root}"
    )


def describe_link(topology: Topology, hop: Hop) -> str:
    """A link as error lines name it."""
    src, dst = map(topology.label, hop)
    return f"{src}->{dst}"


def describe_overload(schedule: AnySchedule, hop: Hop, load: Fraction, others: str = "") -> str:
    """The line about a link that carries more than it can at the declared rate; `others` are like it."""
    return (
        f"link {describe_link(schedule.topology, hop)}{others}: carries {load * schedule.rate} GB/s at the "
        f"declared rate of {schedule.rate} GB/s, its bandwidth is {schedule.topology.bandwidth[hop]} GB/s"
    )
