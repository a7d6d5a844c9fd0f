"""One test on forked ranks, within a deadline: a rank that hangs leaves the stacks of its threads.

Ranks are forked from a process that has imported torch and the tests, but has no thread yet and has made no
group: a test then takes what it computes, and not three times the import of torch.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("fork")
STACKS_S = 5.0
"""For so long a hanging rank may write its stacks."""

GRACE_S = 2.0
"""For so long the others may end by themselves when one rank has failed."""

PRINTED = 12000
"""So many letters are kept of what a rank printed last that ended without a word."""

Rank = Callable[[int, Connection], object]
"""What a rank does: it may send an error's text, and ends with an exit status, 0 by itself."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a test ended.

    Attributes:
        outcome: "passed", "failed", "hung", or "skipped".
        why: what the first rank that failed said, or the stacks of all that hung.
        seconds: from its start to its end.
    """

    outcome: str
    why: str
    seconds: float


def run_forked(size: int, rank: Rank, *, folder: Path, deadline_s: float, skips: frozenset[int]) -> Ending:
    """Run a test on `size` ranks.

    Args:
        size: number of ranks.
        rank: called with the rank and a pipe to this process.
        folder: for what ranks print, and for stacks; files of earlier tests are replaced.
        deadline_s: after which whoever is left is asked for its stacks and killed.
        skips: exit statuses that mean that the test does not apply.
    """
    start = time.monotonic()
    pipes, children = [], []
    for number in range(size):
        ours, theirs = FORKS.Pipe()
        child = FORKS.Process(target=_main, args=(rank, number, theirs, folder))
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    end, failed_at, stacks = start + deadline_s, None, ""
    while any(child.exitcode is None for child in children):
        now = time.monotonic()
        if failed_at is None and any(child.exitcode not in (None, 0, *skips) for child in children):
            failed_at = now
        if failed_at is not None and now > failed_at + GRACE_S:
            break
        if now > end:
            stacks = _stacks(
                [n for n, child in enumerate(children) if child.exitcode is None], children, folder
            )
            break
        time.sleep(0.02)
    for child in children:
        child.kill()
        child.join()
    seconds = time.monotonic() - start
    heard = [_heard(pipe) for pipe in pipes]
    for pipe in pipes:
        pipe.close()
    statuses = [child.exitcode for child in children]
    said = [
        f"rank {n}: {text or f'status {status}: {_printed(folder, n)}'}"
        for n, (status, text) in enumerate(zip(statuses, heard, strict=True))
        if text or status not in (0, -signal.SIGKILL, *skips)
    ]
    if stacks:
        return Ending("hung", "\n".join([*said, stacks]), seconds)
    if statuses[0] in skips:
        return Ending("skipped", _printed(folder, 0).rpartition("\n")[2], seconds)
    if failed_at is None and not any(statuses):
        return Ending("passed", "", seconds)
    return Ending("failed", "\n".join(said) or f"killed: {statuses}", seconds)


def _main(rank: Rank, number: int, pipe: Connection, folder: Path) -> None:
    printed = os.open(folder / f"rank{number}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    stacks = (folder / f"stacks{number}.txt").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=sys.__stderr__ or 2)
    rank(number, pipe)
    sys.exit(0)


def _stacks(numbers: list[int], children: list[Any], folder: Path) -> str:
    for number in numbers:
        os.kill(children[number].pid, signal.SIGUSR1)
    found = dict.fromkeys(numbers, "")
    end = time.monotonic() + STACKS_S
    while time.monotonic() < end and not all(found.values()):
        time.sleep(0.1)
        found = {number: (folder / f"stacks{number}.txt").read_text() for number in numbers}
    return "\n".join(f"rank {number} hangs:\n{text}" for number, text in found.items())


def _heard(pipe: Connection) -> str:
    try:
        return str(pipe.recv()) if pipe.poll() else ""
    except (EOFError, ConnectionError):
        return ""


def _printed(folder: Path, number: int) -> str:
    return (folder / f"rank{number}.txt").read_text(errors="replace").strip()[-PRINTED:]
