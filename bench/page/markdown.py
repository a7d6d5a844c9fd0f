"""The report's summary as Markdown, and how it takes the place of the last one in a README."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from arborcast.bench.page.parts import Cell, Sentence, Strong, Table
from arborcast.synth.errors import InputError
from arborcast.synth.formats.atomic import write_atomically

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def sentence_markdown(sentence: Sentence) -> str:
    """A sentence with its figures in bold."""
    return "".join(
        f"**{escape_markdown(piece.text)}**" if isinstance(piece, Strong) else escape_markdown(piece)
        for piece in sentence
    )


def table_markdown(table: Table) -> str:
    """A table; columns of figures are set to the right."""
    names = [name.removeprefix(">") for name in table.head]
    rules = ["---:" if name.startswith(">") else "---" for name in table.head]
    lines = [_line(map(escape_markdown, names)), _line(rules), *map(_row, table.rows)]
    return "\n".join(lines)


def _row(cells: Sequence[Cell]) -> str:
    return _line(escape_markdown(cell.text) for cell in cells)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def escape_markdown(text: str) -> str:
    """Text that Markdown neither reads as its own nor as HTML; code between backquotes stays code."""
    on_one_line = " ".join(text.split("\n"))
    escaped = re.sub(r"([\\*_\[\]|])", r"\\\1", on_one_line)
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def replace_between_markers(readme: Path, summary: str) -> None:
    """Put the summary between the markers of a file; all else in it stays as it is.

    Raises:
        InputError: the file cannot be read or written, or has not exactly one marker of each, in order.
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
    after = rest.split(END)[1]
    if BEGIN in summary or END in summary:
        raise InputError(f"{readme}: the summary must not hold the markers {BEGIN} and {END}")
    write_atomically(readme, f"{before}{BEGIN}\n{summary.strip()}\n{END}{after}")
