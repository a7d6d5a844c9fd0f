"""How the command speaks: results as tables or one JSON object, errors as one line, progress on terminals.

Standard output carries the answer and nothing else; progress and errors go to standard error.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]

log = logging.getLogger(__name__)

_PACKAGE = "arborcast"
_TOLD_EVERY_S = 5.0
"""Seconds between two lines about the same part of the work."""


def print_json(document: Json) -> None:
    """One JSON object on standard output."""
    sys.stdout.write(json.dumps(document) + "\n")


def print_lines(lines: Iterable[str]) -> None:
    """Plain lines on standard output."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def answer(as_json: bool, document: Json, lines: Callable[[], Iterable[str]]) -> None:
    """What a command found: the document with `--json`, otherwise the lines, which are made only then."""
    if as_json:
        print_json(document)
    else:
        print_lines(lines())


def fail(message: str) -> None:
    """The one line on standard error that goes with a non-zero exit status."""
    sys.stderr.write(f"synth: {' '.join(message.split())}\n")


def table(header: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> list[str]:
    """Aligned columns; the first `left` columns to the left, the others to the right."""
    cells = [[str(cell) for cell in header], *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


Columns: TypeAlias = Mapping[str, Callable[[Any], object]]
"""The columns of a table: the head of each, and what it says of a row's thing."""


def table_of(things: Iterable[object], columns: Columns, left: int = 1) -> list[str]:
    """A table with a row for each of some things."""
    return table(tuple(columns), ([say(each) for say in columns.values()] for each in things), left)


@contextmanager
def progress(what: str, *, quiet: bool) -> Iterator[None]:
    """A bar with the seconds passed while something long runs; nothing unless on a terminal.

    With `--verbose` lines instead, wherever they go; with `--quiet` nothing.
    """
    if log.isEnabledFor(logging.INFO):
        from arborcast.synth.progress import listening

        log.info("%s", what)
        with listening(_Teller(what)):
            yield
        return
    if quiet or not log.isEnabledFor(logging.WARNING) or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from arborcast.synth.progress import listening

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def show(part: str, done: int, total: int) -> None:
            bar.update(task, description=f"{what}: {part}", completed=done, total=total)

        with listening(show):
            yield


class _Teller:
    """Logs how far work has come: what is new at once, how much of it is done from time to time."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._part = ""
        self._last = time.monotonic()

    def __call__(self, part: str, done: int, total: int) -> None:
        now = time.monotonic()
        if part == self._part and now - self._last < _TOLD_EVERY_S:
            return
        self._part, self._last = part, now
        log.info("%s: %s%s", self._what, part, f", {done} of {total}" if total else "")


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds passed, to the millisecond."""
        return round(time.perf_counter() - self._start, 3)


def show_warnings() -> None:
    """Let what the library logs reach standard error, one line each: warnings, with `--verbose` more."""
    logging.addLevelName(logging.WARNING, "warning: ")
    logging.addLevelName(logging.INFO, "")
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="synth: %(levelname)s%(message)s")


@contextmanager
def speaking(*, verbose: bool, quiet: bool) -> Iterator[None]:
    """Let our package log more, or errors alone, while a command runs."""
    if not verbose and not quiet:
        yield
        return
    logger = logging.getLogger(_PACKAGE)
    before = logger.level
    logger.setLevel(logging.INFO if verbose else logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
