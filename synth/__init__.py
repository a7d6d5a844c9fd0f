"""Synthesis of collective-communication algorithms: bounds, schedules, verification, simulation.

    fabric = topologies.load("dgx1").subset([0, 1, 2, 3, 4, 5])
    schedule = synth.solve(fabric, "allreduce")
    synth.verify(schedule)

What is named here is public. `synth.groups` answers for several collectives at once.
A question passes `api` (which form and method answers it), then the folder of the method: `packing` (trees),
`routes`, `chunks`, `baselines`; all of them rest on `bounds`, `lp`, `symmetry` and `kernels`. `in_network`
has the trees that join and fork at able switches; all but `packing` answer as if switches only forwarded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arborcast.lazy import loader

if TYPE_CHECKING:
    from arborcast.synth.alltoallv.block_planner import AlltoallvPlanner as AlltoallvPlanner
    from arborcast.synth.api import bound as bound
    from arborcast.synth.api import solve as solve
    from arborcast.synth.certificate import Bound as Bound
    from arborcast.synth.chunks.frontier import Frontier as Frontier
    from arborcast.synth.chunks.frontier import pareto as pareto
    from arborcast.synth.collective import Collective as Collective
    from arborcast.synth.collective import Demand as Demand
    from arborcast.synth.collective import Kind as Kind
    from arborcast.synth.errors import InfeasibleError as InfeasibleError
    from arborcast.synth.errors import InputError as InputError
    from arborcast.synth.errors import TimedOutError as TimedOutError
    from arborcast.synth.faults.faulty import Faulty as Faulty
    from arborcast.synth.faults.faulty import without as without
    from arborcast.synth.faults.repair import repair as repair
    from arborcast.synth.formats import read_collective as read_collective
    from arborcast.synth.formats.any_schedule import read_schedule as read_schedule
    from arborcast.synth.formats.any_schedule import write_schedule as write_schedule
    from arborcast.synth.implicit_schedule import ImplicitSchedule as ImplicitSchedule
    from arborcast.synth.schedule import Schedule as Schedule
    from arborcast.synth.simulation.simulator import simulate as simulate
    from arborcast.synth.simulation.timing import Timing as Timing
    from arborcast.synth.sweeps.sweep import sweep as sweep
    from arborcast.synth.topology import Link as Link
    from arborcast.synth.topology import Topology as Topology
    from arborcast.synth.verification.verdict import Verdict as Verdict
    from arborcast.synth.verification.verifier import verify as verify
    from arborcast.synth.viewer.notebook import view as view

_HOMES = {
    "AlltoallvPlanner": "arborcast.synth.alltoallv.block_planner",
    "Bound": "arborcast.synth.certificate",
    "Collective": "arborcast.synth.collective",
    "Demand": "arborcast.synth.collective",
    "Faulty": "arborcast.synth.faults.faulty",
    "Frontier": "arborcast.synth.chunks.frontier",
    "ImplicitSchedule": "arborcast.synth.implicit_schedule",
    "InfeasibleError": "arborcast.synth.errors",
    "InputError": "arborcast.synth.errors",
    "Kind": "arborcast.synth.collective",
    "Link": "arborcast.synth.topology",
    "Schedule": "arborcast.synth.schedule",
    "TimedOutError": "arborcast.synth.errors",
    "Timing": "arborcast.synth.simulation.timing",
    "Topology": "arborcast.synth.topology",
    "Verdict": "arborcast.synth.verification.verdict",
    "bound": "arborcast.synth.api",
    "pareto": "arborcast.synth.chunks.frontier",
    "read_schedule": "arborcast.synth.formats.any_schedule",
    "read_collective": "arborcast.synth.formats",
    "repair": "arborcast.synth.faults.repair",
    "simulate": "arborcast.synth.simulation.simulator",
    "solve": "arborcast.synth.api",
    "sweep": "arborcast.synth.sweeps.sweep",
    "verify": "arborcast.synth.verification.verifier",
    "view": "arborcast.synth.viewer.notebook",
    "without": "arborcast.synth.faults.faulty",
    "write_schedule": "arborcast.synth.formats.any_schedule",
}

__all__ = list(_HOMES)

__getattr__ = loader(__name__, _HOMES)
