"""The report's values as HTML; every text that comes from a results file is escaped here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from arborcast.bench.page.circumstances import circumstances_of
from arborcast.bench.page.parts import (
    Bars,
    Cell,
    Grid,
    Group,
    Part,
    Picture,
    Section,
    Sentence,
    Strong,
    Table,
    Text,
)

LONG = 24
"""Letters of a cell from which on it is given room, so that a phone does not break it into words."""


def section_html(section: Section) -> str:
    """A section with its parts, and the circumstances of its figures at the end."""
    kind = f'<p class="kind">{escape(section.kind)}</p>' if section.kind else ""
    return "\n".join(
        [
            f'<section id="{escape(section.name)}">',
            f"<h2>{escape(section.title)}</h2>{kind}",
            *map(part_html, section.parts),
            *map(_circumstances_html, map(circumstances_of, section.sources)),
            "</section>",
        ]
    )


def part_html(part: Part) -> str:
    """One part of a section."""
    match part:
        case Table():
            return _table_html(part)
        case Bars():
            return _bars_html(part)
        case Picture():
            title = f"<h3>{escape(part.title)}</h3>" if part.title else ""
            note = f"<figcaption>{escape(part.note)}</figcaption>" if part.note else ""
            return f"<figure>{title}{part.svg}{note}</figure>"
        case Text():
            return f"<p{_class(part.tone)}>{sentence_html(part.sentence)}</p>"
        case Group():
            return f'<div class="box">{"".join(map(part_html, part.parts))}</div>'
        case Grid():
            return f'<div class="grid">{"".join(map(part_html, part.groups))}</div>'


def sentence_html(sentence: Sentence) -> str:
    """A sentence; what stands between backquotes is set as code."""
    return "".join(
        f"<strong>{escape(piece.text)}</strong>" if isinstance(piece, Strong) else _code(escape(piece))
        for piece in sentence
    )


def _code(escaped: str) -> str:
    pieces = escaped.split("`")
    if len(pieces) % 2 == 0:  # a single backquote is one
        return escaped
    return "".join(f"<code>{piece}</code>" if odd % 2 else piece for odd, piece in enumerate(pieces))


def _class(tone: str) -> str:
    return f' class="{tone}"' if tone else ""


def _table_html(table: Table) -> str:
    right = [name.startswith(">") for name in table.head]
    head = "".join(
        f"<th{_class('n' if figures else '')}>{escape(name.removeprefix('>'))}</th>"
        for name, figures in zip(table.head, right, strict=True)
    )
    body = "".join(f"<tr>{_cells_html(row, right)}</tr>" for row in table.rows)
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    drawn = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    if table.folded:
        return f"<details><summary>{escape(table.folded)}</summary>{title}{drawn}</details>"
    return title + drawn


def _cells_html(row: Iterable[Cell], right: Iterable[bool]) -> str:
    drawn = []
    for cell, figures in zip(row, right, strict=True):
        long = "long" if len(cell.text) > LONG else ""
        classes = " ".join(filter(None, ("n" if figures else "", long, cell.tone)))
        order = "" if cell.order is None else f' data-order="{cell.order!r}"'
        drawn.append(f"<td{_class(classes)}{order}>{escape(cell.text)}</td>")
    return "".join(drawn)


def _bars_html(bars: Bars) -> str:
    drawn = []
    for bar in bars.bars:
        hint = f' title="{escape(bar.hint)}"' if bar.hint else ""
        width = 100 * min(max(bar.share, 0.0), 1.0)
        drawn.append(
            f'<div class="bar {bar.tone}"{hint}><span class="label">{escape(bar.label)}</span>'
            f'<span class="track"><span style="width:{width:.2f}%"></span></span>'
            f'<span class="value">{escape(bar.text)}</span></div>'
        )
    title = f"<h4>{escape(bars.title)}</h4>" if bars.title else ""
    return f'<div class="bars">{title}{"".join(drawn)}</div>'


def _circumstances_html(found: tuple[str, list[tuple[str, str]]]) -> str:
    line, entries = found
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in entries)
    summary = f"<summary>{sentence_html((line,))}</summary>"
    return f'<details class="circumstances">{summary}<dl>{listed}</dl></details>'
