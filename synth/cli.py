"""The `synth` command: a thin shell over the packages, and the one place here that imports the others.

Exit status: 0 done, 1 the answer is no, 2 the input is wrong, 3 out of time. Everything heavy is imported
inside the command that needs it, so that `synth --help` and small questions answer at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from synth.bench_command import bench
from synth.console import (
    Json,
    Stopwatch,
    fail,
    gigabytes,
    print_json,
    print_lines,
    progress,
    share,
    show_warnings,
    table,
)
from synth.description import (
    choices_document,
    describe_bound,
    describe_choices,
    describe_comparison,
    describe_frontier,
    describe_solution,
    describe_topology,
    infeasible_document,
    solution_document,
)
from synth.errors import InfeasibleError, InputError, TimedOutError
from synth.options import (
    AsJson,
    CollectiveName,
    Deadline,
    File,
    Gpu,
    NoCache,
    Pcie,
    Ranks,
    Rates,
    Relays,
    Root,
    Seed,
    Spec,
    part_of_one,
    rank_list,
    seconds,
    whole,
    writable,
)
from synth.plan_command import plan
from synth.probe_command import end_after_rank_0, is_follower, probe

if TYPE_CHECKING:
    from synth.collective import Collective
    from synth.schedule import Schedule
    from synth.selection import Choice
    from synth.topology import Topology

app = typer.Typer(
    name="synth",
    help="Synthesize collective-communication algorithms for a topology, with proof.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Synthesize collective-communication algorithms for a topology, with proof."""


@app.command()
def topologies(as_json: AsJson = False) -> None:
    """List the catalog of topologies."""
    from topologies import catalog

    entries = catalog()
    if as_json:
        keys = ("name", "arguments", "description")
        print_json({"topologies": [{key: getattr(entry, key) for key in keys} for entry in entries]})
        return
    rows = [(f"{entry.name}{entry.arguments}", entry.description) for entry in entries]
    print_lines(table(("topology", "what it is"), rows, left=2))


@app.command()
def show(
    spec: Spec,
    ranks: Ranks = None,
    gpu: Gpu = None,
    pcie: Pcie = False,
    rates: Rates = "datasheet",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="draw it: picture.svg or .png")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a topology: its ranks, switches and links."""
    from synth.formats import topology_to_document

    writable(output)
    topology, _ = _load(spec, ranks, relays=False, gpu=gpu, pcie=pcie, rates=rates)
    if output is not None:
        from synth.pictures import draw_topology

        draw_topology(topology, output)
    if as_json:
        print_json({**topology_to_document(topology), "picture": _text(output)})
        return
    print_lines(describe_topology(topology))
    if output is not None:
        print_lines([f"drawn     {output}"])


@app.command()
def bound(
    spec: Spec,
    collective: CollectiveName,
    root: Root = None,
    ranks: Ranks = None,
    relays: Relays = False,
    gpu: Gpu = None,
    pcie: Pcie = False,
    rates: Rates = "datasheet",
    as_json: AsJson = False,
) -> None:
    """Print the fastest rate possible, with the certificate that proves it."""
    from synth import methods
    from synth.formats import bound_to_document

    topology, taking_part = _load(spec, ranks, relays=relays, gpu=gpu, pcie=pcie, rates=rates)
    with progress(f"bounding {collective} on {topology.name}", quiet=as_json):
        asked = _collective(collective, topology, taking_part, root)
        found = methods.bound(topology, asked)
    if as_json:
        document = {"topology": topology.name, "collective": collective, "ranks": len(asked.ranks)}
        print_json({**document, **bound_to_document(found, topology)})
        return
    print_lines(
        [f"{topology.name} {collective}: at most {gigabytes(found.rate)}", *describe_bound(found, topology)]
    )


@app.command()
def solve(
    spec: Spec,
    collective: CollectiveName,
    method: Annotated[
        str,
        typer.Option(
            help="auto, trees, mwu, routes, smt, ilp, sat, ring, multiring, binary-tree or halving-doubling"
        ),
    ] = "auto",
    root: Root = None,
    ranks: Ranks = None,
    relays: Relays = False,
    size: Annotated[
        str | None, typer.Option("--size", help="with auto: fastest at this size, such as 64KiB")
    ] = None,
    max_trees: Annotated[
        int | None,
        typer.Option(
            "--max-trees",
            parser=whole,
            metavar="N",
            help="at most so many trees (per root where all are roots)",
        ),
    ] = None,
    max_height: Annotated[
        int | None,
        typer.Option(
            "--max-height",
            parser=whole,
            metavar="H",
            help="trees: at most so many steps from a root to a rank, at the best rate",
        ),
    ] = None,
    tolerance: Annotated[
        str | None,
        typer.Option("--tolerance", help="few trees: part of the optimum to give up, such as 1/20"),
    ] = None,
    epsilon: Annotated[
        str | None, typer.Option("--epsilon", help="mwu: the part of the optimum it may miss, such as 1/20")
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            "--chunks",
            parser=whole,
            metavar="C",
            help="smt, ilp, sat (which need all three): chunks of each block",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", parser=whole, metavar="S", help="smt, ilp, sat: steps")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", parser=whole, metavar="R", help="smt, ilp, sat: rounds of all steps"),
    ] = None,
    deadline: Deadline = None,
    seed: Seed = 0,
    no_cache: NoCache = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the schedule here")] = None,
    gpu: Gpu = None,
    pcie: Pcie = False,
    rates: Rates = "datasheet",
    as_json: AsJson = False,
) -> None:
    """Find a schedule, prove how good it is, and verify it."""
    from synth import methods
    from synth.sizes import parse_size

    writable(output)
    topology, taking_part = _load(spec, ranks, relays=relays, gpu=gpu, pcie=pcie, rates=rates)
    asked = methods.Request(
        max_trees=max_trees,
        tolerance=None if tolerance is None else part_of_one("--tolerance", tolerance),
        epsilon=None if epsilon is None else part_of_one("--epsilon", epsilon),
        seed=seed,
        deadline_s=deadline,
        size_bytes=None if size is None else parse_size(size),
        chunks=chunks,
        steps=steps,
        rounds=rounds,
        cache=not no_cache,
        max_height=max_height,
    )
    stopwatch = Stopwatch()
    choices: tuple[Choice, ...] = ()
    try:
        with progress(f"solving {collective} on {topology.name}", quiet=as_json):
            chosen = _collective(collective, topology, taking_part, root)
            if asked.size_bytes is None or method != "auto":
                schedule = methods.answer(topology, chosen, method, asked)
            else:
                selection = methods.select(topology, chosen, asked)
                schedule, choices = selection.fastest(asked.size_bytes), selection.choices()
                if selection.out_of_time is not None:
                    raise TimedOutError(str(selection.out_of_time), schedule)
    except InfeasibleError as error:
        if as_json:
            print_json(infeasible_document(error, topology, collective))
        raise
    except TimedOutError as error:
        best = {} if error.best is None else _verified(error.best, stopwatch.seconds, output)
        if as_json:
            print_json({**best, "timed_out": True, "why": str(error)})
        elif error.best is not None:
            print_lines(describe_solution(error.best, best))
        raise
    solution = _verified(schedule, stopwatch.seconds, output)
    if as_json:
        print_json({**solution, "choices": choices_document(choices)})
        return
    print_lines([*describe_solution(schedule, solution), *describe_choices(choices)])


@app.command()
def pareto(
    spec: Spec,
    collective: CollectiveName,
    root: Root = None,
    ranks: Ranks = None,
    relays: Relays = False,
    max_steps: Annotated[
        int | None,
        typer.Option(
            "--max-steps",
            parser=whole,
            metavar="S",
            help="largest number of steps; otherwise 6 more than the fewest",
        ),
    ] = None,
    tolerance: Annotated[
        str | None,
        typer.Option("--tolerance", help="stop within this part of the limit of any steps, such as 1/20"),
    ] = None,
    deadline: Annotated[
        float,
        typer.Option("--deadline", parser=seconds, metavar="SECONDS", help="seconds after which to stop"),
    ] = 600,
    seed: Seed = 0,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs",
            parser=whole,
            metavar="N",
            help="how many step counts to work on at once; -1 for all cores",
        ),
    ] = 1,
    dask: Annotated[
        str | None, typer.Option("--dask", metavar="ADDRESS", help="run the jobs on this Dask scheduler")
    ] = None,
    no_cache: NoCache = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="folder for frontier.json, a schedule per point, a picture"),
    ] = None,
    gpu: Gpu = None,
    pcie: Pcie = False,
    rates: Rates = "datasheet",
    as_json: AsJson = False,
) -> None:
    """Find every best trade of steps (latency) for rounds per chunk (bandwidth), with proof."""
    import synth
    from synth.chunks.documents import frontier_to_document
    from synth.chunks.folder import check_folder, write_frontier
    from synth.chunks.jobs import running_on

    if output is not None:
        check_folder(output)
    topology, taking_part = _load(spec, ranks, relays=relays, gpu=gpu, pcie=pcie, rates=rates)
    try:
        with progress(f"frontier of {collective} on {topology.name}", quiet=as_json), running_on(dask):
            found = synth.pareto(
                topology,
                _collective(collective, topology, taking_part, root),
                max_steps=max_steps,
                tolerance=None if tolerance is None else part_of_one("--tolerance", tolerance),
                deadline_s=deadline,
                seed=seed,
                jobs=jobs,
                cache=not no_cache,
            )
    except InfeasibleError as error:
        if as_json:
            print_json(infeasible_document(error, topology, collective))
        raise
    except TimedOutError as error:  # before there was any point
        if as_json:
            print_json({"timed_out": True, "why": str(error)})
        raise
    for point in found.points:
        _check_correct(point.schedule)
    document = frontier_to_document(found) if output is None else write_frontier(found, output)
    if as_json:
        print_json({**document, "folder": _text(output)})
    else:
        print_lines(describe_frontier(found, output))
    if found.timed_out:
        raise TimedOutError(f"{collective}: {found.why_stopped}")


@app.command()
def verify(file: File, as_json: AsJson = False) -> None:
    """Replay a schedule file and check everything it claims."""
    import synth

    schedule = synth.read_schedule(file)
    with progress(f"verifying {file}", quiet=as_json):
        verdict = synth.verify(schedule)
    if as_json:
        print_json(
            {
                "correct": verdict.correct,
                "rate": str(verdict.rate),
                "max_link_load": str(verdict.max_link_load),
                "errors": list(verdict.errors),
            }
        )
    elif verdict.correct:
        print_lines(
            [
                f"{file}: correct",
                f"  rate           {gigabytes(verdict.rate)}, {share(verdict.rate, schedule.bound.rate)} "
                "of the proven bound",
                f"  max link load  {verdict.max_link_load}",
            ]
        )
    if not verdict.correct:
        raise _NotCorrectError(f"{file}: not correct: {'; '.join(verdict.errors)}")


@app.command()
def simulate(
    file: File,
    sizes: Annotated[str, typer.Option("--sizes", help="one size or a range that doubles")] = "64KiB:256MiB",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="draw time and busbw over size: .svg or .png")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a schedule over message sizes, beside the baselines on the same topology."""
    from synth.comparison import compare
    from synth.sizes import size_range

    writable(output)
    schedule = _read_correct(file)
    with progress(f"simulating {file}", quiet=as_json):
        comparison = compare(schedule, size_range(sizes))
    if output is not None:
        from synth.pictures import draw_sweep

        title = f"{schedule.topology.name} {schedule.collective.kind}: simulated time and bus bandwidth"
        draw_sweep(comparison.by_method, output, bound=schedule.bound, title=title)
    if as_json:
        print_json({**comparison.to_document(), "picture": _text(output)})
        return
    print_lines(describe_comparison(comparison))
    print_lines(f"{method}: {why}" for method, why in comparison.unavailable.items())
    if output is not None:
        print_lines([f"drawn {output}"])


@app.command()
def run(
    file: File,
    size: Annotated[
        str, typer.Option("--size", help="one size (0 for an empty tensor) or a range")
    ] = "16MiB",
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or int64")] = "float32",
    op: Annotated[str, typer.Option(help="sum, avg, min, max or product")] = "sum",
    iterations: Annotated[
        int, typer.Option("-n", "--iterations", parser=whole, metavar="N", help="timed runs of each size")
    ] = 5,
    warmup: Annotated[
        int, typer.Option("-w", "--warmup", parser=whole, metavar="N", help="runs before those")
    ] = 1,
    deadline: Annotated[
        float,
        typer.Option(
            "--deadline", parser=seconds, metavar="SECONDS", help="seconds after which ranks are stopped"
        ),
    ] = 300,
    as_json: AsJson = False,
) -> None:
    """Run a schedule on local processes through torch.distributed and check every element."""
    from backends import launch
    from synth.sizes import size_range

    schedule = _read_correct(file)
    with progress(f"running {file} on {schedule.topology.ranks} processes", quiet=as_json):
        try:
            rows = launch.run_schedule(
                schedule,
                size_bytes=(0,) if size == "0" else size_range(size),
                dtype=dtype,
                op=op,
                iterations=iterations,
                warmup=warmup,
                timeout_s=deadline,
            )
        except launch.RunError as error:
            raise _NotCorrectError(f"{file}: {error}") from error
    correct = all(row.correct for row in rows)
    if as_json:
        print_json({"correct": correct, "rows": [row.to_document() for row in rows], "backend": "gloo"})
    else:
        print_lines(launch.format_table(rows))
    if not correct:
        wrong = next(row for row in rows if not row.correct)
        raise _NotCorrectError(f"{file}: {wrong.wrong} wrong elements at {wrong.bytes} bytes")


app.command()(probe)
app.command()(plan)


class _NotCorrectError(Exception):
    """The answer is no: exit status 1 with this one line."""


def _collective(name: str, topology: Topology, taking_part: tuple[int, ...], root: int | None) -> Collective:
    """A kind of collective by name, with root 0 unless asked for; or the custom one in a file.

    Raises:
        InputError: a root where there is none, or a collective that does not fit.
    """
    from synth.collective import Kind
    from synth.formats import read_collective
    from synth.methods import as_collective

    in_file = name.lower().endswith((".yaml", ".yml", ".json"))
    if root is not None and (in_file or name in [kind.value for kind in Kind if not kind.has_root]):
        raise InputError(f"--root {root}: {name} has no root")
    if in_file:
        return read_collective(Path(name), topology, ranks=len(taking_part))
    return as_collective(topology, name, root=root or 0, ranks=taking_part)


def _load(
    spec: str, ranks: str | None, *, relays: bool, gpu: str | None, pcie: bool, rates: str
) -> tuple[Topology, tuple[int, ...]]:
    """The topology a command is about, and the ranks that take part in it."""
    from topologies import load

    chosen = None if ranks is None else rank_list(ranks)
    topology = load(spec, ranks=chosen, relays=relays, gpu=gpu, pcie=pcie, rates=rates)
    return topology, tuple(range(topology.ranks if chosen is None else len(chosen)))


def _read_correct(file: Path) -> Schedule:
    """A schedule worth running: a wrong one is an answer of no before any time is spent on it."""
    import synth

    schedule = synth.read_schedule(file)
    verdict = synth.verify(schedule)
    if not verdict.correct:
        raise _NotCorrectError(f"{file}: not correct: {verdict.errors[0]}")
    return schedule


def _verified(schedule: Schedule, seconds: float, output: Path | None) -> Json:
    """What `solve` reports; nothing is said or written of a schedule that the verifier does not pass."""
    import synth

    _check_correct(schedule)
    if output is not None:
        synth.write_schedule(schedule, output)
    return solution_document(schedule, seconds, output)


def _check_correct(schedule: Schedule) -> None:
    import synth

    verdict = synth.verify(schedule)
    if not verdict.correct:
        raise AssertionError(f"the schedule found is not correct: {verdict.errors[0]}")


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def main() -> None:
    """Run the command; turn what it raises into one line and an exit status."""
    show_warnings()
    if sys.stdout is None:  # closed by the shell: `synth ... >&-`
        fail("standard output: must be open, got a closed one")
        sys.exit(2)
    sys.exit(_status())


def _status() -> int:
    try:
        # Commands return nothing; typer, what an Exit carries. Without words, `synth` says what it can do.
        status = app(sys.argv[1:] or ["--help"], standalone_mode=False) or 0
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
    if status == INTERRUPTED:
        fail("interrupted")
    return int(status)


def _line(error: BaseException) -> str:
    return error.format_message() if isinstance(error, typer.TyperException) else str(error)


STATUS: dict[type[BaseException], int] = {
    InputError: 2,
    typer.TyperException: 2,
    InfeasibleError: 1,
    _NotCorrectError: 1,
    TimedOutError: 3,
}
"""Exit status of everything that a command may raise on purpose."""

INTERRUPTED = 130
"""What typer answers after Ctrl-C, as shells do (128 + SIGINT)."""


if __name__ == "__main__":
    main()
