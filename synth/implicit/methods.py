"""Which questions have an answer in implicit form, and the answers: the way to everything that scales.

A collective without a root, among all ranks of a fabric with translations, has a schedule that they map to
itself and that is as fast as any. From some size on such a schedule is too long to be written out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InputError
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Topology

if TYPE_CHECKING:
    from arborcast.synth.request import Request

IMPLICIT_KINDS = (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE, Kind.ALLTOALL)
"""The kinds that name no rank, so that a translation of the fabric is one of the collective."""


def translations_for(topology: Topology, collective: Collective, *, seed: int = 0) -> Translations:
    """The translations by which a question is answered.

    Raises:
        InputError: it has no answer in implicit form: the kind has a root, some ranks take no part, or no
            translation was found.
    """
    kind = collective.kind
    if kind not in IMPLICIT_KINDS:
        kinds = ", ".join(known.value for known in IMPLICIT_KINDS)
        raise InputError(f"{kind}: has no implicit form, which is for {kinds}")
    if len(collective.ranks) < topology.ranks:
        relays = topology.ranks - len(collective.ranks)
        raise InputError(f"{kind}: the implicit form is for all ranks of a topology, got {relays} relays")
    from arborcast.synth.symmetry.translation_search import translations_of

    found = translations_of(topology, seed=seed)
    if found.order == 1:
        raise InputError(
            f"topology {topology.name}: the implicit form needs a symmetry that moves every rank, found none"
        )
    return found


def answer_implicitly(
    topology: Topology, collective: Collective, translations: Translations, request: Request
) -> ImplicitSchedule:
    """The best rate by orbits.

    Raises:
        InfeasibleError: some ranks are cut off.
        TimedOutError: the deadline passed.
    """
    if collective.kind is Kind.ALLTOALL:
        from arborcast.synth.routes.symmetric_alltoall import solve_symmetric_alltoall

        return solve_symmetric_alltoall(topology, collective, request, translations=translations)
    from arborcast.synth.packing.symmetric.solver import solve_symmetric

    return solve_symmetric(topology, collective, request, translations=translations)


def implicit_candidates(
    topology: Topology, collective: Collective, translations: Translations, request: Request
) -> Iterator[ImplicitSchedule]:
    """Every implicit schedule worth comparing, the one of the highest rate first; raises the same."""
    deadline = Deadline.after(request.deadline_s)
    yield answer_implicitly(topology, collective, translations, request)
    asks_for_a_shape = (request.max_trees, request.max_height) != (None, None)
    if collective.kind is Kind.ALLTOALL or asks_for_a_shape:
        return
    from arborcast.synth.packing.symmetric.frontier import symmetric_frontier

    deadline.check("the comparison of methods")
    left = replace(request, deadline_s=deadline.left_s)
    yield from symmetric_frontier(topology, collective, left, translations=translations)
