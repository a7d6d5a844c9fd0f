"""Shows what became slower between two results files, beyond what the spread of their runs explains.

    python bench/compare.py OLD NEW      two files, or two folders: then all files of the same name

Prints what is worse, then what is better, and counts the rest. Exit status 0: nothing is worse; 1: something
is; 2: the files cannot be compared. It knows neither questions nor benches: which columns tell rows apart and
which are figures is in the files, see `synth/formats/results.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

from arborcast.bench.harness.document import read_document
from arborcast.bench.harness.script import command_line, one_line
from arborcast.synth.errors import InputError
from arborcast.synth.formats.results import Row

TOLERANCE = 0.05
EXACT = 1e-9
LOADS_DIFFER = 1.0  # processes that want to run
MOST_BETTER = 10  # lines; what became worse is shown in full

Document: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """A figure that moved.

    Attributes:
        row: the row's keys in words.
        figure: the column.
        old: its value before.
        new: its value now; None where there is none any more.
        factor: how many times worse (or better) it is, above 1; infinite from or to nothing.
        spread: the larger of both spreads, in the figure's unit; None where it is exact.
    """

    row: str
    figure: str
    old: float
    new: float | None
    factor: float
    spread: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two documents say about each other.

    Attributes:
        question: of both.
        worse: the worst first.
        better: the best first.
        unchanged: figures that did not move beyond the spread.
        unjudged: figures of which each side has a single run, so that no spread is known.
        vanished: rows that only the old one has, in words.
        new: rows that only the new one has.
        warnings: circumstances that differ, a line each.
    """

    question: str
    worse: tuple[Change, ...]
    better: tuple[Change, ...]
    unchanged: int
    unjudged: int
    vanished: tuple[str, ...]
    new: tuple[str, ...]
    warnings: tuple[str, ...]


def compare(old: Document, new: Document, *, tolerance: float = TOLERANCE) -> Comparison:
    """Judge every figure of every row that both documents have.

    A figure with a spread is worse when its median moved the wrong way by more than the larger of both
    spreads, and by more than `tolerance` of the old one. The spread is the whole range, largest minus
    smallest run, and not half of it: with 5 runs of normal errors on each side, chance alone moves the
    median the wrong way beyond the larger range once in 530 figures, beyond half of it once in 22 (7 runs:
    once in 12,000 and in 74), and files have hundreds of figures. What moved less cannot be told from
    chance with so few runs.

    A figure that follows another one (algbw follows the time) has that one's spread in proportion, and is
    left out where the other one is reported. An exact figure is worse when it moved the wrong way by more
    than a part of 1e-9. A figure that became null is worse. Truth values are figures, 0 and 1.

    Args:
        old: a document as `bench.harness.document.read_document` gives it.
        new: another one of the same question.
        tolerance: part of the old value that does not matter, at least 0.

    Raises:
        InputError: different questions, keys or directions, duplicate keys, a document without keys or
            measures, or a value that is no number.
    """
    if not (tolerance >= 0 and math.isfinite(tolerance)):
        raise InputError(f"tolerance: must be at least 0, got {tolerance}")
    if old["question"] != new["question"]:
        raise InputError(f"question: must be the same, got {old['question']!r} and {new['question']!r}")
    keys, measures, warnings = _common(old, new)
    before, after = (_by_keys(side, document, keys) for side, document in (("old", old), ("new", new)))
    verdicts = _Verdicts(tolerance)
    for identity, row in before.items():
        if identity in after:
            verdicts.judge(_words(row, keys), row, after[identity], measures)
    return Comparison(
        question=str(new["question"]),
        worse=tuple(sorted(verdicts.worse, key=attrgetter("factor"), reverse=True)),
        better=tuple(sorted(verdicts.better, key=attrgetter("factor"), reverse=True)),
        unchanged=verdicts.unchanged,
        unjudged=verdicts.unjudged,
        vanished=tuple(_words(row, keys) for identity, row in before.items() if identity not in after),
        new=tuple(_words(row, keys) for identity, row in after.items() if identity not in before),
        warnings=(*warnings, *_circumstances(old, new)),
    )


# ------------------------------------------------------------------------------------------ the verdicts


class _Verdicts:
    """Figures as they are judged."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self.worse: list[Change] = []
        self.better: list[Change] = []
        self.unchanged = 0
        self.unjudged = 0

    def judge(self, words: str, old: Row, new: Row, measures: Mapping[str, Mapping[str, Any]]) -> None:
        """All figures of a row that both have."""
        moved: set[str] = set()
        # What others follow comes first.
        for figure in sorted(measures, key=lambda name: measures[name].get("follows") is not None):
            follows = measures[figure].get("follows")
            before, after = _number(old, figure, words), _number(new, figure, words)
            if before is None or follows in moved:
                continue
            if after is None:
                self.worse.append(Change(words, figure, before, None, math.inf, None))
                continue
            spread = None
            if _is_timed(measures, figure):
                known = [
                    part for row in (old, new) if (part := _spread(row, figure, measures, words)) is not None
                ]
                if not known:
                    self.unjudged += 1
                    continue
                spread = max(known)
            if self._is_within(before, after, spread):
                self.unchanged += 1
                continue
            moved.add(figure)
            is_more = after > before
            change = Change(words, figure, before, after, _factor(before, after), spread)
            (self.better if is_more == (measures[figure]["better"] == "more") else self.worse).append(change)

    def _is_within(self, old: float, new: float, spread: float | None) -> bool:
        distance = abs(new - old)
        if spread is None:
            return distance <= EXACT * max(abs(old), abs(new))
        return distance <= max(spread, self._tolerance * abs(old))


def _is_timed(measures: Mapping[str, Mapping[str, Any]], figure: str) -> bool:
    measure = measures[measures[figure].get("follows") or figure]
    return measure.get("spread") is not None


def _spread(row: Row, figure: str, measures: Mapping[str, Mapping[str, Any]], words: str) -> float | None:
    """Largest minus smallest run, in the figure's unit; None where a single run has none."""
    leader = measures[figure].get("follows") or figure
    column = measures[leader]["spread"]
    ends = row.get(column)
    if isinstance(ends, list) and len(ends) == 2:
        smallest, largest = (_number({column: end}, column, words) for end in ends)
        spread = None if smallest is None or largest is None else largest - smallest
    else:
        spread = _number(row, column, words)
    if spread is None or row.get("runs") == 1:
        return None
    if leader == figure:
        return spread
    value, followed = _number(row, figure, words), _number(row, leader, words)
    return spread * abs(value / followed) if value is not None and followed else None


def _number(row: Row, column: str, words: str) -> float | None:
    """A figure as a number: truth values count, exact rates are fractions in a string.

    Raises:
        InputError: it is none.
    """
    value = row.get(column)
    if value is None:
        return None
    try:
        return float(Fraction(value))
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        raise InputError(f"{words}: {column}: must be a number or null, got {value!r}") from None


def _factor(old: float, new: float) -> float:
    small, large = sorted((abs(old), abs(new)))
    return large / small if small and old * new > 0 else math.inf


# ---------------------------------------------------------------------------------- what both must share


def _common(old: Document, new: Document) -> tuple[list[str], dict[str, Mapping[str, Any]], list[str]]:
    """The keys, the measures that both have, and a warning for those that only one has.

    Raises:
        InputError: there are none, or they contradict each other.
    """
    for side, document in (("old", old), ("new", new)):
        for entry, kind in (("keys", list), ("measures", dict)):
            if not isinstance(document.get(entry), kind) or not document[entry]:
                raise InputError(f"{side} file: must say its {entry}, got {document.get(entry)!r}")
    keys = [str(key) for key in new["keys"]]
    if set(keys) != set(old["keys"]):
        raise InputError(f"keys: must be the same, got {old['keys']} and {new['keys']}")
    measures = {}
    for name, measure in new["measures"].items():
        theirs = old["measures"].get(name)
        if theirs is None:
            continue
        for entry in ("better", "spread"):
            said = theirs.get(entry), measure.get(entry)
            if said[0] != said[1]:
                raise InputError(f"measure {name}: {entry} must be the same, got {said[0]} and {said[1]}")
        if measure.get("better") not in {"less", "more"}:
            raise InputError(f"measure {name}: better must be less or more, got {measure.get('better')!r}")
        if measure.get("follows") not in {None, *new["measures"]} - {name}:
            raise InputError(f"measure {name}: must follow another measure, got {measure['follows']!r}")
        measures[name] = measure
    for name in [name for name in measures if measures[name].get("follows") not in {None, *measures}]:
        del measures[name]
    alone = sorted((set(old["measures"]) | set(new["measures"])) - set(measures))
    return keys, measures, [f"only one file has {', '.join(alone)}"] if alone else []


def _by_keys(side: str, document: Document, keys: Sequence[str]) -> dict[str, Row]:
    """Rows by the values of their keys, which may be lists.

    Raises:
        InputError: two rows have the same, or a row lacks one.
    """
    found: dict[str, Row] = {}
    for number, row in enumerate(document["rows"]):
        missing = [key for key in keys if key not in row]
        if missing:
            raise InputError(f"{side} file: rows[{number}]: lacks {', '.join(missing)}")
        identity = json.dumps([row[key] for key in keys], sort_keys=True)
        if identity in found:
            raise InputError(
                f"{side} file: rows[{number}]: another row has the same keys: {_words(row, keys)}"
            )
        found[identity] = row
    return found


def _words(row: Row, keys: Sequence[str]) -> str:
    """A row by what it is about."""
    return ", ".join(
        str(row[key]) if isinstance(row[key], str) else f"{key} {json.dumps(row[key])}"
        for key in keys
        if row[key] is not None
    )


def _circumstances(old: Document, new: Document) -> list[str]:
    """Lines that tell how far the two can be compared at all."""
    lines = []
    before, after = old.get("machine") or {}, new.get("machine") or {}
    machines = [
        f"{name} {before.get(name)} and {after.get(name)}"
        for name in ("processor", "cores", "system")
        if before.get(name) != after.get(name)
    ]
    if machines:
        lines.append(f"this compares two machines: {'; '.join(machines)}")
    loads = [machine.get("load_at_the_end", math.nan) for machine in (before, after)]
    if not abs(loads[0] - loads[1]) <= LOADS_DIFFER:
        said = ["unknown" if math.isnan(load) else f"{load:.1f}" for load in loads]
        lines.append(f"the load differs: {said[0]} and {said[1]}")
    first, second = old.get("versions") or {}, new.get("versions") or {}
    for side, document in (("old", old), ("new", new)):
        code = document.get("code") or {}
        if code.get("dirty"):
            lines.append(f"{side} file: measured with uncommitted changes on {str(code.get('commit'))[:9]}")
    versions = [
        f"{name} {first.get(name)} and {second.get(name)}"
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
    ]
    if versions:
        lines.append(f"versions differ: {'; '.join(versions)}")
    return lines


# ------------------------------------------------------------------------------------------ what is said


def format_comparison(found: Comparison) -> list[str]:
    """The comparison as lines: warnings, what is worse, what is better, the rest."""
    lines = [f"warning: {warning}" for warning in found.warnings]
    lines += _table("worse", found.worse, len(found.worse))
    lines += _table("better", found.better, MOST_BETTER)
    counts = [f"worse {len(found.worse)}", f"better {len(found.better)}", f"unchanged {found.unchanged}"]
    if found.unjudged:
        counts.append(f"not judged {found.unjudged} (a single run on each side)")
    lines.append(", ".join(counts))
    lines += [f"vanished: {row}" for row in found.vanished]
    lines += [f"new: {row}" for row in found.new]
    return lines


def _table(title: str, changes: Sequence[Change], most: int) -> list[str]:
    from arborcast.synth.cli.console import table

    if not changes:
        return []
    cells = [
        (
            change.row,
            change.figure,
            f"{change.old:.6g}",
            "null" if change.new is None else f"{change.new:.6g}",
            f"{change.factor:.2f} x" if change.factor < math.inf else "",
            "exact" if change.spread is None else f"{change.spread:.3g}",
        )
        for change in changes[:most]
    ]
    lines = table((title, "figure", "old", "new", "factor", "spread"), cells, left=2)
    return [*lines, *([f"and {len(changes) - most} more"] if len(changes) > most else []), ""]


def compared(before: Path, after: Path, *, tolerance: float = TOLERANCE) -> bool:
    """Print how two results files, or folders of them, differ; whether anything became worse.

    Raises:
        InputError: they are not two files or two folders with results of the same questions.
    """
    pairs, lonely = _pairs(before, after)
    found = {new.name: _compared(old, new, tolerance) for old, new in pairs}
    print("\n".join(_all_lines(found, lonely)), flush=True)
    return any(each.worse for each in found.values())


def _all_lines(found: Mapping[str, Comparison], lonely: Mapping[str, Path]) -> list[str]:
    lines = [f"{name}: only in {folder}" for name, folder in lonely.items()]
    for number, (name, each) in enumerate(found.items()):
        lines += [*([""] if number else []), f"{name}: {each.question}", *format_comparison(each)]
    return lines


def _pairs(old: Path, new: Path) -> tuple[list[tuple[Path, Path]], dict[str, Path]]:
    """The files to compare, and of two folders the names that only one of them has."""
    if old.is_dir() != new.is_dir():
        raise InputError(f"{old} and {new}: must be two files or two folders")
    if not old.is_dir():
        return [(old, new)], {}
    before, after = ({file.name: file for file in folder.glob("*.json")} for folder in (old, new))
    both = sorted(before.keys() & after.keys())
    if not both:
        raise InputError(f"{old} and {new}: must have a results file of the same name")
    lonely = {name: old if name in before else new for name in sorted(before.keys() ^ after.keys())}
    return [(before[name], after[name]) for name in both], lonely


def _compared(old: Path, new: Path, tolerance: float) -> Comparison:
    documents = read_document(old), read_document(new)
    try:
        return compare(*documents, tolerance=tolerance)
    except InputError as error:
        raise InputError(f"{old} and {new}: {error}") from error


@one_line("compare")
def main() -> None:
    """Compare what the command line names."""
    parser = command_line(__doc__)
    parser.add_argument("old", type=Path, help="a results file, or a folder of them")
    parser.add_argument("new", type=Path, help="the same, later")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="part of a timed figure that does not matter"
    )
    asked = parser.parse_args()
    raise SystemExit(compared(asked.old, asked.new, tolerance=asked.tolerance))


if __name__ == "__main__":
    main()
