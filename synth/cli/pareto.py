"""`synth pareto`: the frontier of chunk schedules between latency and bandwidth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from arborcast.synth.cli.console import print_json, print_lines, progress
from arborcast.synth.cli.description import describe_frontier, infeasible_document
from arborcast.synth.cli.inputs import check_found, collective_on, load_fabric, text_of
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
)
from arborcast.synth.errors import InfeasibleError, TimedOutError


@about_a_fabric()
def pareto(
    fabric: FabricOptions,
    collective: CollectiveName,
    root: Root = None,
    max_steps: Annotated[
        int | None,
        typer.Option(
            "--max-steps",
            parser=whole,
            metavar="S",
            help="largest number of steps; otherwise 6 more than the fewest",
        ),
    ] = None,
    tolerance: Annotated[
        str | None,
        typer.Option("--tolerance", help="stop within this part of the limit of any steps, such as 1/20"),
    ] = None,
    deadline: Deadline = None,
    seed: Seed = 0,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs",
            parser=whole,
            metavar="N",
            help="how many step counts to work on at once; -1 for all cores",
        ),
    ] = 1,
    dask: Annotated[
        str | None, typer.Option("--dask", metavar="ADDRESS", help="run the jobs on this Dask scheduler")
    ] = None,
    no_cache: NoCache = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="folder for frontier.json, a schedule per point, a picture"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find every best trade of latency for bandwidth, with proof.

    Of steps, which small messages wait for, for rounds per chunk, which large ones take.
    """
    from arborcast import synth
    from arborcast.synth.chunks.solvers.jobs import running_on
    from arborcast.synth.cli.frontier_folder import check_folder, frontier_to_document, write_frontier

    if output is not None:
        check_folder(output)
    on = load_fabric(fabric)
    topology = on.topology
    try:
        with progress(f"frontier of {collective} on {topology.name}", quiet=as_json), running_on(dask):
            found = synth.pareto(
                topology,
                collective_on(collective, on, root),
                max_steps=max_steps,
                tolerance=None if tolerance is None else part_of_one("--tolerance", tolerance),
                deadline_s=deadline,
                seed=seed,
                jobs=jobs,
                cache=not no_cache,
            )
    except InfeasibleError as error:
        if as_json:
            print_json(infeasible_document(error, topology, collective))
        raise
    except TimedOutError as error:  # before there was any point
        if as_json:
            print_json({"timed_out": True, "why": str(error)})
        raise
    for point in found.points:
        check_found(point.schedule)
    document = frontier_to_document(found) if output is None else write_frontier(found, output)
    if as_json:
        print_json({**document, "folder": text_of(output)})
    else:
        print_lines(describe_frontier(found, output))
    if found.timed_out:
        raise TimedOutError(f"{collective}: {found.why_stopped}")
