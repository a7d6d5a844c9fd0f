"""Provably optimal collective-communication algorithms for any topology, run in stock PyTorch.

    import arborcast

    fabric = arborcast.load("dgx1")
    schedule = arborcast.solve(fabric, "allreduce")
    arborcast.verify(schedule)

More stands in `arborcast.synth`, `.topologies`, `.backends` (torch) and `.pipeline` (the trainer).
The folders of those names lie beside this one and are linked into it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from arborcast.lazy import loader

if TYPE_CHECKING:
    from arborcast.synth.api import bound as bound
    from arborcast.synth.api import solve as solve
    from arborcast.synth.certificate import Bound as Bound
    from arborcast.synth.chunks.frontier import pareto as pareto
    from arborcast.synth.collective import Collective as Collective
    from arborcast.synth.errors import InfeasibleError as InfeasibleError
    from arborcast.synth.errors import InputError as InputError
    from arborcast.synth.errors import TimedOutError as TimedOutError
    from arborcast.synth.faults.repair import repair as repair
    from arborcast.synth.formats.any_schedule import read_schedule as read_schedule
    from arborcast.synth.formats.any_schedule import write_schedule as write_schedule
    from arborcast.synth.implicit_schedule import ImplicitSchedule as ImplicitSchedule
    from arborcast.synth.schedule import Schedule as Schedule
    from arborcast.synth.simulation.simulator import simulate as simulate
    from arborcast.synth.sweeps.sweep import sweep as sweep
    from arborcast.synth.topology import Link as Link
    from arborcast.synth.topology import Topology as Topology
    from arborcast.synth.verification.verifier import verify as verify
    from arborcast.synth.viewer.notebook import view as view
    from arborcast.topologies import load as load

_HOMES = {
    "Bound": "arborcast.synth.certificate",
    "Collective": "arborcast.synth.collective",
    "ImplicitSchedule": "arborcast.synth.implicit_schedule",
    "InfeasibleError": "arborcast.synth.errors",
    "InputError": "arborcast.synth.errors",
    "Link": "arborcast.synth.topology",
    "Schedule": "arborcast.synth.schedule",
    "TimedOutError": "arborcast.synth.errors",
    "Topology": "arborcast.synth.topology",
    "bound": "arborcast.synth.api",
    "load": "arborcast.topologies",
    "pareto": "arborcast.synth.chunks.frontier",
    "read_schedule": "arborcast.synth.formats.any_schedule",
    "repair": "arborcast.synth.faults.repair",
    "simulate": "arborcast.synth.simulation.simulator",
    "solve": "arborcast.synth.api",
    "sweep": "arborcast.synth.sweeps.sweep",
    "verify": "arborcast.synth.verification.verifier",
    "view": "arborcast.synth.viewer.notebook",
    "write_schedule": "arborcast.synth.formats.any_schedule",
}

__all__ = list(_HOMES)

__getattr__ = loader(__name__, _HOMES)


def load_ipython_extension(ipython: Any) -> None:
    """Teach IPython how our values look (`%load_ext arborcast`)."""
    from arborcast.synth.viewer.notebook import register

    register(ipython)


if "IPython" in sys.modules:
    _shell = sys.modules["IPython"].get_ipython()
    if _shell is not None:
        load_ipython_extension(_shell)
