"""From a fabric to the table of one collective: found in a child process, by a deadline, kept on disk.

A training process has threads, CUDA, and a `__main__` that must not run twice, and solvers cannot be asked to
stop; so the work is done by a child (`synth.chunks.solvers.solver_child`) that imports no torch and is killed
in time. It answers twice: the first schedule, which has the best rate, and then the comparison of all that
apply.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from arborcast.backends.errors import ExecutionError
from arborcast.backends.lowering.additions import adds_alike
from arborcast.backends.options import Options
from arborcast.backends.schedules.combined import JointPart
from arborcast.backends.schedules.schedule_table import TABLE_FORMAT, ScheduleTable, flaw_of
from arborcast.backends.schedules.selection import GroupSelection
from arborcast.synth.api import Approach, approach
from arborcast.synth.chunks.solvers.cache import ChunkCache
from arborcast.synth.chunks.solvers.solver_child import Worker, WorkerDiedError, next_answer, wait
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.compile_kernels import warm_once
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError
from arborcast.synth.faults.faulty import Faulty, left_of
from arborcast.synth.formats import topology_to_document
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.kernels.cache_folder import cache_folder
from arborcast.synth.schedule import Schedule
from arborcast.synth.selection import SIZES, Choice
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Topology

log = logging.getLogger(__name__)

COMPARED_PART = 0.7
"""Part of the deadline in which candidates are made; what is left is for simulating and checking them."""

FEW_SIZES = tuple(size for size in SIZES if 64 << 10 <= size <= 16 << 20)
FEW_STRIDE = 4
"""Where making candidates took until the deadline, they are compared at 64 KiB, 1 MiB and 16 MiB, and between
two of them where their choices differ."""

NOTICE_S = 3.0
"""After how long a wait is explained."""

KERNELS_S = 240.0
"""How long a machine may take to compile the kernels, which it does once; the deadline begins after that."""


def synthesize_table(
    fabric: Topology | Faulty, kind: Kind, root: int | None, options: Options, cores: int | None = None
) -> ScheduleTable:
    """The table of one collective among all ranks of a fabric.

    Args:
        fabric: of the group: its rank i is rank i of the group.
        kind: of the collective.
        root: a rank, for kinds that have one.
        options: `deadline_s`, `method`, `bits` and `cache` count here.
        cores: of the one host that all ranks share, where nothing is known of its links; None elsewhere.

    Raises:
        InputError: the collective does not fit the fabric, or the method the collective.
        InfeasibleError: some rank cannot be reached.
        TimedOutError: there was no schedule by the deadline, or no kernels within `KERNELS_S`.
        ExecutionError: the child died or failed in a way of its own.
    """
    topology = left_of(fabric)
    collective = Collective.on(topology, kind, root=root or 0)
    kept = kept_table(fabric, kind, root, options, cores)
    if kept is not None:
        return kept
    what = f"{kind} on {topology.name}"
    wanted = SolveOptions(deadline_s=options.deadline_s * COMPARED_PART, cache=options.cache)
    asked = tables, fabric, collective, options.method, wanted, cores, options.bits
    told = f"looking for schedules of {what}, for up to {options.deadline_s:g} s; they are kept"
    late = f"{what}: there was no schedule within {options.deadline_s:g} s"
    table = _by_child("synthesis", what, options.deadline_s, told, late, *asked)
    if options.cache:
        folder = ChunkCache(cache_folder() / "tables")
        # What a deadline cut short is kept for that deadline alone: more time may give more.
        deadline_s = options.deadline_s if table.is_cut_short else None
        # As text: the cache sorts keys, and the order of a method's settings is part of a schedule.
        key = _key(folder, fabric, collective, options, deadline_s, cores)
        folder.put_json(key, table.to_bytes().decode())
    return table


def kept_table(
    fabric: Topology | Faulty, kind: Kind, root: int | None, options: Options, cores: int | None = None
) -> ScheduleTable | None:
    """The table of an earlier time, where there is one; arguments and InputError as above."""
    topology = left_of(fabric)
    collective = Collective.on(topology, kind, root=root or 0)
    if not options.cache:
        return None
    folder = ChunkCache(cache_folder() / "tables")
    for deadline_s in (None, options.deadline_s):
        key = _key(folder, fabric, collective, options, deadline_s, cores)
        table = _kept(folder, key, topology, collective, options)
        if table is not None:
            return table
    return None


def behind(find: Callable[[], ScheduleTable]) -> Future[ScheduleTable]:
    """Have a table found while calls go on, one at a time in this process; what comes of it.

    It can be cancelled until it begins. What is on its way when the process ends is given up: the thread
    keeps nobody from ending, and the child process that it waits for ends with its parent.
    """
    found: Future[ScheduleTable] = Future()

    def run() -> None:
        with _turn:
            if found.set_running_or_notify_cancel():
                try:
                    found.set_result(find())
                except BaseException as error:
                    found.set_exception(error)

    threading.Thread(target=run, name="synth-behind", daemon=True).start()
    return found


_turn = threading.Lock()
"""Of who looks for a table behind the calls."""


def _forget() -> None:
    """In a child that was forked: no thread of its parent's has the turn here."""
    global _turn  # noqa: PLW0603
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_forget)


def given_table(part: JointPart, options: Options) -> ScheduleTable:
    """The table of a schedule that is known already, once it has been bounded and verified.

    Args:
        part: of the group in what several run at once.
        options: `deadline_s`, `bits` and `cache` count here.

    Raises:
        TimedOutError: that took until the deadline, or there were no kernels within `KERNELS_S`.
        ExecutionError: the schedule is not correct, or the child died.
    """
    kept = ChunkCache(cache_folder() / "tables")
    key = _key(kept, part.topology, part.collective, options, of=part.name)
    table = _kept(kept, key, part.topology, part.collective, options) if options.cache else None
    if table is None:
        what = f"{part.collective.kind} on {part.topology.name}"
        told = f"verifying the schedule of {what}"
        late = f"{what}: it was not verified within {options.deadline_s:g} s"
        asked = verified_tables, part, options.bits
        table = _by_child("verification", what, options.deadline_s, told, late, *asked)
        if options.cache:
            kept.put_json(key, table.to_bytes().decode())
    return table


def verified_tables(part: JointPart, bits: str) -> Iterator[ScheduleTable]:
    """In the child: the one table of a given schedule with a bound of its own."""
    from arborcast.synth.bounds import bound

    limit = bound(part.topology, part.collective)
    made = Schedule.build(
        part.topology, part.collective, part.method, limit, part.chunks, part.transfers, part.rounds
    )
    yield _checked((Choice(0, made),), bits, is_cut_short=False)


def _by_child(
    work: str,
    what: str,
    deadline_s: float,
    told: str,
    late: str,
    make: Callable[..., Iterator[ScheduleTable]],
    *asked: Any,
) -> ScheduleTable:
    """The table that a child makes; the first one alone where no more was done by the deadline.

    Args:
        work: what it does, for errors.
        what: for which collective.
        deadline_s: for it.
        told: the notice, where it takes long.
        late: the error, where there is none by the deadline.
        make: yields the first table, and the whole one if the first was cut short.
        asked: its arguments.
    """
    worker = Worker(memory_bytes=None, modules=(__name__,))
    try:
        _warm(worker, what)
        deadline = Deadline.after(deadline_s)
        with _notice(told):
            worker.start(what, next_answer, make, *asked)
            if not wait([worker], deadline):
                raise TimedOutError(late)
            try:
                first: ScheduleTable = worker.result()
            except TimedOutError as error:  # it speaks of the part of the deadline that it was given
                raise TimedOutError(late, error.best) from error
            if not first.is_cut_short:
                return first
            worker.start(what, next_answer)
            whole: ScheduleTable | None = worker.result() if wait([worker], deadline) else None
            return first if whole is None else whole
    except (InputError, InfeasibleError, TimedOutError):
        raise
    except WorkerDiedError as error:
        raise ExecutionError(f"{work} of {error}") from error
    except Exception as error:
        raise ExecutionError(f"{work} of {what}: {type(error).__name__}: {error}") from error
    finally:
        worker.kill()


def _warm(worker: Worker, what: str) -> None:
    """Have the kernels compiled, where no process has done it on this machine yet."""
    worker.start(what, warm_once)
    with _notice("kernels are being compiled, once on this machine; this takes about half a minute"):
        if not wait([worker], Deadline.after(KERNELS_S)):
            raise TimedOutError(f"{what}: the kernels were not compiled within {KERNELS_S:g} s")
    worker.result()


@contextmanager
def _notice(line: str) -> Iterator[None]:
    """Say what takes so long, once it does."""
    timer = threading.Timer(NOTICE_S, log.warning, ("%s", line))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def tables(
    fabric: Topology | Faulty,
    collective: Collective,
    method: str,
    wanted: SolveOptions,
    cores: int | None = None,
    bits: str = "alike",
) -> Iterator[ScheduleTable]:
    """The table of the first schedule, and then that of all candidates by the deadline of what is wanted.

    There is only one table for one method, and where the first schedule took until the deadline. The first is
    cut short unless there is nothing to compare it with.

    Raises:
        InputError: see `synthesize_table`, like the next one.
        InfeasibleError: some rank cannot be reached.
        TimedOutError: the deadline passed first.
    """
    asked = approach(fabric, collective, method, wanted)
    yield from _compared(asked.candidates(), cores, bits) if method == "auto" else _only(asked, bits)


def _only(asked: Approach, bits: str) -> Iterator[ScheduleTable]:
    """The table of one schedule, or of the best until the deadline."""
    try:
        yield _checked((Choice(0, asked.answer()),), bits, is_cut_short=False)
    except TimedOutError as error:
        if error.best is None:
            raise
        yield _checked((Choice(0, error.best),), bits, is_cut_short=True)


def _compared(schedules: Iterator[AnySchedule], cores: int | None, bits: str) -> Iterator[ScheduleTable]:
    """The table of the first schedule by which every rank gets such bits, then that of all of them."""
    found: list[AnySchedule] = []
    refused: AnySchedule | None = None
    is_late = False

    def may_serve(schedule: AnySchedule) -> bool:
        return bits == "any" or adds_alike(schedule)

    try:
        for schedule in schedules:
            if not may_serve(schedule):
                refused = refused or schedule
                continue
            found.append(schedule)
            if len(found) == 1:
                yield _checked((Choice(0, schedule),), bits, is_cut_short=True)
    except TimedOutError as error:
        if error.best is not None and may_serve(error.best):
            found.append(error.best)
        if not found:
            raise
        is_late = True
    if refused is not None and not found:
        found.append(refused)  # whose flaw is what there is to say
    comparison = GroupSelection(tuple(found), cores=cores)
    choices = comparison.choices(FEW_SIZES, stride=FEW_STRIDE) if is_late else comparison.choices()
    yield _checked(choices, bits, is_cut_short=is_late)


def _checked(choices: tuple[Choice, ...], bits: str, *, is_cut_short: bool) -> ScheduleTable:
    """The table of schedules that do what they should: nobody runs one that was not replayed."""
    for choice in choices:
        if flaw := flaw_of(choice.schedule, alike=bits == "alike"):
            raise ExecutionError(f"method {choice.schedule.method.name} made {flaw}")
    return ScheduleTable.of(choices, is_cut_short=is_cut_short)


def _kept(
    kept: ChunkCache, key: str, topology: Topology, collective: Collective, options: Options
) -> ScheduleTable | None:
    """The table of an earlier time, under the present name of the topology."""
    text = kept.get_json(key)
    if text is None:
        return None
    source = f"kept table {kept.folder / key}.json"
    try:
        if not isinstance(text, str):
            raise InputError(f"{source}: must hold text, got {shorten(text)}")
        alike = options.bits == "alike"
        read = _read.get(text) or ScheduleTable.from_bytes(text.encode(), source).check(source, alike=alike)
        table = read.renamed(topology.name)
        if table.collective != collective or table.topology != topology:
            raise InputError(f"{source}: must be of {collective.kind} on the topology that was asked for")
        _read[text] = read
        return table
    except InputError as error:
        log.warning("a table is made anew: %s", error)
        return None


_read: weakref.WeakValueDictionary[str, ScheduleTable] = weakref.WeakValueDictionary()
"""The tables that this process has from files, by their text, as long as a group has them."""


def _key(
    kept: ChunkCache,
    fabric: Topology | Faulty,
    collective: Collective,
    options: Options,
    deadline_s: float | None = None,
    cores: int | None = None,
    of: str | None = None,
) -> str:
    """Of everything that a table depends on; the name of the topology is not."""
    whole = {"healthy": topology_to_document(fabric.healthy)} if isinstance(fabric, Faulty) else {}
    content = {
        **whole,
        "topology": {**topology_to_document(left_of(fabric)), "name": ""},
        "collective": [collective.kind.value, collective.root],
        "method": of or options.method,
        "bits": options.bits,
        "deadline": deadline_s,
        "cores": cores,
        "made by": _own_sources(),
    }
    return kept.key_of_content(TABLE_FORMAT, content)


@cache
def _own_sources() -> str:
    """The state of the files here that make tables; the key holds that of `synth` anyway."""
    folder = Path(__file__).parent
    files = ("combined.py", "selection.py", "synthesis.py", "schedule_table.py", "../lowering/additions.py")
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in files)).hexdigest()
