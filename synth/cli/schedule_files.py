"""The commands that ask about a schedule file: verify, simulate, run, expand, program.

Files hold a schedule written out or in implicit form; each command takes both, or says which it needs. Verify
and run take programs of other runtimes, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from arborcast.synth.cli.console import answer, print_json, print_lines, progress
from arborcast.synth.cli.description import (
    assumptions_document,
    describe_assumptions,
    describe_comparison,
)
from arborcast.synth.cli.inputs import NotCorrectError, conclude, read_correct, text_of
from arborcast.synth.cli.options import (
    AsJson,
    DataType,
    File,
    MinPiece,
    OldPicture,
    count,
    duration,
    in_bytes,
    number,
    option,
    refuse,
    target,
)
from arborcast.synth.cli.programs import is_program, run_program, verify_program
from arborcast.synth.cli.repair import verify_spares
from arborcast.synth.errors import InputError
from arborcast.synth.formats.words import gigabytes, of_bound
from arborcast.synth.solve_options import MIN_PIECE_BYTES

MOST_EXPANDED = 8_000_000
"""Transfers that `expand` writes out: more would make a file too large to be read again."""

ReductionName = Literal["sum", "avg", "min", "max", "product"]

UNPRICED = "times of links alone: --priced for links as fast as they are measured, and what a call costs"

MOST_PROCESSES = 128
"""Local processes that `run` starts: each is a Python with torch, of some 200 MB."""


def verify(
    file: File,
    every_translate: Annotated[
        bool, option("--every-translate", "implicit form: replay every chunk, not only the representatives")
    ] = False,
    collective: Annotated[
        str | None, option("--collective", "programs: what it does, where the file does not say")
    ] = None,
    root: Annotated[
        int | None, number("--root", "programs: the root, which files do not say; 0 by default")
    ] = None,
    topology: Annotated[
        str | None, option("--topology", "programs: the fabric, for link loads and the bound")
    ] = None,
    picture: Annotated[
        Path | None, target("--picture", "programs: draw who waits for whom, or what races: .svg or .png")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a schedule file and check everything it claims.

    A program of another runtime (MSCCL's XML) is checked for wrong data, hangs, races and limits. Of spare
    schedules (synth repair --each-link) each is replayed.
    """
    from arborcast import synth
    from arborcast.synth.faults.backup_documents import is_spares

    if is_program(file):
        refuse("is for schedules in implicit form", every_translate=every_translate)
        verify_program(file, collective, root, topology, picture, as_json)
        return
    of_programs = {"collective": collective, "root": root, "topology": topology, "picture": picture}
    refuse(f"is for programs of other runtimes; {file} is none", **of_programs)
    if is_spares(file):
        refuse("is for schedules in implicit form", every_translate=every_translate)
        verify_spares(file, as_json)
        return
    schedule = synth.read_schedule(file)
    with progress(f"verifying {file}", quiet=as_json):
        verdict = synth.verify(schedule, every_translate=every_translate)
    document = {
        "rate": str(verdict.rate),
        "max_link_load": str(verdict.max_link_load),
        "errors": list(verdict.errors),
        "assumed": assumptions_document(schedule.topology),
    }
    part = of_bound(verdict.rate, schedule.bound.rate, schedule.topology)
    told = [
        f"  rate           {gigabytes(verdict.rate)}, {part}",
        f"  max link load  {verdict.max_link_load}",
    ]
    conclude(
        file, verdict.errors, as_json, document, lambda: [*told, *describe_assumptions(schedule.topology)]
    )


def simulate(
    file: File,
    sizes: Annotated[str, option("--sizes", "one size or a range that doubles")] = "64KiB:256MiB",
    picture: Annotated[
        Path | None, target("--picture", "draw time and busbw over size: .svg or .png")
    ] = None,
    output: OldPicture = None,
    service: Annotated[
        str,
        option(
            "--service",
            "which piece a link carries next: priority (as planned), fifo, random[:SEED], worst:N (the "
            "slowest of N random orders), or engine, what the process group does (engine-worst:N)",
            metavar="ORDER",
        ),
    ] = "priority",
    frame: Annotated[
        int | None,
        in_bytes(
            "--frame",
            "what a switch has of a message before it passes it on; 4KiB where some switch reduces or "
            "multicasts, whole pieces where none does",
            metavar="SIZE",
        ),
    ] = None,
    priced: Annotated[
        bool, option("--priced", "links as fast as they are measured to be, and what a call costs")
    ] = False,
    min_piece: MinPiece = MIN_PIECE_BYTES,
    as_json: AsJson = False,
) -> None:
    """Simulate a schedule over sizes, beside the baselines."""
    from arborcast.synth.baselines.comparison import compare
    from arborcast.synth.formats.sizes import size_range
    from arborcast.synth.simulation.prices import is_priced
    from arborcast.synth.simulation.service import EARLIEST, Service

    picture = picture or output
    order = Service.of(service)
    schedule = read_correct(file)
    with progress(f"simulating {file}", quiet=as_json):
        comparison = compare(
            schedule,
            size_range(sizes),
            service=order,
            frame_bytes=frame,
            priced=priced,
            min_piece_bytes=min_piece,
        )
    if picture is not None:
        from arborcast.synth.pictures import draw_sweep

        title = f"{schedule.topology.name} {schedule.collective.kind}: simulated time and bus bandwidth"
        if order != EARLIEST:
            title += f", {order}"
        draw_sweep(comparison.by_method, picture, bound=schedule.bound, title=title)
    topology = schedule.topology
    document = {
        "scope": schedule.bound.scope.value,
        "picture": text_of(picture),
        "assumed": assumptions_document(topology),
    }
    told = is_priced(topology) and not priced
    answer(
        as_json,
        {**comparison.to_document(), **document, "priced": priced and is_priced(topology)},
        lambda: [
            *describe_comparison(comparison, schedule),
            *([UNPRICED] if told else []),
            *describe_assumptions(topology),
            *(f"{method}: {why}" for method, why in comparison.unavailable.items()),
            *([] if picture is None else [f"drawn {picture}"]),
        ],
    )


def run(
    file: File,
    sizes: Annotated[
        str, option("--sizes", "one size (0 for an empty tensor) or a range that doubles")
    ] = "16MiB",
    size: Annotated[str | None, typer.Option("--size", hidden=True)] = None,
    dtype: DataType = "float32",
    op: Annotated[ReductionName, option("--op", "how contributions are combined")] = "sum",
    iterations: Annotated[int, count("-n", "--iterations", "timed runs of each size")] = 5,
    warmup: Annotated[int, number("-w", "--warmup", "untimed warm-up runs")] = 1,
    deadline: Annotated[float, duration("--deadline", "stop all ranks after so many seconds")] = 300,
    collective: Annotated[
        str | None, option("--collective", "of a program whose file does not say what it does")
    ] = None,
    root: Annotated[int | None, number("--root", "of a program, where its file does not say it")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a schedule on local processes and check every element.

    The processes talk through torch.distributed. A program of another runtime (MSCCL's XML) is interpreted on
    whole numbers instead, in as many random orders of its thread blocks as there are --iterations.
    """
    if is_program(file):
        if dtype != "float32" or op != "sum":
            raise InputError(
                f"{file}: programs are interpreted on whole numbers that are added, without --dtype and --op"
            )
        run_program(file, collective, root, size or sizes, iterations, as_json)
        return
    from arborcast.backends.measure.job import RunError
    from arborcast.backends.measure.launch import run_schedule
    from arborcast.backends.measure.nccl_tests import TITLES, row_line
    from arborcast.synth.formats.sizes import size_range

    sizes = size or sizes  # --size was its name before
    schedule = read_correct(file)
    if schedule.topology.ranks > MOST_PROCESSES:
        raise InputError(
            f"{file}: at most {MOST_PROCESSES} ranks are run on one machine, got {schedule.topology.ranks}; "
            "synth program shows what one of them does, synth simulate how long all take"
        )
    with progress(f"running {file} on {schedule.topology.ranks} processes", quiet=as_json):
        try:
            rows = run_schedule(
                schedule,
                size_bytes=(0,) if sizes == "0" else size_range(sizes),
                dtype=dtype,
                op=op,
                iterations=iterations,
                warmup=warmup,
                timeout_s=deadline,
            )
        except RunError as error:
            raise NotCorrectError(f"{file}: {error}") from error
    wrong = next((row for row in rows if row.wrong), None)
    document = {"correct": wrong is None, "rows": [row.to_document() for row in rows], "backend": "gloo"}
    answer(as_json, document, lambda: [*TITLES, *map(row_line, rows)])
    if wrong is not None:
        raise NotCorrectError(f"{file}: {wrong.wrong} wrong elements at {wrong.bytes} bytes")


def expand(
    file: File,
    output: Annotated[Path, target("-o", "--output", "write every chunk and transfer here")],
    as_json: AsJson = False,
) -> None:
    """Write out every chunk and transfer of an implicit schedule."""
    from arborcast import synth

    with progress(f"expanding {file}", quiet=as_json):
        schedule = read_correct(file)
        if isinstance(schedule, synth.Schedule):
            raise InputError(f"{file}: is written out already, expand is for the implicit form")
        if schedule.transfer_count > MOST_EXPANDED:
            raise InputError(
                f"{file}: at most {MOST_EXPANDED} transfers are written out, got {schedule.transfer_count}; "
                "synth program shows those of one rank"
            )
        synth.write_schedule(schedule.expand(), output)
    found = {"chunks": schedule.chunk_count, "transfers": schedule.transfer_count, "file": text_of(output)}
    told = f"{output}: {found['chunks']} chunks, {found['transfers']} transfers"
    answer(as_json, found, lambda: [told])


def program(
    file: File,
    rank: Annotated[int, number("--rank", "whose program", metavar="R")] = 0,
    size: Annotated[str, option("--size", "of the whole buffer")] = "16MiB",
    dtype: DataType = "float32",
    every_operation: Annotated[bool, option("--all", "print every operation, not only the first")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what one rank sends, receives and reduces.

    It is worked out from the rank's own part of the schedule.
    """
    from arborcast.backends.measure.program_description import describe_program, program_document, program_of
    from arborcast.synth.formats.sizes import parse_size

    schedule = read_correct(file)
    found = program_of(schedule, rank, parse_size(size), dtype=dtype)
    if as_json:
        print_json(program_document(found))
        return
    shown = {"most": None} if every_operation else {}
    print_lines(describe_program(found, is_switch=rank >= schedule.topology.ranks, **shown))
