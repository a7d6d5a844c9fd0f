"""How a section's figures came about: the machine, the versions, the command, the day, the load, the runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.page.results import Document, figure, figures, median, number
from bench.page.words import digits, percent, plural


def circumstances_of(document: Document) -> tuple[str, list[tuple[str, str]]]:
    """One line that says the most, and all entries by name."""
    machine = _mapping(document.get("machine"))
    short = [
        f"bench/results/{document.name}.json",
        str(document.get("date") or ""),
        ", ".join(filter(None, (str(machine.get("processor") or ""), _cores(machine)))),
        _runs(document),
        _busy(machine),
    ]
    versions = ", ".join(f"{name} {value}" for name, value in _mapping(document.get("versions")).items())
    entries = [
        ("question", str(document.get("question") or "")),
        ("command", str(document.get("command") or "")),
        ("date", str(document.get("date") or "not noted")),
        ("machine", ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine.items())),
        ("versions", versions),
        ("runs", _runs(document)),
        ("spread", _spread(document)),
        *((name, str(value)) for name, value in _mapping(document.get("units")).items()),
    ]
    return " · ".join(filter(None, short)), [(name, value) for name, value in entries if value]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _cores(machine: Mapping[str, Any]) -> str:
    cores = number(machine.get("cores"))
    return "" if cores is None else plural(int(cores), "core")


def _busy(machine: Mapping[str, Any]) -> str:
    """The load where the machine had more to do than it has cores, which makes times longer."""
    load, cores = number(machine.get("load_at_the_end")), number(machine.get("cores"))
    if load is None or cores is None or load <= cores:
        return ""
    return f"the machine was busy: load {digits(load, 2)}"


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
