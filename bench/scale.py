"""How large may a fabric be? Times and memory of what is promised at 1,024 ranks and more, and their growth.

Parts, each a results file `bench/results/scale_<part>.json`: the promises (targets), the same questions on
larger and larger fabrics (growth). One core, a process for each run, kernels compiled before.

    python bench/scale.py --only targets --only growth
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arborcast.bench.harness.processes import answer
from arborcast.bench.harness.script import KEPT, command_line, keep
from arborcast.bench.harness.turns import median_of
from arborcast.bench.page.console import print_results
from arborcast.bench.scaling import cases, children
from arborcast.bench.scaling.cases import Case
from arborcast.synth.formats.results import Measure, document

LIMIT_S = 300.0
KEYS = ("topology", "collective", "method", "faults")
MEASURES = {
    "seconds": Measure("less", "spread"),
    "peak_MB": Measure("less"),
    "height": Measure("less"),
    "share_of_bound": Measure("more"),
}
UNITS = {
    "seconds": "CPU seconds of load, solve and verify together, kernels compiled; median over the runs",
    "target_seconds": "promised for these, of a repair for repairing alone (solve_seconds)",
    "spread": "s, largest minus smallest",
    "peak_MB": "of the whole process",
    "verified": "what the verifier replayed: representatives, every translate, or every transfer",
}


def targets(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was promised, and what was found."""
    chosen = [*cases.targets(), *([] if arguments.quick else cases.others())]
    return document(
        "Is what was promised of large fabrics kept?",
        _rows(chosen, arguments.quick),
        keys=KEYS,
        measures=MEASURES,
        units=UNITS,
    )


def growth(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time and memory against ranks, and the exponent of each family."""
    rows = _rows(cases.growth(), arguments.quick)
    return document(
        "How do time and memory grow with the ranks?",
        rows,
        keys=KEYS,
        measures=MEASURES,
        units=UNITS,
        exponents=exponents(rows),
    )


def _rows(chosen: Iterable[Case], quick: bool) -> list[dict[str, Any]]:
    rows = []
    for case in chosen:
        runs = 1 if quick else case.runs
        print(f"{case.title}, {case.kind}, {case.method} ...", file=sys.stderr)
        answers = [_answer_case(case) for _ in range(runs)]
        rows.append(_row(case, answers))
    return rows


def _answer_case(case: Case) -> dict[str, Any]:
    """What a child answers, with the seconds of the whole process."""
    found = answer(children.answered, asdict(case), limit_s=LIMIT_S)
    if "timed_out" in found:
        return {"timed_out": True, "seconds": LIMIT_S, "peak_MB": found["process_MB"]}
    del found["process_cpu_seconds"], found["process_MB"]
    return found


def _row(case: Case, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    seconds = [answer["seconds"] for answer in answers]
    first = dict(next((answer for answer in answers if answer.get("timed_out")), answers[0]))
    parts: dict[str, Any] = {
        name: statistics.median(answer.get(name, math.inf) for answer in answers)
        for name in ("load_seconds", "solve_seconds", "verify_seconds")
        if name in first
    }
    counted = (
        parts.get("solve_seconds", math.inf) if case.method == cases.REPAIR else statistics.median(seconds)
    )
    peak = max(answer["peak_MB"] for answer in answers)
    return {
        "topology": case.spec,
        "title": case.title,
        "collective": case.kind,
        "method": case.method,
        "faults": case.faults,
        "family": case.family,
        "verified": _verified(case),
        "target_seconds": case.target_s,
        "target_MB": case.target_MB,
        "kept": within(case, counted, peak, first),
        "timed_out": False,
        **first,
        **parts,
        **median_of("seconds", seconds),
        "runs": len(answers),
        "peak_MB": peak,
    }


def within(case: Case, seconds: float, peak_MB: float, answer: Mapping[str, Any]) -> bool | None:  # noqa: N803
    """Whether a promise was kept: in time, in memory, optimal and correct; None where there was none."""
    if case.target_s is None:
        return None
    in_memory = case.target_MB is None or peak_MB <= case.target_MB
    return (
        not answer.get("timed_out")
        and seconds <= case.target_s
        and in_memory
        and bool(answer["optimal"])
        and bool(answer["correct"])
    )


def _verified(case: Case) -> str:
    if case.method == cases.GROUPS:
        return "each written schedule, the images of the others"
    if case.method not in {cases.SYMMETRIC, cases.SEARCHED}:
        return "every transfer"
    return "every translate" if case.every_translate else "representatives"


def exponents(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The slope of each family in a log-log plot over the ranks, by least squares.

    Small fabrics measure what a process costs anyway, so only those of at least 64 ranks count.
    """
    families: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("family") and not row["timed_out"] and row["ranks"] >= 64:
            families.setdefault(row["family"], []).append(row)
    return {
        family: {
            measure: statistics.linear_regression(
                [math.log(row["ranks"]) for row in members], [math.log(row[measure]) for row in members]
            ).slope
            for measure in ("seconds", "peak_MB")
        }
        for family, members in families.items()
        if len(members) >= 2
    }


PARTS: Mapping[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "targets": targets,
    "growth": growth,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for, say what was found, write the results."""
    parser = command_line(__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="fewer cases, one run of each")
    parser.add_argument("--results", type=Path, default=KEPT, metavar="FOLDER", help="where files go")
    chosen = parser.parse_args(arguments)
    for name in chosen.only or PARTS:
        found = PARTS[name](chosen)
        print_results(found, "optimal", "kept", section=f"scale_{name}")
        keep(chosen.results / f"scale_{name}.json", found, is_part=chosen.quick)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
