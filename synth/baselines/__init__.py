"""The patterns that libraries use whatever the graph is: rings, trees, butterflies.

They are what the synthesized schedules are compared with, in the same format and under the same verifier
and simulator. `BASELINES` is the one table of them: a new pattern is a row there, from which follow the
choices of `--method`, what is compared with a schedule or for a size, and what the benches build.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from typing import TYPE_CHECKING, Any

from arborcast.synth.collective import TREE_KINDS, Collective, Kind
from arborcast.synth.deadline import Deadline, Limit
from arborcast.synth.errors import CollectiveError, InfeasibleError, InputError
from arborcast.synth.ports import Ports

if TYPE_CHECKING:
    from arborcast.synth.certificate import Bound
    from arborcast.synth.schedule import Schedule
    from arborcast.synth.topology import Topology

_ROOTED = (Kind.BROADCAST, Kind.REDUCE, Kind.ALLREDUCE)
_BLOCKS = (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE)


@dataclass(frozen=True, slots=True)
class Baseline:
    """One pattern.

    Attributes:
        kinds: of collectives that it does.
        home: its module here and the function there that makes it, imported when it is asked for: of kind,
            number of positions and name a `Pattern`, which is laid over the graph; or, `on_graph`, of the
            topology and what follows a schedule.
        on_graph: whether the function looks at the graph itself.
        power_of_two: whether all kinds but allreduce need a power of two of ranks.
    """

    kinds: tuple[Kind, ...]
    home: str
    on_graph: bool = False
    power_of_two: bool = False

    @property
    def function(self) -> Any:
        """What `home` names."""
        module, _, name = self.home.partition(".")
        return getattr(import_module(f"{__name__}.{module}"), name)


BASELINES: Mapping[str, Baseline] = {
    "ring": Baseline(TREE_KINDS, "rings.solve_ring", on_graph=True),
    "multiring": Baseline(TREE_KINDS, "multiring.solve_multiring", on_graph=True),
    "binary-tree": Baseline(_ROOTED, "binary_tree.double_tree"),
    "levels": Baseline(_ROOTED, "hierarchical_trees.solve_levels", on_graph=True),
    "halving-doubling": Baseline(_BLOCKS, "butterflies.butterfly", power_of_two=True),
    "multiport": Baseline(_BLOCKS, "butterflies.multiport", power_of_two=True),
    "swing": Baseline(_BLOCKS, "butterflies.butterfly", power_of_two=True),
    "recursive-doubling": Baseline((Kind.ALLREDUCE,), "butterflies.doubling"),
    "rotated-doubling": Baseline((Kind.ALLREDUCE,), "butterflies.multiport"),
    "bruck": Baseline(_BLOCKS, "cyclic.around"),
    "pat": Baseline(_BLOCKS, "cyclic.around"),
    "bine": Baseline(_ROOTED, "cyclic.bine"),
}


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
        InfeasibleError: the pattern does not fit this graph, or is none of this number of ranks.
        TimedOutError: the deadline passed.
    """
    deadline = Deadline.after(deadline_s)
    if method not in BASELINES:
        raise InputError(f"method {method}: must be one of {', '.join(BASELINES)}")
    kind, count, row = collective.kind, len(collective.ranks), BASELINES[method]
    if kind not in row.kinds:
        raise CollectiveError(f"{kind}: method {method} makes only {', '.join(row.kinds)}")
    collective.check(topology)
    if topology.streams:
        ports = Ports.of(topology)
        found = solve_baseline(ports.fabric, collective, method, seed=seed, bound=bound, deadline_s=deadline)
        return ports.lift(found)
    if bound is None:
        from arborcast.synth import bounds  # compiled kernels come with it

        bound = bounds.bound(topology, collective)
    if bound.rate == Fraction(0):
        from arborcast.synth.routes.reachability import who_is_cut_off

        raise InfeasibleError(who_is_cut_off(topology, collective), bound)
    if row.power_of_two and kind is not Kind.ALLREDUCE and count & (count - 1):
        raise InfeasibleError(
            f"{method}: {kind} needs a power of two of ranks, got {count}; "
            "methods trees and ring take any number"
        )
    schedule: Schedule
    if row.on_graph:
        schedule = row.function(topology, collective, bound, seed, deadline)
    else:
        from arborcast.synth.baselines.pattern import lay

        schedule = lay(topology, collective, bound, row.function(kind, count, method), deadline)
    return schedule
