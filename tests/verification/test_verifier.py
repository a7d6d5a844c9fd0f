"""Valid schedules of every kind pass; every way to break one is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.bounds import bound
from arborcast.synth.certificate import Bound, Cut, Scope
from arborcast.synth.collective import NAMED_KINDS, Collective, Demand, Kind
from arborcast.synth.schedule import Chunk, Method, Schedule
from arborcast.synth.topology import Link, Topology
from arborcast.synth.verification import replay
from arborcast.synth.verification.verifier import verify
from tests.support.drawn_implicit import circulant, translated
from tests.support.drawn_in_network import drawn_transfers


def both_ways(
    name: str, ranks: int, pairs: Sequence[tuple[int, int]], switches: Sequence[str] = ()
) -> Topology:
    links = [Link(*pair, Fraction(1)) for a, b in pairs for pair in ((a, b), (b, a))]
    return Topology.build(name, ranks, links, switches)


LINE = both_ways("line", 3, [(0, 1), (1, 2)])
PAIR = both_ways("pair", 2, [(0, 1)])
SQUARE = both_ways("square", 4, [(0, 1), (1, 2), (2, 3), (0, 3)])
STAR = both_ways("star", 3, [(0, 3), (1, 3), (2, 3)], ["hub"])
RELAY = both_ways("relay", 3, [(0, 2), (2, 1)])


def draw(
    topology: Topology,
    collective: Collective,
    chunks: Sequence[Chunk],
    steps: Sequence[str],
    *,
    rounds: Sequence[int] | None = None,
) -> Schedule:
    """Steps as `drawn_transfers` has them."""
    proven = bound(topology, collective)
    return Schedule.build(
        topology, collective, Method("drawn"), proven, chunks, drawn_transfers(steps), rounds
    )


def on(topology: Topology, kind: str, root: int = 0, ranks: Sequence[int] | None = None) -> Collective:
    return Collective.on(topology, kind, root=root, ranks=ranks)


def custom(topology: Topology, *blocks: tuple[list[int], list[int]]) -> Collective:
    """Each block as (who holds it, who must get it)."""
    return Collective.custom(topology, [Demand(frozenset(at), frozenset(to)) for at, to in blocks])


def parts(share: str, *owners: int, target: int | None = None) -> list[Chunk]:
    return [Chunk(Fraction(share), owner, target) for owner in owners]


def pairwise_chunks(ranks: int) -> list[Chunk]:
    return [Chunk(Fraction(1, ranks), a, b) for a in range(ranks) for b in range(ranks) if a != b]


VALID: dict[str, tuple[Schedule, str]] = {
    "broadcast": (draw(LINE, on(LINE, "broadcast"), parts("1", 0), ["0>1:0", "1>2:0"]), "1"),
    "broadcast both ways round": (
        draw(
            SQUARE,
            on(SQUARE, "broadcast"),
            parts("1/2", 0, 0),
            ["0>1:0 0>3:1", "1>2:0 3>2:1", "2>3:0 2>1:1"],
        ),
        "2",
    ),
    "broadcast through a switch": (
        draw(STAR, on(STAR, "broadcast"), parts("1", 0), ["0>3>1:0", "1>3>2:0"]),
        "1",
    ),
    "broadcast over a relay": (
        draw(RELAY, on(RELAY, "broadcast", ranks=[0, 1]), parts("1", 0), ["0>2:0", "2>1:0"]),
        "1",
    ),
    "reduce": (draw(LINE, on(LINE, "reduce", root=2), parts("1", 2), ["0>1:0+", "1>2:0+"]), "1"),
    "reduce, two at once": (draw(LINE, on(LINE, "reduce", root=1), parts("1", 1), ["0>1:0+ 2>1:0+"]), "1"),
    "allgather": (
        draw(LINE, on(LINE, "allgather"), parts("1/3", 0, 1, 2), ["0>1:0 1>0:1 1>2:1 2>1:2", "1>2:0 1>0:2"]),
        "3/2",
    ),
    "reduce-scatter": (
        draw(
            LINE,
            on(LINE, "reduce-scatter"),
            parts("1/3", 0, 1, 2),
            ["2>1:0+ 0>1:2+", "1>0:0+ 1>2:2+ 0>1:1+ 2>1:1+"],
        ),
        "3/2",
    ),
    "allreduce by a chain": (
        draw(LINE, on(LINE, "allreduce"), parts("1", 2), ["0>1:0+", "1>2:0+", "2>1:0", "1>0:0"]),
        "1",
    ),
    "allreduce by an exchange": (draw(PAIR, on(PAIR, "allreduce"), parts("1", 0), ["0>1:0+ 1>0:0+"]), "1"),
    "allreduce over a relay": (
        draw(
            RELAY,
            on(RELAY, "allreduce", ranks=[0, 1]),
            parts("1", 0),
            ["0>2:0+ 1>2:0+", "2>0:0 2>1:0"],
        ),
        "1",
    ),
    "gather": (
        draw(
            LINE,
            on(LINE, "gather"),
            [*parts("1/3", 1, 2, target=0)],
            ["1>0:0 2>1:1", "1>0:1"],
        ),
        "3/2",
    ),
    "scatter": (
        draw(
            LINE,
            on(LINE, "scatter"),
            [Chunk(Fraction(1, 3), 0, 1), Chunk(Fraction(1, 3), 0, 2)],
            ["0>1:1", "0>1:0 1>2:1"],
        ),
        "3/2",
    ),
    "alltoall": (
        draw(
            LINE,
            on(LINE, "alltoall"),
            pairwise_chunks(3),
            ["0>1:0 0>1:1 1>0:2 1>2:3 2>1:4 2>1:5", "1>2:1 1>0:4"],
        ),
        "3/2",
    ),
    "allgather in rounds": (
        draw(
            LINE,
            on(LINE, "allgather"),
            parts("1/3", 0, 1, 2),
            ["0>1:0 1>0:1 1>2:1 2>1:2", "1>2:0 1>0:2"],
            rounds=[1, 1],
        ),
        "3/2",
    ),
    "alltoall in rounds": (
        draw(
            LINE,
            on(LINE, "alltoall"),
            pairwise_chunks(3),
            ["0>1:0 0>1:1 1>0:2 1>2:3 2>1:4 2>1:5", "1>2:1 1>0:4"],
            rounds=[2, 1],
        ),
        "1",
    ),
    "custom, one block at two ranks": (
        draw(
            LINE,
            custom(LINE, ([0, 2], [1]), ([1], [0, 2])),
            [Chunk(Fraction(1, 2), 0, demand=0), Chunk(Fraction(1, 2), 1, demand=1)],
            ["2>1:0 1>0:1 1>2:1"],
        ),
        "2",
    ),
    "custom in rounds": (
        draw(
            SQUARE,
            custom(SQUARE, ([0, 1], [2, 3]), ([3], [1])),
            [Chunk(Fraction(1, 2), 0, demand=0), Chunk(Fraction(1, 2), 3, demand=1)],
            ["1>2:0 3>0:1", "2>3:0 0>1:1"],
            rounds=[1, 1],
        ),
        "1",
    ),
}


@pytest.mark.parametrize("name", VALID)
def test_valid_schedules_pass_with_the_drawn_rate(name: str) -> None:
    schedule, rate = VALID[name]
    verdict = verify(schedule)
    assert verdict.errors == ()
    assert verdict.correct
    assert verdict.rate == schedule.rate == Fraction(rate)
    assert verdict.loads == schedule.load


def test_all_kinds_are_drawn() -> None:
    assert {schedule.collective.kind for schedule, _ in VALID.values()} == set(Kind)


def test_the_fullest_link_is_full_at_the_declared_rate() -> None:
    assert verify(VALID["allgather"][0]).max_link_load == 1
    # Step by step the busy links rest: 2 chunks of 1/3 in 3 rounds.
    assert verify(VALID["alltoall in rounds"][0]).max_link_load == Fraction(2, 3)


def test_loads_are_counted_over_bandwidths() -> None:
    """1/3 over a link of 5/2 GB/s and 2/3 over one of 4 GB/s, which is the fuller one: 6 GB/s."""
    two_ways = Topology.build(
        "two ways", 3, [Link(0, 1, Fraction(5, 2)), Link(0, 2, Fraction(4)), Link(2, 1, Fraction(4))]
    )
    schedule = draw(
        two_ways,
        on(two_ways, "broadcast", ranks=(0, 1)),
        parts("1/3", 0, 0, 0),
        ["0>1:0 0>2:1 0>2:2", "2>1:1 2>1:2"],
    )
    verdict = verify(schedule)
    assert (verdict.correct, verdict.rate, verdict.max_link_load) == (True, 6, 1)
    assert verdict.loads == {(0, 1): Fraction(1, 3), (0, 2): Fraction(2, 3), (2, 1): Fraction(2, 3)}
    slower = verify(replace(schedule, rate=Fraction(3)))
    assert (slower.correct, slower.rate, slower.max_link_load) == (False, 6, Fraction(1, 2))


def test_a_schedule_that_moves_nothing_has_no_rate() -> None:
    whole = VALID["broadcast"][0]
    verdict = verify(replace(whole, transfers=()))
    assert not verdict.correct and (verdict.rate, verdict.max_link_load) == (0, 0)


@pytest.mark.parametrize("kind", NAMED_KINDS)
@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (3, 1), (2, 0, 3)])
def test_before_and_after_agree_with_the_definition_of_collectives(
    kind: Kind, ranks: tuple[int, ...]
) -> None:
    collective = Collective(kind, ranks, ranks[-1] if kind.has_root else None)
    everyone = sum(1 << rank for rank in ranks)
    for block in collective.blocks():
        chunk = Chunk(Fraction(1), ranks[0] if block.owner is None else block.owner, block.target)
        held = replay.held_before(collective, chunk)
        receivers, needed = replay.needed_after(collective, chunk, everyone)
        for rank in range(4):
            assert {r for r in range(4) if held.get(rank, 0) >> r & 1} == collective.before(rank, block)
            want = collective.after(rank, block)
            assert (rank in receivers) == (want is not None)
            if want is not None:
                assert needed == sum(1 << r for r in want)


# --- broken on purpose, drawn ---------------------------------------------------------------------------


def broken(schedule: Schedule, *messages: str) -> None:
    verdict = verify(schedule)
    assert not verdict.correct
    for message in messages:
        assert message in verdict.errors, verdict.errors


def without(schedule: Schedule, position: int) -> Schedule:
    kept = tuple(t for index, t in enumerate(schedule.transfers) if index != position)
    return replace(schedule, transfers=kept)


def test_a_dropped_first_transfer() -> None:
    broken(
        without(VALID["broadcast"][0], 0),
        "step 1: rank 1 sends chunk 0 before it holds any of it",
    )


def test_a_dropped_last_transfer() -> None:
    broken(
        without(VALID["broadcast"][0], 1),
        "chunk 0: rank 2 must end with the contribution of rank 0, got that of no rank",
    )


def test_a_dropped_contribution() -> None:
    broken(
        without(VALID["reduce"][0], 0),
        "chunk 0: rank 2 must end with the contribution of ranks 0, 1, 2, got that of ranks 1, 2",
    )


def test_one_more_rank_that_gets_nothing() -> None:
    broken(
        draw(LINE, on(LINE, "broadcast"), parts("1", 0), []),
        "chunk 0: rank 1 must end with the contribution of rank 0, got that of no rank (and 1 more ranks)",
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("1>0:0+ 2>0:0+ 3>0:0+ 4>0:0+", "ranks 0, 1, 2, 3, ... (5 in all) (and 5 more ranks)"),
        ("1>0:0+ 2>0:0+ 3>0:0+", "ranks 0, 1, 2, 3 (and 5 more ranks)"),
    ],
)
def test_what_is_missing_is_told_in_few_words(given: str, words: str) -> None:
    links = [Link(a, b, Fraction(1)) for a in range(6) for b in range(6) if a != b]
    mesh = Topology.build("mesh", 6, links)
    schedule = draw(mesh, on(mesh, "allreduce"), parts("1", 0), [given, "0>1:0 0>2:0 0>3:0 0>4:0 0>5:0"])
    wanted = "chunk 0: rank 0 must end with the contribution of ranks 0, 1, 2, 3, ... (6 in all), got that of"
    broken(schedule, f"{wanted} {words}")


def test_swapped_steps_of_a_broadcast() -> None:
    schedule = VALID["broadcast"][0]
    swapped = tuple(replace(t, step=1 - t.step) for t in schedule.transfers)
    broken(replace(schedule, transfers=swapped), "step 0: rank 1 sends chunk 0 before it holds any of it")


def test_swapped_steps_of_a_reduce() -> None:
    schedule = VALID["reduce"][0]
    swapped = tuple(replace(t, step=1 - t.step) for t in schedule.transfers)
    broken(
        replace(schedule, transfers=swapped),
        "chunk 0: rank 2 must end with the contribution of ranks 0, 1, 2, got that of ranks 1, 2",
    )


def test_all_transfers_of_a_step_start_from_the_state_before_it() -> None:
    schedule = draw(LINE, on(LINE, "broadcast"), parts("1", 0), ["0>1:0 1>2:0"])
    broken(schedule, "step 0: rank 1 sends chunk 0 before it holds any of it")


def test_a_contribution_counted_twice() -> None:
    schedule = draw(LINE, on(LINE, "reduce", root=1), parts("1", 1), ["0>1:0+", "0>1:0+ 2>1:0+"])
    broken(schedule, "chunk 0: rank 1 would count rank 0's contribution twice in step 1")


def test_contributions_that_overlap_in_one_step() -> None:
    steps = ["0>1:0+ 0>3:0+", "1>2:0+ 3>2:0+"]
    schedule = draw(SQUARE, on(SQUARE, "reduce", root=2), parts("1", 2), steps)
    broken(schedule, "chunk 0: rank 2 would count rank 0's contribution twice in step 1")


def test_two_copies_into_one_place() -> None:
    steps = ["0>1:0 0>3:0", "1>2:0 3>2:0"]
    schedule = draw(SQUARE, on(SQUARE, "broadcast"), parts("1", 0), steps)
    broken(
        schedule,
        "step 1: rank 2 receives chunk 0 twice, last from rank 3; only reductions may meet in one step",
    )


@pytest.mark.parametrize("words", ["0>1:0 2>1:0+", "0>1:0+ 2>1:0"])
def test_a_copy_and_a_reduction_into_one_place(words: str) -> None:
    schedule = draw(LINE, on(LINE, "reduce", root=1), parts("1", 1), [words])
    broken(
        schedule,
        "step 0: rank 1 receives chunk 0 twice, last from rank 2; only reductions may meet in one step",
    )


def test_a_copy_that_throws_contributions_away() -> None:
    schedule = draw(LINE, on(LINE, "reduce", root=2), parts("1", 2), ["0>1:0", "1>2:0+"])
    broken(
        schedule, "chunk 0: rank 2 must end with the contribution of ranks 0, 1, 2, got that of ranks 0, 2"
    )


def test_a_rank_that_sends_to_itself() -> None:
    schedule = draw(STAR, on(STAR, "broadcast"), parts("1", 0), ["0>3>0:0 0>3>1:0", "1>3>2:0"])
    broken(schedule, "step 0: rank 0 sends chunk 0 to itself")


def test_an_overfull_link() -> None:
    schedule = replace(VALID["allgather"][0], rate=Fraction(2))
    verdict = verify(schedule)
    # 1 -> 2 carries the blocks of 0 and 1: 2/3 of the buffer.
    assert (
        "link 1->2: carries 4/3 GB/s at the declared rate of 2 GB/s, its bandwidth is 1 GB/s"
        in verdict.errors
    )
    assert verdict.max_link_load == Fraction(4, 3)
    assert verdict.rate == Fraction(3, 2)
    assert not any(line.startswith("rate:") for line in verdict.errors)  # the links say it


def test_an_overfull_link_of_a_switch_is_named() -> None:
    schedule = replace(VALID["broadcast through a switch"][0], rate=Fraction(3))
    broken(schedule, "link hub->1: carries 3 GB/s at the declared rate of 3 GB/s, its bandwidth is 1 GB/s")


def test_a_rate_declared_too_low() -> None:
    broken(replace(VALID["allgather"][0], rate=Fraction(1)), "rate: 1 GB/s declared, 3/2 GB/s recomputed")


def test_a_wrong_share() -> None:
    schedule = VALID["allgather"][0]
    chunks = (Chunk(Fraction(1, 4), 0), *schedule.chunks[1:])
    broken(replace(schedule, chunks=chunks), "block with owner 0: shares must add up to 1/3, got 1/4")


def test_shares_beyond_the_whole() -> None:
    schedule = draw(LINE, on(LINE, "broadcast"), parts("2/3", 0, 0), ["0>1:0 0>1:1", "1>2:0 1>2:1"])
    broken(schedule, "block with owner 0: shares must add up to 1, got 4/3")


def test_a_wrong_root() -> None:
    schedule = VALID["broadcast"][0]
    moved = Collective(Kind.BROADCAST, (0, 1, 2), root=2)
    broken(
        replace(schedule, collective=moved, bound=bound(LINE, moved)),
        "chunk 0: broadcast with root 2 moves no block with owner 0",
        "block with owner 2: shares must add up to 1, got 0",
    )


def test_a_wrong_owner() -> None:
    schedule = VALID["allgather"][0]
    chunks = (*schedule.chunks[:2], Chunk(Fraction(1, 3), 1))
    broken(
        replace(schedule, chunks=chunks),
        "block with owner 1: shares must add up to 1/3, got 2/3",
        "block with owner 2: shares must add up to 1/3, got 0",
    )


def test_an_owner_that_takes_no_part() -> None:
    schedule = draw(
        RELAY, on(RELAY, "allgather", ranks=[0, 1]), parts("1/2", 0, 2), ["0>2:0 2>1:1", "2>1:0 2>0:1"]
    )
    broken(schedule, "chunk 1: allgather among 2 ranks moves no block with owner 2")


def test_every_wrong_owner_is_named() -> None:
    schedule = VALID["broadcast both ways round"][0]
    chunks = [replace(chunk, owner=1) for chunk in schedule.chunks]
    assert len(chunks) == 2
    words = "broadcast with root 0 moves no block with owner 1"
    broken(replace(schedule, chunks=tuple(chunks)), f"chunk 0: {words}", f"chunk 1: {words}")


def test_a_wrong_target() -> None:
    schedule = VALID["gather"][0]
    chunks = (schedule.chunks[0], replace(schedule.chunks[1], target=1))
    broken(
        replace(schedule, chunks=chunks),
        "chunk 1: gather with root 0 moves no block with owner 2 and target 1",
    )


def test_a_link_too_full_for_its_rounds() -> None:
    schedule = replace(VALID["alltoall in rounds"][0], rounds=(1, 1), rate=Fraction(3, 2))
    broken(schedule, "step 0: link 0->1 carries 2 chunks, 1 rounds of 1 allow 1")


def test_rounds_for_steps_that_do_not_exist() -> None:
    schedule = replace(VALID["allgather in rounds"][0], rounds=(1, 1, 1), rate=Fraction(1))
    broken(schedule, "rounds: 2 steps need as many entries, got 3")


def test_rounds_need_equal_shares() -> None:
    schedule = VALID["allgather in rounds"][0]
    chunks = (*schedule.chunks[:2], Chunk(Fraction(1, 6), 2), Chunk(Fraction(1, 6), 2))
    again = tuple(replace(t, chunk=3) for t in schedule.transfers if t.chunk == 2)
    halves = replace(schedule, chunks=chunks, transfers=(*schedule.transfers, *again))
    broken(halves, "rounds: chunks must be of one share, got 1/6 and 1/3")
    assert verify(halves).rate == 0
    nothing = verify(replace(schedule, transfers=(), rounds=()))
    assert nothing.rate == 0 and not any(line.startswith("rounds:") for line in nothing.errors)


def test_a_rate_beyond_the_rounds() -> None:
    """And no more is said of it, though links rest too little at that rate."""
    schedule = replace(VALID["alltoall in rounds"][0], rate=Fraction(6, 5))
    broken(schedule, "rate: 6/5 GB/s declared, 1 GB/s recomputed")
    twice = verify(replace(schedule, rate=Fraction(2)))
    assert not any("carries" in line for line in twice.errors)


@pytest.mark.parametrize("name", VALID)
def test_every_translate_of_what_is_written_out_is_itself(name: str) -> None:
    schedule = VALID[name][0]
    assert verify(schedule, every_translate=True) == verify(schedule)


def test_capacity_of_rounds_is_bandwidth_over_the_unit() -> None:
    wide = Topology.build("wide", 2, [Link(0, 1, Fraction(3, 2)), Link(1, 0, Fraction(1, 2))])
    three = parts("1/3", 0, 0, 0)
    schedule = draw(wide, on(wide, "broadcast"), three, ["0>1:0 0>1:1 0>1:2"], rounds=[1])
    assert verify(schedule).correct
    assert verify(schedule).rate == Fraction(3, 2)


def test_the_unit_of_rounds_divides_every_bandwidth() -> None:
    """2 and 3 GB/s: the unit is 1 GB/s, so that a round carries 2 and 3 chunks, and not one more."""
    wide = Topology.build("two and three", 2, [Link(0, 1, Fraction(3)), Link(1, 0, Fraction(2))])
    exchange = parts("1/6", 0, 0, 0, 1, 1, 1)
    full = ["0>1:0 0>1:1 0>1:2 1>0:3 1>0:4", "1>0:5"]
    schedule = draw(wide, on(wide, "allgather"), exchange, full, rounds=[1, 1])
    assert verify(schedule).correct
    assert verify(schedule).rate == 3  # six chunks in two rounds of a unit
    broken(
        draw(wide, on(wide, "allgather"), exchange, [" ".join(full)], rounds=[1]),
        "step 0: link 1->0 carries 3 chunks, 1 rounds of 2 allow 2",
    )


def test_a_bound_that_its_certificate_does_not_prove() -> None:
    schedule = VALID["broadcast"][0]
    better = Bound(Fraction(2), schedule.bound.certificate)
    broken(replace(schedule, bound=better), "bound: 2 GB/s declared, its certificate proves 1 GB/s")


def test_a_certificate_that_is_none() -> None:
    schedule = VALID["broadcast"][0]
    nowhere = Bound(schedule.bound.rate, Cut(frozenset({99}), Fraction(1)))
    verdict = verify(replace(schedule, bound=nowhere))
    assert not verdict.correct and verdict.errors[0].startswith("bound: ")


def test_a_bound_may_claim_less_than_its_certificate() -> None:
    schedule = VALID["broadcast"][0]
    assert verify(replace(schedule, bound=replace(schedule.bound, scope=Scope.TREES))).correct


def test_a_rate_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """No true certificate gets here: a rate beyond one would show a bug in the bound."""
    monkeypatch.setattr("arborcast.synth.certification.certified_rate", lambda *_: Fraction(1))
    low = Bound(Fraction(1), Cut(frozenset({0}), Fraction(1)))
    broken(
        replace(VALID["broadcast both ways round"][0], bound=low),
        "bound: 1 GB/s declared for every schedule, this one reaches 2 GB/s",
    )


def test_a_rate_beyond_a_bound_of_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """It limits what follows trees, and an exchange does not."""
    monkeypatch.setattr("arborcast.synth.certification.certified_rate", lambda *_: Fraction(1, 2))
    monkeypatch.setattr("arborcast.synth.certification.certified_scope", lambda *_: Scope.TREES)
    low = Bound(Fraction(1, 2), Cut(frozenset({0}), Fraction(1)), Scope.TREES)
    broken(
        replace(VALID["allreduce by a chain"][0], bound=low),
        "bound: 1/2 GB/s declared for schedules that reduce and broadcast along trees, "
        "this one reaches 1 GB/s",
    )
    assert verify(replace(VALID["allreduce by an exchange"][0], bound=low)).correct


@pytest.mark.parametrize(
    ("chunks", "steps", "follows"),
    [
        (1, ["0>1:0+", "1>2:0+", "2>1:0", "1>0:0"], True),
        (1, ["0>1:0+", "1>2:0+", "1>0:0", "2>1:0"], False),  # copies pass rank 1 before it has any
        (1, ["1>2:0+", "0>1:0+", "2>1:0", "1>0:0"], False),  # what rank 0 adds comes too late at rank 1
        (1, ["0>1:0+", "1>2:0+", "2>1:0+", "1>0:0+"], False),  # nothing is copied back
        (1, ["0>1:0", "1>2:0", "2>1:0", "1>0:0"], False),  # nothing is added
        (1, ["0>1:0+", "1>2:0+", "2>1:0"], False),  # rank 0 gets nothing back
        (1, ["1>2:0+", "2>1:0", "1>0:0"], False),  # rank 0 adds nothing
        (2, ["0>1:0+", "1>2:0+", "2>1:0 0>1:1+", "1>0:0 1>2:1+", "2>1:1", "1>0:1"], True),
        (2, ["0>1:0+", "1>2:0+ 0>1:1+", "2>1:0 1>2:1+", "1>0:0 2>1:1"], False),  # one of two chunks does
    ],
)
def test_what_follows_trees(
    monkeypatch: pytest.MonkeyPatch, chunks: int, steps: list[str], follows: bool
) -> None:
    """A bound of trees, set far too low here, is exceeded by what follows them, in any order."""
    monkeypatch.setattr("arborcast.synth.certification.certified_rate", lambda *_: Fraction(1, 9))
    monkeypatch.setattr("arborcast.synth.certification.certified_scope", lambda *_: Scope.TREES)
    low = Bound(Fraction(1, 9), Cut(frozenset({0}), Fraction(1)), Scope.TREES)
    schedule = draw(LINE, on(LINE, "allreduce"), parts(f"1/{chunks}", *[2] * chunks), steps)
    for transfers in (schedule.transfers, schedule.transfers[::-1]):
        errors = verify(replace(schedule, bound=low, transfers=transfers)).errors
        assert any(line.startswith("bound: 1/9 GB/s declared") for line in errors) == follows


def test_a_bound_of_trees_that_claims_every_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arborcast.synth.certification.certified_scope", lambda *_: Scope.TREES)
    broken(
        VALID["broadcast"][0],
        "bound: declared for every schedule, its certificate speaks of "
        "schedules that reduce and broadcast along trees",
    )


def test_every_translate_is_replayed_where_asked() -> None:
    """Objections to a schedule in implicit form number its representatives, and all chunks where asked."""
    ring = circulant(4, {1: 1})
    schedule = translated(ring, Kind.ALLGATHER)
    lost = replace(schedule, transfers=schedule.transfers[:-1])
    few, all_of_them = (verify(lost, every_translate=asked) for asked in (False, True))
    assert few.errors != all_of_them.errors
    assert (verify(lost), verify(lost, every_translate=True)) == (few, all_of_them)


def test_errors_beyond_the_limit_are_counted() -> None:
    errors = replay.Errors(2)
    for number in range(4):
        assert (errors.count, errors.is_full) == (number, number >= 2)
        errors.add(f"line {number}")
    errors.add_unspelled(3)
    assert errors.count == 7
    assert errors.all() == ("line 0", "line 1", "and 5 more")


def test_many_errors_are_counted() -> None:
    chunks = parts("1/50", *[0] * 50)
    schedule = draw(LINE, on(LINE, "broadcast"), chunks, ["0>1:0", "1>2:0"])
    verdict = verify(schedule, max_errors=5)
    assert len(verdict.errors) == 6
    # 49 chunks reach nobody, and the bound of 1 GB/s is exceeded by what is left.
    assert verdict.errors[-1] == "and 45 more"
    assert len(verify(schedule).errors) == 21 and verify(schedule).errors[-1] == "and 30 more"


# --- broken on purpose, everywhere ----------------------------------------------------------------------


@settings(max_examples=200)
@given(st.sampled_from(sorted(VALID)), st.data())
def test_no_transfer_can_be_dropped(name: str, data: st.DataObject) -> None:
    """No drawn schedule moves more than it must, so each transfer counts."""
    schedule = VALID[name][0]
    position = data.draw(st.integers(0, len(schedule.transfers) - 1))
    verdict = verify(without(schedule, position))
    assert any("before it holds" in line or "must end with" in line for line in verdict.errors)


@settings(max_examples=200)
@given(st.sampled_from(sorted(VALID)), st.data())
def test_no_reduction_can_be_repeated(name: str, data: st.DataObject) -> None:
    schedule = VALID[name][0]
    reductions = [t for t in schedule.transfers if t.reduce]
    if not reductions:
        return
    twin = data.draw(st.sampled_from(reductions))
    again = replace(schedule, transfers=(*schedule.transfers, replace(twin, step=schedule.steps)))
    assert any("contribution twice in step" in line for line in verify(again).errors)


@settings(max_examples=200)
@given(st.sampled_from(sorted(VALID)), st.data())
def test_no_share_can_change(name: str, data: st.DataObject) -> None:
    schedule = VALID[name][0]
    index = data.draw(st.integers(0, len(schedule.chunks) - 1))
    factor = data.draw(st.fractions(Fraction(1, 8), 2).filter(lambda f: f != 1))
    chunks = list(schedule.chunks)
    chunks[index] = replace(chunks[index], share=chunks[index].share * factor)
    assert any("must add up to" in line for line in verify(replace(schedule, chunks=tuple(chunks))).errors)


@settings(max_examples=200)
@given(st.sampled_from(sorted(VALID)), st.data())
def test_no_other_owner_will_do(name: str, data: st.DataObject) -> None:
    schedule = VALID[name][0]
    if schedule.collective.kind is Kind.ALLREDUCE:  # its owner is only where the tree had its root
        return
    index = data.draw(st.integers(0, len(schedule.chunks) - 1))
    chunk = schedule.chunks[index]
    owner = data.draw(st.integers(0, schedule.topology.ranks - 1).filter(lambda rank: rank != chunk.owner))
    chunks = list(schedule.chunks)
    chunks[index] = replace(chunk, owner=owner)
    assert any(
        "moves no block" in line or "must add up" in line
        for line in verify(replace(schedule, chunks=tuple(chunks))).errors
    )


@settings(max_examples=200)
@given(st.sampled_from(sorted(VALID)), st.fractions(Fraction(1, 8), 8).filter(lambda f: f != 1))
def test_no_other_rate_can_be_declared(name: str, factor: Fraction) -> None:
    schedule = VALID[name][0]
    verdict = verify(replace(schedule, rate=schedule.rate * factor))
    expected = "its bandwidth is" if factor > 1 and schedule.rounds is None else "GB/s recomputed"
    assert any(expected in line for line in verdict.errors)
    assert verdict.rate == schedule.rate


@settings(max_examples=200)
@given(st.sampled_from(sorted(VALID)), st.data())
def test_any_mutation_is_judged_as_slow_sets_judge_it(name: str, data: st.DataObject) -> None:
    """Steps, ends and the reduce flag changed at will: agree with a replay written with plain sets."""
    schedule = VALID[name][0]
    transfers = list(schedule.transfers)
    for _ in range(data.draw(st.integers(0, 3))):
        index = data.draw(st.integers(0, len(transfers) - 1))
        transfers[index] = replace(
            transfers[index],
            step=data.draw(st.integers(0, schedule.steps - 1)),
            reduce=data.draw(st.booleans()),
        )
    mutant = Schedule.build(
        schedule.topology,
        schedule.collective,
        schedule.method,
        schedule.bound,
        schedule.chunks,
        transfers,
    )
    assert verify(mutant).correct == slow_replay(mutant)


def slow_replay(schedule: Schedule) -> bool:
    collective = schedule.collective
    ranks = range(schedule.topology.ranks)
    blocks = [collective.block_of(chunk.owner, chunk.target, chunk.demand) for chunk in schedule.chunks]
    state = {
        (rank, index): set(collective.before(rank, blocks[index]))
        for index in range(len(blocks))
        for rank in ranks
    }
    for step in range(schedule.steps):
        now = {place: set(held) for place, held in state.items()}
        written: dict[tuple[int, int], list[bool]] = {}
        for t in (t for t in schedule.transfers if t.step == step):
            sent = state[t.src, t.chunk]
            place = (t.dst, t.chunk)
            if not sent or (t.reduce and sent & now[place]):
                return False
            written.setdefault(place, []).append(t.reduce)
            now[place] = now[place] | sent if t.reduce else set(sent)
        if any(len(kinds) > 1 and not all(kinds) for kinds in written.values()):
            return False
        state = now
    return all(
        (want := collective.after(rank, blocks[index])) is None or state[rank, index] == want
        for index in range(len(blocks))
        for rank in ranks
    )
