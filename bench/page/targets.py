"""Every target of every bench, counted in one place: what was aimed for, and whether it was met.

A bench says its targets in its own rows; what is one, and when it is met, is written down here once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from arborcast.bench.page.results import Document, frame, number

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


def _column(name: str, entry: str = "") -> Callable[[Document], list[Verdict]]:
    """Rows, or those of an entry of the document, with a truth value in this column have a target."""

    def verdicts(document: Document) -> list[Verdict]:
        found = (frame(document.get(entry)) if entry else document.rows)[name]
        return [
            value if isinstance(value, bool) else None for value in found if entry or isinstance(value, bool)
        ]

    return verdicts


def _at_most(column: str, *, limit: str) -> Callable[[Document], list[Verdict]]:
    """Rows have a figure in `column`; another column limits it, or an entry of the document all of them."""

    def verdicts(document: Document) -> list[Verdict]:
        rows, of_all = document.rows, number(document.get(limit))
        limits = rows[limit] if math.isnan(of_all) and limit in rows else [of_all] * len(rows)
        pairs = zip(rows[column], limits, strict=True)
        return [None if math.isnan(taken) else taken <= most for taken, most in pairs if not math.isnan(most)]

    return verdicts


_VERDICTS: Mapping[str, Callable[[Document], list[Verdict]]] = {
    "testbed": _column("met", entry="targets"),
    "scale_targets": _column("kept"),
    "alltoallv": _column("met"),
    "loopback": _column("met"),
    "ddp": _column("met"),
    "pipeline_curves": _at_most("loss_difference", limit="limit"),
    "pipeline_memory": _at_most("ratio", limit="limit"),
    "pipeline_prediction": _at_most("error", limit="target"),
    "pipeline_planner": _at_most("seconds", limit="target_s"),
    "pipeline_intra": _at_most("cpu_seconds", limit="target_s"),
}

TITLES: Mapping[str, str] = {
    "testbed": "emulated links",
    "scale_targets": "large fabrics",
    "alltoallv": "plans of alltoallv",
    "loopback": "one machine",
    "ddp": "one machine",
    "pipeline_curves": "equality of training",
    "pipeline_memory": "memory of ranks",
    "pipeline_prediction": "predicted steps",
    "pipeline_planner": "planning",
    "pipeline_intra": "planning",
}
"""Results files with targets, as the headline calls them."""
