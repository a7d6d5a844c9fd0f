"""Programs for other runtimes: exports, mistakes that the checker finds, files and judges of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pandas as pd

from arborcast.bench.page.parts import (
    Cell,
    Part,
    Section,
    Strong,
    Table,
    all_rows,
    cell,
    columns,
    lines,
    text,
    verdict,
)
from arborcast.bench.page.results import Document, first, groups, records
from arborcast.bench.page.words import DASH, count, duration, percent, plural, size

COMMAND = "python bench/programs.py"
NAMES = {
    "msccl": "MSCCL XML",
    "mscclpp": "MSCCL++ plans",
    "nccl-graph": "rings for NCCL",
    "sccl": "steps of SCCL",
    "goal": "GOAL",
    "chakra": "Chakra",
}
JUDGES = {"loggopsim": "LogGOPSim", "astra-sim": "ASTRA-sim", "msccl-tools": "msccl-tools"}
RUN, FITS_NOT = ("msccl", "mscclpp"), ("does not fit", "no schedule")


def _answer(document: Document) -> Iterator[Part]:
    rows = document.rows
    for part, tell in (("exports", _exports), ("mutants", _mutants), ("files", _files), ("judges", _judges)):
        of_part = rows[rows["part"] == part]
        if len(of_part):
            yield from tell(of_part)


# ---------------------------------------------------------------------------------------------- exports


def _exports(rows: pd.DataFrame) -> Iterator[Part]:
    run = rows[rows["runtime"].isin(RUN)]
    fit = run[~run["verdict"].isin(FITS_NOT)]
    right = (fit["verdict"] == "correct") & (fit["wrong"] == 0)
    yield text(
        f"{plural(rows['topology'].nunique(), 'machine')}: ",
        Strong(f"{count(right.sum())} of {plural(len(fit), 'program')}"),
        " for MSCCL and MSCCL++ are right: written, read back, checked, and interpreted under random orders "
        f"with {count(fit['wrong'].sum())} wrong elements; {count(len(run) - len(fit))} more do not fit.",
        tone="" if right.all() else "bad",
    )
    yield exports_table(rows)
    unfit = rows[rows["verdict"].isin(FITS_NOT)]
    found = groups(unfit, "runtime", "why")
    if found:
        yield Table(
            ("target", "machines", "collectives", "sizes", "what does not fit"),
            tuple(_unfit(runtime, why, alike) for (runtime, why), alike in found),
            folded=f"What does not fit, and by how much: {plural(len(found), 'reason')}",
        )
    yield all_rows(_EXPORTED, rows)


def exports_table(rows: pd.DataFrame) -> Table:
    """A line per target: how many exports are right, are written alone, do not fit, are wrong."""
    drawn = []
    for runtime, alike in groups(rows, "runtime"):
        verdicts = Counter(alike["verdict"][alike["wrong"] == 0])
        wrong = len(alike) - sum(verdicts[what] for what in ("correct", "written", *FITS_NOT))
        kept = alike["rate_kept"].min()
        drawn.append(
            (
                NAMES.get(runtime, runtime),
                count(len(alike)),
                Cell(count(verdicts["correct"]), verdicts["correct"], "ours"),
                count(verdicts["written"]) if verdicts["written"] else DASH,
                count(sum(verdicts[what] for what in FITS_NOT)),
                Cell(count(wrong), wrong, "bad" if wrong else ""),
                cell(percent, kept),
            )
        )
    head = (
        "target",
        ">exports",
        ">right",
        ">written alone",
        ">do not fit",
        ">wrong",
        ">least of a rate kept by rounding",
    )
    return lines(head, drawn)


def _unfit(runtime: str, why: str, rows: pd.DataFrame) -> tuple[Cell, ...]:
    sizes = [size(at) for at in sorted(set(rows["bytes"].dropna()))]
    told = (
        NAMES.get(runtime, runtime),
        ", ".join(dict.fromkeys(rows["topology"])),
        ", ".join(dict.fromkeys(rows["collective"])),
        ", ".join(sizes) or "all",
        why,
    )
    return tuple(map(Cell, told))


_EXPORTED = columns(
    "target: runtime | topology | collective | >bytes | verdict | method | >chunks | >operations: steps | "
    ">rate kept: rate_kept | >export and check: seconds"
)


# ---------------------------------------------------------------------------------------------- mutants


def _mutants(rows: pd.DataFrame) -> Iterator[Part]:
    counts = ["rejected", "equivalent", "missed", "rejected_never_wrong"]
    total = rows[counts].sum()
    yield text(
        f"Of {count(total.sum())} mutants (a right program with one mistake) the checker missed ",
        Strong(count(total["missed"])),
        f": {count(total['rejected'])} were rejected and shown wrong by an interpreter, "
        f"{count(total['equivalent'])} passed and were right under all random orders, "
        f"{count(total['rejected_never_wrong'])} were rejected for what an order on a real machine may "
        "do, or for a limit.",
        tone="bad" if total["missed"] else "",
    )
    drawn = []
    for (runtime, name), alike in groups(rows, "runtime", "mutation"):
        found = alike[counts].sum()
        cells = [Cell(count(found[what]), found[what]) for what in counts]
        cells[2] = Cell(count(found["missed"]), found["missed"], "bad" if found["missed"] else "")
        drawn.append((Cell(NAMES.get(runtime, runtime)), Cell(name), *cells))
    head = (
        "program",
        "mistake",
        ">rejected, wrong",
        ">passed, right",
        ">missed",
        ">rejected, not shown wrong",
    )
    yield Table(head, tuple(drawn), folded=f"{plural(len(drawn), 'kind')} of mistakes")


# ------------------------------------------------------------------------------------------------ files


def _files(rows: pd.DataFrame) -> Iterator[Part]:
    for runtime, alike in groups(rows, "runtime"):
        verdicts = Counter(alike["verdict"])
        yield text(
            f"Public files, {NAMES.get(runtime, runtime)}: {count(len(alike))} were judged, ",
            Strong(f"{count(verdicts['not correct'])} broken"),
            f", {count(verdicts['correct'])} correct, {count(verdicts['refused'])} not read.",
        )
    broken = rows[rows["verdict"] == "not correct"]
    if len(broken):
        yield Table(
            ("file", "collective", ">ranks", "counterexample, or the limit"),
            tuple(
                (
                    Cell(_short(row.file)),
                    Cell(row.collective),
                    cell(count, row.ranks),
                    Cell(_sentence(row.why)),
                )
                for row in records(broken)
            ),
            f"{plural(len(broken), 'broken file')}, with the shortest counterexample",
        )
    other = rows[rows["verdict"] == "refused"]
    if len(other):
        yield Table(
            ("file", "why"),
            tuple((Cell(_short(row.file)), Cell(row.why)) for row in records(other)),
            folded=f"{plural(len(other), 'file')} not read",
        )


def _short(path: str) -> str:
    """Repository and file, without the digest before its name."""
    folder, _, name = path.partition("/")
    if not name:
        return path.replace("__", "/")
    return f"{folder.replace('+', '/')}: {name.partition('__')[2] or name}".replace("__", "/")


def _sentence(why: str, most: int = 160) -> str:
    """The first objection; of a hang, who waits for whom, as far as there is room."""
    told = why if why.startswith("hangs") else why.partition("; ")[0]
    return told if len(told) <= most else f"{told[:most].rsplit(' ', 1)[0]} ..."


# ----------------------------------------------------------------------------------------------- judges


def _judges(rows: pd.DataFrame) -> Iterator[Part]:
    for judge, alike in groups(rows, "judge"):
        name = JUDGES.get(judge, judge)
        timed = alike[alike["over_bound"].notna()]
        chain = alike[alike["verdict"].str.contains("by hand")]
        for row in records(chain):
            yield text(
                f"{name} on a {row.topology}: {duration(row.theirs_us)}, by hand {duration(row.ours_us)}.",
                tone="quiet" if row.verdict == "as by hand" else "bad",
            )
        unanswered = alike[alike["verdict"] == "no answer"]
        if len(unanswered):
            why = ", ".join(dict.fromkeys(unanswered["why"]))
            yield text(f"{name} gives no answer to {count(len(unanswered))} questions: {why}.", tone="bad")
        for service, served in groups(timed, "service"):
            yield from _timed(name, service, served)
        if not len(timed) and not len(chain):
            verdicts = Counter(alike["verdict"])
            yield text(
                f"{name} on steps of ours: ",
                Strong(f"{count(verdicts['passed'])} passed"),
                f", {count(verdicts['not passed'])} not, {count(verdicts['does not fit'])} do not fit; "
                f"with a send less: {', '.join(dict.fromkeys(alike['verdict'][-1:]))}.",
                tone="bad" if verdicts["not passed"] else "",
            )


def _timed(name: str, service: str, rows: pd.DataFrame) -> Iterator[Part]:
    finest = rows[rows["pieces"] == rows["pieces"].max()]
    apart = (finest["theirs_us"] / finest["ours_us"] - 1).abs().max()
    yield text(
        f"{name}, links in the order of service {service}: at most ",
        Strong(f"{percent(finest['over_bound'].max() - 1)} more"),
        f" than the proven bound in {plural(len(finest), 'case')} of the testbed at latency 0, each chunk "
        f"cut in {count(finest['pieces'].max())} pieces; at most {percent(apart)} from our simulator with "
        "the same order.",
    )
    cuts = sorted(set(rows["pieces"]))
    head: tuple[str, ...] = ("topology", "collective", ">bound")
    for pieces in cuts:
        head += (f">{count(pieces)} pieces: ours", ">theirs", ">theirs over the bound")
    drawn = []
    for (topology, collective), alike in groups(rows, "topology", "collective"):
        line: list[Cell | str] = [topology, collective, cell(duration, alike["bound_us"].iloc[0])]
        for pieces in cuts:
            row = first(alike[alike["pieces"] == pieces])
            line += [
                cell(duration, row.ours_us, "ours"),
                cell(duration, row.theirs_us),
                cell(percent, row.over_bound - 1),
            ]
        line.append(_explained(records(alike[alike["pieces"] == cuts[-1]])[0]))
        drawn.append(line)
    yield lines((*head, "difference"), drawn)


def _explained(row: object) -> Cell:
    """What is above the bound: pipelines that fill, which our simulator has too, and the order of service."""
    fill, rest = row.ours_over_bound - 1, row.theirs_us / row.ours_us - 1  # type: ignore[attr-defined]
    if abs(rest) < EQUAL:
        return verdict(f"pipelines fill: {percent(fill)}" if fill >= EQUAL else "none", is_good=True)
    return Cell(f"pipelines fill: {percent(fill)}; order of service: {percent(rest)}")


EQUAL = 5e-4
"""Below which two simulators say the same: nanoseconds and single bytes are rounded."""


SECTION = Section(
    "programs",
    "programs",
    "Are exports to other runtimes right, and what do tools of others say of them?",
    "computed, interpreted, and judged by others",
    COMMAND,
    "Programs are what the runtimes execute: thread blocks with steps or signals. The checker follows every "
    "element, waits and queues as deep as the runtime has them, and memory that nothing orders. Files of "
    "others are named by the repository that they were found in. Judges are simulators and checkers that "
    "others wrote, run from their own checkouts. Nothing here ran on a GPU.",
    _answer,
)
