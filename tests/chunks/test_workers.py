"""A child that hangs, crashes, eats memory, or loses its parent."""

from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from arborcast.synth.chunks.solvers.solver_child import SolverProcess, Worker, WorkerDiedError, wait
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import TimedOutError
from tests.support import fake_searches
from tests.support.forked_solvers import started_anew
from tests.support.waiting import until


@pytest.fixture(scope="module", autouse=True)
def programs() -> Iterator[None]:
    """What is tested here is how they start and end."""
    with started_anew():
        yield


@pytest.fixture(scope="module")
def child() -> Iterator[SolverProcess]:
    with SolverProcess(memory_bytes=1 << 30) as child:
        yield child


def soon() -> Deadline:
    """Far beyond what anything here takes."""
    return Deadline.after(200)


def threads_of(pid: int) -> int:
    """How many threads of a process are left."""
    try:
        return len(list(Path(f"/proc/{pid}/task").iterdir()))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def is_gone(pid: int) -> bool:
    """Whether the process has ended; what waits for a parent to ask for its status has ended too."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self").exists():
            return True
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False
    # The first thread may have ended before the others, which still keep the process from being waited for.
    return status.rpartition(")")[2].split()[0] == "Z" and threads_of(pid) <= 1


def number_in(file: Path) -> int:
    """The number that a process writes into a file, once it is there."""
    until(lambda: file.exists() and file.read_text() != "")
    return int(file.read_text())


def test_results_and_errors_come_back(child: SolverProcess) -> None:
    assert child.run("z3", operator.add, 2, 3, deadline=soon()) == 5
    assert child.run("z3", int, "11", base=2, deadline=soon()) == 3
    with pytest.raises(ArithmeticError, match="seven") as caught:
        child.run("z3", fake_searches.fail, "seven", deadline=soon())
    assert "in fail\n" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="Unpicklable: seven"):
        child.run("z3", fake_searches.fail_strangely, "seven", deadline=soon())
    with pytest.raises(Exception, match=r"cannot pickle|can't pickle"):
        child.run("z3", open, os.devnull, deadline=soon())
    assert child.run("z3", fake_searches.talk, "noise", deadline=soon()) == "noise"


def test_large_tasks_and_results(child: SolverProcess) -> None:
    numbers = list(range(1_000_000))
    assert child.run("z3", sorted, numbers, deadline=soon()) == numbers


def test_a_task_must_be_importable() -> None:
    with SolverProcess() as child:
        with pytest.raises(Exception, match=r"pickle.*lambda|lambda.*pickle"):
            child.run("z3", lambda: 1, deadline=soon())

        def local() -> None: ...

        local.__module__ = "__main__"
        with pytest.raises(ValueError, match="local: must be importable by name, not part of __main__"):
            child.run("z3", local, deadline=soon())
        assert child.run("z3", operator.add, 2, 3, deadline=soon()) == 5


def test_killed_at_the_deadline(child: SolverProcess, tmp_path: Path) -> None:
    started = tmp_path / "pid"
    child.run("z3", operator.add, 2, 3, deadline=soon())  # it is up
    with pytest.raises(TimedOutError, match=r"z3 did not end within the deadline of 0\.5 s"):
        child.run("z3", fake_searches.sleep_forever, started, deadline=Deadline.after(0.5))
    assert is_gone(number_in(started))
    assert child.run("z3", operator.add, 2, 3, deadline=soon()) == 5


def test_a_deadline_that_has_passed(child: SolverProcess) -> None:
    with pytest.raises(TimedOutError):
        child.run("z3", time.sleep, 100, deadline=Deadline.after(0))


@pytest.mark.parametrize(
    "task, words",
    [
        ((fake_searches.allocate, 2 << 30), "needs more than its memory limit of 1 GiB"),
        ((fake_searches.fail, "z3: out of memory"), "needs more than its memory limit of 1 GiB"),
        (
            (fake_searches.abort, "terminate called after 'std::bad_alloc'"),
            "needs more than its memory limit",
        ),
        ((fake_searches.abort, "terminate called"), "its process was ended by SIGABRT"),
        (
            (fake_searches.end_by, signal.SIGKILL),
            "its process was ended by SIGKILL, perhaps because the system",
        ),
        ((fake_searches.end_by, signal.SIGSEGV), "its process was ended by SIGSEGV"),
        ((os._exit, 3), "its process ended with status 3: without a word"),
    ],
)
def test_what_takes_its_process_with_it(
    child: SolverProcess, task: tuple[Callable[..., object], *tuple[object, ...]], words: str
) -> None:
    with pytest.raises(WorkerDiedError, match=f"^HiGHS: {words}") as caught:
        child.run("HiGHS", *task, deadline=soon())
    assert "\n" not in str(caught.value)
    assert child.run("z3", operator.add, 2, 3, deadline=soon()) == 5


def test_memory_within_the_limit(child: SolverProcess) -> None:
    assert child.run("z3", fake_searches.allocate, 1 << 29, deadline=soon()) == 1 << 29
    with SolverProcess(memory_bytes=None) as unlimited:
        assert unlimited.run("z3", fake_searches.allocate, 1 << 24, deadline=soon()) == 1 << 24


def test_an_idle_child_that_was_killed_is_replaced() -> None:
    with SolverProcess() as child:
        first = child.run("z3", os.getpid, deadline=soon())
        assert child.run("z3", os.getpid, deadline=soon()) == first
        os.kill(first, signal.SIGKILL)
        until(lambda: is_gone(first))
        assert child.run("z3", os.getpid, deadline=soon()) != first


def test_several_at_once(tmp_path: Path) -> None:
    slow, fast = Worker(), Worker(modules=("fractions",))
    slow.start("slow", fake_searches.sleep_forever, tmp_path / "pid")
    fast.start("fast", eval, "'fractions' in __import__('sys').modules")
    assert wait([slow, fast], soon()) == [fast]
    assert fast.result() is True
    assert wait([slow], Deadline.after(0.05)) == []
    for worker in (slow, fast):
        worker.kill()
        assert is_gone(worker.pid)


def test_a_child_is_started_early_and_once() -> None:
    with SolverProcess() as child:
        assert [child.start(), child.start()] == [1, 1]
        pid = child.run("z3", os.getpid, deadline=soon())
        assert child.start() == 1
        child.close()
        assert is_gone(pid) and child.start() == 2
        pid = child.run("z3", os.getpid, deadline=soon())
    assert is_gone(pid)


def test_a_child_starts_light() -> None:
    with SolverProcess() as child:
        modules = child.run("z3", eval, "list(__import__('sys').modules)", deadline=soon())
    heavy = {
        "numpy",
        "numba",
        "z3",
        "highspy",
        "pysat",
        "networkx",
        "pydantic",
        "torch",
        "asyncio",
    }
    assert not heavy & set(modules)


def test_ctrl_c_is_for_the_parent(tmp_path: Path) -> None:
    worker = Worker()
    worker.start("z3", fake_searches.sleep_until, tmp_path / "go")
    until(lambda: signal.SIGINT in ignored_by(worker))
    os.kill(worker.pid, signal.SIGINT)
    (tmp_path / "go").touch()
    wait([worker], soon())
    assert worker.result() is None
    worker.kill()


def ignored_by(worker: Worker) -> set[int]:
    if sys.platform != "linux":
        pytest.skip("needs /proc")
    lines = Path(f"/proc/{worker.pid}/status").read_text().splitlines()
    mask = int(next(line.split()[1] for line in lines if line.startswith("SigIgn")), 16)
    return {number + 1 for number in range(64) if mask >> number & 1}


PARENT = """
import signal
import sys
from pathlib import Path
{setup}
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for what runs in the background
from tests.support import fake_searches
from tests.support.forked_solvers import started_anew
from tests.support.waiting import until
from arborcast.synth.chunks.solvers.solver_child import SolverProcess
from arborcast.synth.deadline import Deadline

with SolverProcess() as child, SolverProcess() as idle:
    idle.start()
    Path(sys.argv[1], "idle").write_text(str(idle._worker.pid))
    child.run("z3", fake_searches.{task}, Path(sys.argv[1], "busy"), deadline=Deadline())
"""


def parent(folder: Path, task: str, setup: str = "", cwd: Path | None = None) -> subprocess.Popen[bytes]:
    """A process of two children, one of which is busy; without a guard for `__main__`, as users write."""
    path = "" if setup else os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    script = folder / "script.py"
    script.write_text(PARENT.format(task=task, setup=setup))
    return subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        cwd=cwd,
    )


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a child that holds the lock of Python ends later"
)
@pytest.mark.parametrize("task", ["sleep_forever", "hold_the_lock"])
def test_no_child_survives_its_parent(tmp_path: Path, task: str) -> None:
    started = parent(tmp_path, task)
    pids = [number_in(tmp_path / "busy"), number_in(tmp_path / "idle")]
    started.kill()
    started.communicate()
    until(lambda: all(map(is_gone, pids)))


def test_ctrl_c_ends_the_children(tmp_path: Path) -> None:
    started = parent(tmp_path, "sleep_forever")
    pids = [number_in(tmp_path / "busy"), number_in(tmp_path / "idle")]
    started.send_signal(signal.SIGINT)
    _, complaints = started.communicate()
    assert started.returncode == -signal.SIGINT
    assert complaints.rstrip().endswith(b"KeyboardInterrupt"), complaints
    assert all(map(is_gone, pids))


def test_children_find_what_the_parent_can_import(tmp_path: Path) -> None:
    """Although it is on the parent's own path only, and the current folder holds a trap."""
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "pickle.py").write_text("raise SystemExit('imported from the current folder')")
    entries = [entry for entry in sys.path if entry and "python" not in Path(entry).name]
    setup = f"sys.path[1:1] = {entries}"
    started = parent(tmp_path, "write_pid", setup, cwd=trap)
    _, complaints = started.communicate()
    assert started.returncode == 0, complaints
    assert number_in(tmp_path / "busy") not in {started.pid, number_in(tmp_path / "idle")}
