"""`synth repair`: a new exact schedule where links or ranks failed, from the one that there was."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from synth.console import Stopwatch, print_json, print_lines, progress
from synth.description import describe_solution, infeasible_document, solution_document
from synth.errors import InfeasibleError, InputError, TimedOutError
from synth.options import AsJson, Deadline, File, Seed, WithoutLink, WithoutRank, writable
from synth.questions import check_found, read_correct


def repair(
    file: File,
    without_link: WithoutLink = None,
    without_rank: WithoutRank = None,
    deadline: Deadline = None,
    seed: Seed = 0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the new schedule here")] = None,
    as_json: AsJson = False,
) -> None:
    """Repair a schedule around failed links and ranks; as good as solving anew, and faster."""
    import synth
    from synth.faults import parse_link
    from synth.repair import repair as repaired

    writable(output)
    if not without_link and not without_rank:
        raise InputError(f"{file}: nothing to repair, name what failed by --without-link or --without-rank")
    with progress(f"repairing {file}", quiet=as_json):
        before = read_correct(file)
        links = [parse_link(before.topology, text) for text in without_link or ()]
        stopwatch = Stopwatch()
        try:
            after = repaired(
                before,
                without_links=links,
                without_ranks=without_rank or (),
                seed=seed,
                deadline_s=deadline,
            )
        except InfeasibleError as error:
            if as_json:
                print_json(infeasible_document(error, before.topology, before.collective.kind))
            raise
        except TimedOutError as error:
            if as_json:
                print_json({"timed_out": True, "why": str(error)})
            raise
        seconds = stopwatch.seconds
        check_found(after)
        if output is not None:
            synth.write_any_schedule(after, output)
    solution = solution_document(after, seconds, output)
    if as_json:
        print_json({**solution, "rate_before": str(before.rate)})
        return
    print_lines([*describe_solution(after, solution), f"  before   {before.rate} GB/s"])
