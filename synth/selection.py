"""Which schedule serves which message size: build those that apply, simulate each, take the fastest.

Large messages want the highest rate, small ones the fewest hops; the simulator's cost model (latency and
bandwidth of every link) decides between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from synth.collective import TREE_KINDS, Collective
from synth.deadline import Deadline
from synth.errors import CollectiveError, InfeasibleError, TimedOutError
from synth.schedule import Schedule
from synth.topology import Topology

if TYPE_CHECKING:
    from synth.methods import Request

FEW_TREES = (1, 2)
"""Tree counts that are tried besides the full packing: few trees are shallow and start fast."""


def fastest(topology: Topology, collective: Collective, request: Request) -> Schedule:
    """The schedule with the least simulated time at `request.size_bytes`, which must be given.

    Args:
        topology: the fabric.
        collective: what to do on it.
        request: `size_bytes` is the message size; the other knobs are handed to every method.

    Raises:
        InfeasibleError: no method has a schedule (the first method's own error, with its proof).
        TimedOutError: the deadline, one for all methods together, passed; carries the fastest until then.
    """
    from synth.simulator import simulate

    assert request.size_bytes is not None, "a caller of ours asked for the fastest without a size"
    size_bytes = request.size_bytes
    found: list[Schedule] = []
    late: TimedOutError | None = None
    try:
        for schedule in candidates(topology, collective, replace(request, size_bytes=None)):
            found.append(schedule)
    except TimedOutError as error:
        late = error
        found += [] if error.best is None else [error.best]
        if not found:
            raise
    best = min(found, key=lambda schedule: simulate(schedule, size_bytes).time_us)
    if late is not None:
        raise TimedOutError(str(late), best) from late
    return best


def candidates(topology: Topology, collective: Collective, request: Request) -> Iterator[Schedule]:
    """Every schedule worth comparing, the one of the highest rate first.

    Raises:
        InfeasibleError: the first one, which reaches the bound wherever anything can, does not exist.
        TimedOutError: the deadline, one for all of them, passed.
    """
    from synth.methods import METHODS

    deadline = Deadline.after(request.deadline_s)
    first = "trees" if collective.kind in TREE_KINDS else "routes"
    yield METHODS[first](topology, collective, request)
    wanted = [(name, request) for name in METHODS if name not in {"trees", "mwu", "routes"}]
    if first == "trees" and request.max_trees is None:
        wanted += [("trees", replace(request, max_trees=count)) for count in FEW_TREES]
    for name, its_request in wanted:
        try:
            deadline.check("the comparison of methods")
            yield METHODS[name](topology, collective, replace(its_request, deadline_s=deadline.left_s))
        except (InfeasibleError, CollectiveError):
            continue  # this pattern does not fit this graph or this collective; the others still may
