"""A results file: rows that say what was asked and what was found, and the circumstances of the measurement.

Which columns are keys (independent variables: no two rows have the same) and which are measures (and where
their spread stands) is in the document itself, so that `bench/compare.py` and `bench/report.py` need to know
neither the question nor its bench.

    {"question": "How close to the limit are schedules on real links?",
     "command": "python bench/testbed.py", "machine": {...}, "versions": {...}, "date": "2026-01-31",
     "code": {"folders": ["synth", "topologies", "backends"], "commit": "1f5f065...", "dirty": false},
     "keys": ["topology", "collective", "method", "bytes"],
     "measures": {"time_us": {"better": "less", "spread": "spread"}, "algbw": {"better": "more"}},
     "units": {"time_us": "of the slowest rank; median over the runs"},
     "rows": [{"topology": "full:4", ...}]}
"""

from __future__ import annotations

import datetime
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from arborcast.bench.harness.provenance import SYNTHESIS, circumstances, provenance
from arborcast.synth.collective import Kind, bandwidths
from arborcast.synth.errors import InputError
from arborcast.synth.formats.atomic import write_atomically

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Measure:
    """What a column of figures means to whoever compares two files.

    Attributes:
        better: "less" or "more".
        spread: the column with the spread of the same figure, in its unit: largest minus smallest of the
            runs, or a list of both; None where it is exact, as what is computed and not timed, or where it
            follows another one.
        follows: the measure that this one is worked out from and has its relative spread of, as algbw from
            time_us.
    """

    better: str
    spread: str | None = None
    follows: str | None = None


TIME = {
    "time_us": Measure("less", "spread"),
    "algbw": Measure("more", follows="time_us"),
    "busbw": Measure("more", follows="time_us"),
}
"""The measures of `timed_row`; a share of a limit is `Measure("more", follows="time_us")` as well."""


def timed_row(
    *,
    topology: str,
    ranks: int,
    collective: Kind,
    root: int | None,
    method: str,
    size_bytes: int,
    times_us: Sequence[float],
    optimum_us: float | None = None,
    nominal_us: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A row with the columns that all timed results share.

    Args:
        topology: its name, or the spec that gives it.
        ranks: taking part.
        collective: its kind.
        root: None where there is none.
        method: what was timed.
        size_bytes: of the whole buffer, as algbw counts it.
        times_us: of each run, that of the slowest rank.
        optimum_us: the least time that the proven bound allows at the rates that the links delivered.
        nominal_us: the same at the links' nominal rates.
        more: further columns.
    """
    median = statistics.median(times_us)
    algbw, busbw = bandwidths(collective, ranks, size_bytes, median)
    return {
        "topology": topology,
        "ranks": ranks,
        "collective": str(collective),
        "root": root,
        "method": method,
        "bytes": size_bytes,
        "time_us": median,
        "spread": max(times_us) - min(times_us),
        "runs": len(times_us),
        "algbw": algbw,
        "busbw": busbw,
        "share_of_optimum": None if optimum_us is None else optimum_us / median,
        "share_of_nominal": None if nominal_us is None else nominal_us / median,
        **more,
    }


def document(
    question: str,
    rows: Iterable[Row],
    *,
    keys: Sequence[str],
    measures: Mapping[str, Measure],
    units: Mapping[str, str] | None = None,
    packages: Sequence[str] = ("arborcast", "numpy"),
    code: Sequence[str] = SYNTHESIS,
    **more: Any,
) -> dict[str, Any]:
    """A results file as a value, with the circumstances of this process.

    Args:
        question: that the rows answer, for the reader.
        rows: in the order in which they are to be read.
        keys: the columns that tell rows apart.
        measures: the columns of figures.
        units: what figures mean, where their name does not say it.
        packages: whose versions matter.
        code: the folders of code that the figures depend on, see `bench.harness.provenance`.
        more: further entries, such as the rates that links delivered.

    Raises:
        ValueError: a row lacks a key, or two rows have the same keys.
    """
    listed = [dict(row) for row in rows]
    seen = set()
    for row in listed:
        missing = [key for key in keys if key not in row]
        if missing:
            raise ValueError(f"row {row}: lacks {', '.join(missing)}")
        identity = tuple(row[key] for key in keys)
        if identity in seen:
            raise ValueError(f"two rows of {dict(zip(keys, identity, strict=True))}")
        seen.add(identity)
    return {
        "question": question,
        **circumstances(*packages),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "code": provenance(code),
        "keys": list(keys),
        "measures": {name: asdict(measure) for name, measure in measures.items()},
        "units": dict(units or {}),
        **more,
        "rows": listed,
    }


def write_document(path: Path, found: Mapping[str, Any]) -> None:
    """Replace a results file, whole or not at all; a line for each row.

    Raises:
        InputError: it cannot be written.
    """
    rest = {key: value for key, value in found.items() if key != "rows"}
    try:
        head = json.dumps(rest, indent=1, allow_nan=False).removesuffix("\n}")
        rows = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in found["rows"])
    except ValueError as error:
        raise ValueError(f"{path}: a figure is not finite") from error
    write_atomically(path, f'{head},\n "rows": [\n{rows}\n ]\n}}\n')


def read_document(path: Path) -> dict[str, Any]:
    """A results file.

    Raises:
        InputError: no such file, not JSON, or without question and rows.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path}: must be a results file in JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list) or "question" not in found:
        raise InputError(f"{path}: must be a results file, an object with question and rows")
    for number, row in enumerate(found["rows"]):
        if not isinstance(row, dict):
            raise InputError(f"{path}: rows[{number}]: must be an object, got {type(row).__name__}")
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError(f"{path}: rows[{number}].{name}: must be finite, got {value}")
    return found
