"""The independent checker: replays a schedule with contributor sets and recounts every link load.

It stands behind every method and in front of every claim, so it takes nothing from the builders: what a chunk
must do is stated here again (a test compares it with `synth.collective`), loads are counted from
the transfers, and the bound is recomputed from its certificate. Numbers stay exact.

A schedule in implicit form is checked by its representatives: that its translations map the fabric and the
collective to themselves is the proof that what holds for one holds for all of its images
(`synth.verification.group_check`). One that is written out is the same with the identity alone.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from arborcast.synth.errors import TimedOutError
from arborcast.synth.features import check_features
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Hop, Vertex
from arborcast.synth.transfers import Transfer
from arborcast.synth.verification.group_check import CheckedGroup, check_group, identity_alone
from arborcast.synth.verification.replay import Errors, check_replay
from arborcast.synth.verification.switch_use import SwitchUse, check_switch_limits, check_switch_use
from arborcast.synth.verification.verdict import (
    Verdict,
    check_bound,
    describe,
    describe_link,
    describe_overload,
)

if TYPE_CHECKING:
    from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule


MANY = 1 << 16
"""Transfers of a written-out schedule from which it is replayed in machine code."""


def verify(schedule: AnySchedule, *, max_errors: int = 20, every_translate: bool = False) -> Verdict:
    """Replay a schedule, recount its links, recompute its rate and its bound.

    Args:
        schedule: from any method or file, in either form.
        max_errors: how many objections to spell out.
        every_translate: of a schedule in implicit form, replay every chunk that its translations make, too;
            otherwise its representatives are, and that the translations are automorphisms is the proof for
            the others. A schedule that is written out has nothing but its own chunks, which are replayed.

    Returns:
        The verdict; wrong schedules are an answer, not an exception.

    Time is linear in the transfers that are replayed, times the ranks / 64 where contributions add up.
    Objections number chunks as the schedule lists them; with `every_translate` as `expand` does.

    Examples:
        >>> verdict = synth.verify(synth.solve(topologies.load("ring:4"), "allgather"))
        >>> verdict.correct, verdict.rate
        (True, Fraction(8, 3))
    """
    check_features(schedule.topology, "verifier")
    errors = Errors(max_errors)
    if isinstance(schedule, Schedule):
        group = identity_alone(schedule.topology)
    else:
        checked = check_group(schedule, errors)
        if checked is None:  # nothing else can be said then
            return Verdict(False, Fraction(0), Fraction(0), errors.all(), {})
        group = checked
        _check_owners(schedule, group, errors)
    if every_translate and not isinstance(schedule, Schedule):
        # Here, because compiled kernels come with it.
        from arborcast.synth.verification.every_translate import check_every_translate

        loads, sums, trees = check_every_translate(schedule, group, errors)
    else:
        _check_shares(schedule, group, errors)
        loads = _replayed(schedule, group, errors)
        uses = check_switch_use(schedule, errors)
        sums, trees = _sums_and_trees(schedule, group, uses)
    busiest = _check_links(schedule, group, loads, errors)
    adding = check_switch_limits(schedule, sums, trees, errors)
    holding = _check_streams(schedule, errors)
    if isinstance(schedule, Schedule) and schedule.rounds is not None:
        rate = _rate_of_rounds(schedule, schedule.rounds, errors)
        _check_rounds(schedule, schedule.rounds, uses, errors)
    else:
        slowest = max(busiest, adding, holding)
        rate = 1 / slowest if slowest else Fraction(0)
    if rate > schedule.rate or (rate < schedule.rate and schedule.rounds is not None):
        errors.add(f"rate: {schedule.rate} GB/s declared, {rate} GB/s recomputed")
    check_bound(schedule, rate, errors)
    lines = errors.all()
    return Verdict(not lines, rate, busiest * schedule.rate, lines, loads)


def _replayed(schedule: AnySchedule, group: CheckedGroup, errors: Errors) -> dict[Hop, Fraction]:
    """Replay every chunk that is listed; the loads of the links."""
    if isinstance(schedule, Schedule) and len(schedule.transfers) > MANY:
        from arborcast.synth.verification.every_translate import loads_if_sound

        with contextlib.suppress(TimedOutError):  # of compiling its kernel: plain Python is slower, and ready
            loads = loads_if_sound(schedule)
            if loads is not None:
                return loads
    check_replay(schedule, errors)
    return _link_loads(schedule, group)


def _check_owners(schedule: ImplicitSchedule, group: CheckedGroup, errors: Errors) -> None:
    """One representative per orbit, so that the number of a moved chunk says whose it is."""
    for index, chunk in enumerate(schedule.chunks):
        first = group.vertex_orbit[chunk.owner]
        if chunk.owner != first:
            errors.add(
                f"chunk {index}: owner must be {first}, the first rank of its orbit, got {chunk.owner}"
            )


def _check_shares(schedule: AnySchedule, group: CheckedGroup, errors: Errors) -> None:
    """Every chunk belongs to a block that must move, and the chunks of a block are the whole of it.

    Of the images of a chunk exactly one belongs to each rank of its owner's orbit: the blocks of an orbit's
    first rank speak for those of all. Where all chunks are of one block, all of their images are.
    """
    collective = schedule.collective
    required = collective.blocks(frozenset(group.vertex_orbit.tolist()))
    scale = math.lcm(*(chunk.share.denominator for chunk in schedule.chunks))
    found = dict.fromkeys(required, 0)
    for index, chunk in enumerate(schedule.chunks):
        block = collective.block_of(chunk.owner, chunk.target, chunk.demand)
        if block not in found:
            errors.add(f"chunk {index}: {describe(collective)} moves no block with {block}")
            continue
        copies = group.order if block.owner is None else 1
        found[block] += chunk.share.numerator * (scale // chunk.share.denominator) * copies
    for block, share in required.items():
        if found[block] * share.denominator != share.numerator * scale:
            total = Fraction(found[block], scale)
            errors.add(f"block with {block}: shares must add up to {share}, got {total}")


def _link_loads(schedule: AnySchedule, group: CheckedGroup) -> dict[Hop, Fraction]:
    """The share of the buffer over each link: the images of a hop are spread evenly over its link's orbit."""
    scale = math.lcm(*(chunk.share.denominator for chunk in schedule.chunks))
    weight = [chunk.share.numerator * (scale // chunk.share.denominator) for chunk in schedule.chunks]
    hops = [(link.src, link.dst) for link in schedule.topology.links]
    first_of = dict(zip(hops, group.link_orbit.tolist(), strict=True))
    total: Counter[int] = Counter()
    amounts = ((transfer, weight[transfer.chunk]) for transfer in schedule.transfers)
    for hop, amount in _by_link(amounts).items():
        total[first_of[hop]] += amount
    sizes = np.bincount(group.link_orbit, minlength=len(hops)).tolist()
    load = {
        first: Fraction(amount * group.order, scale * sizes[first])
        for first, amount in total.items()
        if amount
    }
    return {hop: load[first] for hop, first in first_of.items() if first in load}


def _by_link(amounts: Iterable[tuple[Transfer, int]]) -> dict[Hop, int]:
    """What passes each link, counted per route first: routes are few, transfers many."""
    of_route: dict[tuple[Vertex, ...], int] = {}
    for transfer, amount in amounts:
        route = (transfer.src, *transfer.via, transfer.dst)
        of_route[route] = of_route.get(route, 0) + amount
    of_link: dict[Hop, int] = {}
    for route, total in of_route.items():
        for position in range(len(route) - 1):
            hop = (route[position], route[position + 1])
            of_link[hop] = of_link.get(hop, 0) + total
    return of_link


def _sums_and_trees(
    schedule: AnySchedule, group: CheckedGroup, uses: Sequence[SwitchUse]
) -> tuple[dict[Vertex, Fraction], dict[Vertex, int]]:
    """The share that each switch adds, and how many chunks it adds or multicasts.

    Images are spread evenly over the orbit of a switch.
    """
    sums: dict[int, Fraction] = {}
    for use in uses:
        if use.adds:
            first = int(group.vertex_orbit[use.switch])
            sums[first] = sums.get(first, Fraction(0)) + schedule.chunks[use.chunk].share
    its = {(use.switch, use.chunk) for use in uses}
    trees = Counter(int(group.vertex_orbit[switch]) for switch, _ in its)
    sizes = np.bincount(group.vertex_orbit).tolist()
    members = [(v, first) for v, first in enumerate(group.vertex_orbit.tolist()) if first in trees]
    return (
        {v: sums[first] * group.order / sizes[first] for v, first in members if first in sums},
        {v: trees[first] * group.order // sizes[first] for v, first in members},
    )


def _check_links(
    schedule: AnySchedule, group: CheckedGroup, loads: Mapping[Hop, Fraction], errors: Errors
) -> Fraction:
    """Object to what carries too much at the declared rate, an orbit's links of one load in one line.

    Of a schedule with rounds these say how much a link may carry.

    Returns:
        The longest time that a link is busy, in seconds per GB of the buffer.
    """
    alike: dict[tuple[int, int, int], tuple[Hop, int]] = {}  # the first link of each kind, and how many
    for link, orbit in zip(schedule.topology.links, group.link_orbit.tolist(), strict=True):
        hop = (link.src, link.dst)
        if hop in loads:
            kind = orbit, *loads[hop].as_integer_ratio()
            first, count = alike.get(kind, (hop, 0))
            alike[kind] = first, count + 1
    busiest = Fraction(0)
    for hop, count in alike.values():
        load = loads[hop]
        bandwidth = schedule.topology.bandwidth[hop]
        busiest = max(busiest, load / bandwidth)
        if schedule.rounds is None and load * schedule.rate > bandwidth:
            others = f" (and {count - 1} more links)" if count > 1 else ""
            errors.add(describe_overload(schedule, hop, load, others))
    return busiest


def _check_streams(schedule: AnySchedule, errors: Errors) -> Fraction:
    """Object to streams that are held for more than all of the time: at the declared rate, or of a step.

    A message holds one of its sender and one of its receiver while its slowest link carries it, at least.

    Returns:
        The longest time that a stream is held, in seconds per GB of the buffer.
    """
    topology, rounds = schedule.topology, schedule.rounds
    limits = {rank: count for rank, count in enumerate(topology.streams) if count is not None}
    held: dict[tuple[Vertex, str], Fraction] = {}
    in_step: dict[tuple[int, Vertex, str], Fraction] = {}
    for move in schedule.transfers if limits else ():
        way = (move.src, *move.via, move.dst)
        slowest = min(topology.bandwidth[way[at], way[at + 1]] for at in range(len(way) - 1))
        for rank, what in ((move.src, "send"), (move.dst, "receive")):
            if rank in limits:
                time = schedule.chunks[move.chunk].share / (slowest * limits[rank])
                held[rank, what] = held.get((rank, what), Fraction(0)) + time
                place = (move.step, rank, what)
                in_step[place] = in_step.get(place, Fraction(0)) + time
    longest = max(held.values(), default=Fraction(0))
    for (rank, what), time in sorted(held.items()):
        if rounds is None and time * schedule.rate > 1:
            errors.add(
                f"rank {rank}: to {what} at {schedule.rate} GB/s takes {time * schedule.rate} times the "
                f"{limits[rank]} streams that it has"
            )
    if rounds is not None and isinstance(schedule, Schedule):
        for (step, rank, what), time in sorted(in_step.items()):
            needed = time * _unit(schedule) / schedule.chunks[0].share
            if needed > rounds[step]:
                errors.add(
                    f"step {step}: rank {rank} needs {needed} rounds to {what} over {limits[rank]} streams, "
                    f"got {rounds[step]}"
                )
    return longest


def _rate_of_rounds(schedule: Schedule, rounds: tuple[int, ...], errors: Errors) -> Fraction:
    shares = {chunk.share for chunk in schedule.chunks}
    if len(shares) > 1:
        errors.add(f"rounds: chunks must be of one share, got {min(shares)} and {max(shares)}")
    if len(shares) != 1 or not rounds:
        return Fraction(0)
    # A round is the time in which a link of the unit's bandwidth moves one chunk.
    return _unit(schedule) / (sum(rounds) * shares.pop())


def _check_rounds(
    schedule: Schedule, rounds: tuple[int, ...], uses: Sequence[SwitchUse], errors: Errors
) -> None:
    """One entry per step; in each step no link carries, and no switch adds, more than its rounds allow."""
    steps = 1 + max((transfer.step for transfer in schedule.transfers), default=-1)
    if steps != len(rounds):
        errors.add(f"rounds: {steps} steps need as many entries, got {len(rounds)}")
    unit = _unit(schedule)
    for step, of_link in sorted(_chunks_per_step(schedule).items()):
        for hop, count in sorted(of_link.items()):
            capacity = int(schedule.topology.bandwidth[hop] / unit)
            allowed = rounds[step] * capacity
            if count > allowed:
                errors.add(
                    f"step {step}: link {describe_link(schedule.topology, hop)} carries {count} chunks, "
                    f"{rounds[step]} rounds of {capacity} allow {allowed}"
                )
    added = Counter((step, use.switch) for use in uses for step in use.adds)
    for (step, vertex), count in sorted(added.items()):
        switch = schedule.topology.switches[vertex - schedule.topology.ranks]
        if switch.adder is not None and count * unit > rounds[step] * switch.adder:
            errors.add(
                f"step {step}: switch {switch.name} adds {count} chunks, {rounds[step]} rounds of "
                f"{switch.adder / unit} allow {rounds[step] * switch.adder // unit}"
            )


def _chunks_per_step(schedule: Schedule) -> dict[int, dict[Hop, int]]:
    of_step: dict[int, list[tuple[Transfer, int]]] = {}
    for transfer in schedule.transfers:
        of_step.setdefault(transfer.step, []).append((transfer, 1))
    return {step: _by_link(amounts) for step, amounts in of_step.items()}


def _unit(schedule: Schedule) -> Fraction:
    """What the schedule says, or the greatest common divisor of all bandwidths, on its own account."""
    if schedule.unit is not None:
        return schedule.unit
    rates = [link.bandwidth for link in schedule.topology.links]
    scale = math.lcm(*(rate.denominator for rate in rates))
    return Fraction(math.gcd(*(int(rate * scale) for rate in rates)), scale)
