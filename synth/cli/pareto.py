"""`synth pareto`: the frontier of chunk schedules between latency and bandwidth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from arborcast.synth.cli.console import answer, progress
from arborcast.synth.cli.description import describe_forwarding, describe_frontier, model_of
from arborcast.synth.cli.inputs import check_found, collective_on, failing_as_json, load_fabric, text_of
from arborcast.synth.cli.options import (
    AsJson,
    CollectiveName,
    Dask,
    Deadline,
    FabricOptions,
    Jobs,
    MinPiece,
    NoCache,
    RateTolerance,
    Root,
    Seed,
    about_a_fabric,
    number,
    option,
    part_of_one,
    refuse,
)
from arborcast.synth.errors import TimedOutError
from arborcast.synth.solve_options import MIN_PIECE_BYTES, SolveOptions

OF_STEPS = (
    "is of the search through steps, up to 64 ranks; on more, known patterns and low trees are compared"
)


@about_a_fabric()
def pareto(
    fabric: FabricOptions,
    collective: CollectiveName,
    root: Root = None,
    max_steps: Annotated[
        int | None,
        number("--max-steps", "largest number of steps; otherwise 6 more than the fewest", metavar="S"),
    ] = None,
    tolerance: Annotated[
        str | None, option("--tolerance", "stop within this part of the limit of any steps, such as 1/20")
    ] = None,
    rate_tolerance: RateTolerance = None,
    deadline: Deadline = None,
    seed: Seed = 0,
    min_piece: MinPiece = MIN_PIECE_BYTES,
    jobs: Jobs = 1,
    dask: Dask = None,
    no_cache: NoCache = False,
    output: Annotated[
        Path | None, option("-o", "--output", "folder for frontier.json, a schedule per point, a picture")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find every best trade of latency for bandwidth, with proof.

    Of steps, which small messages wait for, for rounds per chunk, which large ones take. Above 64 ranks,
    where the fabric is symmetric, of latency for rate: of known patterns and low trees, beside proved limits.
    """
    from arborcast import synth
    from arborcast.synth.api import approach
    from arborcast.synth.chunks.solvers.jobs import running_on
    from arborcast.synth.cli.frontier_folder import PICTURE, frontier_to_document, write_frontier
    from arborcast.synth.cli.latency_bandwidth import show_latency_bandwidth
    from arborcast.synth.formats.atomic import check_folder
    from arborcast.synth.pictures.canvas import check_path

    if output is not None:
        check_folder(output)
        check_path(output / PICTURE)
    on = load_fabric(fabric)
    topology = on.topology
    wanted = collective_on(collective, on, root)
    options = SolveOptions(seed=seed, deadline_s=deadline, min_piece_bytes=min_piece)
    asked = approach(topology, wanted, options=options)
    if asked.translations is not None:
        refuse(OF_STEPS, max_steps=max_steps, tolerance=tolerance, rate_tolerance=rate_tolerance)
        show_latency_bandwidth(asked, on, output, as_json)
        return
    what = f"frontier of {collective} on {topology.name}"
    with failing_as_json(on, collective, as_json), progress(what, quiet=as_json), running_on(dask):
        found = synth.pareto(
            topology,
            wanted,
            max_steps=max_steps,
            tolerance=part_of_one("--tolerance", tolerance),
            rate_tolerance=part_of_one("--rate-tolerance", rate_tolerance),
            deadline_s=deadline,
            seed=seed,
            jobs=jobs,
            cache=not no_cache,
        )
    for point in found.points:
        check_found(point.schedule)
    document = frontier_to_document(found) if output is None else write_frontier(found, output)
    document |= {"folder": text_of(output), "model": model_of(topology.forwarding)}
    answer(as_json, document, lambda: [*describe_frontier(found, output), *describe_forwarding(topology)])
    if found.timed_out:
        raise TimedOutError(f"{collective}: {found.why_stopped}")
