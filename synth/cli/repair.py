"""`synth repair`: a new exact schedule where links or ranks failed, from the one that there was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from arborcast.synth.cli.console import Stopwatch, gigabytes, print_json, print_lines, progress
from arborcast.synth.cli.description import describe_solution, infeasible_document
from arborcast.synth.cli.inputs import kept, read_correct
from arborcast.synth.cli.options import (
    AsJson,
    Deadline,
    File,
    Seed,
    WithoutLink,
    WithoutRank,
    option,
    writable,
)
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError

if TYPE_CHECKING:
    from arborcast.synth.implicit_schedule import AnySchedule


def repair(
    file: File,
    without_link: WithoutLink = None,
    without_rank: WithoutRank = None,
    deadline: Deadline = None,
    seed: Seed = 0,
    output: Annotated[Path | None, option("-o", "--output", "write the new schedule here")] = None,
    as_json: AsJson = False,
) -> None:
    """Repair a schedule around failed links and ranks.

    Intact trees are reused, the rest is computed anew; the result is as exact as a new schedule.
    """
    from arborcast.synth.faults.faulty import without
    from arborcast.synth.faults.repair import repaired
    from arborcast.synth.request import Request

    writable(output)
    if not without_link and not without_rank:
        raise InputError(f"{file}: nothing to repair, name what failed by --without-link or --without-rank")
    with progress(f"repairing {file}", quiet=as_json):
        before = read_correct(file)
        faulty = without(before.topology, links=without_link or (), ranks=without_rank or ())
        stopwatch = Stopwatch()
        late: TimedOutError | None = None
        try:
            after: AnySchedule | None = repaired(before, faulty, Request(seed=seed, deadline_s=deadline))
        except InfeasibleError as error:
            if as_json:
                print_json(infeasible_document(error, faulty.topology, before.collective.kind))
            raise
        except TimedOutError as error:
            late, after = error, error.best
        solution = {} if after is None else kept(after, stopwatch.seconds, output)
    if as_json:
        timed_out = {} if late is None else {"timed_out": True, "why": str(late)}
        print_json({**solution, "rate_before": str(before.rate), **timed_out})
    elif after is not None:
        print_lines([*describe_solution(after, solution), f"  before   {gigabytes(before.rate)}"])
    if late is not None:
        raise late
