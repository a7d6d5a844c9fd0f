"""The bench of links that fail in calls: what it draws, and what it makes of what ranks saw."""

from __future__ import annotations

import pytest

from arborcast.bench import resuming
from arborcast.bench.resuming import Seen, Strike


def test_rounds_are_drawn_by_their_seed() -> None:
    drawn = resuming.strikes("ring:4", 32, 7)
    assert drawn == resuming.strikes("ring:4", 32, 7) != resuming.strikes("ring:4", 32, 8)
    assert {it.collective for it in drawn} == set(resuming.KINDS)
    assert {it.dtype for it in drawn} == set(resuming.TYPES)
    assert {it.pair for it in drawn} == set(resuming.PAIRS["ring:4"])


def seen(
    struck_at: float | None = None, *, right: bool = True, end: float = 2.5, resumed: bool = True
) -> Seen:
    """A rank's view: calls of 1 s, the third struck from 2.0 until `end`, the later ones of 1.25 s."""
    spans = ((0.0, 1.0), (1.0, 2.0), (2.0, end), (5.0, 9.0), (9.0, 10.25), (10.25, 11.5))
    return Seen(right, spans, struck_at, (3.0, 70, 50, 100) if resumed else None)


def test_what_ranks_saw_becomes_rows() -> None:
    strike = Strike("allreduce", "float32", (0, 1), 0.5)
    rounds = [
        [seen(2.75, end=3.5), seen(end=4.0)],
        [seen(2.25, end=3.5), seen(end=3.5)],
        [seen(2.5, right=False), seen()],  # wrong on one rank
        [seen(4.5), seen()],  # the reset came too late
        [seen(2.5, resumed=False), seen(resumed=False)],  # and was not noticed
    ]
    (row,) = resuming.rows_of("full:2", [strike] * 5, list(zip(*rounds, strict=True)))
    assert (row["rounds"], row["right"], row["resumed"]) == (5, 4, 3)
    assert row["undisturbed_ms"] == pytest.approx(1000)
    # 4.0 - 2.0, 3.5 - 2.0 and 2.5 - 2.0, each less the second of a call in which nothing fails.
    assert (row["lost_ms"], row["most_lost_ms"]) == pytest.approx((500, 1000))
    # 750, 250 and 500 until the failure, and 250 more for a call without the link.
    assert row["restart_lost_ms"] == pytest.approx(750)
    assert (row["sent_again_bytes"], row["restart_again_bytes"]) == (20, 70)
    assert "full:2" in resuming.format_table([row])
    assert resuming.results_document([row])["rows"] == [row]
