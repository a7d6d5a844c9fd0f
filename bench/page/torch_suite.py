"""Torch's own tests: how many pass on each backend, and which of gloo's do not."""

from __future__ import annotations

from collections.abc import Iterator

from arborcast.bench.page.parts import Cell, Part, Section, Strong, Table, all_rows, columns, lines, text
from arborcast.bench.page.results import Document, groups, records
from arborcast.bench.page.words import count, plural

REFERENCE = "gloo"


def _answer(document: Document) -> Iterator[Part]:
    others = document.rows[document.rows["backend"] != REFERENCE]
    behind = sorted({name for names in others["behind"] for name in names or ()})
    yield text(
        "Of the tests that pass on gloo, ",
        Strong(plural(len(behind), "test") if behind else "none"),
        " fails, or skips itself, for other reasons than the backend's name"
        + (f": {', '.join(behind)}" if behind else ""),
        tone="bad" if behind else "",
    )
    for name, why in (document.get("by_name") or {}).items():
        yield text(f"`{name}` compares the backend's name: {why}", tone="quiet")
    yield all_rows(_COLUMNS, document.rows)


def summary(document: Document) -> Table:
    """A line for each configuration, a column for each backend: tests that pass, of those that apply."""
    backends = list(dict.fromkeys(document.rows["backend"]))
    drawn: list[tuple[Cell | str, ...]] = []
    for configuration, rows in groups(document.rows, "configuration"):
        found = {row.backend: f"{count(row.passed)} of {count(row.tests)}" for row in records(rows)}
        drawn.append((configuration, *(found.get(backend, "–") for backend in backends)))
    return lines(("configuration", *(f">{backend}" for backend in backends)), drawn)


_COLUMNS = columns(
    "configuration | backend | >ranks | >tests | >pass: passed | >fail: failed | >hang: hung | >skipped"
)

SECTION = Section(
    "torch_suite",
    "torch-suite",
    "Which tests of torch pass over the process group?",
    "counted",
    "python bench/torch_suite.py",
    "The tests that ship with torch, and forms of `torch.compile`, run on forked ranks over each backend, "
    "all as those of gloo, whose place the group takes. Tests that want GPUs get CPU tensors; some fail on "
    "gloo as well.",
    _answer,
    ("Torch's own tests of process groups: how many pass", summary),
)
