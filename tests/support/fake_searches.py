"""Searches whose answers and times are written in their names.

`found_2` finds something in its third slice (counted from 0); `claimed_...` says without proof that there is
nothing. What it finds says its seed and the effort that it had.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

from arborcast.synth.chunks.problem.orbits import OrbitSend
from arborcast.synth.chunks.problem.outcome import Feasible, Infeasible, Instance, Outcome, Unknown
from arborcast.synth.chunks.solvers.portfolio import effort_of
from arborcast.synth.errors import Prover


class Scripted:
    def __init__(self, answer: str, at: int, seed: int) -> None:
        self.answer, self.at, self.seed = answer, at, seed

    def run(self, effort: int | None) -> Outcome:
        assert effort is not None
        index = next(index for index in count() if effort <= effort_of(index))
        if index < self.at:
            return Unknown()
        match self.answer:
            case "found":
                return Feasible((effort,), (OrbitSend(0, 0, 0, self.seed),))
            case "claimed":
                return Infeasible(Prover.HIGHS)
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "error":
                raise ArithmeticError("a bug of ours")
            case "never":
                time.sleep(1000)
        return Unknown()


def __getattr__(name: str) -> Callable[..., Scripted]:
    answer, _, at = name.partition("_")
    if answer not in {"found", "claimed", "segfault", "error", "never"}:
        raise AttributeError(name)

    def make(instance: Instance, seed: int = 0) -> Scripted:
        assert instance.steps <= instance.rounds
        return Scripted(answer, int(at), seed)

    return make


# Tasks for workers.


def sleep_forever(started: Path) -> None:
    started.write_text(str(os.getpid()))
    time.sleep(1000)


def end_by(number: int) -> None:
    os.kill(os.getpid(), number)


def allocate(size_bytes: int) -> int:
    return len(bytearray(size_bytes))


def fail(words: str) -> None:
    raise ArithmeticError(words)


def talk(words: str) -> str:
    sys.stdout.write(words)
    sys.stdout.flush()
    os.write(1, words.encode())
    return words


class UnpicklableError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}{second}")


def fail_strangely(words: str) -> None:
    raise UnpicklableError("Unpicklable: ", words)


def abort(words: str) -> None:
    os.write(2, words.encode())
    os.abort()


def write_pid(file: Path) -> None:
    file.write_text(str(os.getpid()))


def sleep_until(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def hold_the_lock(started: Path) -> None:
    """What a solver does that never lets Python's other threads run."""
    started.write_text(str(os.getpid()))
    sum(iter(int, 1))
