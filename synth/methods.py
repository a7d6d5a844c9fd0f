"""The methods by name: what each may be told, and the function that makes its schedule.

This is the one place that knows all of them. Each lives in its own module and is imported only when it is
asked for, so that the start of the command stays fast. `synth.api` decides which one answers a question.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, get_args

from arborcast.synth.baselines import BASELINES
from arborcast.synth.chunks.encodings.registry import EncodingName
from arborcast.synth.collective import TREE_KINDS, Collective, Kind
from arborcast.synth.deadline import Deadline, check_seconds
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError
from arborcast.synth.features import check_features
from arborcast.synth.ports import Ports
from arborcast.synth.schedule import Schedule
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Topology

if TYPE_CHECKING:
    from arborcast.synth.implicit_schedule import ImplicitSchedule
    from arborcast.synth.symmetry.translations import Translations

NEED_SIZE: tuple[str, ...] = get_args(EncodingName)
"""The methods that search for a schedule of given chunks, steps and rounds."""

METHODS: tuple[str, ...] = ("trees", "mwu", "routes", *NEED_SIZE, *BASELINES)

if TYPE_CHECKING:
    MethodName: TypeAlias = str
else:
    MethodName = Literal[("auto", *METHODS)]
    """Every method by the name that the command line uses; `auto` leaves the choice to `synth.api`."""

IMPLICIT_KINDS = (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE, Kind.ALLTOALL)
"""The kinds that name no rank, so that a translation of the fabric is one of the collective."""

MOST_ORBITS = 64
"""Orbits of ranks up to which solving by orbits is worth it: each has trees of its own."""

SERVES: dict[str, frozenset[str]] = {
    "max_trees": frozenset({"auto", "trees", "mwu"}),
    "tolerance": frozenset({"auto", "trees", "mwu"}),
    "epsilon": frozenset({"mwu"}),
    "max_height": frozenset({"auto", "trees"}),
    "size_bytes": frozenset({"auto"}),
    "chunks": frozenset(NEED_SIZE),
    "steps": frozenset(NEED_SIZE),
    "rounds": frozenset(NEED_SIZE),
    "rate_tolerance": frozenset({"auto", *NEED_SIZE}),
    "proof": frozenset({"sat"}),
}
"""Which methods each knob of a `SolveOptions` means something to; the others refuse it."""

_IN_WORDS = {
    "max_trees": "maximum number of trees",
    "max_height": "maximum height",
    "size_bytes": "size",
    "rate_tolerance": "rate tolerance",
}
"""Knobs as messages name them, which are read by those who call and by those who type options."""


Method: TypeAlias = Callable[[Topology, Collective, SolveOptions], Schedule]
"""Makes a schedule that is written out. Raises InputError where it does not do the collective,
InfeasibleError where there is none, and TimedOutError, with the best one so far, after the deadline."""


class ImplicitMethod(Protocol):
    """The same in implicit form, by the translations of the fabric."""

    def __call__(
        self, topology: Topology, collective: Collective, options: SolveOptions, *, translations: Translations
    ) -> ImplicitSchedule: ...


def method_for(
    name: str, topology: Topology, collective: Collective, *, only_forward: bool = False
) -> Method:
    """The function of a method on a topology; by "auto" that of the best rate, whatever the size.

    Only trees join and fork at able switches, and not where switches shall `only_forward`; all others answer
    with switches that do. Where ranks have streams, all answer on the graph with ports (`synth.ports`).

    Raises:
        TopologyError: the topology has what the method does not understand (`synth.features`).
    """
    check_features(topology, f"method {name}")
    if topology.streams:
        return partial(_through_ports, name)
    found = _method_for(name, collective)
    by_trees = (natural_method(collective) if name == "auto" else name) == "trees"
    passes = only_forward or not by_trees
    return partial(_forwarding, found) if passes and topology.forwarding is not topology else found


def _through_ports(name: str, topology: Topology, collective: Collective, options: SolveOptions) -> Schedule:
    from arborcast.synth.in_network.switch_schedules import lifted

    ports = Ports.of(topology)
    solve = method_for(name, ports.fabric, collective)
    found = next(lifted((solve(ports.fabric, collective, options) for _ in range(1)), ports.lift))
    needed = sum(found.rounds or ())
    if options.rounds is not None and needed > options.rounds:
        size = f"({options.chunks}, {options.steps}, {options.rounds})"
        raise InfeasibleError(
            f"{collective.kind} {size}: what was found holds streams for {needed} rounds, as messages over "
            "slow links do; others are not excluded"
        )
    return found


def _forwarding(solve: Method, topology: Topology, collective: Collective, options: SolveOptions) -> Schedule:
    from arborcast.synth.bounds import bound
    from arborcast.synth.in_network.switch_schedules import forwarding_answer

    limit = bound(topology, collective, Deadline.after(options.deadline_s))
    return forwarding_answer(solve, topology, collective, options, limit)


def _method_for(name: str, collective: Collective) -> Method:
    if name == "auto" and collective.kind is Kind.CUSTOM:
        return _best_of_frontier
    match natural_method(collective) if name == "auto" else name:
        case "trees":
            from arborcast.synth.packing.tree_solver import solve_by_trees

            return solve_by_trees
        case "mwu":
            from arborcast.synth.packing.tree_solver import solve_by_weights

            return solve_by_weights
        case "routes":
            from arborcast.synth.routes.path_solver import solve_by_routes

            return solve_by_routes
        case _ if name in BASELINES:
            from arborcast.synth.baselines import solve_baseline

            return lambda topology, collective, options: solve_baseline(
                topology, collective, name, seed=options.seed, deadline_s=options.deadline_s
            )
        case _:
            return partial(_by_chunks, name)


def implicit_method_for(topology: Topology, collective: Collective) -> ImplicitMethod:
    """The function that makes the implicit form of a collective of `IMPLICIT_KINDS`."""
    check_features(topology, "solver of implicit form")
    found: ImplicitMethod
    if collective.kind is Kind.ALLTOALL:
        from arborcast.synth.routes.symmetric_alltoall import solve_symmetric_alltoall as found
    else:
        from arborcast.synth.packing.symmetric.symmetric_solver import solve_symmetric as found
    if topology.forwarding is topology:
        return found
    return partial(_implicitly_in_network, found)


def _implicitly_in_network(
    forwarding: ImplicitMethod,
    topology: Topology,
    collective: Collective,
    options: SolveOptions,
    *,
    translations: Translations,
) -> ImplicitSchedule:
    from arborcast.synth.bounds import bound
    from arborcast.synth.in_network.symmetric import solve_symmetric_in_network
    from arborcast.synth.routes.reachability import who_is_cut_off

    limit = bound(topology, collective)
    if limit.rate == 0:
        raise InfeasibleError(who_is_cut_off(topology, collective), limit)
    return solve_symmetric_in_network(
        topology, collective, options, limit, forwarding=forwarding, translations=translations
    )


def natural_method(collective: Collective) -> str:
    """The method that reaches the best rate of a collective: trees where data is copied or combined."""
    return "trees" if collective.kind in TREE_KINDS else "routes"


def check_knobs(method: str, collective: Collective, options: SolveOptions) -> None:
    """Refuse what would be ignored: a knob of other methods, or one of trees where there are none.

    Raises:
        InputError: that, an unknown method, or a deadline that is not positive.
    """
    if method != "auto" and method not in METHODS:
        raise InputError(f"method {method}: must be one of auto, {', '.join(METHODS)}")
    check_seconds(options.deadline_s)
    if options.min_piece_bytes < 1:
        raise InputError(f"min_piece_bytes {options.min_piece_bytes}: must be at least 1")
    for knob, methods in SERVES.items():
        if getattr(options, knob) is None:
            continue
        what = _IN_WORDS.get(knob, knob)
        if method not in methods:
            served = ", ".join(sorted(methods))
            raise InputError(f"method {method}: takes no {what}, which is for {served}")
        if knob in {"max_trees", "tolerance", "max_height"} and collective.kind not in TREE_KINDS:
            raise InputError(f"{collective.kind}: takes no {what}, it is not done along trees")
    if method in NEED_SIZE:
        missing = [knob for knob in ("chunks", "steps", "rounds") if getattr(options, knob) is None]
        if missing:
            raise InputError(
                f"method {method}: needs {', '.join(missing)}; `synth pareto` finds the best ones"
            )


def _best_of_frontier(topology: Topology, collective: Collective, options: SolveOptions) -> Schedule:
    """The highest rate of any chunk schedule that was found."""
    from arborcast.synth.chunks.frontier import pareto as find

    frontier = find(
        topology,
        collective,
        rate_tolerance=options.rate_tolerance,
        deadline_s=options.deadline_s,
        seed=options.seed,
        cache=options.cache,
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


def _by_chunks(method: str, topology: Topology, collective: Collective, options: SolveOptions) -> Schedule:
    from arborcast.synth.chunks.fixed_size import Size, solve_by_chunks

    assert options.chunks is not None and options.steps is not None and options.rounds is not None, (
        "checked with the other knobs"
    )
    return solve_by_chunks(
        topology,
        collective,
        method,
        Size(options.chunks, options.steps, options.rounds),
        rate_tolerance=options.rate_tolerance,
        seed=options.seed,
        deadline_s=options.deadline_s,
        cache=options.cache,
        proof=options.proof,
    )
