"""That there is no schedule of (C, S, R), for checkers that are not ours: a formula, and why it cannot hold.

CaDiCaL is asked once more, of the problem as it is, without any group of symmetries, and writes down every
clause that it derives (DRAT), down to the empty one. `drat-trim FILE.cnf FILE` and other checkers follow it
without trusting CaDiCaL or us. That the formula says what was asked remains to be read: its comments give the
question, the meaning of each variable, and what is left out because no schedule needs it. The formula of an
allreduce asks for less than a schedule (`synth.chunks.allreduce.sum_formulas.SpreadFormula`), so that it
excludes whatever copies and adds; where it holds all the same, there is no such proof.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from pysat.solvers import Cadical195

from arborcast.synth.chunks.allreduce.partial_sums import SumOrbits, sum_problem
from arborcast.synth.chunks.allreduce.sum_formulas import SpreadFormula
from arborcast.synth.chunks.encodings.reachable_sends import is_ordered, longest_step
from arborcast.synth.chunks.encodings.sat import Formula
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkOrbits
from arborcast.synth.chunks.problem.outcome import Instance
from arborcast.synth.chunks.problem.time_reversal import IMAGES, mirrored
from arborcast.synth.chunks.solvers.solver_child import SolverProcess
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.formats.atomic import write_atomically
from arborcast.synth.topology import Topology

_COPIES = """\
and blocks of C chunks each. A schedule has S steps of at least one round each, R rounds in all. In
a step chunks are sent from ranks that had them when the step began to other ranks, over routes:
single links, or links through switches. Over a link go no more chunks in a step than it carries
per round times the rounds of the step. At the end every chunk of a block is at every rank that
wants the block."""

_SUMS = """\
and C chunks, to each of which ranks contribute. A schedule has S steps of at least one round each, R
rounds in all. In a step messages, each with a sum for one chunk, are sent from ranks to other ranks,
over routes: single links, or links through switches. Over a link go no more messages in a step than
it carries per round times the rounds of the step. A rank has met a contribution if it is its own or
part of what came in a message, and a message brings none that its sender had not met when the step
began. At the end every rank that wants a contribution has met it. So the formula leaves out which
sums are made, and excludes every way to copy and to add, however many sums a rank may keep."""

_LEFT_OUT = """\
- a chunk that comes to a rank that has it already, or twice in a step;
- a send in a step in which the chunk cannot be there yet, or after which too few steps are left
  for it to come to any other rank that wants it;"""

_LEFT_OUT_OF_SUMS = """\
- two messages of a chunk over the same route in the same step: one that brings all that its sender has
  met does for both;"""


def formula_file(proof: Path) -> Path:
    """Where the formula of a proof is written: the same name with `.cnf` after it."""
    return proof.with_name(proof.name + ".cnf")


def write_refutation(
    topology: Topology,
    collective: Collective,
    size: tuple[int, int, int],
    proof: Path,
    *,
    deadline: Deadline,
    child: SolverProcess,
) -> bool:
    """Write the proof that there is no schedule, and its formula to `formula_file(proof)`.

    Args:
        topology: the fabric.
        collective: what to do on it.
        size: (C, S, R) for which there is none.
        proof: the file to write.
        deadline: when to give up.
        child: where CaDiCaL runs.

    Returns:
        Whether that was done; False where the formula of an allreduce holds.

    Raises:
        TimedOutError: the deadline passed.
        WorkerDiedError: the proof needs more memory than the child may have.
        InputError: a file cannot be written.
    """
    chunks, steps, rounds = size
    question = f"{collective.kind} on {' '.join(topology.name.split())}"
    orbits: ChunkOrbits
    if collective.kind is Kind.ALLREDUCE:
        orbits = SumOrbits.trivial(sum_problem(topology, collective), chunks)
    else:
        orbits = ChunkOrbits.trivial(ChunkProblem.of(*mirrored(topology, collective)), chunks)
    if collective.kind in IMAGES:
        question += f", as its mirror image, {IMAGES[collective.kind]} over the reversed links, run backwards"
    instance = Instance(orbits, steps, rounds)
    refuted = child.run("its proof by CaDiCaL", refute, instance, question, deadline=deadline)
    if refuted is None:
        return False
    formula, derivation = refuted
    write_atomically(formula_file(proof), formula)
    write_atomically(proof, derivation)
    return True


def refute(instance: Instance, question: str) -> tuple[str, str] | None:
    """The formula of an instance without symmetries as DIMACS, and why it cannot hold as DRAT.

    Args:
        instance: which; of an allreduce it has `SumOrbits`.
        question: what it is, in one line.

    Returns:
        None where the formula of an allreduce holds, which is no schedule.

    Raises:
        AssertionError: any other formula holds.
    """
    is_sum = isinstance(instance.orbits, SumOrbits)
    formula = SpreadFormula(instance) if is_sum else Formula(instance)
    if [] in formula.clauses.clauses:
        return formula_text(formula, question), "0\n"
    with Cadical195(with_proof=True) as solver:
        for clause in formula.clauses.clauses:
            solver.add_clause(clause)
        if solver.solve():
            if is_sum:
                return None
            raise AssertionError(f"{question}: CaDiCaL finds a schedule where there is none")
        derivation: list[str] = solver.get_proof()
    return formula_text(formula, question), "".join(f"{line}\n" for line in derivation)


def formula_text(formula: Formula | SpreadFormula, question: str) -> str:
    """A formula as DIMACS, with comments for whoever wants to know what it says; as for `refute`."""
    clauses = formula.clauses
    comments = (*_question(formula, question), *_meanings(formula))
    lines = [f"c {line}".rstrip() for line in comments]
    lines.append(f"p cnf {clauses.variables} {len(clauses.clauses)}")
    lines += (" ".join(map(str, (*clause, 0))) for clause in clauses.clauses)
    return "\n".join(lines) + "\n"


def _question(formula: Formula | SpreadFormula, question: str) -> Iterator[str]:
    instance = formula.instance
    is_sum = isinstance(formula, SpreadFormula)
    problem, chunks = instance.orbits.problem, instance.orbits.chunks
    yield f"Is there a schedule with (C, S, R) = ({chunks}, {instance.steps}, {instance.rounds})?"
    yield question
    yield ""
    yield "There are vertices, the first of which are ranks and the others switches, links between vertices,"
    yield from (_SUMS if is_sum else _COPIES).splitlines()
    yield ""
    yield f"ranks: {problem.ranks}, switches: {problem.topology.size - problem.ranks}"
    for number, (link, capacity) in enumerate(zip(problem.topology.links, problem.capacities, strict=True)):
        yield f"link {number}: from {link.src} to {link.dst}, carries {capacity} per round"
    for number, route in enumerate(problem.routes):
        yield f"route {number}: from {route.src} to {route.dst} over {_numbers('link', route.links)}"
    for number, demand in enumerate(problem.demands):
        sources, targets = _numbers("rank", demand.sources), _numbers("rank", demand.targets)
        if is_sum:
            yield f"contribution of rank {demand.owner}: wanted at {targets}"
        else:
            yield f"block {number}: at first at {sources}, wanted at {targets}"
    yield ""
    yield "A proof shows that the clauses below cannot all hold. That they can if there is such a schedule is"
    yield "for the reader to check. What they leave out no schedule needs:"
    yield from (_LEFT_OUT_OF_SUMS if is_sum else _LEFT_OUT).splitlines()
    yield f"- a step of more than {longest_step(instance)} rounds, and to use up all R."
    if is_sum and chunks > 1:
        yield "The chunks, which are alike, are numbered in the order of which messages there are of them."
    elif not is_sum and is_ordered(instance.orbits):
        yield "The chunks of the block, which are alike, are numbered in the order of where they are when."


def _meanings(formula: Formula | SpreadFormula) -> Iterator[str]:
    """What each variable says; those that only count come without."""
    named = {
        variable: f"step {step + 1} has more than {rounds} rounds"
        for step, literals in enumerate(formula.rounds.longer)
        for rounds, variable in enumerate(literals, start=1)
    }
    unnamed = "count, for the limits of links and rounds"
    if isinstance(formula, SpreadFormula):
        named |= _messages(formula)
        unnamed += ", put chunks in order, or say that a message brings a contribution"
    else:
        named |= _sends(formula)
    yield from ("", f"Variables (those without a line {unnamed}):")
    for variable, meaning in sorted(named.items()):
        yield f"variable {variable}: {meaning}"


def _sends(formula: Formula) -> dict[int, str]:
    classes = formula.instance.orbits.classes
    named = {
        variable: f"chunk {member} of block {classes[number].demand} is at rank {rank} after {time} steps"
        for (number, member, rank, time), variable in formula.holds.items()
    }
    for send, variable in formula.sends.items():
        chunk = f"chunk {send.member} of block {classes[send.chunk_class].demand}"
        named[variable] = f"{chunk} is sent over route {send.route} in step {send.step + 1}"
    return named


def _messages(formula: SpreadFormula) -> dict[int, str]:
    named = {
        variable: f"a message of chunk {chunk} is sent over route {route} in step {step + 1}"
        for chunk, steps in enumerate(formula.sent)
        for step, routes in enumerate(steps)
        for route, variable in enumerate(routes)
    }
    for chunk, met in enumerate(formula.met):
        for (contributor, rank, time), variable in met.items():
            who = f"rank {rank} has met the contribution of rank {contributor}"
            named[variable] = f"{who} to chunk {chunk} after {time} steps"
    return named


def _numbers(what: str, numbers: Collection[int]) -> str:
    return f"{what}{'s' if len(numbers) != 1 else ''} {' '.join(map(str, sorted(numbers)))}"
