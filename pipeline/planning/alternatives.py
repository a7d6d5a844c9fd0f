"""What else could be done with the same costs, links and memory: the plans that ours are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from arborcast.pipeline.costs.links import Network
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.planning.data_parallel import data_parallel
from arborcast.pipeline.planning.hetpipe import hetpipe
from arborcast.pipeline.planning.memory import Limit
from arborcast.pipeline.planning.pipedream import pipedream
from arborcast.pipeline.planning.straight_gpipe import straight_gpipe
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.simulation.simulator import simulate
from arborcast.pipeline.stages import Plan

Method: TypeAlias = Callable[..., Plan]

METHODS: Mapping[str, Method] = {
    "data-parallel": data_parallel,
    "gpipe": straight_gpipe,
    "pipedream": pipedream,
    "hetpipe": hetpipe,
}
"""The alternatives by name, each `(profile, network, *, batch, microbatches, memory_bytes) -> Plan`."""


def alternatives(
    profile: Profile,
    network: Network,
    *,
    batch: int,
    microbatches: int | Sequence[int],
    memory_bytes: Limit | None = None,
) -> dict[str, Plan | PlanError]:
    """The plan of each alternative, or why it has none.

    Args:
        profile: of the model.
        network: whose ranks are all to be used.
        batch: samples of a step.
        microbatches: that the pipelines divide it into, data parallelism only if memory asks for it; of
            several numbers, each alternative takes the one by which it is predicted to be fastest.
        memory_bytes: of every rank, or by rank; None for no limit.
    """
    scheduled = replace(network, by_schedule=True)
    counts = [microbatches] if isinstance(microbatches, int) else list(microbatches)

    def best(method: Method) -> Plan | PlanError:
        tried = [_tried(method, profile, network, batch, count, memory_bytes) for count in counts]
        plans = [plan for plan in tried if isinstance(plan, Plan)]
        if not plans:
            return tried[-1]
        return min(plans, key=lambda plan: simulate(plan, profile, scheduled, batch=batch).time_us)

    return {name: best(method) for name, method in METHODS.items()}


def _tried(
    method: Method,
    profile: Profile,
    network: Network,
    batch: int,
    microbatches: int,
    memory_bytes: Limit | None,
) -> Plan | PlanError:
    try:
        return method(profile, network, batch=batch, microbatches=microbatches, memory_bytes=memory_bytes)
    except PlanError as error:
        return error
    except BatchError as error:
        return PlanError(str(error))
