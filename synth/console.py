"""How the command speaks: results as tables or one JSON object, errors as one line, progress on terminals.

Standard output carries the answer and nothing else; progress and errors go to standard error.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]


def print_json(document: Json) -> None:
    """One JSON object on standard output."""
    sys.stdout.write(json.dumps(document) + "\n")


def print_lines(lines: Iterable[str]) -> None:
    """Plain lines on standard output."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


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


def gigabytes(rate: Fraction) -> str:
    """A rate for people: the exact fraction, with a decimal where it is not whole."""
    exact = f"{rate} GB/s"
    return exact if rate.denominator == 1 else f"{exact} ({float(rate):.4g})"


def share(part: Fraction, whole: Fraction) -> str:
    """A rate as a percentage of another, rounded down so that 100 % means equal."""
    if whole == 0:
        return "0 %"
    return f"{int(part / whole * 100_000) / 1000:g} %"


@contextmanager
def progress(what: str, *, quiet: bool) -> Iterator[None]:
    """A bar with the seconds passed while something long runs; nothing unless on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from synth.progress import listening

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def show(part: str, done: int, total: int) -> None:
            bar.update(task, description=f"{what}: {part}", completed=done, total=total)

        with listening(show):
            yield


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds passed, to the millisecond."""
        return round(time.perf_counter() - self._start, 3)


def show_warnings() -> None:
    """Let the library's warnings reach standard error, one line each."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="synth: warning: %(message)s")
