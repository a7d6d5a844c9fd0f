"""One (C, S, R) by each encoding: schedules, proofs that there is none, refusals."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from arborcast import synth
from arborcast.synth.chunks.bounds.step_certificate import StepBound
from arborcast.synth.chunks.solvers.solver_child import WorkerDiedError
from arborcast.synth.errors import InfeasibleError, InputError, Prover, SolverDiedError, TimedOutError
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load
from tests.support.refusals import refuses

METHODS = ("smt", "ilp", "sat")


def solve(spec: str, kind: str, method: str, size: tuple[int, int, int], **knobs: Any) -> Schedule:
    chunks, steps, rounds = size
    return synth.solve(
        load(spec), kind, method=method, chunks=chunks, steps=steps, rounds=rounds, cache=False, **knobs
    )


@pytest.mark.parametrize(
    ("method", "spec", "kind", "size", "rate"),
    [  # each kind by one of the encodings, which agree wherever they are compared (`test_encodings`)
        ("smt", "ring:4", "allgather", (2, 2, 3), Fraction(4 * 2, 3)),
        pytest.param("ilp", "dgx1", "allgather", (6, 3, 7), Fraction(8 * 6, 7), marks=pytest.mark.long),
        ("sat", "dgx1", "reduce-scatter", (2, 2, 3), Fraction(8 * 2, 3)),
        ("ilp", "dgx1", "gather", (6, 2, 7), Fraction(8 * 6, 7)),
        ("sat", "dgx1", "scatter", (6, 2, 7), Fraction(8 * 6, 7)),
        ("ilp", "dgx1", "alltoall", (3, 2, 8), Fraction(8 * 3, 8)),
        pytest.param("sat", "dgx1", "allreduce", (16, 4, 6), Fraction(16, 6), marks=pytest.mark.long),
        *((method, "ring:4", "allreduce", (4, 4, 4), Fraction(1)) for method in METHODS),
        ("sat", "hypercube:3", "broadcast", (6, 4, 4), Fraction(6, 4)),
        ("smt", "hypercube:3", "reduce", (6, 4, 4), Fraction(6, 4)),
        # Through a switch, whose links all share.
        ("smt", "dgx-a100", "allgather", (1, 1, 7), Fraction(8, 7)),
    ],
)
def test_a_verified_schedule_of_the_asked_shape(
    method: str, spec: str, kind: str, size: tuple[int, int, int], rate: Fraction
) -> None:
    schedule = solve(spec, kind, method, size)
    verdict = synth.verify(schedule)
    assert verdict.correct, verdict.errors
    assert schedule.rounds is not None
    assert (len(schedule.rounds), sum(schedule.rounds)) == size[1:]
    assert dict(schedule.method.settings) == dict(zip(("chunks", "steps", "rounds"), size, strict=True))
    assert schedule.method.name == method
    assert schedule.rate / schedule.topology.bandwidth_unit == rate


@pytest.mark.parametrize(
    ("method", "spec", "kind", "size"),
    [
        ("sat", "dgx1", "allgather", (5, 2, 7)),
        ("ilp", "dgx1", "broadcast", (8, 3, 3)),
        ("smt", "hypercube:3", "broadcast", (7, 4, 4)),
        ("ilp", "ring:8", "allgather", (2, 4, 6)),
        *((method, "dgx1", "allreduce", (16, 4, 5)) for method in METHODS),
    ],
)
def test_there_is_none_and_it_says_why(method: str, spec: str, kind: str, size: tuple[int, int, int]) -> None:
    words = r"rounds per chunk|there is none, (not )?proved|no reduce-scatter"
    with pytest.raises(InfeasibleError, match=words) as raised:
        solve(spec, kind, method, size)
    if kind == "allreduce" and method != "sat":  # only compositions were looked at
        assert "other schedules are not excluded" in str(raised.value) and not raised.value.proved_by
        return
    assert raised.value.proved_by and raised.value.is_proved == (Prover.HIGHS not in raised.value.proved_by)


@pytest.mark.parametrize("method", METHODS)
def test_what_only_the_solver_can_refute(method: str) -> None:
    # Flows allow 5/6 rounds per chunk in 3 steps of the 3-cube; trees do not (ALGORITHMS, section 5).
    how = {
        "sat": "proved by CaDiCaL",
        "smt": "proved by z3",
        "ilp": "not proved: according to HiGHS, floating point",
    }
    with pytest.raises(InfeasibleError) as raised:
        solve("hypercube:3", "broadcast", method, (6, 3, 5))
    assert str(raised.value) == f"broadcast (6, 3, 5): there is none, {how[method]}"
    assert raised.value.is_proved == (method != "ilp")


@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("smt", "proved by exact limit and z3"),
        ("ilp", "not proved: according to HiGHS, floating point"),
    ],
)
def test_who_refutes_compositions_is_said_and_proves_nothing_of_other_schedules(
    method: str, how: str
) -> None:
    # On this one-way ring 5/6 rounds per chunk in 4 steps need 12 chunks per half, not 6.
    rates = {(0, 1): 2, (1, 2): 3, (2, 3): 3, (3, 0): 3}
    ring = Topology.build("drawn", 4, [Link(*ends, Fraction(rate)) for ends, rate in rates.items()])
    pair = synth.Collective.on(ring, "allreduce", ranks=(2, 3))
    with pytest.raises(InfeasibleError, match=f"in any division of its steps and rounds, {how}") as raised:
        synth.solve(ring, pair, method=method, chunks=12, steps=7, rounds=8, cache=False)
    assert not raised.value.is_proved
    if method == "smt":
        return
    # Searched as it is, there is one.
    found = synth.solve(ring, pair, method="sat", chunks=12, steps=7, rounds=8, cache=False)
    assert synth.verify(found).correct


@refuses("kind", "method", "size", "message")
def test_limits_answer_before_any_solver(
    kind: str, method: str, size: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(InfeasibleError, match=message) as raised:
        solve("dgx1", kind, method, size)
    assert isinstance(raised.value.proof, StepBound) == ("per chunk" in message)


def test_a_solver_out_of_memory_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object, **__: object) -> None:
        raise WorkerDiedError("CaDiCaL: needed more memory than it was allowed")

    monkeypatch.setattr("arborcast.synth.chunks.solvers.search.run_portfolio", die)
    with pytest.raises(SolverDiedError, match=r"allgather \(2, 2, 3\): CaDiCaL: needed more memory"):
        solve("dgx1", "allgather", "sat", (2, 2, 3))


@refuses("kind", "method", "knobs", "message")
def test_what_is_missing_or_foreign_is_refused(
    kind: str, method: str, knobs: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        synth.solve(load("ring:4"), kind, method=method, cache=False, **knobs)


def test_out_of_time_is_said() -> None:
    # Shorter than any process takes to start: how fast a machine searches must not matter here.
    with pytest.raises(TimedOutError):
        solve("torus:4x8", "allgather", "smt", (4, 6, 31), deadline_s=1e-4)


def test_a_custom_collective() -> None:
    fabric = load("ring:4")
    shift = synth.Collective.custom(
        fabric, [synth.Demand(frozenset({rank}), frozenset({(rank + 1) % 4})) for rank in range(4)]
    )
    for method in METHODS:
        schedule = synth.solve(fabric, shift, method=method, chunks=4, steps=2, rounds=4, cache=False)
        assert synth.verify(schedule).correct
    best = synth.solve(fabric, shift, cache=False)
    # Each block over its own link and, the other way round, over three: 4 links out of 8 are the nearest.
    assert synth.verify(best).correct and best.is_optimal


def test_the_halves_of_an_allreduce_on_an_asymmetric_fabric() -> None:
    one_way = Topology.build("loop", 3, [Link(rank, (rank + 1) % 3, Fraction(1)) for rank in range(3)])
    schedule = synth.solve(one_way, "allreduce", method="sat", chunks=3, steps=4, rounds=4, cache=False)
    assert synth.verify(schedule).correct
