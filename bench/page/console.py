"""What a bench found, on the terminal: the tables of the page, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arborcast.bench.page.results import Document
from arborcast.bench.page.sections import SECTIONS
from arborcast.bench.page.tables import all_rows
from arborcast.synth.cli.console import print_lines, table


def print_results(found: Mapping[str, Any], *more: str, section: str = "") -> None:
    """Print every row of a results file, and below them the compact table of the page.

    Args:
        found: the file.
        more: columns beside its keys and measures.
        section: the page's, by the name of its results file; empty for no compact table.
    """
    document = Document(section, found)
    shown = [all_rows(document, *more), *(one.table(document) for one in SECTIONS if one.file == section)]
    for each in shown:
        names = [name.removeprefix(">") for name in each.head]
        figures = [name.startswith(">") for name in each.head]
        left = figures.index(True) if any(figures) else len(names)
        print_lines(["", *table(names, each.rows, left=left)])
