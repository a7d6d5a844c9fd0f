"""Right one-sided programs with one thing wrong, as `program_mutants` has them of two-sided ones.

An operation dropped, doubled or moved; a signal or a wait on another channel, or relaxed; a move from or to
another place, memory or rank, of another count; one end of a sum left out; another semaphore, or another
initial value; a loop in other pieces, or for another length.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from arborcast.backends.programs.checking.check import check_program
from arborcast.backends.programs.interpreter import interpret
from arborcast.backends.programs.program import (
    Acquire,
    Connection,
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
    Wait,
)
from tests.support.program_mutants import Outcome


def mutants(program: GlobalProgram, seed: int) -> Iterator[tuple[str, GlobalProgram]]:
    """Mutants of a program without end, each with the name of its mistake."""
    chance = random.Random(seed)
    while True:
        rank = chance.randrange(program.ranks)
        part = program.parts[rank]
        number = chance.randrange(len(part.blocks))
        block = part.blocks[number]
        name = chance.choice(("drop", "drop", "double", "swap", "swap", *["change"] * 6, "double scratch"))
        changed = program
        if name == "double scratch":
            changed = replace(program, double_scratch=not program.double_scratch)
        else:
            loops = [at for at, each in enumerate(block.operations) if isinstance(each, Loop)]
            inside = chance.choice(loops) if loops and chance.random() < 0.8 else None
            loop = None if inside is None else block.operations[inside]
            rows: list[Any] = list(loop.operations if isinstance(loop, Loop) else block.operations)
            at = chance.randrange(len(rows))
            if name == "drop":
                del rows[at]
            elif name == "double":
                rows.insert(at, rows[at])
            elif name == "swap":
                other = min(len(rows) - 1, at + chance.randrange(1, 4))
                rows[at], rows[other] = rows[other], rows[at]
            else:
                name, rows[at] = _changed(rows[at], block.connections, program, chance)
            if inside is not None and isinstance(loop, Loop):
                turned = replace(loop, operations=tuple(rows))
                rows = [*block.operations[:inside], turned, *block.operations[inside + 1 :]]
            blocks = (
                *part.blocks[:number],
                replace(block, operations=tuple(rows)),
                *part.blocks[number + 1 :],
            )
            parts = (*program.parts[:rank], replace(part, blocks=blocks), *program.parts[rank + 1 :])
            changed = replace(program, parts=parts)
        if changed != program:
            yield name, changed


def judge(mutation: str, mutant: GlobalProgram, orders: int) -> Outcome:
    """Ask the checker, and run the mutant under random orders."""
    verdict = check_program(mutant)
    wrong = False
    for seed in range(orders):
        try:
            wrong = not interpret(mutant, in_place=mutant.in_place, seed=seed, calls=3).correct
        except (ProgramError, ValueError, IndexError):  # beyond a buffer, or of different lengths
            wrong = True
        if wrong:
            break
    return Outcome(mutation, verdict.kinds, orders, wrong)


def _changed(
    operation: Operation, ends: tuple[Connection, ...], program: GlobalProgram, chance: random.Random
) -> tuple[str, Operation]:
    """One operation with another argument, and what that is called."""
    match operation:
        case Signal() | Wait() if chance.random() < 0.5:
            return "relaxed", replace(operation, relaxed=not operation.relaxed)
        case Signal(channels=channels) | Wait(channels=channels) | Flush(channels=channels):
            kinds = [at for at, end in enumerate(ends) if end.kind == ends[channels[0]].kind]
            return "channel", replace(operation, channels=(chance.choice(kinds), *channels[1:]))
        case Acquire(semaphores=semaphores) | Release(semaphores=semaphores):
            most = 1 + max(semaphores)
            return "semaphore", replace(operation, semaphores=(chance.randrange(most), *semaphores[1:]))
        case Move():
            return _moved(operation, program, chance)
        case Loop(chunks=chunks, piece_bytes=piece_bytes):
            longer = max(1, chunks + chance.choice((-1, 0, 1)))
            return "turns", replace(operation, chunks=longer, piece_bytes=max(1, piece_bytes // 2))
        case _:
            return "same", operation


def _moved(move: Move, program: GlobalProgram, chance: random.Random) -> tuple[str, Move]:
    name = chance.choice(("offset", "memory", "rank", "count", "end"))
    spans = [*move.sources, *move.targets]
    at = chance.randrange(len(spans))
    if name == "count":
        count = max(1, move.count + chance.choice((-1, 1)))
        spans = [replace(span, count=count) for span in spans]
    elif name == "end" and len(spans) > 2:
        return name, replace(move, sources=move.sources[:1]) if len(move.sources) > 1 else move
    else:
        spans[at] = _span(name, spans[at], program, chance)
    split = len(move.sources)
    return name, replace(move, sources=tuple(spans[:split]), targets=tuple(spans[split:]))


def _span(name: str, span: Span, program: GlobalProgram, chance: random.Random) -> Span:
    if name == "memory" and not span.packets:
        return replace(span, memory=chance.choice(list(Memory)))
    if name == "rank" and span.rank is not None:
        return replace(span, rank=chance.randrange(program.ranks))
    return replace(span, start=max(0, span.start + chance.choice((-1, 1, 2))))
