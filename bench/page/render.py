"""The page from its one template, and its tables as Markdown from the same values, put into files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from arborcast.bench.page.drawing import svg
from arborcast.bench.page.parts import Part, Sentence, Strong, Table
from arborcast.bench.page.results import Document, number, span
from arborcast.bench.page.words import count, percent, plural, two_digits
from arborcast.synth.errors import InputError

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

QUIET = 0.5
"""Processes that want to run, up to which a machine has nothing else to do."""


@cache
def _macros() -> Any:
    """Of the template, which escapes every text; undefined names are errors."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {
        "sentence": sentence_html,
        "svg": lambda chart: Markup(svg(chart)),
        "circumstances": circumstances,
    }
    environment.filters |= filters
    return environment.get_template("page.html").module


def page_html(headline: Sequence[Sentence], sections: Sequence[Mapping[str, Any]]) -> str:
    """The whole page: one file that fetches nothing.

    Args:
        headline: the answer in a few sentences, before everything else.
        sections: `anchor`, `title`, `kind`, `parts` and `sources` of each (its results files, whose
            circumstances stand below it), in the order in which they are to be read.
    """
    return str(_macros().page(headline, sections))


def part_html(part: Part) -> str:
    """One part of a section alone."""
    return str(_macros().part(part))


def sentence_html(sentence: Sentence) -> Markup:
    """A sentence; what stands between backquotes is set as code."""
    return Markup("").join(
        Markup("<strong>{}</strong>").format(piece.text)
        if isinstance(piece, Strong)
        else _code(escape(piece))
        for piece in sentence
    )


def _code(escaped: Markup) -> Markup:
    pieces = escaped.split("`")
    if len(pieces) % 2 == 0:  # a single backquote is one
        return escaped
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if odd % 2 else piece for odd, piece in enumerate(pieces)
    )


# ------------------------------------------------------------------------------------------- circumstances


def circumstances(document: Document) -> tuple[Sentence, list[tuple[str, str]]]:
    """How figures came about: one line that says the most, and all entries by name."""
    machine, code = _mapping(document.get("machine")), _mapping(document.get("code"))
    cores = number(machine.get("cores"))
    short = [
        f"bench/results/{document.name}.json",
        str(document.get("date") or ""),
        ", ".join(
            filter(None, (str(machine.get("processor") or ""), plural(cores, "core") if cores > 0 else ""))
        ),
        _runs(document),
        _busy(machine),
        words_of(document),
    ]
    versions = ", ".join(f"{name} {value}" for name, value in _mapping(document.get("versions")).items())
    changed = " with uncommitted changes" if code.get("dirty") else ""
    folders = ", ".join(map(str, code.get("folders") or []))
    entries = [
        ("question", str(document.get("question") or "")),
        ("command", str(document.get("command") or "")),
        ("date", str(document.get("date") or "not noted")),
        (
            "code",
            f"commit {code['commit']}{changed}; depends on {folders}" if code.get("commit") else "not noted",
        ),
        ("machine", ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine.items())),
        ("versions", versions),
        ("runs", _runs(document)),
        ("spread", _spread(document)),
        *((name, str(value)) for name, value in _mapping(document.get("units")).items()),
    ]
    return (" · ".join(filter(None, short)),), [(name, value) for name, value in entries if value]


def words_of(document: Document) -> str:
    """What speaks against figures that are shown, in the words that stand beside them."""
    if document.standing.changed:
        return "code changed since"
    return "" if document.standing.known else "history unknown here"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


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
    least, most = span(document.rows["runs"])
    if not most > 1:
        return ""
    return f"medians of {count(least)}{f' to {count(most)}' if most > least else ''} runs"


def _spread(document: Document) -> str:
    """Largest minus smallest as a share of the median time, of the row in the middle and of the worst."""
    timed = document.rows[document.rows["time_us"] > 0]
    shares = timed["spread"] / timed["time_us"]
    if not shares.any():
        return ""
    middle, most = percent(shares.median()), percent(shares.max())
    return f"largest minus smallest: {middle} of the time in the median row, at most {most}"


# ------------------------------------------------------------------------------------------------ Markdown


def sentence_markdown(sentence: Sentence) -> str:
    """A sentence with its figures in bold."""
    return "".join(
        f"**{escape_markdown(piece.text)}**" if isinstance(piece, Strong) else escape_markdown(piece)
        for piece in sentence
    )


def table_markdown(table: Table) -> str:
    """A table; columns of figures are set to the right."""
    rules = ["---:" if name.startswith(">") else "---" for name in table.head]
    names = (escape_markdown(name.removeprefix(">")) for name in table.head)
    rows = ((escape_markdown(cell.text) for cell in row) for row in table.rows)
    return "\n".join(map(_line, (names, rules, *rows)))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def escape_markdown(words: str) -> str:
    """Text that Markdown neither reads as its own nor as HTML; code between backquotes stays code."""
    on_one_line = " ".join(words.split("\n"))
    escaped = re.sub(r"([\\*_\[\]|])", r"\\\1", on_one_line)
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def prose_markdown(words: str) -> str:
    """A line of which what stands between backquotes stays code."""
    pieces = enumerate(words.split("`"))
    return "".join(f"`{escape(piece)}`" if odd % 2 else escape_markdown(piece) for odd, piece in pieces)


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
