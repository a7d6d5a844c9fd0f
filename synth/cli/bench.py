"""`synth bench run`: a schedule file measured with the options and the columns of nccl-tests.

Alone it starts local processes; started by torchrun on every rank it measures between those: then rank 0
reads the file and speaks, and the others end with its status.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from arborcast.synth.cli.bench_device import bench_device
from arborcast.synth.cli.console import fail, print_json, print_lines
from arborcast.synth.cli.options import AsJson, File, duration, number, option, with_voice
from arborcast.synth.cli.probe import end_after_rank_0, is_follower, is_rank_of_a_job
from arborcast.synth.errors import InputError

if TYPE_CHECKING:
    from arborcast.backends.measure.job import Row, Sweep
    from arborcast.synth.implicit_schedule import AnySchedule

bench = typer.Typer(name="bench", help="Measure a schedule.", rich_markup_mode=None)
bench.command("device")(with_voice(bench_device))

_DEFAULT_SIZE = "32M"


@bench.command("run")
@with_voice
def bench_run(
    file: File,
    minbytes: Annotated[str, option("-b", "--minbytes", "smallest size")] = _DEFAULT_SIZE,
    maxbytes: Annotated[
        str | None, option("-e", "--maxbytes", "largest size; 32M, or the smallest above it")
    ] = None,
    stepbytes: Annotated[
        str | None, option("-i", "--stepbytes", "from one size to the next; instead of -f")
    ] = None,
    stepfactor: Annotated[int | None, number("-f", "--stepfactor", "from one size to the next; 2")] = None,
    iters: Annotated[int, number("-n", "--iters", "timed iterations, back to back")] = 20,
    warmup_iters: Annotated[int, number("-w", "--warmup-iters", "--warmup_iters", "warm-up iterations")] = 5,
    check: Annotated[bool, option("--check/--no-check", "compare every element once")] = True,
    check_iters: Annotated[Literal["0", "1"], option("-c", "the same as nccl-tests says it")] = "1",
    datatype: Annotated[
        Literal["float", "double", "bfloat16", "int64", "float32", "float64"],
        option("-d", "--datatype", "as nccl-tests or torch says it"),
    ] = "float",
    op: Annotated[
        Literal["sum", "prod", "min", "max", "avg", "product"],
        option("-o", "--op", "how contributions are combined"),
    ] = "sum",
    average: Annotated[
        Literal["0", "1", "2", "3"], option("-a", "--average", "0 rank 0, 1 average, 2 min, 3 max")
    ] = "1",
    via: Annotated[
        Literal["group", "messages"],
        option("--via", "group: the engine of the process group; messages: torch's own"),
    ] = "group",
    timeout: Annotated[float, duration("-T", "--timeout", "abort after so long")] = 1800,
    as_json: AsJson = False,
) -> None:
    """Measure a schedule as nccl-tests measures a collective.

    Between local processes, or the ranks of torchrun.
    """
    from arborcast.backends.measure.job import AVERAGES
    from arborcast.backends.measure.nccl_tests import sweep_of

    sizes = _sizes(minbytes, maxbytes, stepbytes, stepfactor)
    sweep_for = partial(
        sweep_of,
        sizes=sizes,
        dtype=datatype,
        op=op,
        iterations=iters,
        warmup=warmup_iters,
        check=check and check_iters == "1",
        average=AVERAGES[int(average)],
        via=via,
    )
    _Run(file, sweep_for, as_json).run(timeout)


class _Run:
    """One measurement, and what is said of it; on each rank of a job."""

    def __init__(self, file: Path, sweep_for: Callable[[AnySchedule], Sweep], as_json: bool) -> None:
        self._file = file
        self._sweep_for = sweep_for
        self._as_json = as_json
        self._sweep: Sweep | None = None
        self._is_job = is_rank_of_a_job()

    def run(self, timeout_s: float) -> None:
        """Measure; exit status 1 where a rank failed or elements are wrong."""
        from arborcast.backends.errors import ExecutionError
        from arborcast.backends.measure.job import RunError
        from arborcast.backends.measure.launch import run_local, see_what_runs_need

        see_what_runs_need()
        try:
            if self._is_job:
                from arborcast.backends.measure.sweep import run_under_torchrun

                rows = run_under_torchrun(self._prepare, timeout_s=timeout_s, on_row=self._show)
            else:
                rows = run_local(self._prepare(None), on_row=self._show, timeout_s=timeout_s)
        except (RunError, ExecutionError) as error:
            self._end(f"{self._file}: {error}")
        wrong = sum(row.wrong or 0 for row in rows)
        if self._sweep is not None:
            self._conclude(self._sweep, rows)
        if wrong:
            self._end(f"{self._file}: {wrong} wrong elements")

    def _prepare(self, processes: int | None) -> Sweep:
        """What to measure, checked against the number of processes of a job; the titles are said."""
        from arborcast import synth
        from arborcast.backends.measure.nccl_tests import header_lines

        schedule = synth.read_schedule(self._file)
        verdict = synth.verify(schedule)
        if not verdict.correct:
            raise InputError(f"{self._file}: not correct: {verdict.errors[0]}")
        ranks = schedule.topology.ranks
        if processes is not None and processes != ranks:
            raise InputError(
                f"{self._file}: needs a process for each of its {ranks} ranks, got {processes} processes"
            )
        self._sweep = self._sweep_for(schedule)
        if not self._as_json:
            where = f"{processes} processes of torchrun" if self._is_job else "local processes"
            self._say(header_lines(self._sweep, where=where))
        return self._sweep

    def _show(self, row: Row) -> None:
        from arborcast.backends.measure.nccl_tests import row_line

        if not self._as_json:
            self._say([row_line(row)])

    def _conclude(self, sweep: Sweep, rows: Sequence[Row]) -> None:
        from arborcast.backends.measure.nccl_tests import footer_lines

        if not self._as_json:
            self._say(footer_lines(rows))
            return
        print_json(self._document(sweep, rows))
        sys.stdout.flush()

    def _document(self, sweep: Sweep, rows: Sequence[Row]) -> dict[str, Any]:
        from arborcast.backends.measure.nccl_tests import RESULT_KEYS, result_rows
        from arborcast.synth.formats.results import TIME, Measure, document

        found = result_rows(sweep, rows, on_fabric=self._is_job)
        return document(
            "How fast is this schedule, measured as nccl-tests does?",
            found,
            keys=RESULT_KEYS,
            measures={**TIME, "wrong": Measure("less")},
            units={
                "time_us": "of one call: mean of a rank's calls back to back; of the ranks as average says",
                "spread": "longest minus shortest call, us",
                "bytes": "of the whole buffer, as rounded; asked_bytes as asked",
                "wrong": "elements over all ranks; null where none was compared",
                "share_of_nominal": "of the bound at the topology's rates; null on local processes",
            },
            packages=("arborcast", "torch", "numpy"),
            file=self._file.name,
            processes="torchrun" if self._is_job else "local",
            correct=not any(row.wrong for row in rows) if sweep.check else None,
        )

    @staticmethod
    def _say(lines: Sequence[str]) -> None:
        """At once, so that whoever waits sees how far it is."""
        print_lines(lines)
        sys.stdout.flush()

    @staticmethod
    def _end(message: str) -> NoReturn:
        """Status 1; said once."""
        if is_follower():
            end_after_rank_0()
        else:
            fail(message)
        raise typer.Exit(1)


def _sizes(first: str, last: str | None, step: str | None, factor: int | None) -> tuple[int, ...]:
    from arborcast.backends.measure.nccl_tests import sizes_between
    from arborcast.synth.formats.sizes import parse_size

    if step is not None and factor is not None:
        raise InputError(f"-i {step} and -f {factor}: only one of them says how sizes grow")
    smallest = parse_size(first)
    largest = max(parse_size(_DEFAULT_SIZE), smallest) if last is None else parse_size(last)
    return sizes_between(
        smallest,
        largest,
        factor=2 if factor is None else factor,
        step=None if step is None else parse_size(step),
    )
