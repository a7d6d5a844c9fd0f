"""TACOS as a peer: the sends that it matches to links become a step-synchronous schedule of ours.

Its public library takes topologies as C++ objects and returns a time, so the checkout must hold a small
program of the user's against it, `build/bin/tacos-sends QUESTION`, that reads a question and prints every
send. The question is a text file: a line `ranks chunks_per_rank chunk_bytes`, then for each link a line
`from to GiB_per_s latency_us`. The answer is a line `send CHUNK FROM TO START_US END_US` for each send (chunk
k belongs to rank k modulo ranks), then `time_us T`, what it takes, and `call_seconds S`, how long the search
took. TACOS draws random numbers from the machine, so that no two runs of it need to agree.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from arborcast.bench.adapters.answer import Algorithm, Answer, CannotAskError, Question, Reading, answer_of
from arborcast.bench.harness.processes import run
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer

PROGRAM = Path("build") / "bin" / "tacos-sends"
CHUNK_BYTES = 1 << 20
GIB_PER_GB = 1e9 / 2**30
OFF_BEAT = 1e-3
"""By which part of a step a send may start off the common beat: it prints decimals."""


@dataclass(frozen=True)
class Tacos:
    """A checkout with its build folder.

    Attributes:
        checkout: where `build/bin/tacos-sends` lies.
        chunks: in which each rank's block is cut; more chunks come closer to the bound and take longer.
    """

    checkout: Path
    chunks: int = 1

    @property
    def name(self) -> str:
        """It tells the runs with different numbers of chunks apart."""
        return f"TACOS, {self.chunks} chunk{'s' if self.chunks > 1 else ''} a rank"

    def check(self) -> None:
        """Raise InputError where there is no such program."""
        if not (self.checkout / PROGRAM).is_file():
            raise InputError(
                f"--tacos {self.checkout}: must hold {PROGRAM}, a program against its library that prints "
                "every send (bench/adapters/tacos.py says how it is asked); its own example answers one "
                "fixed question and prints a time only"
            )

    def ask(self, question: Question, limit_s: float) -> Answer:
        """Its allgather; see `Contender`."""
        _check(question)
        with tempfile.TemporaryDirectory() as scratch:
            asked = Path(scratch) / "question.txt"
            asked.write_text(text_of(question, self.chunks))
            program = str((self.checkout / PROGRAM).resolve())
            finished = run([program, str(asked)], limit_s, folder=Path(scratch))
            return answer_of(finished, lambda: read(finished.output, question, self.chunks))


def _check(question: Question) -> None:
    topology, collective = question.topology, question.collective
    if collective.kind is not Kind.ALLGATHER or collective.ranks != tuple(range(topology.ranks)):
        raise CannotAskError(f"{collective.kind}: it knows the allgather among all ranks only")
    if topology.switches:
        raise CannotAskError(f"topology {topology.name}: it knows links from rank to rank only, not switches")
    # Where links differ it exchanges chunks that are on their way, so that sends are not what was sent.
    if len({(link.bandwidth, link.latency_us) for link in topology.links}) > 1:
        raise CannotAskError(
            f"topology {topology.name}: this adapter hands over links of one bandwidth and latency only"
        )


def text_of(question: Question, chunks: int) -> str:
    """The question as its program reads it."""
    topology = question.topology
    lines = [f"{topology.ranks} {chunks} {CHUNK_BYTES}"]
    for link in topology.links:
        rate = float(link.bandwidth) * GIB_PER_GB
        lines.append(f"{link.src} {link.dst} {rate!r} {float(link.latency_us)!r}")
    return "\n".join(lines) + "\n"


def read(output: str, question: Question, chunks: int) -> Reading:
    """What its program printed as a schedule: all sends of one start are a step of one round.

    Args:
        output: see the module's docstring.
        question: what was asked.
        chunks: of each rank.

    Raises:
        ValueError: a line that says something else, or sends that keep no common beat.
    """
    sends: list[tuple[int, int, int, float, float]] = []
    facts: dict[str, float] = {}
    for line in output.splitlines():
        match line.split():
            case ["send", chunk, source, target, start, end]:
                sends.append((int(chunk), int(source), int(target), float(start), float(end)))
            case ["time_us" | "call_seconds" as name, value]:
                facts[name] = float(value)
            case _:
                raise ValueError(f"its program printed {line!r}, which is neither a send nor a time")
    topology = question.topology
    steps = _steps([(start, end) for *_, start, end in sends])
    transfers = [
        Transfer(chunk, source, target, step)
        for (chunk, source, target, *_), step in zip(sends, steps, strict=True)
    ]
    count = topology.ranks * chunks
    listed = [Chunk(Fraction(1, count), index % topology.ranks) for index in range(count)]
    rounds = [1] * (max(steps, default=-1) + 1)
    method = Method("tacos", settings=(("chunks", chunks),))
    schedule = Schedule.build(
        topology, question.collective, method, question.bound, listed, transfers, rounds
    )
    return facts["call_seconds"], [Algorithm("", schedule, _claimed(facts["time_us"], count, question))]


def _steps(times: Sequence[tuple[float, float]]) -> list[int]:
    """The number of each send's step: all take the same time, and start at whole multiples of it."""
    if not times:
        return []
    beat = times[0][1] - times[0][0]
    steps = []
    for start, end in times:
        step = round(start / beat) if beat > 0 else 0
        if (
            beat <= 0
            or abs(start - step * beat) > OFF_BEAT * beat
            or abs(end - start - beat) > OFF_BEAT * beat
        ):
            raise ValueError(f"a send from {start} to {end} us keeps no beat of {beat} us")
        steps.append(step)
    return steps


def _claimed(time_us: float, count: int, question: Question) -> Fraction | None:
    """The rate of the time that it states; none where latency is part of that time."""
    if any(link.latency_us for link in question.topology.links):
        return None
    return Fraction(count * CHUNK_BYTES / (1000 * time_us)).limit_denominator(10**6)
