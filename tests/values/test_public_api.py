"""What users may import: these names and no others; whatever lies deeper is ours to move."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import arborcast
from arborcast import backends, pipeline, synth, topologies
from arborcast.synth import groups

PUBLIC: dict[ModuleType, str] = {
    arborcast: """
        Bound Collective ImplicitSchedule InfeasibleError InputError Link Schedule TimedOutError Topology
        bound load pareto read_schedule repair simulate solve sweep verify view write_schedule""",
    synth: """
        AlltoallvPlanner Bound Collective Demand Faulty Frontier ImplicitSchedule InfeasibleError InputError
        Kind Link Schedule TimedOutError Timing Topology Verdict bound pareto read_collective read_schedule
        repair simulate solve sweep verify view without write_schedule""",
    groups: """
        GroupSchedule GroupSchedules JointCertificate JointVerdict Level along solve_groups verify_groups""",
    topologies: """
        Entry GPUS Machine Nic Parameter Rates catalog load load_machine""",
    backends: """
        ExecutionError Executor GlobalProgram Options Program Row RunError SynthGroup as_schedule
        check_program export_program lower read_program run_schedule write_program""",
    pipeline: """
        Action Comparison Divisible Layer LinkCosts Plan Prediction Profile Segment
        Stage Tie Timeline Trainer compare initialise measure_links on_meta plan predict profile
        read_plan read_profile read_sharded_plan shard_in_stages shard_model simulate trace write_plan
        write_profile write_sharded_plan""",
}


@pytest.mark.parametrize("package", PUBLIC, ids=lambda package: package.__name__)
def test_a_package_exports_what_users_need(package: ModuleType) -> None:
    assert sorted(package.__all__) == sorted(PUBLIC[package].split())


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package in PUBLIC for name in PUBLIC[package].split()]
)
def test_every_name_loads_and_is_declared_for_type_checkers(package: ModuleType, name: str) -> None:
    value = getattr(package, name)
    homes: dict[str, str] = getattr(package, "_HOMES", {})
    if homes:
        assert value is getattr(importlib.import_module(homes[name]), name)
        text = Path(str(package.__file__)).read_text(encoding="utf-8")
        assert re.search(rf"from {re.escape(homes[name])} import {name} as {name}\n", text)


@pytest.mark.parametrize("package", [arborcast, synth, backends, pipeline])
def test_an_unknown_name(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'solv'"):
        _ = package.solv


def test_importing_a_package_loads_nothing_heavy() -> None:
    code = "import sys, arborcast; print([name for name in sys.modules if name[:10] == 'arborcast.'])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "['arborcast.lazy']\n"


def test_what_needs_no_tensors_does_not_load_torch() -> None:
    code = (
        "import sys; from arborcast import backends; "
        "backends.Options, backends.lower, backends.Program, backends.run_schedule, backends.ExecutionError; "
        "print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_the_name_of_a_class_stands_once_in_the_product() -> None:
    folders = [Path(str(part.__file__)).parent for part in (synth, topologies, backends, pipeline)]
    texts = [path.read_text(encoding="utf-8") for folder in folders for path in sorted(folder.rglob("*.py"))]
    names = Counter(re.findall(r"^ *class ([A-Z]\w*)", "\n".join(texts), re.MULTILINE))
    assert len(names) > 500
    assert [name for name, count in names.items() if count > 1] == []
