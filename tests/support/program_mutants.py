"""Right programs with one thing wrong: what a checker of programs must reject, or show to be equivalent.

Each mutation stands for a mistake of a generator: an operation dropped, doubled or moved, offsets swapped or
off by one, another memory, rank or count; a dependency left out or pointed elsewhere, a flag not posted,
another peer, channel or code; one end of a sum left out, a signal or a wait on another channel, or relaxed,
another semaphore; a loop in other pieces, or for another length.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from arborcast.backends.programs.checking.check import check_program
from arborcast.backends.programs.interpreter import CALLS, Interpretation, interpret
from arborcast.backends.programs.limits import chunks_together
from arborcast.backends.programs.program import (
    Acquire,
    After,
    Code,
    Flush,
    GlobalProgram,
    Loop,
    Memory,
    Move,
    Operation,
    ProgramError,
    Release,
    Signal,
    Span,
    Step,
    ThreadBlock,
    Wait,
)


def interpret_all(program: GlobalProgram, seeds: Sequence[int], *, elements: int = 4) -> Interpretation:
    """Runs under several orders, in every way of calling that the program is for; the first that is wrong."""
    result = Interpretation(0)
    together = chunks_together(program)
    for seed in seeds:
        for in_place in (True, False):
            if program.in_place if in_place else program.out_of_place:
                result = interpret(
                    program,
                    in_place=in_place,
                    seed=seed,
                    elements=elements,
                    calls=CALLS if program.one_sided else 1,
                    # A chunk that does not fit a slot is gone through in several loops.
                    loops=1 + seed % 2 if together == 1 and not program.one_sided else 1,
                    together=together,
                )
                if not result.correct:
                    return result
    return result


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one mutant.

    Attributes:
        mutation: which mistake.
        rejected: the kinds of the checker's objections; empty where it has none.
        orders: random orders under which it was interpreted.
        wrong: whether one of them gave a wrong element or did not end.
    """

    mutation: str
    rejected: frozenset[str]
    orders: int
    wrong: bool

    @property
    def missed(self) -> bool:
        """Whether the checker passed what some order shows to be wrong."""
        return not self.rejected and self.wrong


def judge(mutation: str, mutant: GlobalProgram, orders: int) -> Outcome:
    """Ask the checker, and run the mutant under random orders."""
    verdict = check_program(mutant)
    try:
        # A thread of a one-sided block has every other two elements.
        wrong = not interpret_all(mutant, range(orders), elements=4 if mutant.one_sided else 2).correct
    except ProgramError:
        wrong = True
    return Outcome(mutation, verdict.kinds, orders, wrong)


def mutants(program: GlobalProgram, seed: int) -> Iterator[tuple[str, GlobalProgram]]:
    """Mutants of a program without end, each with the name of its mistake."""
    chance = random.Random(seed)
    alone = "double scratch" if program.one_sided else "connection"
    sorts = ("drop", "double", "reorder", "swap offsets", alone, *["change"] * 7)
    while True:
        sort = chance.choice(sorts)
        if sort == "double scratch":
            yield sort, replace(program, double_scratch=not program.double_scratch)
            continue
        rank = chance.randrange(program.ranks)
        blocks = list(program.parts[rank].blocks)
        number = chance.randrange(len(blocks))
        before = blocks[number]
        if sort == "connection":
            name, blocks[number] = _reconnected(before, program, chance)
        else:
            name, blocks[number] = _changed(sort, before, program, chance)
            if sort in {"drop", "double"} and not program.one_sided and chance.random() < 0.5:
                blocks = _renumbered(blocks, number, before)
        if blocks[number] != before:
            part = replace(program.parts[rank], blocks=tuple(blocks))
            yield name, replace(program, parts=(*program.parts[:rank], part, *program.parts[rank + 1 :]))


def _changed(
    sort: str, block: ThreadBlock, program: GlobalProgram, chance: random.Random
) -> tuple[str, ThreadBlock]:
    """One mistake in the operations of a block, or of one of its loops."""
    loops = [at for at, each in enumerate(block.operations) if isinstance(each, Loop)]
    inside = chance.choice(loops) if loops and chance.random() < 0.8 else None
    loop = None if inside is None else block.operations[inside]
    rows: list[Any] = list(loop.operations if isinstance(loop, Loop) else block.operations)
    if not rows:
        return sort, block
    at = chance.randrange(len(rows))
    other = min(len(rows) - 1, at + chance.randrange(1, 4))
    match sort:
        case "drop":
            del rows[at]
        case "double":
            rows.insert(at, rows[at])
        case "reorder":
            rows[at], rows[other] = rows[other], rows[at]
        case "swap offsets":
            one, two = (_spans(rows[place]) for place in (at, other))
            if one and two and one[-1].count == two[-1].count:
                rows[at] = _with_spans(rows[at], [*one[:-1], replace(one[-1], start=two[-1].start)])
                rows[other] = _with_spans(rows[other], [*two[:-1], replace(two[-1], start=one[-1].start)])
        case _:
            sort, rows[at] = _change(rows[at], block, program, chance)
    if inside is not None and isinstance(loop, Loop):
        turned = replace(loop, operations=tuple(rows))
        rows = [*block.operations[:inside], turned, *block.operations[inside + 1 :]]
    return sort, replace(block, operations=tuple(rows))


def _renumbered(blocks: list[ThreadBlock], number: int, before: ThreadBlock) -> list[ThreadBlock]:
    """Dependencies on steps behind the change follow them."""
    was, now = before.operations, blocks[number].operations
    shift = len(now) - len(was)
    at = next((at for at, pair in enumerate(zip(was, now, strict=False)) if pair[0] != pair[1]), len(now))

    def follow(after: After) -> After:
        moves = after.block == number and after.step >= at
        return After(after.block, max(0, after.step + shift)) if moves else after

    return [
        replace(
            block,
            operations=tuple(
                replace(step, after=tuple(map(follow, step.after)))
                for step in block.operations
                if isinstance(step, Step)
            ),
        )
        for block in blocks
    ]


def _reconnected(
    block: ThreadBlock, program: GlobalProgram, chance: random.Random
) -> tuple[str, ThreadBlock]:
    """Another peer or channel, of a block that has some."""
    peers = {"send": block.send, "receive": block.receive}
    ends = [name for name, peer in peers.items() if peer is not None]
    if not ends:
        return "none", block
    if chance.random() < 0.5:
        return "channel", replace(block, channel=chance.randrange(program.channels + 1))
    peers[chance.choice(ends)] = chance.randrange(program.ranks)
    return "peer", replace(block, **peers)  # type: ignore[arg-type]


def _change(  # noqa: PLR0911  (a table)
    operation: Operation, block: ThreadBlock, program: GlobalProgram, chance: random.Random
) -> tuple[str, Operation]:
    """One operation with another argument, and what that is called."""
    match operation:
        case Signal() | Wait() if chance.random() < 0.5:
            return "relaxed", replace(operation, relaxed=not operation.relaxed)
        case Signal(channels=channels) | Wait(channels=channels) | Flush(channels=channels):
            ends = block.connections
            alike = [at for at, end in enumerate(ends) if end.kind == ends[channels[0]].kind]
            return "channel", replace(operation, channels=(chance.choice(alike), *channels[1:]))
        case Acquire(semaphores=semaphores) | Release(semaphores=semaphores):
            most = 1 + max(semaphores)
            return "semaphore", replace(operation, semaphores=(chance.randrange(most), *semaphores[1:]))
        case Loop(chunks=chunks, piece_bytes=piece_bytes):
            longer = max(1, chunks + chance.choice((-1, 0, 1)))
            return "turns", replace(operation, chunks=longer, piece_bytes=max(1, piece_bytes // 2))
        case Step() if chance.random() < 0.5:
            return _change_step(operation, chance)
        case Step() | Move():
            return _change_spans(operation, program, chance)
        case _:
            return "same", operation


def _spans(operation: Operation) -> list[Span]:
    if isinstance(operation, Move):
        return [*operation.sources, *operation.targets]
    ends = (operation.source, operation.target) if isinstance(operation, Step) else ()
    return [span for span in ends if span is not None]


def _with_spans(operation: Step | Move, spans: list[Span]) -> Step | Move:
    if isinstance(operation, Step):
        return replace(
            operation,
            source=None if operation.source is None else spans[0],
            target=None if operation.target is None else spans[-1],
        )
    split = len(operation.sources)
    return replace(operation, sources=tuple(spans[:split]), targets=tuple(spans[split:]))


def _change_spans(
    operation: Step | Move, program: GlobalProgram, chance: random.Random
) -> tuple[str, Operation]:
    """Another place, memory, rank or count, or a summand less."""
    spans = _spans(operation)
    at = chance.randrange(len(spans))
    one = spans[at]
    name = chance.choice(("offset", "offset", "memory", "rank", "count", "end"))
    if name == "count":
        count = max(1, one.count + chance.choice((-1, 1)))
        spans = [replace(span, count=count) for span in spans]
    elif name == "memory" and not one.packets:
        spans[at] = replace(one, memory=chance.choice(list(Memory)))
    elif name == "rank" and one.rank is not None:
        spans[at] = replace(one, rank=chance.randrange(program.ranks))
    elif name == "end" and isinstance(operation, Move) and len(operation.sources) > 1:
        return name, replace(operation, sources=operation.sources[:1])
    else:
        name, spans[at] = "offset", replace(one, start=one.start + chance.choice((-1, 1, 1, 2, 3)))
    return name, _with_spans(operation, spans)


_NEIGHBOURS = {
    Code.RECEIVE_REDUCE_COPY: Code.RECEIVE,
    Code.RECEIVE_COPY_SEND: Code.RECEIVE,
    Code.RECEIVE_REDUCE_COPY_SEND: Code.RECEIVE_REDUCE_SEND,
    Code.RECEIVE_REDUCE_SEND: Code.RECEIVE_COPY_SEND,
    Code.RECEIVE: Code.RECEIVE_REDUCE_COPY,
    Code.COPY: Code.REDUCE,
}


def _change_step(step: Step, chance: random.Random) -> tuple[str, Operation]:
    """Another code, other dependencies, or a flag that is not posted."""
    name = chance.choice(("operation", "post nothing", "forget dependency", "wrong dependency"))
    at = chance.randrange(len(step.after)) if step.after else 0
    before, rest = step.after[:at], step.after[at + 1 :]
    if name == "post nothing":
        return name, replace(step, posts=False)
    if name == "operation" and step.code in _NEIGHBOURS:
        code, span = _NEIGHBOURS[step.code], step.target or step.source
        source, target = step.source or span, step.target or span
        return name, replace(
            step, code=code, source=source if code.reads else None, target=target if code.writes else None
        )
    if name == "forget dependency":
        return name, replace(step, after=(*before, *rest))
    if name == "wrong dependency" and step.after:
        field = chance.choice(("step", "block"))
        moved = max(0, getattr(step.after[at], field) + chance.choice((-1, 1)))
        return name, replace(step, after=(*before, replace(step.after[at], **{field: moved}), *rest))
    return name, step
