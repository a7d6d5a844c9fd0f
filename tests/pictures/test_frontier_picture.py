"""Pictures of frontiers and of step-synchronous schedules say what they show, and only what is true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from arborcast import topologies
from arborcast.synth.certificate import Bound, Cut
from arborcast.synth.collective import Collective
from arborcast.synth.errors import InputError
from arborcast.synth.pictures import draw_frontier, draw_steps
from arborcast.synth.pictures.steps import Ribbon, colour, ribbons_of
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from tests.support.picture_words import words

BOUND = Bound(Fraction(1), Cut(frozenset({0}), Fraction(1)))


@dataclass(frozen=True)
class DrawnPoint:
    chunks: int
    steps: int
    rounds: int
    least: Fraction
    is_proved: bool = True


@dataclass(frozen=True)
class Drawn:
    points: list[DrawnPoint]
    static_ratio: Fraction = Fraction(7, 6)
    why_stopped: str = "the static limit is attained"


ALLGATHER: Any = Drawn([DrawnPoint(2, 2, 3, Fraction(3, 2)), DrawnPoint(6, 3, 7, Fraction(7, 6))])
UNPROVED: Any = Drawn(
    [DrawnPoint(1, 2, 2, Fraction(7, 4), False), DrawnPoint(2, 3, 3, Fraction(3, 2))],
    why_stopped="the deadline passed",
)


def exchange(rounds: tuple[int, ...] | None = (1, 2)) -> Schedule:
    """Ranks 0 and 1 swap two chunks each over a ring of 2, one in the first step, the other in the second."""
    topology = topologies.load("ring:2")
    chunks = [Chunk(Fraction(1, 4), owner) for owner in (0, 0, 1, 1)]
    transfers = [Transfer(0, 0, 1, 0), Transfer(2, 1, 0, 0), Transfer(1, 0, 1, 1), Transfer(3, 1, 0, 1)]
    collective = Collective.on(topology, "allgather")
    return Schedule.build(topology, collective, Method("drawn"), BOUND, chunks, transfers, rounds)


def relay(steps: int, *, reduce: bool = False) -> Schedule:
    """One chunk along a ring, rank by rank."""
    topology = topologies.load(f"ring:{steps + 1}")
    transfers = [Transfer(0, rank, rank + 1, rank, reduce) for rank in range(steps)]
    collective = Collective.on(topology, "reduce" if reduce else "broadcast", root=steps if reduce else 0)
    chunks = [Chunk(Fraction(1), collective.root or 0)]
    return Schedule.build(topology, collective, Method("drawn"), BOUND, chunks, transfers, [1] * steps)


DRAWINGS: dict[str, Callable[[Path], None]] = {
    "frontier": lambda path: draw_frontier(ALLGATHER, path, title="drawn"),
    "steps": lambda path: draw_steps(exchange(), path),
}


def said_of(frontier: Drawn, folder: Path) -> list[str]:
    draw_frontier(frontier, folder / "picture.svg", title="drawn")
    return words(folder / "picture.svg")


def test_a_frontier_names_its_points_their_ratios_and_the_static_limit(tmp_path: Path) -> None:
    said = said_of(ALLGATHER, tmp_path)
    assert {"drawn", "(2, 2, 3)", "3/2", "(6, 3, 7)", "7/6"} <= set(said)
    assert "static limit 7/6, in any number of steps" in said
    assert {"steps S (latency)", "rounds per chunk R/C (bandwidth)"} <= set(said)
    assert any(text.endswith("It ends here: the static limit is attained.") for text in said)
    assert "proved: the least R/C in so many steps" in said
    assert not any("not proved" in text or "proven limit" in text for text in said)


def test_steps_are_whole_numbers(tmp_path: Path) -> None:
    frontier = Drawn([DrawnPoint(1, 2, 2, Fraction(2)), DrawnPoint(4, 5, 5, Fraction(5, 4))])
    ticks = [text for text in said_of(frontier, tmp_path) if text in {"2", "3", "4", "5", "2.5", "3.5"}]
    assert ticks == ["2", "3", "4", "5", "2"]  # the last one is the first point's ratio


def test_what_is_not_proved_shows_its_limit(tmp_path: Path) -> None:
    said = said_of(UNPROVED, tmp_path)
    assert "2, limit 7/4" in said
    assert "3/2" in said
    assert {"found, not proved in full", "proven limit of R/C in so many steps"} <= set(said)


def test_without_points_the_static_limit_is_left(tmp_path: Path) -> None:
    said = said_of(Drawn([], why_stopped="the deadline passed"), tmp_path)
    assert {"no schedule found", "static limit 7/6, in any number of steps"} <= set(said)


def test_long_frontiers_keep_all_labels(tmp_path: Path) -> None:
    # The frontier of a broadcast on DGX-1 from S = 4 on.
    points = [DrawnPoint(6 * s - 11, s, s, Fraction(s, 6 * s - 11)) for s in range(4, 25)]
    said = said_of(Drawn(points, Fraction(1, 6)), tmp_path)
    assert sum(text.startswith("(") for text in said) == len(points)


def test_steps_show_rounds_sends_and_how_busy_the_links_are(tmp_path: Path) -> None:
    draw_steps(exchange(), tmp_path / "picture.svg")
    said = words(tmp_path / "picture.svg")
    assert "allgather on ring:2: 2 steps, 3 rounds, 4 sends" in said
    assert {"step 1: 1 round", "step 2: 2 rounds"} <= set(said)
    # Two links of capacity 1: both carry a chunk in each step, in one round and in two.
    assert {"2 sends, 100 % of the links", "2 sends, 50 % of the links"} <= set(said)
    assert any(text.endswith("its colour is the rank whose data it is.") for text in said)


def test_reducing_steps_say_so_and_a_single_owner_leaves_colours_to_chunks(tmp_path: Path) -> None:
    draw_steps(relay(2, reduce=True), tmp_path / "picture.svg")
    said = words(tmp_path / "picture.svg")
    assert "step 2: 1 round, reduces" in said
    assert any(text.endswith("its colour is the chunk.") for text in said)


def test_only_so_many_steps_are_drawn(tmp_path: Path) -> None:
    draw_steps(relay(5), tmp_path / "picture.svg", max_steps=3)
    said = words(tmp_path / "picture.svg")
    assert [text for text in said if text.startswith("step ")] == [f"step {n}: 1 round" for n in (1, 2, 3)]
    assert any("the first 3 of 5 steps" in text for text in said)


def test_what_has_no_rounds_or_no_transfers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must have rounds, its steps only order; draw its trees"):
        draw_steps(exchange(None), tmp_path / "picture.svg")
    topology = topologies.load("ring:2")
    collective = Collective.on(topology, "allgather")
    empty = Schedule.build(topology, collective, Method("drawn"), BOUND, [Chunk(Fraction(1), 0)], [], [1])
    with pytest.raises(InputError, match="no transfers to draw"):
        draw_steps(empty, tmp_path / "picture.svg")
    assert not list(tmp_path.iterdir())


def test_ribbons_are_stacked_around_their_ranks_without_overlap() -> None:
    """Rank 0 sends chunks a, a, b to rank 1 and one b to rank 2; its bundle of 4 fills the port."""
    transfers = [Transfer(0, 0, 1, 0), Transfer(1, 0, 1, 0), Transfer(2, 0, 1, 0), Transfer(3, 0, 2, 0)]
    drawn = list(ribbons_of(transfers, colours=[0, 0, 1, 1], unit=0.1))
    assert [(ribbon.colour, ribbon.chunks, round(ribbon.start, 9)) for ribbon in drawn] == [
        (0, 2, -0.2),  # 4 chunks of 0.1 around row 0 begin at -0.2
        (1, 1, 0.0),
        (1, 1, 0.1),
    ]
    # At the receivers: 3 chunks around row 1, one around row 2.
    assert [round(ribbon.end, 9) for ribbon in drawn] == [0.85, 1.05, 1.95]


def test_chunks_of_one_owner_over_one_link_are_one_ribbon() -> None:
    transfers = [Transfer(chunk, 0, 1, 0) for chunk in range(5)]
    assert list(ribbons_of(transfers, colours=[7] * 5, unit=0.1)) == [Ribbon(0, 7, 5, -0.25, 0.75)]


def test_the_first_colours_differ() -> None:
    for one, other in combinations([colour(number) for number in range(21)], 2):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.05
