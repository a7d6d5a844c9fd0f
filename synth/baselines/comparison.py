"""A schedule beside the baselines on the same topology, over message sizes, all in one simulator.

Baselines that do not exist on the graph (no ring through every rank, say) are named with their reason; the
NCCL models come from formulas, not from the simulator, and carry "model" in their name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arborcast.synth.baselines import BASELINES, solve_baseline
from arborcast.synth.baselines.nccl_model import KNOWN_PLANS, nccl_times
from arborcast.synth.bounds.time_limits import time_limit
from arborcast.synth.errors import CollectiveError, InfeasibleError
from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
from arborcast.synth.simulation.service import EARLIEST, Service
from arborcast.synth.simulation.simulator import sweep
from arborcast.synth.simulation.timing import Timing
from arborcast.synth.solve_options import MIN_PIECE_BYTES

LARGEST_SEARCHED = 128
"""Ranks up to which baselines are built beside a schedule in implicit form: a ring is searched for."""


@dataclass(frozen=True, slots=True)
class BaselineTimings:
    """What takes how long, over the sizes.

    Attributes:
        by_method: timings, the schedule's own first.
        unavailable: why others are missing.
        service: the order of service.
        least_us: for each size, what every schedule takes at least (`synth.bounds.time_limits`).
    """

    by_method: Mapping[str, Sequence[Timing]]
    unavailable: Mapping[str, str]
    service: Service = EARLIEST
    least_us: Mapping[int, float] = field(default_factory=dict)

    def to_document(self) -> dict[str, Any]:
        """Rows of method, size, pieces, times, rates and service, as `synth simulate --json` prints."""
        rows = [
            {
                "method": method,
                "bytes": timing.bytes,
                "pieces": timing.pieces,
                "time_us": timing.time_us,
                "least_us": self.least_us.get(timing.bytes),
                "algbw": timing.algbw,
                "busbw": timing.busbw,
                "service": timing.service,
            }
            for method, timings in self.by_method.items()
            for timing in timings
        ]
        return {"service": str(self.service), "rows": rows, "unavailable": dict(self.unavailable)}


def compare(
    schedule: AnySchedule,
    sizes: Sequence[int],
    *,
    service: str | Service = EARLIEST,
    frame_bytes: int | None = None,
    priced: bool = False,
    min_piece_bytes: int = MIN_PIECE_BYTES,
) -> BaselineTimings:
    """Simulate a correct schedule and every baseline of the same collective.

    Its method's name is its name in the comparison; for the other arguments see
    `synth.simulation.simulator.simulate`.

    Raises:
        InputError: as `simulate`.
    """
    order = Service.of(service)

    def timings(one: AnySchedule) -> Sequence[Timing]:
        return sweep(
            one,
            sizes,
            service=order,
            frame_bytes=frame_bytes,
            priced=priced,
            min_piece_bytes=min_piece_bytes,
        )

    by_method: dict[str, Sequence[Timing]] = {schedule.method.name: timings(schedule)}
    unavailable: dict[str, str] = {}
    ranks = schedule.topology.ranks
    too_large = isinstance(schedule, ImplicitSchedule) and ranks > LARGEST_SEARCHED
    for name in BASELINES:
        if name == schedule.method.name:
            continue
        if too_large:
            unavailable[name] = f"built among up to {LARGEST_SEARCHED} ranks, got {ranks}"
            continue
        try:
            baseline = solve_baseline(schedule.topology, schedule.collective, name, bound=schedule.bound)
        except (InfeasibleError, CollectiveError) as error:
            unavailable[name] = str(error).removeprefix(f"{name}: ")
        else:
            by_method[name] = timings(baseline)
    try:
        by_method |= _nccl_models(schedule, sizes, searched=not too_large)
    except (InfeasibleError, CollectiveError) as error:
        unavailable["nccl-model"] = str(error)
    limit = time_limit(schedule.topology, schedule.collective, schedule.bound)
    return BaselineTimings(by_method, unavailable, order, {size: float(limit.at(size)) for size in sizes})


def _nccl_models(
    schedule: AnySchedule, sizes: Sequence[int], *, searched: bool
) -> dict[str, Sequence[Timing]]:
    """What NCCL's formulas say, where they know the machine or its links between GPUs are all there is."""
    topology = schedule.topology
    if topology.name not in KNOWN_PLANS and not searched:
        rule = f"NCCL's rings are searched for among up to {LARGEST_SEARCHED} ranks"
        raise CollectiveError(f"{rule}, got {topology.ranks}")
    rows: dict[str, list[Timing]] = {}
    for row in nccl_times(topology, schedule.collective, sizes):
        timing = Timing(row.bytes, 0, row.time_us, row.algbw, row.busbw)  # a formula has no pieces
        rows.setdefault(row.method, []).append(timing)
    return dict(rows)
