"""A child process that runs solvers: with a memory limit, ended at any moment, and never outliving us.

Solvers do not stop when they are asked to, and some take the whole process with them when they fail. So
nobody waits for what a child works out but `wait`, which has a deadline and looks after several at once.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar, cast

from arborcast.synth.deadline import Deadline

Parameters = ParamSpec("Parameters")

_LAST_WORDS_BYTES = 1 << 20

MEMORY_BYTES = 4 << 30
"""Address space of a child unless said otherwise."""


class WorkerDiedError(RuntimeError):
    """A solver took its process with it, or needed more memory than it was allowed; one line says which."""


class Worker:
    """A child process that does one task at a time. It belongs to the thread that made it.

    Attributes:
        solver: what it works on or last worked on, as messages name it.
        is_busy: whether it has a task whose result was not taken.
        connection: over which tasks go and results come.
    """

    def __init__(self, *, memory_bytes: int | None = MEMORY_BYTES, modules: Sequence[str] = ()) -> None:
        """Start the process; it takes a task at once, and does it when it is up.

        Args:
            memory_bytes: limit of its address space; None for none.
            modules: to import before the first task comes.
        """
        self.solver = ""
        self.is_busy = False
        self._memory_bytes = memory_bytes
        self._has_ended = False
        self.connection, theirs = connection.Pipe()
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `kill`)
        self._process = subprocess.Popen(
            # -P: no module of the folder we happen to be in may take the place of one of ours.
            [
                sys.executable,
                "-P",
                "-m",
                "arborcast.synth.chunks.solvers.solver_process",
                *map(str, (theirs.fileno(), memory_bytes or 0, os.getpid())),
                *modules,
            ],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._complaints,  # solvers may write to it
            stderr=self._complaints,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C comes to us alone
        )
        theirs.close()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can take a task."""
        return not self._has_ended and self._process.poll() is None

    @property
    def is_done(self) -> bool:
        """Whether `result` will not wait."""
        return self._has_ended or self.connection.poll()

    def start(
        self,
        solver: str,
        function: Callable[Parameters, object],
        /,
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> None:
        """Hand it a task; `wait` says when it is done and `result` what came out.

        The solver is what messages name; the function must be importable by its name, and what it takes and
        returns is pickled.

        Raises:
            ValueError: the function belongs to `__main__`, which a child cannot import.
        """
        assert not self.is_busy, "one task at a time"
        if function.__module__ == "__main__":
            raise ValueError(f"{function.__qualname__}: must be importable by name, not part of __main__")
        task = pickle.dumps((function, args, kwargs))
        self.solver = solver
        self.is_busy = True
        with contextlib.suppress(ConnectionError):  # what it was is seen when the result is asked for
            self.connection.send_bytes(task)  # a thread of the child takes it in at any time

    def result(self) -> Any:
        """What the task returned, once `is_done`.

        Raises:
            WorkerDiedError: the process ended, or ran out of memory.
            Exception: whatever the task raised, with the traceback in the child as a note.
        """
        assert self.is_busy, "there is a task"
        self.is_busy = False
        assert self.is_done, "the task is done"
        try:
            # What the child wrote is as trustworthy as the child, which runs our own code.
            kind, content = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            reason = self._reason()
            self.kill()
            raise WorkerDiedError(f"{self.solver}: {reason}") from None
        match kind:
            case "result":
                return content
            case "error":
                raise content
            case _:
                self.kill()
                raise WorkerDiedError(f"{self.solver}: {self._out_of_memory}")

    def kill(self) -> None:
        """End the process, whatever it does, with all that it has forked, and wait until it is gone."""
        self._has_ended = True
        self.is_busy = False
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()
        self._complaints.close()

    @property
    def _out_of_memory(self) -> str:
        if self._memory_bytes is None:
            return "ran out of memory"
        return f"needs more than its memory limit of {self._memory_bytes / (1 << 30):.3g} GiB"

    def _reason(self) -> str:
        """Why the process ended without a reply."""
        status = self._process.wait()
        size = self._complaints.seek(0, os.SEEK_END)
        self._complaints.seek(max(size - _LAST_WORDS_BYTES, 0))
        complaint = self._complaints.read().decode(errors="replace")
        if "bad_alloc" in complaint or "MemoryError" in complaint:
            return self._out_of_memory
        if status == -signal.SIGKILL:  # not by us: then nobody asks
            return "its process was ended by SIGKILL, perhaps because the system ran out of memory"
        if status < 0:
            return f"its process was ended by {_name_of_signal(-status)}"
        lines = complaint.strip().splitlines()
        return f"its process ended with status {status}: {lines[-1] if lines else 'without a word'}"


_answers: list[Iterator[Any]] = []
"""In a child: where its question stands between two answers."""


def next_answer(question: Callable[..., Iterator[Any]] | None = None, *args: Any) -> Any:
    """In a child: the next thing that a question gives, None after the last; with a question, the first."""
    if question is not None:
        _answers[:] = [question(*args)]
    return next(_answers[0], None)


def wait(workers: Collection[Worker], deadline: Deadline) -> list[Worker]:
    """Those of some busy workers that are done, as soon as one is; none where the deadline passes first."""
    connection.wait([worker.connection for worker in workers], deadline.left_s)
    return [worker for worker in workers if worker.is_done]


def _environment() -> dict[str, str]:
    """Our own, in which a child finds whatever we can import and goes the same way every time."""
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **one_thread, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}


def _name_of_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


Result = TypeVar("Result")


class SolverProcess:
    """The one child of a question, started when it is first needed and anew after it died.

        with SolverProcess() as child:
            value = child.run("z3", function, argument, deadline=Deadline.after(10))

    It belongs to the thread that made it.
    """

    def __init__(self, *, memory_bytes: int | None = MEMORY_BYTES) -> None:
        """No process is started yet; `memory_bytes` limits its address space, None does not."""
        self._memory_bytes = memory_bytes
        self._worker: Worker | None = None
        self._starts = 0

    def __enter__(self) -> Self:
        """The child."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self.close()

    def start(self) -> int:
        """See that a process is there, or coming up.

        Returns:
            A number of that process; another one remembers nothing of what it did.
        """
        if self._worker is not None and not self._worker.is_alive:
            self.close()
        if self._worker is None:
            self._worker = Worker(memory_bytes=self._memory_bytes)
            self._starts += 1
        return self._starts

    def run(
        self,
        solver: str,
        function: Callable[..., Result],
        /,
        *args: Any,
        deadline: Deadline,
        **kwargs: Any,
    ) -> Result:
        """The result of one task.

        See `Worker.start`; the child is killed at the deadline.

        Raises:
            TimedOutError: the deadline passed first.
            WorkerDiedError: the process ended, or ran out of memory.
            Exception: whatever the task raised.
        """
        self.start()
        assert self._worker is not None, "it was just started"
        try:
            self._worker.start(solver, function, *args, **kwargs)
            if not wait([self._worker], deadline):
                raise deadline.missed_by(solver)
            return cast(Result, self._worker.result())
        finally:
            if self._worker.is_busy:
                self.close()

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None
