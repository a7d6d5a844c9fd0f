"""How a section's figures came about: the machine, the versions, the command, the day, the load, the runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arborcast.bench.page.results import Document, figure, figures, median, number
from arborcast.bench.page.words import digits, percent, plural
from arborcast.bench.provenance import doubts

QUIET = 0.5
"""Processes that want to run, up to which a machine has nothing else to do."""


def circumstances_of(document: Document) -> tuple[str, list[tuple[str, str]]]:
    """One line that says the most, and all entries by name."""
    machine = _mapping(document.get("machine"))
    short = [
        f"bench/results/{document.name}.json",
        str(document.get("date") or ""),
        ", ".join(filter(None, (str(machine.get("processor") or ""), _cores(machine)))),
        _runs(document),
        _busy(machine),
        doubts(document.content),
    ]
    versions = ", ".join(f"{name} {value}" for name, value in _mapping(document.get("versions")).items())
    entries = [
        ("question", str(document.get("question") or "")),
        ("command", str(document.get("command") or "")),
        ("date", str(document.get("date") or "not noted")),
        ("code", _code(_mapping(document.get("code")))),
        ("machine", ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine.items())),
        ("versions", versions),
        ("runs", _runs(document)),
        ("spread", _spread(document)),
        *((name, str(value)) for name, value in _mapping(document.get("units")).items()),
    ]
    return " · ".join(filter(None, short)), [(name, value) for name, value in entries if value]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _code(code: Mapping[str, Any]) -> str:
    """The commit, and what of it matters."""
    if not code.get("commit"):
        return "not noted"
    changed = " with uncommitted changes" if code.get("dirty") else ""
    return f"commit {code['commit']}{changed}; depends on {', '.join(map(str, code.get('folders') or []))}"


def _cores(machine: Mapping[str, Any]) -> str:
    cores = number(machine.get("cores"))
    return "" if cores is None else plural(int(cores), "core")


def _busy(machine: Mapping[str, Any]) -> str:
    """The load, where other work than the bench's may have made times longer.

    Before the bench began nothing should run. Files that do not say that load are judged by that at the end:
    no more than the machine has cores.
    """
    before, after = number(machine.get("load_at_the_start")), number(machine.get("load_at_the_end"))
    cores = number(machine.get("cores"))
    if before is not None:
        return f"the machine was busy: load {digits(before, 2)} at the start" if before > QUIET else ""
    if after is None or cores is None or after <= cores:
        return ""
    return f"the machine was busy: load {digits(after, 2)}"


def _runs(document: Document) -> str:
    runs = sorted({int(count) for count in figures(document.rows, "runs")})
    if not runs or runs == [1]:
        return ""
    return f"medians of {runs[0]} runs" if len(runs) == 1 else f"medians of {runs[0]} to {runs[-1]} runs"


def _spread(document: Document) -> str:
    """Largest minus smallest as a share of the median time, of the row in the middle and of the worst."""
    shares = [
        spread / time
        for row in document.rows
        if (spread := figure(row, "spread")) is not None and (time := figure(row, "time_us"))
    ]
    if not any(shares):
        return ""
    middle, most = percent(median(shares)), percent(max(shares))
    return f"largest minus smallest: {middle} of the time in the median row, at most {most}"
