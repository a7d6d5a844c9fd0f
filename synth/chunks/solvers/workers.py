"""Several child processes for solvers: kept for the next task, replaced when they die, gone at the end.

Whoever asks one question after the other (the portfolio, the frontier) holds a `Workers` for all of them, so
that Python and the solvers start once. What a single child guarantees stands in
`synth.chunks.solvers.worker`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar, cast

from arborcast.synth.chunks.solvers.worker import MEMORY_BYTES, Worker, WorkerDiedError, wait
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import TimedOutError

__all__ = ["MEMORY_BYTES", "Worker", "WorkerDiedError", "Workers", "wait"]

Result = TypeVar("Result")

_MOST_AT_ONCE = 4  # a race rarely has more entrants that are worth a start-up


class Workers:
    """The children of one question, all belonging to one thread.

        with Workers() as workers:
            value = workers.run("z3", function, argument, deadline=Deadline.after(10))

    Attributes:
        count: how many are to work at once.
    """

    def __init__(self, count: int | None = None, *, memory_bytes: int | None = MEMORY_BYTES) -> None:
        """No process is started yet.

        Args:
            count: how many are to work at once; None for as many as there are cores, at most 4.
            memory_bytes: limit of the address space of each; None for none.
        """
        self.count = count or min(_usable_cores(), _MOST_AT_ONCE)
        self._memory_bytes = memory_bytes
        self._idle: list[Worker] = []
        self._taken: list[Worker] = []

    def __enter__(self) -> Self:
        """The workers."""
        return self

    def __exit__(self, *_: object) -> None:
        """End every child."""
        self.close()

    def warm(self, *modules: str) -> None:
        """Start the children now, so that they are up, with these modules imported, when they are needed."""
        while len(self._idle) + len(self._taken) < self.count:
            self._idle.append(Worker(memory_bytes=self._memory_bytes, modules=modules))

    def take(self, solver: str = "") -> Worker:
        """An idle worker, a new one where there is none; preferably one that has this solver loaded."""
        for dead in [worker for worker in self._idle if not worker.is_alive]:
            dead.kill()
            self._idle.remove(dead)
        if self._idle:
            worker = next((idle for idle in self._idle if idle.solver == solver), self._idle[0])
            self._idle.remove(worker)
        else:
            worker = Worker(memory_bytes=self._memory_bytes)
        self._taken.append(worker)
        return worker

    def give_back(self, worker: Worker) -> None:
        """Keep a worker for the next task; it is ended if it is at work or there are enough."""
        self._taken.remove(worker)
        if worker.is_alive and not worker.is_busy and len(self._idle) < self.count:
            self._idle.append(worker)
        else:
            worker.kill()

    @contextlib.contextmanager
    def taking(self, solver: str = "") -> Iterator[Worker]:
        """A worker for the length of a block (see `take` and `give_back`)."""
        worker = self.take(solver)
        try:
            yield worker
        finally:
            self.give_back(worker)

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

        Args:
            solver: what messages name.
            function: importable by its name.
            args: of the function; pickled, as the result is.
            deadline: when the child is killed.
            kwargs: of the function.

        Raises:
            TimedOutError: the deadline passed first.
            WorkerDiedError: the process of the task ended, or ran out of memory.
            Exception: whatever the task raised.
        """
        with self.taking(solver) as worker:
            worker.start(solver, function, *args, **kwargs)
            if not wait([worker], deadline):
                raise TimedOutError(f"{solver} did not end within {deadline.allowed_s} s")
            return cast(Result, worker.result())

    def close(self) -> None:
        """End every child."""
        for worker in (*self._idle, *self._taken):
            worker.kill()
        self._idle.clear()
        self._taken.clear()


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
