"""Should I believe it? A headline and a page of figures, made from bench/results alone.

`python bench/report.py` writes README.md and docs/figures.md between their markers `<!-- bench:begin -->` and
`<!-- bench:end -->`; `-o FILE` writes the page of any results there alone; `--check` writes nothing and
ends with 1 where they hold anything else; `--csv FOLDER` writes the rows of every bench as a table. What was
not measured is said, what cannot be repeated is refused; nothing is typed.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from arborcast.bench.harness.script import KEPT, command_line, one_line
from arborcast.bench.harness.standing import history, standing
from arborcast.bench.page.headline import headline, more, tally
from arborcast.bench.page.render import (
    between_markers,
    circumstances,
    escape_markdown,
    prose_markdown,
    table_markdown,
)
from arborcast.bench.page.results import Document, read_results
from arborcast.bench.page.sections import SECTIONS
from arborcast.bench.page.tables import Section, Table, strong
from arborcast.bench.page.words import listed
from arborcast.synth.errors import InputError
from arborcast.synth.formats.atomic import write_atomically

HOME = Path(__file__).resolve().parent.parent


def judged(results: Path) -> dict[str, Document]:
    """Every results file of a folder, with what speaks against it.

    Raises:
        InputError: no such folder, or a file that is no results file.
    """
    found = read_results(results)
    return {name: replace(one, standing=standing(one.content)) for name, one in found.items()}


def write_report(documents: Mapping[str, Document], readme: Path, figures: Path) -> None:
    """Write the headline and the page into Markdown files, between their markers.

    Args:
        documents: the results by their files' names.
        readme: for the headline.
        figures: for the page.

    Raises:
        InputError: a file lacks the markers, or cannot be written.
    """
    for path, (_, wanted) in _regenerated(documents, readme, figures).items():
        write_atomically(path, wanted)


def differences(documents: Mapping[str, Document], readme: Path, figures: Path) -> list[str]:
    """The first line of each file that is not what the results give, as `FILE:LINE: ...`."""
    found = []
    for path, (whole, wanted) in _regenerated(documents, readme, figures).items():
        pairs = enumerate(zip_longest(whole.splitlines(), wanted.splitlines(), fillvalue="nothing"), 1)
        first = next(
            (f"{path}:{at}: has {has!r}, the results {want!r}" for at, (has, want) in pairs if has != want),
            "",
        )
        found += [first] if first else []
    return found


def _regenerated(
    documents: Mapping[str, Document], readme: Path, figures: Path
) -> dict[Path, tuple[str, str]]:
    """Files as they are and as they are to be."""
    wanted = ((readme, headline_markdown), (figures, summary))
    return {path: between_markers(path, made(documents)) for path, made in wanted}


def write_tables(documents: Mapping[str, Document], folder: Path) -> list[Path]:
    """Write the rows of each results file as CSV, a column per key; what is nested has dots in its name.

    Args:
        documents: the results by their files' names; those that are refused are left out.
        folder: where `NAME.csv` goes for each of them; made where it is not there.

    Raises:
        InputError: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}") from error
    written = []
    for name, document in _shown(documents).items():
        path = folder / f"{name}.csv"
        write_atomically(path, _as_csv([_flat(row) for row in document.content["rows"]]))
        written.append(path)
    return written


def _flat(row: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in row.items():
        found |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return found


def _as_csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def questionable(documents: Mapping[str, Document]) -> list[str]:
    """A line for each results file that something speaks against."""
    found = []
    for name, document in documents.items():
        refused, changed = document.standing.refused, document.standing.changed
        if refused or changed:
            found.append(f"{name}.json: {refused or f'code changed since: {changed}'}")
    return found


def _shown(documents: Mapping[str, Document]) -> dict[str, Document]:
    """Those whose figures can be repeated."""
    return {name: one for name, one in documents.items() if not one.standing.refused}


class _Read(dict[str, Document]):
    """Results that know which of them were asked for, in order."""

    def __init__(self, documents: Mapping[str, Document]) -> None:
        super().__init__(documents)
        self.read: dict[str, Document] = {}

    def get(self, name: str, default: Any = None) -> Any:
        if name in self:
            self.read[name] = self[name]
        return super().get(name, default)


def _everything(documents: Mapping[str, Document]) -> tuple[str, ...]:
    """The headline, and what other benches add to it."""
    return (*headline(documents), *more(documents))


def said_first(
    documents: Mapping[str, Document],
    say: Callable[[Mapping[str, Document]], tuple[str, ...]] = _everything,
) -> tuple[str, ...]:
    """Sentences from results of one kind of processor, that of the first; and what speaks against them."""
    say(everything := _Read(documents))
    sources = _shown(everything.read)
    of = {name: _processor(one) for name, one in sources.items()}
    processor = next(iter(of.values()), "")
    odd = [name for name in sources if of[name] != processor]
    kept = {name: one for name, one in _shown(documents).items() if name not in odd}
    notes = [
        (", refused as they cannot be repeated: ", [name for name in everything.read if name not in sources]),
        (", left out as measured on other processors: ", odd),
        (
            ", code changed since: ",
            [name for name in sources if name not in odd and sources[name].standing.changed],
        ),
    ]
    told = "".join(f";{what[1:]}{listed(names)}" for what, names in notes if names)
    on = f"Measured on {processor or 'a processor that was not recorded'}{told}."
    return (*say(kept), *([on] if everything.read else []))


def _processor(document: Document) -> str:
    return str(document.entry("machine").get("processor") or "")


def _items(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {prose_markdown(sentence)}" for sentence in sentences)


def headline_markdown(documents: Mapping[str, Document]) -> str:
    """The headline, one item a sentence."""
    return _items(said_first(documents, headline))


def summary(documents: Mapping[str, Document]) -> str:
    """The page, as Markdown: the headline, then section by section."""
    blocks = [_items(said_first(documents))]
    for section in SECTIONS:
        document = documents.get(section.file)
        blocks.append(f"## {escape_markdown(section.title)}")
        if document is None:
            blocks.append(prose_markdown(f"Not measured yet: run `{section.command}`."))
        elif document.standing.refused:
            file = f"`bench/results/{section.file}.json`"
            refused = (
                f"Refused: {file} was {document.standing.refused}. Measure it anew: `{section.command}`."
            )
            blocks.append(prose_markdown(refused))
        else:
            targets = tally(document)
            answer = section.answer(document) if section.answer else ""
            said = [answer, strong(f"{targets.words}.") if targets.all else "", section.about]
            blocks += [
                prose_markdown(" ".join(filter(None, said))),
                prose_markdown(_source(section, document)),
            ]
            blocks.append(table_markdown(section.table(document)))
    others = [document for name, document in documents.items() if name not in {one.file for one in SECTIONS}]
    if others:
        lines = tuple((f"{one.name}.json", str(one.get("question")), str(len(one.rows))) for one in others)
        blocks += ["## Other results", table_markdown(Table(("file", "question", ">rows"), lines))]
    return "\n\n".join(blocks)


def _source(section: Section, document: Document) -> str:
    """Where a section's figures come from, how they came about, and what speaks against them."""
    commit = str(document.entry("code").get("commit") or "")[:9]
    dated = [f" {word} {known}" for word, known in (("on", document.get("date")), ("at", commit)) if known]
    command = str(document.get("command")).replace("`", "'")
    said = (
        f"`bench/results/{section.file}.json`, {section.kind} by `{command}`{''.join(dated)}",
        circumstances(document),
    )
    return f"{'; '.join(filter(None, said))}."


@one_line("report")
def main() -> None:
    """Write what the command line asks for."""
    parser = command_line(__doc__)
    parser.add_argument("--results", type=Path, default=KEPT, help="folder of results")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the page there alone")
    parser.add_argument("--headline", type=Path, default=HOME / "README.md", help="Markdown for the headline")
    parser.add_argument(
        "--tables", type=Path, default=HOME / "docs" / "figures.md", help="and for the tables"
    )
    parser.add_argument(
        "--check", action="store_true", help="only say where these two are not what they give"
    )
    parser.add_argument("--csv", type=Path, metavar="FOLDER", help="every row of every bench, a table each")
    arguments = parser.parse_args()
    markdown = arguments.headline, arguments.tables
    documents = judged(arguments.results)
    if arguments.check:
        raise SystemExit(_checked(documents, *markdown))
    if arguments.output is not None:
        write_atomically(arguments.output, f"# Figures\n\n{summary(documents)}\n")
    else:
        write_report(documents, *markdown)
    if arguments.csv is not None:
        write_tables(documents, arguments.csv)
    pages = markdown if arguments.output is None else (arguments.output,)
    print("written:", *pages, *filter(None, (arguments.csv,)))
    for line in questionable(documents):
        print(line)


def _checked(documents: Mapping[str, Document], readme: Path, figures: Path) -> int:
    """The exit status of `--check`."""
    if history() is None:
        print("history unknown here: figures are not compared with bench/results")
        return 0
    found = differences(documents, readme, figures)
    for line in found:
        print(line, file=sys.stderr)
    if found:
        print("figures are not those of bench/results: run make pages", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    main()
