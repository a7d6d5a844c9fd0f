"""Implicit schedules: what is right passes as when written out; every way to break one is named."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.synth.certificate import Bound, Cut
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Chunk, Transfer
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Link, Switch, Topology
from arborcast.synth.verification.every_translate import check_every_translate
from arborcast.synth.verification.group_check import check_group
from arborcast.synth.verification.replay import Errors
from arborcast.synth.verification.verdict import Verdict
from arborcast.synth.verification.verifier import verify
from tests.support.drawn_implicit import KINDS, circulant, circulants, hub, of_orbits, parts, translated
from tests.support.drawn_in_network import drawn_transfers
from tests.support.refusals import refuses

RING = circulant(4, {1: 1})
Made = TypeVar("Made", ImplicitSchedule, Translations)


def judged(schedule: ImplicitSchedule, limit: int = 10**6) -> tuple[Verdict, Verdict]:
    """On representatives, and on every translate."""
    return (
        verify(schedule, max_errors=limit),
        verify(schedule, every_translate=True, max_errors=limit),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["dgx-a100:boxes=2", "mi250:boxes=2", "fat-tree:2x2x2", "torus:3x4", "hub"])
def test_what_is_right_is_judged_as_when_written_out(spec: str, kind: Kind) -> None:
    topology = hub(5) if spec == "hub" else topologies.load(spec)
    schedule = translated(topology, kind, seed=1)
    whole = verify(schedule.expand())
    assert whole.correct
    assert judged(schedule) == (whole, whole)
    assert (whole.rate, whole.max_link_load) == (schedule.rate, 1)


def test_without_any_translation_everything_is_a_representative() -> None:
    schedule = translated(RING, Kind.ALLREDUCE, translations=Translations.trivial(RING))
    whole = verify(schedule.expand())
    assert whole.correct and judged(schedule) == (whole, whole)


def test_more_ranks_than_fit_a_word() -> None:
    schedule = translated(topologies.load("torus:5x13"), Kind.ALLREDUCE)
    whole = verify(schedule.expand())
    assert whole.correct and judged(schedule) == (whole, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_shares_of_any_denominator_are_added_up_exactly(kind: Kind) -> None:
    part = Fraction(1, 2**89 - 1)
    schedule = translated(RING, kind, shares=[part, 1 - part])
    whole = verify(schedule.expand())
    assert whole.correct and judged(schedule) == (whole, whole)
    lost = replace(schedule, chunks=(replace(schedule.chunks[0], share=part / 8), *schedule.chunks[1:]))
    assert not verify(lost, every_translate=True).correct


EVEN = circulant(6, {1: 1, 2: 1})
BY_TWO = Translations.generated(EVEN, [[2, 3, 4, 5, 0, 1]])
"""On a circle of six: orbits 0, 2, 4, which take part in what follows, and 1, 3, 5, which do not."""


def test_the_parts_of_an_allreduce_may_be_named_after_relays() -> None:
    """0 and 2 (with what 4 has) are added up at 1, which takes no part, and go back."""
    words = ["4>2:0+", "2>1:0+ 0>1:0+", "1>0:0 1>2:0", "2>4:0"]
    everyone = Collective.on(EVEN, Kind.ALLREDUCE, ranks=(0, 2, 4))
    for owner in (0, 1):
        chunks = [Chunk(Fraction(1, 3), owner)]
        schedule = of_orbits(EVEN, everyone, chunks, drawn_transfers(words), translations=BY_TWO)
        whole = verify(schedule.expand())
        assert whole.correct and judged(schedule) == (whole, whole)


def test_alltoalls_whose_blocks_differ() -> None:
    """Of 27 bytes 1 goes to the next rank but one, 3 to the one before: 1/9 and 1/3 of what a rank holds."""

    def sized(far: int, *wrong: tuple[int, int]) -> ImplicitSchedule:
        ranks = (4, 0, 2)
        rows = [[{0: 5, 2: 1, 4: far}[(dst - src) % 6] for dst in ranks] for src in ranks]
        for row, column in wrong:
            rows[row][column] += 1
        chunks = [Chunk(Fraction(1, 3), 0, 4), Chunk(Fraction(1, 9), 0, 2)]
        blocks = Collective.alltoallv(EVEN, rows, ranks=ranks)
        return of_orbits(EVEN, blocks, chunks, drawn_transfers(["0>4:0 0>2:1"]), translations=BY_TWO)

    whole = verify(sized(3).expand())
    assert whole.correct and whole.rate == 3 and judged(sized(3)) == (whole, whole)
    # What stays where it is may differ, and makes all others smaller parts.
    same = sized(3, (0, 0), (1, 1))
    refused(same, "block with owner 0 and target 2: shares must add up to 3/29, got 1/9")
    refused(sized(0), "chunk 0: alltoall among 3 ranks moves no block with owner 0 and target 4")
    message = "translation 0: maps the block from rank 2 to rank 4, of 1 bytes, to one of 2 bytes"
    assert [verdict.errors for verdict in judged(sized(3, (0, 1)))] == [(message,), (message,)]


# --- broken on purpose, drawn by dice -------------------------------------------------------------------


def without_transfer(schedule: ImplicitSchedule, data: st.DataObject) -> dict[str, Any]:
    at = data.draw(st.integers(0, len(schedule.transfers) - 1))
    return {"transfers": schedule.transfers[:at] + schedule.transfers[at + 1 :]}


def with_changed_transfer(schedule: ImplicitSchedule, data: st.DataObject) -> dict[str, Any]:
    at = data.draw(st.integers(0, len(schedule.transfers) - 1))
    other = data.draw(st.sampled_from(schedule.transfers))
    found = schedule.transfers[at]
    changed = data.draw(
        st.sampled_from(
            [
                replace(found, step=other.step),
                replace(found, reduce=not found.reduce),
                replace(found, src=other.src, dst=other.dst, via=other.via),
                replace(found, chunk=other.chunk),
            ]
        )
    )
    ordered = sorted([*schedule.transfers[:at], changed, *schedule.transfers[at + 1 :]], key=lambda t: t.step)
    return {"transfers": tuple(ordered)}


def with_transfer_twice(schedule: ImplicitSchedule, data: st.DataObject) -> dict[str, Any]:
    again = data.draw(st.sampled_from(schedule.transfers))
    later = replace(again, step=again.step + data.draw(st.integers(0, 2)))
    return {"transfers": tuple(sorted([*schedule.transfers, later], key=lambda t: t.step))}


def with_other_share(schedule: ImplicitSchedule, data: st.DataObject) -> dict[str, Any]:
    at = data.draw(st.integers(0, len(schedule.chunks) - 1))
    share = schedule.chunks[at].share * data.draw(st.sampled_from([Fraction(1, 2), Fraction(3, 2)]))
    return {
        "chunks": (
            *schedule.chunks[:at],
            replace(schedule.chunks[at], share=share),
            *schedule.chunks[at + 1 :],
        )
    }


def with_other_rate(schedule: ImplicitSchedule, data: st.DataObject) -> dict[str, Any]:
    return {"rate": schedule.rate * data.draw(st.sampled_from([Fraction(1, 2), Fraction(2)]))}


def with_other_bound(schedule: ImplicitSchedule, data: st.DataObject) -> dict[str, Any]:
    return {"bound": replace(schedule.bound, rate=schedule.bound.rate * 2)}


def with_other_target(schedule: ImplicitSchedule, data: st.DataObject) -> dict[str, Any]:
    at = data.draw(st.integers(0, len(schedule.chunks) - 1))
    target = data.draw(st.one_of(st.none(), st.integers(0, schedule.topology.ranks - 1)))
    changed = replace(schedule.chunks[at], target=target)
    return {"chunks": (*schedule.chunks[:at], changed, *schedule.chunks[at + 1 :])}


BREAK: list[Callable[[ImplicitSchedule, st.DataObject], dict[str, Any]]] = [
    without_transfer,
    with_changed_transfer,
    with_transfer_twice,
    with_other_share,
    with_other_target,
    with_other_rate,
    with_other_bound,
]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_what_is_broken_is_judged_as_when_written_out(data: st.DataObject) -> None:
    topology = data.draw(st.one_of(circulants(), st.builds(hub, st.integers(2, 5))))
    kind = data.draw(st.sampled_from(KINDS))
    schedule = translated(topology, kind, seed=data.draw(st.integers(0, 99)), shares=data.draw(parts()))
    for change in data.draw(st.lists(st.sampled_from(BREAK), max_size=2)):
        if schedule.transfers:
            schedule = replace(schedule, **change(schedule, data))
    check_judged_as_when_written_out(schedule)


def check_judged_as_when_written_out(schedule: ImplicitSchedule) -> None:
    whole = verify(schedule.expand(), max_errors=10**6)
    on_representatives, on_all = judged(schedule)
    for verdict in (on_representatives, on_all):
        assert (verdict.correct, verdict.rate, verdict.max_link_load, verdict.loads) == (
            whole.correct,
            whole.rate,
            whole.max_link_load,
            whole.loads,
        )
    # Line by line, but for the links of an orbit, which share a line.
    assert unlinked(on_all) == unlinked(whole)
    check_counted(schedule, on_all.errors)


@pytest.mark.parametrize(
    "steps",
    [
        ["0>3>1:0 0>3>0:0 1>3>2:0"],  # rank 0 sends to itself; rank 1 has nothing in this step, later or not
        ["0>3>1:0 2>3>1:0+", "1>3>0:0 1>3>2:0"],
        ["2>3>1:0+ 0>3>1:0", "1>3>0:0 1>3>2:0"],
        ["0>3>2:0", "2>3>1:0+ 0>3>1:0"],
        ["2>3>1:0+ 0>3>1:0+", "1>3>0:0 1>3>2:0"],  # the one that is right
    ],
)
@pytest.mark.parametrize("kind", [Kind.ALLGATHER, Kind.ALLREDUCE])
def test_what_meets_is_judged_as_when_written_out(kind: Kind, steps: list[str]) -> None:
    schedule = replace(translated(hub(3), kind), transfers=tuple(drawn_transfers(steps)))
    check_judged_as_when_written_out(schedule)


def test_every_wrong_chunk_is_named_of_several() -> None:
    whole = translated(circulant(4, {1: 1}), Kind.ALLGATHER)
    halves = tuple(Chunk(Fraction(1, 8), 0) for _ in range(2))
    moves = [Transfer(chunk, *hop) for chunk in (0, 1) for hop in ((0, 1, 0), (1, 2, 1))]
    check_judged_as_when_written_out(replace(whole, chunks=halves, transfers=tuple(moves)))


def check_counted(schedule: ImplicitSchedule, lines: tuple[str, ...]) -> None:
    """Of every translate as many lines as asked for are spelled out, and the others counted."""
    for limit in (0, 2) if lines else ():
        rest = (f"and {len(lines) - limit} more",) if len(lines) > limit else ()
        assert verify(schedule, every_translate=True, max_errors=limit).errors == (*lines[:limit], *rest)


def unlinked(verdict: Verdict) -> list[str]:
    return sorted(line for line in verdict.errors if not line.startswith("link "))


# --- broken on purpose, drawn by hand -------------------------------------------------------------------


def refused(schedule: ImplicitSchedule, *messages: str) -> None:
    for verdict in judged(schedule):
        assert not verdict.correct
        for message in messages:
            assert any(message in line for line in verdict.errors), verdict.errors


def forged(right: Made, **fields: Any) -> Made:
    """A schedule or translations that their own class would refuse, as a wrong builder might make them."""
    made = copy.copy(right)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def forged_group(
    *generators: Sequence[int], orders: Sequence[int], ranks: int = 4, size: int = 4
) -> Translations:
    """What somebody says of translations, true or not."""
    images = tuple(map(tuple, generators))
    return forged(Translations(1, (), (), 1), ranks=ranks, generators=images, orders=tuple(orders), size=size)


@refuses("generators", "orders", "ranks", "size", "message")
def test_wrong_translations_are_refused(
    generators: list[list[int]], orders: list[int], ranks: int, size: int, message: str
) -> None:
    group = forged_group(*generators, orders=orders, ranks=ranks, size=size)
    schedule = forged(translated(RING, Kind.ALLGATHER), translations=group)
    refused(schedule, message)
    verdict = verify(schedule)
    assert (verdict.rate, verdict.max_link_load, verdict.loads) == (0, 0, {})


def test_translations_keep_bandwidth_latency_ranks_and_what_switches_do() -> None:
    schedule = translated(RING, Kind.ALLGATHER)
    for other in (Link(0, 1, Fraction(2)), Link(0, 1, Fraction(1), Fraction(1))):
        uneven = Topology("uneven", 4, (other, *RING.links[1:]))
        refused(
            forged(schedule, topology=uneven),
            "maps link 0->1 to 1->2; there must be such a link, of the same",
        )
    pair = [
        Link(0, 2, Fraction(1)),
        Link(2, 0, Fraction(1)),
        Link(1, 3, Fraction(1)),
        Link(3, 1, Fraction(1)),
    ]
    switched = Topology.build("two", 2, pair, [Switch("adds", True), Switch("hub")])
    for images, message in (
        ([1, 0, 3, 2], "translation 0: maps switch adds to hub; both must be able to do the same"),
        ([2, 3, 0, 1], "must map ranks to ranks and switches to switches, maps 0 to adds"),
    ):
        group = forged_group(images, orders=[2], ranks=2)
        refused(forged(schedule, topology=switched, translations=group), message)


def test_translations_keep_who_takes_part() -> None:
    few = Collective(Kind.ALLGATHER, (0, 1))
    schedule = forged(translated(RING, Kind.ALLGATHER), collective=few)
    refused(schedule, "translation 0: maps rank 1, which takes part, to 2, which does not")


def test_representatives_are_first_in_their_orbits() -> None:
    schedule = translated(RING, Kind.ALLGATHER)
    moved = [replace(t, src=(t.src + 1) % 4, dst=(t.dst + 1) % 4) for t in schedule.transfers]
    refused(
        forged(schedule, chunks=(Chunk(Fraction(1, 4), 1),), transfers=tuple(moved)),
        "chunk 0: owner must be 0, the first rank of its orbit, got 1",
    )


def test_shares_blocks_and_rates_are_named() -> None:
    schedule = translated(RING, Kind.ALLGATHER)
    small = replace(schedule, chunks=(Chunk(Fraction(1, 8), 0),))
    refused(small, "block with owner 0: shares must add up to 1/4, got 1/8")
    alone, moved = judged(small)
    assert len(alone.errors) + 3 == len(moved.errors)
    check_counted(small, moved.errors)
    alltoall = translated(RING, Kind.ALLTOALL)
    refused(
        replace(alltoall, chunks=(replace(alltoall.chunks[0], share=Fraction(1, 2)), *alltoall.chunks[1:])),
        "block with owner 0 and target 1: shares must add up to 1/4, got 1/2",
    )
    allreduce = translated(RING, Kind.ALLREDUCE)
    refused(
        replace(allreduce, chunks=(Chunk(Fraction(1, 5), 0),)),
        "block with owner any: shares must add up to 1, got 4/5",
    )
    # Beyond the digits that the whole buffer needs, too.
    refused(
        replace(schedule, chunks=(Chunk(2**28 + Fraction(1, 4), 0),)),
        "block with owner 0: shares must add up to 1/4, got 1073741825/4",
    )
    refused(replace(schedule, rate=schedule.rate / 2), f"rate: {schedule.rate / 2} GB/s declared")
    refused(
        replace(schedule, rate=schedule.rate * 2),
        f"(and 3 more links): carries 2 GB/s at the declared rate of {schedule.rate * 2} GB/s",
    )
    pair = translated(circulant(2, {1: 1}), Kind.ALLGATHER)
    refused(
        replace(pair, rate=pair.rate * 3),
        f"(and 1 more links): carries 3 GB/s at the declared rate of {pair.rate * 3} GB/s",
    )
    refused(
        replace(schedule, bound=Bound(Fraction(9), Cut(frozenset({0}), Fraction(2)))),
        "bound: 9 GB/s declared, its certificate proves 8 GB/s",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_no_block_are_named(kind: Kind) -> None:
    schedule = translated(hub(4), kind)  # the last vertex is a switch: no rank has its number
    target = None if kind is Kind.ALLTOALL else 1
    *chunks, last = schedule.chunks
    strange = replace(schedule, chunks=(*chunks, replace(last, target=target)))
    refused(strange, f"{kind} among 4 ranks moves no block with owner ")
    whole = verify(strange.expand(), max_errors=10**6)
    moved = verify(strange, every_translate=True, max_errors=10**6)
    assert unlinked(moved) == unlinked(whole)
    check_counted(strange, moved.errors)


def test_chunks_are_named_as_representatives_or_as_written_out() -> None:
    # 0 -> 1 -> 2 -> 3, of which the last is gone: chunk g of the four misses rank g + 3.
    chain = (Transfer(0, 0, 1, 0), Transfer(0, 1, 2, 1))
    schedule = replace(translated(RING, Kind.ALLGATHER), transfers=chain)
    alone, moved = judged(schedule)
    assert alone.errors[0] == "chunk 0: rank 3 must end with the contribution of rank 0, got that of no rank"
    assert moved.errors[1] == "chunk 1: rank 0 must end with the contribution of rank 1, got that of no rank"
    assert len([line for line in moved.errors if line.startswith("chunk")]) == 4


@pytest.mark.parametrize("pair", [((0, 1), (0, 3)), ((0, 1), (2, 1))])
def test_hops_go_where_their_ends_do(pair: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Two links whose images are exchanged, of one tail or one head: no check of translations passes it."""
    chain = (Transfer(0, 0, 1, 0), Transfer(0, 1, 2, 1), Transfer(0, 2, 3, 2))
    schedule = replace(translated(RING, Kind.ALLGATHER), transfers=chain)
    ends = [(link.src, link.dst) for link in RING.links]
    image = {(a, b): ((a + 1) % 4, (b + 1) % 4) for a, b in ends}
    image |= {pair[0]: image[pair[1]], pair[1]: image[pair[0]]}
    loads: Counter[tuple[int, int]] = Counter()
    lost = 0
    for first in range(4):
        for hop in ((0, 1), (1, 2), (2, 3)):
            moved = hop
            for _ in range(first):
                moved = image[moved]
            is_right = moved == tuple((end + first) % 4 for end in hop)
            loads[moved] += is_right
            lost += not is_right
    errors = Errors(9)
    group = check_group(schedule, errors)
    assert group is not None
    images = np.array([[ends.index(image[hop]) for hop in ends]])
    counted, *_ = check_every_translate(schedule, replace(group, link_images=images), errors)
    assert errors.all() == (f"transfers: {lost} hops are moved to where there is no link",)
    assert counted == {hop: Fraction(count, 4) for hop, count in loads.items() if count}
