"""Programs for other runtimes: `synth export`, `synth import`, what verify and run do with their files."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from arborcast.backends.programs.formats import FORMATS, TABLES, holds_program, runtime_of
from arborcast.synth.cli.console import Json, answer, print_json, print_lines, progress
from arborcast.synth.cli.inputs import NotCorrectError, conclude, read_correct, text_of
from arborcast.synth.cli.options import (
    AsJson,
    Deadline,
    File,
    NoInNetwork,
    Root,
    collective_name,
    count,
    option,
    rank_list,
    refuse,
    target,
    writable,
)
from arborcast.synth.errors import InputError, TimedOutError
from arborcast.synth.formats.documents import picked
from arborcast.synth.formats.reading import head_of
from arborcast.synth.formats.words import gigabytes, of_bound

if TYPE_CHECKING:
    from arborcast.backends.programs.checking.verdict import ProgramVerdict
    from arborcast.backends.programs.program import GlobalProgram
    from arborcast.backends.programs.traffic import Traffic
    from arborcast.synth.collective import Kind
    from arborcast.synth.deadline import Limit
    from arborcast.synth.schedule import Schedule
    from arborcast.synth.selection import Choice
    from arborcast.synth.topology import Topology

_HEAD = 4096

if TYPE_CHECKING:
    Target: TypeAlias = str
else:
    Target = Literal[tuple(FORMATS)]
ProtocolName = Literal["Simple", "LL", "LL128"]


def is_program(file: Path) -> bool:
    """Whether a file holds a program rather than a schedule; what cannot be read is left to others to say."""
    return holds_program(head_of(file, _HEAD))


def export(
    source: Annotated[str, typer.Argument(help="a schedule file; or, with a collective, a topology")],
    collective: Annotated[
        str | None,
        typer.Argument(
            parser=collective_name,
            metavar="[COLLECTIVE]",
            help=f"a table: schedules for all --sizes, as a folder ({', '.join(TABLES)})",
        ),
    ] = None,
    to: Annotated[
        Target, option("--to", "; ".join(f"{name}: {row.about}" for name, row in FORMATS.items()))
    ] = "msccl",
    output: Annotated[Path, option("-o", "--output", "the file to write; of a table, the folder")] = ...,  # type: ignore[assignment]
    root: Root = None,
    protocol: Annotated[ProtocolName, option("--protocol", "LL for small messages")] = "Simple",
    out_of_place: Annotated[
        bool, option("--out-of-place", "for calls with two buffers; by default for those in place")
    ] = False,
    chunks: Annotated[
        int | None,
        count(
            "--chunks",
            "round shares to so many chunks of the buffer; MSCCL passes over sizes that are no "
            "multiple of them",
        ),
    ] = None,
    channels: Annotated[int | None, count("--channels", "at most so many; by default as many as fit")] = None,
    sizes: Annotated[
        str | None, option("--sizes", "for which buffers, such as 1KiB:1MiB; of a table, those compared")
    ] = None,
    ranks_per_host: Annotated[
        int | None, count("--ranks-per-host", "mscclpp: ranks of several hosts write through proxies")
    ] = None,
    pieces: Annotated[int | None, count("--pieces", "goal, chakra, jax: messages of a chunk")] = None,
    gpus: Annotated[
        str | None,
        option(
            "--gpus",
            "nccl-graph: the number of each rank's GPU in nvidia-smi, which NCCL before 2.30.3 goes by; by "
            "default that of the rank",
            metavar="N,N,...",
        ),
    ] = None,
    deadline: Deadline = None,
    no_in_network: NoInNetwork = False,
    as_json: AsJson = False,
) -> None:
    """Write a schedule as a program for another runtime.

    What is written has passed the checker of programs, which shares no code with the export.
    """
    from arborcast.synth.formats.sizes import size_range
    from arborcast.synth.nccl_protocol import Protocol

    numbers = {"chunks": chunks, "channels": channels, "ranks_per_host": ranks_per_host, "pieces": pieces}
    wishes: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    if out_of_place:
        wishes["in_place"] = False
    if gpus is not None:
        wishes["gpus"] = rank_list(gpus)
    if protocol != "Simple":
        wishes["protocol"] = Protocol(protocol)
    span = None if sizes is None else size_range(sizes)
    if collective is not None:
        _export_table(source, collective, root, to, wishes, span, output, deadline, no_in_network, as_json)
        return
    refuse("the schedule has its own", root=root)
    refuse("is for tables; the schedule uses switches as it was solved", no_in_network=no_in_network)
    if span is not None:
        wishes |= {"least_bytes": span[0], "most_bytes": span[-1]}
    _export_schedule(Path(source), to, wishes, output, as_json)


def _export_schedule(source: Path, to: str, wishes: dict[str, Any], output: Path, as_json: bool) -> None:
    from arborcast import backends
    from arborcast.backends.programs.formats import export_files
    from arborcast.backends.programs.pacing import expected

    writable(output)
    with progress(f"exporting {source}", quiet=as_json):
        schedule = read_correct(source)
        said, program = export_files(schedule, to, output, **wishes)
    if program is None:
        document = {"file": text_of(output), "format": to, "said": said}
        answer(as_json, document, lambda: [f"{output}: {said}", *_not_kept(schedule.topology)])
        return
    found = expected(program, backends.check_program(program).messages, schedule.topology, schedule.bound)
    if as_json:
        print_json({"file": text_of(output), **_facts(program), "rate": str(found.rate)})
        return
    rate = _rate_line(program, found, schedule.topology)
    told = [f"{output}: {_words(program)}", f"  {_served(program)}", rate]
    print_lines([*told, *_not_kept(schedule.topology)])
    if found.rate < schedule.rate * (Fraction(9, 10) if program.loops else 1):
        print_lines(
            [
                f"  the schedule reaches {gigabytes(schedule.rate)}; the program's shares are rounded or "
                "not cut into pieces, or it cannot say which way messages take"
            ]
        )


def import_(
    file: File,
    topology: Annotated[str, option("--topology", "the fabric that it is for")],
    output: Annotated[Path, target("-o", "--output", "write the schedule here")],
    collective: Annotated[
        str | None, option("--collective", "what it does, where the file does not say")
    ] = None,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Make a schedule of another runtime's program."""
    from arborcast import synth

    with progress(f"reading {file}", quiet=as_json):
        schedule = read_schedule_of_program(file, topology, collective, root)
        synth.write_schedule(schedule, output)
    rate, limit = schedule.rate, schedule.bound.rate
    told = f"{output}: {schedule.chunk_count} chunks, {gigabytes(rate)}, "
    told += of_bound(rate, limit, schedule.topology)
    document = {"file": text_of(output), "rate": str(rate), "bound": str(limit)}
    answer(as_json, document, lambda: [told])


def read_schedule_of_program(
    file: Path, topology: str, collective: str | None = None, root: int | None = None
) -> Schedule:
    """The schedule of a program of another runtime, on the fabric that it is for."""
    from arborcast import topologies
    from arborcast.backends.programs.formats import read_as_schedule

    return read_as_schedule(file, topologies.load(topology), kind=_kind(collective), root=root)


def read_program(file: Path, collective: str | None, root: int | None) -> GlobalProgram:
    """The program in a file of another runtime."""
    from arborcast import backends

    return backends.read_program(file, kind=_kind(collective), root=root)


def _kind(collective: str | None) -> Kind | None:
    from arborcast.synth.collective import NAMED_KINDS, Kind

    if collective is None:
        return None
    kind = Kind.named(collective)
    if kind not in NAMED_KINDS:
        raise InputError(f"--collective {collective}: must be one of {', '.join(NAMED_KINDS)}")
    return kind


def verify_program(
    file: Path,
    collective: str | None,
    root: int | None,
    topology: str | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Check a program of another runtime, and say what it puts on a topology."""
    from arborcast import backends, topologies
    from arborcast.backends.programs.formats import holds_schedule
    from arborcast.backends.programs.pacing import expected
    from arborcast.backends.programs.picture import draw_counterexample

    fabric = None if topology is None else topologies.load(topology)
    if holds_schedule(file):
        _verify_schedule(file, collective, root, fabric, as_json)
        return
    with progress(f"verifying {file}", quiet=as_json):
        program = read_program(file, collective, root)
        verdict = backends.check_program(program)
        found = None if fabric is None or not verdict.correct else expected(program, verdict.messages, fabric)
    if picture is not None and verdict.trace:
        draw_counterexample(verdict, picture, name=file.name)
        if not as_json:
            print_lines([f"drawn {picture}"])
    rate = [] if found is None or fabric is None else [_rate_line(program, found, fabric)]
    told = [f"  {_words(program)}", *rate, *(f"  note  {note}" for note in verdict.notes)]
    document = _verdict_document(program, verdict, found, picture if verdict.trace else None)
    conclude(file, verdict.errors, as_json, document, lambda: told)


def _verify_schedule(
    file: Path, collective: str | None, root: int | None, fabric: Topology | None, as_json: bool
) -> None:
    """Check rings for NCCL, steps of SCCL or what JAX lowers by the verifier of schedules."""
    from arborcast import synth
    from arborcast.backends.programs.formats import read_as_schedule
    from arborcast.backends.programs.program import WrongProgramError

    with progress(f"verifying {file}", quiet=as_json):
        try:
            schedule = read_as_schedule(file, fabric, kind=_kind(collective), root=root)
        except WrongProgramError as error:
            raise NotCorrectError(str(error)) from error
        verdict = synth.verify(schedule)
    kind, bound = schedule.collective.kind, schedule.bound.rate
    facts = {"collective": str(kind), "rate": str(schedule.rate), "bound": str(bound)}
    part = of_bound(schedule.rate, bound, schedule.topology)
    document = {"errors": list(verdict.errors), **facts}
    conclude(
        file, verdict.errors, as_json, document, lambda: [f"  {kind}  {gigabytes(schedule.rate)}, {part}"]
    )


def run_program(
    file: Path, collective: str | None, root: int | None, sizes: str, orders: int, as_json: bool
) -> None:
    """Interpret a program on whole numbers under random orders of its thread blocks."""
    from arborcast.backends.programs.checking.structure import check_buffers
    from arborcast.backends.programs.interpreter import CALLS, interpret
    from arborcast.backends.programs.limits import chunks_together
    from arborcast.synth.formats.sizes import size_range

    program = read_program(file, collective, root)
    if not program.one_sided:
        wrong = next(check_buffers(program), None)
        if wrong is not None:
            raise NotCorrectError(f"{file}: {wrong}")
    rows: list[Json] = []
    with progress(f"running {file}", quiet=as_json):
        for size in size_range(sizes):
            elements = max(1, size // (8 * program.chunks))
            if elements * program.chunks * program.ranks > MOST_ELEMENTS:
                raise InputError(
                    f"--sizes {sizes}: at most {MOST_ELEMENTS} elements on all ranks are interpreted, got "
                    f"{elements * program.chunks * program.ranks}"
                )
            ways = [way for way, can in ((True, program.in_place), (False, program.out_of_place)) if can]
            together = chunks_together(program, 8 * elements * program.chunks)
            found = [
                interpret(
                    program,
                    in_place=way,
                    seed=seed,
                    elements=elements,
                    calls=CALLS if program.one_sided else 1,
                    loops=2 if together == 1 and not program.one_sided else 1,
                    together=together,
                )
                for way in ways
                for seed in range(orders)
            ]
            rows.append(
                {
                    "bytes": 8 * elements * program.chunks,
                    "orders": len(found),
                    "wrong": sum(one.wrong for one in found),
                    "hangs": next((one.hangs for one in found if one.hangs is not None), None),
                }
            )
    bad = next((row for row in rows if row["wrong"] or row["hangs"]), None)
    told = [f"{row['bytes']} bytes, {row['orders']} orders: {row['wrong']} wrong" for row in rows]
    answer(as_json, {"correct": bad is None, "rows": rows, "backend": "interpreter"}, lambda: told)
    if bad is not None:
        raise NotCorrectError(
            f"{file}: {bad['hangs'] or str(bad['wrong']) + ' wrong elements'} at {bad['bytes']} bytes"
        )


MOST_ELEMENTS = 1 << 25
"""Elements of all ranks together that `run` interprets, of eight bytes."""


def _export_table(
    spec: str,
    collective: str,
    root: int | None,
    to: str,
    wishes: dict[str, Any],
    sizes: tuple[int, ...] | None,
    folder: Path,
    deadline: Limit,
    no_in_network: bool,
    as_json: bool,
) -> None:
    from arborcast.backends.programs.folder import export_table
    from arborcast.synth.cli.inputs import collective_on, load_fabric
    from arborcast.synth.cli.options import FabricOptions
    from arborcast.synth.formats.atomic import check_folder
    from arborcast.synth.selection import SIZES

    per_host = wishes.pop("ranks_per_host", None)
    if wishes.keys() - {"pieces"}:
        raise InputError("export of a table: --protocol, --chunks, --channels and --out-of-place are chosen")
    if to not in TABLES or wishes:
        raise InputError(f"--to {to}: tables are exported for {' and '.join(TABLES)}")
    if to == "msccl" and per_host is not None:
        raise InputError("--ranks-per-host: is nothing that msccl knows")
    check_folder(folder)
    # Sums that switches give to one rank alone have no operation in MSCCL++.
    forwarding = no_in_network or to == "msccl" or collective in {"reduce", "reduce-scatter"}
    on = load_fabric(FabricOptions(spec, no_in_network=forwarding))
    with progress(f"exporting {collective} on {on.topology.name}", quiet=as_json):
        choices = _choices(collective_on(collective, on, root), on.topology, sizes or SIZES, deadline)
        exported = export_table(choices, folder, runtime=to, ranks_per_host=per_host)
    if as_json:
        files = [{"file": name, **_facts(program)} for name, program in exported.files.items()]
        print_json({"folder": text_of(folder), "files": files, "missing": list(exported.missing)})
        return
    print_lines(f"{name}: {_served(program)}" for name, program in exported.files.items())
    print_lines(f"left to NCCL: {line}" for line in exported.missing)
    print_lines([f"{folder}/README.md has the commands", *_not_kept(on.topology)])


def _choices(
    collective: object, topology: object, sizes: tuple[int, ...], deadline: Limit
) -> tuple[Choice, ...]:
    from arborcast.synth.api import approach
    from arborcast.synth.solve_options import SolveOptions

    asked = approach(topology, collective, "auto", SolveOptions(deadline_s=deadline), "explicit")  # type: ignore[arg-type]
    selection = asked.selection()
    if selection.out_of_time is not None:
        raise TimedOutError(str(selection.out_of_time), selection.schedules[0])
    return selection.choices(sizes)


def _facts(program: GlobalProgram) -> Json:
    return {
        "collective": str(program.kind),
        **picked(program, "root", "ranks", "chunks", "protocol", "channels"),
        "thread_blocks": max(len(part.blocks) for part in program.parts),
        "steps": program.operation_count,
        **picked(program, "in_place", "out_of_place", "least_bytes", "most_bytes"),
    }


def _words(program: GlobalProgram) -> str:
    ways = [
        way for way, can in (("in place", program.in_place), ("out of place", program.out_of_place)) if can
    ]
    blocks = max(len(part.blocks) for part in program.parts)
    return (
        f"{program.kind} among {program.ranks} ranks, {' and '.join(ways)}: {program.chunks} chunks by "
        f"{program.protocol}, {program.operation_count} steps, at most {blocks} thread blocks a rank, "
        f"{program.channels} channels"
    )


def _served(program: GlobalProgram) -> str:
    from arborcast.backends.programs.mscclpp.limits import ALIGNMENT

    end = "" if program.most_bytes is None else f" to {program.most_bytes}"
    of = f"whose elements are a multiple of {program.chunks}"
    if program.one_sided:
        of = f"that are a multiple of {ALIGNMENT * program.chunks}"
    return (
        f"serves {program.least_bytes}{end or ' and more'} bytes {of}, "
        f"{'in' if program.in_place else 'out of'} place"
    )


def _not_kept(topology: Topology) -> list[str]:
    """What whoever runs a program of the topology does not see to."""
    said = "  streams are not kept: what runs this may send to more ranks at once than the topology says"
    return [said] if topology.streams else []


def _rate_line(program: GlobalProgram, found: Traffic, topology: Topology) -> str:
    from arborcast.backends.programs.pacing import timed_bytes
    from arborcast.synth.formats.sizes import format_size

    part = of_bound(found.rate, found.bound.rate, topology)
    how = "as its puts follow each other" if program.one_sided else "by the fullest link"
    if program.loops:
        how += f" at {format_size(timed_bytes(program))}"
    return f"  rate  {gigabytes(found.rate)} {how}, {part}"


def _verdict_document(
    program: GlobalProgram, verdict: ProgramVerdict, found: Traffic | None, picture: Path | None
) -> Json:
    return {
        "format": runtime_of(program),
        **_facts(program),
        **picked(verdict, "errors", "notes"),
        "kinds": sorted(verdict.kinds),
        "trace": [picked(wait, "rank", "block", "step", "text") for wait in verdict.trace],
        "rate": None if found is None else str(found.rate),
        "bound": None if found is None else str(found.bound.rate),
        "max_link_load": None if found is None else str(max(found.loads.values(), default=Fraction(0))),
        "picture": text_of(picture),
    }
