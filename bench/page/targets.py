"""Every target of every bench, counted in one place: what was aimed for, and whether it was met.

A bench says its targets in its own rows; what is one, and when it is met, is written down here once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from arborcast.bench.page.results import Document, figure, number

Verdict = bool | None
"""Met, missed, or None where the figure was not measured."""


@dataclass(frozen=True, slots=True)
class Tally:
    """The targets of one or more results files.

    Attributes:
        met: how many are met.
        missed: how many are not.
        unknown: how many were not measured.
    """

    met: int = 0
    missed: int = 0
    unknown: int = 0

    @property
    def all(self) -> int:
        """How many there are."""
        return self.met + self.missed + self.unknown

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.met + other.met, self.missed + other.missed, self.unknown + other.unknown)

    @property
    def words(self) -> str:
        """Such as "21 of 25 targets met, 4 missed"."""
        parts = [f"{self.met} of {self.all} target{'' if self.all == 1 else 's'} met"]
        parts += [f"{self.missed} missed"] if self.missed else []
        parts += [f"{self.unknown} not measured"] if self.unknown else []
        return ", ".join(parts)


def tally(document: Document | None) -> Tally:
    """The targets of a results file; none where it has none."""
    verdicts = _VERDICTS[document.name](document) if document and document.name in _VERDICTS else []
    counted = [verdicts.count(verdict) for verdict in (True, False, None)]
    return Tally(*counted)


def tallies(documents: Mapping[str, Document]) -> dict[str, Tally]:
    """Those of every results file that has targets, by what the headline calls it, added up."""
    found: dict[str, Tally] = {}
    for name, title in TITLES.items():
        counted = tally(documents.get(name))
        if counted.all:
            found[title] = found.get(title, Tally()) + counted
    return found


def _testbed(document: Document) -> list[Verdict]:
    listed = document.get("targets") or []
    verdicts = [target.get("met") for target in listed if isinstance(target, dict)]
    return [met if isinstance(met, bool) else None for met in verdicts]


def _column(name: str) -> Callable[[Document], list[Verdict]]:
    """Rows with a truth value in this column have a target."""
    return lambda document: [row[name] for row in document.rows if isinstance(row.get(name), bool)]


def _at_most(column: str, *, entry: str) -> Callable[[Document], list[Verdict]]:
    """Every row has a figure in `column`, which an entry of the document limits."""

    def verdicts(document: Document) -> list[Verdict]:
        limit = number(document.get(entry))
        if limit is None:
            return []
        taken = [figure(row, column) for row in document.rows]
        return [None if value is None else value <= limit for value in taken]

    return verdicts


def _planner(document: Document) -> list[Verdict]:
    aimed = [row for row in document.rows if figure(row, "target_s") is not None]
    found = [(figure(row, "seconds"), figure(row, "target_s") or 0.0) for row in aimed]
    return [None if taken is None else taken <= target for taken, target in found]


_VERDICTS: Mapping[str, Callable[[Document], list[Verdict]]] = {
    "testbed": _testbed,
    "scale_targets": _column("kept"),
    "loopback": _column("met"),
    "pipeline_curves": _at_most("loss_difference", entry="limit"),
    "pipeline_prediction": _at_most("error", entry="target"),
    "pipeline_planner": _planner,
}

TITLES: Mapping[str, str] = {
    "testbed": "emulated links",
    "scale_targets": "large fabrics",
    "loopback": "one machine",
    "pipeline_curves": "equality of training",
    "pipeline_prediction": "predicted steps",
    "pipeline_planner": "planning",
}
"""Results files with targets, as the headline calls them."""
