"""Checks how a collective that was broken off is to be finished: a replay from what lies where.

Shares no code with the planner. Every element must be in one part of one lot; ranks begin with sums that lie
there, none counted twice; transfers pass links that are left; in the end every rank holds what the collective
asks of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from arborcast.synth.schedule import Transfer
from arborcast.synth.unfinished import Finish
from arborcast.synth.verification.replay import Errors, mask_of, replay_chunk


class _Span(Protocol):
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


def verify_finish(finish: Finish, *, max_errors: int = 20) -> tuple[str, ...]:
    """What there is to object to, a line each; nothing where the finish is right.

    Time is linear in the number of transfers and of lots times ranks.
    """
    errors = Errors(max_errors)
    state = finish.state
    for chunk, length in enumerate(state.lengths):
        _check_tiling(f"chunk {chunk}", [it for it in state.lots if it.chunk == chunk], 0, length, errors)
    parts_of: list[list[_Span]] = [[] for _ in state.lots]
    of_part: list[list[Transfer]] = [[] for _ in finish.parts]
    for part in finish.parts:
        parts_of[part.lot].append(part)
    for number, lot in enumerate(state.lots):
        _check_tiling(f"lot {number}", parts_of[number], lot.start, lot.stop, errors)
    for index, transfer in enumerate(finish.transfers):
        _check_way(finish, index, transfer, errors)
        of_part[transfer.chunk].append(transfer)
    everyone = mask_of(state.collective.ranks)
    for index, part in enumerate(finish.parts):
        begun = _begun_with(finish, index, errors)
        whose, moves = state.chunks[state.lots[part.lot].chunk], of_part[index]
        replay_chunk(index, whose, moves, finish.topology, state.collective, everyone, errors, begun)
    return errors.all()


def _check_tiling(what: str, spans: Sequence[_Span], start: int, stop: int, errors: Errors) -> None:
    at = start
    for span in sorted(spans, key=lambda span: span.start):
        if span.start != at or span.stop <= span.start:
            errors.add(f"{what}: element {at} must begin what comes next, got {span.start}..{span.stop}")
            return
        at = span.stop
    if at != stop:
        errors.add(f"{what}: must be covered up to element {stop}, is up to {at}")


def _check_way(finish: Finish, index: int, transfer: Transfer, errors: Errors) -> None:
    if (transfer.src, transfer.dst) in finish.closed or (transfer.dst, transfer.src) in finish.closed:
        errors.add(f"transfer {index}: ranks {transfer.src} and {transfer.dst} cannot reach each other")
    for hop in transfer.hops:
        if hop not in finish.topology.bandwidth:
            src, dst = map(finish.topology.label, hop)
            errors.add(f"transfer {index}: there is no link {src}->{dst}")


def _begun_with(finish: Finish, index: int, errors: Errors) -> dict[int, int]:
    """What each rank begins a part with, added up; objections where it does not lie there."""
    part = finish.parts[index]
    held = finish.state.lots[part.lot].held
    begun = {}
    for rank, masks in part.used.items():
        total = 0
        for mask in masks:
            if mask not in held.get(rank, ()):
                errors.add(
                    f"part {index}: rank {rank} begins with the sum {mask:b}, which does not lie there"
                )
            if total & mask:
                errors.add(f"part {index}: rank {rank} begins with contributions {total & mask:b} twice")
            total |= mask
        begun[rank] = total
    return begun
