"""The results that a report is made from: every file of a folder, its rows as a table of pandas.

A row may lack any column: what is no figure is NaN, and what is not told is a dash, so that a table shows
dashes there and no section asks first.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from arborcast.bench.harness.document import read_document
from arborcast.bench.harness.standing import Standing
from arborcast.bench.page.words import DASH
from arborcast.synth.errors import InputError

Row: TypeAlias = Any
"""A row as `records` gives it: a column is an attribute."""

TEXT = tuple(
    """
    backend best_other box case claim collective collectives configuration experiment family fault faults
    file gpus how judge layout main_thread measure mesh method model mutation network on order part pattern
    proof reason result runtime same_plan schedule scope served_by service solver sweep testbed title
    topology transport verdict verified way what why why_not why_stopped
    """.split()  # noqa: SIM905 - names read better without quotes
)
FIGURES = tuple(
    """
    activations_bytes algbw allocations applied_ms asked batch best best_of_all best_of_all_speed_up
    best_of_named best_of_named_speed_up bound_us boundary_bytes bubble buffer_bytes buffers burst_share
    busbw bytes call_seconds call_times_ours calls chunks collectives_us computing_us copies_over_link
    cpu_ms cpu_saving cpu_seconds cpu_us data_parallel_us descriptors devices difference each_bytes each_us
    epoch_passes epochs_to_target equation_error equation_us equivalent error evaluation_difference
    evaluation_loss explicit_bytes failed failures file_bytes first_loss first_ms first_seconds floor_us
    fragments gain gap gradient_bytes gradient_difference gradients_bytes group hangs height hung inside_us
    joined last_loss latency_us layers learning_rate least_us left_over left_ranks legal_cuts limit_bytes
    limit_gib limit_s live_bytes load_seconds loss loss_difference mbit measured median_s memory_bytes
    microbatches
    missed nic_gbit optimizer_bytes optimum ordering_ms ours_over_bound ours_us over_bound
    over_fault_free_ring over_nccl over_nccl_mean over_nccl_most over_nccl_relays over_nccl_relays_mean
    over_nccl_relays_most over_ring paper_microbatches paper_speed_up parameters parameters_bytes parts
    passed passes_to_target peak_MB pieces planned_us planning_ms predicted_bubble predicted_bytes
    predicted_us program_MB program_seconds raised_in_time ranks rate rate_kept ratio read_seconds rejected
    rejected_never_wrong resident_bytes ring_over_fault_free_ring rounds runs samples_each
    samples_per_second seconds
    share_of_bound share_of_least share_of_limit share_of_nominal share_of_optimum simulate_seconds
    simulated_engine_us simulated_fifo_us simulated_priority_us simulated_us skipped slowest_s solve_seconds
    speed_up speed_up_over_gloo speed_up_over_ring spread spread_s stage stages steps target target_ms
    target_s target_seconds tests theirs_us threads time_us time_us_64KiB time_us_64MiB
    time_us_with_nccl_overhead timeout_s times_faster_than_gloo times_gloo times_ours
    torch_samples_per_second torch_us trace_seconds
    transfers trees usual_ms verify_seconds weight_difference width working_bytes
    worst_engine_us worst_random_us written_out_program_seconds written_out_seconds wrong
    """.split()  # noqa: SIM905 - names read better without quotes
)
OTHERS = tuple(
    """
    accuracy behind calibrated cpu_limited fits fitted holds is_closed_form kept losses met optimal points
    proved recompute replicas symmetric timed_out treated wins
    """.split()  # noqa: SIM905 - names read better without quotes
)
"""Truth values and lists."""


@dataclass(frozen=True)
class Document:
    """A results file.

    Attributes:
        name: of the file, without its suffix.
        content: what it holds.
        standing: what speaks against it.
    """

    name: str
    content: Mapping[str, Any]
    standing: Standing = field(default_factory=Standing)

    @cached_property
    def rows(self) -> pd.DataFrame:
        """What was asked and found, in the order in which it is to be read."""
        return frame(self.content["rows"])

    def get(self, key: str) -> Any:
        """An entry beside the rows; None where there is none."""
        return self.content.get(key)


def frame(rows: Any) -> pd.DataFrame:
    """Rows with every column that a report reads; anything but a list of objects has no rows."""
    listed = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    texts = _block(TEXT, [[_text(row.get(name)) for name in TEXT] for row in listed])
    texts["title"] = texts["title"].where(texts["title"] != DASH, texts["topology"])
    texts["case"] = texts["title"] + ", " + texts["collective"]
    figures = _block(FIGURES, [[number(row.get(name)) for name in FIGURES] for row in listed], float)
    others = _block(OTHERS, [[row.get(name) for name in OTHERS] for row in listed])
    return pd.concat([texts, figures, others], axis=1)


def _block(names: Sequence[str], rows: Sequence[Sequence[Any]], kind: type = object) -> pd.DataFrame:
    """Columns in one array: of some 300 each in its own, what is asked of a table takes ten times as long."""
    cells: np.ndarray[tuple[int, int], Any] = np.empty((len(rows), len(names)), dtype=kind)
    for at, row in enumerate(rows):
        for column, value in enumerate(row):  # one by one: a list is a value, too
            cells[at, column] = value
    return pd.DataFrame(cells, columns=list(names))


def _text(value: Any) -> str:
    return DASH if value is None or value == "" else str(value)


def read_results(folder: Path) -> dict[str, Document]:
    """Every results file of a folder by its name.

    Raises:
        InputError: no such folder, or a file that is no results file.
    """
    if not folder.is_dir():
        raise InputError(f"results {folder}: must be a folder of results files")
    return {path.stem: Document(path.stem, read_document(path)) for path in sorted(folder.glob("*.json"))}


def number(value: Any) -> float:
    """A figure, which may be a fraction in text; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(Fraction(value)) if isinstance(value, str) else float(value)
    except (ValueError, ZeroDivisionError):
        return math.nan


def records(rows: pd.DataFrame) -> list[Row]:
    """The rows one by one."""
    return list(map(_type_of_rows(tuple(rows))._make, rows.to_numpy(dtype=object).tolist()))


@cache
def _type_of_rows(columns: tuple[str, ...]) -> Any:
    """Made by `itertuples` for every table anew, which takes longer than the table."""
    return namedtuple("Row", columns)


def groups(rows: pd.DataFrame, *names: str) -> list[tuple[Any, pd.DataFrame]]:
    """Rows that agree in columns, in the order in which they come; the key of one column is its value."""
    found = rows.groupby(list(names), sort=False, dropna=False)
    return [(key if len(names) > 1 else key[0], alike) for key, alike in found]


def first(rows: pd.DataFrame, **equal: str) -> Row:
    """The first row with these values; one of dashes where there is none."""
    for name, value in equal.items():
        rows = rows[rows[name] == value]
    return records(rows.iloc[:1])[0] if len(rows) else _nothing(tuple(rows))


@cache
def _nothing(columns: tuple[str, ...]) -> Row:
    return records(frame([{}]).reindex(columns=list(columns)))[0]


OURS = (
    "trees",
    "mwu",
    "chunks",
    "selection",
    "synth",
    "arborcast",
    "shared memory",
    "sockets",
    "as it comes",
    "pareto",
    "torch messages",
)
"""First words of the names of what this package makes."""


def is_ours(method: Any) -> bool:
    """Whether a method is one of this package's and not a baseline or a peer."""
    return str(method).lower().startswith(OURS)


def ours_among(rows: pd.DataFrame) -> pd.Series[bool]:
    """Which rows are of a method of this package's."""
    return rows["method"].map(is_ours).astype(bool)


def span(values: Iterable[float]) -> tuple[float, float]:
    """The least and the most, NaN of nothing."""
    known = pd.Series(list(values), dtype=float)
    return known.min(), known.max()
