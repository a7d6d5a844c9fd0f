"""Races of searches whose answers and times are scripted: on a clock of our own, and in real processes."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast.synth.chunks.encodings.registry import ENCODINGS, Encoding
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkOrbits, Send
from arborcast.synth.chunks.problem.outcome import Feasible, Infeasible, Instance, Outcome, Unknown
from arborcast.synth.chunks.solvers import portfolio
from arborcast.synth.chunks.solvers.portfolio import (
    NoneSymmetric,
    PortfolioMember,
    RaceResult,
    effort_of,
    race,
)
from arborcast.synth.chunks.solvers.worker import WorkerDiedError, Workers
from arborcast.synth.collective import Collective
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import Prover, TimedOutError
from arborcast.synth.progress import listening
from arborcast.topologies import load

RING = load("ring:4")
PROBLEM = ChunkProblem.of(RING, Collective.on(RING, "allgather"))
IDENTITY, QUARTER, HALF = (0, 1, 2, 3), (1, 2, 3, 0), (2, 3, 0, 1)
WHOLE = ChunkOrbits.trivial(PROBLEM, 4)
ROTATED = ChunkOrbits(PROBLEM, 4, (IDENTITY, QUARTER, HALF, (3, 0, 1, 2)))
HALVED = ChunkOrbits(PROBLEM, 4, (IDENTITY, HALF))

REFUTED, CLAIMED = Infeasible(Prover.CADICAL), Infeasible(Prover.HIGHS)

Script = tuple[str, ChunkOrbits]


@pytest.fixture(scope="module")
def pair() -> Iterator[Workers]:
    with Workers(2) as workers:
        yield workers


def run(
    workers: Workers, *scripts: Script, seed: int = 0, slices: int | None = None, seconds: float | None = 60
) -> RaceResult:
    """A race of scripted searches (see `fake_searches`), whose encodings are named "0:script" and so on."""
    names = [f"{place}:{script}" for place, (script, _) in enumerate(scripts)]
    return race(
        [PortfolioMember(name, orbits) for name, (_, orbits) in zip(names, scripts, strict=True)],
        steps=2,
        rounds=3,
        seed=seed,
        deadline=Deadline.after(seconds),
        workers=workers,
        slices=slices,
        encodings={
            name: Encoding(f"tests.support.fake_searches:{script}", "")
            for name, (script, _) in zip(names, scripts, strict=True)
        },
    )


def found(slices: int, seed: int = 0) -> Feasible:
    """What a scripted search finds in its last slice."""
    return Feasible(tuple(map(effort_of, range(slices))), (Send(0, 0, 0, seed),))


# ---------------------------------------------------------------- by the rules, on any machine


@dataclass
class _Machine:
    """A clock of its own and searches that take as long on it as we like."""

    plans: dict[str, ChunkPlan]
    count: int
    chance: random.Random
    now: float = 0.0

    def take(self, name: str) -> _FakeWorker:
        return _FakeWorker(self, self.plans[name])

    def give_back(self, worker: _FakeWorker) -> None:
        worker.is_busy = False

    def wait(self, workers: Collection[_FakeWorker], deadline: Deadline) -> list[_FakeWorker]:
        assert 0 < len(workers) <= self.count
        self.now = max(self.now, min(worker.end for worker in workers))
        return [worker for worker in workers if worker.end <= self.now]


@dataclass(frozen=True)
class ChunkPlan:
    """What a member answers and in which slice: "found", "impossible", "claimed", "dies"; and its group."""

    answer: str
    at: int
    orbits: ChunkOrbits


class _FakeWorker:
    def __init__(self, machine: _Machine, plan: ChunkPlan) -> None:
        self.machine, self.plan, self.is_busy, self.slices = machine, plan, False, 0

    def start(self, name: str, function: object, encoding: str, instance: Instance | None, *_: int) -> None:
        assert (instance is not None) == (self.slices == 0)
        self.is_busy = True
        # Times of few values, so that several are often done at the same moment.
        self.end = self.machine.now + self.machine.chance.choice([0, 1, 1, 2, 5, 40])
        self.slices += 1

    def result(self) -> Outcome:
        self.is_busy = False
        if self.slices <= self.plan.at:
            return Unknown()
        match self.plan.answer:
            case "found":
                return found(self.slices)
            case "impossible":
                return REFUTED
            case "claimed":
                return CLAIMED
            case _:
                raise WorkerDiedError("gone")


def by_the_rules(plans: Sequence[ChunkPlan], slices: int) -> tuple[object, int | None]:
    """The outcome and whose it is, one turn after the other."""
    left = dict(enumerate(plans))
    has_died = False
    is_claimed = False
    for index in range(slices):
        for preference, plan in list(left.items()):
            if preference not in left or plan.at != index:
                continue
            if plan.answer == "found":
                return found(index + 1), preference
            if plan.answer == "impossible" and plan.orbits is WHOLE:
                return REFUTED, None
            del left[preference]
            if plan.answer == "dies":
                has_died = True
            elif plan.answer == "impossible":
                left = {other: p for other, p in left.items() if p.orbits is not plan.orbits}
            elif plan.orbits is WHOLE:
                is_claimed = True
                left = {other: p for other, p in left.items() if p.orbits is WHOLE}
    if is_claimed:
        return CLAIMED, None
    if left:
        return Unknown(), None
    return (WorkerDiedError if has_died else NoneSymmetric()), None


@st.composite
def fields(draw: st.DrawFn) -> list[ChunkPlan]:
    """Members who do not contradict each other, each with an encoding of its own."""
    possible = {WHOLE: draw(st.booleans())}
    for orbits in (ROTATED, HALVED):
        possible[orbits] = possible[WHOLE] and draw(st.booleans())

    def plan(orbits: ChunkOrbits, answer: str, at: int) -> ChunkPlan:
        return ChunkPlan("found" if possible[orbits] and answer != "dies" else answer, at, orbits)

    answers = st.sampled_from(["impossible", "impossible", "claimed", "dies"])
    return draw(
        st.lists(
            st.builds(plan, st.sampled_from([WHOLE, ROTATED, HALVED]), answers, st.integers(0, 4)),
            min_size=1,
            max_size=6,
        )
    )


@given(fields(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_no_machine_changes_the_verdict(plans: list[ChunkPlan], slices: int, count: int, load: int) -> None:
    names = {str(place): plan for place, plan in enumerate(plans)}
    machine = _Machine(names, count, random.Random(load))
    members = [PortfolioMember(name, plan.orbits) for name, plan in names.items()]
    expected, winner = by_the_rules(plans, slices)

    def result() -> RaceResult:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(portfolio, "wait", machine.wait)
            return race(
                members,
                steps=2,
                rounds=3,
                seed=0,
                deadline=Deadline(),
                workers=machine,  # type: ignore[arg-type]
                slices=slices,
                encodings=dict.fromkeys(names, Encoding("", "")),
            )

    if expected is WorkerDiedError:
        with pytest.raises(WorkerDiedError, match="gone"):
            result()
        return
    assert result() == RaceResult(
        expected,  # type: ignore[arg-type]
        None if winner is None else members[winner],
        0 if winner is None else plans[winner].at + 1,
    )


@pytest.mark.parametrize("answers", [["impossible", "claimed"], ["claimed", "impossible"]])
def test_a_claim_heard_together_with_a_proof_takes_nothing_from_it(
    answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = {str(place): ChunkPlan(answer, 0, WHOLE) for place, answer in enumerate(answers)}
    at_once = random.Random(0)
    monkeypatch.setattr(at_once, "choice", min)
    machine = _Machine(plans, 2, at_once)
    monkeypatch.setattr(portfolio, "wait", machine.wait)
    result = race(
        [PortfolioMember(name, WHOLE) for name in plans],
        steps=2,
        rounds=3,
        seed=0,
        deadline=Deadline(),
        workers=machine,  # type: ignore[arg-type]
        encodings=dict.fromkeys(plans, Encoding("", "")),
    )
    assert result == RaceResult(REFUTED, None, 0)


# ---------------------------------------------------------------- in real processes


def test_slices_grow_and_the_search_goes_on(pair: Workers) -> None:
    result = run(pair, ("found_3", WHOLE), seed=7)
    assert result == RaceResult(found(4, seed=7), PortfolioMember("0:found_3", WHOLE), 4)
    assert found(4).rounds == (100, 400, 1600, 6400)


@pytest.mark.parametrize(
    "scripts, winner, slices",
    [
        # The first is slow and preferred: the second, who answers long before, has to wait.
        (["found_0_300", "found_0"], 0, 1),
        # The first does not answer in its first slice, which the second waits for and wins.
        (["found_1_200", "found_0"], 1, 1),
        # The first is through all its slices while the second is still in its first.
        (["found_1", "found_0_300"], 1, 1),
        # The third waits in the queue behind two slow ones that do not answer.
        (["found_1_100", "found_1_100", "found_0"], 2, 1),
        # Equal slices: preference decides, whoever is slow.
        (["found_2_0_0_200", "found_2", "found_2"], 0, 3),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_the_first_in_order_wins(scripts: Sequence[str], winner: int, slices: int, count: int) -> None:
    with Workers(count) as workers:
        result = run(workers, *((script, WHOLE) for script in scripts))
    assert result.member is not None
    assert (result.member.encoding, result.slices) == (f"{winner}:{scripts[winner]}", slices)
    assert result.outcome == found(slices)


def test_what_comes_after_the_answer_is_stopped(pair: Workers) -> None:
    """Without a deadline: a search that never ends is not waited for."""
    result = run(pair, ("found_0_100", WHOLE), ("never_0", WHOLE), ("never_0", ROTATED))
    assert result.outcome == found(1)


def test_a_proof_for_all_schedules_is_final_at_once(pair: Workers) -> None:
    result = run(pair, ("never_0", ROTATED), ("impossible_2", WHOLE))
    assert result == RaceResult(REFUTED, None, 0)


def test_without_a_proof_a_claim_waits_for_whoever_could_judge_it(
    pair: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    confirmed = run(pair, ("claimed_0", WHOLE), ("impossible_2", WHOLE))
    assert confirmed == RaceResult(REFUTED, None, 0)
    # Nobody else is waited for.
    assert run(pair, ("never_1", ROTATED), ("claimed_0", WHOLE)) == RaceResult(CLAIMED, None, 0)
    assert run(pair, ("claimed_0", WHOLE), ("found_3", WHOLE), slices=3) == RaceResult(CLAIMED, None, 0)
    with caplog.at_level(logging.WARNING):
        disproved = run(pair, ("claimed_0", WHOLE), ("found_2", WHOLE))
    assert (disproved.outcome, disproved.slices) == (found(3), 3)
    assert caplog.messages == ["1:found_2 found what does not exist according to HiGHS, floating point"]


def test_a_claim_that_is_not_judged_in_time_is_told(pair: Workers) -> None:
    told = "did not end within the deadline of 0.5 s: there is none according to HiGHS, floating point"
    with pytest.raises(TimedOutError, match=told):
        run(pair, ("claimed_0", WHOLE), ("never_0", WHOLE), seconds=0.5)


def test_a_claim_under_a_group_retires_the_claimant_alone(pair: Workers) -> None:
    result = run(pair, ("claimed_0", ROTATED), ("found_1_50", ROTATED))
    assert result.outcome == found(2)


def test_a_proof_under_a_group_retires_the_group_alone(pair: Workers) -> None:
    result = run(pair, ("impossible_0", ROTATED), ("found_1", WHOLE))
    assert (result.outcome, result.slices) == (found(2), 2)
    # Another encoding of the same group, who would never answer, is not waited for.
    result = run(pair, ("impossible_0_50", ROTATED), ("never_0", ROTATED), ("found_1", HALVED))
    assert result.outcome == found(2)


def test_without_the_whole_problem_nothing_is_proved(pair: Workers) -> None:
    result = run(pair, ("impossible_0", ROTATED), ("impossible_1", HALVED))
    assert result == RaceResult(NoneSymmetric(), None, 0)
    assert result.outcome not in (REFUTED, CLAIMED, Unknown())


def test_effort_ends(pair: Workers) -> None:
    assert run(pair, ("found_2", WHOLE), ("found_3", ROTATED), slices=2) == RaceResult(Unknown(), None, 0)
    assert run(pair, ("found_2", WHOLE), ("found_3", ROTATED), slices=3).outcome == found(3)


def test_the_deadline_ends_everything() -> None:
    pids = set()
    with (
        Workers(2) as workers,
        pytest.raises(TimedOutError, match=r"the search did not end within the deadline"),
    ):

        def listen(*_: object) -> None:
            pids.update(worker.pid for worker in workers._taken)

        with listening(listen):
            run(workers, ("never_0", WHOLE), ("never_1", ROTATED), seconds=0.5)
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_solver_that_crashes_is_left_out(pair: Workers, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result = run(pair, ("segfault_0", ROTATED), ("found_1", WHOLE))
    assert result.outcome == found(2)
    assert caplog.messages == ["left out of the search: 0:segfault_0: its process was ended by SIGSEGV"]
    with pytest.raises(WorkerDiedError, match="1:segfault_1: its process was ended by SIGSEGV"):
        run(pair, ("segfault_0", WHOLE), ("segfault_1", WHOLE))
    assert run(pair, ("found_0", WHOLE)).outcome == found(1)


def test_a_bug_in_an_encoding_is_no_outcome(pair: Workers) -> None:
    with pytest.raises(ArithmeticError, match="a bug of ours") as caught:
        run(pair, ("error_0", WHOLE), ("found_0_200", WHOLE))
    assert "fake_searches.py" in caught.value.__notes__[0]


@pytest.mark.parametrize("name", sorted(ENCODINGS))
@pytest.mark.parametrize("orbits", [ChunkOrbits.trivial(PROBLEM, 2), ChunkOrbits(PROBLEM, 2, ROTATED.group)])
def test_an_answer_does_not_depend_on_what_its_process_did_before(name: str, orbits: ChunkOrbits) -> None:
    pytest.importorskip(ENCODINGS[name].place.partition(":")[0])
    asked: dict[str, Any] = {"steps": 3, "rounds": 4, "seed": 3, "deadline": Deadline.after(60)}

    def answer(orbits: ChunkOrbits) -> RaceResult:
        return race([PortfolioMember(name, orbits)], workers=workers, **asked)

    with Workers(1) as workers:
        fresh = answer(orbits)
    with Workers(1) as workers:
        answer(WHOLE)
        answer(HALVED)
        assert answer(orbits) == fresh
    assert isinstance(fresh.outcome, Feasible)


def test_progress_says_who_searches(pair: Workers) -> None:
    heard: list[tuple[str, int, int]] = []
    with listening(lambda *what: heard.append(what)):
        run(pair, ("found_1", ROTATED), slices=5)
        run(pair, ("found_0", ROTATED), ("found_0", WHOLE))
    assert heard[:3] == [
        ("(4, 2, 3) by 0:found_1 with 4 symmetries", 0, 5),
        ("(4, 2, 3) by 0:found_1 with 4 symmetries", 1, 5),
        ("(4, 2, 3) by 0:found_0 with 4 symmetries, 1:found_0", 0, 0),
    ]
