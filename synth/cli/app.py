"""The `synth` command: a thin shell over the packages, and the one place here that imports the others.

Exit status: 0 done, 1 the answer is no, 2 the input is wrong, 3 out of time. Everything heavy is imported
inside the command that needs it, so that `synth --help` and small questions answer at once.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from arborcast.synth.cli.alltoallv import alltoallv
from arborcast.synth.cli.atlas import atlas
from arborcast.synth.cli.bench import bench
from arborcast.synth.cli.cluster import cluster
from arborcast.synth.cli.console import fail, print_json, print_lines, progress, show_warnings, table
from arborcast.synth.cli.description import (
    assumptions_document,
    describe_abilities,
    describe_bound,
    describe_machine,
    describe_parts,
    describe_topology,
    machine_document,
    model_of,
    parts_document,
)
from arborcast.synth.cli.explain import explain
from arborcast.synth.cli.groups import groups
from arborcast.synth.cli.inputs import (
    NotCorrectError,
    collective_on,
    load_fabric,
    say_infeasible,
    text_of,
)
from arborcast.synth.cli.least_time import least_time_at
from arborcast.synth.cli.options import (
    OF_MACHINES,
    AsJson,
    CollectiveName,
    FabricOptions,
    OldPicture,
    Picture,
    Root,
    about_a_fabric,
    in_bytes,
    option,
    target,
    with_voice,
)
from arborcast.synth.cli.order import order
from arborcast.synth.cli.pareto import pareto
from arborcast.synth.cli.plan import plan
from arborcast.synth.cli.probe import end_after_rank_0, is_follower, probe
from arborcast.synth.cli.programs import export, import_
from arborcast.synth.cli.repair import repair
from arborcast.synth.cli.schedule_files import expand, program, run, simulate, verify
from arborcast.synth.cli.solve import solve
from arborcast.synth.cli.sweep import sweep
from arborcast.synth.cli.tune import tune
from arborcast.synth.cli.view import view
from arborcast.synth.errors import InfeasibleError, InputError, NumericalError, TimedOutError
from arborcast.synth.formats.documents import picked
from arborcast.synth.formats.words import at_most, gigabytes

app = typer.Typer(
    name="synth",
    help="Synthesize collective-communication algorithms for a topology, with proof.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print_lines([f"arborcast {version('arborcast')}"])
        raise typer.Exit


app.add_typer(bench)


@app.callback()
def synth_(
    version: Annotated[
        bool, option("--version", "print the version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Synthesize collective-communication algorithms for a topology, with proof."""


@app.command()
@with_voice
def topologies(as_json: AsJson = False) -> None:
    """List the catalog of topologies."""
    from arborcast.topologies import catalog

    entries = catalog()
    if as_json:
        keys = ("name", "arguments", "description", "vendor", "gpu", "source")
        print_json({"topologies": [picked(entry, *keys) for entry in entries]})
        return
    vendors = dict.fromkeys(entry.vendor for entry in entries)
    for vendor in vendors:
        rows = [
            (f"{entry.name}{entry.arguments}", entry.description)
            for entry in entries
            if entry.vendor == vendor
        ]
        print_lines([*table((vendor or "Shapes", ""), rows, left=2), ""])
    print_lines(
        [
            "boxes= so many on a fabric, nic= GB/s each way of every NIC, rails= switches of the fabric that",
            "NICs are dealt to. synth cluster joins other hosts; --json has the sources of all rates.",
        ]
    )


@app.command()
@with_voice
@about_a_fabric("ranks", "without_link", "without_rank", *OF_MACHINES)
def show(
    fabric: FabricOptions,
    picture: Picture = None,
    infragraph: Annotated[Path | None, target("--infragraph", "write it here as InfraGraph's YAML")] = None,
    output: OldPicture = None,
    as_json: AsJson = False,
) -> None:
    """Show a topology: its ranks, switches and links."""
    from arborcast.synth.formats import topology_to_document

    picture = picture or output
    on = load_fabric(fabric)
    topology, parts = on.topology, on.parts()
    if infragraph is not None:
        from arborcast.synth.formats.atomic import write_atomically
        from arborcast.topologies.readers.infragraph import to_infragraph

        write_atomically(infragraph, to_infragraph(topology))
    helps = () if parts is None else on.help_for(parts)
    if picture is not None:
        from arborcast.synth.pictures import draw_topology

        draw_topology(topology, picture)
    if as_json:
        more = {
            "picture": text_of(picture),
            "assumed": assumptions_document(topology),
            **parts_document(parts, helps),
        }
        print_json({**topology_to_document(topology), **more, **machine_document(on.machine_left)})
        return
    told = [*describe_topology(topology), *describe_abilities(topology), *describe_machine(on.machine_left)]
    print_lines([*told, *describe_parts(parts, helps)])
    if picture is not None:
        print_lines([f"drawn     {picture}"])
    if infragraph is not None:
        print_lines([f"written   {infragraph}"])


@app.command()
@with_voice
@about_a_fabric()
def bound(
    fabric: FabricOptions,
    collective: CollectiveName,
    root: Root = None,
    size: Annotated[
        int | None, in_bytes("--size", "and the least time of a buffer of this size, such as 64KiB")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the fastest rate possible, with its proof."""
    from arborcast import synth
    from arborcast.synth.formats import bound_to_document
    from arborcast.synth.routes.reachability import who_is_cut_off

    found_fabric = load_fabric(fabric)
    topology = found_fabric.topology
    with progress(f"bounding {collective} on {topology.name}", quiet=as_json):
        asked = collective_on(collective, found_fabric, root)
        found = synth.bound(topology, asked)
        at = None if size is None or found.rate == 0 else least_time_at(topology, asked, found, size)
        able = topology.holders > topology.ranks
        forwarding = synth.bound(topology.forwarding, asked).rate if able else None
    none = InfeasibleError(who_is_cut_off(topology, asked), found) if found.rate == 0 else None
    document = {"topology": topology.name, "collective": collective, "ranks": len(asked.ranks)}
    if as_json:
        rates = bound_to_document(found, topology)
        if forwarding is not None:
            rates = {"rate": rates["rate"], "rate_forwarding": str(forwarding), **rates}
        document = {
            **document,
            **rates,
            "model": model_of(topology),
            "assumed": assumptions_document(topology),
            **({} if at is None else at.document),
        }
        if none is None:
            print_json(document)
    else:
        head = f"{topology.name} {collective}: {at_most(found.rate, topology)}"
        plain = [] if forwarding is None else [f"  forward  {gigabytes(forwarding)} if switches only forward"]
        print_lines([head, *describe_bound(found, topology), *plain, *([] if at is None else at.lines)])
    if none is not None:
        say_infeasible(none, found_fabric, collective, as_json, document)
        raise none


for command in (
    *(cluster, solve, alltoallv, groups, pareto, verify, simulate, view, run, expand, program),
    *(repair, sweep, probe, plan, order, explain, tune, atlas),
):
    app.command()(with_voice(command))
app.command("export")(with_voice(export))
app.command("import")(with_voice(import_))


@app.command()
@with_voice
def cache(
    action: Annotated[
        Literal["where", "clear"], typer.Argument(help="where: what is kept; clear: delete it")
    ] = "where",
    as_json: AsJson = False,
) -> None:
    """Show where answers and compiled kernels are kept.

    ARBORCAST_CACHE names another folder. Everything in it can be computed again.
    """
    from arborcast.synth.kernels import cache_folder

    before = cache_folder.sizes()
    if action == "clear":
        cache_folder.clear()
    folder = cache_folder.cache_folder()
    if as_json:
        parts = {part: {"files": files, "bytes": size} for part, (files, size) in before.items()}
        print_json({"folder": str(folder), "cleared": action == "clear", "parts": parts})
        return
    rows = [
        (part, cache_folder.PARTS[part], files, f"{size / 1e6:.1f} MB")
        for part, (files, size) in before.items()
    ]
    print_lines([f"{folder}{': cleared' if action == 'clear' else ''}", ""])
    print_lines(table(("folder", "what it holds", "files", "size"), rows, left=2))


def main() -> None:
    """Run the command; turn what it raises into one line and an exit status."""
    show_warnings()
    if sys.stdout is None:  # closed by the shell: `synth ... >&-`
        fail("standard output: must be open, got a closed one")
        sys.exit(2)
    sys.exit(_status())


def _status() -> int:
    try:
        # Commands return nothing; typer, what an Exit carries. A group without a command says what it can do.
        words = sys.argv[1:]
        status = app([*words, "--help"] if words in ([], ["bench"]) else words, standalone_mode=False) or 0
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone (synth ... | head); keep Python from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""  # none: standard output, a process
        fail(f"{place}{error.strerror or error}")
        return 2
    except tuple(STATUS) as error:
        if is_follower():  # rank 0 says the same
            end_after_rank_0()
        else:
            fail(_line(error))
        return next(status for kind, status in STATUS.items() if isinstance(error, kind))
    except SystemError as error:
        # Ctrl-C inside a compiled kernel: numba's dispatcher returns with the exception set, and Python wraps
        # it.
        if not isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            raise
        status = INTERRUPTED
    if status == INTERRUPTED:
        fail("interrupted")
    return int(status)


_WRONG_CHOICE = re.compile(r"Value error, ('.*') is not one of (.*)\.$", re.DOTALL)


def _line(error: BaseException) -> str:
    if isinstance(error, typer.TyperException):
        # A wrong choice is told as every other value that breaks a rule.
        return _WRONG_CHOICE.sub(r"must be one of \2, got \1", error.format_message())
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


STATUS: dict[type[BaseException], int] = {
    InputError: 2,
    NumericalError: 2,
    typer.TyperException: 2,
    InfeasibleError: 1,
    NotCorrectError: 1,
    TimedOutError: 3,
}
"""Exit status of everything that a command may raise on purpose."""

INTERRUPTED = 130
"""What typer answers after Ctrl-C, as shells do (128 + SIGINT)."""


if __name__ == "__main__":
    main()
