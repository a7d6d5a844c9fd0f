"""The patterns that libraries use whatever the graph is: rings, trees, butterflies.

They are what the synthesized schedules are compared with, in the same format and under the same verifier
and simulator. Each module makes one pattern; this is the entry that knows them by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from arborcast.synth.certificate import Bound
from arborcast.synth.collective import TREE_KINDS, Collective, Kind
from arborcast.synth.deadline import Deadline, Limit
from arborcast.synth.errors import CollectiveError, InfeasibleError, InputError
from arborcast.synth.routes.reachability import who_is_cut_off
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Topology

SUPPORTED: Mapping[str, tuple[Kind, ...]] = {
    "ring": TREE_KINDS,
    "multiring": TREE_KINDS,
    "binary-tree": (Kind.BROADCAST, Kind.REDUCE, Kind.ALLREDUCE),
    "levels": (Kind.BROADCAST, Kind.REDUCE, Kind.ALLREDUCE),
    "halving-doubling": (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE),
    "multiport": (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE),
    "swing": (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE),
    "recursive-doubling": (Kind.ALLREDUCE,),
    "bruck": (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE),
    "pat": (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE),
    "bine": (Kind.BROADCAST, Kind.REDUCE, Kind.ALLREDUCE),
}
BASELINES = tuple(SUPPORTED)


def solve_baseline(
    topology: Topology,
    collective: Collective,
    method: str,
    *,
    seed: int = 0,
    bound: Bound | None = None,
    deadline_s: Limit = None,
) -> Schedule:
    """The schedule of a collective by one of the classical patterns.

    Ranks outside the collective are not used: patterns join ranks by a link or through switches only.

    The bound is worked out where it is not given, and the seed is of the searches for rings: the same one
    gives the same schedule on any machine. Without a deadline there is no limit.

    Raises:
        InputError: an unknown method.
        CollectiveError: the pattern does not exist for this kind.
        InfeasibleError: the pattern does not fit this graph.
        TimedOutError: the deadline passed.
    """
    deadline = Deadline.after(deadline_s)
    if method not in SUPPORTED:
        raise InputError(f"method {method}: must be one of {', '.join(BASELINES)}")
    if collective.kind not in SUPPORTED[method]:
        supported = ", ".join(SUPPORTED[method])
        raise CollectiveError(f"{collective.kind}: method {method} makes only {supported}")
    collective.check(topology)
    if bound is None:
        from arborcast.synth import bounds  # compiled kernels come with it

        bound = bounds.bound(topology, collective)
    if bound.rate == Fraction(0):
        raise InfeasibleError(who_is_cut_off(topology, collective), bound)
    match method:
        case "ring":
            from arborcast.synth.baselines.rings import solve_ring

            return solve_ring(topology, collective, bound, seed, deadline)
        case "multiring":
            from arborcast.synth.baselines.multiring import solve_multiring

            return solve_multiring(topology, collective, bound, seed, deadline)
        case "binary-tree":
            from arborcast.synth.baselines.binary_tree import solve_binary_tree

            return solve_binary_tree(topology, collective, bound, deadline)
        case "levels":
            from arborcast.synth.baselines.levels import solve_levels

            return solve_levels(topology, collective, bound, deadline)
        case "bruck" | "pat" | "bine":
            from arborcast.synth.baselines.cyclic import solve_cyclic

            return solve_cyclic(topology, collective, method, bound, deadline)
        case _:
            from arborcast.synth.baselines.butterflies import solve_butterfly

            return solve_butterfly(topology, collective, method, bound, deadline)
