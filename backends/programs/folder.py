"""A table of schedules as a folder that MSCCL reads, with a README of the commands that run and check it.

MSCCL reads every file of its folder, whatever its name, and the first in the order of names that fits a call
serves it. So programs have a folder of their own, and the README stands beside that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from arborcast.backends.lowering.layout import blocks_in
from arborcast.backends.programs.exporting.export import export_program, rounded
from arborcast.backends.programs.msccl.writer import write
from arborcast.backends.programs.program import GlobalProgram, ProgramError, Protocol
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.formats.atomic import check_folder, write_atomically
from arborcast.synth.formats.sizes import format_size
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Schedule
from arborcast.synth.selection import Choice

PROGRAMS = "msccl-algorithms"
"""The folder within the folder."""

LARGEST_LL = 256 << 10
"""Bytes up to which programs use LL, which is fast and has half of the bandwidth."""

LEAST_RATE_KEPT = 0.97
"""Of a rate when shares are rounded to a power of two, so that usual sizes divide by the chunks."""

_TESTS = {
    Kind.BROADCAST: "broadcast_perf",
    Kind.REDUCE: "reduce_perf",
    Kind.ALLGATHER: "all_gather_perf",
    Kind.REDUCE_SCATTER: "reduce_scatter_perf",
    Kind.ALLREDUCE: "all_reduce_perf",
    Kind.GATHER: "gather_perf",
    Kind.SCATTER: "scatter_perf",
    Kind.ALLTOALL: "alltoall_perf",
}


@dataclass(frozen=True)
class Exported:
    """What stands in the folder.

    Attributes:
        files: of the programs, and the program in each.
        missing: what did not fit, one line each.
    """

    files: dict[str, GlobalProgram]
    missing: tuple[str, ...]


def export_table(choices: Sequence[Choice], folder: Path, *, most_bytes: int | None = None) -> Exported:
    """Programs of all choices, in place and not, each for its range of sizes.

    Args:
        choices: schedules of one collective with the sizes from which each serves, ascending.
        folder: made if it is not there.
        most_bytes: where the last choice ends; None for no limit.

    Raises:
        InputError: the folder cannot be written to, or none of the schedules fits.
    """
    check_folder(folder)
    files: dict[str, GlobalProgram] = {}
    missing: list[str] = []
    for number, (choice, least, most) in enumerate(_ranges(choices, most_bytes)):
        explicit = (
            choice.schedule.expand() if isinstance(choice.schedule, ImplicitSchedule) else choice.schedule
        )
        units = usual_units(explicit)
        small = most is not None and most <= LARGEST_LL
        for in_place in (True, False):
            name = f"{number:02d}-{explicit.collective.kind}-{'in' if in_place else 'out-of'}-place.xml"
            try:
                files[name] = export_program(
                    explicit,
                    in_place=in_place,
                    protocol=Protocol.LL if small else Protocol.SIMPLE,
                    chunks=units,
                    least_bytes=least,
                    most_bytes=most,
                )
            except ProgramError as error:
                missing.append(f"{_range(least, most)}, {'in' if in_place else 'out of'} place: {error}")
    if not files:
        raise InputError(f"{folder}: nothing to write: {missing[0]}")
    (folder / PROGRAMS).mkdir(parents=True, exist_ok=True)
    other = min((it.name for it in (folder / PROGRAMS).iterdir() if it.name not in files), default=None)
    if other is not None:
        raise InputError(
            f"{folder / PROGRAMS}: must hold nothing else, as MSCCL reads every file, got {other}"
        )
    for name, program in files.items():
        write_atomically(folder / PROGRAMS / name, write(program))
    write_atomically(folder / "README.md", _readme(files, missing))
    return Exported(files, tuple(missing))


def usual_units(schedule: Schedule) -> int:
    """The least power of two of chunks a block that keeps nearly all of the rate.

    MSCCL passes over sizes whose elements are no multiple of the chunks, and sizes are powers of two mostly.
    """
    blocks = blocks_in(schedule.collective)
    for power in count():
        units = blocks << power
        short = rounded(schedule, units)
        if short.chunks and float(short.rate) >= LEAST_RATE_KEPT * float(schedule.rate):
            return units
    raise AssertionError("shares are rounded to themselves in the end")


def _ranges(choices: Sequence[Choice], end: int | None) -> list[tuple[Choice, int, int | None]]:
    """Each choice with its first and last bytes; one that LL and Simple share is cut in two."""
    ranges: list[tuple[Choice, int, int | None]] = []
    for place, choice in enumerate(choices):
        least = choice.from_bytes if place else 0
        most = choices[place + 1].from_bytes - 1 if place + 1 < len(choices) else end
        if least < LARGEST_LL and (most is None or most > LARGEST_LL):
            ranges += [(choice, least, LARGEST_LL), (choice, LARGEST_LL + 1, most)]
        else:
            ranges.append((choice, least, most))
    return ranges


def _range(least: int, most: int | None) -> str:
    return (
        f"{format_size(least)} and more" if most is None else f"{format_size(least)} to {format_size(most)}"
    )


def _readme(files: dict[str, GlobalProgram], missing: Sequence[str]) -> str:
    program = next(iter(files.values()))
    kind, ranks = program.kind, program.ranks
    rows = [
        f"| {name} | {_range(one.least_bytes, one.most_bytes)} | {one.protocol} | {one.chunks} "
        f"| {one.channels} |"
        for name, one in files.items()
    ]
    root = (
        [
            f"Its root is rank {program.root}; MSCCL does not look at the root of a call, so name no other.",
            "",
        ]
        if program.root is not None
        else []
    )
    left_out = ["What does not fit MSCCL and is left to NCCL:", "", *(f"- {line}" for line in missing), ""]
    return "\n".join(
        [
            f"# {kind} among {ranks} ranks, for MSCCL",
            "",
            "One process for each GPU, ranks in the order of the topology. MSCCL reads every file of the",
            "folder that MSCCL_ALGO_DIR names, so keep nothing else in it.",
            "",
            "| file | bytes of the whole buffer | protocol | chunks | channels |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "A call whose elements are no multiple of the chunks, or that averages, runs NCCL's own.",
            "",
            *root,
            *(left_out if missing else []),
            "## Check each file",
            "",
            "```",
            f"for file in {PROGRAMS}/*.xml; do synth verify $file; done",
            "```",
            "",
            "## Run and check data with nccl-tests, under Azure's msccl-executor-nccl",
            "",
            "```",
            f"mpirun -np {ranks} -x MSCCL_ALGO_DIR=$PWD/{PROGRAMS} -x LD_LIBRARY_PATH=$EXECUTOR/build/lib \\",
            f"    -x NCCL_DEBUG=INFO {_TESTS[kind]} -b 1K -e 1G -f 2 -g 1 -c 1",
            "```",
            "",
            "RCCL needs `-x RCCL_MSCCL_FORCE_ENABLE=1` besides, and a build with MSCCL's kernel.",
            "",
        ]
    )
