"""The methods by name, and what each may be told.

This is the one place that knows all of them. Each lives in its own module and is imported only when it is
asked for, so that the start of the command stays fast. `synth.api` decides which one answers a question.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from arborcast.synth.chunks.encodings.registry import ENCODINGS
from arborcast.synth.collective import TREE_KINDS, Collective, Kind
from arborcast.synth.errors import InputError, TimedOutError
from arborcast.synth.request import Request
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Topology

if TYPE_CHECKING:
    from arborcast.synth.packing.solver import TreeMethod


NEED_SIZE = tuple(ENCODINGS)
"""The methods that search for a schedule of given chunks, steps and rounds."""

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
"""Which methods each knob of a `Request` means something to; the others refuse it."""

_IN_WORDS = {
    "max_trees": "maximum number of trees",
    "max_height": "maximum height",
    "size_bytes": "size",
    "rate_tolerance": "rate tolerance",
}
"""Knobs as messages name them, which are read by those who call and by those who type options."""


def solve_by_method(topology: Topology, collective: Collective, method: str, request: Request) -> Schedule:
    """The schedule of one method, written out; by "auto" the one of the best rate, whatever the size.

    `synth.api` decides which method a question is for; here nothing is decided.

    Raises:
        InputError: a collective that the method does not do.
        InfeasibleError: there is no such schedule; carries the proof.
        TimedOutError: the deadline passed; carries the best schedule so far.
    """
    if method == "auto" and collective.kind is Kind.CUSTOM:
        return _best_of_frontier(topology, collective, request)
    name = natural_method(collective) if method == "auto" else method
    return METHODS[name](topology, collective, request)


def natural_method(collective: Collective) -> str:
    """The method that reaches the best rate of a collective: trees where data is copied or combined."""
    return "trees" if collective.kind in TREE_KINDS else "routes"


def check_knobs(method: str, collective: Collective, request: Request) -> None:
    """Refuse what would be ignored: a knob of other methods, or one of trees where there are none.

    Raises:
        InputError: that, an unknown method, or a deadline that is not positive.
    """
    if method != "auto" and method not in METHODS:
        raise InputError(f"method {method}: must be one of auto, {', '.join(METHODS)}")
    if request.deadline_s is not None and request.deadline_s <= 0:
        raise InputError(f"deadline must be positive, got {request.deadline_s} s")
    for knob, methods in SERVES.items():
        if getattr(request, knob) is None:
            continue
        what = _IN_WORDS.get(knob, knob)
        if method not in methods:
            served = ", ".join(sorted(methods))
            raise InputError(f"method {method}: takes no {what}, which is for {served}")
        if knob in {"max_trees", "tolerance", "max_height"} and collective.kind not in TREE_KINDS:
            raise InputError(f"{collective.kind}: takes no {what}, it is not done along trees")
    if method in NEED_SIZE:
        missing = [knob for knob in ("chunks", "steps", "rounds") if getattr(request, knob) is None]
        if missing:
            raise InputError(
                f"method {method}: needs {', '.join(missing)}; `synth pareto` finds the best ones"
            )


def _best_of_frontier(topology: Topology, collective: Collective, request: Request) -> Schedule:
    """The highest rate of any chunk schedule that was found."""
    from arborcast.synth.chunks.frontier import pareto as find

    frontier = find(
        topology,
        collective,
        rate_tolerance=request.rate_tolerance,
        deadline_s=request.deadline_s,
        seed=request.seed,
        cache=request.cache,
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
        from arborcast.synth.packing.solver import solve_by_trees

        return solve_by_trees(topology, collective, request, method=name)

    return solve_it


def _by_routes(topology: Topology, collective: Collective, request: Request) -> Schedule:
    from arborcast.synth.routes.solver import solve_by_routes

    return solve_by_routes(topology, collective, request)


def _by_baseline(name: str) -> Method:
    def solve_it(topology: Topology, collective: Collective, request: Request) -> Schedule:
        from arborcast.synth.baselines import solve_baseline

        return solve_baseline(topology, collective, name, seed=request.seed, deadline_s=request.deadline_s)

    return solve_it


def _by_chunks(name: str) -> Method:
    def solve_it(topology: Topology, collective: Collective, request: Request) -> Schedule:
        from arborcast.synth.chunks.fixed_size import Size, solve_by_chunks

        assert request.chunks is not None and request.steps is not None and request.rounds is not None, (
            "checked with the other knobs"
        )
        return solve_by_chunks(
            topology,
            collective,
            name,
            Size(request.chunks, request.steps, request.rounds),
            rate_tolerance=request.rate_tolerance,
            seed=request.seed,
            deadline_s=request.deadline_s,
            cache=request.cache,
            proof=request.proof,
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
