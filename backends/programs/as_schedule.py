"""A program that is a set of trees or of steps, as a schedule: to simulate, draw, compare and run it.

Messages, and what ranks put into each other's memory, become transfers of one chunk each, in steps that keep
to what a rank held when it was sent (`whereabouts`). Chunks that take the same way become one. What a program
does beyond that, such as keeping several sums of one chunk apart, a schedule cannot say; the verifier of
schedules has the last word.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from fractions import Fraction

from arborcast.backends.programs.checking.check import check_program, execute
from arborcast.backends.programs.checking.memory import buffers, given, wanted
from arborcast.backends.programs.program import Code, GlobalProgram, Memory, Move, ProgramError, Span, Step
from arborcast.backends.programs.traffic import collective_of, routes, switch_of
from arborcast.backends.programs.whereabouts import Moved, Value, Whereabouts, total
from arborcast.synth.collective import Kind
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Topology


def as_schedule(program: GlobalProgram, topology: Topology) -> Schedule:
    """The schedule of a correct program on a topology of as many ranks, verified.

    Raises:
        ProgramError: the program is not correct, or is no set of trees or steps, or ranks exchange messages
            that have no way to each other.
    """
    verdict = check_program(program, max_errors=1)
    if not verdict.correct:
        raise ProgramError(f"the program is not correct: {verdict.errors[0]}")
    program = program.unrolled()
    replayed = _Replay(program, topology)
    replayed.run()
    return put_together(program, topology, replayed.transfers())


def put_together(
    program: GlobalProgram, topology: Topology, parts: Mapping[int, tuple[Moved, ...]]
) -> Schedule:
    """The schedule of a program whose parts of the data are moved so, verified; its steps are not looked at.

    Raises:
        ProgramError: it is not correct, or ranks exchange messages that have no way to each other.
    """
    from arborcast import synth

    collective = collective_of(program, topology)
    exchanged = {(move.src, move.dst) for moved in parts.values() for move in moved}
    ways = routes(topology, (pair for pair in exchanged if max(pair) < topology.ranks))
    chunks: dict[tuple[int, int | None, tuple[Moved, ...]], int] = {}
    for part, moved in parts.items():
        key = *_ends(program, part, moved), moved
        chunks[key] = chunks.get(key, 0) + 1
    made = [
        Transfer(number, move.src, move.dst, move.step, move.adds, ways.get((move.src, move.dst), ())[1:-1])
        for number, (_, _, moved) in enumerate(chunks)
        for move in moved
    ]
    schedule = Schedule.build(
        topology,
        collective,
        Method("imported", settings=(("program", program.name),)),
        synth.bound(topology, collective.kind, root=collective.root or 0),
        [
            Chunk(Fraction(count, program.chunks), owner, target)
            for (owner, target, _), count in chunks.items()
        ],
        made,
    )
    checked = synth.verify(schedule, max_errors=1)
    if not checked.correct:
        raise ProgramError(f"the program is no set of trees or steps: as a schedule, {checked.errors[0]}")
    return schedule


class _Replay:
    """What stands in every chunk of memory while the program runs."""

    def __init__(self, program: GlobalProgram, topology: Topology) -> None:
        self._program = program
        self._topology = topology
        self._where = Whereabouts()
        self._layout = [buffers(program, rank, in_place=program.in_place) for rank in range(program.ranks)]
        self._held: dict[tuple[int, int, bool], Value | None] = {}
        for rank in range(program.ranks):
            for chunk, value in enumerate(given(program, rank)):
                if value is not None:
                    self._held[self._cell(rank, Span(Memory.INPUT, chunk), 0)] = self._where.give(
                        rank, value[0]
                    )

    def run(self) -> None:
        """All steps or moves, in an order in which they may end."""
        program = self._program
        sent: dict[tuple[int | None, int | None, int], deque[list[Value | None]]] = defaultdict(deque)
        for rank, block, operation in execute(program, in_place=program.in_place).done:
            if isinstance(operation, Move):
                for offset in range(operation.count):
                    self._move(rank, operation, offset)
                continue
            come = block.receive, rank, block.channel
            messages = sent[come].popleft() if operation.code.receives else []
            passed = self._step(rank, operation, messages)
            if operation.code.sends:
                sent[rank, block.send, block.channel].append(
                    [self._where.leave(rank, result) for result in passed]
                )

    def _step(self, rank: int, step: Step, messages: Sequence[Value | None]) -> list[Value | None]:
        """What a step makes of a message: it writes that, or sends it."""
        results = []
        for offset in range(step.count):
            read = [self._at(rank, step.source, offset)] if step.code.reads and step.source else []
            if step.code is Code.REDUCE and step.target is not None:
                read.append(self._at(rank, step.target, offset))
            results.append(total([*read, *messages[offset : offset + 1]]))
        for offset, result in enumerate(results) if step.target is not None else ():
            self._held[self._cell(rank, step.target, offset)] = result  # type: ignore[arg-type]
        return results

    def transfers(self) -> dict[int, tuple[Moved, ...]]:
        """Of each part of the data, once outputs are read."""
        for rank in range(self._program.ranks):
            for chunk, value in enumerate(wanted(self._program, rank)):
                held = self._at(rank, Span(Memory.OUTPUT, chunk), 0)
                if value is not None and held is not None:
                    self._where.settle(rank, held)
        return self._where.transfers()

    def _move(self, rank: int, move: Move, offset: int) -> None:
        near = {None} if move.switch else {None, rank}
        read = []
        for span in move.sources:
            owner = rank if span.rank is None else span.rank
            value = self._at(owner, span, offset)
            # Messages in its own memory as they are; of others what they then have.
            read.append(value if span.rank in near else self._where.leave(owner, value))
        far = [span for span in move.targets if span.rank not in near]
        adds = move.switch and move.sources[0].rank is not None
        value = self._by_switch(move.sources, read) if adds else total(read)
        message = self._where.leave(rank, value) if far else None
        if move.switch and far:
            message = self._by_switch(far, [message])
            if message is not None and any(span.rank == rank for span in far):
                self._where.settle(rank, message)  # it comes back, whether it is read or not
        for span in move.targets:
            owner = rank if span.rank is None else span.rank
            self._held[self._cell(owner, span, offset)] = message if span in far else value

    def _by_switch(self, spans: Sequence[Span], values: Sequence[Value | None]) -> Value | None:
        """What a switch passes on of the sum of some messages."""
        switch = switch_of(self._topology, (span.rank or 0 for span in spans))
        return self._where.leave(switch, total(values))

    def _at(self, rank: int, span: Span, offset: int) -> Value | None:
        return self._held.get(self._cell(rank, span, offset))

    def _cell(self, rank: int, span: Span, offset: int) -> tuple[int, int, bool]:
        return rank, self._layout[rank].start[span.memory] + span.start + offset, span.packets


def _ends(program: GlobalProgram, part: int, moves: Sequence[Moved]) -> tuple[int, int | None]:
    """Owner and target of a part of the data."""
    block = max(1, program.chunks // program.ranks)
    root = program.root or 0
    match program.kind:
        case Kind.BROADCAST | Kind.REDUCE:
            return root, None
        case Kind.ALLGATHER | Kind.REDUCE_SCATTER:
            return part // block, None
        case Kind.GATHER:
            return part // block, root
        case Kind.SCATTER:
            return root, part // block
        case Kind.ALLTOALL:
            return part // program.chunks, part % program.chunks // block
        case _:
            return _turning(moves, program.ranks), None


def _turning(moves: Sequence[Moved], ranks: int) -> int:
    """Where an allreduce's chunk is whole first: the rank that adds last, or that gets a switch's sum."""
    last = max((move for move in moves if move.adds), default=moves[0])
    while last.dst >= ranks:
        last = min(move for move in moves if move.src == last.dst and move.step > last.step)
    return last.dst
