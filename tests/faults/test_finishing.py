"""Collectives that are broken off at random are finished: every contribution once, whatever had moved."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.synth import api
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.faults.finishing import disjoint_cover, plan_finish, without_pairs
from arborcast.synth.schedule import Schedule, Transfer
from arborcast.synth.unfinished import Finish, Part, Unfinished
from arborcast.synth.verification.finish import verify_finish

KINDS = (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.REDUCE_SCATTER)
FABRICS = ("full:4", "ring:5", "dgx1", "torus:3x3", "star:4")
ELEMENTS = 60
_schedules: dict[tuple[str, Kind], Schedule] = {}


def schedule_for(fabric: str, kind: Kind) -> Schedule:
    if (fabric, kind) not in _schedules:
        topology = topologies.load(fabric)
        found = api.solve(topology, Collective.on(topology, kind))
        _schedules[fabric, kind] = found if isinstance(found, Schedule) else found.expand()
    return _schedules[fabric, kind]


def broken_off(schedule: Schedule, dice: random.Random) -> Unfinished:
    """What lies where when some transfers have happened: of each run of elements others."""
    collective = schedule.collective
    held: dict[int, list[tuple[int, int, int, int]]] = {rank: [] for rank in collective.ranks}
    for number, chunk in enumerate(schedule.chunks):
        cuts = sorted({0, ELEMENTS, *(dice.randrange(ELEMENTS) for _ in range(2))})
        transfers = [it for it in schedule.transfers if it.chunk == number]
        for start, stop in pairwise(cuts):
            block = collective.block_of(chunk.owner, chunk.target)
            masks = {
                rank: sum(1 << it for it in who)
                for rank in collective.ranks
                if (who := collective.before(rank, block))
            }
            share = dice.random()
            late: set[int] = set()  # ranks for which something has not come
            for _, together in groupby(transfers, key=lambda it: it.step):
                before = dict(masks)
                for it in list(together):
                    if it.src in late or dice.random() > share:
                        late.add(it.dst)
                    elif it.dst not in late:
                        masks[it.dst] = before[it.src] | (masks.get(it.dst, 0) if it.reduce else 0)
            for rank, mask in masks.items():
                held[rank].append((number, start, stop, mask))
    return Unfinished.drawn(collective, schedule.chunks, [ELEMENTS] * len(schedule.chunks), held)


def carry_out(finish: Finish, part: int) -> dict[int, Counter[int]]:
    """How often each rank has each contribution in the end."""
    have = {
        rank: Counter(it for mask in masks for it in range(mask.bit_length()) if mask >> it & 1)
        for rank, masks in finish.parts[part].used.items()
    }
    moves = [it for it in finish.transfers if it.chunk == part]
    for _, together in groupby(moves, key=lambda it: it.step):
        before = {rank: Counter(it) for rank, it in have.items()}
        for it in list(together):
            have[it.dst] = before[it.src] + (have.get(it.dst, Counter()) if it.reduce else Counter())
    return have


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(FABRICS), st.sampled_from(KINDS), st.integers(0, 10**6))
def test_every_contribution_arrives_once(fabric: str, kind: Kind, seed: int) -> None:
    dice = random.Random(seed)
    schedule = schedule_for(fabric, kind)
    state = broken_off(schedule, dice)
    links = [(it.src, it.dst) for it in schedule.topology.links if it.dst < schedule.topology.ranks]
    lost = {dice.choice(links) if links and fabric != "star:4" else (0, 1)}
    finish = plan_finish(
        state, without_pairs(schedule.topology, lost), closed=lost, item_bytes=1 << 15, parts=8
    )
    assert verify_finish(finish) == ()
    used = {(it.src, it.dst) for it in finish.transfers}
    assert not used & {pair for a, b in lost for pair in ((a, b), (b, a))}
    for number, part in enumerate(finish.parts):
        chunk = state.chunks[state.lots[part.lot].chunk]
        have = carry_out(finish, number)
        for rank in schedule.collective.ranks:
            block = schedule.collective.block_of(chunk.owner)
            after = schedule.collective.after(rank, block)
            assert after is None or have[rank] == Counter(after)


def finish_of_a_chain() -> Finish:
    """The allreduce of the docstring of `synth.unfinished`, whose link 0-1 is gone.

    0 --- 1          elements 0..3 are complete at ranks 0 and 1,
     \\   /           elements 4..7 lie as 0 | 1 + 2 | 2
       2
    """
    fabric = topologies.load("full:3")
    schedule = schedule_for("full:3", Kind.ALLREDUCE)
    chunk = replace(schedule.chunks[0], share=schedule.collective.blocks()[schedule.collective.block_of(0)])
    held = {
        0: [(0, 0, 4, 0b111), (0, 4, 8, 0b001)],
        1: [(0, 0, 4, 0b111), (0, 4, 8, 0b110)],
        2: [(0, 0, 8, 0b100)],
    }
    state = Unfinished.drawn(schedule.collective, [chunk], [8], held)
    return plan_finish(state, without_pairs(fabric, [(0, 1)]), closed=[(0, 1)], item_bytes=1 << 20)


def test_a_chain_is_finished_as_drawn() -> None:
    finish = finish_of_a_chain()
    assert verify_finish(finish) == ()
    shown = sorted(
        f"{finish.parts[it.chunk].start}: {it.src}{'+' if it.reduce else ' '}{it.dst}"
        for it in finish.transfers
    )
    # Elements 0..3 go to rank 2 alone; of the others rank 1 has most, to which rank 0 adds by way of rank 2.
    assert {line for line in shown if line[0] in "0123"} <= {
        f"{it}: {src} 2" for it in range(4) for src in (0, 1)
    }
    assert len([line for line in shown if line[0] in "0123"]) == 4
    assert [line for line in shown if line[0] == "4"] == ["4: 0+2", "4: 1 2", "4: 2 0", "4: 2+1"]
    assert finish.elements_sent == 4 + 4 * 4


def with_parts(finish: Finish, *spans: tuple[int, int]) -> Finish:
    """The same with parts of these elements, which nothing is sent of; lot 0 ends at element 4."""
    parts = (Part(int(start >= 4), start, stop, {}) for start, stop in spans)
    return replace(finish, parts=tuple(parts), transfers=())


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda it: replace(it, transfers=it.transfers[1:]), "must end with the contribution"),
        (lambda it: replace(it, transfers=(*it.transfers, it.transfers[0])), "twice"),
        (lambda it: replace(it, parts=it.parts[:-1], transfers=()), "must be covered up to element"),
        *(
            (
                lambda it, src=src, dst=dst, pair=pair: replace(
                    it, closed=[pair], transfers=(replace(it.transfers[0], src=src, dst=dst),)
                ),
                f"transfer 0: ranks {src} and {dst} cannot reach each other",
            )
            for src, dst in ((0, 1), (1, 0))
            for pair in ((0, 1), (1, 0))
        ),
        (
            lambda it: replace(it, closed=(), transfers=(replace(it.transfers[0], src=0, dst=1),)),
            "transfer 0: there is no link 0->1",
        ),
        (
            lambda it: with_parts(it, (0, 3), (2, 4), (4, 8)),
            "lot 0: element 3 must begin what comes next, got 2..4",
        ),
        (lambda it: with_parts(it, (0, 3), (4, 8)), "lot 0: must be covered up to element 4, is up to 3"),
        (
            lambda it: with_parts(it, (0, 0), (0, 4), (4, 8)),
            "lot 0: element 0 must begin what comes next, got 0..0",
        ),
        (
            lambda it: replace(it, state=replace(it.state, lots=it.state.lots[1:]), parts=(), transfers=()),
            "chunk 0: element 0 must begin what comes next, got 4..8",
        ),
        (
            lambda it: replace(it, parts=(replace(it.parts[0], used={2: (0b111,)}), *it.parts[1:])),
            "begins with the sum 111, which does not lie there",
        ),
    ],
)
def test_the_check_objects(spoil: object, complaint: str) -> None:
    assert callable(spoil)
    assert any(complaint in line for line in verify_finish(spoil(finish_of_a_chain())))


@pytest.mark.parametrize("first", [0b011, 0b111])
@pytest.mark.parametrize("second", [0b011, 0b110, 0b100])
def test_the_check_counts_what_a_rank_begins_with_once(first: int, second: int) -> None:
    """Sums that lie there and have any contribution in common are not added, equal or not."""
    finish = finish_of_a_chain()
    lots = (replace(finish.state.lots[0], held={2: (first, second)}), *finish.state.lots[1:])
    parts = (replace(finish.parts[0], used={2: (first, second)}), *finish.parts[1:])
    found = verify_finish(replace(finish, state=replace(finish.state, lots=lots), parts=parts))
    said = f"part 0: rank 2 begins with contributions {first & second:b} twice"
    assert (said in found) is bool(first & second)


def test_the_check_says_as_much_as_it_is_asked_for() -> None:
    finish = replace(finish_of_a_chain(), transfers=())
    everything = verify_finish(finish)
    assert len(everything) > 2
    assert verify_finish(finish, max_errors=2)[:2] == everything[:2]
    assert len(verify_finish(finish, max_errors=2)) < len(everything)
    without = replace(finish_of_a_chain(), closed=(), transfers=(Transfer(0, 0, 1, 0),) * 30)
    assert (
        verify_finish(without)
        == verify_finish(without, max_errors=20)
        != verify_finish(without, max_errors=21)
    )


def test_sums_that_overlap_are_not_counted_twice() -> None:
    assert disjoint_cover({0: (0b011,), 1: (0b110, 0b010), 2: (0b100,)}, 0b111) == {0: (0b011,), 2: (0b100,)}
    with pytest.raises(InfeasibleError, match="must lie somewhere, each once; there are 11, 110"):
        disjoint_cover({0: (0b011,), 1: (0b110,)}, 0b111)


def test_who_cannot_be_reached_is_named() -> None:
    fabric = topologies.load("ring:4")
    schedule = schedule_for("ring:4", Kind.BROADCAST)
    state = Unfinished.drawn(schedule.collective, schedule.chunks[:1], [8], {0: [(0, 0, 8, 1)]})
    with pytest.raises(InfeasibleError, match=r"ranks \[2\] cannot be reached"):
        plan_finish(state, without_pairs(fabric, [(1, 2), (2, 3)]))
