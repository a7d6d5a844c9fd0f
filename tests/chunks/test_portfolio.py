"""Searches in turns whose answers are scripted: by the rules, and in a real process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast.synth.chunks.encodings.registry import ENCODINGS, Encoding
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkOrbits, OrbitSend
from arborcast.synth.chunks.problem.outcome import Feasible, Infeasible, Instance, Outcome, Unknown
from arborcast.synth.chunks.solvers.portfolio import (
    NoneSymmetric,
    PortfolioMember,
    PortfolioResult,
    effort_of,
    run_portfolio,
)
from arborcast.synth.chunks.solvers.solver_child import SolverProcess, WorkerDiedError
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
def child() -> Iterator[SolverProcess]:
    with SolverProcess() as child:
        yield child


def run(
    child: SolverProcess, *scripts: Script, seed: int = 0, slices: int | None = None, seconds: float = 60
) -> PortfolioResult:
    """Scripted searches (see `fake_searches`) in turns; their encodings are named "0:script" and so on."""
    names = [f"{place}:{script}" for place, (script, _) in enumerate(scripts)]
    return run_portfolio(
        [PortfolioMember(name, orbits) for name, (_, orbits) in zip(names, scripts, strict=True)],
        steps=2,
        rounds=3,
        seed=seed,
        deadline=Deadline.after(seconds),
        child=child,
        slices=slices,
        encodings={
            name: Encoding(f"tests.support.fake_searches:{script}", "")
            for name, (script, _) in zip(names, scripts, strict=True)
        },
    )


def found(slices: int, seed: int = 0) -> Feasible:
    """What a scripted search finds in its last slice."""
    return Feasible((effort_of(slices - 1),), (OrbitSend(0, 0, 0, seed),))


# ---------------------------------------------------------------- by the rules


@dataclass(frozen=True)
class Answering:
    """What a member answers and in which slice: "found", "impossible", "dies"; and its group."""

    answer: str
    at: int
    orbits: ChunkOrbits


class _FakeChild:
    """A process in which searches answer by a script; the place of an encoding is the number of a member."""

    def __init__(self, plans: Sequence[Answering]) -> None:
        self.plans = plans
        self.asked: list[tuple[int, int]] = []

    def run(
        self,
        name: str,
        function: Callable[..., object],
        place: str,
        instance: Instance,
        seed: int,
        effort: int,
        *,
        deadline: Deadline,
    ) -> Outcome:
        self.asked.append((effort, int(place)))
        plan = self.plans[int(place)]
        if effort < effort_of(plan.at):
            return Unknown()
        match plan.answer:
            case "found":
                return found(plan.at + 1)
            case "impossible":
                return REFUTED
            case _:
                raise WorkerDiedError("gone")


def by_the_rules(plans: Sequence[Answering], slices: int) -> tuple[object, int | None]:
    """The outcome and whose it is, one turn after the other."""
    left = dict(enumerate(plans))
    has_died = False
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
            else:
                left = {other: p for other, p in left.items() if p.orbits is not plan.orbits}
    if left:
        return Unknown(), None
    return (WorkerDiedError if has_died else NoneSymmetric()), None


@st.composite
def fields(draw: st.DrawFn) -> list[Answering]:
    """Members who do not contradict each other, each with an encoding of its own."""
    possible = {WHOLE: draw(st.booleans())}
    for orbits in (ROTATED, HALVED):
        possible[orbits] = possible[WHOLE] and draw(st.booleans())

    def plan(orbits: ChunkOrbits, answer: str, at: int) -> Answering:
        return Answering("found" if possible[orbits] and answer != "dies" else answer, at, orbits)

    answers = st.sampled_from(["impossible", "impossible", "dies"])
    return draw(
        st.lists(
            st.builds(plan, st.sampled_from([WHOLE, ROTATED, HALVED]), answers, st.integers(0, 4)),
            min_size=1,
            max_size=6,
        )
    )


@given(fields(), st.integers(1, 4))
def test_the_first_answer_in_the_order_of_turns_counts(plans: list[Answering], slices: int) -> None:
    names = [str(place) for place in range(len(plans))]
    members = [PortfolioMember(name, plan.orbits) for name, plan in zip(names, plans, strict=True)]
    expected, winner = by_the_rules(plans, slices)
    child = _FakeChild(plans)

    def result() -> PortfolioResult:
        return run_portfolio(
            members,
            steps=2,
            rounds=3,
            seed=0,
            deadline=Deadline(),
            child=child,  # type: ignore[arg-type]
            slices=slices,
            encodings={name: Encoding(name, "") for name in names},
        )

    if expected is WorkerDiedError:
        with pytest.raises(WorkerDiedError, match="gone"):
            result()
    elif winner is None:
        assert result() == PortfolioResult(expected)  # type: ignore[arg-type]
    else:
        assert result() == PortfolioResult(expected, members[winner], plans[winner].at + 1)  # type: ignore[arg-type]
    assert child.asked == sorted(set(child.asked))


# ---------------------------------------------------------------- in a real process


def test_slices_grow_and_the_search_begins_anew(child: SolverProcess) -> None:
    result = run(child, ("found_3", WHOLE), seed=7)
    assert result == PortfolioResult(found(4, seed=7), PortfolioMember("0:found_3", WHOLE), 4)
    assert found(4).rounds == (100 + 400 + 1600 + 6400,)


def test_that_there_is_none_is_said_by_whoever_searches_everything(child: SolverProcess) -> None:
    """Of HiGHS it is no proof, and says so itself."""
    assert run(child, ("claimed_0", WHOLE), ("never_0", ROTATED)) == PortfolioResult(CLAIMED)
    assert not CLAIMED.is_proof and REFUTED.is_proof


def test_the_deadline_ends_everything() -> None:
    with SolverProcess() as child:
        pid = child.run("", os.getpid, deadline=Deadline())
        with pytest.raises(TimedOutError, match=r"the search did not end within the deadline"):
            run(child, ("never_0", WHOLE), seconds=0.5)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_solver_that_crashes_is_left_out(child: SolverProcess, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result = run(child, ("segfault_0", ROTATED), ("found_1", WHOLE))
    assert result.outcome == found(2)
    assert caplog.messages == ["left out of the search: 0:segfault_0: its process was ended by SIGSEGV"]
    with pytest.raises(WorkerDiedError, match="1:segfault_1: its process was ended by SIGSEGV"):
        run(child, ("segfault_0", WHOLE), ("segfault_1", WHOLE))
    assert run(child, ("found_0", WHOLE)).outcome == found(1)


def test_a_bug_in_an_encoding_is_no_outcome(child: SolverProcess) -> None:
    with pytest.raises(ArithmeticError, match="a bug of ours") as caught:
        run(child, ("error_0", WHOLE), ("found_0", WHOLE))
    assert "fake_searches.py" in caught.value.__notes__[0]


@pytest.mark.parametrize("name", sorted(ENCODINGS))
@pytest.mark.parametrize("orbits", [ChunkOrbits.trivial(PROBLEM, 2), ChunkOrbits(PROBLEM, 2, ROTATED.group)])
def test_an_answer_does_not_depend_on_what_its_process_did_before(name: str, orbits: ChunkOrbits) -> None:
    pytest.importorskip(ENCODINGS[name].place.partition(":")[0])
    asked: dict[str, Any] = {"steps": 3, "rounds": 4, "seed": 3, "deadline": Deadline.after(60)}

    def answer(orbits: ChunkOrbits) -> PortfolioResult:
        return run_portfolio([PortfolioMember(name, orbits)], child=child, **asked)

    with SolverProcess() as child:
        fresh = answer(orbits)
    with SolverProcess() as child:
        answer(WHOLE)
        answer(HALVED)
        assert answer(orbits) == fresh
    assert isinstance(fresh.outcome, Feasible)


def test_progress_says_who_searches(child: SolverProcess) -> None:
    heard: list[tuple[str, int, int]] = []
    with listening(lambda *what: heard.append(what)):
        run(child, ("found_1", ROTATED), slices=5)
        run(child, ("found_1", ROTATED), ("found_0", WHOLE))
    assert heard == [
        ("(4, 2, 3) by 0:found_1 with 4 symmetries", 0, 5),
        ("(4, 2, 3) by 0:found_1 with 4 symmetries", 1, 5),
        ("(4, 2, 3) by 0:found_1 with 4 symmetries", 0, 0),
        ("(4, 2, 3) by 1:found_0", 0, 0),
    ]
