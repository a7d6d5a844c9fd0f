"""The public entry: a topology and a collective in, a bound or a schedule out, by the method of choice.

This is the one place that knows all methods by name. Each method lives in its own module and is imported
only when it is asked for, so that the start of the command stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from synth.certificate import Bound
from synth.collective import TREE_KINDS, Collective, Kind
from synth.errors import InputError
from synth.schedule import Schedule
from synth.topology import Topology

if TYPE_CHECKING:
    from synth.packing.solver import TreeMethod


@dataclass(frozen=True, slots=True)
class Request:
    """What a method may be told beyond the topology and the collective.

    Attributes:
        max_trees: at most so many trees (per root for allgather and reduce-scatter); None for any number.
        tolerance: with few trees, the part of the optimum that may be given up for fewer of them; None
            for the default of `synth.packing.fewest`.
        epsilon: the part of the optimum that the multiplicative weights may miss; None for the default of
            `synth.packing.mwu`.
        seed: breaks ties; the same seed gives the same schedule on any machine.
        deadline_s: seconds after which `TimedOutError` is raised; None for no limit.
        size_bytes: with the method "auto", the message size for which the schedule should be fastest;
            None for the best rate, which is what counts for large messages.
    """

    max_trees: int | None = None
    tolerance: Fraction | None = None
    epsilon: Fraction | None = None
    seed: int = 0
    deadline_s: float | None = None
    size_bytes: int | None = None


SERVES: dict[str, frozenset[str]] = {
    "max_trees": frozenset({"auto", "trees", "mwu"}),
    "tolerance": frozenset({"auto", "trees", "mwu"}),
    "epsilon": frozenset({"mwu"}),
    "size_bytes": frozenset({"auto"}),
}
"""Which methods each knob of a `Request` means something to; the others refuse it."""


def bound(
    topology: Topology,
    collective: Collective | Kind | str,
    *,
    root: int = 0,
    ranks: Sequence[int] | None = None,
) -> Bound:
    """The proven limit of a collective's rate on a topology, with its certificate.

    Args:
        topology: the fabric.
        collective: a kind by name, or a whole `Collective` (then `root` and `ranks` are not used).
        root: for kinds that have one.
        ranks: those that take part; the others may forward, copy and reduce on the way. None for all.

    Raises:
        CollectiveError: the collective does not fit the topology.
    """
    from synth import bounds

    return bounds.bound(topology, as_collective(topology, collective, root=root, ranks=ranks))


def solve(
    topology: Topology,
    collective: Collective | Kind | str,
    *,
    method: str = "auto",
    root: int = 0,
    ranks: Sequence[int] | None = None,
    max_trees: int | None = None,
    tolerance: Fraction | None = None,
    epsilon: Fraction | None = None,
    seed: int = 0,
    deadline_s: float | None = None,
    size_bytes: int | None = None,
) -> Schedule:
    """A schedule of a collective on a topology.

    Args:
        topology: the fabric.
        collective: a kind by name, or a whole `Collective` (then `root` and `ranks` are not used).
        method: "auto" or one of `METHODS`.
        root: for kinds that have one.
        ranks: those that take part; the others may forward, copy and reduce on the way. None for all.
        max_trees: see `Request`, like all that follow.
        tolerance: with few trees, the part of the optimum that may be given up.
        epsilon: the part of the optimum that the multiplicative weights may miss.
        seed: breaks ties.
        deadline_s: limit in seconds.
        size_bytes: with "auto", the size for which the schedule should be fastest.

    Raises:
        InputError: an unknown method, a knob that it does not have, or a collective that does not fit.
        InfeasibleError: there is no such schedule; carries the proof.
        TimedOutError: the deadline passed; carries the best schedule so far.
    """
    asked = as_collective(topology, collective, root=root, ranks=ranks)
    request = Request(max_trees, tolerance, epsilon, seed, deadline_s, size_bytes)
    if deadline_s is not None and deadline_s <= 0:
        raise InputError(f"deadline must be positive, got {deadline_s} s")
    if method != "auto" and method not in METHODS:
        raise InputError(f"method {method}: must be one of auto, {', '.join(METHODS)}")
    _check_knobs(method, asked, request)
    return (_automatic if method == "auto" else METHODS[method])(topology, asked, request)


def as_collective(
    topology: Topology,
    collective: Collective | Kind | str,
    *,
    root: int = 0,
    ranks: Sequence[int] | None = None,
) -> Collective:
    """The collective that a caller means, checked against the topology."""
    if isinstance(collective, Collective):
        collective.check(topology)
        return collective
    return Collective.on(topology, collective, root=root, ranks=ranks)


def _check_knobs(method: str, collective: Collective, request: Request) -> None:
    """Refuse what would be ignored: a knob of other methods, or one of trees where there are none."""
    for knob, methods in SERVES.items():
        if getattr(request, knob) is None:
            continue
        if method not in methods:
            served = " and ".join(sorted(methods))
            raise InputError(f"method {method}: takes no {knob}, which serves {served}")
        if knob in {"max_trees", "tolerance"} and collective.kind not in TREE_KINDS:
            raise InputError(f"{collective.kind}: takes no {knob}, it is not done along trees")


def _automatic(topology: Topology, collective: Collective, request: Request) -> Schedule:
    """The best rate, or with a size the least simulated time among all methods that apply."""
    if request.size_bytes is not None:
        from synth.selection import fastest

        return fastest(topology, collective, request)
    return METHODS["trees" if collective.kind in TREE_KINDS else "routes"](topology, collective, request)


def _by_trees(name: TreeMethod) -> Method:
    def solve_it(topology: Topology, collective: Collective, request: Request) -> Schedule:
        from synth.packing.mwu import DEFAULT_EPSILON
        from synth.packing.solver import solve_by_trees

        return solve_by_trees(
            topology,
            collective,
            method=name,
            max_trees=request.max_trees,
            tolerance=request.tolerance,
            seed=request.seed,
            deadline_s=request.deadline_s,
            epsilon=DEFAULT_EPSILON if request.epsilon is None else request.epsilon,
        )

    return solve_it


def _by_routes(topology: Topology, collective: Collective, request: Request) -> Schedule:
    from synth.routes import solve_by_routes

    return solve_by_routes(topology, collective, seed=request.seed, deadline_s=request.deadline_s)


def _by_baseline(name: str) -> Method:
    def solve_it(topology: Topology, collective: Collective, request: Request) -> Schedule:
        from synth.baselines import solve_baseline

        return solve_baseline(topology, collective, name, seed=request.seed, deadline_s=request.deadline_s)

    return solve_it


Method = Callable[[Topology, Collective, Request], Schedule]

METHODS: dict[str, Method] = {
    "trees": _by_trees("trees"),
    "mwu": _by_trees("mwu"),
    "routes": _by_routes,
    **{name: _by_baseline(name) for name in ("ring", "multiring", "binary-tree", "halving-doubling")},
}
"""Every method by the name that the command line uses."""
