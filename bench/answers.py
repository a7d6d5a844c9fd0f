"""What the processes of a bench answer through their pipes, each once: a failure, or a value."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any


def collect(
    pipes: Sequence[Connection], timeout_s: float, fail: Callable[[str, Any], BaseException]
) -> list[Any]:
    """The value of each rank; the first that fails ends the wait for the others.

    Args:
        pipes: by rank; each process sends (None, value), or (its failure in one line, more about it).
        timeout_s: for all of them together.
        fail: makes the error to raise of a line that names the rank and of what more the rank said, or None.
    """
    answers: dict[int, Any] = {}
    end = time.monotonic() + timeout_s
    while len(answers) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        ready = wait(waiting, max(0.0, end - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in answers]
            raise fail(f"ranks {missing} did not finish within {timeout_s:g} s", None)
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                failure, answers[rank] = pipe.recv()
            except (EOFError, ConnectionError):
                raise fail(f"rank {rank} ended without an answer", None) from None
            if failure:
                raise fail(f"rank {rank}: {failure}", answers[rank])
    return [answers[rank] for rank in range(len(pipes))]
