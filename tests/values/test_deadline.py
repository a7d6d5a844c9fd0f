"""One deadline for a whole question: what it says, and that little is done once it has passed.

Work is counted in calls of functions, Python's and others', which is a clock that no machine makes faster.
Kernels run as plain Python, so that their calls count, too. What HiGHS and other processes do counts nothing.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from fractions import Fraction
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.synth.api import approach
from arborcast.synth.chunks import frontier
from arborcast.synth.collective import Collective
from arborcast.synth.deadline import NO_DEADLINE, Deadline, LastAnswers, run_until, running, wall_clock
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError
from arborcast.synth.faults.repair import repair
from arborcast.synth.groups.fair_solver import solve_groups
from arborcast.synth.kernels import compiled
from arborcast.synth.latency_bandwidth import latency_bandwidth
from arborcast.synth.selection import Selection
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Link, Switch, Topology
from arborcast.topologies import load
from tests.support.strategies import topologies

NEVER = 10**6  # calls: more than any question here makes in all, as seconds still of a size that systems take
TO_END = 250_000  # calls that building and pricing one answer may take here: a tenth of a second
READS = 0.1  # the part of the time that was given which may pass besides


class Work:
    """A clock that counts calls, from the start of a block to its end."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        return float(self.calls)

    def __enter__(self) -> Work:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls += event in {"call", "c_call"}


Asked = Callable[[Deadline], list[Any]]
"""Answers a question by a deadline: the schedules that there are, or the error."""


def hub() -> Topology:
    """Four ranks around a switch that adds and copies, two of them joined besides."""
    pairs = [(0, 4), (1, 4), (2, 4), (3, 4), (0, 1)]
    links = [Link(src, dst, Fraction(1)) for pair in pairs for src, dst in (pair, pair[::-1])]
    return Topology.build("hub", 4, links, [Switch("hub", reduces=True, multicasts=True)])


def solved(fabric: Topology, kind: str, *, method: str = "auto", form: str = "auto", **wishes: Any) -> Asked:
    return lambda deadline: [
        approach(
            fabric, kind, method, SolveOptions(deadline_s=deadline, cache=False, **wishes), form=form
        ).answer()
    ]


def traced(fabric: Topology, kind: str, **wishes: Any) -> Asked:
    def asked(deadline: Deadline) -> list[Any]:
        collective = Collective.on(fabric, kind)
        found = frontier.pareto(fabric, collective, deadline_s=deadline, cache=False, **wishes)
        assert not found.timed_out or found.why_stopped.startswith(str(deadline))
        return [point.schedule for point in found.points]

    return asked


def repaired(fabric: Topology, kind: str) -> Asked:
    healthy = synth.solve(fabric, kind, form="explicit")
    return lambda deadline: [repair(healthy, without_links=["0-1"], deadline_s=deadline)]


def grouped(fabric: Topology) -> Asked:
    half = fabric.ranks // 2
    two = [
        Collective.on(fabric, "allgather", ranks=range(half)),
        Collective.on(fabric, "allreduce", ranks=range(half, fabric.ranks)),
    ]
    return lambda deadline: [
        group.schedule for group in solve_groups(fabric, two, deadline_s=deadline).groups
    ]


def compared(fabric: Topology, kind: str) -> Asked:
    def asked(deadline: Deadline) -> list[Any]:
        found = latency_bandwidth(
            approach(fabric, kind, options=SolveOptions(deadline_s=deadline, cache=False), form="implicit")
        )
        return [point.schedule for point in found.points]

    return asked


def late_work(asked: Asked, after: int) -> tuple[int, list[Any]]:
    """Calls after a deadline of so many, and what there is then; errors say which deadline it was."""
    with Work() as work:
        deadline = Deadline.after(after, work)
        try:
            with run_until(deadline):
                found = asked(deadline)
        except TimedOutError as late:
            sys.setprofile(None)
            assert f"{after:g} s" in str(late)
            found = [] if late.best is None else [late.best]
        except InfeasibleError:
            found = []
    return work.calls - after, found


def check_little_is_done_late(asked: Asked, parts: tuple[float, ...]) -> None:
    needed = NEVER + late_work(asked, NEVER)[0]
    for part in parts:
        after = max(1, int(part * needed))
        late, found = late_work(asked, after)
        assert late <= READS * after + TO_END, f"{late} calls after {after} of {needed}"
        assert all(synth.verify(schedule).correct for schedule in found)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")


QUESTIONS = {
    "trees": lambda: solved(load("torus:3x3"), "allgather", method="trees"),
    "few trees": lambda: solved(load("torus:3x3"), "allreduce", max_trees=2),
    "few trees by tolerance": lambda: solved(load("dgx1"), "allgather", tolerance=Fraction(1, 10)),
    "low trees": lambda: solved(load("torus:2x3"), "allreduce", max_height=3),
    "weights": lambda: solved(load("torus:3x3"), "allgather", method="mwu", epsilon=Fraction(1, 50)),
    "routes": lambda: solved(load("torus:3x3"), "alltoall"),
    "through switches": lambda: solved(hub(), "allreduce"),
    "by size": lambda: solved(load("torus:3x3"), "allreduce", size_bytes=1 << 10),
    "implicit": lambda: solved(load("torus:3x3"), "allreduce", form="implicit"),
    "implicit, few": lambda: solved(load("torus:4x4"), "allgather", form="implicit", max_trees=2),
    "implicit, low": lambda: solved(load("torus:3x4"), "allgather", form="implicit", max_height=4),
    "implicit, blocks": lambda: solved(load("torus:4x4"), "alltoall", form="implicit"),
    "multiring": lambda: solved(load("torus:3x3"), "allreduce", method="multiring"),
    "ring": lambda: solved(load("torus:3x3"), "allgather", method="ring"),
    "levels": lambda: solved(load("torus:3x3"), "allreduce", method="levels"),
    "pat": lambda: solved(load("torus:3x3"), "allgather", method="pat"),
    "swing": lambda: solved(load("torus:4x4"), "allreduce", method="swing"),
    "frontier": lambda: traced(load("ring:4"), "allgather"),
    "frontier of sums": lambda: traced(load("ring:4"), "allreduce", max_steps=5),
    "frontier, quick": lambda: traced(load("dgx1"), "allgather", proofs=False),
    "latency and bandwidth": lambda: compared(load("torus:3x3"), "allgather"),
    "repair": lambda: repaired(load("torus:3x3"), "allreduce"),
    "groups": lambda: grouped(load("torus:3x4")),
}


OF_MANY = {
    "by size": lambda: solved(load("mi250"), "allgather", size_bytes=1 << 20),
    "frontier": lambda: traced(load("ring:14"), "allgather", max_steps=7),
    "frontier of sums": lambda: traced(load("ring:14"), "allreduce", max_steps=8),
}
"""Those whose kernels are too slow as plain Python: their own calls count nothing."""


@pytest.mark.parametrize("parts", [(0.3,), pytest.param((0.01, 0.8), marks=pytest.mark.long)])
@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.usefixtures("plain")
def test_little_is_done_once_it_has_passed(question: str, parts: tuple[float, ...]) -> None:
    check_little_is_done_late(QUESTIONS[question](), parts)


@pytest.mark.long
@pytest.mark.parametrize("question", OF_MANY)
def test_little_is_done_late_of_many_ranks(question: str) -> None:
    asked = OF_MANY[question]()
    late_work(asked, NEVER)  # loads what machine code there is
    check_little_is_done_late(asked, (0.01, 0.3, 0.8))


@given(
    fabric=topologies(max_ranks=6, switches=1),
    kind=st.sampled_from(["allgather", "reduce-scatter", "allreduce", "broadcast", "alltoall", "gather"]),
    size=st.sampled_from([None, 1 << 12]),
    part=st.floats(0.01, 0.99),
)
@settings(max_examples=12)
@pytest.mark.usefixtures("plain")
def test_little_is_done_late_on_drawn_fabrics(fabric, kind, size, part) -> None:
    check_little_is_done_late(solved(fabric, kind, size_bytes=size), (part,))


def test_it_passes_when_its_seconds_are_over() -> None:
    now = [100.0]
    deadline = Deadline.after(5, lambda: now[0])
    now[0] = 103.0
    assert (deadline.left_s, deadline.has_passed) == (2.0, False)
    deadline.check("the search")
    now[0] = 105.2
    assert (deadline.left_s, deadline.has_passed, deadline.is_overdue) == (0.0, True, False)
    with pytest.raises(TimedOutError, match=r"^the search did not end within the deadline of 5 s$"):
        deadline.check("the search")
    now[0] = 105.6
    assert deadline.is_overdue


def test_none_never_comes() -> None:
    deadline = Deadline.after(None)
    assert (deadline.left_s, deadline.has_passed, deadline.is_overdue) == (None, False, False)
    deadline.check("anything")


def test_a_share_is_that_part_of_what_is_left_and_names_the_whole() -> None:
    now = [100.0]
    deadline = Deadline.after(8, lambda: now[0])
    now[0] = 102.0
    first = deadline.share(2)
    assert (first.left_s, deadline.left_s) == (3.0, 6.0)
    now[0] = 105.5
    with pytest.raises(TimedOutError, match=r"^the first half did not end within the deadline of 8 s$"):
        first.check("the first half")
    assert Deadline.after(None).share(2) == Deadline()
    assert (first.at_least(2).left_s, deadline.at_least(2)) == (2.0, deadline)


def test_one_that_runs_is_handed_down_as_it_is() -> None:
    deadline = Deadline.after(5)
    assert Deadline.after(deadline) is deadline
    with run_until(deadline):
        assert running() is deadline
    assert running() is NO_DEADLINE


def test_another_process_is_sent_what_is_left() -> None:
    sent = pickle.loads(pickle.dumps(Deadline(8, 106.0, lambda: 102.0)))
    assert sent.allowed_s == 8 and sent.clock is wall_clock and 0 < sent.left_s <= 4
    assert pickle.loads(pickle.dumps(NO_DEADLINE)) == NO_DEADLINE


@pytest.mark.usefixtures("plain")
def test_the_best_so_far_is_returned_where_that_is_asked_for() -> None:
    late = Deadline(1, 0.0, iter(range(1, 10**6)).__next__)
    found = synth.solve(load("dgx1"), "allreduce", deadline_s=late, on_deadline="best")
    assert synth.verify(found).correct and 0 < found.gap < 1
    assert found.rate == (1 - found.gap) * found.bound.rate
    with pytest.raises(TimedOutError, match="1 s") as error:
        synth.solve(load("dgx1"), "allreduce", deadline_s=late)
    assert error.value.best == found
    with pytest.raises(TimedOutError):  # there is none
        synth.solve(load("torus:3x3"), "allgather", method="ring", deadline_s=late, on_deadline="best")
    with pytest.raises(InputError, match="on_deadline wait: must be one of raise, best"):
        synth.solve(load("ring:3"), "allgather", on_deadline="wait")  # type: ignore[call-overload]


def test_candidates_are_simulated_until_it_has_passed() -> None:
    slow, fast = (synth.solve(load("ring:4"), "allgather", method=name) for name in ("ring", "trees"))
    passed = Deadline(3, 1.0, lambda: 2.0)
    with pytest.raises(TimedOutError, match="the comparison of schedules did not end") as error:
        Selection((slow, fast), None, passed).fastest(1_234_560)  # no answer of another test is known
    assert error.value.best is slow


@pytest.mark.filterwarnings("ignore")
def test_kernels_for_which_there_is_no_time_run_as_plain_python(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(compiled, "_folder", lambda: tmp_path)
    monkeypatch.setattr(compiled, "_state", compiled._State())
    monkeypatch.delenv("NUMBA_DISABLE_JIT", raising=False)
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))  # numba read the environment long ago
    compiled.compile_all()

    @compiled.kernel
    def total(numbers: compiled.Ints) -> int:
        found = 0
        for number in numbers:
            found += number
        return found

    small = np.arange(10, dtype=np.int64)
    large = np.ones(compiled.LARGEST_PLAIN + 1, dtype=np.int64)
    with run_until(Deadline.after(compiled.COMPILE_S / 3)):
        assert total(small) == 45
        with pytest.raises(TimedOutError, match=r"total is not compiled yet, .* of the deadline of 5 s"):
            total(large)
    with (
        run_until(Deadline(5, 0.0, lambda: 0.6)),
        pytest.raises(TimedOutError, match=r"plain Python .* did not end within the deadline of 5 s"),
    ):
        total(small)
    with run_until(Deadline.after(600)):
        assert total(large) == len(large)


def test_the_last_answers_are_kept_but_for_those_that_were_cut_short() -> None:
    answers: LastAnswers[int] = LastAnswers(2)
    asked: list[int] = []

    def of(question: int, deadline: Deadline = NO_DEADLINE) -> int:
        def work_out() -> int:
            asked.append(question)
            return 10 * question

        return answers.of(question, deadline, work_out)

    assert [of(question) for question in (1, 2, 1, 2)] == [10, 20, 10, 20] and asked == [1, 2]
    assert of(3, Deadline(1.0, 0.0)) == of(3) == of(3) == 30 and asked == [1, 2, 3, 3]
    assert of(1) == 10 and asked == [1, 2, 3, 3, 1]  # one more than are kept
