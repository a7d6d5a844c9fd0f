"""What can be said of a one-sided program without running it: ends of buffers, signals, semaphores."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from arborcast.backends.programs.checking.memory import beyond, sizes, undivided
from arborcast.backends.programs.program import (
    Acquire,
    Barrier,
    Counted,
    GlobalProgram,
    Loop,
    Memory,
    Move,
    Release,
    Step,
)
from arborcast.synth.nccl_protocol import Protocol


def objections(program: GlobalProgram) -> list[tuple[str, str]]:
    """What is wrong, each with its kind: buffer, shared, or message (counts that do not come out even)."""
    return [
        *(("buffer", line) for line in _beyond_buffers(program)),
        *(("message", line) for line in _uneven(program)),
        *(("shared", line) for line in _shared(program)),
    ]


def beyond_turns(program: GlobalProgram) -> Iterator[str]:
    """Moves in loops that are not as long as what the turns are counted by: the last one would go beyond."""
    for rank, number, place, loop in program.operations:
        if not isinstance(loop, Loop):
            continue
        for each in loop.operations:
            if isinstance(each, Move) and not each.packets and each.count != loop.chunks:
                where = f"rank {rank} block {number} operation {place} ({each})"
                yield f"{where}: {each.count} chunks in a loop over {loop.chunks}"


def _beyond_buffers(program: GlobalProgram) -> Iterator[str]:  # noqa: PLR0912  (one pass, one rule a branch)
    """Moves that reach beyond a buffer, and packets where they have no room."""
    if wrong := undivided(program):
        yield wrong
        return
    size = [sizes(program, rank) for rank in range(program.ranks)]
    plain: list[int] = [0] * program.ranks
    packets: list[int | None] = [None] * program.ranks
    for rank, number, place, operation in program.operations:
        where = f"rank {rank} block {number} operation {place} ({operation})"
        if isinstance(operation, Step):
            yield f"rank {rank} block {number} operation {place}: {operation} is two-sided"
        if not isinstance(operation, Move):
            continue
        for span in (*operation.sources, *operation.targets):
            owner = rank if span.rank is None else span.rank
            if not 0 <= owner < program.ranks:
                yield f"{where}: there are {program.ranks} ranks"
            elif span.count < 1 or span.count != operation.count:
                yield f"{where}: {span} has not the {operation.count} chunks of the first source"
            elif wrong := beyond(span, size[owner][span.memory]):
                yield f"{where}: {wrong}"
            elif span.packets:
                if span.memory is not Memory.SCRATCH or program.protocol is Protocol.SIMPLE:
                    yield f"{where}: packets take twice the room, which only scratch of protocol LL has"
                first = packets[owner]
                packets[owner] = span.start if first is None else min(first, span.start)
            elif span.memory is Memory.SCRATCH:
                plain[owner] = max(plain[owner], span.start + span.count)
    for rank, (last, first) in enumerate(zip(plain, packets, strict=True)):
        if first is not None and last > 2 * first:
            yield (
                f"rank {rank}: data in scratch reach to chunk {last - 1}, where packets from "
                f"chunk {first} on "
                f"have their room, which begins at chunk {2 * first}"
            )


def _uneven(program: GlobalProgram) -> Iterator[str]:
    """Signals without waits or the other way round, and semaphores that end otherwise than they began."""
    posted: Counter[Counted] = Counter()
    taken: Counter[Counted] = Counter()
    for rank, number, _, operation in program.operations:
        block = program.parts[rank].blocks[number]
        posted.update(block.posts(rank, operation))
        taken.update(block.takes(rank, operation))
    for key in sorted(posted.keys() | taken.keys(), key=lambda key: (len(key) == 2, key)):
        if posted[key] == taken[key]:
            continue
        if len(key) == 2:
            yield (
                f"rank {key[0]}: semaphore {key[1]} is released {posted[key]} times and "
                f"acquired {taken[key]} times; its value goes on from call to call"
            )
        else:
            yield (
                f"rank {key[0]} to rank {key[1]}, {key[2]} channel {key[3]}: {posted[key]} signals, "
                f"{taken[key]} waits; counts go on from call to call"
            )


def _shared(program: GlobalProgram) -> Iterator[str]:
    """What several blocks wait for, so that timing says who gets it; barriers that are not for all."""
    takers: dict[Counted, set[int]] = defaultdict(set)
    at_barrier: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, number, place, operation in program.operations:
        for key in program.parts[rank].blocks[number].takes(rank, operation):
            takers[key].add(number)
        if isinstance(operation, (Acquire, Release)):
            known = len(program.parts[rank].semaphores)
            for semaphore in operation.semaphores:
                if not 0 <= semaphore < known:
                    where = f"rank {rank} block {number} operation {place}"
                    yield f"{where}: semaphore {semaphore}, there are {known}"
        elif isinstance(operation, Barrier):
            at_barrier[rank, operation.number][number].append(operation.blocks)
    for key, blocks in sorted(takers.items(), key=lambda pair: len(pair[0]) == 2):
        if len(blocks) > 1 and len(key) == 2:
            named = f"blocks {_some(blocks)} acquire semaphore {key[1]}"
            yield f"rank {key[0]}: {named}; who gets it depends on timing"
        elif len(blocks) > 1:
            named = f"{key[2]} channel {key[3]} to rank {key[0]}"
            yield f"rank {key[1]}: blocks {_some(blocks)} wait on {named}, which counts once"
    for (rank, barrier), uses in at_barrier.items():
        counts = {count for blocks in uses.values() for count in blocks}
        if counts != {len(uses)} or len({len(blocks) for blocks in uses.values()}) > 1:
            yield (
                f"rank {rank}: barrier {barrier} is for {_some(counts)} blocks, and blocks "
                f"{_some(uses)} come "
                f"{_some(len(blocks) for blocks in uses.values())} times"
            )


def _some(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(numbers))[:8]))
