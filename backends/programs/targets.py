"""Schedules in the files of other runtimes and simulators, by the name of each.

A file, or of Chakra one for each rank, whose names end in `.RANK.et` as ASTRA-sim wants them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from arborcast.backends.programs import chakra, goal, nccl_graph, sccl
from arborcast.backends.programs.exporting.export import export_program
from arborcast.backends.programs.exporting.one_sided import export_one_sided
from arborcast.backends.programs.files import write_program
from arborcast.backends.programs.program import GlobalProgram, ProgramError, Protocol
from arborcast.synth.features import check_features
from arborcast.synth.formats.atomic import write_atomically
from arborcast.synth.implicit_schedule import AnySchedule


@dataclass(frozen=True, slots=True)
class Wishes:
    """What an export may be told; each target reads its own part and refuses the rest.

    Attributes:
        in_place: whether outputs lie over inputs.
        protocol: of MSCCL++.
        chunks: to which shares are rounded.
        channels: at most so many.
        ranks_per_host: where ranks are of several hosts.
        least_bytes: the smallest buffer that it is for.
        most_bytes: the largest; of simulators, the one that they simulate.
        pieces: in which simulators' chunks are cut.
    """

    in_place: bool = True
    protocol: Protocol = Protocol.SIMPLE
    chunks: int | None = None
    channels: int | None = None
    ranks_per_host: int | None = None
    least_bytes: int = 0
    most_bytes: int | None = None
    pieces: int | None = None


_PROGRAM = {"in_place", "protocol", "chunks", "channels", "least_bytes", "most_bytes"}
_READS = {
    "msccl": _PROGRAM,
    "mscclpp": _PROGRAM | {"ranks_per_host"},
    "nccl-graph": set[str](),
    "goal": {"least_bytes", "most_bytes", "pieces"},
    "chakra": {"least_bytes", "most_bytes", "pieces"},
    "sccl": set[str](),
}

NAMES = {
    name: f"--{name.replace('_', '-')}"
    for name in ("protocol", "chunks", "channels", "ranks_per_host", "pieces")
} | {
    "in_place": "--out-of-place",
    "least_bytes": "--sizes",
    "most_bytes": "--sizes",
}


def export_files(
    schedule: AnySchedule, target: str, path: Path, wishes: Wishes
) -> tuple[str, GlobalProgram | None]:
    """Write a schedule for one of these; what was written, in words where it is no program.

    Raises:
        ProgramError: the target does not know a wish, or the schedule does not fit it.
        CollectiveError: blocks differ in size.
    """
    check_features(schedule.topology, "export")
    schedule.collective.check_is_even()
    for name in Wishes.__dataclass_fields__:
        if name not in _READS[target] and getattr(wishes, name) != getattr(Wishes(), name):
            raise ProgramError(f"{NAMES[name]}: is nothing that {target} knows")
    if target in {"msccl", "mscclpp"}:
        given = {name: getattr(wishes, name) for name in _READS[target]}
        program = (
            export_program(schedule, **given) if target == "msccl" else export_one_sided(schedule, **given)
        )
        write_program(program, path)
        return "", program
    if target in _SIMULATED:
        if wishes.most_bytes is None or wishes.most_bytes != wishes.least_bytes:
            raise ProgramError(f"{target}: simulates one size; name it (--sizes)")
        return _SIMULATED[target](schedule, path, wishes.most_bytes, wishes.pieces or 1), None
    if target == "sccl":
        write_atomically(path, sccl.write(schedule))
        return "steps and rounds", None
    graphs = nccl_graph.export_graphs(schedule)
    write_atomically(path, nccl_graph.write(graphs))
    return f"{len(set(graphs.rings))} orders of the ranks, {len(graphs.rings)} channels", None


def _goal(schedule: AnySchedule, path: Path, size: int, pieces: int) -> str:
    text = goal.write(schedule, size, pieces=pieces)
    write_atomically(path, text)
    return text.splitlines()[1].removeprefix("// ")


def _chakra(schedule: AnySchedule, path: Path, size: int, pieces: int) -> str:
    files = chakra.write(schedule, size, pieces=pieces)
    for rank, content in enumerate(files):
        write_atomically(path.with_name(f"{path.name}.{rank}.et"), content)
    return f"{path.name}.0.et to {path.name}.{len(files) - 1}.et"


_SIMULATED: Mapping[str, Callable[[AnySchedule, Path, int, int], str]] = {"goal": _goal, "chakra": _chakra}
