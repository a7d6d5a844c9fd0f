"""`synth atlas`: all that is known of a machine on one page, or of every machine that people own.

A page is a folder: figures, picture and downloads, of a single machine the page itself, too. It is made
beside its place and moved there whole, so that whatever ends the command leaves no half of one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from arborcast.synth.cli.console import answer, progress
from arborcast.synth.cli.description import model_of
from arborcast.synth.cli.explain import words_of
from arborcast.synth.cli.inputs import FabricRequest, failing_as_json, load_fabric, planned_by_nccl
from arborcast.synth.cli.options import OF_MACHINES, AsJson, FabricOptions, about_a_fabric, duration, option
from arborcast.synth.errors import InputError
from arborcast.synth.formats.words import assumed, counted

if TYPE_CHECKING:
    from arborcast.synth.atlas.figures import Download, Figures, QuotedFigure, WorkedOut
    from arborcast.synth.implicit_schedule import AnySchedule
    from arborcast.synth.topology import Topology
    from arborcast.topologies.entries import Entry
    from arborcast.topologies.published import Measurement

MOST_BYTES = 40_000
"""Of all downloads of a page together, compressed: what goes beyond is replaced by its command."""

MOST_EXPORTED = 4000
"""Transfers up to which a schedule is exported: files grow to megabytes."""

MOST_DRAWN = 1600
"""Links up to which a fabric is drawn."""

EXPORTS = {"msccl": ".xml", "nccl-graph": ".xml", "sccl": ".json", "jax": ".py", "mscclpp": ".json"}
"""Formats that need no size, and how their files end; the largest last."""

BY = {
    "": "the vendor's library",
    "forwarding": "the vendor's library, switches only forward",
    "nvls": "the vendor's library, switches add",
    "ring": "the vendor's library, in rings",
    "kernel": "a kernel by hand",
    "copy": "one copy",
    "slow": "a user who finds it slow",
}
"""Who moved the data of a published measurement, by the word in its table."""


@about_a_fabric("ranks", *OF_MACHINES)
def atlas(
    fabric: FabricOptions = FabricOptions(""),  # noqa: B008
    whole: Annotated[
        bool, option("--catalog", "of every machine that people own; goes on where it was")
    ] = False,
    output: Annotated[Path, option("-o", "--output", "the folder of the pages")] = Path("atlas"),
    deadline: Annotated[
        float | None, duration("--deadline", "stop each question after so many seconds")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a page of all that is proved of a machine.

    Beside it what rings and NCCL's model reach there, what others measured, times over sizes, and downloads.
    """
    from arborcast.synth.formats.atomic import check_folder

    if whole == bool(fabric.spec):
        raise InputError("atlas: needs a fabric or --catalog, and not both")
    check_folder(output)
    made: dict[str, Figures] = {}
    kept = 0
    for options, entry in _listed(fabric):
        on = load_fabric(options)
        with progress(f"atlas of {on.topology.name}", quiet=as_json), failing_as_json(on, "atlas", as_json):
            figures = _begun(on, entry, deadline)
            if figures.folder in made:  # the same machine by another spec
                continue
            for left in output.glob(f".{figures.folder}.*part"):  # of a run that was ended
                shutil.rmtree(left)
            before = _kept(output / figures.folder, figures.key)
            kept += before is not None
            made[figures.folder] = before or _made(on, figures, output, alone=not whole)
    pages = [str(output / folder / "index.html") for folder in made] if not whole else [str(output)]
    answer(
        as_json,
        {"pages": pages, "machines": [each.name for each in made.values()], "kept": kept},
        lambda: [f"{counted(len(made), 'page')}, {kept} kept", *(f"written  {page}" for page in pages)],
    )


def _listed(fabric: FabricOptions) -> Iterator[tuple[FabricOptions, Entry | None]]:
    """What pages are of, as commands ask for it, and the entry of the catalog."""
    from arborcast.topologies.catalog import entry_named
    from arborcast.topologies.owned import owned

    asked = [fabric] if fabric.spec else [FabricOptions(row.spec, row.ranks) for row in owned()]
    for options in asked:
        yield options, entry_named(options.spec.partition(":")[0])


def _begun(on: FabricRequest, entry: Entry | None, deadline: float | None) -> Figures:
    """All that is known before anything is worked out, with the key of it."""
    from arborcast.synth.atlas.figures import ANSWERS, Figures
    from arborcast.synth.formats import topology_to_document
    from arborcast.synth.simulation.prices import is_priced

    topology = on.topology
    vendor, about, source = ("", "", "") if entry is None else (entry.vendor, entry.description, entry.source)
    able = topology.holders - topology.ranks
    kinds = (
        (able, "switch that adds", "switches that add"),
        (len(topology.switches) - able, "switch", "switches"),
    )
    switches = "".join(f"{counted(*kind)}, " for kind in kinds if kind[0])
    figures = Figures(
        "",
        topology.name,
        " ".join(words_of(on.options)),
        topology.ranks,
        f"{counted(topology.ranks, 'rank')}, {switches}{counted(len(topology.cables), 'directed link')}",
        vendor,
        about,
        tuple(_granted(topology, source)),
        is_priced(topology),
        deadline,
        no_picture=f"{len(topology.links)} links" if len(topology.links) > MOST_DRAWN else "",
    )
    fabrics = [each and topology_to_document(each) for each in (topology, _planned(on))]
    said = [ANSWERS, fabrics, figures.spec, deadline, [asdict(row) for row in _published(topology)]]
    return replace(figures, key=hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32])


def _planned(on: FabricRequest) -> Topology | None:
    """With NCCL's rates; None where NCCL does not run."""
    from arborcast.topologies.owned import WITHOUT_NCCL

    return None if on.topology.name.startswith(WITHOUT_NCCL) else planned_by_nccl(on)


def _granted(topology: Topology, source: str) -> Iterator[str]:
    model = model_of(topology)
    yield f"Limits hold for what the links carry{'' if model is None else f', where {model}'}."
    if source:
        yield f"Sources of rates: {source}."
    told = [f"Of the links, {said}." for what in ("rate", "latency") if (said := assumed(what, topology))]
    yield from told or ["No rate and no latency is assumed: all are published or stated."]


def _published(topology: Topology) -> list[Measurement]:
    """What others measured on this very fabric."""
    from arborcast.topologies import load
    from arborcast.topologies.published import measurements

    name = topology.name.partition("[")[0].partition(":")[0]
    rows = [row for row in measurements() if row.spec.partition(":")[0] == name and not row.processors]
    return [row for row in rows if load(row.spec, ranks=row.chosen).name == topology.name]


def _beside(row: Measurement, topology: Topology, found: WorkedOut) -> QuotedFigure:
    """What others published, beside what is proved."""
    from arborcast.synth.atlas.figures import QuotedFigure, rounded
    from arborcast.synth.collective import Kind, busbw_factor
    from arborcast.synth.formats.sizes import parse_size
    from arborcast.synth.selection import PricedLimit

    kind = row.collective
    told = QuotedFigure(kind, row.last_size, BY[row.by], row.source)
    if row.busbw:
        rate = float(row.busbw) / float(busbw_factor(Kind(kind), topology.ranks))
        limit = next(each.limit for each in found.rates if each.kind == kind)
        return replace(told, rate=rate, share=rate / float(limit))
    least_us = None
    if kind in found.schedules:
        least_us = rounded(PricedLimit.of(found.schedules[kind]).at(parse_size(row.last_size)))
    return replace(told, time_us=float(row.time_us), least_us=least_us)


def _kept(folder: Path, key: str) -> Figures | None:
    """The page that is there, unless it was made of something else."""
    from arborcast.synth.atlas.figures import Figures
    from arborcast.synth.atlas.page import FIGURES

    try:
        text = (folder / FIGURES).read_bytes()
        found = Figures.from_document(text, str(folder))
    except (FileNotFoundError, InputError):
        return None
    return found if found.key == key else None


def _made(on: FabricRequest, figures: Figures, output: Path, *, alone: bool) -> Figures:
    """Work a page out, in a folder that takes its place once it is whole."""
    from arborcast.synth.atlas.figures import work_out
    from arborcast.synth.atlas.page import FIGURES, PICTURE, whole_page
    from arborcast.synth.formats.atomic import make_folder, write_atomically
    from arborcast.synth.pictures import draw_topology
    from arborcast.synth.solve_options import SolveOptions

    found = work_out(on.topology, _planned(on), SolveOptions(deadline_s=figures.deadline_s))
    place = output / figures.folder
    draft, old = output / f".{figures.folder}.part", output / f".{figures.folder}.old.part"
    make_folder(draft, parents=True)
    if not figures.no_picture:
        drawing = draft / "fabric.svg"
        draw_topology(on.topology, drawing)
        write_atomically(draft / PICTURE, drawing.read_bytes())
        drawing.unlink()
    figures = replace(
        figures,
        rates=tuple(found.rates),
        curves=tuple(found.curves),
        measured=tuple(_beside(row, on.topology, found) for row in _published(on.topology)),
        downloads=tuple(_downloads(found, figures.spec, draft)),
    )
    write_atomically(draft / FIGURES, figures.to_document())
    if alone:
        write_atomically(draft / "index.html", whole_page(figures, draft))
    if place.exists():
        place.rename(old)
    draft.rename(place)
    if old.exists():
        shutil.rmtree(old)
    return figures


def _downloads(found: WorkedOut, spec: str, folder: Path) -> Iterator[Download]:
    """Schedules and what the best become elsewhere, as long as there is room."""
    left = MOST_BYTES
    for each in _offered(found, spec, folder):
        if each.bytes > left:
            (folder / each.name).unlink()
            yield replace(each, name="", why=f"{each.bytes} bytes are too many here")
        else:
            left -= each.bytes
            yield each


def _offered(found: WorkedOut, spec: str, folder: Path) -> Iterator[Download]:
    from arborcast.synth import write_schedule
    from arborcast.synth.atlas.figures import CURVES, SAMPLE, Download

    size = f"{SAMPLE >> 10}KiB"
    for kind in CURVES:
        best = (f"schedule of the best {kind}, with its certificate", kind.value, "", found.schedules)
        small = (f"{kind} of {size}", f"{kind}-{size}", f"--size {size} ", found.small)
        for what, name, option_of, schedules in (best, small):
            if kind in schedules:
                path = folder / f"{name}.json.gz"
                write_schedule(schedules[kind], path)
                command = f"synth solve {spec} {kind} {option_of}-o {name}.json"
                yield Download(what, command, path.name, path.stat().st_size)
        if kind in found.schedules:
            yield from _exports(found.schedules[kind], kind, folder)


def _exports(schedule: AnySchedule, kind: str, folder: Path) -> Iterator[Download]:
    from arborcast.backends.programs.formats import FORMATS, export_files
    from arborcast.synth.atlas.figures import Download

    for target, suffix in EXPORTS.items():
        command = f"synth export {kind}.json --to {target} -o {kind}{suffix}"
        row = Download(f"{kind} for {target}, {FORMATS[target].about}", command)
        if schedule.transfer_count > MOST_EXPORTED:
            yield replace(row, why="is large")
            continue
        path = folder / f"{kind}.{target}{suffix}.gz"
        try:
            export_files(schedule, target, path)
        except InputError as error:
            yield replace(row, command="", why=str(error))
        else:
            yield replace(row, name=path.name, bytes=path.stat().st_size)
