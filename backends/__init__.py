"""What runs schedules: the process group "synth" in torch, local processes, and programs for other runtimes.

    dist.init_process_group("synth", pg_options=backends.Options(topology="dgx1"))
    backends.Executor(schedule).allreduce(tensor)  # over any gloo group
    rows = backends.run_schedule(schedule)  # on local processes, every element checked

What is named here is public. A schedule passes `lowering` (one program per rank that cannot deadlock), then
`dataflow` over `transport` inside the process group (`group`, whose `schedules` are found once), or
`executors`. `programs` writes schedules for other runtimes and checks anybody's files for them. `measure`
runs schedules on local processes, `probe` finds out what fabric there is. Importing this, and whatever needs
no tensors, does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arborcast.lazy import loader

if TYPE_CHECKING:
    from arborcast.backends.errors import ExecutionError as ExecutionError
    from arborcast.backends.executors.torch_p2p import Executor as Executor
    from arborcast.backends.group.process_group import SynthGroup as SynthGroup
    from arborcast.backends.lowering.lower import lower as lower
    from arborcast.backends.lowering.program import Program as Program
    from arborcast.backends.measure.job import Row as Row
    from arborcast.backends.measure.job import RunError as RunError
    from arborcast.backends.measure.launch import run_schedule as run_schedule
    from arborcast.backends.options import Options as Options
    from arborcast.backends.programs.as_schedule import as_schedule as as_schedule
    from arborcast.backends.programs.checking.check import check_program as check_program
    from arborcast.backends.programs.exporting.export import export_program as export_program
    from arborcast.backends.programs.formats import read_program as read_program
    from arborcast.backends.programs.formats import write_program as write_program
    from arborcast.backends.programs.program import GlobalProgram as GlobalProgram

_HOMES = {
    "ExecutionError": "arborcast.backends.errors",
    "GlobalProgram": "arborcast.backends.programs.program",
    "Executor": "arborcast.backends.executors.torch_p2p",
    "Options": "arborcast.backends.options",
    "Program": "arborcast.backends.lowering.program",
    "Row": "arborcast.backends.measure.job",
    "RunError": "arborcast.backends.measure.job",
    "SynthGroup": "arborcast.backends.group.process_group",
    "as_schedule": "arborcast.backends.programs.as_schedule",
    "check_program": "arborcast.backends.programs.checking.check",
    "export_program": "arborcast.backends.programs.exporting.export",
    "lower": "arborcast.backends.lowering.lower",
    "read_program": "arborcast.backends.programs.formats",
    "write_program": "arborcast.backends.programs.formats",
    "run_schedule": "arborcast.backends.measure.launch",
}

__all__ = list(_HOMES)

__getattr__ = loader(__name__, _HOMES)
