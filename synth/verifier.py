"""The independent checker: replays a schedule with contributor sets and recounts every link load.

It stands behind every method and in front of every claim, so it takes nothing from the builders: what the
collective demands is stated here again (a test compares it with `synth.collective`), loads are counted from
the transfers, and the bound is recomputed from its certificate. Numbers stay exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

from synth.certificate import Scope
from synth.collective import Collective, Kind
from synth.errors import InputError
from synth.schedule import Chunk, Schedule, Transfer
from synth.topology import Hop, Vertex

if TYPE_CHECKING:
    from synth.implicit.schedule import AnySchedule

Mask: TypeAlias = int
"""A set of contributors: bit i stands for rank i."""


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


@dataclass
class _Errors:
    """Keeps the first lines and counts the rest."""

    limit: int
    lines: list[str] = field(default_factory=list)
    dropped: int = 0

    def add(self, line: str) -> None:
        if len(self.lines) < self.limit:
            self.lines.append(line)
        else:
            self.dropped += 1

    def all(self) -> tuple[str, ...]:
        rest = (f"and {self.dropped} more",) if self.dropped else ()
        return (*self.lines, *rest)


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
    if not isinstance(schedule, Schedule):
        from synth.implicit.verifier import verify_implicit

        return verify_implicit(schedule, translates=every_translate, max_errors=max_errors)
    errors = _Errors(max_errors)
    _check_blocks(schedule, errors)
    _check_replay(schedule, errors)
    loads = _link_loads(schedule)
    bandwidth = schedule.topology.bandwidth
    busiest = max((load / bandwidth[hop] for hop, load in loads.items()), default=Fraction(0))
    if schedule.rounds is None:
        rate = 1 / busiest if busiest else Fraction(0)
        _check_links(schedule, loads, errors)
    else:
        rate = _rate_of_rounds(schedule, schedule.rounds, errors)
        _check_rounds(schedule, schedule.rounds, errors)
    if rate > schedule.rate or (rate < schedule.rate and schedule.rounds is not None):
        errors.add(f"rate: {schedule.rate} GB/s declared, {rate} GB/s recomputed")
    _check_bound(schedule, rate, errors)
    lines = errors.all()
    return Verdict(not lines, rate, busiest * schedule.rate, lines, loads)


def _check_blocks(schedule: Schedule, errors: _Errors) -> None:
    """Every chunk belongs to a block that must move, and the chunks of a block are the whole of it."""
    collective = schedule.collective
    required = collective.blocks()
    scale = math.lcm(*(chunk.share.denominator for chunk in schedule.chunks))
    found = dict.fromkeys(required, 0)
    for index, chunk in enumerate(schedule.chunks):
        block = collective.block_of(chunk.owner, chunk.target, chunk.demand)
        if block not in found:
            errors.add(f"chunk {index}: {_describe(collective)} moves no block with {block}")
            continue
        found[block] += chunk.share.numerator * (scale // chunk.share.denominator)
    for block, share in required.items():
        if found[block] * share.denominator != share.numerator * scale:
            total = Fraction(found[block], scale)
            errors.add(f"block with {block}: shares must add up to {share}, got {total}")


def _check_replay(schedule: Schedule, errors: _Errors) -> None:
    """Chunks do not touch each other, so each is replayed alone: memory stays that of one chunk."""
    of_chunk: list[list[Transfer]] = [[] for _ in schedule.chunks]
    for transfer in schedule.transfers:
        of_chunk[transfer.chunk].append(transfer)
    taking_part = frozenset(schedule.collective.ranks)
    everyone = _mask(taking_part)
    for index, chunk in enumerate(schedule.chunks):
        held = _held_before(schedule.collective, chunk)
        transfers = sorted(of_chunk[index], key=attrgetter("step"))
        sound = True
        for step, together in groupby(transfers, key=attrgetter("step")):
            sound &= _replay_step(index, step, together, held, errors)
        # Ends that are wrong only because of a transfer already reported would bury that report.
        if sound:
            _check_end(index, chunk, schedule.collective, held, everyone, errors)


def _replay_step(
    index: int, step: int, transfers: Iterable[Transfer], held: dict[int, Mask], errors: _Errors
) -> bool:
    """Apply the transfers of one chunk in one step, all from the state before it; whether all were legal."""
    arrived: dict[int, Mask] = {}
    copied: set[int] = set()
    before = len(errors.lines) + errors.dropped
    for transfer in transfers:
        src, dst = transfer.src, transfer.dst
        sent = held.get(src, 0)
        if src == dst:
            errors.add(f"step {step}: rank {src} sends chunk {index} to itself")
        elif not sent:
            errors.add(f"step {step}: rank {src} sends chunk {index} before it holds any of it")
        elif dst in copied or (dst in arrived and not transfer.reduce):
            errors.add(
                f"step {step}: rank {dst} receives chunk {index} twice, last from rank {src}; "
                "only reductions may meet in one step"
            )
        elif transfer.reduce:
            present = arrived.get(dst, held.get(dst, 0))
            if present & sent:
                twice = _names(present & sent)
                errors.add(
                    f"chunk {index}: rank {dst} would count {twice}'s contribution twice in step {step}"
                )
            arrived[dst] = present | sent
        else:
            arrived[dst] = sent
            copied.add(dst)
    held.update(arrived)
    return len(errors.lines) + errors.dropped == before


def _held_before(collective: Collective, chunk: Chunk) -> dict[int, Mask]:
    """Whose contributions each rank holds of a chunk at the start; ranks without any are left out."""
    if collective.kind in {Kind.REDUCE, Kind.REDUCE_SCATTER, Kind.ALLREDUCE}:
        return {rank: 1 << rank for rank in collective.ranks}
    if collective.kind is Kind.CUSTOM and chunk.demand is not None:
        # Whoever holds a block holds the same data, which counts as that of the one it is named after.
        return dict.fromkeys(collective.demands[chunk.demand].sources, 1 << chunk.owner)
    return {chunk.owner: 1 << chunk.owner}


def _needed_after(collective: Collective, chunk: Chunk, everyone: Mask) -> tuple[Iterable[int], Mask]:
    """Which ranks must hold a chunk at the end, and whose contributions it must then have."""
    match collective.kind:
        case Kind.BROADCAST | Kind.ALLGATHER:
            return collective.ranks, 1 << chunk.owner
        case Kind.ALLREDUCE:
            return collective.ranks, everyone
        case Kind.REDUCE | Kind.REDUCE_SCATTER:
            return (chunk.owner,), everyone
        case Kind.GATHER | Kind.SCATTER | Kind.ALLTOALL:
            return () if chunk.target is None else (chunk.target,), 1 << chunk.owner
        case Kind.CUSTOM:
            receivers = () if chunk.demand is None else collective.demands[chunk.demand].targets
            return sorted(receivers), 1 << chunk.owner


def _check_end(
    index: int,
    chunk: Chunk,
    collective: Collective,
    held: Mapping[int, Mask],
    everyone: Mask,
    errors: _Errors,
) -> None:
    receivers, needed = _needed_after(collective, chunk, everyone)
    wrong = [rank for rank in receivers if held.get(rank, 0) != needed]
    if wrong:
        more = f" (and {len(wrong) - 1} more ranks)" if len(wrong) > 1 else ""
        errors.add(
            f"chunk {index}: rank {wrong[0]} must end with the contribution of {_names(needed)}, "
            f"got that of {_names(held.get(wrong[0], 0))}{more}"
        )


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


def _check_links(schedule: Schedule, loads: Mapping[Hop, Fraction], errors: _Errors) -> None:
    bandwidth = schedule.topology.bandwidth
    for hop, load in sorted(loads.items()):
        if load * schedule.rate > bandwidth[hop]:
            errors.add(
                f"link {_link(schedule, hop)}: carries {load * schedule.rate} GB/s at the declared rate of "
                f"{schedule.rate} GB/s, its bandwidth is {bandwidth[hop]} GB/s"
            )


def _rate_of_rounds(schedule: Schedule, rounds: tuple[int, ...], errors: _Errors) -> Fraction:
    shares = {chunk.share for chunk in schedule.chunks}
    if len(shares) > 1:
        errors.add(f"rounds: chunks must be of one share, got {min(shares)} and {max(shares)}")
    if len(shares) != 1 or not rounds:
        return Fraction(0)
    # A round is the time in which a link of the greatest common bandwidth moves one chunk.
    return _unit(schedule) / (sum(rounds) * shares.pop())


def _check_rounds(schedule: Schedule, rounds: tuple[int, ...], errors: _Errors) -> None:
    """One entry per step, and in each step no link carries more chunks than its rounds allow."""
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
                    f"step {step}: link {_link(schedule, hop)} carries {count} chunks, "
                    f"{rounds[step]} rounds of {capacity} allow {allowed}"
                )


def _chunks_per_step(schedule: Schedule) -> dict[int, dict[Hop, int]]:
    of_step: dict[int, dict[tuple[Vertex, ...], int]] = {}
    for transfer in schedule.transfers:
        routes = of_step.setdefault(transfer.step, {})
        route = (transfer.src, *transfer.via, transfer.dst)
        routes[route] = routes.get(route, 0) + 1
    return {step: _by_link(routes) for step, routes in of_step.items()}


def _unit(schedule: Schedule) -> Fraction:
    """The greatest common divisor of all bandwidths, on its own account."""
    rates = [link.bandwidth for link in schedule.topology.links]
    scale = math.lcm(*(rate.denominator for rate in rates))
    return Fraction(math.gcd(*(int(rate * scale) for rate in rates)), scale)


def _check_bound(schedule: Schedule, rate: Fraction, errors: _Errors) -> None:
    from synth.bounds import certified_rate, certified_scope  # compiled kernels come with them

    bound = schedule.bound
    try:
        proved = certified_rate(schedule.topology, schedule.collective, bound.certificate)
        scope = certified_scope(schedule.topology, schedule.collective, bound.certificate)
    except InputError as wrong:
        errors.add(f"bound: {wrong}")
        return
    if proved != bound.rate:
        errors.add(f"bound: {bound.rate} GB/s declared, its certificate proves {proved} GB/s")
    elif bound.scope is Scope.EVERY_SCHEDULE and scope is not bound.scope:
        errors.add(f"bound: declared for {bound.scope}, its certificate speaks of {scope}")
    elif rate > bound.rate and bound.scope is Scope.EVERY_SCHEDULE:
        errors.add(f"bound: {bound.rate} GB/s declared for every schedule, this one reaches {rate} GB/s")


def _mask(ranks: Iterable[int]) -> Mask:
    return sum(1 << rank for rank in set(ranks))


def _members(mask: Mask) -> Iterator[int]:
    return (rank for rank in range(mask.bit_length()) if mask >> rank & 1)


def _names(mask: Mask, limit: int = 4) -> str:
    members = list(_members(mask))
    if len(members) <= 1:
        return f"rank {members[0]}" if members else "no rank"
    listed = ", ".join(map(str, members[:limit]))
    return f"ranks {listed}" + (f", ... ({len(members)} in all)" if len(members) > limit else "")


def _describe(collective: Collective) -> str:
    return f"{collective.kind} " + (
        f"among {len(collective.ranks)} ranks" if collective.root is None else f"with root {collective.root}"
    )


def _link(schedule: Schedule, hop: Hop) -> str:
    src, dst = map(schedule.topology.label, hop)
    return f"{src}->{dst}"
