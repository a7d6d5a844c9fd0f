"""`synth view`: a schedule, or traces of a real run, played in a browser."""

from __future__ import annotations

import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arborcast.synth.cli.console import Json, answer, progress
from arborcast.synth.cli.description import describe_solution, solution_document
from arborcast.synth.cli.inputs import read_correct
from arborcast.synth.cli.options import AsJson, option, target
from arborcast.synth.cli.programs import is_program, read_schedule_of_program
from arborcast.synth.errors import InputError

if TYPE_CHECKING:
    from arborcast.synth.implicit_schedule import AnySchedule

MOST_SIZES = 16
"""Runs of one schedule on a page: each holds all that passes."""


def view(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="a schedule, two to compare, or the traces that the ranks of a group wrote",
        ),
    ],
    sizes: Annotated[
        str, option("--sizes", "of the buffer: one size or a range that doubles; the page lets choose")
    ] = "1MiB",
    html: Annotated[
        Path | None, target("--html", "write the page here and open nothing", metavar="FILE")
    ] = None,
    topology: Annotated[
        str | None, option("--topology", "the fabric of a program of another runtime, or of a run")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Play a schedule on its topology, in a browser.

    Pieces, links, trees, programs of ranks, and the bound.

    The page is one HTML file that asks the network for nothing.
    """
    from arborcast import topologies
    from arborcast.synth.formats.sizes import size_range
    from arborcast.synth.viewer import scene_of_traces, write_page
    from arborcast.synth.viewer.trace_scene import is_trace

    asked = size_range(sizes)
    if len(asked) > MOST_SIZES:
        raise InputError(f"--sizes {sizes}: at most {MOST_SIZES} sizes are shown, got {len(asked)}")
    traces = [file for file in files if is_trace(file)]
    if traces and len(traces) < len(files):
        other = next(file for file in files if file not in traces)
        raise InputError(f"{other}: is no trace, as {traces[0]} is; traces are shown by themselves")
    if not traces and len(files) > 2:
        raise InputError(f"{files[2]}: at most 2 schedules are shown side by side, got {len(files)}")
    with progress("simulating", quiet=as_json):
        if traces:
            scenes = [scene_of_traces(traces, None if topology is None else topologies.load(topology))]
        else:
            scenes = [_scene(file, asked, topology) for file in files]
        if html is None:
            made = tempfile.NamedTemporaryFile(prefix="arborcast-", suffix=".html", delete=False)  # noqa: SIM115
            made.close()
        page = html or Path(made.name)
        write_page(scenes, page)
    opened = html is None and webbrowser.open(page.absolute().as_uri())
    titles = [scene["title"] for scene in scenes]
    document = {"file": str(page), "opened": opened, "titles": titles}
    answer(as_json, document, lambda: [f"{page}: {' | '.join(titles)}"])


def _scene(file: Path, sizes: tuple[int, ...], topology: str | None) -> Json:
    from arborcast.synth.viewer import scene_of

    schedule: AnySchedule
    if is_program(file):
        if topology is None:
            raise InputError(f"{file}: is a program of another runtime: --topology must name its fabric")
        schedule = read_schedule_of_program(file, topology)
    else:
        if topology is not None:
            raise InputError(
                f"--topology {topology}: is for traces and programs of other runtimes; {file} is none"
            )
        schedule = read_correct(file)
    solution = solution_document(schedule, 0, None)
    facts = [line.strip() for line in describe_solution(schedule, solution)[1:]]
    return scene_of(schedule, sizes, [fact for fact in facts if not fact.startswith("time ")])
