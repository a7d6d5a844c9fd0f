"""`synth bench`: single questions to the benchmarks of `bench/`, and the report of all their answers.

`make bench` asks the full set; every command here asks one thing of one machine, prints the same table and,
with `--json` or `-o`, the same document.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from arborcast.synth.cli.bench_run import bench_run
from arborcast.synth.cli.console import fail, print_json, print_lines, progress
from arborcast.synth.cli.inputs import load_fabric, text_of
from arborcast.synth.cli.options import (
    AsJson,
    FabricOptions,
    Picture,
    Ranks,
    Rates,
    Root,
    Spec,
    about_a_fabric,
    collective_name,
    duration,
    number,
    option,
    rank_list,
    seconds,
    with_voice,
    writable,
)
from arborcast.synth.errors import InputError

bench = typer.Typer(
    name="bench",
    help="Measure a schedule, a machine, its allocations, its peers.",
    rich_markup_mode=None,
)
bench.command("run")(with_voice(bench_run))

CollectiveName = Annotated[
    str,
    typer.Argument(
        parser=collective_name, metavar="COLLECTIVE", help="by name: allreduce, broadcast, allgather, ..."
    ),
]
Output = Annotated[Path | None, option("-o", "--output", "write the results document here")]
Runs = Annotated[int, number("--runs", "of each, in turns")]


@bench.command()
@with_voice
def sweep(
    spec: Spec,
    collective: CollectiveName,
    sizes: Annotated[str, option("--sizes", "a range, from which every power of 4")] = "1KiB:1GiB",
    root: Root = None,
    deadline: Annotated[float, duration("--deadline", "stop after so long")] = 90,
    output: Output = None,
    picture: Picture = None,
    as_json: AsJson = False,
) -> None:
    """Simulate our choice by size beside rings, trees, NCCL's models."""
    from arborcast.bench.clusters.machines import load
    from arborcast.bench.clusters.words import format_table, results_document
    from arborcast.bench.sweeps import sweep as swept
    from arborcast.synth.collective import Collective
    from arborcast.synth.formats.sizes import size_range

    _check_outputs(output, picture)
    wanted = size_range(sizes)[::2]
    _check_named(collective, root)
    topology = load(spec)
    asked = Collective.on(topology, collective, root=root or 0)
    with progress(f"sweeping {collective} on {topology.name}", quiet=as_json):
        found = swept(topology, asked, wanted, deadline_s=deadline)
    if picture is not None:
        from arborcast.bench.clusters.figure import draw

        draw(found.rows, picture)
    _tell(results_document([found]), format_table(found), output, picture, as_json)


@bench.command()
@with_voice
def fragments(
    spec: Spec,
    collective: Annotated[
        str | None,
        typer.Argument(
            parser=collective_name, metavar="[COLLECTIVE]", help="broadcast or allreduce; both where none"
        ),
    ] = None,
    rates: Rates = "nccl",
    output: Output = None,
    picture: Picture = None,
    as_json: AsJson = False,
) -> None:
    """Survey every allocation of a box.

    What its links allow, what rings reach, what trees reach.
    """
    from arborcast import topologies
    from arborcast.bench.allocations.nccl import MODELLED
    from arborcast.bench.fragments import format_summary, format_table, results_document, summarize, survey

    _check_outputs(output, picture)
    topology = topologies.load(spec, rates=rates)
    with progress(f"fragments of {topology.name}", quiet=as_json):
        rows = survey(topology, MODELLED if collective is None else [collective])
    if picture is not None:
        from arborcast.bench.allocations.figure import draw_fragments

        draw_fragments(rows, picture)
    text = "\n".join([*format_table(rows), "", *format_summary(summarize(rows))])
    _tell(results_document(rows, rates=rates), text, output, picture, as_json)


@bench.command()
@with_voice
@about_a_fabric("ranks", "gpu", "pcie", "between_sockets", "rates", "no_in_network")
def testbed(
    fabric: FabricOptions,
    collective: CollectiveName,
    sizes: Annotated[str, option("--sizes", "one size or a range that doubles")] = "8MiB",
    mbit: Annotated[int, number("--mbit", "Mbit/s of the slowest emulated link")] = 50,
    methods: Annotated[
        str | None, option("--methods", "names with commas between; the usual ones where none")
    ] = None,
    runs: Runs = 5,
    root: Root = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Run schedules beside gloo on emulated links; needs root.

    Real processes and real TCP on this machine.
    """
    from arborcast.bench.contest.rows import format_table
    from arborcast.bench.emulation.machine import EmulationError
    from arborcast.bench.testbed import measure, results_document
    from arborcast.synth.formats.sizes import size_range

    _check_outputs(output, None)
    _check_named(collective, root)
    topology = load_fabric(fabric).topology
    wanted = None if methods is None else [name.strip() for name in methods.split(",")]
    try:
        result = measure(
            topology,
            [collective],
            size_range(sizes),
            slowest_mbit=mbit,
            methods=wanted,
            runs=runs,
            root=root or 0,
            say=lambda line: typer.echo(line, err=True),
        )
    except EmulationError as error:
        fail(f"testbed: {error}")
        raise typer.Exit(1) from None
    _tell(results_document(result), format_table(result.rows), output, None, as_json)


@bench.command()
@with_voice
def peers(
    spec: Spec,
    collective: CollectiveName,
    sccl: Annotated[Path | None, option("--sccl", "a checkout of msccl-tools")] = None,
    sccl_python: Annotated[
        str, option("--sccl-python", "an interpreter that has what it requires")
    ] = sys.executable,
    forestcoll: Annotated[Path | None, option("--forestcoll", "a checkout of ForestColl")] = None,
    tacos: Annotated[Path | None, option("--tacos", "a checkout of TACOS")] = None,
    ranks: Ranks = None,
    root: Root = None,
    runs: Runs = 3,
    deadline: Annotated[float, duration("--deadline", "of each run")] = 120,
    limit: Annotated[
        float | None, typer.Option("--limit", parser=seconds, metavar="SECONDS", hidden=True)
    ] = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Ask other synthesizers the same; verify all answers alike."""
    from arborcast.bench.adapters.rows import format_table
    from arborcast.bench.peers import compare as asked
    from arborcast.bench.peers import results_document

    _check_outputs(output, None)
    _check_named(collective, root)
    given = {"sccl": sccl, "forestcoll": forestcoll, "tacos": tacos}
    checkouts = {name: path for name, path in given.items() if path is not None}
    if not checkouts:
        raise InputError("peers: needs a checkout at least: --sccl PATH, --forestcoll PATH or --tacos PATH")
    with progress(f"{collective} on {spec}", quiet=as_json):
        rows = asked(
            spec,
            collective,
            checkouts,
            ranks=None if ranks is None else rank_list(ranks),
            root=root or 0,
            runs=runs,
            limit_s=limit or deadline,  # --limit was its name before
            sccl_python=sccl_python,
        )
    _tell(results_document(rows, checkouts), format_table(rows), output, None, as_json)


@bench.command()
@with_voice
def report(
    results: Annotated[Path, typer.Argument(help="the folder of results documents")],
    output: Annotated[Path, option("-o", "--output", "the page")] = Path("bench.html"),
    markdown: Annotated[
        Path | None, option("--markdown", "a file whose summary between its markers is replaced")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make one self-contained page of all results."""
    from arborcast.bench.report import judged, write_report

    writable(output)
    try:
        write_report(judged(results), output, markdown)
    except ModuleNotFoundError as missing:
        raise InputError(
            f"report: needs {missing.name}; install it with: pip install 'arborcast[bench]'"
        ) from None
    if as_json:
        print_json({"page": str(output), "markdown": text_of(markdown)})
        return
    print_lines([f"written   {path}" for path in (output, markdown) if path is not None])


@bench.command()
@with_voice
def compare(
    old: Annotated[Path, typer.Argument(help="a results document, or a folder of them")],
    new: Annotated[Path, typer.Argument(help="the same, later")],
    tolerance: Annotated[
        float, option("--tolerance", "of a timed figure that does not matter", metavar="PART")
    ] = 0.05,
    as_json: AsJson = False,
) -> None:
    """Show what became worse beyond the spread.

    Exit status 1 where anything did.
    """
    from arborcast.bench.compare import compared

    if compared(old, new, tolerance=tolerance, as_json=as_json):
        raise typer.Exit(1)


def _check_named(name: str, root: int | None) -> None:
    """Benchmarks ask for collectives that all contenders know; custom ones, in files, they do not.

    Raises:
        InputError: a file, an unknown name, or a root where there is none.
    """
    from arborcast.synth.collective import NAMED_KINDS, did_you_mean

    if name not in [kind.value for kind in NAMED_KINDS]:
        known = ", ".join(kind.value for kind in NAMED_KINDS)
        raise InputError(f"collective {name}: a benchmark needs one of {known}{did_you_mean(name)}")
    if root is not None and name in [kind.value for kind in NAMED_KINDS if not kind.has_root]:
        raise InputError(f"--root {root}: {name} has no root")


def _check_outputs(output: Path | None, picture: Path | None) -> None:
    writable(output)
    if picture is not None:
        from arborcast.synth.pictures.canvas import check_path

        check_path(picture)
        writable(picture)


def _tell(
    found: Mapping[str, Any], text: str, output: Path | None, picture: Path | None, as_json: bool
) -> None:
    """The answer, in the form that was asked for."""
    if output is not None:
        from arborcast.bench.harness.document import write_document

        write_document(output, found)
    if as_json:
        print_json({**found, "file": text_of(output), "picture": text_of(picture)})
        return
    print_lines([text])
    print_lines([f"written   {path}" for path in (output, picture) if path is not None])
