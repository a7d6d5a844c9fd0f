"""A schedule played step by step with sets of contributors, and its links counted: what "verified" means."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise

from arborcast.synth.collective import Kind
from arborcast.synth.schedule import Schedule

ROUTED = {Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL}
SUMS = {Kind.REDUCE, Kind.REDUCE_SCATTER, Kind.ALLREDUCE}


def objections(schedule: Schedule) -> list[str]:
    """What is wrong with a schedule of a named kind; nothing where it does what it says."""
    return [*_wrong_blocks(schedule), *_wrong_ends(schedule), *_wrong_rate(schedule)]


def _wrong_blocks(schedule: Schedule) -> list[str]:
    """All blocks there, each in full."""
    kind, ranks, root = schedule.collective.kind, schedule.collective.ranks, schedule.collective.root
    found: Counter[tuple[int | None, int | None]] = Counter()
    for chunk in schedule.chunks:
        owner = None if kind is Kind.ALLREDUCE else chunk.owner
        found[owner, chunk.target if kind in ROUTED else None] += chunk.share  # type: ignore[assignment]
    whole, share = Fraction(1), Fraction(1, len(ranks))
    wanted = {
        Kind.BROADCAST: {(root, None): whole},
        Kind.REDUCE: {(root, None): whole},
        Kind.ALLREDUCE: {(None, None): whole},
        Kind.ALLGATHER: {(rank, None): share for rank in ranks},
        Kind.REDUCE_SCATTER: {(rank, None): share for rank in ranks},
        Kind.GATHER: {(rank, root): share for rank in ranks if rank != root},
        Kind.SCATTER: {(root, rank): share for rank in ranks if rank != root},
        Kind.ALLTOALL: {(src, dst): share for src in ranks for dst in ranks if src != dst},
    }[kind]
    return [] if found == wanted else [f"blocks {dict(found)}, wanted {wanted}"]


def _wrong_ends(schedule: Schedule) -> list[str]:
    kind, ranks = schedule.collective.kind, schedule.collective.ranks
    held: dict[tuple[int, int], Counter[int]] = {}
    for index, chunk in enumerate(schedule.chunks):
        for rank in range(schedule.topology.holders):
            mine = rank in ranks if kind in SUMS else rank == chunk.owner
            held[index, rank] = Counter([rank if kind in SUMS else chunk.owner]) if mine else Counter()
    for step in sorted({transfer.step for transfer in schedule.transfers}):
        before = {place: Counter(has) for place, has in held.items()}
        for transfer in schedule.transfers:
            if transfer.step == step:
                sent, there = before[transfer.chunk, transfer.src], (transfer.chunk, transfer.dst)
                if not sent:
                    return [f"step {step}: rank {transfer.src} sends chunk {transfer.chunk}, which it lacks"]
                held[there] = held[there] + sent if transfer.reduce else Counter(sent)
    wrong = []
    for index, chunk in enumerate(schedule.chunks):
        everyone = Counter(ranks) if kind in SUMS else Counter([chunk.owner])
        everywhere = {Kind.BROADCAST, Kind.ALLGATHER, Kind.ALLREDUCE}
        at = ranks if kind in everywhere else [chunk.target if kind in ROUTED else chunk.owner]
        wrong += [
            f"chunk {index} at {rank}: {held[index, rank]}" for rank in at if held[index, rank] != everyone
        ]
    return wrong


def _wrong_rate(schedule: Schedule) -> list[str]:
    bandwidth = schedule.topology.bandwidth
    load: Counter[tuple[int, int]] = Counter()
    of_step: Counter[tuple[int, tuple[int, int]]] = Counter()
    for transfer in schedule.transfers:
        for hop in pairwise((transfer.src, *transfer.via, transfer.dst)):
            if hop not in bandwidth:
                return [f"no link {hop}"]
            load[hop] += schedule.chunks[transfer.chunk].share  # type: ignore[assignment]
            of_step[transfer.step, hop] += 1
    if schedule.rounds is None:
        rate = 1 / max(Fraction(share) / bandwidth[hop] for hop, share in load.items())
    else:
        unit = schedule.unit or schedule.topology.bandwidth_unit
        over = [
            key for key, sent in of_step.items() if sent > schedule.rounds[key[0]] * bandwidth[key[1]] / unit
        ]
        if over:
            return [f"step and link {over[0]} are too full"]
        rate = unit / (sum(schedule.rounds) * schedule.chunks[0].share)
    return [] if rate == schedule.rate else [f"rate {schedule.rate}, counted {rate}"]
