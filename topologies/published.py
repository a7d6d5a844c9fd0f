"""What others measured on machines of the catalog and published: the rows of `published.tsv`, as they stand.

The head of the table says what its columns mean. `bench/published.py` holds prices against them, the atlas
shows them beside what is proved.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Measurement:
    """A row of the table: a machine, what was asked of it, and who says what came of it."""

    spec: str
    ranks: str
    processors: str
    collective: str
    size: str
    busbw: str
    time_us: str
    by: str
    source: str

    @property
    def last_size(self) -> str:
        """The size of the buffer, the largest of a range; empty where it was but large."""
        return self.size.rstrip("+").rpartition("-")[2]

    @property
    def chosen(self) -> list[int] | None:
        """The ranks of the machine that took part; None for all."""
        return [int(rank) for rank in self.ranks.split(",")] if self.ranks else None


@cache
def measurements() -> tuple[Measurement, ...]:
    """The table."""
    text = (files(__package__) / "published.tsv").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return tuple(Measurement(**row) for row in csv.DictReader(lines, delimiter="\t"))
