"""The sections of large fabrics: promises, growth, TACOS beside it, heights, what a schedule costs to use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from arborcast.bench.page.cells import (
    Column,
    all_rows,
    counts,
    durations,
    numbers,
    seconds_of,
    shares,
    table_of,
    words,
)
from arborcast.bench.page.parts import Cell, Part, Picture, Section, Strong, Table, grid, missing, text
from arborcast.bench.page.results import Document, Row, figure, grouped, word
from arborcast.bench.page.svg import Line, line_chart, unit_time
from arborcast.bench.page.targets import tally
from arborcast.bench.page.words import DASH, count, digits, percent, plural, seconds, times

COMMAND = "python bench/scale.py --only "


def _only(name: str, title: str, part: str) -> Section:
    return missing(name, title, COMMAND + part)


# ------------------------------------------------------------------------------------------------ promises

PROMISES = "scale", "How large may a fabric be?"


def targets(document: Document | None) -> Section:
    """What was promised of large fabrics, and what was found."""
    if document is None:
        return _only(*PROMISES, "targets")
    parts: list[Part] = [
        text(
            "Load, solve and verify in one process on one core, kernels compiled before. Symmetric: solved "
            "by orbits, kept as representatives and translations; verified on the representatives, or "
            "translate by translate. Written out: no use of symmetry. Repair: from the symmetric schedule "
            "of the fabric before the fault, and promised without verification. Partly symmetric: the same "
            "with the making of that schedule.",
            tone="quiet",
        ),
        *_kept(document),
        table_of_targets(document),
        all_rows(_TARGET_COLUMNS, document.rows),
    ]
    return Section(*PROMISES, "measured", tuple(parts), (document,))


def _kept(document: Document) -> list[Part]:
    promised = tally(document)
    if not promised.all:
        return []
    optimal = sum(row.get("optimal") is True for row in document.rows)
    return [
        text(
            Strong(promised.words),
            f"; {optimal} of {plural(len(document.rows), 'schedule')} equal to the proven bound.",
            tone="bad" if promised.met < promised.all else "",
        )
    ]


def table_of_targets(document: Document) -> Table:
    """A line per question."""
    return table_of(
        {
            "fabric": words("title", "topology"),
            "collective": words("collective"),
            "method": words("method"),
            ">ranks": counts("ranks"),
            ">time": _time,
            ">promised": seconds_of("target_seconds"),
            ">memory": _memory,
            ">of the bound": shares("share_of_bound"),
            ">height": counts("height"),
        },
        document.rows,
    )


def _time(row: Row) -> Cell:
    missed = row.get("kept") is False
    said = ("over " if row.get("timed_out") is True else "") + seconds(figure(row, "seconds"))
    return Cell(said + (" (missed)" if missed else ""), figure(row, "seconds"), "bad" if missed else "ours")


def _memory(row: Row) -> Cell:
    megabytes = figure(row, "peak_MB")
    return Cell(DASH if megabytes is None else f"{digits(megabytes / 1e3, 2)} GB", megabytes)


_TARGET_COLUMNS: dict[str, Column] = {
    "fabric": words("topology"),
    "faults": words("faults"),
    "collective": words("collective"),
    "method": words("method"),
    "verified": words("verified"),
    ">load": seconds_of("load_seconds"),
    ">solve": seconds_of("solve_seconds"),
    ">verify": seconds_of("verify_seconds"),
    ">runs": counts("runs"),
    ">chunks": counts("chunks"),
    ">transfers": counts("transfers"),
    ">steps": counts("steps"),
}


# -------------------------------------------------------------------------------------------------- growth

GROWTH = "growth", "How do time and memory grow with the ranks?"


def growth(document: Document | None) -> Section:
    """Time and memory against ranks, both axes logarithmic, with the exponent of each family."""
    if document is None:
        return _only(*GROWTH, "growth")
    families = grouped(document.rows, lambda row: word(row, "family"))
    parts: list[Part] = [
        text(
            "Load, solve and verify; both axes logarithmic. The exponent is the slope from 64 ranks on, by "
            "least squares: 1 would be as many times as long as there are more ranks. A tree has as many "
            "edges as ranks, and there is one for each rank: written out, a schedule itself grows by 2.",
            tone="quiet",
        ),
        grid(
            [
                [_over_ranks(families, "seconds", "Time", unit_time)],
                [_over_ranks(families, "peak_MB", "Memory", _megabytes)],
            ]
        ),
        table_of_growth(document),
        all_rows(_GROWTH_COLUMNS, document.rows),
    ]
    return Section(*GROWTH, "measured", tuple(parts), (document,))


def _megabytes(value: float) -> str:
    return f"{digits(value / 1e3, 1)} GB" if value >= 1e3 else f"{digits(value, 1)} MB"


def _over_ranks(
    families: Mapping[str, Sequence[Row]], column: str, title: str, value_name: Callable[[float], str]
) -> Picture:
    lines = []
    for family, rows in families.items():
        found = [
            (ranks, value)
            for row in rows
            if (ranks := figure(row, "ranks")) and (value := figure(row, column)) and not row.get("timed_out")
        ]
        is_symmetric = "symmetric" in family
        label = family.removesuffix(", symmetric")
        if found:
            lines.append(Line(label, tuple(found), "ours" if is_symmetric else "base", not is_symmetric))
    drawn = line_chart(
        lines,
        equal=None,
        size_name=count,
        value_name=value_name,
        description=f"{title} over the ranks",
    )
    return Picture(drawn, title, "Blue: by orbits. Dashed: written out.")


def table_of_growth(document: Document) -> Table:
    """A line per family: the ends of its curves, and its exponents."""
    said = document.get("exponents")
    exponents = said if isinstance(said, Mapping) else {}
    lines = []
    for family, rows in grouped(document.rows, lambda row: word(row, "family")).items():
        first, last = rows[0], rows[-1]
        slopes = exponents.get(family, {})
        lines.append(
            (
                Cell(family),
                Cell(f"{count(figure(first, 'ranks'))} to {count(figure(last, 'ranks'))}"),
                Cell(f"{seconds(figure(first, 'seconds'))} to {seconds(figure(last, 'seconds'))}"),
                Cell(digits(slopes.get("seconds"), 2), slopes.get("seconds"), "ours"),
                _memory(last),
                Cell(digits(slopes.get("peak_MB"), 2), slopes.get("peak_MB")),
            )
        )
    head = ("fabrics and method", ">ranks", ">time", ">its exponent", ">memory at the largest")
    return Table((*head, ">its exponent"), tuple(lines))


_GROWTH_COLUMNS: dict[str, Column] = {
    "fabric": words("topology"),
    "collective": words("collective"),
    "method": words("method"),
    ">ranks": counts("ranks"),
    ">load": seconds_of("load_seconds"),
    ">solve": seconds_of("solve_seconds"),
    ">verify": seconds_of("verify_seconds"),
    ">memory": _memory,
    ">of the bound": shares("share_of_bound"),
    ">height": counts("height"),
}


# ---------------------------------------------------------------------------------------------------- uses

USES = "uses", "What does a large schedule cost whoever uses it?"


def uses(document: Document | None) -> Section:
    """Files, programs and simulations from the implicit form."""
    if document is None:
        return _only(*USES, "uses")
    parts: list[Part] = [
        text(
            "From the implicit form: a file of representatives, one rank's program made without the "
            "whole schedule, and a simulated run of 64 MiB. Beside it, up to 1,024 ranks, the same program "
            "from the schedule written out.",
            tone="quiet",
        ),
        table_of_uses(document),
    ]
    return Section(*USES, "measured", tuple(parts), (document,))


def table_of_uses(document: Document) -> Table:
    """A line per schedule."""
    return table_of(
        {
            "fabric": words("topology"),
            "collective": words("collective"),
            ">ranks": counts("ranks"),
            ">transfers": counts("transfers"),
            ">file": _file,
            ">read": seconds_of("read_seconds"),
            ">a rank's program": seconds_of("program_seconds", tone="ours"),
            ">its memory": lambda row: Cell(
                f"{digits(figure(row, 'program_MB'), 2)} MB", figure(row, "program_MB")
            ),
            ">written out first": _written_out,
            ">simulated in": seconds_of("simulate_seconds", tone="ours"),
            ">simulated time": durations("simulated_us"),
        },
        document.rows,
    )


def _file(row: Row) -> Cell:
    size_bytes = figure(row, "file_bytes")
    return Cell(DASH if size_bytes is None else f"{count(size_bytes / 1e3)} kB", size_bytes)


def _written_out(row: Row) -> Cell:
    """What writing out and lowering from there take together."""
    made, lowered = figure(row, "written_out_seconds"), figure(row, "written_out_program_seconds")
    if made is None or lowered is None:
        return Cell(DASH)
    return Cell(seconds(made + lowered), made + lowered, "base")


# ------------------------------------------------------------------------------------------------- heights

HEIGHTS = "heights", "What do few and low trees give up?"


def heights(document: Document | None) -> Section:
    """Height and number of trees against rate."""
    if document is None:
        return _only(*HEIGHTS, "heights")
    parts: list[Part] = [
        text(
            "Schedules none of which is lower, of fewer trees and faster than another. Small messages want "
            "low trees, large ones the full rate; the choice by size takes the fastest in simulation.",
            tone="quiet",
        ),
        table_of_heights(document),
        all_rows(_HEIGHT_COLUMNS, document.rows),
    ]
    return Section(*HEIGHTS, "simulated", tuple(parts), (document,))


def table_of_heights(document: Document) -> Table:
    """A line per fabric and collective: the ends of the frontier."""
    lines = []
    for (spec, kind), rows in grouped(
        document.rows, lambda row: (word(row, "topology"), word(row, "collective"))
    ).items():
        low = min(rows, key=lambda row: (figure(row, "height") or 0, figure(row, "trees") or 0))
        fast = max(rows, key=lambda row: (figure(row, "share_of_bound") or 0, -(figure(row, "height") or 0)))
        small = [figure(row, "time_us_64KiB") or 0.0 for row in (fast, low)]
        lines.append(
            (
                Cell(spec),
                Cell(kind),
                Cell(count(len(rows)), len(rows)),
                *(_point(row) for row in (low, fast)),
                Cell(
                    times(small[0] / small[1]) if small[1] else DASH,
                    small[0] / small[1] if small[1] else None,
                ),
            )
        )
    head = ("fabric", "collective", ">points", "lowest, then fewest", "fastest", ">lowest at 64 KiB, as fast")
    return Table(head, tuple(lines))


def _point(row: Row) -> Cell:
    trees = figure(row, "trees")
    return Cell(
        f"height {count(figure(row, 'height'))}, {digits(trees, 2)} trees a root, "
        f"{percent(figure(row, 'share_of_bound'))}",
        figure(row, "height"),
    )


_HEIGHT_COLUMNS: dict[str, Column] = {
    "fabric": words("topology"),
    "collective": words("collective"),
    ">height": counts("height"),
    ">trees a root": numbers("trees"),
    ">of the bound": shares("share_of_bound"),
    ">64 KiB": durations("time_us_64KiB"),
    ">64 MiB": durations("time_us_64MiB"),
}


# --------------------------------------------------------------------------------------------------- tacos

TACOS = "tacos", "Is the allgather of large tori found faster than by TACOS?"


def tacos(document: Document | None) -> Section:
    """TACOS and ours on the same tori."""
    if document is None:
        return _only(*TACOS, "tacos --tacos PATH")
    parts: list[Part] = [
        text("In turns on one core; every schedule is verified by the same checker.", tone="quiet"),
        table_of_tacos(document),
    ]
    return Section(*TACOS, "measured", tuple(parts), (document,))


def table_of_tacos(document: Document) -> Table:
    """A line per torus and contender."""
    return table_of(
        {
            "fabric": words("topology"),
            "by": lambda row: Cell(word(row, "method"), tone="ours" if row.get("method") == "ours" else ""),
            ">synthesis": seconds_of("call_seconds"),
            ">of the bound": shares("share_of_bound"),
            ">whole process": seconds_of("seconds"),
            ">runs": counts("runs"),
        },
        document.rows,
    )
