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
from synth.errors import InputError, TimedOutError
from synth.schedule import Schedule
from synth.topology import Topology

if TYPE_CHECKING:
    from synth.chunks.frontier import Frontier
    from synth.packing.solver import TreeMethod
    from synth.selection import Selection


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
        chunks: C of a chunk schedule (see `synth.chunks.solver.Size`, like the next two).
        steps: S of a chunk schedule.
        rounds: R of a chunk schedule.
        cache: whether answers of solvers are kept and used on disk.
        max_height: with trees, the most edges between a root and a rank; None for any number.
    """

    max_trees: int | None = None
    tolerance: Fraction | None = None
    epsilon: Fraction | None = None
    seed: int = 0
    deadline_s: float | None = None
    size_bytes: int | None = None
    chunks: int | None = None
    steps: int | None = None
    rounds: int | None = None
    cache: bool = True
    max_height: int | None = None


NEED_SIZE = ("smt", "ilp", "sat")
"""The methods that search for a schedule of given chunks, steps and rounds."""

SERVES: dict[str, frozenset[str]] = {
    "max_trees": frozenset({"auto", "trees", "mwu"}),
    "tolerance": frozenset({"auto", "trees", "mwu"}),
    "epsilon": frozenset({"mwu"}),
    "max_height": frozenset({"trees"}),
    "size_bytes": frozenset({"auto"}),
    "chunks": frozenset(NEED_SIZE),
    "steps": frozenset(NEED_SIZE),
    "rounds": frozenset(NEED_SIZE),
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
    chunks: int | None = None,
    steps: int | None = None,
    rounds: int | None = None,
    cache: bool = True,
    max_height: int | None = None,
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
        chunks: C, for "smt", "ilp" and "sat", which need all three.
        steps: S.
        rounds: R.
        cache: whether answers of solvers are kept and used on disk.
        max_height: with "trees", the most edges between a root and a rank.

    Raises:
        InputError: an unknown method, a knob that it does not have, or a collective that does not fit.
        InfeasibleError: there is no such schedule; carries the proof.
        TimedOutError: the deadline passed; carries the best schedule so far.
    """
    asked = as_collective(topology, collective, root=root, ranks=ranks)
    request = Request(
        max_trees, tolerance, epsilon, seed, deadline_s, size_bytes, chunks, steps, rounds, cache, max_height
    )
    return answer(topology, asked, method, request)


def answer(topology: Topology, collective: Collective, method: str, request: Request) -> Schedule:
    """What `solve` does, with its knobs in one value; raises the same."""
    if method != "auto" and method not in METHODS:
        raise InputError(f"method {method}: must be one of auto, {', '.join(METHODS)}")
    _check_knobs(method, collective, request)
    return (_automatic if method == "auto" else METHODS[method])(topology, collective, request)


def select(topology: Topology, collective: Collective, request: Request) -> Selection[Schedule]:
    """Every schedule worth comparing over message sizes: which is fastest where, by simulation.

    Raises:
        InputError: a knob that the method "auto" does not have.
        InfeasibleError: no method has a schedule.
        TimedOutError: the deadline passed before there was any schedule.
    """
    from synth import selection

    _check_knobs("auto", collective, request)
    return selection.select(topology, collective, request)


def pareto(
    topology: Topology,
    collective: Collective | Kind | str,
    *,
    root: int = 0,
    ranks: Sequence[int] | None = None,
    max_steps: int | None = None,
    tolerance: Fraction | None = None,
    deadline_s: float | None = None,
    seed: int = 0,
    jobs: int = 1,
    cache: bool = True,
) -> Frontier:
    """The frontier of chunk schedules between steps (latency) and rounds per chunk (bandwidth).

    Args:
        topology: the fabric.
        collective: a kind by name, or a whole `Collective` (then `root` and `ranks` are not used).
        root: for kinds that have one.
        ranks: those that take part; None for all.
        max_steps: see `synth.chunks.frontier.pareto`, like all that follow.
        tolerance: how near to the static limit is near enough.
        deadline_s: limit in seconds; what was found by then is returned.
        seed: of the solvers.
        jobs: numbers of steps worked on at once.
        cache: whether answers of solvers are kept and used on disk.

    Raises:
        InputError: a collective that does not fit, or a number out of its range.
        InfeasibleError: some rank cannot be reached, or not in `max_steps`; carries the proof.
    """
    from synth.chunks import frontier

    return frontier.pareto(
        topology,
        as_collective(topology, collective, root=root, ranks=ranks),
        max_steps=max_steps,
        tolerance=tolerance,
        deadline_s=deadline_s,
        seed=seed,
        jobs=jobs,
        cache=cache,
    )


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
    if request.deadline_s is not None and request.deadline_s <= 0:
        raise InputError(f"deadline must be positive, got {request.deadline_s} s")
    for knob, methods in SERVES.items():
        if getattr(request, knob) is None:
            continue
        if method not in methods:
            served = ", ".join(sorted(methods))
            raise InputError(f"method {method}: takes no {knob}, which is for {served}")
        if knob in {"max_trees", "tolerance"} and collective.kind not in TREE_KINDS:
            raise InputError(f"{collective.kind}: takes no {knob}, it is not done along trees")
    if method in NEED_SIZE:
        missing = [knob for knob in ("chunks", "steps", "rounds") if getattr(request, knob) is None]
        if missing:
            raise InputError(
                f"method {method}: needs {', '.join(missing)}; `synth pareto` finds the best ones"
            )


def _automatic(topology: Topology, collective: Collective, request: Request) -> Schedule:
    """The best rate, or with a size the least simulated time among all methods that apply."""
    if request.size_bytes is not None:
        from synth.selection import fastest

        return fastest(topology, collective, request)
    if collective.kind is Kind.CUSTOM:
        return _best_of_frontier(topology, collective, request)
    return METHODS["trees" if collective.kind in TREE_KINDS else "routes"](topology, collective, request)


def _best_of_frontier(topology: Topology, collective: Collective, request: Request) -> Schedule:
    """The highest rate of any chunk schedule that was found."""
    from synth.chunks.frontier import pareto as find

    frontier = find(
        topology, collective, deadline_s=request.deadline_s, seed=request.seed, cache=request.cache
    )
    best = frontier.points[-1].schedule if frontier.points else None
    if frontier.timed_out:
        raise TimedOutError(f"{collective.kind}: {frontier.why_stopped}", best)
    if best is None:
        raise TimedOutError(
            f"{collective.kind}: no schedule was found with the effort of a frontier; ask a solver for one "
            "of given chunks, steps and rounds"
        )
    return best


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
            max_height=request.max_height,
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


def _by_chunks(name: str) -> Method:
    def solve_it(topology: Topology, collective: Collective, request: Request) -> Schedule:
        from synth.chunks.solver import Size, solve_by_chunks

        assert request.chunks is not None and request.steps is not None and request.rounds is not None, (
            "checked with the other knobs"
        )
        return solve_by_chunks(
            topology,
            collective,
            name,
            Size(request.chunks, request.steps, request.rounds),
            seed=request.seed,
            deadline_s=request.deadline_s,
            cache=request.cache,
        )

    return solve_it


Method = Callable[[Topology, Collective, Request], Schedule]

METHODS: dict[str, Method] = {
    "trees": _by_trees("trees"),
    "mwu": _by_trees("mwu"),
    "routes": _by_routes,
    **{name: _by_chunks(name) for name in NEED_SIZE},
    **{name: _by_baseline(name) for name in ("ring", "multiring", "binary-tree", "halving-doubling")},
}
"""Every method by the name that the command line uses."""
