"""`synth repair`: a new exact schedule where links or ranks failed, from the one that there was.

Or, before anything fails, the schedules for every single failure, as differences in one file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from arborcast.synth.cli.console import Json, Stopwatch, answer, print_json, print_lines, progress, table
from arborcast.synth.cli.description import describe_solution, infeasible_document
from arborcast.synth.cli.inputs import NotCorrectError, conclude, kept, read_correct, text_of
from arborcast.synth.cli.options import (
    AsJson,
    Deadline,
    File,
    Seed,
    WithoutLink,
    WithoutRank,
    option,
    target,
)
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError
from arborcast.synth.formats.words import gigabytes, share

if TYPE_CHECKING:
    from arborcast.synth.faults.backup_schedules import BackupSchedules
    from arborcast.synth.implicit_schedule import AnySchedule
    from arborcast.synth.solve_options import SolveOptions


def repair(
    file: File,
    without_link: WithoutLink = None,
    without_rank: WithoutRank = None,
    each_link: Annotated[
        bool,
        option("--each-link", "spare schedules, one for each link that may fail, as a file of differences"),
    ] = False,
    each_rank: Annotated[bool, option("--each-rank", "likewise for each rank that may fail")] = False,
    deadline: Deadline = None,
    seed: Seed = 0,
    output: Annotated[Path | None, target("-o", "--output", "write the new schedule here")] = None,
    as_json: AsJson = False,
) -> None:
    """Repair a schedule around failed links and ranks.

    Intact trees are reused, the rest is computed anew; the result is as exact as a new schedule. Before
    anything fails, --each-link makes spare schedules. This command takes one out of such a file at once, and
    so do process groups (ARBORCAST_SPARES).
    """
    from arborcast.synth.faults.backup_documents import is_spares
    from arborcast.synth.solve_options import SolveOptions

    options = SolveOptions(seed=seed, deadline_s=deadline)
    if each_link or each_rank:
        if without_link or without_rank:
            raise InputError(
                "--each-link, --each-rank: foresee single failures of the whole fabric; "
                "--without-link and --without-rank must be left out"
            )
        _foresee(file, each_link, each_rank, options, output, as_json)
        return
    if not without_link and not without_rank:
        raise InputError(f"{file}: nothing to repair, name what failed by --without-link or --without-rank")
    if is_spares(file):
        _take(file, without_link or [], without_rank or [], output, as_json)
    else:
        _repair(file, without_link or [], without_rank or [], options, output, as_json)


def _repair(
    file: Path, links: list[str], ranks: list[int], options: SolveOptions, output: Path | None, as_json: bool
) -> None:
    from arborcast.synth.faults.faulty import without
    from arborcast.synth.faults.repair import repaired

    with progress(f"repairing {file}", quiet=as_json):
        before = read_correct(file)
        faulty = without(before.topology, links=links, ranks=ranks)
        stopwatch = Stopwatch()
        late: TimedOutError | None = None
        try:
            after: AnySchedule | None = repaired(before, faulty, options)
        except InfeasibleError as error:
            if as_json:
                print_json(infeasible_document(error, faulty.topology, before.collective.kind))
            raise
        except TimedOutError as error:
            late, after = error, error.best
        solution = {} if after is None else kept(after, stopwatch.seconds, output)
    if as_json:
        timed_out = {} if late is None else {"timed_out": True, "why": str(late)}
        print_json({**solution, "rate_before": str(before.rate), **timed_out})
    elif after is not None:
        print_lines([*describe_solution(after, solution), f"  before   {gigabytes(before.rate)}"])
    if late is not None:
        raise late


def _foresee(
    file: Path, links: bool, ranks: bool, options: SolveOptions, output: Path | None, as_json: bool
) -> None:
    """Spare schedules for every single failure, in one file of differences."""
    from arborcast.synth.faults.backup_documents import write_spares
    from arborcast.synth.faults.backup_schedules import make_spares, single_failures
    from arborcast.synth.implicit_schedule import ImplicitSchedule

    with progress(f"foreseeing failures of {file}", quiet=as_json):
        whole = read_correct(file)
        if isinstance(whole, ImplicitSchedule):
            raise InputError(
                f"{file}: is in implicit form; spares differ from one that is written out (synth expand)"
            )
        stopwatch = Stopwatch()
        spares = make_spares(whole, single_failures(whole.topology, links=links, ranks=ranks), options)
        seconds = stopwatch.seconds
        if output is not None:
            write_spares(spares, output)
    if as_json:
        print_json({**_document(spares), "seconds": seconds, "file": text_of(output)})
        return
    topology = whole.topology
    rows = [
        (
            it.failure.words(topology),
            gigabytes(it.rate),
            share(it.rate, it.bound.rate),
            share(it.rate, whole.rate),
        )
        for it in spares.differences
    ]
    rows += [(failure.words(topology), "none", "-", "-") for failure, _ in spares.without]
    print_lines(table(("without", "rate", "of the bound", "of the whole's rate"), rows))
    print_lines(f"{failure.words(topology)}: {why}" for failure, why in spares.without)
    print_lines([f"{len(rows)} failures in {seconds} s, verified"])
    if output is not None:
        print_lines([f"written {output}, {output.stat().st_size} bytes"])


def _take(file: Path, links: list[str], ranks: list[int], output: Path | None, as_json: bool) -> None:
    """One schedule out of a file of spares."""
    from arborcast.synth.faults.backup_documents import read_spares
    from arborcast.synth.faults.backup_schedules import Failure
    from arborcast.synth.faults.faulty import parse_link
    from arborcast.synth.verification.verifier import verify

    spares = read_spares(file)
    whole = spares.whole
    failure = Failure.of([parse_link(whole.topology, link) for link in links], ranks)
    stopwatch = Stopwatch()
    after = spares.after(failure)
    seconds = stopwatch.seconds
    if errors := verify(after).errors:
        raise NotCorrectError(f"{file}: {failure.words(whole.topology)}: not correct: {errors[0]}")
    solution = kept(after, seconds, output)
    before = f"  before   {gigabytes(whole.rate)}"
    document = {**solution, "rate_before": str(whole.rate)}
    answer(as_json, document, lambda: [*describe_solution(after, solution), before])


def verify_spares(file: Path, as_json: bool) -> None:
    """Replay every schedule of a file of spares, and say what is wrong with any."""
    from arborcast.synth.faults.backup_documents import read_spares

    spares = read_spares(file)
    with progress(f"verifying {file}", quiet=as_json):
        flaws = list(spares.flaws())
    count = 1 + len(spares.differences)
    document = {"schedules": count, "errors": flaws}
    conclude(file, flaws[:3], as_json, document, lambda: [f"  {count} schedules"])


def _document(spares: BackupSchedules) -> Json:
    topology = spares.whole.topology
    return {
        "rate": str(spares.whole.rate),
        "spares": [
            {
                "without": it.failure.words(topology),
                "rate": str(it.rate),
                "bound": str(it.bound.rate),
                "optimal": it.rate == it.bound.rate,
            }
            for it in spares.differences
        ],
        "none": {failure.words(topology): why for failure, why in spares.without},
    }
