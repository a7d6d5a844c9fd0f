"""What each folder of tests costs, in processor seconds, and whether that is within its budget.

`make durations` measures: pytest runs folders by `--measure`, in one process, and writes what their cases,
ranks and solvers took into `durations.json`. `test_durations.py` judges whenever whole folders
are collected: the cases that were counted times what a case of the same function took then. No clock decides,
so a busy machine changes nothing. A figure says nothing about a folder in which a fifth of the cases is
another one: then it must be measured anew.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("durations.json")
LISTED_S = 0.1
"""Functions whose cases take less each are counted together."""
REST = "all others"
CHANGED = 1 / 5
"""The share of a folder's cases that may come or go until it is measured anew."""

Counts = Mapping[str, int]
COUNTS = pytest.StashKey[dict[str, Counter[str]]]()
"""Cases that `make test` would run, by folder and function, before `-k` leaves any out."""


@dataclass(frozen=True)
class Measured:
    """What a folder took when it was measured.

    Attributes:
        budget_s: processor seconds that its cases may take.
        functions: cases and their seconds by "file::function", the short ones together as `REST`.
    """

    budget_s: float
    functions: Mapping[str, tuple[int, float]]

    @classmethod
    def of(cls, budget_s: float, counts: Counts, seconds: Mapping[str, float]) -> Measured:
        """From the cases of each function and what they took together."""
        slow = sorted(name for name in counts if seconds[name] >= LISTED_S * counts[name])
        listed = {name: (counts[name], round(seconds[name], 2)) for name in slow}
        rest = [name for name in counts if name not in listed]
        rest_s = round(sum(seconds[name] for name in rest), 2)
        return cls(budget_s, {**listed, REST: (sum(counts[name] for name in rest), rest_s)})

    def grouped(self, counts: Counts) -> Counter[str]:
        """Counted cases by the names that were measured."""
        found = Counter[str]()
        for name, count in counts.items():
            found[name if name in self.functions else REST] += count
        return found

    def seconds(self, counts: Counts) -> float:
        """What so many cases take, at what each took then."""
        each = {name: seconds / max(cases, 1) for name, (cases, seconds) in self.functions.items()}
        return sum(count * each[name] for name, count in self.grouped(counts).items())

    def changed(self, counts: Counts) -> float:
        """How many cases came or went, as a share of those that were measured."""
        now = self.grouped(counts)
        moved = sum(abs(now[name] - cases) for name, (cases, _) in self.functions.items())
        return moved / max(sum(cases for cases, _ in self.functions.values()), 1)


def objection(folder: str, measured: Measured | None, counts: Counts) -> str:
    """Why the folder cannot stay as it is, in one line; empty if it can."""
    anew = f'run `make durations FOLDERS="{folder}"`'
    if measured is None:
        return f"tests/{folder} was never measured: {anew}"
    if (changed := measured.changed(counts)) > CHANGED:
        return f"tests/{folder}: {changed:.0%} of its cases are others than were measured: {anew}"
    if (seconds := measured.seconds(counts)) > measured.budget_s:
        slow = sorted(measured.functions, key=lambda name: -measured.functions[name][1])
        slowest = ", ".join(f"{name} {measured.functions[name][1]:.1f} s" for name in slow[:3])
        return (
            f"tests/{folder}: {sum(counts.values())} cases take {seconds:.0f} processor seconds, "
            f"its budget in durations.json is {measured.budget_s:.0f}; most take {slowest}"
        )
    return ""


def read(file: Path = FILE) -> dict[str, Measured]:
    """What each folder took."""
    document = json.loads(file.read_text()) if file.exists() else {}
    return {
        folder: Measured(entry["budget_s"], {name: tuple(it) for name, it in entry["functions"].items()})
        for folder, entry in document.items()
    }


def write(folders: Mapping[str, Measured], file: Path = FILE) -> None:
    """One line a function, so that a diff shows which became slower."""
    blocks = []
    for folder, it in sorted(folders.items()):
        lines = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(pair)}" for name, pair in it.functions.items())
        blocks.append(
            f'{json.dumps(folder)}: {{"budget_s": {it.budget_s:g}, "functions": {{\n  {lines}\n}}}}'
        )
    file.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def processor_seconds(pid: int | None = None) -> float:
    """Used so far by a process, its children that ended, and all that live below it (this one by default)."""
    parents, used = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(stat.parent.name)] = int(fields[1])
        used[int(stat.parent.name)] = sum(map(int, fields[11:15]))
    below = {pid or os.getpid()}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return sum(used.get(it, 0) for it in below) / os.sysconf("SC_CLK_TCK")


def place(item: pytest.Item) -> tuple[str, str] | None:
    """Folder and "file::function" of a case; None for what `make test` leaves out or lies in no folder."""
    parts = item.nodeid.partition("[")[0].split("/")
    if item.get_closest_marker("long") is not None or len(parts) < 3 or parts[0] != "tests":
        return None
    return parts[1], "/".join(parts[2:])
