"""`synth` in this process (the fixture `command` of `tests/conftest.py`), or as several ranks of one job.

What happens when a process ends is not seen here: a test of that starts real ones.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from arborcast.synth.cli import app as cli
from arborcast.synth.cli import probe
from tests.support.ranks import rendezvous, run_ranks

RANKS_IMPORT = (
    "arborcast.backends.measure.sweep",
    "arborcast.backends.probe.measuring",
    "arborcast.backends.probe.report",
)


@dataclass(frozen=True)
class Said:
    """Exit status and both outputs of a command, or of one rank of it."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        lines = self.out.splitlines()
        assert len(lines) == 1, f"--json prints one object and nothing else, got {self.out!r}"
        return json.loads(lines[0])  # type: ignore[no-any-return]


Command: TypeAlias = Callable[..., Said]
"""Runs `synth` with some words."""


def refused(ran: Said, *facts: str, status: int = 2) -> None:
    """Nothing on standard output, one line on standard error that names the facts."""
    assert (ran.status, ran.out) == (status, "")
    assert ran.err.startswith("synth: ")
    assert ran.err.count("\n") == 1, ran.err
    for fact in facts:
        assert fact in ran.err, ran.err


def run_job(size: int, *words: str) -> list[Said]:
    """The ranks of a command, with the variables that torchrun sets."""
    return run_jobs(size, [words])[0]


def run_jobs(size: int, commands: Sequence[tuple[str, ...]]) -> list[list[Said]]:
    """The same of several commands, one after the other in the same processes."""
    with contextlib.ExitStack() as stack:
        jobs = [(stack.enter_context(rendezvous(size)), words) for words in commands]
        of_ranks = run_ranks(size, _as_ranks, jobs, backend=None)
    return [list(of_command) for of_command in zip(*of_ranks, strict=True)]


def _as_ranks(rank: int, size: int, jobs: Sequence[tuple[dict[str, str], tuple[str, ...]]]) -> list[Said]:
    os.environ["RANK"] = str(rank)
    found = []
    for told, words in jobs:
        os.environ |= told
        found.append(_said(words))
    return found


def _said(words: tuple[str, ...]) -> Said:
    probe._FOLLOWERS_WAIT_S = 0.0  # nobody ends the others here as soon as one has failed
    sys.argv = ["synth", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            return Said(int(end.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError("the command has no status")
