"""SCCL as a peer (Microsoft's msccl-tools): the algorithms that its search writes become schedules of ours.

It runs from a checkout of yours and is never shipped; what it is asked is for `bench/sccl.py` to say.
By hand: `python bench/peers.py --sccl PATH [--sccl-python PYTHON] --topology ring:8`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborcast.bench import sccl
from arborcast.bench.adapters.answer import Algorithm, Answer, CannotAskError, Question, Reading, answer_of
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer

SUFFIX = ".msccl.json"


@dataclass(frozen=True)
class Sccl:
    """A checkout of it, and an interpreter that has what it needs."""

    checkout: Path
    python: str = sys.executable
    name: str = "SCCL"

    def check(self) -> None:
        """Raise InputError where there is no such tool, or its interpreter lacks something."""
        try:
            self._peer.check()
        except SystemExit as missing:
            raise InputError(str(missing)) from None

    def ask(self, question: Question, limit_s: float) -> Answer:
        """Its whole search for Pareto-optimal algorithms; see `Contender`."""
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            try:
                asked = sccl.question(question.topology, question.collective, folder)
            except ValueError as unknown:
                raise CannotAskError(str(unknown)) from None
            # Saved eagerly, so that what it had found is there even if its time runs out.
            command = ["solve", "pareto-optimal", *asked, "--save-eagerly"]
            finished = self._peer.run(command, limit_s, folder)
            paths = sorted(folder.glob(f"*{SUFFIX}"))
            return answer_of(
                finished,
                lambda: read_files(paths, question),
                read_partial=lambda: read_files(_untorn(paths), question),
            )

    @property
    def _peer(self) -> sccl.Peer:
        return sccl.Peer(self.checkout, self.python)


def read_files(paths: Iterable[Path], question: Question) -> Reading:
    """The algorithms of these files; it counts seconds too coarsely to be told."""
    return None, without_beaten([read(json.loads(path.read_text()), question) for path in paths])


def _untorn(paths: Iterable[Path]) -> list[Path]:
    """Of a run that was killed: a file that it had not finished does not end as an object does."""
    return [path for path in paths if path.read_text().endswith("}")]


def read(found: Mapping[str, Any], question: Question) -> Algorithm:
    """An algorithm of its files as a schedule, its rounds as they are.

    Args:
        found: `instance.chunks` (C, the parts of each address), `collective.chunks` with the addresses and
            the ranks that hold them before and after, `steps` with `rounds` and `sends` [address, from, to].
        question: what was asked.

    Raises:
        ValueError: an address that it does not explain.
    """
    ours = {theirs: rank for rank, theirs in enumerate(sccl.numbers_of(question.topology))}
    parts = int(found["instance"]["chunks"])
    chunks, index_of = _chunks(found["collective"]["chunks"], parts, ours, question)
    rounds = [int(step["rounds"]) for step in found["steps"]]
    reduces = question.collective.kind.reduces
    transfers = []
    for number, step in enumerate(found["steps"]):
        for address, source, target in step["sends"]:
            if address not in index_of:
                raise ValueError(f"step {number}: no chunk of the collective has address {address}")
            chunk = index_of[address]
            if chunk is not None:
                transfers.append(Transfer(chunk, ours[source], ours[target], number, reduces))
    point = f"({parts},{len(rounds)},{sum(rounds)})"
    method = Method("sccl", settings=(("point", point),))
    schedule = Schedule.build(
        question.topology, question.collective, method, question.bound, chunks, transfers, rounds
    )
    return Algorithm(point, schedule)


def _chunks(
    listed: Sequence[Mapping[str, Any]], parts: int, ours: Mapping[int, int], question: Question
) -> tuple[list[Chunk], dict[int, int | None]]:
    """Our chunks in order of its addresses, and which of them an address is.

    Where contributions are added up, several of its chunks share an address. A block that stays where it is
    has no chunk of ours: it may still be sent about where links are idle, to nobody's use, and that is left
    out (its rounds count all the same).
    """
    blocks = question.collective.blocks()
    chunks: list[Chunk] = []
    index_of: dict[int, int | None] = {}
    for address, before, after in _addresses(listed):
        owner, target = _owner_and_target(question.collective.kind, before, after, ours)
        block = question.collective.block_of(owner, target)
        for part in range(parts):
            index_of[address * parts + part] = len(chunks) if block in blocks else None
            if block in blocks:
                chunks.append(Chunk(blocks[block] / parts, owner, target))
    return chunks, index_of


def _addresses(listed: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, set[int], set[int]]]:
    """Each address with the ranks that hold a part of it before and after."""
    for address in sorted({int(chunk["addr"]) for chunk in listed}):
        at_it = [chunk for chunk in listed if int(chunk["addr"]) == address]
        yield address, {rank for c in at_it for rank in c["pre"]}, {rank for c in at_it for rank in c["post"]}


def _owner_and_target(
    kind: Kind, before: set[int], after: set[int], ours: Mapping[int, int]
) -> tuple[int, int | None]:
    """Whose data an address is (or where its sum goes), and the destination where it has a single one."""
    one, many = (after, before) if kind.reduces else (before, after)
    (owner,) = one
    if kind in {Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL}:
        (target,) = many
        return ours[owner], ours[target]
    return ours[owner], None


def without_beaten(algorithms: Sequence[Algorithm]) -> tuple[Algorithm, ...]:
    """Those that no other one equals or beats in steps and in rate, in order of steps."""
    kept: list[Algorithm] = []
    for algorithm in sorted(algorithms, key=lambda found: (_steps(found), -found.schedule.rate)):
        if not kept or algorithm.schedule.rate > kept[-1].schedule.rate:
            kept.append(algorithm)
    return tuple(kept)


def _steps(algorithm: Algorithm) -> int:
    rounds = algorithm.schedule.rounds
    return 0 if rounds is None else len(rounds)
