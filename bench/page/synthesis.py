"""Time of synthesis: trees, whole frontiers, solvers, and the public synthesizers on the same questions."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from arborcast.bench.page.charts import DotChart, Dots
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
    in_gigabytes,
    lines,
    table,
    text,
)
from arborcast.bench.page.results import Document, Row, first, groups, is_ours, ours_among, records
from arborcast.bench.page.words import DASH, count, listed, percent, plural, seconds, times

# --------------------------------------------------------------------------------------------------- trees


def _machines(document: Document) -> list[tuple[str, Row, Row]]:
    """By ranks: the machine, the row of its bound and that of its trees."""
    rows = document.rows[document.rows["method"] != "whole process"]
    found = [(title, alike) for title, alike in groups(rows, "title")]
    found.sort(key=lambda pair: pair[1]["ranks"].fillna(0).iloc[0])
    return [(title, first(alike, method="bound"), first(alike, method="trees")) for title, alike in found]


def _trees(document: Document) -> Iterator[Part]:
    timed = [(title, trees) for title, _, trees in _machines(document) if trees.seconds > 0]
    if timed:
        title, slowest = max(timed, key=lambda each: float(each[1].seconds))
        yield text(
            "Trees that equal their bound are found in ",
            Strong(seconds(min(trees.seconds for _, trees in timed))),
            " to ",
            Strong(seconds(slowest.seconds)),
            f" ({title}, {plural(slowest.ranks, 'rank')}) on {plural(len(timed), 'machine')}.",
        )
    dots = [
        Dots(
            f"{title} ({count(trees.ranks)})",
            (("ours", trees.seconds),),
            f"{title}, {count(trees.ranks)} ranks: {seconds(trees.seconds)}",
        )
        for title, _, trees in _machines(document)
        if trees.seconds > 0
    ]
    if dots:
        chart = DotChart("time of synthesis", tuple(dots), "s", logarithmic=True, label_width=0.36)
        yield Picture(chart, "Time to find the trees", "Logarithmic.")
    yield trees_table(document)
    for row in records(document.rows[document.rows["method"] == "whole process"]):
        yield text(f"`{row.title}` answers in {seconds(row.seconds)} as a whole process.")


def trees_table(document: Document) -> Table:
    """A line per machine."""
    return lines(
        ("machine", ">ranks", ">trees", ">bound", ">trees found in", ">memory"),
        (
            (
                title,
                cell(count, trees.ranks),
                cell(count, trees.trees),
                cell(seconds, bound.seconds),
                cell(seconds, trees.seconds, "ours"),
                cell(in_gigabytes, trees.peak_MB),
            )
            for title, bound, trees in _machines(document)
        ),
    )


# ----------------------------------------------------------------------------------------------- frontiers


def frontiers_table(document: Document) -> Table:
    """A line per frontier."""
    shown: dict[str, Column] = {
        **columns("frontier: title"),
        "(C, S, R)": lambda row: Cell(_points(row)),
        "proved": lambda row: Cell(_proved(row)),
        ">call": column("call_seconds", "ours"),
        **columns(">CPU, whole process: cpu_seconds"),
    }
    return table(shown, document.rows[document.rows["method"] == "pareto"])


def _frontiers(document: Document) -> Iterator[Part]:
    rows = document.rows[(document.rows["method"] == "pareto") & document.rows["call_seconds"].notna()]
    if len(rows):
        whole = sum(isinstance(one, list) and all(one) for one in rows["proved"])
        slowest = records(rows.sort_values("call_seconds", kind="stable"))[-1]
        yield text(
            Strong(f"{whole} of {len(rows)}"),
            f" frontiers are proved in every point; the slowest takes {seconds(slowest.call_seconds)} "
            f"({slowest.title}).",
        )
    yield frontiers_table(document)


def _points(row: Row, most: int = 4) -> str:
    if not isinstance(row.points, list) or not row.points:
        return DASH
    if len(row.points) > most:
        return plural(len(row.points), "point")
    return " ".join(f"({','.join(map(str, point))})" for point in row.points if isinstance(point, list))


def _proved(row: Row) -> str:
    if not isinstance(row.proved, list):
        return DASH
    return "all" if all(row.proved) else f"{sum(map(bool, row.proved))} of {len(row.proved)}"


# ------------------------------------------------------------------------------------------------- solvers


def _solvers(document: Document) -> Iterator[Part]:
    rows = document.rows
    names = list(dict.fromkeys(rows["solver"]))
    instances = groups(rows, "title", "chunks", "steps", "rounds", "symmetric")
    won = rows[rows["wins"].eq(True)]["solver"].value_counts()
    fastest = sorted((name for name in names if name in won), key=lambda name: -won[name])
    told = listed([f"{name} is fastest on {won[name]}" for name in fastest])
    yield text(f"Of {plural(len(instances), 'line')} {told}.")
    drawn = []
    for (title, *point, symmetric), alike in instances:
        decided = alike[alike["verdict"] != "out of time"]
        row = first(decided if len(decided) else alike)
        group = count(row.group) if symmetric else "none"
        times_taken = (_solver(alike[alike["solver"] == name]) for name in names)
        drawn.append((title, f"({','.join(map(count, point))})", row.verdict, group, *times_taken))
    yield lines(("instance", "(C, S, R)", "answer", "symmetries", *(f">{name}" for name in names)), drawn)


def _solver(rows: pd.DataFrame) -> Cell:
    if not len(rows):
        return Cell("")
    row = first(rows)
    if row.verdict == "out of time":
        limit = row.limit_s if row.limit_s > 0 else row.seconds
        return Cell(f"over {seconds(limit)}", limit, "quiet")
    return cell(seconds, row.seconds, "ours" if row.wins else "")


# --------------------------------------------------------------------------------------------------- peers


def _peers(document: Document) -> Iterator[Part]:
    yield from _peers_headline(document)
    dots = []
    for question, rows in groups(document.rows[document.rows["share_of_optimum"].notna()], "case"):
        taken = rows.groupby(_contender(rows), sort=False)["seconds"].first().dropna()
        values = sorted(((is_ours(name), value) for name, value in taken.items()), key=lambda pair: pair[0])
        hint = "; ".join(f"{name} {seconds(value)}" for name, value in taken.items())
        if values:
            tones = tuple(("ours" if ours else "base", value) for ours, value in values)
            dots.append(Dots(question, tones, f"{question}: {hint}"))
    if dots:
        chart = DotChart("time to answer", tuple(dots), "s", logarithmic=True, label_width=0.42)
        note = "Whole processes, logarithmic. Blue: ours. Grey: each peer that answered."
        yield Picture(chart, "Time to answer", note)
    yield peers_table(document)
    yield all_rows(_PEERS, document.rows)


def _contender(rows: pd.DataFrame) -> pd.Series[str]:
    """Who answered, without which of its answers it is."""
    return rows["method"].map(lambda name: name.partition(" (")[0]).rename("contender")


def _peers_headline(document: Document) -> Iterator[Part]:
    rows = document.rows[~ours_among(document.rows)]
    told = []
    for name, alike in groups(rows.assign(contender=_contender(rows)), "contender"):
        ratios = alike["call_times_ours"].dropna()
        if len(ratios):
            told.append(f"{name} {times(ratios.median())} on {len(ratios)}")
    if told:
        yield text(
            "A call of others, as a multiple of ours, median of the questions both answer: ",
            Strong(listed(told)),
            ".",
        )
    else:
        names = sorted(set(_contender(document.rows)))
        yield text(f"{listed(names)} were asked {plural(document.rows['case'].nunique(), 'question')}.")


def peers_table(document: Document) -> Table:
    """A line per question, a column per contender: how long its best answer took, and how good it is."""
    rows = document.rows.assign(contender=_contender(document.rows))
    ranked = rows.sort_values("share_of_optimum", ascending=False, kind="stable")
    best = {(row.case, row.contender): row for row in records(ranked[::-1])}
    names = sorted(dict.fromkeys(rows["contender"]), key=lambda name: not is_ours(name))
    return lines(
        ("question", *names),
        (
            (question, *(_answer(best.get((question, name))) for name in names))
            for question in dict.fromkeys(rows["case"])
        ),
    )


def _answer(row: Row | None) -> Cell:
    if row is None:
        return Cell("")
    taken = row.seconds
    if not row.share_of_optimum >= 0:
        return Cell(f"{row.verdict}, {seconds(taken)}" if taken > 0 else row.verdict, taken, "quiet")
    said = [seconds(taken), f"{percent(row.share_of_optimum)} of the limit"]
    if row.call_seconds > 0:
        said[0] += f" / {seconds(row.call_seconds)}"
    if row.times_ours > 0:
        said[0] += f" ({times(row.times_ours)} / {times(row.call_times_ours)} ours)"
    if row.trees >= 0:
        said.append(plural(row.trees, "tree"))
    elif row.steps >= 0:
        said.append(plural(row.steps, "step"))
    if row.verdict != "found":
        said.append(row.verdict)
    return Cell(", ".join(said), taken, "ours" if is_ours(row.method) else "")


_PEERS = columns(
    "question: case | contender: method | verdict | >time: seconds | >CPU time: cpu_seconds | "
    ">call: call_seconds | >GB/s: rate | >of the limit: share_of_optimum | "
    ">simulated, 64 KiB: time_us_64KiB | >simulated, 64 MiB: time_us_64MiB | >trees | >steps | "
    ">runs | why"
)

TREES = Section(
    "synthesis",
    "synthesis",
    "How long does synthesis take?",
    "measured",
    "python bench/synthesis.py",
    "Allgather trees that reach their proven limit exactly, on one core, kernels compiled before; "
    "every figure is a median. Other synthesizers are asked in the section of peers.",
    _trees,
    ("Time to find allgather trees that equal their bound", trees_table),
)
FRONTIERS = Section(
    "frontier",
    "frontiers",
    "How long do whole frontiers take?",
    "measured",
    "python bench/frontier.py",
    "Best trades between steps and rounds per chunk, (C, S, R); proved: no schedule is better. On "
    "one core, without the cache. SCCL's tool is asked in the section of peers.",
    _frontiers,
    ("Whole frontiers of chunk schedules", frontiers_table),
)
SOLVERS = Section(
    "solvers",
    "solvers",
    "Which solver wins where?",
    "measured",
    "python bench/frontier.py",
    "One (C, S, R) each, as it is and under a group of symmetries: a schedule, or a proof that there "
    "is none. The time is that of writing the instance and solving it, without imports.",
    _solvers,
)
PEERS = Section(
    "peers",
    "peers",
    "How do the public synthesizers do?",
    "measured; rates exact, times of schedules simulated",
    "python bench/peers.py",
    "Every contender is asked the same question in a process of its own, in turns with the others on "
    "the same machine. What it answers is turned into a schedule of ours, so that the same verifier "
    "computes its rate and the same simulator its time. Two times: a whole process that asks once / "
    "a call in a process that has answered before; below 1× ours the other one is faster. TACOS is "
    "compiled and is called once.",
    _peers,
    ("Public synthesizers on the same questions, in turns on the same machine", peers_table),
)
