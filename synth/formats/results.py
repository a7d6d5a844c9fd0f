"""A results file: rows that say what was asked and what was found, and the circumstances of the measurement.

Which columns are keys (independent variables: no two rows have the same) and which are measures (and where
their spread stands) is in the document itself, so that whoever compares or shows two files needs to know
neither the question nor who measured. The file names the commit that it was measured at, whether files
differed from that commit, the folders of code that its figures depend on, command, machine and versions.

    {"question": "How fast is this schedule, measured as nccl-tests does?",
     "command": "synth bench run fast.json", "machine": {...}, "versions": {...}, "date": "2026-01-31",
     "code": {"folders": ["synth", "topologies"], "commit": "1f5f065...", "dirty": false},
     "keys": ["topology", "collective", "method", "bytes"],
     "measures": {"time_us": {"better": "less", "spread": "spread"}, "algbw": {"better": "more"}},
     "units": {"time_us": "of the slowest rank; median over the runs"},
     "rows": [{"topology": "full:4", ...}]}
"""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

HOME = Path(__file__).resolve().parents[2]
LOADS_AT_THE_START = os.getloadavg()
"""Processes that wanted to run before this one measured, over 1, 5 and 15 minutes."""

SYNTHESIS = ("synth", "topologies")
"""What bounds, schedules and simulations depend on."""

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Measure:
    """What a column of figures means to whoever compares two files.

    Attributes:
        better: "less" or "more".
        spread: the column with the spread of the same figure, in its unit: largest minus smallest of the
            runs, or a list of both; None where it is exact, as what is computed and not timed, or where it
            follows another one.
        follows: the measure that this one is worked out from and has its relative spread of, as algbw from
            time_us.
    """

    better: str
    spread: str | None = None
    follows: str | None = None


TIME = {
    "time_us": Measure("less", "spread"),
    "algbw": Measure("more", follows="time_us"),
    "busbw": Measure("more", follows="time_us"),
}
"""The measures of timed rows; a share of a limit is `Measure("more", follows="time_us")` as well."""


def document(
    question: str,
    rows: Iterable[Row],
    *,
    keys: Sequence[str],
    measures: Mapping[str, Measure],
    units: Mapping[str, str] | None = None,
    packages: Sequence[str] = ("arborcast", "numpy"),
    code: Sequence[str] = SYNTHESIS,
    **more: Any,
) -> dict[str, Any]:
    """A results file as a value, with the circumstances of this process.

    Args:
        question: that the rows answer, for the reader.
        rows: in the order in which they are to be read.
        keys: the columns that tell rows apart.
        measures: the columns of figures.
        units: what figures mean, where their name does not say it.
        packages: whose versions matter.
        code: the folders of code that the figures depend on, see `provenance`.
        more: further entries, such as the rates that links delivered.

    Raises:
        ValueError: a row lacks a key, or two rows have the same keys.
    """
    listed = [dict(row) for row in rows]
    seen = set()
    for row in listed:
        missing = [key for key in keys if key not in row]
        if missing:
            raise ValueError(f"row {row}: lacks {', '.join(missing)}")
        identity = tuple(row[key] for key in keys)
        if identity in seen:
            raise ValueError(f"two rows of {dict(zip(keys, identity, strict=True))}")
        seen.add(identity)
    return {
        "question": question,
        **circumstances(*packages),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "code": provenance(code),
        "keys": list(keys),
        "measures": {name: asdict(measure) for name, measure in measures.items()},
        "units": dict(units or {}),
        **more,
        "rows": listed,
    }


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
