"""`synth solve`: a schedule, how good it is, and that it is correct.

Large symmetric fabrics get a schedule in implicit form, which is written, verified and simulated as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arborcast.synth.api import Form, approach
from arborcast.synth.cli.console import Json, Stopwatch, print_json, print_lines, progress
from arborcast.synth.cli.description import (
    beyond_document,
    choices_document,
    describe_beyond,
    describe_choices,
    describe_solution,
    infeasible_document,
    solution_document,
)
from arborcast.synth.cli.inputs import check_found, collective_on, hardware_beyond, load_fabric, text_of
from arborcast.synth.cli.options import (
    AsJson,
    CollectiveName,
    Deadline,
    FabricOptions,
    NoCache,
    Root,
    Seed,
    about_a_fabric,
    part_of_one,
    whole,
    writable,
)
from arborcast.synth.errors import InfeasibleError, SolverDiedError, TimedOutError

if TYPE_CHECKING:
    from arborcast.synth.implicit_schedule import AnySchedule
    from arborcast.synth.selection import Choice


@about_a_fabric()
def solve(
    fabric: FabricOptions,
    collective: CollectiveName,
    method: Annotated[
        str,
        typer.Option(
            help="auto, trees, mwu, routes, smt, ilp, sat, ring, multiring, binary-tree or halving-doubling"
        ),
    ] = "auto",
    root: Root = None,
    size: Annotated[
        str | None, typer.Option("--size", help="with auto: fastest at this size, such as 64KiB")
    ] = None,
    max_trees: Annotated[
        int | None,
        typer.Option(
            "--max-trees",
            parser=whole,
            metavar="N",
            help="maximum number of trees (per root for allgather and reduce-scatter)",
        ),
    ] = None,
    max_height: Annotated[
        int | None,
        typer.Option(
            "--max-height",
            parser=whole,
            metavar="H",
            help="trees: maximum number of steps from a root to a rank",
        ),
    ] = None,
    tolerance: Annotated[
        str | None,
        typer.Option("--tolerance", help="few trees: part of the optimum to give up, such as 1/20"),
    ] = None,
    epsilon: Annotated[
        str | None, typer.Option("--epsilon", help="mwu: the part of the optimum it may miss, such as 1/20")
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            "--chunks",
            parser=whole,
            metavar="C",
            help="smt, ilp, sat (which need all three): chunks of each block",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", parser=whole, metavar="S", help="smt, ilp, sat: steps")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", parser=whole, metavar="R", help="smt, ilp, sat: rounds of all steps"),
    ] = None,
    proof: Annotated[
        Path | None,
        typer.Option(
            "--proof",
            metavar="FILE",
            help="sat: where there is no schedule, write a DRAT proof here and its formula to FILE.cnf",
        ),
    ] = None,
    form: Annotated[
        Form,
        typer.Option(
            "--form",
            help="implicit: representatives and translations; auto: implicit for more than 64 ranks "
            "where the fabric is symmetric",
        ),
    ] = "auto",
    deadline: Deadline = None,
    seed: Seed = 0,
    no_cache: NoCache = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the schedule here")] = None,
    as_json: AsJson = False,
) -> None:
    """Find a schedule, prove how good it is, and verify it."""
    from arborcast.synth.formats.sizes import parse_size
    from arborcast.synth.request import Request

    writable(output)
    writable(proof)
    request = Request(
        max_trees=max_trees,
        tolerance=None if tolerance is None else part_of_one("--tolerance", tolerance),
        epsilon=None if epsilon is None else part_of_one("--epsilon", epsilon),
        seed=seed,
        deadline_s=deadline,
        size_bytes=None if size is None else parse_size(size),
        chunks=chunks,
        steps=steps,
        rounds=rounds,
        cache=not no_cache,
        max_height=max_height,
        proof=proof,
    )
    on = load_fabric(fabric)
    topology = on.topology
    stopwatch = Stopwatch()
    choices: Sequence[Choice] = ()
    try:
        with progress(f"solving {collective} on {topology.name}", quiet=as_json):
            chosen = collective_on(collective, on, root)
            asked = approach(on.faulty or topology, chosen, method, request, form)
            if request.size_bytes is None:
                schedule = asked.best()
            else:
                selection = asked.selection()
                schedule = selection.fastest_in_time(request.size_bytes)
                choices = selection.choices()
    except InfeasibleError as error:
        if as_json:
            written = text_of(error.proof_file)
            files = {"proof_file": written, "formula_file": None if written is None else f"{written}.cnf"}
            print_json({**infeasible_document(error, topology, collective), **files})
        raise
    except TimedOutError as error:
        best = {} if error.best is None else _verified(error.best, stopwatch.seconds, output)
        if as_json:
            died = isinstance(error, SolverDiedError)
            print_json({**best, "timed_out": not died, "solver_died": died, "why": str(error)})
        elif error.best is not None:
            print_lines(describe_solution(error.best, best))
        raise
    solution = _verified(schedule, stopwatch.seconds, output)
    beyond = hardware_beyond(fabric.spec, schedule.topology, schedule.collective)
    if as_json:
        print_json({**solution, "choices": choices_document(choices), "beyond": beyond_document(beyond)})
        return
    told = describe_solution(schedule, solution)
    print_lines([*told, *describe_beyond(beyond), *describe_choices(choices)])


def _verified(schedule: AnySchedule, seconds: float, output: Path | None) -> Json:
    """What `solve` reports; nothing is said or written of a schedule that the verifier does not pass."""
    from arborcast import synth

    check_found(schedule)
    if output is not None:
        synth.write_schedule(schedule, output)
    return solution_document(schedule, seconds, output)
