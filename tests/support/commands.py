"""`synth` as several ranks of one job, in processes that need not import everything anew.

What happens when a process ends is not seen here: a test of that starts real ones.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import dataclass

from arborcast.synth.cli import app as cli
from tests.support.ranks import rendezvous, run_ranks

RANKS_IMPORT = (
    "arborcast.backends.measure.sweep",
    "arborcast.backends.probe.measuring",
    "arborcast.backends.probe.report",
)


@dataclass(frozen=True)
class Said:
    """Exit status and both outputs of one rank."""

    status: int
    out: str
    err: str


def run_job(size: int, *words: str) -> list[Said]:
    """The ranks of a command, with the variables that torchrun sets."""
    with rendezvous(size) as told:
        return run_ranks(size, _as_rank, words, backend=None, environ=told)


def _as_rank(rank: int, size: int, words: tuple[str, ...]) -> Said:
    os.environ["RANK"] = str(rank)
    sys.argv = ["synth", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            return Said(int(end.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError("the command has no status")
