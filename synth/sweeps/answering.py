"""One question of a table answered: which schedule serves which message sizes (`Selection.choices`).

Answers are plain documents, so that a worker on another machine can send one back; who asked writes files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from arborcast.synth.api import approach
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError
from arborcast.synth.faults.faulty import Faulty
from arborcast.synth.formats.any_schedule import any_schedule_to_document
from arborcast.synth.formats.schedules import said_of
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.selection import Selection
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.sweeps.questions import Question
from arborcast.synth.topology import Topology
from arborcast.synth.verification.verifier import verify

SOLVED, INFEASIBLE, LATE, UNSERVED = "solved", "infeasible", "out of time", "not served"
FAILED = "failed"
"""Of a question whose numbers have too many digits, or on which HiGHS gives up: the others are answered."""


@dataclass(frozen=True)
class Answered:
    """What a worker sends back.

    Attributes:
        document: the answer; its choices name files.
        files: the text of each of those files.
    """

    document: dict[str, Any]
    files: dict[str, str]


def answered(
    machine: Topology, question: Question, options: SolveOptions, sizes: Sequence[int] | None
) -> Answered:
    """The answer to one question; every schedule in it passed the verifier.

    Args:
        machine: all of it.
        question: about it.
        options: seed, deadline and the like; the deadline is for this question.
        sizes: message sizes in bytes over which schedules are compared; None for the best rate alone.
    """
    start = time.perf_counter()
    schedules: list[tuple[int, AnySchedule]] = []
    status, why = SOLVED, None
    try:
        schedules = _choices(question.fabric(machine), question, options, sizes)
    except InfeasibleError as error:
        status, why = INFEASIBLE, str(error)
    except TimedOutError as error:
        status, why = LATE, str(error)
        schedules = [] if error.best is None else [(0, error.best)]
    except InputError as error:
        status, why = UNSERVED, str(error)
    except ArithmeticError as error:
        status, why = FAILED, str(error)
    files: dict[str, str] = {}
    choices = []
    for from_bytes, schedule in schedules:
        verdict = verify(schedule)
        if not verdict.correct:
            raise AssertionError(f"{question.key}: the schedule found is not correct: {verdict.errors[0]}")
        name = f"{question.key}-from-{from_bytes}.json"
        files[name] = json.dumps(any_schedule_to_document(schedule), allow_nan=False) + "\n"
        proved = {"bound": str(schedule.bound.rate), "optimal": schedule.is_optimal}
        choices.append({"from_bytes": from_bytes, **said_of(schedule), **proved, "file": name})
    document = {
        **question.to_document(),
        "status": status,
        "why": why,
        "choices": choices,
        "seconds": round(time.perf_counter() - start, 3),
    }
    return Answered(document, files)


def _choices(
    fabric: Topology | Faulty, question: Question, options: SolveOptions, sizes: Sequence[int] | None
) -> list[tuple[int, AnySchedule]]:
    asked = approach(fabric, question.collective(fabric), options=options)
    return [(0, asked.answer())] if sizes is None else _compared(asked.selection(), sizes)


def _compared(selection: Selection, sizes: Sequence[int]) -> list[tuple[int, AnySchedule]]:
    """Where the fastest changes; the first choice serves everything below, too."""
    choices = list(selection.choices(sizes))
    choices[0] = replace(choices[0], from_bytes=0)
    found = [(choice.from_bytes, choice.schedule) for choice in choices]
    if selection.out_of_time is not None:
        raise TimedOutError(str(selection.out_of_time), found[-1][1])
    return found


def as_text(document: dict[str, Any]) -> str:
    """An answer as its file holds it."""
    return json.dumps(document, indent=1, allow_nan=False) + "\n"
