"""How do we compare with other synthesizers? SCCL, ForestColl and TACOS, each from a checkout of yours.

Ours and the peers answer the same question in turns, each run a process of its own, so that a busy machine
slows all of them down. What they find becomes schedules of ours: the verifier judges them, their rate is
exact, and the simulator times them. Results go to `bench/results/peers.json`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborcast.bench.adapters.answer import Answer, CannotAskError, Contender, Question
from arborcast.bench.adapters.forestcoll import ForestColl
from arborcast.bench.adapters.ours import FRONTIER, SIZED, Ours
from arborcast.bench.adapters.rows import SIZES, judged, ratios, reasons, refusal, timing_of
from arborcast.bench.adapters.sccl import Sccl
from arborcast.bench.adapters.tacos import Tacos
from arborcast.bench.harness.script import KEPT, command_line, keep, one_line
from arborcast.bench.page.console import print_results
from arborcast.synth.cli.console import print_lines
from arborcast.synth.cli.options import rank_list
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.formats.results import Measure, document

RESULTS = KEPT / "peers.json"
PEERS = ("sccl", "forestcoll", "tacos")
KEYS = ("topology", "collective", "method")
MEASURES = {
    "seconds": Measure("less", "seconds_spread"),
    "cpu_seconds": Measure("less", "cpu_spread"),
    "algbw": Measure("more", "algbw_spread"),
    **{name: Measure("less", follows="algbw") for name in SIZES},
}
SHOWN = ("times_ours", "call_seconds", "call_times_ours", "share_of_optimum", "trees", "steps", "rounds")
"""Columns for the terminal besides."""

UNITS = {
    "seconds": "of a whole process that asks once, start-up included; median over the runs",
    "cpu_seconds": "of the whole process; median over the runs",
    "call_seconds": "of the synthesis alone, as the contender counts it, called again in the same process "
    "where that is possible and the first call took less than 10 s; median over the runs",
    "seconds_spread": "s, largest minus smallest",
    "cpu_spread": "s, largest minus smallest",
    "rate": "algbw in GB/s, exact, recomputed by the verifier; of runs that differ, the best",
    "algbw_spread": "GB/s, largest minus smallest: of those who draw random numbers",
    "claimed": "algbw in GB/s, as the contender states it",
    "time_us_64KiB": "simulated",
    "time_us_64MiB": "simulated",
    "times_ours": "seconds over those of ours in the same turns",
    "cpu_times_ours": "CPU seconds over those of ours in the same turns",
    "call_times_ours": "call_seconds over those of ours in the same turns",
}


@dataclass(frozen=True)
class Case:
    """A question of the fixed set, and which peers it is for."""

    spec: str
    peers: tuple[str, ...]
    kind: str = "allgather"


CASES = [
    Case("dgx1", ("sccl", "forestcoll")),
    Case("ring:8", PEERS),
    Case("hypercube:3", PEERS),
    Case("torus:4x4", PEERS),
    Case("dgx-a100:boxes=2", ("forestcoll",)),
    Case("mi250:boxes=2", ("forestcoll",)),
    *(Case(f"{grid}:{size}", ("tacos",)) for size in ("8x8", "16x16") for grid in ("torus", "mesh")),
    Case("mesh:4x4", ("tacos",)),
]


def compare(
    spec: str,
    kind: Kind | str,
    peers: Mapping[str, Path],
    *,
    ranks: tuple[int, ...] | None = None,
    root: int = 0,
    runs: int = 3,
    limit_s: float = 120.0,
    sccl_python: str = sys.executable,
) -> list[dict[str, Any]]:
    """Rows of ours and of the peers for one question.

    Args:
        spec: of the topology.
        ranks: the fragment of it; None for all.
        kind: of the collective, among all its ranks.
        peers: checkouts by "sccl", "forestcoll", "tacos".
        root: for kinds that have one.
        runs: of each contender, in turns; one that does not find anything is not run again.
        limit_s: seconds by the clock for one run of one contender.
        sccl_python: an interpreter that has what SCCL's tool needs.

    Raises:
        InputError: no peer or an unknown one, a checkout that lacks what it must have, a wrong question.
    """
    from arborcast import topologies
    from arborcast.synth.bounds import bound
    from arborcast.synth.collective import Collective

    contenders = contenders_of(peers, sccl_python)
    if runs < 1:
        raise InputError(f"runs: must be at least 1, got {runs}")
    topology = topologies.load(spec, ranks=ranks)
    collective = Collective.on(topology, kind, root=root)
    question = Question(spec, topology, collective, bound(topology, collective), ranks)
    return rows_of(question, contenders, runs=runs, limit_s=limit_s)


def contenders_of(peers: Mapping[str, Path], sccl_python: str = sys.executable) -> list[Contender]:
    """Ours and the peers, checked, each peer after the one of ours that it is compared with."""
    unknown = sorted(set(peers) - set(PEERS))
    if unknown or not peers:
        raise InputError(f"peers: must be some of {', '.join(PEERS)}, got {', '.join(unknown) or 'none'}")
    found: list[Contender] = []
    if "forestcoll" in peers:
        found += [Ours("trees"), ForestColl(peers["forestcoll"])]
    if "tacos" in peers:
        found.append(Ours(SIZED))
        found += [Tacos(peers["tacos"], chunks) for chunks in (1, 4)]
    if "sccl" in peers:
        found += [Ours(FRONTIER), Sccl(peers["sccl"], sccl_python)]
    for contender in found:
        contender.check()
    return found


def rows_of(
    question: Question, contenders: Sequence[Contender], *, runs: int, limit_s: float
) -> list[dict[str, Any]]:
    """Ask all of them in turns, then judge what they found; see `compare`."""
    answers: dict[str, list[Answer]] = {contender.name: [] for contender in contenders}
    refused: dict[str, str] = {}
    for turn in range(runs):
        for contender in contenders:
            given = answers[contender.name]
            if contender.name in refused or (given and given[-1].verdict != "found"):
                continue
            print(f"{question.fabric}: {contender.name}, run {turn + 1} ...", file=sys.stderr)
            try:
                given.append(contender.ask(question, limit_s))
            except CannotAskError as why:
                refused[contender.name] = str(why)
    rows: list[dict[str, Any]] = []
    ours: dict[str, Any] | None = None
    for contender in contenders:
        if contender.name in refused:
            rows.append(refusal(question, contender.name, refused[contender.name]))
            continue
        timing = timing_of(answers[contender.name])
        if isinstance(contender, Ours):
            ours = timing
        else:
            timing |= ratios(timing, ours)
        rows += judged(question, contender.name, answers[contender.name], timing)
    return rows


@one_line("peers")
def main(arguments: Sequence[str] | None = None) -> None:
    """Ask the peers given the fixed set of questions, or the one given; print the table, write the file."""
    options = _parser().parse_args(arguments)
    peers = {name: getattr(options, name) for name in PEERS if getattr(options, name) is not None}
    if not peers:
        raise InputError("give at least one checkout: --sccl PATH, --forestcoll PATH, --tacos PATH")
    contenders_of(peers, options.sccl_python)
    limits = {"runs": options.runs, "limit_s": options.limit_s, "sccl_python": options.sccl_python}
    rows: list[dict[str, Any]] = []
    if options.topology is not None:
        ranks = None if options.ranks is None else rank_list(options.ranks)
        one = {"ranks": ranks, "root": options.root}
        rows += compare(options.topology, options.collective, peers, **one, **limits)
    for case in CASES if options.topology is None else ():
        asked = {name: path for name, path in peers.items() if name in case.peers}
        if asked:
            rows += compare(case.spec, case.kind, asked, **limits)
    found = results_document(rows, peers)
    print_results(found, "verdict", "verified", *SHOWN)
    print_lines(reasons(rows))
    keep(options.json, found, is_part=options.topology is not None)


def results_document(rows: Iterable[Mapping[str, Any]], peers: Mapping[str, Path]) -> dict[str, Any]:
    """The results file; `peers` are the checkouts by name."""
    return document(
        "How do other synthesizers compare on the same questions?",
        rows,
        keys=KEYS,
        measures=MEASURES,
        units=UNITS,
        packages=("arborcast", "numpy", "numba", "highspy", "networkx"),
        peers={name: _commit(path) for name, path in peers.items()},
    )


def _commit(checkout: Path) -> str | None:
    """Which version of a peer it was."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _parser() -> argparse.ArgumentParser:
    parser = command_line(__doc__, RESULTS)
    parser.add_argument("--sccl", type=Path, metavar="PATH", help="a checkout of msccl-tools")
    parser.add_argument(
        "--sccl-python", default=sys.executable, metavar="PYTHON", help="an interpreter with its requirements"
    )
    parser.add_argument("--forestcoll", type=Path, metavar="PATH", help="a checkout of ForestColl")
    parser.add_argument(
        "--tacos", type=Path, metavar="PATH", help="a checkout of TACOS with build/bin/tacos-sends"
    )
    parser.add_argument("--topology", metavar="SPEC", help="ask this instead of the fixed set")
    parser.add_argument("--collective", default="allgather", help="with --topology")
    parser.add_argument("--ranks", metavar="R,R,...", help="with --topology: the fragment of these ranks")
    parser.add_argument("--root", type=int, default=0, help="with --topology, of collectives that have one")
    parser.add_argument("--runs", type=int, default=3, help="of each contender, in turns")
    parser.add_argument("--limit-s", type=float, default=120.0, help="for one run of one contender")
    return parser


if __name__ == "__main__":
    main()
