"""Links that fail in the middle of collectives: whether every element was right, and what that cost."""

from __future__ import annotations

from collections.abc import Iterator

from arborcast.bench.page.parts import Cell, Part, Section, Strong, column, columns, table, text
from arborcast.bench.page.results import Document, Row
from arborcast.bench.page.words import count, plural

MIB = 1 << 20


def _answer(document: Document) -> Iterator[Part]:
    rows = document.rows
    asked, right = int(rows["rounds"].sum()), int(rows["right"].sum())
    yield text(
        f"{plural(asked, 'round')}: ",
        Strong(f"every element right in {count(right)} of {count(asked)}"),
        f"; the connection was still needed in {count(rows['resumed'].sum())}",
        tone="good" if right == asked else "bad",
    )
    yield table(
        {
            **columns("topology | collective | >rounds"),
            ">right": _right,
            **columns(">link failed in the call: resumed"),
            ">call without a failure": column("undisturbed_ms", unit=_ms),
            ">lost": column("lost_ms", unit=_ms),
            ">lost at most": column("most_lost_ms", unit=_ms),
            ">of that, planning": column("plan_ms", unit=_ms),
            ">a restart would lose": column("restart_lost_ms", unit=_ms),
            ">sent again": column("sent_again_bytes", unit=_mib),
            ">by a restart": column("restart_again_bytes", unit=_mib),
        },
        rows,
    )


def _ms(value: float) -> str:
    return f"{value:.3g} ms"


def _mib(value: float) -> str:
    return f"{value / MIB:.2f} MiB"


def _right(row: Row) -> Cell:
    return Cell(count(row.right), row.right, "good" if row.right == row.rounds else "bad")


SECTION = Section(
    "resuming",
    "resuming",
    "Is a collective finished rightly when a link fails in the middle of it, and at what cost?",
    "measured",
    "python bench/resuming.py",
    "On emulated links the connection between two ranks is reset after a random part of the bytes that "
    "it carries in a call, with `ARBORCAST_RESUME=on`. What is lost is the time of that call beyond one "
    "without a failure: to notice, to agree on what lies where, to plan, to connect anew, and to send "
    "what is missing without the link. A restart from scratch would lose at least all until the failure "
    "and what a call takes longer without the link; that it must be noticed and agreed on, too, is not "
    "counted. Bytes are those of all ranks beyond what a call sends in which nothing fails; the buffer "
    "is 4 MiB. Medians over rounds.",
    _answer,
)
