"""A large regular fabric with a few faults: solved by orbits where it is healthy, repaired round the faults.

The healthy fabric keeps its translations, so that its schedule takes a moment whatever its size; what the
faults leave of its trees is where the exact packing of the faulty one starts.
"""

from __future__ import annotations

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import CollectiveError, InputError
from arborcast.synth.faults.faulty import Faulty
from arborcast.synth.faults.repair import repaired
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Schedule

SERVED = (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE)
"""The kinds that are solved by orbits and along trees."""


def solve_partly_symmetric(
    faulty: Faulty, kind: Kind | str, *, seed: int = 0, deadline_s: float | None = None
) -> Schedule:
    """A schedule among all ranks that are left of a fabric with translations.

    Args:
        faulty: what `synth.faults.faulty.without` made of the healthy fabric.
        kind: an allgather, reduce-scatter or allreduce.
        seed: breaks ties; the same seed gives the same schedule on any machine.
        deadline_s: seconds from now.

    Returns:
        The schedule, exact for what is left; its method's settings say how much of the rate stays on
        translates of the healthy fabric's trees.

    Raises:
        InputError: another kind, or the healthy fabric has no translations to solve it by.
        InfeasibleError: what is left is not connected; names the ranks that are cut off.
        TimedOutError: the deadline passed.
    """
    deadline = Deadline.after(deadline_s)
    healthy = healthy_schedule(faulty, kind, seed=seed, deadline_s=deadline_s)
    deadline.check(f"the schedule of the healthy {faulty.healthy.name}")
    return repaired(healthy, faulty, seed=seed, deadline_s=deadline.left_s)


def healthy_schedule(
    faulty: Faulty, kind: Kind | str, *, seed: int = 0, deadline_s: float | None = None
) -> ImplicitSchedule:
    """The schedule of the healthy fabric, by orbits; raises as `solve_partly_symmetric` does."""
    from arborcast.synth.packing.symmetric.solver import solve_symmetric
    from arborcast.synth.symmetry.translation_search import translations_of

    collective = Collective.on(faulty.healthy, kind)
    if collective.kind not in SERVED:
        served = ", ".join(served.value for served in SERVED)
        raise CollectiveError(f"{collective.kind}: by orbits and repair are solved {served}")
    translations = translations_of(faulty.healthy, seed=seed)
    if translations.order == 1:
        raise InputError(f"topology {faulty.healthy.name}: has no translations, so that nothing is repeated")
    return solve_symmetric(
        faulty.healthy, collective, translations=translations, seed=seed, deadline_s=deadline_s
    )
