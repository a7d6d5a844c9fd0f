"""Schedules that are replayed in machine code get the verdict that replaying them chunk by chunk gives."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.api import solve
from arborcast.synth.collective import NAMED_KINDS, Collective, Kind
from arborcast.synth.errors import TimedOutError
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.schedule import Chunk, Schedule, Transfer
from arborcast.synth.topology import Topology
from arborcast.synth.verification import every_translate, verifier
from arborcast.synth.verification.every_translate import loads_if_sound
from tests.support.drawn_implicit import grid, implicit
from tests.support.drawn_in_network import TURNS, star
from tests.verification.drawn import custom, draw, fabric


@cache
def _solved(topology: Topology, kind: str, ranks: tuple[int, ...] | None) -> Schedule:
    return solve(topology, kind, form="explicit", ranks=ranks)


SQUARE, STAR, RELAY = map(fabric, ("square", "hub", "relay"))
TURNING = star(3, TURNS)
"""Whose switch holds sums and copies as ranks do."""


def replayed_alike(schedule: AnySchedule) -> verifier.Verdict:
    """The verdict of machine code, and of plain Python."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifier, "MANY", -1)
        one = verifier.verify(schedule)
        patch.setattr(verifier, "MANY", 1 << 16)
        assert one == verifier.verify(schedule)
    return one


@pytest.mark.parametrize("kind", NAMED_KINDS)
@pytest.mark.parametrize(
    ("topology", "ranks"), [(SQUARE, None), (STAR, None), (RELAY, (0, 1)), (TURNING, None)]
)
def test_right_schedules_are_right_in_both(
    topology: Topology, ranks: tuple[int, ...] | None, kind: str
) -> None:
    schedule = _solved(topology, kind, ranks)
    assert replayed_alike(schedule).correct
    assert loads_if_sound(schedule) == schedule.load


def test_those_in_implicit_form_are_replayed_by_their_representatives() -> None:
    schedule = implicit(grid(2, 3, hubs=False), Kind.ALLGATHER)
    assert replayed_alike(schedule).correct


def test_a_rank_that_ends_with_its_own_alone_has_not_all() -> None:
    """Each of them once: the others get the sum."""
    for rank in range(SQUARE.ranks):
        up = [f"{(rank + at) % 4}>{(rank + at + 1) % 4}:0+" for at in range(3)]
        down = [f"{(rank + 3 - at) % 4}>{(rank + 2 - at) % 4}:0" for at in range(2)]
        chunks = [Chunk(Fraction(1), rank)]
        one_short = draw(SQUARE, Collective.on(SQUARE, "allreduce"), chunks, [*up, *down])
        one = replayed_alike(one_short)
        assert one.errors[0].startswith(f"chunk 0: rank {rank} must end with")


def test_custom_collectives_are_replayed_chunk_by_chunk() -> None:
    """Rank 1 holds the block before: what it adds of rank 0's is twice the same."""
    twice = draw(
        SQUARE, custom(SQUARE, ([0, 1], [2])), [Chunk(Fraction(1), 0, demand=0)], ["0>1:0+", "1>2:0"]
    )
    one = replayed_alike(twice)
    assert one.errors == ("chunk 0: rank 1 would count rank 0's contribution twice in step 0",)


def test_without_time_to_compile_kernels_it_is_replayed_chunk_by_chunk(monkeypatch) -> None:
    def late(*_: object) -> None:
        raise TimedOutError("not compiled yet")

    schedule = _solved(SQUARE, "allreduce", None)
    monkeypatch.setattr(every_translate, "replay_all", late)
    assert replayed_alike(schedule).correct


@settings(max_examples=60)
@given(st.data(), st.sampled_from(NAMED_KINDS), st.sampled_from([SQUARE, STAR, TURNING]))
def test_broken_schedules_are_named_alike(data: st.DataObject, kind: str, topology: Topology) -> None:
    whole = _solved(topology, kind, None)
    transfers = list(whole.transfers)
    place = data.draw(st.integers(0, len(transfers) - 1))
    old = transfers[place]
    how = data.draw(st.sampled_from(["lost", "twice", "late", "turned"]))
    changed: dict[str, list[Transfer]] = {
        "lost": [],
        "twice": [old, old],
        "late": [replace(old, step=old.step + data.draw(st.integers(1, 4)))],
        "turned": [replace(old, reduce=not old.reduce)],
    }
    transfers[place : place + 1] = changed[how]
    broken = replace(whole, transfers=tuple(sorted(transfers, key=lambda each: each.step)))
    replayed_alike(broken)
