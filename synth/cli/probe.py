"""`synth probe`: options, and what rank 0 says. The measurement is `backends.probe`'s.

It is the one command that torchrun starts several times at once. Rank 0 speaks; the others end with its
status.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from arborcast.synth.cli.console import fail, print_json, print_lines, progress, table
from arborcast.synth.cli.options import (
    AsJson,
    count,
    duration,
    number_of,
    option,
    rank_list,
    refuse,
    writable,
)
from arborcast.synth.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from arborcast.backends.probe.cables import FoundCables
    from arborcast.backends.probe.measurements import Measurements
    from arborcast.synth.topology import Topology

START = "torchrun --nproc-per-node 4 --no-python synth probe -o fabric.yaml"
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FOLLOWERS_WAIT_S = 2.0
_WARNINGS = 10

_logger = logging.getLogger(__name__)


def is_rank_of_a_job() -> bool:
    """Whether torchrun, or somebody in its place, started this process as one of several."""
    return all(name in os.environ for name in _RENDEZVOUS)


def is_follower() -> bool:
    """Whether this process is another rank than 0 of a command of several, and so has nothing to say."""
    is_for_several = sys.argv[1:2] == ["probe"] or sys.argv[1:3] == ["bench", "run"]
    return is_for_several and is_rank_of_a_job() and os.environ["RANK"] != "0"


def end_after_rank_0() -> None:
    """Give rank 0 the time for its line: torchrun ends all ranks as soon as one has failed."""
    time.sleep(_FOLLOWERS_WAIT_S)


def probe(
    output: Annotated[Path | None, option("-o", "--output", "write the topology file here (YAML)")] = None,
    check: Annotated[
        str | None, option("--check", "compare with this topology; contradictions: status 1", metavar="SPEC")
    ] = None,
    ranks: Annotated[
        str | None, option("--ranks", "of --check: which of its ranks the processes are: 1,4,5,6")
    ] = None,
    absolute: Annotated[
        bool, option("--absolute", "with --check: compare rates as they are, not their pattern")
    ] = False,
    tolerance: Annotated[
        str,
        option("--tolerance", "how far outside the measured spread, or off a known machine, a rate may lie"),
    ] = "1/4",
    like: Annotated[
        list[str] | None,
        option(
            "--like", "a machine that the fabric may be, beside the catalog's; again for each", metavar="SPEC"
        ),
    ] = None,
    cables: Annotated[
        bool,
        option("--cables", "find the cables of hosts without a switch; one process on each host"),
    ] = False,
    transport: Annotated[
        Literal["auto", "sockets", "shared memory"],
        option("--transport", "auto: shared memory inside a host"),
    ] = "auto",
    streams: Annotated[
        bool, option("--streams", "see how many messages of a rank go well at once, and write it")
    ] = False,
    parallel_rounds: Annotated[
        bool, option("--parallel-rounds", "measure disjoint pairs at once: fast, but not exact")
    ] = False,
    repeats: Annotated[int, count("--repeats", "measurements of each pair alone")] = 5,
    load_repeats: Annotated[int, count("--load-repeats", "measurements under load")] = 3,
    pings: Annotated[int, count("--pings", "round trips measured of each pair")] = 200,
    window: Annotated[float, duration("--window", "length of one measurement")] = 0.04,
    timeout: Annotated[float, duration("--timeout", "give up a silent rank after so long")] = 60,
    as_json: AsJson = False,
) -> None:
    """Measure the fabric between processes; write it as a topology.

    torchrun starts the processes.
    """
    if check is None:
        refuse("goes with --check SPEC only", absolute=absolute, ranks=ranks)
    if cables:
        of_links = {"like": like or None, "parallel_rounds": parallel_rounds, "streams": streams}
        refuse("does not go with --cables", check=check, **of_links, transport=transport != "auto")
    allowed = float(number_of("--tolerance", tolerance, lambda part: part >= 0, "must not be negative"))
    _see_rendezvous()
    from arborcast.backends.errors import ExecutionError
    from arborcast.backends.probe.measuring import Effort, run
    from arborcast.backends.probe.traffic import Period

    effort = Effort(
        pings=pings,
        repeats=repeats,
        load_repeats=load_repeats,
        period=Period(window_s=window, warmup_s=min(0.01, window / 2)),
        streams=streams,
        parallel=parallel_rounds,
        timeout_s=timeout,
    )
    report = _Report(output, check, ranks, absolute, allowed, like or [], as_json, streams)
    try:
        with progress("measuring", quiet=as_json or is_follower()):
            if cables:
                from arborcast.backends.probe.cables import probe_cables

                status = probe_cables(prepare=report.prepare, conclude=report.conclude_cables, effort=effort)
            else:
                status = run(
                    prepare=report.prepare, conclude=report.conclude, effort=effort, transport=transport
                )
    except ExecutionError as error:
        fail(f"rank {os.environ['RANK']}: {error}")
        status = 1
    if status:
        raise typer.Exit(status)


def _see_rendezvous() -> None:
    missing = [name for name in _RENDEZVOUS if name not in os.environ]
    if missing:
        raise InputError(f"probe: must run on several processes, as in: {START} ({missing[0]} is not set)")
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not os.environ[name].isdecimal():
            raise InputError(f"{name}: must be a whole number, got {os.environ[name]!r}")
    if int(os.environ["WORLD_SIZE"]) < 2:
        raise InputError(f"probe: must run on at least 2 processes, got {os.environ['WORLD_SIZE']}")


@dataclass
class _Report:
    """What rank 0 does with the input before and with the answer after the measurement."""

    output: Path | None
    check: str | None
    ranks: str | None
    absolute: bool
    tolerance: float
    like: list[str]
    as_json: bool
    streams: bool
    given: Topology | None = None
    known: dict[str, Topology] = field(default_factory=dict)

    def prepare(self, ranks: int) -> int:
        """See what can be seen before any time is spent; 2 where the input is wrong, which is said."""
        from arborcast.topologies import load

        try:
            if self.output is not None:
                writable(self.output)
            if self.check is not None:
                self.given = load(self.check, ranks=None if self.ranks is None else rank_list(self.ranks))
                if self.given.ranks != ranks:
                    raise InputError(
                        f"--check {self.check}: has {self.given.ranks} ranks, but {ranks} processes measure; "
                        "choose as many with --ranks"
                    )
            for spec in self.like:
                self.known[spec] = load(spec)
                if self.known[spec].ranks != ranks:
                    raise InputError(
                        f"--like {spec}: has {self.known[spec].ranks} ranks, but {ranks} processes measure"
                    )
        except InputError as error:
            fail(str(error))
            return 2
        return 0

    def conclude(self, measured: Measurements) -> int:
        """Say and write everything; 1 where the given topology is contradicted."""
        from arborcast.backends.probe.comparison import compare
        from arborcast.backends.probe.inference import infer
        from arborcast.backends.probe.likeness import resembling
        from arborcast.backends.probe.report import (
            TABLE_HEADER,
            describe,
            document,
            table_rows,
            topology_file,
        )

        name = "measured" if self.output is None else _name(self.output)
        found = infer(measured, name=name, streams=self.streams)
        like = resembling(measured, self.known, tolerance=self.tolerance)
        comparison = None
        if self.given is not None:
            comparison = compare(
                measured, self.given, tolerance=self.tolerance, absolute=self.absolute, name=self.check
            )
        if not self._written(lambda: topology_file(found, measured)):
            return 2
        contradictions = comparison.contradictions if comparison else ()
        if self.as_json:
            whole_ = document(found, measured, comparison, like)
            print_json({**whole_, "file": None if self.output is None else str(self.output)})
        else:
            print_lines(table(TABLE_HEADER, table_rows(measured)))
            print_lines(describe(found, measured, comparison, self.output, like))
        sys.stdout.flush()
        if self.given is None or self.output is not None:  # else nobody asked for a topology
            _warn([f"not explained: {miss}" for miss in found.misses], most=_WARNINGS)
        _warn(list(contradictions), most=len(contradictions))
        return 1 if contradictions else 0

    def conclude_cables(self, found: FoundCables) -> int:
        """The same of cables."""
        from arborcast.backends.probe.report import (
            TABLE_HEADER,
            cables_document,
            cables_file,
            describe_cables,
            table_rows,
        )

        topology = found.topology("measured" if self.output is None else _name(self.output))
        if not self._written(lambda: cables_file(found, topology)):
            return 2
        if self.as_json:
            print_json({**cables_document(found, topology), "file": self.output and str(self.output)})
        else:
            print_lines(table(TABLE_HEADER, table_rows(found.measured)))
            print_lines(describe_cables(found))
            print_lines([f"written    {self.output}"] if self.output else [])
        sys.stdout.flush()
        _warn(list(found.notes), most=len(found.notes))
        return 0

    def _written(self, text: Callable[[], str]) -> bool:
        """Whether what was asked for is in its file; why not is said."""
        from arborcast.synth.formats.atomic import write_atomically

        if self.output is not None:
            try:
                write_atomically(self.output, text())
            except InputError as error:  # a disk that became full: the table is not lost
                fail(str(error))
                return False
        return True


def _name(output: Path) -> str:
    """What the measured topology is called: as its file is."""
    return output.stem if output.stem.isprintable() else "measured"


def _warn(lines: list[str], *, most: int) -> None:
    for line in lines[:most]:
        _logger.warning("%s", line)
    if len(lines) > most:
        _logger.warning("and %d more such lines (all of them with --json)", len(lines) - most)
