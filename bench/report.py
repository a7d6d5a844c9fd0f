"""Should I believe it? One HTML page, and a summary in the README, made from bench/results alone.

`python bench/report.py` writes out/bench.html; `--markdown README.md` also replaces what stands there between
the markers `<!-- bench:begin -->` and `<!-- bench:end -->`. What was not measured is said; nothing is typed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arborcast.bench.harness.provenance import doubts
from arborcast.bench.page import (
    aggregation,
    faults,
    fragments,
    in_network,
    loopback,
    planners,
    plans,
    programs,
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
from arborcast.bench.page.headline import headline
from arborcast.bench.page.parts import Cell, Column, Section, table, text
from arborcast.bench.page.render import (
    page_html,
    replace_between_markers,
    sentence_markdown,
    table_markdown,
)
from arborcast.bench.page.results import Document, read_results
from arborcast.synth.errors import InputError
from arborcast.synth.formats.atomic import write_atomically

HOME = Path(__file__).resolve().parent.parent

SECTIONS: tuple[Section, ...] = (
    testbed.SECTION,
    fragments.SECTION,
    sweeps.SECTION,
    aggregation.SECTION,
    in_network.SECTION,
    synthesis.TREES,
    *scale.SECTIONS,
    synthesis.FRONTIERS,
    synthesis.SOLVERS,
    synthesis.PEERS,
    loopback.SECTION,
    torch_suite.SECTION,
    faults.SECTION,
    staging.SECTION,
    starting.SECTION,
    programs.SECTION,
    *training.SECTIONS,
    *steps.SECTIONS,
    *plans.SECTIONS,
    *planners.SECTIONS,
    *sharded.SECTIONS,
)
"""In the order of the page and of the README."""


def write_report(results: Path, page_path: Path, readme: Path | None = None) -> None:
    """Write the page, and the summary where it is wanted.

    Args:
        results: the folder of results files.
        page_path: the HTML file.
        readme: a Markdown file with the markers; None for none.

    Raises:
        InputError: a results file is none, the README lacks the markers, or a file cannot be written.
    """
    documents = read_results(results)
    drawn = page_html(headline(documents), _sections(documents))
    if readme is not None:
        replace_between_markers(readme, summary(documents))
    write_atomically(page_path, drawn)


def questionable(results: Path) -> list[str]:
    """A line for each results file whose figures may not be those of today's code."""
    found = ((name, doubts(document.content)) for name, document in read_results(results).items())
    return [f"{name}.json: {doubt}" for name, doubt in found if doubt]


def summary(documents: Mapping[str, Document]) -> str:
    """The headline and the compact tables, as Markdown."""
    sentences = map(sentence_markdown, headline(documents))
    blocks = [" ".join(said if said.endswith(".") else f"{said}." for said in sentences)]
    for section in SECTIONS:
        document = documents.get(section.file)
        if document is not None and section.summary is not None:
            title, of = section.summary
            blocks += [f"{title} (`bench/results/{section.file}.json`):", table_markdown(of(document))]
    return "\n\n".join(blocks)


def _sections(documents: Mapping[str, Document]) -> list[dict[str, Any]]:
    sections = [_section(section, documents.get(section.file)) for section in SECTIONS]
    others = [document for name, document in documents.items() if name not in {one.file for one in SECTIONS}]
    columns: dict[str, Column] = {
        "file": lambda one: Cell(f"{one.name}.json"),
        "question": lambda one: Cell(str(one.get("question"))),
        ">rows": lambda one: Cell(str(len(one.rows)), len(one.rows)),
    }
    rest = {"anchor": "others", "title": "What else is in the results?", "kind": "", "sources": others}
    return [*sections, *([rest | {"parts": [table(columns, others)]}] if others else [])]


def _section(section: Section, document: Document | None) -> dict[str, Any]:
    found = {"anchor": section.anchor, "title": section.title}
    if document is None:
        ask = text(f"Not measured yet: run `{section.command}`.", tone="quiet")
        return found | {"kind": "", "parts": [ask], "sources": []}
    parts = [text(section.about, tone="quiet"), *section.answer(document)]
    return found | {"kind": section.kind, "parts": parts, "sources": [document]}


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=HOME / "bench" / "results", help="folder of results")
    parser.add_argument("-o", "--output", type=Path, default=Path("out/bench.html"), help="the page")
    parser.add_argument("--markdown", type=Path, metavar="README", help="file whose summary is replaced")
    arguments = parser.parse_args()
    try:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        write_report(arguments.results, arguments.output, arguments.markdown)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"written: {arguments.output}" + (f", {arguments.markdown}" if arguments.markdown else ""))
    for line in questionable(arguments.results):
        print(line)


if __name__ == "__main__":
    main()
