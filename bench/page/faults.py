"""Random faults during training: how many ranks raised in time, the slowest, and what was left over."""

from __future__ import annotations

from collections.abc import Iterator

from arborcast.bench.page.parts import Cell, Part, Section, Strong, column, columns, table, text
from arborcast.bench.page.results import Document, Row
from arborcast.bench.page.words import count, plural, seconds

NAMES = {
    "kill": "killed",
    "stop": "stopped, and sent on later",
    "abort": "aborts its group",
    "cut": "cut off without a word",
}


def _answer(document: Document) -> Iterator[Part]:
    rows = document.rows
    asked, in_time = rows["left_ranks"].sum(), rows["raised_in_time"].sum()
    bad = rows[["hangs", "wrong", "left_over"]].sum()
    yield text(
        f"{plural(int(rows['rounds'].sum()), 'round')}: ",
        Strong(f"{count(in_time)} of {count(asked)} ranks"),
        f" raised within {seconds(rows['timeout_s'].max())} and two seconds more, "
        f"{count(bad['hangs'])} hung; {plural(int(bad['wrong']), 'wrong gradient')}, "
        f"{count(bad['left_over'])} left over",
        tone="good" if in_time == asked and not bad.any() else "bad",
    )
    yield table(
        {
            "a rank is": lambda row: Cell(NAMES.get(row.fault, str(row.fault))),
            **columns("transport | >rounds | >ranks that must raise: left_ranks"),
            ">in time": _in_time,
            **columns(">hang: hangs | >wrong gradients: wrong | >left over: left_over"),
            ">median": column("median_s", unit=seconds),
            ">slowest": column("slowest_s", unit=seconds),
        },
        rows,
    )


def _in_time(row: Row) -> Cell:
    is_all = row.raised_in_time == row.left_ranks
    return Cell(count(row.raised_in_time), row.raised_in_time, "good" if is_all else "bad")


SECTION = Section(
    "faults",
    "faults",
    "Does every rank that is left raise in time when others die, stop or are cut off?",
    "measured",
    "python bench/faults.py",
    "Small groups train under DDP and compare every gradient with serial training, until a random fault at a "
    "random moment. A rank that is killed or aborts is noticed at once; one that is stopped at the group's "
    "timeout; a host whose link goes down (in network namespaces) when its kernel has acknowledged nothing "
    "for `ARBORCAST_LOST_AFTER` seconds. Times run from the fault to the error, of a stopped rank from where "
    "it goes on. Processes, sockets, files and shared memory are looked for after each round.",
    _answer,
)
