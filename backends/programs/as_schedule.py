"""A program that is a set of trees or of steps, as a schedule: to simulate, draw, compare and run it.

Messages, and what ranks put into each other's memory, become transfers of one chunk each, in steps that keep
to what a rank held when it was sent (`whereabouts`). Chunks that take the same way become one. What a program
does beyond that, such as keeping several sums of one chunk apart, a schedule cannot say; the verifier of
schedules has the last word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import reduce

from arborcast.backends.programs.checking.check import check_program, follow
from arborcast.backends.programs.checking.memory import is_far
from arborcast.backends.programs.program import GlobalProgram, Move, ProgramError, Span
from arborcast.backends.programs.traffic import collective_of, routes, switch_of
from arborcast.backends.programs.whereabouts import Moved, Versions
from arborcast.synth.collective import Kind
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Topology


def as_schedule(program: GlobalProgram, topology: Topology) -> Schedule:
    """The schedule of a correct program on a topology of as many ranks, verified.

    Raises:
        ProgramError: the program is not correct, or is no set of trees or steps, or ranks exchange messages
            that have no way to each other.

    Examples:
        >>> fabric = topologies.load("ring:4")
        >>> program = backends.export_program(synth.solve(fabric, "allgather", method="ring"))
        >>> backends.as_schedule(program, fabric).rate
        Fraction(4, 3)
    """
    verdict = check_program(program, max_errors=1)
    if not verdict.correct:
        raise ProgramError(f"the program is not correct: {verdict.errors[0]}")
    versions = _MovedVersions(program.ranks, topology)
    follow(program, versions)
    return put_together(program, topology, versions.transfers())


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


class _MovedVersions(Versions):
    """Those that a program moves on a topology."""

    def __init__(self, ranks: int, topology: Topology) -> None:
        super().__init__(ranks)
        self._topology = topology

    def moved(self, rank: int, move: Move, read: list[int]) -> tuple[int, int]:
        """Messages in the rank's own memory as they are; of others, and for others, what they then have."""
        ends = zip(move.sources, read, strict=True)
        made = [self.left(it.rank or 0, each) if is_far(it, rank, move) else each for it, each in ends]
        near = reduce(self.sum, made)
        if move.switch and move.sources[0].rank is not None:
            near = self._by_switch(move.sources, near)
        far = [span for span in move.targets if is_far(span, rank, move)]
        message = self.left(rank, near) if far else near
        if move.switch and far:
            message = self._by_switch(far, message)
            if any(span.rank == rank for span in far):
                self.settle(rank, message)  # it comes back, whether it is read or not
        return near, message

    def _by_switch(self, spans: Sequence[Span], message: int) -> int:
        """What a switch passes on of the sum of some messages."""
        return self.left(switch_of(self._topology, (span.rank or 0 for span in spans)), message)


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
