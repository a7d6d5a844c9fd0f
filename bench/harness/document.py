"""Results files of benches: rows of what was timed, and a file written and read.

What a file holds is said in `synth/formats/results.py`; `standing.py` says what one is worth today.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arborcast.synth.collective import Kind, bandwidths
from arborcast.synth.errors import InputError
from arborcast.synth.formats.atomic import write_atomically
from arborcast.synth.formats.results import SYNTHESIS

RUNTIME = (*SYNTHESIS, "backends")
"""Folders of code that the process group depends on."""

TRAINING = (*RUNTIME, "pipeline")
"""What the trainer and its planner depend on."""


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
