"""The independent checker: replays a schedule with contributor sets and recounts every link load.

It stands behind every method and in front of every claim, so it takes nothing from the builders: what the
collective demands is stated here again (a test compares it with `synth.collective`), loads are counted from
the transfers, and the bound is recomputed from its certificate. Numbers stay exact.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from arborcast.synth.errors import TimedOutError
from arborcast.synth.features import check_features
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Hop, Vertex
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
    from arborcast.synth.implicit_schedule import AnySchedule


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

    Time is linear in the number of transfers, times the ranks / 64 where contributions add up.
    """
    check_features(schedule.topology, "verifier")
    if not isinstance(schedule, Schedule):
        from arborcast.synth.verification.implicit import verify_implicit

        return verify_implicit(schedule, translates=every_translate, max_errors=max_errors)
    errors = Errors(max_errors)
    _check_blocks(schedule, errors)
    loads = None
    if len(schedule.transfers) > MANY:
        from arborcast.synth.verification.every_translate import loads_if_sound

        with contextlib.suppress(TimedOutError):  # of compiling its kernel: plain Python is slower, and ready
            loads = loads_if_sound(schedule)
    if loads is None:
        check_replay(schedule, errors)
        loads = _link_loads(schedule)
    uses = check_switch_use(schedule, errors)
    bandwidth = schedule.topology.bandwidth
    busiest = max((load / bandwidth[hop] for hop, load in loads.items()), default=Fraction(0))
    adding = check_switch_limits(schedule, *_sums_and_trees(schedule, uses), errors)
    if schedule.rounds is None:
        slowest = max(busiest, adding)
        rate = 1 / slowest if slowest else Fraction(0)
        _check_links(schedule, loads, errors)
    else:
        rate = _rate_of_rounds(schedule, schedule.rounds, errors)
        _check_rounds(schedule, schedule.rounds, uses, errors)
    if rate > schedule.rate or (rate < schedule.rate and schedule.rounds is not None):
        errors.add(f"rate: {schedule.rate} GB/s declared, {rate} GB/s recomputed")
    check_bound(schedule, rate, errors)
    lines = errors.all()
    return Verdict(not lines, rate, busiest * schedule.rate, lines, loads)


def _check_blocks(schedule: Schedule, errors: Errors) -> None:
    """Every chunk belongs to a block that must move, and the chunks of a block are the whole of it."""
    collective = schedule.collective
    required = collective.blocks()
    scale = math.lcm(*(chunk.share.denominator for chunk in schedule.chunks))
    found = dict.fromkeys(required, 0)
    for index, chunk in enumerate(schedule.chunks):
        block = collective.block_of(chunk.owner, chunk.target, chunk.demand)
        if block not in found:
            errors.add(f"chunk {index}: {describe(collective)} moves no block with {block}")
            continue
        found[block] += chunk.share.numerator * (scale // chunk.share.denominator)
    for block, share in required.items():
        if found[block] * share.denominator != share.numerator * scale:
            total = Fraction(found[block], scale)
            errors.add(f"block with {block}: shares must add up to {share}, got {total}")


def _link_loads(schedule: Schedule) -> dict[Hop, Fraction]:
    """The share of the buffer over each link, counted per route first: routes are few, transfers many."""
    scale = math.lcm(*(chunk.share.denominator for chunk in schedule.chunks))
    weight = [chunk.share.numerator * (scale // chunk.share.denominator) for chunk in schedule.chunks]
    of_route: dict[tuple[Vertex, ...], int] = {}
    for transfer in schedule.transfers:
        route = (transfer.src, *transfer.via, transfer.dst)
        of_route[route] = of_route.get(route, 0) + weight[transfer.chunk]
    return {hop: Fraction(total, scale) for hop, total in _by_link(of_route).items()}


def _by_link(of_route: Mapping[tuple[Vertex, ...], int]) -> dict[Hop, int]:
    of_link: dict[Hop, int] = {}
    for route, total in of_route.items():
        for position in range(len(route) - 1):
            hop = (route[position], route[position + 1])
            of_link[hop] = of_link.get(hop, 0) + total
    return of_link


def _sums_and_trees(
    schedule: Schedule, uses: Sequence[SwitchUse]
) -> tuple[dict[Vertex, Fraction], Counter[Vertex]]:
    """The share of the buffer that each switch adds, and how many chunks it adds or multicasts."""
    sums: dict[Vertex, Fraction] = {}
    for use in uses:
        if use.adds:
            share = schedule.chunks[use.chunk].share
            sums[use.switch] = sums.get(use.switch, Fraction(0)) + share
    return sums, Counter(switch for switch, _ in {(use.switch, use.chunk) for use in uses})


def _check_links(schedule: Schedule, loads: Mapping[Hop, Fraction], errors: Errors) -> None:
    for hop, load in sorted(loads.items()):
        if load * schedule.rate > schedule.topology.bandwidth[hop]:
            errors.add(describe_overload(schedule, hop, load))


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
    of_step: dict[int, dict[tuple[Vertex, ...], int]] = {}
    for transfer in schedule.transfers:
        routes = of_step.setdefault(transfer.step, {})
        route = (transfer.src, *transfer.via, transfer.dst)
        routes[route] = routes.get(route, 0) + 1
    return {step: _by_link(routes) for step, routes in of_step.items()}


def _unit(schedule: Schedule) -> Fraction:
    """What the schedule says, or the greatest common divisor of all bandwidths, on its own account."""
    if schedule.unit is not None:
        return schedule.unit
    rates = [link.bandwidth for link in schedule.topology.links]
    scale = math.lcm(*(rate.denominator for rate in rates))
    return Fraction(math.gcd(*(int(rate * scale) for rate in rates)), scale)
