"""Large fabrics: promises, growth, heights, what a schedule costs to use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from arborcast.bench.page.charts import Line, LineChart
from arborcast.bench.page.parts import (
    Cell,
    Column,
    Part,
    Picture,
    Section,
    Strong,
    Table,
    all_rows,
    cell,
    column,
    columns,
    grid,
    in_gigabytes,
    lines,
    missed,
    table,
    text,
)
from arborcast.bench.page.results import Document, Row, groups, number, records
from arborcast.bench.page.targets import tally
from arborcast.bench.page.words import (
    DASH,
    count,
    digits,
    percent,
    plural,
    scaled,
    seconds,
    times,
    two_digits,
    unit_time,
)

COMMAND = "python bench/scale.py --only "

# ------------------------------------------------------------------------------------------------ promises


def _targets(document: Document) -> Iterator[Part]:
    promised = tally(document)
    if promised.all:
        optimal = sum(document.rows["optimal"].eq(True))
        yield text(
            Strong(promised.words),
            f"; {optimal} of {plural(len(document.rows), 'schedule')} equal to the proven bound.",
            tone="bad" if promised.met < promised.all else "",
        )
    yield targets_table(document)
    yield all_rows(_TARGETS, document.rows)


def targets_table(document: Document) -> Table:
    """A line per question."""
    return table(
        {
            **columns("fabric: title | collective | method | >ranks"),
            ">CPU time": lambda row: missed(
                _over if row.timed_out else seconds, row.seconds, row.kept is False
            ),
            **columns(
                ">promised: target_seconds | >memory: peak_MB | >of the bound: share_of_bound | >height"
            ),
        },
        document.rows,
    )


def _over(value: float) -> str:
    return f"over {seconds(value)}"


_TARGETS = columns(
    "fabric: topology | faults | collective | method | verified | >load: load_seconds | "
    ">solve: solve_seconds | >verify: verify_seconds | >runs | >chunks | >transfers | >steps"
)

# -------------------------------------------------------------------------------------------------- growth


def _growth(document: Document) -> Iterator[Part]:
    """Time and memory against ranks, both axes logarithmic, with the exponent of each family."""
    yield from _growth_headline(document)
    yield grid([[_over_ranks(document, "seconds", "Time")], [_over_ranks(document, "peak_MB", "Memory")]])
    yield growth_table(document)
    yield all_rows(_GROWTH, document.rows)


def _growth_headline(document: Document) -> Iterator[Part]:
    symmetric = document.rows[document.rows["family"].str.contains("symmetric")]
    found = symmetric[symmetric["seconds"].notna() & symmetric["timed_out"].ne(True)]
    if len(found):
        row = records(found.sort_values(["ranks", "seconds"], kind="stable"))[-1]
        yield text(
            "By orbits the largest fabric, ",
            Strong(f"{plural(row.ranks, 'rank')} ({row.topology})"),
            ", is loaded, solved and verified in ",
            Strong(seconds(row.seconds)),
            f" and {in_gigabytes(row.peak_MB)}.",
        )


def _megabytes(value: float) -> str:
    return f"{digits(value / 1e3, 1)} GB" if value >= 1e3 else f"{digits(value, 1)} MB"


def _over_ranks(document: Document, name: str, title: str) -> Picture:
    drawn = []
    for family, rows in groups(document.rows[document.rows["timed_out"].ne(True)], "family"):
        found = rows[["ranks", name]].dropna()
        is_symmetric = "symmetric" in family
        points = tuple(found.itertuples(index=False, name=None))
        label = family.removesuffix(", symmetric")
        drawn.append(Line(label, points, "ours" if is_symmetric else "base", not is_symmetric))
    upright = unit_time if name == "seconds" else _megabytes
    chart = LineChart(f"{title} over the ranks", tuple(drawn), None, across=count, upright=upright)
    return Picture(chart, title, "Blue: by orbits. Dashed: written out.")


def growth_table(document: Document) -> Table:
    """A line per family: the ends of its curves, and its exponents."""
    said = document.get("exponents")
    rows = []
    for family, alike in groups(document.rows, "family"):
        first, *_, last = records(alike.iloc[[0, -1]])
        slopes = said.get(family, {}) if isinstance(said, Mapping) else {}
        rows.append(
            (
                family,
                f"{count(first.ranks)} to {count(last.ranks)}",
                f"{seconds(first.seconds)} to {seconds(last.seconds)}",
                cell(two_digits, number(slopes.get("seconds")), "ours"),
                cell(in_gigabytes, last.peak_MB),
                cell(two_digits, number(slopes.get("peak_MB"))),
            )
        )
    head = ("fabrics and method", ">ranks", ">time", ">its exponent", ">memory at the largest")
    return lines((*head, ">its exponent"), rows)


_GROWTH = columns(
    "fabric: topology | collective | method | >ranks | >load: load_seconds | >solve: solve_seconds | "
    ">verify: verify_seconds | >memory: peak_MB | >of the bound: share_of_bound | >height"
)

# -------------------------------------------------------------------------------------------- uses, heights


def _uses(document: Document) -> Iterator[Part]:
    rows = document.rows[document.rows["program_seconds"].notna()]
    if len(rows):
        row = records(rows.sort_values("ranks", kind="stable"))[-1]
        yield text(
            f"One rank's program of {plural(row.ranks, 'rank')} ({row.topology}) takes ",
            Strong(seconds(row.program_seconds)),
            f", and the schedule's file has {_kilobytes(row.file_bytes)}.",
        )
    yield uses_table(document)


def uses_table(document: Document) -> Table:
    """A line per schedule; written out first: what writing out and lowering from there take together."""
    return table(
        {
            **columns("fabric: topology | collective | >ranks | >transfers"),
            ">file": column("file_bytes", unit=_kilobytes),
            **columns(">read: read_seconds"),
            ">a rank's program": column("program_seconds", "ours"),
            ">its memory": column("program_MB", unit=scaled("MB", 1, 2)),
            ">written out first": lambda row: cell(
                seconds, row.written_out_seconds + row.written_out_program_seconds, "base"
            ),
            ">simulated in": column("simulate_seconds", "ours"),
            **columns(">simulated time: simulated_us"),
        },
        document.rows,
    )


def _kilobytes(size_bytes: float) -> str:
    return f"{count(size_bytes / 1e3)} kB" if size_bytes >= 0 else DASH


def _heights(document: Document) -> Iterator[Part]:
    rows, ratios = [], []
    for (fabric, collective), alike in groups(document.rows, "topology", "collective"):
        low = records(alike.sort_values(["height", "trees"], kind="stable"))[0]
        by_rate = alike.sort_values(["share_of_bound", "height"], ascending=[False, True], kind="stable")
        fast = records(by_rate)[0]
        ratio = fast.time_us_64KiB / low.time_us_64KiB
        ratios.append((ratio, percent(low.share_of_bound), f"{fabric}, {collective}"))
        points = cell(count, len(alike))
        rows.append((fabric, collective, points, _point(low), _point(fast), cell(times, ratio)))
    known = [each for each in ratios if each[0] > 0]
    if known:
        most, share, where = max(known)
        yield text(
            "At 64 KiB the lowest trees are up to ",
            Strong(times(most)),
            f" as fast as those with the full rate ({where}), and keep {share} of that rate.",
        )
    head = ("fabric", "collective", ">points", "lowest, then fewest", "fastest", ">lowest at 64 KiB, as fast")
    yield lines(head, rows)
    yield all_rows(_HEIGHTS, document.rows)


def _point(row: Row) -> Cell:
    told = f"height {count(row.height)}, {two_digits(row.trees)} trees a root, {percent(row.share_of_bound)}"
    return Cell(told, row.height)


_HEIGHTS: dict[str, Column] = {
    **columns("fabric: topology | collective | >height"),
    ">trees a root": column("trees", unit=digits),
    **columns(">of the bound: share_of_bound | >64 KiB: time_us_64KiB | >64 MiB: time_us_64MiB"),
}


SECTIONS = (
    Section(
        "scale_targets",
        "scale",
        "How large may a fabric be?",
        "measured",
        COMMAND + "targets",
        "CPU time to load, solve and verify in one process, kernels compiled before. Symmetric: solved "
        "by orbits, kept as representatives and translations; verified on the representatives, or "
        "translate by translate. Written out: no use of symmetry. Repair: from the symmetric schedule "
        "of the fabric before the fault, and promised without verification. Partly symmetric: the same "
        "with the making of that schedule.",
        _targets,
        ("Large fabrics: CPU time to load, solve and verify", targets_table),
    ),
    Section(
        "scale_growth",
        "growth",
        "How do time and memory grow with the ranks?",
        "measured",
        COMMAND + "growth",
        "Load, solve and verify; both axes logarithmic. The exponent is the slope from 64 ranks on, by "
        "least squares: 1 would be as many times as long as there are more ranks. A tree has as many "
        "edges as ranks, and there is one for each rank: written out, a schedule itself grows by 2.",
        _growth,
        ("Growth over the ranks", growth_table),
    ),
    Section(
        "scale_heights",
        "heights",
        "What do few and low trees give up?",
        "simulated",
        COMMAND + "heights",
        "Schedules none of which is lower, of fewer trees and faster than another. Small messages want "
        "low trees, large ones the full rate; the choice by size takes the fastest in simulation.",
        _heights,
    ),
    Section(
        "scale_uses",
        "uses",
        "What does a large schedule cost whoever uses it?",
        "measured",
        COMMAND + "uses",
        "From the implicit form: a file of representatives, one rank's program made without the "
        "whole schedule, and a simulated run of 64 MiB. Beside it, up to 1,024 ranks, the same program "
        "from the schedule written out.",
        _uses,
        ("What a large schedule costs whoever uses it", uses_table),
    ),
)
