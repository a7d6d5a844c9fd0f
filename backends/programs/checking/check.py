"""The independent checker of programs for other runtimes: everything that a file can be wrong in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction

from arborcast.backends.programs.checking.one_sided import check_one_sided
from arborcast.backends.programs.checking.order import Order, ranks_at_a_time
from arborcast.backends.programs.checking.progress import Progress, run
from arborcast.backends.programs.checking.replay import Race, replay
from arborcast.backends.programs.checking.structure import (
    Flat,
    check_buffers,
    check_limits,
    check_messages,
    check_shared,
    flatten,
)
from arborcast.backends.programs.checking.verdict import ProgramVerdict, Wait
from arborcast.backends.programs.limits import MSCCL, Limits, chunks_together, largest_bytes
from arborcast.backends.programs.program import GlobalProgram


def check_program(program: GlobalProgram, *, limits: Limits = MSCCL, max_errors: int = 20) -> ProgramVerdict:
    """Whether every execution of a program that its runtime allows does what the collective asks.

    Limits, ends of buffers, both ends of every message; then that it ends with the FIFOs there are, that no
    two accesses of a chunk are unordered, and that each output has each contribution once. Calls in place and
    others are checked as the program says that it serves them.

    Args:
        program: two-sided, or one-sided, for which see `one_sided`.
        limits: of the runtime.
        max_errors: how many objections to spell out.

    Returns:
        The verdict; wrong programs are an answer, not an exception.

    Takes time that grows with steps times blocks of a rank, and with chunks.
    """
    if program.one_sided:
        return check_one_sided(program, max_errors=max_errors)
    return _Check(program, limits, max_errors).verdict()


class _Check:
    def __init__(self, program: GlobalProgram, limits: Limits, most: int) -> None:
        self._program = program
        self._limits = limits
        self._most = most
        self._errors: list[str] = []
        self._kinds: set[str] = set()
        self._left_out = 0
        self._notes = list(program.notes)
        self._trace: tuple[Wait, ...] = ()
        self._circle = False

    def verdict(self) -> ProgramVerdict:
        program = self._program
        self._add("fault", program.faults)
        flat = flatten(program)
        self._add("limit", check_limits(program, self._limits))
        self._add("buffer", check_buffers(program))
        if not program.in_place and not program.out_of_place:
            self._add("fault", ["neither for calls in place nor for others: it is never chosen"])
        self._add("shared", check_shared(program))
        if "shared" not in self._kinds:
            self._run(flat)
        errors = self._errors
        if self._left_out:
            errors = [*errors, f"and {self._left_out} more"]
        return ProgramVerdict(
            tuple(errors),
            frozenset(self._kinds),
            tuple(self._notes),
            self._trace,
            self._circle,
            _messages(program, flat),
        )

    def _run(self, flat: Flat) -> None:
        self._add("message", check_messages(flat))
        together = chunks_together(self._program)
        progress = run(flat, together)
        self._deadlock(flat, progress, together)
        if not self._kinds & {"buffer", "message", "deadlock"}:
            self._values(flat, progress)

    def _add(self, kind: str, lines: Iterable[str]) -> None:
        for line in lines:
            self._kinds.add(kind)
            if len(self._errors) < self._most:
                self._errors.append(line)
            else:
                self._left_out += 1

    def _deadlock(self, flat: Flat, progress: Progress, together: int) -> None:
        if not progress.stuck:
            return
        trace = progress.trace()
        texts = [f"{flat.name(waiting.step)} {waiting.reason}" for waiting in trace]
        last = trace[-1]
        if last.on is not None and all(waiting.block != last.on for waiting in progress.stuck):
            rank, block = flat.blocks[last.on]
            texts[-1] += f", and rank {rank} block {block} is at its end"
        when = self._hangs_when(flat, together)
        self._add("deadlock", [f"hangs{when}, {len(progress.stuck)} blocks wait: {'; '.join(texts)}"])
        self._circle = last.on == trace[0].block
        self._trace = tuple(
            Wait(*flat.blocks[waiting.block], waiting.step - flat.first[waiting.block], text)
            for waiting, text in zip(trace, texts, strict=True)
        )

    def _hangs_when(self, flat: Flat, together: int) -> str:
        """From which size on, where smaller ones end: messages of more chunks need less room."""
        most = max((step.count for step in flat.steps), default=1)
        ends = [chunks for chunks in range(together + 1, most + 1) if not run(flat, chunks).stuck][:1]
        if not ends:
            return ""
        size = largest_bytes(self._program, ends[0])
        return f" above {size} bytes, where less than {ends[0]} chunks fit a message"

    def _values(self, flat: Flat, progress: Progress) -> None:
        program = self._program
        step = ranks_at_a_time(flat)
        held: dict[int, Order] = {}

        def order_of(rank: int) -> Order:
            batch = rank // step
            if batch not in held:
                held.clear()
                held[batch] = Order(flat, progress.order, range(batch * step, (batch + 1) * step))
            return held[batch]

        for in_place in (True, False):
            if not (program.in_place if in_place else program.out_of_place):
                continue
            mode = "in place" if in_place else "out of place"
            found = replay(program, flat, progress.order, order_of, in_place=in_place)
            self._add("race", (f"{mode}: {_describe(flat, race)}" for race in found.races))
            if found.races and not self._trace:
                self._trace = _pair(flat, found.races[0])
            self._add("value", (f"{mode}: {line}" for line in found.wrong))
            self._add(
                "value",
                (f"{mode}: {flat.name(index)} writes the caller's input" for index in found.clobbered),
            )


def _describe(flat: Flat, race: Race) -> str:
    if race.first == race.second:
        return f"{flat.name(race.first)} reads what it writes at another place: {race.cell}"
    return f"nothing orders {flat.name(race.first)} and {flat.name(race.second)}: both touch {race.cell}"


def _pair(flat: Flat, race: Race) -> tuple[Wait, ...]:
    return tuple(
        Wait(*flat.blocks[flat.block[step]], step - flat.first[flat.block[step]], flat.name(step))
        for step in dict.fromkeys((race.first, race.second))
    )


def _messages(program: GlobalProgram, flat: Flat) -> dict[tuple[int, int], Fraction]:
    """The share of the buffer that each rank sends to each other."""
    chunks: Counter[tuple[int, int]] = Counter()
    for (src, dst, _), sends in flat.sends.items():
        chunks[src, dst] += sum(flat.steps[step].count for step in sends)
    return {pair: Fraction(count, program.chunks) for pair, count in chunks.items() if count}
