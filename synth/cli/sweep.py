"""`synth sweep`: a folder of schedules for all that a machine may become, in parallel and resumable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from arborcast.synth.cli.console import print_json, print_lines, progress, table
from arborcast.synth.cli.description import (
    assumptions_document,
    describe_assumptions,
    describe_parts,
    parts_document,
)
from arborcast.synth.cli.inputs import load_fabric
from arborcast.synth.cli.options import (
    OF_MACHINES,
    AsJson,
    Dask,
    FabricOptions,
    Jobs,
    Seed,
    about_a_fabric,
    duration,
    number,
    option,
    rank_list,
)
from arborcast.synth.errors import InputError

if TYPE_CHECKING:
    from arborcast.synth.collective import Kind
    from arborcast.synth.routes.reachability import Components
    from arborcast.synth.sweeps.questions import Question
    from arborcast.synth.topology import Topology


@about_a_fabric("ranks", *OF_MACHINES)
def sweep(
    fabric: FabricOptions,
    output: Annotated[Path, option("-o", "--output", "output folder; a sweep resumes there")],
    collectives: Annotated[
        str, option("--collectives", "kinds of collective")
    ] = "allreduce,allgather,reduce-scatter,broadcast",
    fragments: Annotated[
        str | None, option("--fragments", "numbers of ranks, such as 2-8 or 4,8; by default all ranks")
    ] = None,
    failures: Annotated[int, number("--failures", "up to so many cables down at once")] = 0,
    sizes: Annotated[
        str, option("--sizes", "message sizes to choose for, such as 1KiB:1GiB; rate: the best rate")
    ] = "rate",
    deadline: Annotated[float | None, duration("--deadline", "stop each question after so long")] = None,
    seed: Seed = 0,
    jobs: Jobs = 1,
    dask: Dask = None,
    retry: Annotated[bool, option("--retry", "ask again what ran out of time")] = False,
    as_json: AsJson = False,
) -> None:
    """Fill a folder with schedules for all fragments and failures.

    A sweep that was interrupted goes on where it was left.
    """
    from arborcast.synth.chunks.solvers.jobs import running_on
    from arborcast.synth.formats.sizes import size_range
    from arborcast.synth.progress import report
    from arborcast.synth.solve_options import SolveOptions
    from arborcast.synth.sweeps.questions import questions
    from arborcast.synth.sweeps.sweep import sweep as run

    if jobs == 0 or jobs < -1:
        raise InputError(f"--jobs {jobs}: must be at least 1, or -1 for all cores")
    on = load_fabric(fabric)
    topology, parts = on.topology, on.parts()
    numbers = None if fragments is None else rank_list(fragments, "--fragments")
    chosen_sizes = None if sizes == "rate" else size_range(sizes)
    with progress(f"sweeping {topology.name}", quiet=as_json), running_on(dask):
        asked = list(questions(topology, sizes=numbers, failures=failures, kinds=_kinds(collectives)))
        worked = run(
            topology,
            asked,
            output,
            options=SolveOptions(seed=seed, deadline_s=deadline),
            sizes=chosen_sizes,
            jobs=jobs,
            retry=retry,
            listen=lambda now: report("questions", now.done, now.total),
        )
    apart = (parts, () if parts is None else on.help_for(parts))
    _tell(topology, asked, worked, output, as_json, apart)


def _kinds(text: str) -> tuple[Kind, ...]:
    from arborcast.synth.collective import NAMED_KINDS, Kind, did_you_mean

    kinds: list[Kind] = []
    for name in text.split(","):
        kind = Kind.named(name)
        if kind not in NAMED_KINDS:
            raise InputError(
                f"--collectives {text}: must be of {', '.join(sorted(NAMED_KINDS))}, got {name!r}"
                f"{did_you_mean(name)}"
            )
        kinds.append(kind)
    return tuple(dict.fromkeys(kinds))


def _tell(
    topology: Topology,
    asked: list[Question],
    worked: int,
    folder: Path,
    as_json: bool,
    apart: tuple[Components | None, Iterable[str]],
) -> None:
    from arborcast.synth.sweeps.table import Table

    answers = Table.read(folder).answers
    found = [answers[question] for question in asked]
    if as_json:
        counts = {"questions": len(asked), "answered_now": worked, "folder": str(folder)}
        assumed = assumptions_document(topology)
        print_json({**counts, "assumed": assumed, "answers": found, **parts_document(*apart)})
        return
    statuses = Counter((answer["collective"], answer["status"]) for answer in found)
    rows = [
        (kind, status, count, _optimal(found, kind, status)) for (kind, status), count in statuses.items()
    ]
    print_lines(table(("collective", "status", "questions", "optimal"), rows, left=2))
    print_lines(describe_assumptions(topology))
    print_lines(describe_parts(*apart))
    print_lines([f"{worked} answered now, {len(asked) - worked} before; written {folder}"])


def _optimal(found: list[dict[str, Any]], kind: str, status: str) -> int:
    """How many answers have a schedule that is proved to be the fastest for large messages."""
    return sum(
        answer["collective"] == kind
        and answer["status"] == status
        and any(choice["optimal"] for choice in answer["choices"])
        for answer in found
    )
