"""Which code and machine gave the figures of a results file, as `document` in `document.py` writes it down.

The file names the commit that it was measured at, whether files differed from that commit, the folders of
code that its figures depend on, and the command. `standing.py` says what that is worth today.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[2]
LOADS_AT_THE_START = os.getloadavg()
"""Processes that wanted to run before this one measured, over 1, 5 and 15 minutes."""

SYNTHESIS = ("synth", "topologies")
"""What bounds, schedules and simulations depend on."""

RUNTIME = (*SYNTHESIS, "backends")
"""What the process group depends on."""

TRAINING = (*RUNTIME, "pipeline")
"""What the trainer and its planner depend on."""


def provenance(folders: Sequence[str], home: Path = HOME) -> dict[str, Any]:
    """The entry `code` of a results file.

    Args:
        folders: of code that the figures depend on beside the bench's own, relative to `home`.
        home: the root of the checkout.

    Returns:
        `folders`, `commit` when this process began (None outside a git checkout) and `dirty`: whether
        files of these folders or of bench/ differ from it or are not in it, or another commit came meanwhile
        (None where there is none).
    """
    now = _git(home, "rev-parse", "HEAD")
    commit = AT_THE_START if home == HOME else now
    code = ("--", *folders, "bench", ":(exclude)bench/results")
    changed = None if now is None else _git(home, "status", "--porcelain", *code)
    return {
        "folders": list(folders),
        "commit": commit,
        "dirty": None if changed is None else bool(changed) or now != commit,
    }


def _git(home: Path, *arguments: str) -> str | None:
    """What git prints; None where there is no git, no checkout, or no such commit."""
    try:
        done = subprocess.run(
            ["git", "-C", str(home), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


AT_THE_START = _git(HOME, "rev-parse", "HEAD")
"""What the modules of this process were loaded from."""


def circumstances(*packages: str) -> dict[str, Any]:
    """The command line, the machine and the versions of some packages, for the head of a results file."""
    script, *arguments = sys.argv
    name = _name(script)
    by = ["python", f"bench/{name}"] if name.endswith(".py") and name != "__main__.py" else ["synth"]
    return {
        "command": shlex.join([*by, *map(_name, arguments)]),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "load_at_the_start": LOADS_AT_THE_START[0],
            "loads_at_the_start": list(LOADS_AT_THE_START),
            "load_at_the_end": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
    }


def _name(argument: str) -> str:
    """Where things lie on this machine says nothing about the figures."""
    return argument.rpartition("/")[2]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
