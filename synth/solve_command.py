"""`synth solve`: a schedule, how good it is, and that it is correct.

Large symmetric fabrics get a schedule in implicit form, which is written, verified and simulated as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from synth.console import Json, Stopwatch, print_json, print_lines, progress
from synth.description import (
    choices_document,
    describe_choices,
    describe_solution,
    infeasible_document,
    solution_document,
)
from synth.errors import InfeasibleError, InputError, TimedOutError
from synth.options import (
    AsJson,
    CollectiveName,
    Deadline,
    Gpu,
    NoCache,
    Pcie,
    Ranks,
    Rates,
    Relays,
    Root,
    Seed,
    Spec,
    WithoutLink,
    WithoutRank,
    part_of_one,
    whole,
    writable,
)
from synth.questions import Asked, check_found, collective_on, load_fabric

if TYPE_CHECKING:
    from synth.collective import Collective
    from synth.implicit.schedule import AnySchedule, SomeSchedule
    from synth.methods import Request
    from synth.selection import Selection

FORMS = ("auto", "explicit", "implicit")


def solve(
    spec: Spec,
    collective: CollectiveName,
    method: Annotated[
        str,
        typer.Option(
            help="auto, trees, mwu, routes, smt, ilp, sat, ring, multiring, binary-tree or halving-doubling"
        ),
    ] = "auto",
    root: Root = None,
    ranks: Ranks = None,
    relays: Relays = False,
    size: Annotated[
        str | None, typer.Option("--size", help="with auto: fastest at this size, such as 64KiB")
    ] = None,
    max_trees: Annotated[
        int | None,
        typer.Option(
            "--max-trees",
            parser=whole,
            metavar="N",
            help="at most so many trees (per root where all are roots)",
        ),
    ] = None,
    max_height: Annotated[
        int | None,
        typer.Option(
            "--max-height",
            parser=whole,
            metavar="H",
            help="trees: at most so many steps from a root to a rank, at the best rate",
        ),
    ] = None,
    tolerance: Annotated[
        str | None,
        typer.Option("--tolerance", help="few trees: part of the optimum to give up, such as 1/20"),
    ] = None,
    epsilon: Annotated[
        str | None, typer.Option("--epsilon", help="mwu: the part of the optimum it may miss, such as 1/20")
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            "--chunks",
            parser=whole,
            metavar="C",
            help="smt, ilp, sat (which need all three): chunks of each block",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", parser=whole, metavar="S", help="smt, ilp, sat: steps")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", parser=whole, metavar="R", help="smt, ilp, sat: rounds of all steps"),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--form",
            help="explicit, implicit (representatives and translations), or auto: implicit for more than "
            "64 ranks where the fabric is symmetric",
        ),
    ] = "auto",
    without_link: WithoutLink = None,
    without_rank: WithoutRank = None,
    deadline: Deadline = None,
    seed: Seed = 0,
    no_cache: NoCache = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the schedule here")] = None,
    gpu: Gpu = None,
    pcie: Pcie = False,
    rates: Rates = "datasheet",
    as_json: AsJson = False,
) -> None:
    """Find a schedule, prove how good it is, and verify it."""
    from synth import methods
    from synth.sizes import parse_size

    writable(output)
    if form not in FORMS:
        raise InputError(f"--form {form}: must be one of {', '.join(FORMS)}")
    request = methods.Request(
        max_trees=max_trees,
        tolerance=None if tolerance is None else part_of_one("--tolerance", tolerance),
        epsilon=None if epsilon is None else part_of_one("--epsilon", epsilon),
        seed=seed,
        deadline_s=deadline,
        size_bytes=None if size is None else parse_size(size),
        chunks=chunks,
        steps=steps,
        rounds=rounds,
        cache=not no_cache,
        max_height=max_height,
    )
    fabric = load_fabric(
        spec,
        ranks,
        relays=relays,
        gpu=gpu,
        pcie=pcie,
        rates=rates,
        without_links=without_link,
        without_ranks=without_rank,
    )
    topology = fabric.topology
    stopwatch = Stopwatch()
    try:
        with progress(f"solving {collective} on {topology.name}", quiet=as_json):
            chosen = collective_on(collective, topology, fabric.taking_part, root)
            answer = _answer(fabric, chosen, method, request, form)
    except InfeasibleError as error:
        if as_json:
            print_json(infeasible_document(error, topology, collective))
        raise
    except TimedOutError as error:
        best = {} if error.best is None else _verified(error.best, stopwatch.seconds, output)
        if as_json:
            print_json({**best, "timed_out": True, "why": str(error)})
        elif error.best is not None:
            print_lines(describe_solution(error.best, best))
        raise
    solution = _verified(answer.schedule, stopwatch.seconds, output)
    if as_json:
        print_json({**solution, "choices": answer.choices_document})
        return
    print_lines([*describe_solution(answer.schedule, solution), *answer.choices_in_words])


@dataclass(frozen=True, slots=True)
class _Answer:
    """The schedule, and which others are faster at other sizes, where a size was asked for."""

    schedule: AnySchedule
    choices_document: Sequence[Json] = ()
    choices_in_words: Sequence[str] = ()


def _answer(fabric: Asked, collective: Collective, method: str, request: Request, form: str) -> _Answer:
    from synth import methods
    from synth.implicit import methods as implicit

    topology = fabric.topology
    translations = None
    if form == "implicit":
        _check_implicit(method, collective, request)
        translations = implicit.translations_for(topology, collective, request)
    elif form == "auto":
        translations = implicit.worthwhile_translations(topology, collective, method, request)
    if translations is not None:
        if request.size_bytes is None:
            return _Answer(implicit.answer_implicitly(topology, collective, translations, request))
        return _chosen(
            implicit.select_implicitly(topology, collective, translations, request), request.size_bytes
        )
    if fabric.faulty is not None and form == "auto" and method in {"auto", "trees"}:
        from synth.packing.partly_symmetric import is_worthwhile, solve_partly_symmetric

        if is_worthwhile(fabric.faulty, collective, request):
            return _Answer(
                solve_partly_symmetric(
                    fabric.faulty, collective.kind, seed=request.seed, deadline_s=request.deadline_s
                )
            )
    if request.size_bytes is None or method != "auto":
        return _Answer(methods.answer(topology, collective, method, request))
    return _chosen(methods.select(topology, collective, request), request.size_bytes)


def _check_implicit(method: str, collective: Collective, request: Request) -> None:
    """Refuse what the implicit form would answer by another method than the one that was named."""
    from synth.implicit.methods import natural_method

    natural = natural_method(collective)
    if method not in {"auto", natural}:
        raise InputError(
            f"method {method}: the implicit form of {collective.kind} is made by {natural} (or auto)"
        )
    if method != "auto" and request.size_bytes is not None:
        raise InputError(f"method {method}: takes no size_bytes, which is for auto")


def _chosen(selection: Selection[SomeSchedule], size_bytes: int) -> _Answer:
    schedule = selection.fastest_in_time(size_bytes)
    choices = selection.choices()
    return _Answer(schedule, choices_document(choices), describe_choices(choices))


def _verified(schedule: AnySchedule, seconds: float, output: Path | None) -> Json:
    """What `solve` reports; nothing is said or written of a schedule that the verifier does not pass."""
    import synth

    check_found(schedule)
    if output is not None:
        synth.write_any_schedule(schedule, output)
    return solution_document(schedule, seconds, output)
