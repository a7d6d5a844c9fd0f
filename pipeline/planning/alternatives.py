"""What else could be done with the same costs, links and memory: the plans that ours are compared with."""

from __future__ import annotations

from pipeline.costs import Profile
from pipeline.errors import BatchError, PlanError
from pipeline.network import Network
from pipeline.planning.data_parallel import data_parallel
from pipeline.planning.hetpipe import hetpipe
from pipeline.planning.memory import Limit
from pipeline.planning.pipedream import pipedream
from pipeline.planning.straight_gpipe import straight_gpipe
from pipeline.stages import Plan

METHODS = {
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
    microbatches: int,
    memory_bytes: Limit | None = None,
) -> dict[str, Plan | PlanError]:
    """The plan of each alternative, or why it has none.

    Args:
        profile: of the model.
        network: whose ranks are all to be used.
        batch: samples of a step.
        microbatches: that the pipelines divide it into; data parallelism takes it whole if it can.
        memory_bytes: of every rank, or by rank; None for no limit.
    """
    found: dict[str, Plan | PlanError] = {}
    for name, method in METHODS.items():
        try:
            found[name] = method(
                profile, network, batch=batch, microbatches=microbatches, memory_bytes=memory_bytes
            )
        except PlanError as error:
            found[name] = error
        except BatchError as error:
            found[name] = PlanError(str(error))
    return found
