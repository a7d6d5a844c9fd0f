"""Tables out of child processes: deadlines, errors, what is kept, what a training process must not feel."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arborcast.backends import ExecutionError, Options
from arborcast.backends.schedules import synthesis as module
from arborcast.backends.schedules.schedule_table import ScheduleTable
from arborcast.backends.schedules.selection import GroupSelection
from arborcast.backends.schedules.synthesis import synthesize_table, tables
from arborcast.synth.api import solve
from arborcast.synth.bounds import bound
from arborcast.synth.chunks.solvers.cache import ChunkCache
from arborcast.synth.chunks.solvers.solver_child import Worker
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError
from arborcast.synth.schedule import Schedule
from arborcast.synth.selection import SIZES, Choice
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Link, Topology
from arborcast.synth.verification.verifier import verify
from arborcast.topologies import load
from tests.lowering.test_additions import EXPLICIT, UNLIKE
from tests.support.forked_solvers import started_anew

RING = load("ring:3,latency=5")
QUICK = Options(method="ring", deadline_s=200)


class Counted(Worker):
    """A child process that is counted."""

    started = 0

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        Counted.started += 1


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of caches for each test, and children that are counted."""
    monkeypatch.setenv("ARBORCAST_CACHE", str(tmp_path))
    monkeypatch.setattr(Counted, "started", 0)
    monkeypatch.setattr(module, "Worker", Counted)
    return tmp_path


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "tables").glob("*.json")) if (cache / "tables").exists() else []


def test_all_methods_are_compared_and_what_is_found_is_kept(cache: Path) -> None:
    fragment = load("dgx1").subset([6, 1, 4, 5])
    found = synthesize_table(fragment, Kind.ALLREDUCE, None, Options(deadline_s=200))
    assert found.collective == Collective.on(fragment, "allreduce")
    assert found.topology == fragment
    assert not found.is_cut_short
    assert all(verify(entry.schedule).correct for entry in found.entries)
    largest, of_full_rate = found.entries[-1].schedule, solve(fragment, Kind.ALLREDUCE)
    assert of_full_rate.rate == of_full_rate.bound.rate
    # A group's messages cost time, so that fewer of them may be faster than the full rate at any size.
    assert GroupSelection((of_full_rate, largest)).fastest(SIZES[-1]).transfers == largest.transfers
    assert Counted.started == 1
    assert synthesize_table(fragment, Kind.ALLREDUCE, None, Options()) == found
    assert Counted.started == 1
    assert len(kept(cache)) == 1


def test_a_method_of_choice_serves_all_sizes() -> None:
    found = synthesize_table(RING, Kind.BROADCAST, 2, QUICK)
    assert [(entry.from_bytes, entry.schedule.method.name) for entry in found.entries] == [(0, "ring")]
    assert found.collective.root == 2
    assert not found.is_cut_short


def test_the_key_is_the_content(cache: Path) -> None:
    first = synthesize_table(RING, Kind.BROADCAST, 0, QUICK)
    renamed = replace(RING, name="our own machine")
    again = synthesize_table(renamed, Kind.BROADCAST, 0, replace(QUICK, deadline_s=100))
    assert (again.topology, again.entries[0].schedule.transfers) == (
        renamed,
        first.entries[0].schedule.transfers,
    )
    assert (Counted.started, len(kept(cache))) == (1, 1)
    slower = replace(RING, links=tuple(replace(link, latency_us=link.latency_us + 1) for link in RING.links))
    synthesize_table(slower, Kind.BROADCAST, 0, QUICK)
    synthesize_table(RING, Kind.BROADCAST, 1, QUICK)
    synthesize_table(RING, Kind.REDUCE, 0, QUICK)
    assert (Counted.started, len(kept(cache))) == (4, 4)
    synthesize_table(RING, Kind.BROADCAST, 0, replace(QUICK, cache=False))
    assert (Counted.started, len(kept(cache))) == (5, 4)


def test_a_damaged_entry_is_one_warning(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = synthesize_table(RING, Kind.BROADCAST, 0, QUICK)
    (file,) = kept(cache)
    whole, folder = file.read_text(), module.ChunkCache(cache / "tables")  # type: ignore[attr-defined]
    other = ScheduleTable.of([Choice(0, solve(RING, "broadcast", method="ring", root=1))])
    for damage in (
        lambda: file.write_text(whole[:-50]),
        lambda: file.write_text(whole.replace("ring:3", "ring:4", 1)),
        lambda: folder.put_json(file.stem, {"entries": []}),
        lambda: folder.put_json(file.stem, other.to_bytes().decode()),
    ):
        damage()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert synthesize_table(RING, Kind.BROADCAST, 0, QUICK) == found
        # On a busy machine another record says that this takes long.
        assert [
            ("anew" in record.getMessage() or "ignored" in record.getMessage()) for record in caplog.records
        ].count(True) == 1
        assert kept(cache) == [file] and file.read_text() == whole


def test_a_deadline_that_no_machine_meets(cache: Path) -> None:
    with pytest.raises(
        TimedOutError, match=r"allreduce on ring:3,latency=5: there was no schedule within 0\.01 s"
    ):
        synthesize_table(RING, Kind.ALLREDUCE, None, Options(deadline_s=0.01))
    assert not kept(cache)


def test_the_first_schedule_is_better_than_none(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline passes while the others are compared."""
    answers = iter([True, True, False, True, True, False])  # kernels, the first schedule, all; and again

    def wait(workers: Collection[Worker], deadline: Deadline) -> list[Worker]:
        return module_wait(workers, Deadline.after(200)) if next(answers) else []

    module_wait = module.wait  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "wait", wait)
    found = synthesize_table(RING, Kind.ALLREDUCE, None, Options())
    assert found.is_cut_short
    (entry,) = found.entries
    assert entry.from_bytes == 0
    assert entry.schedule.rate == entry.schedule.bound.rate
    assert verify(entry.schedule).correct
    # It is kept for this deadline, so that not every start pays for it, and for no other.
    assert len(kept(cache)) == 1
    assert synthesize_table(RING, Kind.ALLREDUCE, None, Options()) == found
    assert synthesize_table(RING, Kind.ALLREDUCE, None, Options(deadline_s=31)).is_cut_short
    assert next(answers, None) is None


def test_kernels_that_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KERNELS_S", 0.001)
    late = r"allreduce on ring:3.* kernels were not compiled within 0\.001 s"
    with started_anew(), pytest.raises(TimedOutError, match=late):  # one that is forked has them
        synthesize_table(RING, Kind.ALLREDUCE, None, QUICK)


def found_until_late(best: Schedule | None, *found: Schedule) -> Any:
    def candidates(*_: object, **__: object) -> Iterator[Schedule]:
        yield from found
        raise TimedOutError("too late", best)

    return candidates


def test_what_was_found_by_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, trees = (solve(RING, "allreduce", method=method) for method in ("ring", "trees"))
    asked = (RING, ring.collective, "auto", SolveOptions())
    monkeypatch.setattr(EXPLICIT, found_until_late(None, trees, ring))
    first, whole = tables(*asked)
    assert [entry.schedule for entry in first.entries] == [trees]
    assert {entry.schedule for entry in whole.entries} <= {ring, trees}
    assert first.is_cut_short and whole.is_cut_short
    monkeypatch.setattr(EXPLICIT, found_until_late(ring))
    (only,) = tables(*asked)
    assert only.is_cut_short and only.entries[0].schedule == ring
    monkeypatch.setattr(EXPLICIT, found_until_late(None))
    with pytest.raises(TimedOutError, match="too late"):
        next(tables(*asked))


def test_one_method_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = solve(RING, "allreduce", method="ring")

    def late(best: Schedule | None) -> Any:
        def answer(*_: object) -> Schedule:
            raise TimedOutError("too late", best)

        return answer

    monkeypatch.setattr("arborcast.synth.packing.tree_solver.solve_by_trees", late(ring))
    (only,) = tables(RING, ring.collective, "trees", SolveOptions())
    assert only.is_cut_short and only.entries[0].schedule == ring
    monkeypatch.setattr("arborcast.synth.packing.tree_solver.solve_by_trees", late(None))
    with pytest.raises(TimedOutError, match="too late"):
        next(tables(RING, ring.collective, "trees", SolveOptions()))


def test_nobody_gets_a_schedule_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = solve(RING, "allreduce", method="ring")
    wrong = replace(ring, transfers=ring.transfers[:-1])
    monkeypatch.setattr(EXPLICIT, lambda *_, **__: iter([wrong]))
    with pytest.raises(ExecutionError, match=r"method ring made a schedule that is not correct: .*rank"):
        next(tables(RING, ring.collective, "auto", SolveOptions()))


def test_ranks_add_in_different_orders_only_where_the_group_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = UNLIKE.topology, UNLIKE.collective, "auto", SolveOptions()
    unlike = replace(UNLIKE, bound=bound(*asked[:2]))
    for found in ([unlike], [unlike, unlike]):
        monkeypatch.setattr(EXPLICIT, lambda *_, found=found, **__: iter(found))
        with pytest.raises(ExecutionError, match="made a schedule whose ranks add in different orders"):
            next(tables(*asked))
        *_, table = tables(*asked, bits="any")
        assert [entry.schedule for entry in table.entries] == [unlike]
        assert table.check("here", alike=False) is table
        with pytest.raises(InputError, match=r"here: entries\[0\]: a schedule whose ranks add in"):
            table.check("here")
    folder = ChunkCache(Path("nowhere"))
    keys = {module._key(folder, *asked[:2], Options(bits=bits)) for bits in ("alike", "any")}
    assert len(keys) == 2


def test_errors_of_the_child_keep_their_class(cache: Path) -> None:
    apart = Topology.build("apart", 3, [Link(0, 1, RING.links[0].bandwidth)])
    with pytest.raises(InfeasibleError, match=r"rank") as caught:
        synthesize_table(apart, Kind.BROADCAST, 0, Options(deadline_s=200))
    assert "\n" not in str(caught.value)
    with pytest.raises(InfeasibleError, match="broadcast: rank 2 cut off: nothing leads there from rank 0"):
        synthesize_table(apart, Kind.BROADCAST, 0, QUICK)
    with pytest.raises(InputError, match="method ring"):
        synthesize_table(RING, Kind.GATHER, 0, QUICK)
    with pytest.raises(InputError, match=r"broadcast: root must be one of the ranks 0\.\.2, got 3"):
        synthesize_table(RING, Kind.BROADCAST, 3, QUICK)
    with pytest.raises(InputError, match="allreduce: needs at least 2 ranks, got 1"):
        synthesize_table(load("full:1"), Kind.ALLREDUCE, None, QUICK)
    assert not kept(cache)


def test_a_child_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(Worker):
        def start(self, *task: Any, **more: Any) -> None:
            super().start(*task, **more)
            os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(module, "Worker", Dying)
    with pytest.raises(ExecutionError, match=r"synthesis of allreduce on ring:3.*ended by SIGKILL"):
        synthesize_table(RING, Kind.ALLREDUCE, None, QUICK)


def test_a_child_that_fails_in_a_way_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Worker):
        def start(self, solver: str, function: Any, /, *args: Any, **more: Any) -> None:
            super().start(solver, int, "seven")

    monkeypatch.setattr(module, "Worker", Failing)
    with pytest.raises(ExecutionError, match=r"synthesis of allreduce on ring:3,latency=5: ValueError: inv"):
        synthesize_table(RING, Kind.ALLREDUCE, None, QUICK)


def test_no_child_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[Worker] = []

    class Seen(Worker):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            children.append(self)

    monkeypatch.setattr(module, "Worker", Seen)
    synthesize_table(RING, Kind.ALLREDUCE, None, QUICK)
    with pytest.raises(TimedOutError):
        synthesize_table(load("ring:64"), Kind.ALLREDUCE, None, replace(QUICK, deadline_s=0.01))
    assert len(children) == 2
    assert not any(child.is_alive for child in children)


SCRIPT = """
import os, sys, threading
print("main runs")
os.chdir("/")
threading.Thread(target=threading.Event().wait, daemon=True).start()
from arborcast.backends import Options
from arborcast.backends.schedules.synthesis import synthesize_table
from arborcast.synth.collective import Kind
from arborcast.topologies import load
from tests.lowering.test_additions import EXPLICIT, UNLIKE
table = synthesize_table(load("ring:3"), Kind.ALLREDUCE, None, Options(method="ring", deadline_s=200))
print(table.entries[0].schedule.method.name, "torch" in sys.modules)
"""


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    root = str(Path(module.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": root, "ARBORCAST_TOPOLOGY": "nonsense"},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert done.stdout.splitlines() == ["main runs", "ring False"]
