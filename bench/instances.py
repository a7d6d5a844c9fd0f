"""The table of solvers: z3, HiGHS and CaDiCaL, each alone on the same instances.

Part of `bench/frontier.py`. Every instance is asked without symmetry and under the best group: the largest
one that has a schedule, where there is one, else the largest. That a group has no schedule proves nothing
about the instance; the time is that of the same question for all three.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborcast.bench.harness.processes import answer

CHILD = Path(__file__).resolve().parent / "ours.py"
SOLVERS = {"smt": "z3", "ilp": "HiGHS", "sat": "CaDiCaL"}
NO_GROUP = "none"
MOST_GROUPS = 6
REPEAT_BELOW_S = 10.0

Cell = dict[str, Any]
Point = tuple[int, int, int]
"""Chunks, steps, rounds."""


@dataclass(frozen=True)
class Case:
    """One (C, S, R) of a collective with root 0, and whether it has a schedule."""

    title: str
    spec: str
    collective: str
    point: Point
    exists: bool


INSTANCES = [
    Case("DGX-1 allgather", "dgx1", "allgather", (2, 2, 3), exists=True),
    Case("DGX-1 allgather", "dgx1", "allgather", (5, 2, 7), exists=False),
    Case("DGX-1 allgather", "dgx1", "allgather", (6, 3, 7), exists=True),
    Case("DGX-1 broadcast", "dgx1", "broadcast", (8, 3, 3), exists=False),
    Case("DGX-1 broadcast", "dgx1", "broadcast", (13, 4, 4), exists=True),
    Case("DGX-1 alltoall", "dgx1", "alltoall", (3, 2, 8), exists=True),
    Case("DGX-1 gather", "dgx1", "gather", (6, 2, 7), exists=True),
    Case("ring of 8 allgather", "ring:8", "allgather", (2, 4, 7), exists=True),
    Case("ring of 8 allgather", "ring:8", "allgather", (2, 4, 6), exists=False),
    Case("torus 4x4 allgather", "torus:4x4", "allgather", (4, 4, 15), exists=True),
    Case("3-cube broadcast", "hypercube:3", "broadcast", (6, 4, 4), exists=True),
    Case("3-cube broadcast", "hypercube:3", "broadcast", (7, 4, 4), exists=False),
]


def table_of(case: Case, *, runs: int, limit_s: float) -> list[Cell]:
    """The cells of one instance: each solver without and with a group, in turns."""
    print(f"{case.title} {case.point} ...", file=sys.stderr)
    cells = _cells(case, NO_GROUP, runs, limit_s)
    group = _best_group(case, limit_s)
    if group is not None:
        cells += _cells(case, group, runs, limit_s)
    return cells


def _best_group(case: Case, limit_s: float) -> str | None:
    """The first useful group, the largest first, that has a schedule; the largest where none has; or None."""
    for number in range(MOST_GROUPS if case.exists else 1):
        verdict = _child(case, "sat", str(number), limit_s)["verdict"]
        if verdict == "found":
            return str(number)
        if verdict == "no such group":
            return None if number == 0 else "0"
    return "0"


def _cells(case: Case, group: str, runs: int, limit_s: float) -> list[Cell]:
    found: dict[str, list[Cell]] = {encoding: [] for encoding in SOLVERS}
    for _ in range(runs):
        for encoding, answers in found.items():
            if not answers or answers[0]["seconds"] < min(REPEAT_BELOW_S, limit_s):
                answers.append(_child(case, encoding, group, limit_s))
    cells = [_cell(case, encoding, group, answers, limit_s) for encoding, answers in found.items()]
    _mark(case, cells)
    return cells


def _child(case: Case, encoding: str, group: str, limit_s: float) -> Cell:
    """One run of one solver; out of time is an answer, anything else that goes wrong ends the bench."""
    arguments = [encoding, case.spec, case.collective, "0", *map(str, case.point), group]
    found = answer([str(CHILD), "solver", *arguments], limit_s, environment={})
    if "timed_out" in found:
        return {"verdict": "out of time", "seconds": limit_s, "cpu_seconds": found["process_cpu_seconds"]}
    return found | {"peak_MB": found["process_MB"]}


def _cell(case: Case, encoding: str, group: str, answers: Sequence[Cell], limit_s: float) -> Cell:
    last = answers[-1]
    seconds = [answer["seconds"] for answer in answers]
    return _head(case, encoding, SOLVERS[encoding]) | {
        "symmetric": group != NO_GROUP,
        "group": last.get("group"),
        "verdict": last["verdict"],
        "verified": last.get("verified"),
        "seconds": statistics.median(seconds),
        "cpu_seconds": statistics.median(answer["cpu_seconds"] for answer in answers),
        "time_us": statistics.median(seconds) * 1e6,
        "spread": (max(seconds) - min(seconds)) * 1e6,
        "runs": len(answers),
        "peak_MB": last.get("peak_MB"),
        "limit_s": limit_s,
        "wins": False,
        "as_expected": True,
    }


def _head(case: Case, method: str, solver: str) -> Cell:
    chunks, steps, rounds = case.point
    head = {"topology": case.spec, "title": case.title, "collective": case.collective, "bytes": None}
    return head | {"method": method, "solver": solver, "chunks": chunks, "steps": steps, "rounds": rounds}


def _mark(case: Case, cells: Sequence[Cell]) -> None:
    """Mark the fastest, and what contradicts the truth or the others."""
    decided = [cell for cell in cells if cell["verdict"] != "out of time"]
    if decided:
        min(decided, key=lambda cell: float(cell["seconds"]))["wins"] = True
    verdicts = {cell["verdict"] for cell in decided}
    for cell in decided:
        agrees = len(verdicts) == 1 and cell["verified"] is not False
        if cell["symmetric"]:
            agrees &= case.exists or cell["verdict"] == "impossible"
        else:
            agrees &= cell["verdict"] == ("found" if case.exists else "impossible")
        cell["as_expected"] = agrees


def summary_of(cells: Sequence[Cell]) -> dict[str, Any]:
    """How often each solver wins, and how z3's time compares with that of HiGHS."""
    if not cells:
        return {}
    wins = {
        solver: sum(cell["wins"] for cell in cells if cell["solver"] == solver) for solver in SOLVERS.values()
    }
    ratios = [
        {**key, "z3_over_highs": smt["seconds"] / ilp["seconds"], **_limits(smt, ilp)}
        for key, smt, ilp in _pairs(cells)
    ]
    # A ratio with one side out of time is a limit only, and one with both says nothing.
    exact = [math.log(ratio["z3_over_highs"]) for ratio in ratios if not ratio["limit"]]
    return {
        "wins": wins,
        "z3_over_highs": ratios,
        "z3_over_highs_geometric_mean": math.exp(statistics.fmean(exact)) if exact else None,
        "within_a_factor_of_2": sum(abs(value) <= math.log(2) for value in exact),
        "compared": len(exact),
    }


def _pairs(cells: Sequence[Cell]) -> Iterator[tuple[dict[str, Any], Cell, Cell]]:
    keys = ("title", "chunks", "steps", "rounds", "symmetric")
    by_key: dict[tuple[Any, ...], dict[str, Cell]] = {}
    for cell in cells:
        by_key.setdefault(tuple(cell[key] for key in keys), {})[cell["method"]] = cell
    for key, found in by_key.items():
        yield dict(zip(keys, key, strict=True)), found["smt"], found["ilp"]


def _limits(smt: Cell, ilp: Cell) -> dict[str, str | None]:
    stopped = (smt["verdict"] == "out of time", ilp["verdict"] == "out of time")
    return {
        "limit": {(False, False): None, (True, False): "or more", (False, True): "or less"}.get(
            stopped, "none"
        )
    }


def print_instances(cells: Sequence[Cell]) -> None:
    """One line per instance and kind of symmetry, the winner with a star."""
    names = list(SOLVERS.values())
    print(
        ("\n{:22} {:12} {:11} {:>6}" + "{:>12}" * 3).format(
            "instance", "(C, S, R)", "answer", "group", *names
        )
    )
    lines: dict[tuple[Any, ...], dict[str, Cell]] = {}
    for cell in cells:
        key = (cell["title"], cell["chunks"], cell["steps"], cell["rounds"], cell["symmetric"])
        lines.setdefault(key, {})[cell["solver"]] = cell
    for (title, chunks, steps, rounds, _), found in lines.items():
        shown = next((cell for cell in found.values() if cell["verdict"] != "out of time"), None)
        verdict, group = (shown["verdict"], shown["group"]) if shown else ("open", "")
        times = "".join(f"{_time(found.get(name)):>12}" for name in names)
        print(f"{title:22} {f'({chunks}, {steps}, {rounds})':12} {verdict:11} {group:>6}{times}")
    summary = summary_of(cells)
    if summary.get("compared"):
        print(
            f"z3 takes {summary['z3_over_highs_geometric_mean']:.2f} times as long as HiGHS (geometric mean "
            f"of {summary['compared']}); within a factor of 2 on {summary['within_a_factor_of_2']}; wins: "
            + ", ".join(f"{solver} {count}" for solver, count in summary["wins"].items())
        )


def _time(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell["verdict"] == "out of time":
        return f"over {cell['limit_s']:.0f} s"
    return f"{'*' if cell['wins'] else ''}{cell['seconds']:.3f}"
