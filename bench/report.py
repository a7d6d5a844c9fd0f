"""Should I believe it? One HTML page, and a summary in the README, made from bench/results alone.

`python bench/report.py` writes out/bench.html; `--markdown README.md` also replaces what stands there between
the markers `<!-- bench:begin -->` and `<!-- bench:end -->`. What was not measured is said; nothing is typed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from arborcast.bench.page import (
    divisible,
    fragments,
    frontier,
    loopback,
    peers,
    plans,
    scale,
    sweeps,
    synthesis,
    testbed,
    training,
)
from arborcast.bench.page.headline import headline
from arborcast.bench.page.markdown import replace_between_markers, sentence_markdown, table_markdown
from arborcast.bench.page.page import page
from arborcast.bench.page.parts import Cell, Section, Table
from arborcast.bench.page.results import Document, read_results
from arborcast.bench.provenance import doubts
from arborcast.synth.errors import InputError
from arborcast.synth.formats.atomic import write_atomically

HOME = Path(__file__).resolve().parent.parent

SECTIONS: tuple[tuple[str, Callable[[Document | None], Section]], ...] = (
    ("testbed", testbed.section),
    ("fragments", fragments.section),
    ("sweeps", sweeps.section),
    ("peers", peers.section),
    ("synthesis", synthesis.section),
    ("scale_targets", scale.targets),
    ("scale_growth", scale.growth),
    ("scale_tacos", scale.tacos),
    ("scale_heights", scale.heights),
    ("scale_uses", scale.uses),
    ("frontier", frontier.section),
    ("solvers", frontier.solvers),
    ("loopback", loopback.section),
    ("pipeline_curves", training.curves),
    ("pipeline_prediction", training.prediction),
    ("pipeline_testbed", training.step),
    ("pipeline_plans", plans.plans),
    ("pipeline_divisible", divisible.section),
    ("pipeline_planner", plans.planner),
)
"""Results files by name, and what is said about each, in the order of the page."""

SUMMARY: tuple[tuple[str, str, Callable[[Document], Table]], ...] = (
    ("testbed", "Real processes and TCP on emulated links", testbed.table),
    ("sweeps", "Simulated clusters beside NCCL's planning models", sweeps.table),
    ("synthesis", "Time to find allgather trees that equal their bound", synthesis.table),
    ("scale_targets", "Large fabrics: load, solve and verify on one core", scale.table_of_targets),
    ("scale_growth", "Growth over the ranks", scale.table_of_growth),
    ("scale_tacos", "Large tori beside TACOS", scale.table_of_tacos),
    ("scale_uses", "What a large schedule costs whoever uses it", scale.table_of_uses),
    ("frontier", "Whole frontiers of chunk schedules", frontier.table),
    ("peers", "Public synthesizers on the same questions, in turns on the same machine", peers.table),
    ("loopback", "The process group on one machine, as multiples of gloo's speed", loopback.table),
    ("pipeline_curves", "Pipelined training on digits beside serial training", training.table_of_curves),
    ("pipeline_prediction", "Predicted time of a training step, errors", training.table_of_prediction),
    ("pipeline_testbed", "A training step on emulated links", training.table_of_step),
    ("pipeline_plans", "SPP's plan, predicted: the others' time over its own", plans.table_of_plans),
    ("pipeline_divisible", "The Divisible paper's speed-ups by the model", divisible.table),
    ("pipeline_planner", "Time to plan a pipeline", plans.table_of_planner),
)
"""What of it the README shows."""


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
    drawn = page(headline(documents), _sections(documents))
    if readme is not None:
        replace_between_markers(readme, summary(documents))
    write_atomically(page_path, drawn)


def questionable(results: Path) -> list[str]:
    """A line for each results file whose figures may not be those of today's code."""
    found = ((name, doubts(document.content)) for name, document in read_results(results).items())
    return [f"{name}.json: {doubt}" for name, doubt in found if doubt]


def summary(documents: Mapping[str, Document]) -> str:
    """The headline and the compact tables, as Markdown."""
    blocks = [" ".join(_as_sentence(sentence_markdown(sentence)) for sentence in headline(documents))]
    for name, title, table in SUMMARY:
        document = documents.get(name)
        if document is not None:
            blocks += [f"{title} (`bench/results/{name}.json`):", table_markdown(table(document))]
    return "\n\n".join(blocks)


def _as_sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _sections(documents: Mapping[str, Document]) -> list[Section]:
    sections = [section(documents.get(name)) for name, section in SECTIONS]
    known = {name for name, _ in SECTIONS}
    others = [document for name, document in documents.items() if name not in known]
    return [*sections, *([_others(others)] if others else [])]


def _others(documents: list[Document]) -> Section:
    lines = [
        (Cell(f"{one.name}.json"), Cell(str(one.get("question"))), Cell(str(len(one.rows)), len(one.rows)))
        for one in documents
    ]
    table = Table(("file", "question", ">rows"), tuple(lines))
    return Section("others", "What else is in the results?", "", (table,), tuple(documents))


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
