"""SCCL as a peer (Microsoft's msccl-tools): the algorithms that its search writes become schedules of ours.

It runs from a checkout of yours, through its own command line, and is never shipped.
By hand: `python bench/peers.py --sccl PATH [--sccl-python PYTHON] --topology ring:8`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborcast.backends.programs.sccl import NAMES, schedule_of
from arborcast.backends.programs.sccl import Algorithm as File
from arborcast.bench.adapters.answer import (
    Algorithm,
    Answer,
    CannotAskError,
    Question,
    Reading,
    answer_of,
    last_line,
)
from arborcast.bench.harness.processes import Finished, run
from arborcast.synth.collective import Collective
from arborcast.synth.errors import InputError
from arborcast.synth.formats.shapes import check_shape
from arborcast.synth.topology import Topology

SUFFIX = ".msccl.json"

DGX1_RANKS: tuple[int, ...] = (0, 2, 3, 1, 4, 6, 7, 5)
"""The numbers in the peer's own DGX1 of our ranks 0..7 (one of the four ways that keep all links)."""


@dataclass(frozen=True)
class Sccl:
    """A checkout of it, and an interpreter that has what it needs."""

    checkout: Path
    python: str = sys.executable
    name: str = "SCCL"

    def check(self) -> None:
        """Raise InputError where there is no such tool, or its interpreter lacks something."""
        if not (self.checkout / "msccl" / "__main__.py").is_file():
            raise InputError(
                f"--sccl {self.checkout}: must be a checkout of msccl-tools with msccl/__main__.py"
            )
        done = self._run(["solve", "--help"], 60, Path.cwd())
        if done.status:
            raise InputError(
                f"--sccl-python {self.python}: cannot run msccl-tools: {last_line(done.errors)}; "
                "install its requirements for that interpreter"
            )

    def ask(self, question: Question, limit_s: float) -> Answer:
        """Its whole search for Pareto-optimal algorithms; see `Contender`."""
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            asked = arguments_of(question.topology, question.collective, folder)
            # Saved eagerly, so that what it had found is there even if its time runs out.
            finished = self._run(["solve", "pareto-optimal", *asked, "--save-eagerly"], limit_s, folder)
            paths = sorted(folder.glob(f"*{SUFFIX}"))
            return answer_of(
                finished,
                lambda: read_files(paths, question),
                read_partial=lambda: read_files(_untorn(paths), question),
            )

    def _run(self, arguments: Sequence[str], limit_s: float, folder: Path) -> Finished:
        """Its command line with these arguments, in a folder where it may write."""
        environment = {
            "PYTHONPATH": str(self.checkout.resolve()),
            "PYTHONUNBUFFERED": "1",  # what it printed is wanted even if it is killed
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return run([self.python, "-m", "msccl", *arguments], limit_s, folder=folder, environment=environment)


def arguments_of(topology: Topology, collective: Collective, folder: Path) -> list[str]:
    """The topology and the collective on its command line; a topology it has no name for goes to a file.

    Raises:
        CannotAskError: it cannot be asked this: switches, some of the ranks only, or a custom collective.
    """
    if topology.switches:
        raise CannotAskError(
            f"topology {topology.name}: this adapter hands over topologies without switches only"
        )
    if collective.kind not in NAMES or collective.ranks != tuple(range(topology.ranks)):
        raise CannotAskError(
            f"{collective.kind}: this adapter asks for built-in collectives among all ranks only"
        )
    ranks = numbers_of(topology)
    if ranks is DGX1_RANKS:
        spec = ["DGX1"]
    else:
        path = folder / "topology.json"
        path.write_text(json.dumps(_document(topology)))
        spec = ["custom", "--topology-file", str(path)]
    root = [] if collective.root is None else ["--root", str(ranks[collective.root])]
    return [*spec, NAMES[collective.kind], *root]


def numbers_of(topology: Topology) -> tuple[int, ...]:
    """What it calls our ranks 0, 1, ...: its own DGX1 is numbered in another way."""
    return DGX1_RANKS if topology.name == "dgx1" else tuple(range(topology.ranks))


def _document(topology: Topology) -> dict[str, object]:
    """A topology as its files have it: a row for each receiver, a column for each sender."""
    links = [[0] * topology.ranks for _ in range(topology.ranks)]
    for link, capacity in zip(topology.links, topology.capacities, strict=True):
        links[link.dst][link.src] = capacity
    return {"msccl_type": "topology", "name": "custom", "switches": [], "links": links}


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
        InputError: another form, other chunks, or an address that it does not explain.
    """
    ours = {theirs: rank for rank, theirs in enumerate(numbers_of(question.topology))}
    schedule = schedule_of(
        check_shape(File, found, "algorithm"), question.topology, question.collective, question.bound, ours
    )
    return Algorithm(str(dict(schedule.method.settings)["point"]), schedule)


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
