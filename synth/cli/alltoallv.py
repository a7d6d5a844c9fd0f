"""`synth alltoallv`: what experts of a mixture ask at each step, planned for one matrix of sizes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated

import typer

from arborcast.synth.cli.console import Stopwatch, print_json, print_lines
from arborcast.synth.cli.description import describe_solution
from arborcast.synth.cli.inputs import kept, load_fabric, say_infeasible
from arborcast.synth.cli.options import AsJson, FabricOptions, about_a_fabric, target
from arborcast.synth.errors import InfeasibleError, InputError

MOST_MATRIX_BYTES = 1 << 26


@about_a_fabric()
def alltoallv(
    fabric: FabricOptions,
    sizes: Annotated[
        Path,
        typer.Argument(help="CSV or JSON: bytes from each rank (row) to each rank (column)", metavar="SIZES"),
    ],
    output: Annotated[Path | None, target("-o", "--output", "write the schedule here")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan an alltoall of blocks of any sizes, with proof.

    "optimal" says that the certificate proves as much as the plan reaches; otherwise the gap is shown.
    """
    from arborcast import synth
    from arborcast.synth.alltoallv.pairwise import pairwise

    matrix = read_matrix(sizes)
    on = load_fabric(fabric)
    planner = synth.AlltoallvPlanner(on.topology, ranks=on.taking_part)
    stopwatch = Stopwatch()
    try:
        plan = planner.plan(matrix)
    except InfeasibleError as error:
        say_infeasible(error, on, "alltoall", as_json)
        raise
    schedule = plan.schedule()
    solution = kept(schedule, stopwatch.seconds, output)
    mean = plan.collective.mean_bytes
    times = {"limit_us": float(plan.time_us * (1 - plan.gap)), "links_us": float(plan.time_us)}
    times["simulated_us"] = synth.simulate(schedule, mean).time_us
    if len(on.taking_part) == on.topology.ranks:
        times["pairwise_us"] = synth.simulate(pairwise(planner, matrix, plan.bound), mean).time_us
    if as_json:
        print_json({**solution, "gap": str(plan.gap), **times})
        return
    told = describe_solution(schedule, solution)
    words = {"links_us": "busiest link", "simulated_us": "simulated", "pairwise_us": "pairwise, simulated"}
    shown = [f"{times[key]:.4g} us {word}" for key, word in words.items() if key in times]
    gap = [] if not plan.gap else [f"  gap      {float(plan.gap):.2g} of the limit"]
    print_lines([*told, *gap, f"  takes    {'; '.join(shown)}"])


def read_matrix(path: Path) -> list[list[int]]:
    """The matrix of a CSV file, or a JSON file of rows.

    Raises:
        InputError: the file cannot be read, or holds anything else; with row and column.
    """
    from arborcast.synth.formats.numerals import shorten
    from arborcast.synth.formats.reading import parse_json, read_text, shorten_path

    place = shorten_path(path)
    text = read_text(path, max_bytes=MOST_MATRIX_BYTES)
    rows: object = (
        parse_json(text, place)
        if text.lstrip().startswith(("[", "{"))
        else [row for row in csv.reader(text.splitlines()) if row]
    )
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise InputError(f"{place}: must be rows of sizes, got {shorten(rows)}")
    found: list[list[int]] = []
    for number, row in enumerate(rows):
        found.append([])
        for column, cell in enumerate(row):
            size = int(cell) if isinstance(cell, str) and cell.strip().isdecimal() else cell
            if not isinstance(size, int) or isinstance(size, bool):
                raise InputError(
                    f"{place}: row {number}, column {column}: must be a whole number of bytes, got "
                    f"{shorten(str(cell))}"
                )
            found[-1].append(size)
    return found
