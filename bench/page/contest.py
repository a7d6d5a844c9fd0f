"""Cases of the testbed: what is chosen, beside the fastest baseline.

The baseline of a case is the fastest of all that were measured on it, and so it is known only afterwards: who
picks one method beforehand does no better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from arborcast.bench.page.results import Document, Row, groups, is_ours
from arborcast.synth.baselines import BASELINES

CHOSEN = "selection"
EVEN = 0.005
"""Part by which two times may differ and still count as even."""


@dataclass(frozen=True)
class Case:
    """A topology, collective and size on which ours ran on real links.

    Attributes:
        ours: what the process group chooses; the fastest of ours where that was not measured. The fastest of
            several methods is known only after all have run: as a claim it would flatter us.
        baselines: all others that ran, the fastest first.
        missing: by name, the other baselines: why each did not run.
        is_whole: whether every baseline ran, or is known to have no schedule here.
    """

    ours: Row
    baselines: tuple[Row, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    is_whole: bool = True

    @property
    def over_best(self) -> float:
        """The speed-up of ours over the fastest baseline; NaN where none was measured."""
        return self.over(str(self.baselines[0]["method"])) if self.baselines else math.nan

    @property
    def chose_baseline(self) -> bool:
        """Whether what serves ours is itself one of the classical patterns."""
        return str(self.ours.get("served_by")).startswith(tuple(BASELINES))

    @property
    def is_limited(self) -> bool:
        """Whether the processors may have been the limit of ours or of any baseline."""
        return any(row.get("cpu_limited") is True for row in (self.ours, *self.baselines))

    def over(self, method: str) -> float:
        """The speed-up of ours over a baseline; NaN where it did not run."""
        found = (row for row in self.baselines if row.get("method") == method)
        return next((row.figure("time_us") / self.ours.figure("time_us") for row in found), math.nan)


def cases(document: Document | None) -> list[Case]:
    """Each topology, collective and size on which ours ran."""
    if document is None:
        return []
    rivals = document.get("rivals") or ()  # of old results nobody knows: none of their cases counts
    absent = {
        (each.get("topology"), each.get("collective"), each.get("method")): each
        for each in document.get("unavailable") or ()
    }
    timed = [row for row in document.rows if row.figure("time_us") > 0]
    found = []
    for rows in groups(timed, "topology", "collective", "bytes"):
        rows.sort(key=lambda row: row.figure("time_us"))
        ours = [row for row in rows if is_ours(row.get("method"))]
        if not ours:
            continue
        others = tuple(row for row in rows if not is_ours(row.get("method")))
        about = rows[0].get("topology"), rows[0].get("collective")
        ran = {row.get("method") for row in others}
        missing = {name: absent.get((*about, name), {}) for name in rivals if name not in ran}
        found.append(
            Case(
                next((row for row in ours if row.get("method") == CHOSEN), ours[0]),
                others,
                {name: str(each.get("why", "did not run")) for name, each in missing.items()},
                bool(rivals and others) and all(one.get("ruled_out") is True for one in missing.values()),
            )
        )
    return found


def cases_that_count(document: Document | None) -> tuple[list[Case], int, int]:
    """Those that a headline may be about, and how many are left out: by a missing baseline, by processors.

    A baseline that did not run, or that the processors slowed down, would flatter us.
    """
    found = cases(document)
    whole = [case for case in found if case.is_whole]
    about_links = [case for case in whole if not case.is_limited]
    return about_links, len(found) - len(whole), len(whole) - len(about_links)
