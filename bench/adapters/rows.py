"""From answers to rows: medians of the runs, the verifier's word, the exact rate and simulated times."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from arborcast.bench.adapters.answer import Algorithm, Answer, Question
from arborcast.bench.adapters.ours import SIZE
from arborcast.bench.harness.turns import median_of
from arborcast.synth.simulation.simulator import sweep
from arborcast.synth.verification.verifier import verify

SIZES = {"time_us_64KiB": 64 << 10, "time_us_64MiB": SIZE}
EMPTY = (
    *("verdict", "why", "runs", "seconds", "seconds_spread", "cpu_seconds", "cpu_spread", "call_seconds"),
    *("peak_MB", "times_ours", "cpu_times_ours", "call_times_ours", "rate", "claimed", "algbw"),
    *("algbw_spread", "share_of_optimum", "trees", "chunks", "steps", "rounds", *SIZES, "verified"),
)
CLOSE = Fraction(1, 10**6)
"""Stated rates may be this far from the exact one: some are printed in decimals."""


def refusal(question: Question, name: str, why: str) -> dict[str, Any]:
    """The row of a contender that cannot be asked."""
    return _row(question, name) | {"verdict": "not asked", "why": why}


def _row(question: Question, method: str) -> dict[str, Any]:
    """A row with all columns and no figures yet."""
    return {
        "topology": question.fabric,
        "ranks": len(question.collective.ranks),
        "collective": str(question.collective.kind),
        "root": question.collective.root,
        "method": method,
        "bytes": None,
        **dict.fromkeys(EMPTY),
        "bound": str(question.bound.rate),
    }


def timing_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """The columns of time over the runs of a contender; its last run says how it ended."""
    finished = [answer.finished for answer in answers]
    calls = [answer.call_seconds for answer in answers if answer.call_seconds is not None]
    return {
        "verdict": answers[-1].verdict,
        "why": answers[-1].why,
        **median_of("seconds", [each.seconds for each in finished], "seconds_spread"),
        **median_of("cpu_seconds", [each.cpu_seconds for each in finished], "cpu_spread"),
        "call_seconds": statistics.median(calls) if calls else None,
        "peak_MB": max(each.peak_MB for each in finished),
        "runs": len(answers),
    }


def ratios(timing: Mapping[str, Any], ours: Mapping[str, Any] | None) -> dict[str, float | None]:
    """The columns beside ours; empty where one of both did not come to its end."""
    if ours is None or {ours["verdict"], timing["verdict"]} != {"found"}:
        return {}
    call = timing["call_seconds"]
    return {
        "times_ours": timing["seconds"] / ours["seconds"],
        "cpu_times_ours": timing["cpu_seconds"] / ours["cpu_seconds"],
        "call_times_ours": None if call is None else call / ours["call_seconds"],
    }


def judged(
    question: Question, name: str, answers: Sequence[Answer], timing: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A row for each algorithm, or one that says why there is none.

    Of runs that differ the best counts, unless one of them is wrong.
    """
    found: dict[str, list[Algorithm]] = {}
    for algorithm in (one for answer in answers for one in answer.algorithms):
        found.setdefault(algorithm.label, []).append(algorithm)
    if not found:
        return [{**_row(question, name), **timing}]
    rows = []
    for label, alike in found.items():
        best = max(alike, key=lambda one: one.schedule.rate)
        wrong = next((one for one in alike if not verify(one.schedule).correct), None)
        row = {**_row(question, f"{name} {label}".strip()), **timing, **quality(wrong or best)}
        if row["rate"] is not None:
            row["algbw_spread"] = float(best.schedule.rate - min(one.schedule.rate for one in alike))
        rows.append(row)
    return rows


def quality(algorithm: Algorithm) -> dict[str, Any]:
    """What the verifier and the simulator say of an algorithm; a wrong one says so in its `verdict`."""
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


def reasons(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Why contenders have no figures, a line each."""
    return [
        f"{row['topology']}, {row['method']}: {row['verdict']}: {row['why']}" for row in rows if row["why"]
    ]
