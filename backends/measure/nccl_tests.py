"""A schedule measured and shown as nccl-tests does it: same options, same timing, same columns.

A time is that of `iterations` calls one after the other between two barriers, divided by their number and
averaged over the ranks (nccl-tests' default, `-a 1`). Then one more call on fresh data is compared element by
element. Two things differ, and the header says so: a collective is shown in the one half, in place or out of
place, that it is run in; and the calls that do not count are made for every size, since each has a plan of
its own. This side never imports torch; `backends.measure.sweep` is the part of each rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from arborcast.backends.lowering.layout import IN_PLACE_KINDS
from arborcast.backends.lowering.rank_view import refuse_switches
from arborcast.backends.measure.job import (
    AVERAGES,
    ITEM_BYTES,
    RUNTIMES,
    Reduction,
    Row,
    Sweep,
    count_as_nccl_tests,
)
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.implicit_schedule import AnySchedule

NCCL_TYPES = {"float32": "float", "float64": "double"}
"""What nccl-tests calls a type, where that is not our name of it."""

MOST_SIZES = 10_000
_OUR_TYPES = {nccl: ours for ours, nccl in NCCL_TYPES.items()}
_OUR_OPERATORS = {"prod": "product"}


def sizes_between(first: int, last: int, *, factor: int = 2, step: int | None = None) -> tuple[int, ...]:
    """The sizes of a sweep: `-b first -e last` with `-f factor`, or with `-i step` where that is given.

    Args:
        first: bytes, at least 1.
        last: bytes; the largest size is the last one that is not above it.
        factor: from one size to the next, at least 2; ignored where there is a step.
        step: bytes from one size to the next, at least 1.

    Raises:
        InputError: a rule is broken, or there would be over `MOST_SIZES`.
    """
    if first < 1:
        raise InputError(f"minbytes {first}: must be at least 1")
    if last < first:
        raise InputError(f"maxbytes {last}: must not be below minbytes, got {first}")
    if step is not None:
        if step < 1:
            raise InputError(f"stepbytes {step}: must be at least 1")
        sizes = range(first, last + 1, step)
        if len(sizes) > MOST_SIZES:
            raise InputError(f"stepbytes {step}: must give at most {MOST_SIZES} sizes, got {len(sizes)}")
        return tuple(sizes)
    if factor < 2:
        raise InputError(f"stepfactor {factor}: must be at least 2")
    grown = [first]
    while grown[-1] * factor <= last:
        grown.append(grown[-1] * factor)
    return tuple(grown)


def sweep_of(
    schedule: AnySchedule,
    sizes: Sequence[int],
    *,
    dtype: str = "float32",
    op: str = "sum",
    iterations: int = 20,
    warmup: int = 5,
    check: bool = True,
    average: str = "average",
    via: str = "group",
    seed: int = 0,
    pieces: int | None = None,
    count: Callable[[AnySchedule, int, str], int] = count_as_nccl_tests,
) -> Sweep:
    """What ranks are asked to do.

    Args:
        schedule: a correct one.
        sizes: bytes of the whole buffer, as algbw counts it; rounded as `count` does.
        dtype: float32, float64, bfloat16 or int64, or nccl-tests' float and double.
        op: sum, avg, min, max or product (prod); ignored where nothing is reduced.
        iterations: calls that count, of each size.
        warmup: calls before those; there is always one.
        check: whether to compare a call of each size.
        average: "rank 0", "average", "min" or "max" of the ranks' times; nccl-tests' `-a` 0 to 3.
        via: "group", the engine of the process group "synth", or "messages", torch's own.
        seed: of the data.
        pieces: into how many each chunk is cut by "messages"; by size where None.
        count: elements of the whole buffer for a schedule, bytes and a type.

    Raises:
        InputError: what there is not, or does not go together.
    """
    dtype = _OUR_TYPES.get(dtype, dtype)
    if dtype not in ITEM_BYTES:
        raise InputError(f"datatype {dtype}: must be one of {', '.join([*ITEM_BYTES, *_OUR_TYPES])}")
    if iterations < 1:
        raise InputError(f"iters {iterations}: must be at least 1")
    if warmup < 0:
        raise InputError(f"warmup iters {warmup}: must be at least 0")
    if via not in RUNTIMES:
        raise InputError(f"via {via}: must be one of {', '.join(RUNTIMES)}")
    if average not in AVERAGES:
        raise InputError(f"average {average}: must be one of {', '.join(AVERAGES)}")
    if not sizes or min(sizes) < 0:
        raise InputError(f"sizes: must be at least one and none below 0, got {list(sizes)}")
    reduction = Reduction.of(_OUR_OPERATORS.get(op, op))
    if pieces is not None and pieces < 1:
        raise InputError(f"pieces: must be at least 1, got {pieces}")
    refuse_switches(schedule, "run")
    counts = tuple(count(schedule, size, dtype) for size in sizes)
    return Sweep(
        schedule,
        tuple(sizes),
        counts,
        dtype,
        reduction,
        iterations,
        warmup,
        check,
        average,
        via,
        seed,
        pieces,
    )


# --------------------------------------------------------------------------------------- what is shown


def _titles(*words: str) -> str:
    size, count, kind, redop, root, time, algbw, busbw, wrong = words
    line = f"# {size:>10}  {count:>12}  {kind:>8}  {redop:>6}  {root:>6}  {time:>7}  {algbw:>6}  {busbw:>6}"
    return f"{line} {wrong:>6}".rstrip()


TITLES = (
    _titles("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"),
    _titles("(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", ""),
)
"""Of the columns of `row_line`."""


def header_lines(sweep: Sweep, *, where: str = "local processes") -> list[str]:
    """The comment lines and titles above the rows.

    Args:
        sweep: what is measured.
        where: on what, for the reader.
    """
    schedule, sizes = sweep.schedule, sweep.asked_bytes
    collective = schedule.collective
    half = "in-place" if runs_in_place(collective.kind) else "out-of-place"
    runtime = {"group": "process group synth", "messages": "torch's point-to-point messages"}[sweep.via]
    return [
        f"# {collective.kind} by {schedule.method.name} on {schedule.topology.name}, "
        f"{len(collective.ranks)} ranks of {schedule.topology.ranks}, by {runtime}, on {where}",
        f"# minBytes {sizes[0]} maxBytes {sizes[-1]} step: {_growth(sizes)} warmup iters: {sweep.warmup} "
        f"iters: {sweep.iterations} agg iters: 1 validation: {int(sweep.check)} graph: 0",
        f"# time: mean of a rank's calls back to back; of the ranks: {sweep.average}"
        f"{' (as nccl-tests by default)' if sweep.average == 'average' else ''}",
        f"# {half} only: this runtime has no other half of {collective.kind}; warm-up before every size",
        "#",
        f"# {half:>72}",
        *TITLES,
    ]


def runs_in_place(kind: Kind) -> bool:
    """Whether what a call gives and gets is one buffer, at the root for a reduce."""
    return kind in IN_PLACE_KINDS or kind is Kind.REDUCE


def row_line(row: Row) -> str:
    """A row in the columns of nccl-tests."""
    kind = NCCL_TYPES.get(row.dtype, row.dtype)
    wrong = "N/A" if row.wrong is None else str(row.wrong)
    return (
        f"{row.bytes:12d}  {row.count:12d}  {kind:>8}  {row.redop:>6}  {row.root:6d}  "
        f"{_time(row.time_us):>7}  {row.algbw:6.2f}  {row.busbw:6.2f}  {wrong:>5}"
    )


def footer_lines(rows: Iterable[Row]) -> list[str]:
    """What stands below the rows: sizes with wrong elements, and the mean of all bus bandwidths."""
    listed = list(rows)
    bad = sum(bool(row.wrong) for row in listed)
    is_checked = any(row.wrong is not None for row in listed)
    verdict = f"{bad} {'FAILED' if bad else 'OK'}" if is_checked else "N/A (not checked)"
    mean = statistics.fmean(row.busbw for row in listed) if listed else 0.0
    return [f"# Out of bounds values : {verdict}", f"# Avg bus bandwidth    : {mean:g}", "#"]


def result_rows(sweep: Sweep, rows: Iterable[Row], *, on_fabric: bool = False) -> list[dict[str, Any]]:
    """Rows of a results file, one for each tuple of independent variables (`RESULT_KEYS`).

    Args:
        sweep: what was asked.
        rows: what was found.
        on_fabric: whether the processes ran on the topology that the schedule is for. Then its bound, at
            nominal rates, is what the rate is a share of.
    """
    schedule = sweep.schedule
    limit = float(schedule.bound.rate)
    return [
        {
            "topology": schedule.topology.name,
            "ranks": len(schedule.collective.ranks),
            "collective": str(schedule.collective.kind),
            "method": schedule.method.name,
            "via": sweep.via,
            "average": sweep.average,
            "in_place": runs_in_place(schedule.collective.kind),
            **row.to_document(),
            "root": schedule.collective.root,
            "share_of_optimum": None,
            "share_of_nominal": row.algbw / limit if on_fabric and limit else None,
        }
        for row in rows
    ]


RESULT_KEYS = (
    "topology",
    "ranks",
    "collective",
    "root",
    "method",
    "via",
    "average",
    "dtype",
    "redop",
    "asked_bytes",
)
"""The independent variables of `result_rows`."""


def _growth(sizes: Sequence[int]) -> str:
    """How sizes follow each other, as nccl-tests says it."""
    if len(sizes) < 2:
        return "none"
    first, second = sizes[:2]
    if (
        first
        and second % first == 0
        and all(after * first == before * second for before, after in pairwise(sizes))
    ):
        return f"{second // first}(factor)"
    return f"{second - first}(bytes)"


def _time(time_us: float) -> str:
    if time_us >= 10_000:
        return f"{time_us:.0f}"
    return f"{time_us:.1f}" if time_us >= 100 else f"{time_us:.2f}"
