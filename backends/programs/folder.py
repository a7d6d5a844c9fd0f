"""A table of schedules as a folder of programs for MSCCL or MSCCL++, with a README of commands that run them.

MSCCL reads every file of its folder, whatever its name, and the first in the order of names that fits a call
serves it. MSCCL++'s executor is given one plan, and refuses sizes that it is not for. So programs have a
folder of their own, and the README stands beside that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files as files_of
from itertools import count
from pathlib import Path

from arborcast.backends.lowering.layout import blocks_in
from arborcast.backends.programs import mscclpp
from arborcast.backends.programs.exporting.export import rounded
from arborcast.backends.programs.exporting.switches import BLOCKS
from arborcast.backends.programs.formats import FORMATS
from arborcast.backends.programs.program import GlobalProgram, ProgramError
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.formats.atomic import check_folder, write_atomically
from arborcast.synth.formats.sizes import format_size
from arborcast.synth.nccl_protocol import Protocol
from arborcast.synth.schedule import Schedule
from arborcast.synth.selection import Choice

LARGEST_LL = 256 << 10
"""Bytes up to which programs use LL, which is fast and has half of the bandwidth."""

LEAST_RATE_KEPT = 0.97
"""Of a rate when shares are rounded to a power of two, so that usual sizes divide by the chunks."""

_TESTS = {Kind.ALLGATHER: "all_gather", Kind.ALLREDUCE: "all_reduce"}
"""Which test of nccl-tests runs a kind, where it is not called as the kind is."""


@dataclass(frozen=True, slots=True)
class TableFolder:
    """What is different between runtimes.

    Attributes:
        name: of the runtime.
        programs: the folder of their files.
        suffix: of these.
        alone: why there may be no others.
        readme: the README, with places for what differs, among `readmes`.
    """

    name: str
    programs: str
    suffix: str
    alone: str
    readme: str


@dataclass(frozen=True)
class Exported:
    """What stands in the folder.

    Attributes:
        files: of the programs, and the program in each.
        missing: what did not fit, one line each.
    """

    files: dict[str, GlobalProgram]
    missing: tuple[str, ...]


def export_table(
    choices: Sequence[Choice],
    folder: Path,
    *,
    runtime: str = "msccl",
    ranks_per_host: int | None = None,
    most_bytes: int | None = None,
) -> Exported:
    """Programs of all choices, in place and not, each for its range of sizes.

    Args:
        choices: schedules of one collective with the sizes from which each serves, ascending.
        folder: made if it is not there.
        runtime: one of `formats.TABLES`.
        ranks_per_host: of MSCCL++, where ranks are of several hosts.
        most_bytes: where the last choice ends; None for no limit.

    Raises:
        InputError: the folder cannot be written to, or none of the schedules fits.
    """
    check_folder(folder)
    row = FORMATS[runtime]
    export, write, to = row.load("export"), row.load("write"), row.load("table")
    files: dict[str, GlobalProgram] = {}
    missing: list[str] = []
    explicit = [replace(choice, schedule=choice.schedule.expand()) for choice in choices]
    for number, (choice, least, most, small) in enumerate(_ranges(explicit, most_bytes)):
        schedule = choice.schedule
        assert isinstance(schedule, Schedule), "it is written out"
        for in_place in (True, False):
            name = (
                f"{number:02d}-{schedule.collective.kind}-{'in' if in_place else 'out-of'}-place.{to.suffix}"
            )
            way = f"{_range(least, most)}, {'in' if in_place else 'out of'} place"
            try:
                program = export(
                    schedule,
                    in_place=in_place,
                    protocol=Protocol.LL if small else Protocol.SIMPLE,
                    chunks=usual_units(schedule) * (BLOCKS if schedule.uses_switches else 1),
                    least_bytes=least,
                    most_bytes=most,
                    **({} if ranks_per_host is None else {"ranks_per_host": ranks_per_host}),
                )
            except ProgramError as error:
                missing.append(f"{way}: {error}")
                continue
            if most is not None and runtime == "mscclpp" and _first(program) > most:
                missing.append(f"{way}: {program.chunks} chunks begin at {_first(program)} bytes")
                continue
            files[name] = program
    if not files:
        raise InputError(f"{folder}: nothing to write: {missing[0]}")
    (folder / to.programs).mkdir(parents=True, exist_ok=True)
    other = min((it.name for it in (folder / to.programs).iterdir() if it.name not in files), default=None)
    if other is not None:
        raise InputError(f"{folder / to.programs}: must hold nothing else, {to.alone}, got {other}")
    for name, program in files.items():
        write_atomically(folder / to.programs / name, write(program))
    write_atomically(folder / "README.md", _readme(to, files, missing))
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


def _ranges(choices: Sequence[Choice], end: int | None) -> list[tuple[Choice, int, int | None, bool]]:
    """Each choice with its first and last bytes, and whether by LL; what both protocols share is cut in two.

    Switches add no packets.
    """
    ranges: list[tuple[Choice, int, int | None, bool]] = []
    for place, choice in enumerate(choices):
        schedule = choice.schedule
        least = choice.from_bytes if place else 0
        most = choices[place + 1].from_bytes - 1 if place + 1 < len(choices) else end
        packets = not schedule.uses_switches
        if packets and least < LARGEST_LL and (most is None or most > LARGEST_LL):
            ranges += [(choice, least, LARGEST_LL, True), (choice, LARGEST_LL + 1, most, False)]
        else:
            ranges.append((choice, least, most, packets and most is not None and most <= LARGEST_LL))
    return ranges


def _range(least: int, most: int | None) -> str:
    return (
        f"{format_size(least)} and more" if most is None else f"{format_size(least)} to {format_size(most)}"
    )


def _readme(to: TableFolder, files: dict[str, GlobalProgram], missing: Sequence[str]) -> str:
    program = next(iter(files.values()))
    kind, root = program.kind, program.root
    rows = [
        f"| {name} | {_range(one.least_bytes, one.most_bytes)} | {one.protocol} | {one.chunks} "
        f"| {one.channels} |"
        for name, one in files.items()
    ]
    left_out = "\n".join(f"- {line}" for line in missing)
    of_call = f"{to.name} does not look at the root of a call, so name no other."
    return (
        (files_of(__package__) / "readmes" / to.readme)
        .read_text(encoding="utf-8")
        .format(
            kind=kind,
            ranks=program.ranks,
            alignment=mscclpp.limits.ALIGNMENT,
            rows="\n".join(rows),
            root="" if root is None else f"\nIts root is rank {root}; {of_call}\n",
            of_root="" if root is None else f" --root {root}",
            missing=f"\nWhat does not fit {to.name} and is left to NCCL:\n\n{left_out}\n" if missing else "",
            test=_TESTS.get(kind, kind.replace("-", "_")) + "_perf",
            commands=_executor_tests(files),
        )
    )


def _executor_tests(files: dict[str, GlobalProgram]) -> str:
    kind = next(iter(files.values())).kind
    if kind in {Kind.BROADCAST, Kind.REDUCE}:
        return (
            f"MSCCL++'s `executor_test.py` has no data for {kind}: it checks allgather, reducescatter,\n"
            "allreduce and alltoall. `synth run` interprets a plan on data of its own."
        )
    lines = [
        f"mpirun -np {one.ranks} python3 $MSCCLPP/python/test/executor_test.py \\\n"
        f"    -path $PWD/mscclpp-plans/{name} --size {_first(one)}{' --in_place' if one.in_place else ''}"
        for name, one in files.items()
    ]
    return "\n".join(["```", *lines, "```"])


def _first(program: GlobalProgram) -> int:
    """The least bytes that a plan takes: a power of two, where one does."""
    unit, most = mscclpp.limits.ALIGNMENT * program.chunks, program.most_bytes
    least = max(unit, -(-program.least_bytes // unit) * unit)
    power = 1 << (least - 1).bit_length()
    return power if power % unit == 0 and (most is None or power <= most) else least


MSCCL = TableFolder("MSCCL", "msccl-algorithms", "xml", "as MSCCL reads every file", "msccl.md")

MSCCLPP = TableFolder("MSCCL++", "mscclpp-plans", "json", "as its plans are one table", "mscclpp.md")
