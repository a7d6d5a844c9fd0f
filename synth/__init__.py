"""Synthesis of collective-communication algorithms: bounds, schedules, verification, simulation.

    fabric = topologies.load("dgx1").subset([0, 1, 2, 3, 4, 5])
    schedule = synth.solve(fabric, "allreduce")
    synth.verify(schedule)

Names are loaded on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from synth.api import bound as bound
    from synth.api import pareto as pareto
    from synth.api import solve as solve
    from synth.certificate import Bound as Bound
    from synth.chunks.frontier import Frontier as Frontier
    from synth.collective import Collective as Collective
    from synth.collective import Demand as Demand
    from synth.collective import Kind as Kind
    from synth.errors import InfeasibleError as InfeasibleError
    from synth.errors import InputError as InputError
    from synth.errors import TimedOutError as TimedOutError
    from synth.faults import Faulty as Faulty
    from synth.faults import without as without
    from synth.formats import read_collective as read_collective
    from synth.formats import read_schedule as read_schedule
    from synth.formats import write_schedule as write_schedule
    from synth.formats.any_schedule import read_any_schedule as read_any_schedule
    from synth.formats.any_schedule import write_any_schedule as write_any_schedule
    from synth.implicit.schedule import ImplicitSchedule as ImplicitSchedule
    from synth.schedule import Schedule as Schedule
    from synth.simulator import Timing as Timing
    from synth.simulator import simulate as simulate
    from synth.topology import Link as Link
    from synth.topology import Topology as Topology
    from synth.verifier import Verdict as Verdict
    from synth.verifier import verify as verify

_HOME = {
    "Bound": "certificate",
    "Collective": "collective",
    "Demand": "collective",
    "Faulty": "faults",
    "Frontier": "chunks.frontier",
    "ImplicitSchedule": "implicit.schedule",
    "InfeasibleError": "errors",
    "InputError": "errors",
    "Kind": "collective",
    "Link": "topology",
    "Schedule": "schedule",
    "TimedOutError": "errors",
    "Timing": "simulator",
    "Topology": "topology",
    "Verdict": "verifier",
    "bound": "api",
    "pareto": "api",
    "read_any_schedule": "formats.any_schedule",
    "read_collective": "formats",
    "read_schedule": "formats",
    "simulate": "simulator",
    "solve": "api",
    "verify": "verifier",
    "without": "faults",
    "write_any_schedule": "formats.any_schedule",
    "write_schedule": "formats",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'synth' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"synth.{_HOME[name]}"), name)
    globals()[name] = value
    return value
