"""The independent checker of programs for other runtimes: everything that a file can be wrong in."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

from arborcast.backends.programs.checking import one_sided, structure
from arborcast.backends.programs.checking.execution import Execution, Outcome
from arborcast.backends.programs.checking.memory import Values
from arborcast.backends.programs.checking.one_sided_run import OneSidedExecution
from arborcast.backends.programs.checking.two_sided_run import TwoSidedExecution
from arborcast.backends.programs.checking.verdict import ProgramVerdict, TraceLine
from arborcast.backends.programs.program import GlobalProgram, Move, ProgramError, Step

MOST_UNROLLED = 1 << 20
"""Operations of all turns of loops."""

CUTS = ((2, Fraction(1)), (3, Fraction(2)))
"""Of programs with loops, besides each loop once: into how many parts a chunk is cut, and the least piece."""


def check_program(program: GlobalProgram, *, max_errors: int = 20) -> ProgramVerdict:
    """Whether every execution of a program that its runtime allows does what the collective asks.

    Limits, ends of buffers, both ends of every message or signal; then that it ends with the FIFOs there are,
    that no two accesses of a chunk are unordered, and that each output has each contribution once. Calls in
    place and others are checked as the program says that it serves them. Of one-sided programs several calls
    in a row are looked at, as nothing but the program itself keeps the ranks together: a rank may be in the
    next call, or not yet in this one, when another writes its memory. With two halves of scratch that takes
    three calls, else two.

    Args:
        program: of two-sided steps, or of moves, signals, waits, semaphores and barriers.
        max_errors: how many objections to spell out.

    Returns:
        The verdict; wrong programs are an answer, not an exception.

    Loops are looked at as they are for large and for small pieces, several of them and uneven ones.

    Takes time that grows with operations times blocks of all ranks, and with chunks.

    Examples:
        >>> program = backends.export_program(synth.solve(topologies.load("ring:4"), "allreduce"))
        >>> backends.check_program(program).correct
        True
    """
    if program.loops:
        if beyond := tuple(one_sided.beyond_turns(program)):
            return ProgramVerdict(beyond[:max_errors], frozenset({"buffer"}), program.notes)
        piece_bytes = math.gcd(*(loop.piece_bytes for loop in program.loops))
        cuts = (_unrolled(program, parts, piece_bytes / share) for parts, share in CUTS)
        verdicts = (check_program(cut, max_errors=max_errors) for cut in cuts)
        verdict = next((it for it in verdicts if not it.correct), None)
        return verdict or check_program(program.unrolled(), max_errors=max_errors)
    found = [("fault", line) for line in program.faults]
    if not program.in_place and not program.out_of_place:
        found.append(("fault", "neither for calls in place nor for others: it is never chosen"))
    found += one_sided.objections(program) if program.one_sided else structure.objections(program)
    trace: tuple[TraceLine, ...] = ()
    circle = False
    kinds = {kind for kind, _ in found}
    if not kinds & ({"buffer", "shared"} if program.one_sided else {"shared"}):
        for in_place in (True, False):
            if not (program.in_place if in_place else program.out_of_place):
                continue
            outcome, lines = _run(program, in_place, moves=not kinds & {"buffer", "message"})
            found += lines
            if not trace:
                trace, circle = outcome.trace, outcome.circle
            if outcome.stuck:
                break  # who waits for whom does not depend on where buffers are
    errors = tuple(line for _, line in found[:max_errors])
    if len(found) > max_errors:
        errors += (f"and {len(found) - max_errors} more",)
    kinds |= {kind for kind, _ in found}
    return ProgramVerdict(errors, frozenset(kinds), program.notes, trace, circle, _messages(program))


def _unrolled(program: GlobalProgram, finer: int, part_bytes: Fraction) -> GlobalProgram:
    turns = [-(-loop.chunks * finer // loop.parts_of_piece(finer, part_bytes)) for loop in program.loops]
    count = sum(turn * len(loop.operations) for turn, loop in zip(turns, program.loops, strict=True))
    if count > MOST_UNROLLED:
        raise ProgramError(
            f"{program.name}: its loops do {count} operations, at most {MOST_UNROLLED} are checked"
        )
    return program.unrolled(finer, part_bytes)


def follow(program: GlobalProgram, values: Values) -> None:
    """Follow other values than contributions through one call of a correct program."""
    execution: Execution
    if program.one_sided:
        execution = OneSidedExecution(program.unrolled(), in_place=program.in_place, values=values)
    else:
        execution = TwoSidedExecution(program, in_place=program.in_place, values=values)
    execution.run()


def _run(program: GlobalProgram, in_place: bool, moves: bool) -> tuple[Outcome, list[tuple[str, str]]]:
    """What happens, and the kinds of errors with their lines; `moves`: whether to look at data, too."""
    mode = "in place" if in_place else "out of place"
    if not program.one_sided:
        outcome = TwoSidedExecution(program, in_place=in_place, moves=moves).run()
        return outcome, list(_lines(outcome, mode, values=moves and not outcome.stuck))
    outcome = OneSidedExecution(program, in_place=in_place).run()
    lines = list(_lines(outcome, mode))
    if lines:
        # What remains where relaxed signals count as full ones, and what only these order.
        again = OneSidedExecution(program, in_place=in_place, relaxed_orders=True).run()
        full = list(_lines(again, mode))
        relaxed = [line for line in lines if line not in full]
        if relaxed and len(full) < len(lines):
            why = "signals are there, but relaxed ones order no memory"
            lines = [*full, ("relaxed", f"{relaxed[0][1]}; {why}")]
    return outcome, lines


def _lines(outcome: Outcome, mode: str, *, values: bool = True) -> Iterator[tuple[str, str]]:
    yield from (("deadlock", line) for line in outcome.stuck)
    for kind, lines in (("race", outcome.races), ("call", outcome.early), ("value", outcome.wrong)):
        yield from ((kind, f"{mode}: {line}") for line in lines if values)


def _messages(program: GlobalProgram) -> dict[tuple[int, int], Fraction]:
    """The share of the buffer that passes from each rank to each other; what switches do is not counted."""
    chunks: Counter[tuple[int, int]] = Counter()
    for rank, number, _, operation in program.operations:
        send = program.parts[rank].blocks[number].send
        if isinstance(operation, Step) and operation.code.sends and send is not None:
            chunks[rank, send] += operation.count
        elif isinstance(operation, Move):
            for pair in operation.between(rank):
                chunks[pair] += operation.count
    return {pair: Fraction(count, program.chunks) for pair, count in chunks.items() if count}
