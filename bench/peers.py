"""How do we compare with other synthesizers? SCCL, ForestColl and TACOS, each from a checkout of yours.

Ours and the peers answer the same question in turns, each run a process of its own, so that a busy machine
slows all of them down. What they find becomes schedules of ours: the verifier judges them, their rate is
exact, and the simulator times them. Results go to `bench/results/peers.json`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from bench.document import Measure, document, write_document
from bench.peers_answer import Algorithm, Answer, CannotAskError, Contender, Question
from bench.peers_forestcoll import ForestColl
from bench.peers_ours import FRONTIER, Ours
from bench.peers_sccl import Sccl
from bench.peers_tacos import Tacos
from synth.collective import Kind
from synth.errors import InputError

RESULTS = Path(__file__).resolve().parent / "results" / "peers.json"
PEERS = ("sccl", "forestcoll", "tacos")
SIZES = {"time_us_64KiB": 64 << 10, "time_us_64MiB": 64 << 20}
KEYS = ("topology", "collective", "method")
MEASURES = {
    "seconds": Measure("less", "seconds_spread"),
    "cpu_seconds": Measure("less", "cpu_spread"),
    "algbw": Measure("more"),
    **{name: Measure("less") for name in SIZES},
}
UNITS = {
    "seconds": "of the whole process by the clock, start-up included; median over the runs",
    "cpu_seconds": "of the whole process; median over the runs",
    "call_seconds": "of the synthesis alone, as the contender counts it; median over the runs",
    "seconds_spread": "s, largest minus smallest",
    "cpu_spread": "s, largest minus smallest",
    "rate": "algbw in GB/s, exact, recomputed by the verifier; of runs that differ, the best",
    "claimed": "algbw in GB/s, as the contender states it",
    "time_us_64KiB": "simulated",
    "time_us_64MiB": "simulated",
    "times_ours": "seconds over those of ours in the same turns",
    "cpu_times_ours": "CPU seconds over those of ours in the same turns",
    "call_times_ours": "call_seconds over those of ours in the same turns",
}
CLOSE = Fraction(1, 10**6)
"""Stated rates may be this far from the exact one: some are printed in decimals."""


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
    root: int = 0,
    runs: int = 3,
    limit_s: float = 120.0,
    sccl_python: str = sys.executable,
) -> list[dict[str, Any]]:
    """Rows of ours and of the peers for one question.

    Args:
        spec: of the topology.
        kind: of the collective, among all its ranks.
        peers: checkouts by "sccl", "forestcoll", "tacos".
        root: for kinds that have one.
        runs: of each contender, in turns; one that does not find anything is not run again.
        limit_s: seconds by the clock for one run of one contender.
        sccl_python: an interpreter that has what SCCL's tool needs.

    Raises:
        InputError: no peer or an unknown one, a checkout that lacks what it must have, a wrong question.
    """
    import topologies
    from synth.bounds import bound
    from synth.collective import Collective

    contenders = contenders_of(peers, sccl_python)
    if runs < 1:
        raise InputError(f"runs: must be at least 1, got {runs}")
    topology = topologies.load(spec)
    collective = Collective.on(topology, kind, root=root)
    question = Question(spec, topology, collective, bound(topology, collective))
    return rows_of(question, contenders, runs=runs, limit_s=limit_s)


def contenders_of(peers: Mapping[str, Path], sccl_python: str = sys.executable) -> list[Contender]:
    """Ours and the peers, checked, each peer after the one of ours that it is compared with."""
    unknown = sorted(set(peers) - set(PEERS))
    if unknown or not peers:
        raise InputError(f"peers: must be some of {', '.join(PEERS)}, got {', '.join(unknown) or 'none'}")
    found: list[Contender] = []
    if "forestcoll" in peers or "tacos" in peers:
        found.append(Ours("trees"))
    if "forestcoll" in peers:
        found.append(ForestColl(peers["forestcoll"]))
    if "tacos" in peers:
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
            print(f"{question.spec}: {contender.name}, run {turn + 1} ...", file=sys.stderr)
            try:
                given.append(contender.ask(question, limit_s))
            except CannotAskError as why:
                refused[contender.name] = str(why)
    rows: list[dict[str, Any]] = []
    ours: dict[str, Any] | None = None
    for contender in contenders:
        if contender.name in refused:
            rows.append(
                _row(question, contender.name) | {"verdict": "not asked", "why": refused[contender.name]}
            )
            continue
        timing = _timing(answers[contender.name])
        if isinstance(contender, Ours):
            ours = timing
        else:
            timing |= _ratios(timing, ours)
        rows += _judged(question, contender.name, answers[contender.name], timing)
    return rows


def _row(question: Question, method: str) -> dict[str, Any]:
    """A row with all columns and no figures yet."""
    empty = (
        *("verdict", "why", "seconds", "seconds_spread", "cpu_seconds", "cpu_spread", "call_seconds", "runs"),
        *(
            "peak_MB",
            "times_ours",
            "cpu_times_ours",
            "call_times_ours",
            "rate",
            "claimed",
            "algbw",
            "share_of_optimum",
            "trees",
        ),
        *("chunks", "steps", "rounds", *SIZES, "verified"),
    )
    return {
        "topology": question.spec,
        "ranks": len(question.collective.ranks),
        "collective": str(question.collective.kind),
        "root": question.collective.root,
        "method": method,
        "bytes": None,
        **dict.fromkeys(empty),
        "bound": str(question.bound.rate),
    }


def _timing(answers: Sequence[Answer]) -> dict[str, Any]:
    seconds = [answer.finished.seconds for answer in answers]
    cpu_seconds = [answer.finished.cpu_seconds for answer in answers]
    calls = [answer.call_seconds for answer in answers if answer.call_seconds is not None]
    return {
        "verdict": answers[-1].verdict,
        "why": answers[-1].why,
        "seconds": statistics.median(seconds),
        "seconds_spread": max(seconds) - min(seconds),
        "cpu_seconds": statistics.median(cpu_seconds),
        "cpu_spread": max(cpu_seconds) - min(cpu_seconds),
        "call_seconds": statistics.median(calls) if calls else None,
        "peak_MB": max(answer.finished.peak_MB for answer in answers),
        "runs": len(answers),
    }


def _ratios(timing: Mapping[str, Any], ours: Mapping[str, Any] | None) -> dict[str, float | None]:
    """None where one of both did not come to its end: that time is none of a search."""
    if ours is None or {ours["verdict"], timing["verdict"]} != {"found"}:
        return {}
    call = timing["call_seconds"]
    return {
        "times_ours": timing["seconds"] / ours["seconds"],
        "cpu_times_ours": timing["cpu_seconds"] / ours["cpu_seconds"],
        "call_times_ours": None if call is None else call / ours["call_seconds"],
    }


def _judged(
    question: Question, name: str, answers: Sequence[Answer], timing: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A row for each algorithm, the best of that label over the runs, or one that says why there is none."""
    best: dict[str, Algorithm] = {}
    for algorithm in (found for answer in answers for found in answer.algorithms):
        known = best.get(algorithm.label)
        if known is None or algorithm.schedule.rate > known.schedule.rate:
            best[algorithm.label] = algorithm
    if not best:
        return [{**_row(question, name), **timing}]
    return [
        {**_row(question, f"{name} {label}".strip()), **timing, **quality(algorithm)}
        for label, algorithm in best.items()
    ]


def quality(algorithm: Algorithm) -> dict[str, Any]:
    """What the verifier and the simulator say of an algorithm; a wrong one says so in its `verdict`."""
    from synth.simulator import sweep
    from synth.verifier import verify

    schedule, claimed = algorithm.schedule, algorithm.claimed
    replayed = verify(schedule)
    found: dict[str, Any] = {
        "verified": replayed.correct,
        "claimed": None if claimed is None else float(claimed),
        "trees": algorithm.trees,
        "chunks": len(schedule.chunks),
        "steps": schedule.steps,
        "rounds": None if schedule.rounds is None else sum(schedule.rounds),
    }
    if not replayed.correct:
        return found | {"verdict": "wrong", "why": replayed.errors[0]}
    rate = replayed.rate
    if claimed is not None and abs(claimed - rate) > CLOSE * rate:
        found |= {"verdict": "misstated", "why": f"states {float(claimed):.6g} GB/s, is {float(rate):.6g}"}
    times = sweep(schedule, SIZES.values())
    return found | {
        "rate": str(rate),
        "algbw": float(rate),
        "share_of_optimum": float(rate / schedule.bound.rate),
        **{name: timing.time_us for name, timing in zip(SIZES, times, strict=True)},
    }


COLUMNS = (
    *(("topology", "topology", ""), ("collective", "collective", ""), ("method", "method", "")),
    *(("verdict", "verdict", ""), ("seconds", "seconds", ".3f"), ("seconds_spread", "spread", ".3f")),
    *(("cpu_seconds", "CPU s", ".3f"), ("times_ours", "x ours", ".1f")),
    *(("call_seconds", "call s", ".3f"), ("call_times_ours", "x ours", ".1f")),
    *(("algbw", "algbw", ".2f"), ("share_of_optimum", "share", ".3f"), ("trees", "trees", "d")),
    *(("steps", "steps", "d"), ("rounds", "rounds", "d"), ("time_us_64KiB", "us 64K", ".1f")),
    *(("time_us_64MiB", "us 64M", ".0f"), ("verified", "correct", "")),
)
"""Column of a row, title, format."""


def format_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows as text, and below it why a contender has no figures."""
    listed = list(rows)
    titles = [title for _, title, _ in COLUMNS]
    cells = [[_cell(row[column], form) for column, _, form in COLUMNS] for row in listed]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    left = sum(not form for _, _, form in COLUMNS[:4])
    lines = [
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (titles, *cells)
    ]
    reasons = [
        f"{row['topology']}, {row['method']}: {row['verdict']}: {row['why']}" for row in listed if row["why"]
    ]
    return "\n".join([*lines, *reasons])


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return format(value, form)


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask the peers given the fixed set of questions, or the one given; print the table, write the file."""
    options = _parser().parse_args(arguments)
    peers = {name: getattr(options, name) for name in PEERS if getattr(options, name) is not None}
    if not peers:
        print(
            "peers: give at least one checkout: --sccl PATH, --forestcoll PATH, --tacos PATH", file=sys.stderr
        )
        return 2
    cases = CASES if options.topology is None else [Case(options.topology, PEERS, options.collective)]
    rows: list[dict[str, Any]] = []
    try:
        contenders_of(peers, options.sccl_python)
        for case in cases:
            asked = {name: path for name, path in peers.items() if name in case.peers}
            if asked:
                limits = {
                    "runs": options.runs,
                    "limit_s": options.limit_s,
                    "sccl_python": options.sccl_python,
                }
                rows += compare(case.spec, case.kind, asked, **limits)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(format_table(rows))
    write_document(options.json, _document(rows, peers))
    print(f"\nwritten: {options.json}")
    return 0


def _document(rows: Iterable[Mapping[str, Any]], peers: Mapping[str, Path]) -> dict[str, Any]:
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
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
    parser.add_argument("--runs", type=int, default=3, help="of each contender, in turns")
    parser.add_argument("--limit-s", type=float, default=120.0, help="for one run of one contender")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="PATH", help="where the rows go")
    return parser


if __name__ == "__main__":
    sys.exit(main())
