"""`synth groups`: several collectives at once on one fabric, its links shared as fairly as possible.

Groups are named one by one (`--group`), or as all lines of a mesh of ranks along an axis (`--mesh`,
`--along`): the tensor-, pipeline- and data-parallel groups of a training.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from arborcast.synth.cli.console import Stopwatch, answer, progress, table
from arborcast.synth.cli.description import (
    assumptions_document,
    describe_assumptions,
    describe_forwarding,
    model_of,
)
from arborcast.synth.cli.inputs import failing_as_json, load_fabric
from arborcast.synth.cli.options import (
    OF_MACHINES,
    AsJson,
    Deadline,
    FabricOptions,
    Seed,
    about_a_fabric,
    in_bytes,
    number_of,
    option,
    rank_list,
)
from arborcast.synth.errors import InputError
from arborcast.synth.formats.documents import picked
from arborcast.synth.formats.words import at_most, gigabytes, share
from arborcast.synth.topology import PLANNED

if TYPE_CHECKING:
    from arborcast.synth.collective import Collective
    from arborcast.synth.groups.result import GroupSchedules
    from arborcast.synth.simulation.timing import Timing
    from arborcast.synth.topology import Topology

MOST_LINES = 64
"""Groups that are listed on the screen; --json lists all."""


@about_a_fabric("ranks", "without_link", "without_rank", *OF_MACHINES)
def groups(
    fabric: FabricOptions,
    group: Annotated[
        list[str] | None,
        option(
            "--group",
            "such as allreduce:0,1,2,3 or broadcast:4-7, whose root is the first rank; again for each",
            metavar="KIND:RANKS",
        ),
    ] = None,
    mesh: Annotated[
        str | None, option("--mesh", "the ranks as a mesh, the last axis fastest", metavar="AxB")
    ] = None,
    along: Annotated[
        list[str] | None,
        option("--along", "a group on every line of the mesh along an axis", metavar="AXIS:KIND"),
    ] = None,
    weight: Annotated[
        list[str] | None,
        option("--weight", "of each --group, then each --along: weighted max-min fair rates", metavar="W"),
    ] = None,
    relays: Annotated[
        bool, option("--relays/--no-relays", "whether ranks outside a group may forward for it")
    ] = True,
    size: Annotated[int | None, in_bytes("--size", "simulate all at once, with buffers of this size")] = None,
    deadline: Deadline = None,
    seed: Seed = 0,
    output: Annotated[
        Path | None, option("-o", "--output", "folder for groups.json and a schedule per kind of group")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Share a fabric fairly among several collectives at once.

    The slowest is as fast as possible, then the next slowest, with proof.
    """
    from arborcast.synth.formats.atomic import check_folder
    from arborcast.synth.groups.fair_solver import solve_groups
    from arborcast.synth.groups.group_folder import write_groups
    from arborcast.synth.groups.shared_simulator import simulate_groups

    if output is not None:
        check_folder(output)
    on = load_fabric(fabric)
    topology = on.topology
    collectives, weights = _asked(topology, group or [], mesh, along or [], weight or [])
    watch = Stopwatch()
    what = f"sharing {topology.name} among {len(collectives)} groups"
    with failing_as_json(on, "groups", as_json), progress(what, quiet=as_json):
        found = solve_groups(
            topology, collectives, weights=weights, relays=relays, seed=seed, deadline_s=deadline
        )
        _verified(found)
        timings = simulate_groups(found, [size] * len(found.groups)) if size else None
    files = None if output is None else write_groups(found, output)
    document = groups_document(found, timings, files, watch.seconds, output)
    answer(as_json, document, lambda: describe_groups(found, document))


def _verified(found: GroupSchedules) -> None:
    """What is not correct is a bug of ours and leaves nothing behind."""
    from arborcast.synth.groups.shared_verifier import verify_groups

    verdict = verify_groups(found)
    if not verdict.correct:
        raise AssertionError(f"groups: the schedules are not correct: {'; '.join(verdict.errors)}")


def _asked(
    topology: Topology, named: Sequence[str], mesh: str | None, along: Sequence[str], weights: Sequence[str]
) -> tuple[list[Collective], list[Fraction]]:
    """The groups of the options in their order, each with its weight.

    Raises:
        InputError: an option that says nothing, too much, or what does not fit the topology.
    """
    if mesh is not None and not along:
        raise InputError(f"--mesh {mesh}: needs the axis of the groups (--along)")
    if not named and not along:
        raise InputError("groups: needs --group KIND:RANKS or --mesh AxB --along AXIS:KIND, got neither")
    if along and mesh is None:
        raise InputError(f"--along {along[0]}: needs the shape of the mesh (--mesh)")
    if weights and len(weights) != len(named) + len(along):
        raise InputError(
            f"--weight: must stand once for each --group and --along ({len(named) + len(along)}), "
            f"got {len(weights)}"
        )
    parts = [[_group(topology, text)] for text in named]
    parts += [_lines(topology, mesh, text) for text in along if mesh is not None]
    factors = [
        number_of("--weight", text, lambda weight: weight > 0, "must be positive") for text in weights
    ] or [Fraction(1)] * len(parts)
    pairs = [(group, factor) for part, factor in zip(parts, factors, strict=True) for group in part]
    return [group for group, _ in pairs], [factor for _, factor in pairs]


def _group(topology: Topology, text: str) -> Collective:
    from arborcast.synth.collective import Collective

    kind, colon, listed = text.partition(":")
    if not colon:
        raise InputError(f"--group {text}: must be KIND:RANKS, such as allreduce:0,1,2,3")
    try:
        ranks = rank_list(listed)
        return Collective.on(topology, kind, root=ranks[0], ranks=ranks)
    except InputError as error:
        message = str(error).removeprefix(f"--ranks {listed}: ")
        raise InputError(f"--group {text}: {message}") from error


def _lines(topology: Topology, mesh: str, text: str) -> list[Collective]:
    """A group for every line of the mesh along an axis; the last axis counts fastest."""
    from arborcast.synth.groups.mesh import along as on_lines

    sides = mesh.split("x")
    if not all(side.isdecimal() and int(side) for side in sides):
        raise InputError(f"--mesh {mesh}: must be sides of at least 1, such as 4x4 or 2x4x8")
    shape = [int(side) for side in sides]
    if prod(shape) != topology.ranks:
        raise InputError(f"--mesh {mesh}: must hold the {topology.ranks} ranks of the topology")
    axis, colon, kind = text.partition(":")
    if not colon or not axis.isdecimal() or int(axis) >= len(shape):
        raise InputError(
            f"--along {text}: must be AXIS:KIND with an axis from 0 to {len(shape) - 1}, such as 0:allreduce"
        )
    try:
        return on_lines(topology, shape, int(axis), kind)
    except InputError as error:
        raise InputError(f"--along {text}: {error}") from error


def groups_document(
    found: GroupSchedules,
    timings: Sequence[Timing] | None,
    files: Sequence[Path] | None,
    seconds: float,
    folder: Path | None,
) -> dict[str, Any]:
    """What `synth groups --json` prints."""
    level_of = {
        group: number for number, level in enumerate(found.certificate.levels) for group in level.groups
    }
    return {
        "topology": found.topology.name,
        "relays": found.certificate.relays,
        "worst": str(found.worst),
        "bound": str(found.certificate.worst),
        "optimal": found.certificate.is_exact,
        "model": model_of(found.topology.forwarding),
        "assumed": assumptions_document(found.topology),
        "groups": [
            {
                **picked(group.collective, "kind", "root", "ranks"),
                **picked(group, "weight", "alone", "rate"),
                "bound": str(found.certificate.levels[level_of[number]].bound * group.weight),
                "level": level_of[number],
                "method": group.written.method.name,
                "chunks": len(group.written.chunks),
                "steps": group.written.steps,
                "time_us": None if timings is None else timings[number].time_us,
                "file": None if files is None else str(files[number]),
            }
            for number, group in enumerate(found.groups)
        ],
        "seconds": seconds,
        "folder": None if folder is None else str(folder),
    }


def describe_groups(found: GroupSchedules, document: dict[str, Any]) -> list[str]:
    """The same as a table: the rate alone, the rate together, and what is proved of it."""
    timed = document["groups"][0]["time_us"] is not None
    header = ("group", "ranks", "weight", "alone", "together", "of alone", "bound", "chunks", "steps")
    rows = [
        (
            entry["kind"],
            _short(entry["ranks"]),
            entry["weight"],
            gigabytes(group.alone),
            gigabytes(group.rate),
            share(group.rate, group.alone),
            "reached" if entry["bound"] == entry["rate"] else gigabytes(Fraction(entry["bound"])),
            entry["chunks"],
            entry["steps"],
            *([f"{entry['time_us']:.1f}"] if timed else []),
        )
        for entry, group in zip(document["groups"][:MOST_LINES], found.groups, strict=False)
    ]
    more = len(found.groups) - len(rows)
    how = "ranks outside a group may forward for it" if document["relays"] else "each group on its own ranks"
    written = [] if document["folder"] is None else [f"  written  {document['folder']}"]
    return [
        f"{found.topology.name}: {len(found.groups)} groups at once, {how}",
        "",
        *table((*header, *(["us"] if timed else [])), rows, left=2),
        *([f"... and {more} more"] if more else []),
        "",
        f"  worst    {gigabytes(found.worst)} per unit of weight, "
        + (
            (f"the best by {PLANNED}" if found.topology.is_planned else "proved to be the best")
            if document["optimal"]
            else f"{at_most(Fraction(document['bound']), found.topology)} is possible"
        ),
        *describe_assumptions(found.topology),
        *describe_forwarding(found.topology),
        f"  levels   {len(found.certificate.levels)}",
        f"  time     {document['seconds']} s, verified",
        *written,
    ]


def _short(ranks: Sequence[int]) -> str:
    listed = ",".join(map(str, ranks[:4]))
    return listed if len(ranks) <= 4 else f"{listed},... ({len(ranks)})"
