"""Which of torch's own tests of process groups pass on "synth"? Each beside gloo, whose place it takes.

Nine configurations: file and TCP store, profiler events expected, TORCH_DISTRIBUTED_DEBUG=DETAIL, tests that
want GPUs on CPU tensors, those for 4 and 8 ranks, DDP under dist_autograd, and the forms of torch.compile
(`bench/suite`). A test that has not ended at its deadline has failed; what its threads did is printed. One
that passes on gloo must neither fail nor skip itself on the others.
Results go to `bench/results/torch_suite.json`; rows of what is not asked for stay.

    make torch-suite                                         # an hour on two cores
    python bench/torch_suite.py --configurations "file store" --backends synth --only all_reduce
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from arborcast.bench.harness.document import RUNTIME, read_document, write_document
from arborcast.bench.harness.processes import ONE_CORE
from arborcast.bench.harness.script import KEPT, command_line, one_line
from arborcast.bench.suite.cases import CONFIGURATIONS, applies
from arborcast.synth.errors import InputError
from arborcast.synth.formats.results import Measure, document

HOME = Path(__file__).resolve().parent.parent
BACKENDS = ("gloo", "synth", "cpu:synth")
REFERENCE = BACKENDS[0]

_MONITORED = "torch.distributed.monitored_barrier refuses every name but gloo; the group's own method serves"
BY_NAME = {
    "test_monitored_barrier_gloo": _MONITORED,
    "test_monitored_barrier_gloo_subgroup": _MONITORED,
    "test_monitored_barrier_failure_order": _MONITORED,
    "test_monitored_barrier_wait_all_ranks": _MONITORED,
}
"""Tests in which torch compares the backend's name, and why they cannot pass under another one."""

_PART = "expects the name of a device and its backend where torch itself gives the backend's alone"
BY_NAME_OF_PARTS = {
    "test_ddp_logging_data_cpu": _PART,
    "test_ddp_profiling_torch_profiler": _PART,
}
"""Likewise of groups like "cpu:synth" alone; those of "cpu:gloo" fail them, too."""

FAILURES = frozenset({"failed", "hung"})


def run_suite(
    configurations: Sequence[str], backends: Sequence[str], only: str, deadline_s: float
) -> Iterator[dict[str, Any]]:
    """A row for each configuration and backend, as it has been run; what fails is printed."""
    for configuration in configurations:
        (known,) = (one for one in CONFIGURATIONS if one.name == configuration)
        for backend in backends:
            if not applies(known, backend):
                print(f"{configuration}, {backend}: nothing would be checked", flush=True)
                continue
            row = _row(configuration, backend, list(_endings(configuration, backend, only, deadline_s)))
            print(f"{configuration}, {backend}: {row['passed']} of {row['tests']} pass", flush=True)
            yield row


def _endings(configuration: str, backend: str, only: str, deadline_s: float) -> Iterator[dict[str, Any]]:
    """How each test ended; a process of its own, since torch's tests ask the environment when imported."""
    command = [sys.executable, "-m", "arborcast.bench.suite", configuration, backend]
    command += ["--only", only, "--deadline", str(deadline_s)]
    environment = os.environ | ONE_CORE | {"PYTHONPATH": os.pathsep.join([str(HOME), *sys.path[1:]])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            ending = json.loads(line)
            if ending["outcome"] in FAILURES:
                print(f"{ending['test']} on {backend} {ending['outcome']}:\n{ending['why']}\n", flush=True)
            yield ending
    if process.returncode:
        raise InputError(f"{configuration}, {backend}: the tests could not be run, see above")


def _row(configuration: str, backend: str, endings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    outcomes = Counter(str(ending["outcome"]) for ending in endings)
    ranks = next(one.ranks for one in CONFIGURATIONS if one.name == configuration)
    return {
        "configuration": configuration,
        "backend": backend,
        "ranks": ranks,
        "tests": len(endings) - outcomes["skipped"],
        **{name: outcomes[name] for name in ("passed", "failed", "hung", "skipped")},
        "seconds": sum(ending["seconds"] for ending in endings),
        "failures": [ending["test"] for ending in endings if ending["outcome"] in FAILURES],
        "skips": [ending["test"] for ending in endings if ending["outcome"] == "skipped"],
    }


def compared(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with what passes on gloo and does not pass there: by its name, and for other reasons.

    Where gloo has not been run, all failures count, and no skips.
    """
    of_gloo = {row["configuration"]: row for row in rows if row["backend"] == REFERENCE}
    found = []
    for row in rows:
        gloo = of_gloo.get(row["configuration"], {"failures": [], "skips": row["skips"]})
        by_name = BY_NAME | (BY_NAME_OF_PARTS if ":" in row["backend"] else {})
        worse = sorted({*row["failures"], *row["skips"]} - {*gloo["failures"], *gloo["skips"]})
        found.append(
            {
                **row,
                "by_name": [name for name in worse if name in by_name],
                "behind": [name for name in worse if name not in by_name],
            }
        )
    return found


def results_document(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The results file."""
    order = {one.name: number for number, one in enumerate(CONFIGURATIONS)}
    places = sorted(rows, key=lambda row: (order[row["configuration"]], BACKENDS.index(row["backend"])))
    return document(
        "Which tests of torch pass over the process group?",
        compared(places),
        keys=["configuration", "backend"],
        measures={"passed": Measure("more"), "failed": Measure("less"), "hung": Measure("less")},
        units={
            "tests": "that apply to gloo; those that skip themselves are not among them",
            "hung": "not ended at the deadline",
            "by_name": "pass on gloo and fail or skip themselves here: torch compares the backend's name",
            "behind": "pass on gloo and fail or skip themselves here for other reasons",
        },
        packages=("arborcast", "torch"),
        code=RUNTIME,
        by_name=BY_NAME | BY_NAME_OF_PARTS,
    )


@one_line("torch_suite")
def main() -> None:
    """Run what the command line asks for, write the results."""
    parser = command_line(__doc__, KEPT / "torch_suite.json")
    names = [one.name for one in CONFIGURATIONS]
    parser.add_argument("--configurations", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--only", default="", help="a part of the names of tests; nothing is written then")
    parser.add_argument("--deadline", type=float, default=120.0, metavar="S", help="for each test")
    asked = parser.parse_args()
    try:
        import expecttest  # noqa: F401 - torch's tests import it
    except ImportError:
        raise InputError("torch's tests need the package expecttest: pip install expecttest") from None
    kept = read_document(asked.json)["rows"] if asked.json.exists() and not asked.only else []
    rows = {(row["configuration"], row["backend"]): row for row in kept if "skips" in row}
    for row in run_suite(asked.configurations, asked.backends, asked.only, asked.deadline):
        rows[row["configuration"], row["backend"]] = row
        if not asked.only:
            write_document(asked.json, results_document(list(rows.values())))
    found = compared(list(rows.values()))
    for row in found:
        for name in row["behind"]:
            print(f"{row['configuration']}, {row['backend']}: {name} passes on {REFERENCE} alone")
    raise SystemExit(any(row["behind"] for row in found))


if __name__ == "__main__":
    main()
