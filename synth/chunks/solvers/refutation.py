"""That there is no schedule of (C, S, R), for checkers that are not ours: a formula, and why it cannot hold.

CaDiCaL is asked once more, of the problem as it is, without any group of symmetries, and writes down every
clause that it derives (DRAT), down to the empty one. `drat-trim FILE.cnf FILE` and other checkers follow it
without trusting CaDiCaL or us. That the formula says what was asked remains to be read: its comments give the
question, the meaning of each variable, and what is left out because no schedule needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from pysat.solvers import Cadical195

from arborcast.synth.chunks.encodings.reachable_sends import is_ordered, longest_step
from arborcast.synth.chunks.encodings.sat import Formula
from arborcast.synth.chunks.problem.instance import Problem
from arborcast.synth.chunks.problem.orbits import Orbits
from arborcast.synth.chunks.problem.outcome import Instance
from arborcast.synth.chunks.problem.time_reversal import IMAGES, mirrored
from arborcast.synth.chunks.solvers.workers import Workers
from arborcast.synth.collective import Collective
from arborcast.synth.deadline import Deadline
from arborcast.synth.formats.atomic import write_atomically
from arborcast.synth.topology import Topology


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
    workers: Workers,
) -> None:
    """Write the proof that there is no schedule, and its formula to `formula_file(proof)`.

    Args:
        topology: the fabric.
        collective: any but an allreduce, which is searched in two halves and not as one formula.
        size: (C, S, R) for which there is none.
        proof: the file to write.
        deadline: when to give up.
        workers: where CaDiCaL runs.

    Raises:
        TimedOutError: the deadline passed.
        WorkerDiedError: the proof needs more memory than a worker may have.
        InputError: a file cannot be written.
    """
    chunks, steps, rounds = size
    problem = Problem.of(*mirrored(topology, collective))
    instance = Instance(Orbits.trivial(problem, chunks), steps, rounds)
    question = f"{collective.kind} on {' '.join(topology.name.split())}"
    if collective.kind in IMAGES:
        question += f", as its mirror image, {IMAGES[collective.kind]} over the reversed links, run backwards"
    formula, derivation = workers.run("its proof by CaDiCaL", refute, instance, question, deadline=deadline)
    write_atomically(formula_file(proof), formula)
    write_atomically(proof, derivation)


def refute(instance: Instance, question: str) -> tuple[str, str]:
    """The formula of an instance without symmetries as DIMACS, and why it cannot hold as DRAT.

    Args:
        instance: which.
        question: what it is, in one line.

    Raises:
        AssertionError: it can.
    """
    formula = Formula(instance)
    if [] in formula.clauses.clauses:
        return formula_text(formula, question), "0\n"
    with Cadical195(with_proof=True) as solver:
        for clause in formula.clauses.clauses:
            solver.add_clause(clause)
        if solver.solve():
            raise AssertionError(f"{question}: CaDiCaL finds a schedule where there is none")
        derivation: list[str] = solver.get_proof()
    return formula_text(formula, question), "".join(f"{line}\n" for line in derivation)


def formula_text(formula: Formula, question: str) -> str:
    """A formula as DIMACS, with comments for whoever wants to know what it says; as for `refute`."""
    clauses = formula.clauses
    comments = (*_question(formula.instance, question), *_meanings(formula))
    lines = [f"c {line}".rstrip() for line in comments]
    lines.append(f"p cnf {clauses.variables} {len(clauses.clauses)}")
    lines += (" ".join(map(str, (*clause, 0))) for clause in clauses.clauses)
    return "\n".join(lines) + "\n"


def _question(instance: Instance, question: str) -> Iterator[str]:
    problem, chunks = instance.orbits.problem, instance.orbits.chunks
    yield f"Is there a schedule with (C, S, R) = ({chunks}, {instance.steps}, {instance.rounds})?"
    yield question
    yield from (
        "",
        "There are vertices, the first of which are ranks and the others switches, links between vertices,",
        "and blocks of C chunks each. A schedule has S steps of at least one round each, R rounds in all. In",
        "a step chunks are sent from ranks that had them when the step began to other ranks, over routes:",
        "single links, or links through switches. Over a link go no more chunks in a step than it carries",
        "per round times the rounds of the step. At the end every chunk of a block is at every rank that",
        "wants the block.",
        "",
        f"ranks: {problem.ranks}, switches: {problem.topology.size - problem.ranks}",
    )
    for number, (link, capacity) in enumerate(zip(problem.topology.links, problem.capacities, strict=True)):
        yield f"link {number}: from {link.src} to {link.dst}, carries {capacity} per round"
    for number, route in enumerate(problem.routes):
        yield f"route {number}: from {route.src} to {route.dst} over {_numbers('link', route.links)}"
    for number, demand in enumerate(problem.demands):
        sources, targets = _numbers("rank", demand.sources), _numbers("rank", demand.targets)
        yield f"block {number}: at first at {sources}, wanted at {targets}"
    yield from (
        "",
        "A proof shows that the clauses below cannot all hold. That they can if there is such a schedule is",
        "for the reader to check. What they leave out no schedule needs:",
        "- a chunk that comes to a rank that has it already, or twice in a step;",
        "- a send in a step in which the chunk cannot be there yet, or after which too few steps are left",
        "  for it to come to any other rank that wants it;",
        f"- a step of more than {longest_step(instance)} rounds, and to use up all R.",
    )
    if is_ordered(instance.orbits):
        yield "The chunks of the block, which are alike, are numbered in the order of where they are when."


def _meanings(formula: Formula) -> Iterator[str]:
    """What each variable says; those that only count come without."""
    classes = formula.instance.orbits.classes
    named = {
        variable: f"step {step + 1} has more than {rounds} rounds"
        for step, literals in enumerate(formula.rounds.longer)
        for rounds, variable in enumerate(literals, start=1)
    }
    for (chunk_class, member, rank, time), variable in formula.holds.items():
        block = classes[chunk_class].demand
        named[variable] = f"chunk {member} of block {block} is at rank {rank} after {time} steps"
    for send, variable in formula.sends.items():
        block = classes[send.chunk_class].demand
        named[variable] = (
            f"chunk {send.member} of block {block} is sent over route {send.route} in step {send.step + 1}"
        )
    yield from ("", "Variables (those without a line count, for the limits of links and rounds):")
    for variable, meaning in sorted(named.items()):
        yield f"variable {variable}: {meaning}"


def _numbers(what: str, numbers: Collection[int]) -> str:
    return f"{what}{'s' if len(numbers) != 1 else ''} {' '.join(map(str, sorted(numbers)))}"
