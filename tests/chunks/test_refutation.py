"""Proofs that there is no schedule: other people's checkers accept them, the formulas say what was asked."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from dratify import check_proof, parse_dimacs
from hypothesis import given, settings
from hypothesis import strategies as st
from pysat.formula import CNF
from pysat.solvers import Minisat22

from arborcast import synth
from arborcast.synth.chunks.allreduce.partial_sums import SumOrbits
from arborcast.synth.chunks.allreduce.sum_formulas import SpreadFormula
from arborcast.synth.chunks.encodings import sat as boolean
from arborcast.synth.chunks.encodings.sat import Formula
from arborcast.synth.chunks.problem.orbits import OrbitSend
from arborcast.synth.chunks.problem.outcome import Feasible, Instance
from arborcast.synth.chunks.refutation import formula_file, formula_text, refute
from arborcast.synth.chunks.solvers.solver_child import WorkerDiedError
from arborcast.synth.errors import InfeasibleError, InputError, Prover, SolverDiedError, TimedOutError
from arborcast.synth.topology import Topology
from arborcast.topologies import load
from tests.chunks.test_encodings import instances
from tests.support.allreduce_search import can_spread
from tests.support.chunk_problems import exists, sums_on
from tests.support.chunk_replay import instance_of, replay
from tests.support.strategies import topologies

NONE = [
    ("hypercube:3", "broadcast", (6, 3, 5)),  # what no limit of ours refutes
    ("dgx1", "allgather", (5, 2, 7)),  # what a limit refutes, too
    ("dgx1", "reduce", (8, 3, 3)),  # a mirror image, of chunks that are put in order
    ("star:4", "alltoall", (1, 1, 2)),  # through a switch
    ("ring:4", "allgather", (1, 1, 9)),  # fewer steps than the way is long
    ("ring:4", "allgather", (1, 4, 3)),  # fewer rounds than steps
    ("star:4", "allreduce", (2, 2, 3)),  # of everything that copies and adds: what no limit of ours refutes
    ("dgx1", "allreduce", (3, 2, 2)),  # what flows refute, too
    ("ring:4", "allreduce", (1, 1, 9)),  # too few steps
    ("ring:4", "allreduce", (2, 3, 2)),  # too few rounds
]


def accepts(formula: str, proof: str) -> bool:
    return bool(check_proof(parse_dimacs(formula), proof).ok)


def refuted(spec: str, kind: str, size: tuple[int, int, int], proof: Path) -> InfeasibleError:
    chunks, steps, rounds = size
    with pytest.raises(InfeasibleError) as raised:
        synth.solve(
            load(spec),
            kind,
            method="sat",
            chunks=chunks,
            steps=steps,
            rounds=rounds,
            cache=False,
            proof=proof,
        )
    return raised.value


@pytest.mark.parametrize(("spec", "kind", "size"), NONE)
def test_a_checker_accepts_the_proof(
    spec: str, kind: str, size: tuple[int, int, int], tmp_path: Path
) -> None:
    proof = tmp_path / "none.drat"
    error = refuted(spec, kind, size, proof)
    assert error.is_proved and Prover.CADICAL in error.proved_by
    assert f"DRAT proof in {proof}, of the formula in {formula_file(proof)}" in str(error)
    formula = (tmp_path / "none.drat.cnf").read_text()
    assert formula.startswith(f"c Is there a schedule with (C, S, R) = {size}?\nc {kind} on {spec}")
    assert accepts(formula, proof.read_text())
    if shutil.which("drat-trim") is not None:
        words = subprocess.run(
            ["drat-trim", f"{proof}.cnf", str(proof)], capture_output=True, text=True, timeout=60, check=False
        )
        assert "s VERIFIED" in words.stdout.replace("\r", "\n").splitlines()


def test_a_checker_refuses_what_proves_nothing() -> None:
    instance = instance_of("hypercube:3", "broadcast", 6, 3, 5)
    refuted = refute(instance, "")
    assert refuted is not None
    formula, proof = refuted
    assert accepts(formula, proof)
    assert not accepts(formula, "0\n")  # the steps in between are needed
    assert not accepts(formula_text(Formula(instance_of("hypercube:3", "broadcast", 6, 4, 5)), ""), proof)
    with pytest.raises(AssertionError, match="3-cube: CaDiCaL finds a schedule where there is none"):
        refute(instance_of("hypercube:3", "broadcast", 6, 4, 4), "3-cube")


def understood(formula: str, model: set[int]) -> tuple[list[int], list[OrbitSend], set[tuple[int, ...]]]:
    """What a model says by the comments alone: rounds beyond the first of each step, sends, who has what."""
    longer: dict[int, int] = {}
    sends, held = [], set()
    for line in formula.splitlines():
        if not (variable := re.match(r"c variable (\d+): (.*)", line)):
            continue
        numbers = [int(number) for number in re.findall(r"\d+", variable[2])]
        is_true = int(variable[1]) in model
        if "has more than" in line:
            longer[numbers[0]] = longer.get(numbers[0], 0) + is_true
        elif "is sent over" in line and is_true:
            chunk, block, route, step = numbers
            sends.append(OrbitSend(block, chunk, route, step - 1))
        elif "is at rank" in line and is_true:
            held.add(tuple(numbers))
    return [longer[step] for step in sorted(longer)], sends, held


@settings(max_examples=150, deadline=None)
@given(instances(most_arrivals=8, max_ranks=5, chunks=3), st.booleans())
def test_a_formula_says_by_its_comments_what_another_finds(instance: Instance, ordered: bool) -> None:
    problem = instance.orbits.problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boolean, "is_ordered", lambda orbits: ordered)
        formula = formula_text(Formula(instance), "drawn")
    with Minisat22(bootstrap_with=CNF(from_string=formula)) as solver:
        assert solver.solve() == exists(problem, instance.orbits.chunks, instance.steps, instance.rounds)
        model = {literal for literal in solver.get_model() or () if literal > 0}
    if not model:
        refuted = refute(instance, "drawn")
        assert refuted is not None and accepts(*refuted)
        return
    longer, sends, held = understood(formula, model)
    rounds = [1 + spare for spare in longer or [0] * instance.steps]
    rounds[0] += instance.rounds - sum(rounds)
    replay(instance, Feasible(tuple(rounds), tuple(sends)))
    came = {
        (send.member, send.chunk_class, problem.routes[send.route].dst, time)
        for send in sends
        for time in range(send.step + 1, instance.steps + 1)
    }
    assert held <= came


@settings(max_examples=40, deadline=None)
@given(
    topologies(max_ranks=3, switches=1, symmetric=False, max_bandwidth=2),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_a_formula_of_an_allreduce_says_by_its_comments_what_brute_force_finds(
    fabric: Topology, chunks: int, steps: int, spare: int
) -> None:
    problem = sums_on(fabric)
    rounds = steps + spare
    instance = Instance(SumOrbits.trivial(problem, chunks), steps, rounds)
    formula = formula_text(SpreadFormula(instance), "drawn")
    with Minisat22(bootstrap_with=CNF(from_string=formula)) as solver:
        can_be = can_spread(problem, chunks, steps, rounds)
        assert solver.solve() == can_be
        model = {literal for literal in solver.get_model() or () if literal > 0}
    refuted = refute(instance, "drawn")
    assert (refuted is None) == can_be
    if refuted is not None:
        assert accepts(*refuted)
        return
    # By the comments alone: messages that fit, and over which everybody meets every contribution.
    longer: Counter[int] = Counter()
    messages = defaultdict[int, set[tuple[int, int]]](set)
    claimed = set[tuple[int, ...]]()
    for line in formula.splitlines():
        variable = re.match(r"c variable (\d+): (.*)", line)
        if variable and int(variable[1]) in model:
            numbers = tuple(map(int, re.findall(r"\d+", variable[2])))
            if "has more than" in line:
                longer[numbers[0] - 1] += 1
            elif "is sent over" in line:
                messages[numbers[2] - 1].add((numbers[0], numbers[1]))
            else:
                claimed.add(numbers)
    assert steps + sum(longer.values()) <= rounds
    members = {demand.owner for demand in problem.demands}
    met = {(chunk, rank): {rank} & members for chunk in range(chunks) for rank in range(problem.ranks)}
    for step in range(steps):
        before = {place: set(known) for place, known in met.items()}
        loads: Counter[int] = Counter()
        for chunk, number in messages[step]:
            route = problem.routes[number]
            met[chunk, route.dst] |= before[chunk, route.src]
            loads.update(route.links)
        for rank, contributor, chunk, time in claimed:
            assert time != step + 1 or contributor in met[chunk, rank]
        assert all(load <= problem.capacities[link] * (1 + longer[step]) for link, load in loads.items())
    assert all(met[chunk, rank] == members for chunk in range(chunks) for rank in members)


def test_a_formula_describes_the_fabric() -> None:
    refuted = refute(instance_of("star:4", "broadcast", 1, 1, 2, root=1), "star")
    assert refuted is not None
    lines = refuted[0].splitlines()
    assert "c ranks: 4, switches: 1" in lines
    assert "c link 0: from 0 to 4, carries 1 per round" in lines
    assert "c block 0: at first at rank 1, wanted at ranks 0 2 3" in lines
    assert "c route 0: from 0 to 1 over links 0 5" in lines  # to the switch, which is vertex 4, and from it
    assert "c link 5: from 4 to 1, carries 1 per round" in lines


def test_where_there_is_a_schedule_nothing_is_written(tmp_path: Path) -> None:
    found = synth.solve(
        load("ring:4"), "broadcast", method="sat", chunks=1, steps=2, rounds=2, proof=tmp_path / "none.drat"
    )
    assert synth.verify(found).correct and not list(tmp_path.iterdir())


def test_what_is_not_excluded_over_every_schedule_has_no_proof(tmp_path: Path) -> None:
    # With one partial sum per rank and chunk there is none; whether there is one with several is not known.
    error = refuted("ring:5", "allreduce", (1, 2, 5), tmp_path / "none.drat")
    assert not error.is_proved and error.proof_file is None and not list(tmp_path.iterdir())
    assert "none with one partial sum per rank and chunk" in str(error)
    assert f"no DRAT proof in {tmp_path / 'none.drat'}: messages over which every contribution" in str(error)


def test_no_proof_is_taken_for_what_has_none(tmp_path: Path) -> None:
    size: Any = {"chunks": 4, "steps": 4, "rounds": 6}
    with pytest.raises(InputError, match="method ilp: takes no proof, which is for sat"):
        synth.solve(load("ring:4"), "allgather", method="ilp", proof=tmp_path / "none.drat", **size)


@pytest.mark.parametrize(
    ("why", "kind"), [(TimedOutError("late"), TimedOutError), (WorkerDiedError("full"), SolverDiedError)]
)
def test_an_answer_without_the_proof_says_so(
    why: Exception, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise why

    monkeypatch.setattr("arborcast.synth.chunks.refutation.write_refutation", fail)
    with pytest.raises(kind, match=rf"needs at least 2 steps, got 1; without a proof in .*: {why}"):
        synth.solve(
            load("ring:4"),
            "allgather",
            method="sat",
            chunks=1,
            steps=1,
            rounds=9,
            cache=False,
            proof=tmp_path / "x",
        )
