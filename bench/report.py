"""Should I believe it? One HTML page, its tables as Markdown, and a headline, made from bench/results alone.

`python bench/report.py` writes out/bench.html; `--headline README.md --tables docs/figures.md` also replace
what stands there between the markers `<!-- bench:begin -->` and `<!-- bench:end -->`; `--csv FOLDER` writes
the rows of every bench as a table. What was not measured is said; nothing is typed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from arborcast.bench.harness.provenance import doubts
from arborcast.bench.page import (
    aggregation,
    alltoallv,
    degraded,
    faults,
    fragments,
    history,
    in_network,
    latency_bandwidth,
    loopback,
    planners,
    plans,
    programs,
    resuming,
    scale,
    sharded,
    staging,
    starting,
    steps,
    sweeps,
    synthesis,
    testbed,
    torch_suite,
    training,
)
from arborcast.bench.page.headline import headline, more
from arborcast.bench.page.parts import Cell, Column, Section, Sentence, Text, table, text
from arborcast.bench.page.render import (
    escape_markdown,
    page_html,
    replace_between_markers,
    sentence_markdown,
    table_markdown,
)
from arborcast.bench.page.results import Document, read_results
from arborcast.bench.page.targets import tally
from arborcast.synth.errors import InputError
from arborcast.synth.formats.atomic import write_atomically

HOME = Path(__file__).resolve().parent.parent

SECTIONS: tuple[Section, ...] = (
    testbed.SECTION,
    fragments.SECTION,
    degraded.SECTION,
    sweeps.SECTION,
    latency_bandwidth.SECTION,
    aggregation.SECTION,
    in_network.SECTION,
    alltoallv.SECTION,
    synthesis.TREES,
    *scale.SECTIONS,
    synthesis.FRONTIERS,
    synthesis.SOLVERS,
    synthesis.PEERS,
    loopback.SECTION,
    loopback.STEPS,
    torch_suite.SECTION,
    faults.SECTION,
    resuming.SECTION,
    staging.SECTION,
    starting.SECTION,
    programs.SECTION,
    *training.SECTIONS,
    *steps.SECTIONS,
    *plans.SECTIONS,
    *planners.SECTIONS,
    *sharded.SECTIONS,
    history.SECTION,
)
"""In the order of the page and of its tables in Markdown."""


def write_report(
    results: Path, page_path: Path, readme: Path | None = None, figures: Path | None = None
) -> None:
    """Write the page, and its headline and tables as Markdown where they are wanted.

    Args:
        results: the folder of results files.
        page_path: the HTML file.
        readme: a Markdown file with the markers for the headline; None for none.
        figures: one for the tables; None for none.

    Raises:
        InputError: a results file is none, a Markdown file lacks the markers, or a file cannot be written.
    """
    documents = read_results(results)
    drawn = page_html((*headline(documents), *more(documents)), _sections(documents))
    if readme is not None:
        replace_between_markers(readme, _items(headline(documents)))
    if figures is not None:
        replace_between_markers(figures, summary(documents))
    write_atomically(page_path, drawn)


def write_tables(results: Path, folder: Path) -> list[Path]:
    """Write the rows of each results file as CSV, a column per key; what is nested has dots in its name.

    Args:
        results: the folder of results files.
        folder: where `NAME.csv` goes for each of them; made where it is not there.

    Raises:
        InputError: a results file is none, or a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}") from error
    written = []
    for name, document in read_results(results).items():
        path = folder / f"{name}.csv"
        write_atomically(path, pd.json_normalize(document.content["rows"]).to_csv(index=False))
        written.append(path)
    return written


def questionable(results: Path) -> list[str]:
    """A line for each results file whose figures may not be those of today's code."""
    found = ((name, doubts(document.content)) for name, document in read_results(results).items())
    return [f"{name}.json: {doubt}" for name, doubt in found if doubt]


def _items(sentences: Iterable[Sentence]) -> str:
    return "\n".join(f"- {sentence_markdown(sentence)}" for sentence in sentences)


def summary(documents: Mapping[str, Document]) -> str:
    """The headline and the compact tables, as Markdown."""
    blocks = [_items((*headline(documents), *more(documents)))]
    for section in SECTIONS:
        document = documents.get(section.file)
        if document is not None and section.summary is not None:
            title, of = section.summary
            measured = f"`bench/results/{section.file}.json`, by `{section.command}`"
            code = document.get("code")
            commit = code.get("commit") if isinstance(code, dict) else None
            said = [
                f" {word} {known}" for word, known in (("on", document.get("date")), ("at", commit)) if known
            ]
            source = f"{measured}{escape_markdown(''.join(said))}."
            blocks += [f"## {escape_markdown(title)}", source, table_markdown(of(document))]
    return "\n\n".join(blocks)


def _sections(documents: Mapping[str, Document]) -> list[dict[str, Any]]:
    sections = [_section(section, documents.get(section.file)) for section in SECTIONS]
    others = [document for name, document in documents.items() if name not in {one.file for one in SECTIONS}]
    columns: dict[str, Column] = {
        "file": lambda one: Cell(f"{one.name}.json"),
        "question": lambda one: Cell(str(one.get("question"))),
        ">rows": lambda one: Cell(str(len(one.rows)), len(one.rows)),
    }
    rest = _UNANSWERED | {"anchor": "others", "title": "What else is in the results?", "sources": others}
    return [*sections, *([rest | {"parts": [table(columns, others)]}] if others else [])]


_UNANSWERED = {"kind": "", "answer": None, "targets": "", "missed": False}


def _section(section: Section, document: Document | None) -> dict[str, Any]:
    found = {"anchor": section.anchor, "title": section.title}
    if document is None:
        ask = text(f"Not measured yet: run `{section.command}`.", tone="quiet")
        return found | _UNANSWERED | {"parts": [ask], "sources": []}
    counted = tally(document)
    parts = list(section.answer(document))
    first = next((part for part in parts if isinstance(part, Text) and part.tone != "quiet"), None)
    is_said = first is not None and counted.words in sentence_markdown(first.sentence)
    targets = f"{counted.words}." if counted.all and not is_said else ""
    return found | {
        "kind": section.kind,
        "answer": None if first is None else first.sentence,
        "targets": targets,
        "missed": counted.missed + counted.unknown > 0,
        "parts": [text(section.about, tone="quiet"), *(part for part in parts if part is not first)],
        "sources": [document],
    }


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=HOME / "bench" / "results", help="folder of results")
    parser.add_argument("-o", "--output", type=Path, default=Path("out/bench.html"), help="the page")
    parser.add_argument("--headline", type=Path, metavar="FILE", help="Markdown file for the headline")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="Markdown file for the tables")
    parser.add_argument("--csv", type=Path, metavar="FOLDER", help="every row of every bench, a table each")
    arguments = parser.parse_args()
    try:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        write_report(arguments.results, arguments.output, arguments.headline, arguments.tables)
        if arguments.csv is not None:
            write_tables(arguments.results, arguments.csv)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    written = (arguments.output, arguments.headline, arguments.tables, arguments.csv)
    print("written:", *filter(None, written))
    for line in questionable(arguments.results):
        print(line)


if __name__ == "__main__":
    main()
