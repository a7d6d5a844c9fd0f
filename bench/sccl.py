"""Microsoft's public SCCL tool (msccl-tools) as a peer: run from a checkout of yours, never shipped.

It is asked through its own command line, in a process of its own, about one instance (C, S, R) or for its
whole search for Pareto-optimal algorithms. By hand:
`python bench/sccl.py --sccl PATH dgx1 gather` or `... dgx1 allgather --chunks 6 --steps 3 --rounds 7`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from arborcast.bench.measured import Finished, run

if TYPE_CHECKING:
    from arborcast.synth.collective import Collective
    from arborcast.synth.topology import Topology

HOME = Path(__file__).resolve().parent.parent

Point: TypeAlias = tuple[int, int, int]
"""Chunks, steps, rounds."""

DGX1_RANKS: tuple[int, ...] = (0, 2, 3, 1, 4, 6, 7, 5)
"""The numbers in the peer's own DGX1 of our ranks 0..7 (one of the four ways that keep all links)."""

NAMES = {
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "scatter": "Scatter",
    "gather": "Gather",
    "allgather": "Allgather",
    "reduce-scatter": "ReduceScatter",
    "allreduce": "Allreduce",
    "alltoall": "Alltoall",
}
"""Our kinds of collective by the names of its command line."""

_ATTEMPT = re.compile(
    r"Solving instance (?P<of>\S+)\.\.\. ?(?:(?P<answer>\w+)[!.] \((?P<seconds>[\d.]+)s\))?"
)
_VERDICTS = {"synthesized": "found", "unsatisfiable": "impossible", None: "unfinished"}
_WRITTEN = re.compile(
    r"^Wrote to .*-steps(?P<steps>\d+)(?:\.rounds(?P<rounds>\d+))?(?:\.chunks(?P<chunks>\d+))?\.msccl\.json$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call of its solver: the instance, what came of it, and the seconds it printed for it."""

    point: Point
    verdict: str  # found, impossible, unfinished
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a run of the peer gave.

    Attributes:
        verdict: found, impossible, "out of time", or failed.
        points: those it printed as its result, in order of steps.
        attempts: all calls of its solver.
        seconds: of the whole process, start-up included.
        cpu_seconds: of the whole process.
        peak_MB: of the whole process.
        why: the last line it wrote before it failed.
    """

    verdict: str
    points: tuple[Point, ...]
    attempts: tuple[Attempt, ...]
    seconds: float
    cpu_seconds: float
    peak_MB: float  # noqa: N815 - a unit
    why: str | None


@dataclass(frozen=True)
class Peer:
    """A checkout of msccl-tools and an interpreter that has what it needs (z3-solver, lxml and others)."""

    checkout: Path
    python: str = sys.executable

    def check(self) -> None:
        """Raise SystemExit where there is no such tool, or its interpreter lacks something."""
        if not (self.checkout / "msccl" / "__main__.py").is_file():
            raise SystemExit(
                f"--sccl {self.checkout}: must be a checkout of msccl-tools with msccl/__main__.py"
            )
        done = self.run(["solve", "--help"], 60, Path.cwd())
        if done.status:
            raise SystemExit(
                f"--sccl-python {self.python}: cannot run msccl-tools: {_last_line(done.errors)}; "
                "install its requirements for that interpreter"
            )

    def pareto(self, topology: Topology, collective: Collective, limit_s: float) -> Answer:
        """Its whole search.

        Raises:
            ValueError: it cannot be asked this.
        """
        return self._ask("pareto-optimal", topology, collective, [], limit_s)

    def instance(self, topology: Topology, collective: Collective, point: Point, limit_s: float) -> Answer:
        """Its answer to one instance.

        Raises:
            ValueError: it cannot be asked this.
        """
        chunks, steps, rounds = map(str, point)
        options = ["--chunks", chunks, "--steps", steps, "--rounds", rounds]
        return self._ask("instance", topology, collective, options, limit_s)

    def _ask(
        self,
        strategy: str,
        topology: Topology,
        collective: Collective,
        options: Sequence[str],
        limit_s: float,
    ) -> Answer:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            arguments = question(topology, collective, folder)
            done = self.run(["solve", strategy, *arguments, *options], limit_s, folder)
        return answer_of(done)

    def run(self, arguments: Sequence[str], limit_s: float, folder: Path) -> Finished:
        """Its command line with these arguments, in a folder where it may write."""
        environment = {
            "PYTHONPATH": str(self.checkout.resolve()),
            "PYTHONUNBUFFERED": "1",  # what it printed is wanted even if it is killed
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return run([self.python, "-m", "msccl", *arguments], limit_s, folder=folder, environment=environment)


def question(topology: Topology, collective: Collective, folder: Path) -> list[str]:
    """The topology and the collective on its command line; a topology it has no name for goes to a file.

    Raises:
        ValueError: it cannot be asked this: switches, some of the ranks only, or a custom collective.
    """
    if topology.switches:
        raise ValueError(
            f"topology {topology.name}: this adapter hands over topologies without switches only"
        )
    if collective.kind not in NAMES or collective.ranks != tuple(range(topology.ranks)):
        raise ValueError(
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


def answer_of(done: Finished) -> Answer:
    """What its output says."""
    attempts = attempts_in(done.output)
    points = points_in(done.output)
    why = None
    if done.timed_out:
        verdict, points = "out of time", points or _found(attempts)
    elif done.status:
        verdict, why = "failed", _last_line(done.errors)
    elif points:
        verdict = "found"
    else:
        verdict = "impossible"
    return Answer(verdict, points, attempts, done.seconds, done.cpu_seconds, done.peak_MB, why)


def attempts_in(output: str) -> tuple[Attempt, ...]:
    """The calls of its solver, in order; the last one may be unfinished."""
    return tuple(
        Attempt(
            _point(dict(part.split("=") for part in match["of"].split(","))),
            _VERDICTS[match["answer"]],
            None if match["seconds"] is None else float(match["seconds"]),
        )
        for match in _ATTEMPT.finditer(output)
    )


def points_in(output: str) -> tuple[Point, ...]:
    """The algorithms it wrote to files, which is how it prints its result, in order of steps."""
    found = {_point(match.groupdict()) for match in _WRITTEN.finditer(output)}
    return tuple(sorted(found, key=lambda point: point[1]))


def _point(named: Mapping[str, str | None]) -> Point:
    """It leaves out the rounds where each step has one, and a single chunk."""
    steps = int(named["steps"] or 0)
    return int(named.get("chunks") or 1), steps, int(named.get("rounds") or steps)


def _found(attempts: Sequence[Attempt]) -> tuple[Point, ...]:
    """What it had found when it was stopped, less what it would have pruned."""
    found = [attempt.point for attempt in attempts if attempt.verdict == "found"]
    kept = (point for point in found if not any(_beats(other, point) for other in found))
    return tuple(sorted(kept, key=lambda point: point[1]))


def _beats(point: Point, other: Point) -> bool:
    """Whether it is no worse in steps and in rounds per chunk, and better in one of them."""
    (steps, ratio), (other_steps, other_ratio) = (
        (steps, Fraction(rounds, chunks)) for chunks, steps, rounds in (point, other)
    )
    return steps <= other_steps and ratio <= other_ratio and (steps, ratio) != (other_steps, other_ratio)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--sccl` and `--sccl-python`."""
    parser.add_argument("--sccl", type=Path, metavar="PATH", help="a checkout of msccl-tools (SCCL)")
    parser.add_argument(
        "--sccl-python",
        default=sys.executable,
        metavar="PYTHON",
        help="an interpreter with its requirements (default: this one)",
    )


def main() -> None:
    """Ask the peer once and print its answer as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("spec", help="a topology without switches, such as dgx1 or torus:4x4")
    parser.add_argument("collective", choices=NAMES)
    parser.add_argument("--root", type=int, default=0)
    for name in ("chunks", "steps", "rounds"):
        parser.add_argument(
            f"--{name}", type=int, help="of one instance; without all three, its whole search"
        )
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds by the clock")
    add_options(parser)
    arguments = parser.parse_args()
    if arguments.sccl is None:
        parser.error("--sccl PATH is needed")
    from arborcast import topologies
    from arborcast.synth.collective import Collective

    peer = Peer(arguments.sccl, arguments.sccl_python)
    peer.check()
    topology = topologies.load(arguments.spec)
    collective = Collective.on(topology, arguments.collective, root=arguments.root)
    given = [value for value in (arguments.chunks, arguments.steps, arguments.rounds) if value is not None]
    match given:
        case []:
            answer = peer.pareto(topology, collective, arguments.limit_s)
        case [chunks, steps, rounds]:
            answer = peer.instance(topology, collective, (chunks, steps, rounds), arguments.limit_s)
        case _:
            parser.error("--chunks, --steps and --rounds go together")
    print(json.dumps(asdict(answer), indent=1))


if __name__ == "__main__":
    main()
