"""`synth solve`: a schedule, how good it is, and that it is correct.

Large symmetric fabrics get a schedule in implicit form, which is written, verified and simulated as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arborcast.synth.api import Form, approach
from arborcast.synth.cli.console import Json, Stopwatch, answer, print_json, print_lines, progress
from arborcast.synth.cli.description import (
    at_size,
    choices_document,
    compared_document,
    describe_choices,
    describe_compared,
    describe_solution,
)
from arborcast.synth.cli.inputs import (
    collective_on,
    kept,
    load_fabric,
    say_infeasible,
    text_of,
)
from arborcast.synth.cli.options import (
    AsJson,
    CollectiveName,
    Deadline,
    FabricOptions,
    MinPiece,
    NoCache,
    RateTolerance,
    Root,
    Seed,
    about_a_fabric,
    in_bytes,
    number,
    option,
    part_of_one,
    target,
)
from arborcast.synth.errors import InfeasibleError, InputError, SolverDiedError, TimedOutError
from arborcast.synth.methods import MethodName
from arborcast.synth.solve_options import MIN_PIECE_BYTES, SolveOptions

if TYPE_CHECKING:
    from arborcast.synth.implicit_schedule import AnySchedule
    from arborcast.synth.selection import Choice, Selection


@about_a_fabric()
def solve(
    fabric: FabricOptions,
    collective: CollectiveName,
    method: Annotated[MethodName, option("--method", "auto: the best of them")] = "auto",
    root: Root = None,
    size: Annotated[
        int | None,
        in_bytes(
            "--size",
            "with auto: fastest at this size, such as 64KiB, of all methods; "
            "with --max-trees, --max-height or --tolerance of trees alone",
        ),
    ] = None,
    min_piece: MinPiece = MIN_PIECE_BYTES,
    prove_time: Annotated[
        bool,
        typer.Option("--prove-time", help="with --size: the closest limit of the time, with its proof"),
    ] = False,
    max_trees: Annotated[
        int | None,
        number("--max-trees", "maximum number of trees (per root for allgather and reduce-scatter)"),
    ] = None,
    max_height: Annotated[
        int | None,
        number("--max-height", "trees: maximum number of steps from a root to a rank", metavar="H"),
    ] = None,
    tolerance: Annotated[
        str | None, option("--tolerance", "few trees: part of the optimum to give up, such as 1/20")
    ] = None,
    epsilon: Annotated[
        str | None, option("--epsilon", "mwu: the part of the optimum it may miss, such as 1/20")
    ] = None,
    chunks: Annotated[
        int | None,
        number("--chunks", "smt, ilp, sat (which need all three): chunks of each block", metavar="C"),
    ] = None,
    steps: Annotated[int | None, number("--steps", "smt, ilp, sat: steps", metavar="S")] = None,
    rounds: Annotated[
        int | None, number("--rounds", "smt, ilp, sat: rounds of all steps", metavar="R")
    ] = None,
    rate_tolerance: RateTolerance = None,
    proof: Annotated[
        Path | None,
        target(
            "--proof",
            "sat: where there is no schedule, write a DRAT proof here and its formula to FILE.cnf",
            metavar="FILE",
        ),
    ] = None,
    form: Annotated[
        Form,
        option(
            "--form",
            "implicit: representatives and translations; auto: implicit for more than 64 ranks "
            "where the fabric is symmetric",
        ),
    ] = "auto",
    deadline: Deadline = None,
    seed: Seed = 0,
    no_cache: NoCache = False,
    output: Annotated[Path | None, target("-o", "--output", "write the schedule here")] = None,
    as_json: AsJson = False,
) -> None:
    """Find a schedule, prove how good it is, and verify it."""
    if prove_time and size is None:
        raise InputError("--prove-time: needs --size, of which the time is")
    options = SolveOptions(
        max_trees=max_trees,
        tolerance=part_of_one("--tolerance", tolerance),
        epsilon=part_of_one("--epsilon", epsilon),
        seed=seed,
        deadline_s=deadline,
        size_bytes=size,
        chunks=chunks,
        steps=steps,
        rounds=rounds,
        rate_tolerance=part_of_one("--rate-tolerance", rate_tolerance),
        cache=not no_cache,
        max_height=max_height,
        proof=proof,
        min_piece_bytes=min_piece,
    )
    on = load_fabric(fabric)
    stopwatch = Stopwatch()
    choices: Sequence[Choice] = ()
    selection: Selection | None = None
    try:
        with progress(f"solving {collective} on {on.topology.name}", quiet=as_json):
            chosen = collective_on(collective, on, root)
            asked = approach(on.faulty or on.topology, chosen, method, options, form)
            if size is None:
                schedule = asked.answer()
            else:
                selection = asked.selection()
                schedule = selection.fastest_in_time(size)
                choices = _table(selection, schedule)
    except InfeasibleError as error:
        say_infeasible(error, on, collective, as_json, _proof_files(error))
        raise
    except TimedOutError as error:
        _tell_late(error, stopwatch.seconds, output, compared_document(selection), as_json)
        raise
    if prove_time and size:
        schedule = with_time(schedule, size)
    solution = {**kept(schedule, stopwatch.seconds, output), **at_size(schedule, options)}
    compared = compared_document(selection)
    answer(
        as_json,
        {**solution, "choices": choices_document(choices), **compared},
        lambda: [
            *describe_solution(schedule, solution),
            *describe_choices(choices),
            *describe_compared(compared),
        ],
    )


def _table(selection: Selection, best: AnySchedule) -> Sequence[Choice]:
    """Which schedule serves which size; empty where candidates were made for one size alone."""
    try:
        return () if selection.enough else selection.choices()
    except TimedOutError as late:  # its best is of another size
        raise TimedOutError(f"the table of choices by size: {late}", best) from late


def with_time(schedule: AnySchedule, size_bytes: int) -> AnySchedule:
    """A schedule whose bound proves a least time of a size, too.

    Raises:
        CollectiveError: flows through intervals say nothing of such a collective.
    """
    from arborcast.synth.bounds.layered_flows import with_least_time

    proved = with_least_time(schedule.topology, schedule.collective, schedule.bound, size_bytes)
    return replace(schedule, bound=proved)


def _proof_files(error: InfeasibleError) -> Json:
    proof = text_of(error.proof_file)
    return {"proof_file": proof, "formula_file": None if proof is None else f"{proof}.cnf"}


def _tell_late(
    error: TimedOutError, seconds: float, output: Path | None, compared: Json, as_json: bool
) -> None:
    """Say and write the best that was found before time or solvers ran out, and what it was compared with."""
    best = {} if error.best is None else kept(error.best, seconds, output)
    if as_json:
        died = isinstance(error, SolverDiedError)
        print_json({**best, "timed_out": not died, "solver_died": died, "why": str(error), **compared})
    elif error.best is not None:
        print_lines([*describe_solution(error.best, best), *describe_compared(compared)])
