"""Which questions are answered in implicit form, and the answers: the entry of everything that scales.

A collective without a root, among all ranks of a fabric with translations, has a schedule that they map to
itself and that is as fast as any. From some size on nobody wants such a schedule written out.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING

from synth.collective import Collective, Kind
from synth.deadline import Deadline
from synth.errors import InputError, TimedOutError
from synth.implicit.schedule import ImplicitSchedule
from synth.implicit.translations import Translations
from synth.topology import Topology

if TYPE_CHECKING:
    from synth.methods import Request
    from synth.selection import Selection

IMPLICIT_KINDS = (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE, Kind.ALLTOALL)
"""The kinds that name no rank, so that a translation of the fabric is one of the collective."""

LARGEST_EXPLICIT = 64
"""Ranks up to which schedules are written out unless asked otherwise: they are small, and easier to read."""

MOST_ORBITS = 64
"""Orbits of ranks up to which solving by orbits is worth it: each has trees of its own."""


def solve_implicit(
    topology: Topology,
    collective: Collective | Kind | str,
    *,
    max_trees: int | None = None,
    tolerance: Fraction | None = None,
    max_height: int | None = None,
    seed: int = 0,
    deadline_s: float | None = None,
    size_bytes: int | None = None,
) -> ImplicitSchedule:
    """A schedule in implicit form: representatives and the translations that make all the others.

    Args:
        topology: a fabric with translations; all its ranks take part.
        collective: an allgather, reduce-scatter, allreduce or alltoall.
        max_trees: at most so many trees per root, at the best rate; None for any number.
        tolerance: the part of the optimum that may be given up for fewer trees.
        max_height: the most steps from a root to a rank.
        seed: breaks ties; the same seed gives the same schedule on any machine.
        deadline_s: seconds from now.
        size_bytes: the message size for which it should be fastest; None for the best rate.

    Raises:
        InputError: the question has no answer in implicit form; says why.
        InfeasibleError: some ranks are cut off.
        TimedOutError: the deadline passed.
    """
    from synth.methods import Request, as_collective

    asked = as_collective(topology, collective)
    request = Request(
        max_trees=max_trees,
        tolerance=tolerance,
        max_height=max_height,
        seed=seed,
        deadline_s=deadline_s,
        size_bytes=size_bytes,
    )
    translations = translations_for(topology, asked, request)
    if size_bytes is None:
        return answer_implicitly(topology, asked, translations, request)
    return select_implicitly(topology, asked, translations, request).fastest_in_time(size_bytes)


def translations_for(topology: Topology, collective: Collective, request: Request) -> Translations:
    """The translations by which a question is answered.

    Raises:
        InputError: it has no answer in implicit form: the kind has a root, some ranks take no part, no
            translation was found, or a knob is for other methods.
    """
    kind = collective.kind
    if kind not in IMPLICIT_KINDS:
        kinds = ", ".join(known.value for known in IMPLICIT_KINDS)
        raise InputError(f"{kind}: has no implicit form, which is for {kinds}")
    if len(collective.ranks) < topology.ranks:
        relays = topology.ranks - len(collective.ranks)
        raise InputError(f"{kind}: the implicit form is for all ranks of a topology, got {relays} relays")
    for knob in ("epsilon", "chunks", "steps", "rounds"):
        if getattr(request, knob) is not None:
            raise InputError(f"{kind}: the implicit form takes no {knob}")
    if kind is Kind.ALLTOALL:
        for knob in ("max_trees", "tolerance", "max_height"):
            if getattr(request, knob) is not None:
                raise InputError(f"{kind}: takes no {knob}, it is not done along trees")
    from synth.implicit.search import translations_of

    found = translations_of(topology, seed=request.seed)
    if found.order == 1:
        raise InputError(
            f"topology {topology.name}: the implicit form needs a symmetry that moves every rank, found none"
        )
    return found


def natural_method(collective: Collective) -> str:
    """The method, as `synth.methods` names it, that implicit schedules of a collective are made by."""
    return "routes" if collective.kind is Kind.ALLTOALL else "trees"


def worthwhile_translations(
    topology: Topology, collective: Collective, method: str, request: Request
) -> Translations | None:
    """Those by which a question is better answered than with everything written out; None if it is not."""
    if topology.ranks <= LARGEST_EXPLICIT or method not in {"auto", natural_method(collective)}:
        return None
    if method != "auto" and request.size_bytes is not None:
        return None  # which `synth.methods.answer` refuses
    try:
        found = translations_for(topology, collective, request)
    except InputError:
        return None  # asked for nothing but a schedule: written out it is
    return found if len(found.representatives) <= MOST_ORBITS else None


def answer_implicitly(
    topology: Topology, collective: Collective, translations: Translations, request: Request
) -> ImplicitSchedule:
    """The best rate by orbits; raises as `solve_implicit`."""
    if collective.kind is Kind.ALLTOALL:
        from synth.implicit.routes import solve_symmetric_alltoall

        return solve_symmetric_alltoall(
            topology, collective, translations=translations, seed=request.seed, deadline_s=request.deadline_s
        )
    from synth.packing.symmetric.solver import solve_symmetric

    return solve_symmetric(
        topology,
        collective,
        translations=translations,
        max_trees=request.max_trees,
        max_height=request.max_height,
        tolerance=request.tolerance,
        seed=request.seed,
        deadline_s=request.deadline_s,
    )


def select_implicitly(
    topology: Topology, collective: Collective, translations: Translations, request: Request
) -> Selection[ImplicitSchedule]:
    """Every implicit schedule worth comparing over message sizes, the one of the highest rate first.

    Raises:
        InfeasibleError: there is none.
        TimedOutError: the deadline passed before there was any.
    """
    from synth.selection import Selection

    found: list[ImplicitSchedule] = []
    try:
        for schedule in implicit_candidates(topology, collective, translations, request):
            found.append(schedule)
    except TimedOutError as error:
        found += [error.best] if isinstance(error.best, ImplicitSchedule) else []
        if not found:
            raise
        return Selection(tuple(found), error)
    return Selection(tuple(found))


def implicit_candidates(
    topology: Topology, collective: Collective, translations: Translations, request: Request
) -> Iterator[ImplicitSchedule]:
    """Every implicit schedule worth comparing, as they are found; raises as `select_implicitly`."""
    deadline = Deadline.after(request.deadline_s)
    yield answer_implicitly(topology, collective, translations, request)
    asks_for_a_shape = (request.max_trees, request.max_height) != (None, None)
    if collective.kind is Kind.ALLTOALL or asks_for_a_shape:
        return
    from synth.packing.symmetric.frontier import symmetric_frontier

    deadline.check("the comparison of methods")
    yield from symmetric_frontier(
        topology, collective, translations=translations, seed=request.seed, deadline_s=deadline.left_s
    )
