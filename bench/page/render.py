"""Results as Markdown: how they came about, tables, sentences, put between the markers of a file."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from arborcast.bench.page.results import Document, known, middle, most, number
from arborcast.bench.page.tables import Table
from arborcast.bench.page.words import count, percent, plural, two_digits
from arborcast.synth.errors import InputError

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

QUIET = 0.5
"""Processes that want to run, up to which a machine has nothing else to do."""


# ------------------------------------------------------------------------------------------- circumstances


def circumstances(document: Document) -> str:
    """How figures came about, and what speaks against them."""
    machine = document.entry("machine")
    cores = number(machine.get("cores"))
    on = [str(machine.get("processor") or ""), plural(cores, "core") if cores > 0 else ""]
    said = (
        ", ".join(filter(None, on)),
        _runs(document),
        _spread(document),
        _busy(machine),
        words_of(document),
    )
    return "; ".join(filter(None, said))


def words_of(document: Document) -> str:
    """What speaks against figures that are shown, in the words that stand beside them."""
    if document.standing.changed:
        return "code changed since"
    return "" if document.standing.known else "history unknown here"


def _busy(machine: Mapping[str, Any]) -> str:
    """The load, where other work than the bench's may have made times longer.

    Before the bench began nothing should run. Files that do not say that load are judged by that at the end:
    no more than the machine has cores.
    """
    before, after = number(machine.get("load_at_the_start")), number(machine.get("load_at_the_end"))
    if before >= 0:
        return f"the machine was busy: load {two_digits(before)} at the start" if before > QUIET else ""
    return f"the machine was busy: load {two_digits(after)}" if after > number(machine.get("cores")) else ""


def _runs(document: Document) -> str:
    runs = known(row.figure("runs") for row in document.rows)
    if not runs or max(runs) <= 1:
        return ""
    return f"medians of {count(min(runs))}{f' to {count(max(runs))}' if max(runs) > min(runs) else ''} runs"


def _spread(document: Document) -> str:
    """Largest minus smallest as a share of the median time, of the row in the middle and of the worst."""
    timed = [row for row in document.rows if row.figure("time_us") > 0]
    shares = known(row.figure("spread") / row.figure("time_us") for row in timed)
    if not any(shares):
        return ""
    middle_row, worst = percent(middle(shares)), percent(most(shares))
    return f"largest minus smallest: {middle_row} of the time in the median row, at most {worst}"


# ------------------------------------------------------------------------------------------------ Markdown


def table_markdown(table: Table) -> str:
    """A table; columns of figures are set to the right."""
    rules = ["---:" if name.startswith(">") else "---" for name in table.head]
    names = (escape_markdown(name.removeprefix(">")) for name in table.head)
    rows = (map(escape_markdown, row) for row in table.rows)
    return "\n".join(map(_line, (names, rules, *rows)))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def escape_markdown(words: str) -> str:
    """Text that Markdown neither reads as its own nor as HTML; code between backquotes stays code."""
    on_one_line = " ".join(words.split("\n"))
    escaped = re.sub(r"([\\*_\[\]|])", r"\\\1", on_one_line)
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def prose_markdown(words: str) -> str:
    """A sentence with its figures in bold, of which what stands between backquotes stays code."""
    pieces = enumerate(words.split("`"))
    escaped = (f"`{html.escape(piece)}`" if odd % 2 else escape_markdown(piece) for odd, piece in pieces)
    return "".join(escaped).replace("\x02", "**").replace("\x03", "**")


def between_markers(readme: Path, summary: str) -> tuple[str, str]:
    """A file as it is, and with the summary between its markers; all else in it stays.

    Raises:
        InputError: the file cannot be read, or has not exactly one marker of each, in order.
    """
    try:
        whole = readme.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"{readme}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{readme}: must be UTF-8: {error}") from error
    for marker in (BEGIN, END):
        if whole.count(marker) != 1:
            raise InputError(
                f"{readme}: must hold the line {marker} once, got it {whole.count(marker)} times"
            )
    before, rest = whole.split(BEGIN)
    if END not in rest:
        raise InputError(f"{readme}: {BEGIN} must come before {END}")
    if BEGIN in summary or END in summary:
        raise InputError(f"{readme}: the summary must not hold the markers {BEGIN} and {END}")
    return whole, f"{before}{BEGIN}\n{summary.strip()}\n{END}{rest.split(END)[1]}"
