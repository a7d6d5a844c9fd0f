"""Valid schedules of every kind pass; every way to break one is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.certificate import Bound, Cut, Scope
from arborcast.synth.collective import NAMED_KINDS, Collective, Kind
from arborcast.synth.schedule import Chunk, Schedule
from arborcast.synth.topology import Link, Topology
from arborcast.synth.verification import replay
from arborcast.synth.verification.verifier import verify
from tests.support.drawn_implicit import circulant, translated
from tests.verification.drawn import CASES, SlowReplay, check_objections, draw, fabric, right, without

LINE = fabric("line")
VALID = {name: right(name) for name in CASES["right"]}


def on(topology: Topology, kind: str, root: int = 0, ranks: Sequence[int] | None = None) -> Collective:
    return Collective.on(topology, kind, root=root, ranks=ranks)


def parts(share: str, *owners: int) -> list[Chunk]:
    return [Chunk(Fraction(share), owner) for owner in owners]


@pytest.mark.parametrize("name", VALID)
def test_valid_schedules_pass_with_the_drawn_rate(name: str) -> None:
    schedule, rate = VALID[name]
    verdict = verify(schedule)
    assert verdict.errors == ()
    assert verdict.correct
    assert verdict.rate == schedule.rate == rate
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


@pytest.mark.parametrize("name", CASES["broken"])
def test_what_is_broken_is_named(name: str) -> None:
    check_objections(name, "broken")


def broken(schedule: Schedule, *messages: str) -> None:
    verdict = verify(schedule)
    assert not verdict.correct
    for message in messages:
        assert message in verdict.errors, verdict.errors


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
    assert verify(mutant).correct == SlowReplay(mutant).is_right()
