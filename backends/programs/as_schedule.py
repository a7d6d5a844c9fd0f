"""A program that is a set of trees or of steps, as a schedule: to simulate, draw, compare and run it.

Messages become transfers of one chunk each, in steps that keep to what a rank held when it sent. Chunks that
take the same way become one. What a program does beyond that, such as keeping several sums of one chunk
apart, a schedule cannot say; the verifier of schedules has the last word.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

from arborcast.backends.programs.checking.check import check_program
from arborcast.backends.programs.checking.progress import run
from arborcast.backends.programs.checking.structure import Flat, flatten
from arborcast.backends.programs.limits import chunks_together
from arborcast.backends.programs.program import GlobalProgram, Memory, ProgramError, Span
from arborcast.backends.programs.traffic import collective_of, routes
from arborcast.synth.collective import Kind
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Topology


def as_schedule(program: GlobalProgram, topology: Topology) -> Schedule:
    """The schedule of a correct program on a topology of as many ranks, verified.

    Raises:
        ProgramError: the program is not correct, or is no set of trees or steps, or ranks exchange messages
            that have no way to each other.
    """
    from arborcast import synth

    verdict = check_program(program, max_errors=1)
    if not verdict.correct:
        raise ProgramError(f"the program is not correct: {verdict.errors[0]}")
    collective = collective_of(program, topology)
    ways = routes(topology, verdict.messages)
    flat = flatten(program)
    order = run(flat, chunks_together(program)).order
    moves = _Moves(program, flat)
    for step in order:
        moves.step(step)
    chunks: dict[tuple[object, ...], int] = {}
    for part, transfers in sorted(moves.transfers.items()):
        owner, target = _ends(program, part, moves)
        key = owner, target, tuple(sorted(transfers))
        chunks[key] = chunks.get(key, 0) + 1
    made = [
        Transfer(number, move.src, move.dst, move.step, move.adds, ways[move.src, move.dst][1:-1])
        for number, (_, _, transfers) in enumerate(chunks)
        for move in transfers  # type: ignore[attr-defined]
    ]
    schedule = Schedule.build(
        topology,
        collective,
        Method("imported", settings=(("program", program.name),)),
        synth.bound(topology, collective.kind, root=collective.root or 0),
        [Chunk(Fraction(count, program.chunks), key[0], key[1]) for key, count in chunks.items()],  # type: ignore[arg-type]
        made,
    )
    checked = synth.verify(schedule, max_errors=1)
    if not checked.correct:
        raise ProgramError(f"the program is no set of trees or steps: as a schedule, {checked.errors[0]}")
    return schedule


@dataclass(frozen=True, slots=True, order=True)
class _Move:
    step: int
    src: int
    dst: int
    adds: bool


class _Moves:
    """Which part of the data is where, and the steps in which it moves."""

    def __init__(self, program: GlobalProgram, flat: Flat) -> None:
        self._program = program
        self._flat = flat
        self.transfers: dict[int, list[_Move]] = defaultdict(list)
        self._part: dict[tuple[int, Memory, int], int] = {}
        self._sender = {
            receive: send
            for link, sends in flat.sends.items()
            for receive, send in zip(flat.receives[link], sends, strict=True)
        }
        self._sent: dict[int, list[tuple[int, int]]] = {}
        self._come: dict[tuple[int, int], tuple[int, bool]] = {}
        self._gone: dict[tuple[int, int], int] = {}

    def step(self, index: int) -> None:
        flat = self._flat
        step, rank = flat.steps[index], flat.rank[index]
        parts = [self._at(rank, step.source, offset) for offset in range(step.count)]
        if step.code.receives:
            send = self._sender[index]
            moved = self._sent.pop(send)
            parts = [part for part, _ in moved]
            for part, since in moved:
                self._receive(flat.rank[send], rank, part, since, step.code.reduces)
        if step.target is not None:
            for offset, part in enumerate(parts):
                self._part[rank, step.target.memory, step.target.start + offset] = part
        if step.code.sends:
            self._sent[index] = [(part, self._come.get((rank, part), (-1, False))[0] + 1) for part in parts]

    def _receive(self, src: int, dst: int, part: int, since: int, adds: bool) -> None:
        come, added = self._come.get((dst, part), (-1, True))
        at = max(since, self._gone.get((dst, part), 0), come if adds and added else come + 1)
        self._come[dst, part] = at, adds
        self._gone[src, part] = max(self._gone.get((src, part), 0), at)
        self.transfers[part].append(_Move(at, src, dst, adds))

    def _at(self, rank: int, span: Span | None, offset: int) -> int:
        if span is None:
            return -1
        key = rank, span.memory, span.start + offset
        return self._part[key] if key in self._part else self._given(*key)

    def _given(self, rank: int, memory: Memory, chunk: int) -> int:
        """The part of the data that a rank's buffers hold at the start, numbered as in the whole buffer."""
        program = self._program
        block = program.chunks // program.ranks
        match program.kind:
            case Kind.ALLGATHER | Kind.GATHER:
                return chunk if memory is Memory.OUTPUT else rank * block + chunk
            case Kind.REDUCE_SCATTER | Kind.SCATTER:
                return chunk if memory is Memory.INPUT else rank * block + chunk
            case Kind.ALLTOALL:
                return rank * program.chunks + chunk
            case _:
                return chunk


def _ends(program: GlobalProgram, part: int, moves: _Moves) -> tuple[int, int | None]:
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
            return _turning(moves.transfers[part]), None


def _turning(moves: list[_Move]) -> int:
    """Where an allreduce's chunk is whole first: the rank that adds last, of those that copy on."""
    last = max((move for move in moves if move.adds), default=moves[0])
    return last.dst
