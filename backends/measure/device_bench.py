"""The kernel of `backends.device` on this machine, checked and timed: `synth bench device` without its words.

This side lays out a folder, has torchrun start a `device_worker` for each rank, and makes a results file of
what they found, which `read_device_results` reads back.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from arborcast.backends.measure.job import FAILURE_FILE, RunError
from arborcast.backends.measure.launch import see_what_runs_need
from arborcast.synth.errors import InputError, TimedOutError
from arborcast.synth.formats.any_schedule import write_schedule
from arborcast.synth.formats.reading import check_format, parse_json, read_text
from arborcast.synth.formats.results import TIME, document
from arborcast.synth.formats.shapes import DeviceResultShape, check_shape
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.topology import Topology

JOB, RESULT = "job.json", "result.json"
"""Files of the folder: a `DeviceJob`, and what rank 0 says."""

FORMAT = "arborcast.device-results/1"
TYPES = (
    *("float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "uint8", "int16", "int32", "int64"),
)
"""Of elements, those of `device.executor.TYPES`."""

LENGTHS = {"cpu": (1, 37, 64), "cuda": (1, 37, 1000, 4096, 99_991, 1 << 20)}
"""Elements of a block that are checked by default."""

_KEYS = ("topology", "ranks", "collective", "root", "by", "graph", "dtype", "bytes")
_MAX_BYTES = 64 << 20
_END_S = 60.0
_ROUNDS, _CLOSE = 40, 0.005


@dataclass(frozen=True, slots=True)
class DeviceJob:
    """What ranks are asked to do, of several schedules one after the other.

    Attributes:
        device: "cuda", or "cpu" for Triton's interpreter.
        dtypes: that are checked, of `TYPES`; the first is timed.
        lengths: elements of a block that are checked; the whole buffer is one, or one for each rank.
        times: whether calls are timed beside the library's, too.
        sizes: of timed buffers, bytes of the whole.
        groups: as of `device.plan.DevicePlan`, like the next two.
        lanes: programs that share each chunk of a group.
        piece: the most elements of a piece.
        repeats: measurements of each way to call, in turns; the median counts.
        iterations: calls of each measurement.
        timeout_s: for everything together.
        schedules: their files in the folder.
    """

    device: str = "cuda"
    dtypes: tuple[str, ...] = TYPES
    lengths: tuple[int, ...] = LENGTHS["cuda"]
    times: bool = True
    sizes: tuple[int, ...] = ()
    groups: int = 4
    lanes: int = 4
    piece: int = 1 << 14
    repeats: int = 9
    iterations: int = 20
    timeout_s: float = 1800
    schedules: tuple[str, ...] = ()


def gpus_for(device: str) -> int:
    """How many GPUs this machine has; 0 where the host is asked for.

    Raises:
        InputError: none, or no torch, Triton or interpreter.
    """
    see_what_runs_need()
    if importlib.util.find_spec("triton") is None:
        raise InputError("bench device: needs triton: pip install arborcast[device]")
    if device == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise InputError("bench device: --on cpu needs Triton's interpreter: set TRITON_INTERPRET=1")
        return 0
    import torch

    if not torch.cuda.is_available():
        raise InputError(
            "bench device: needs a GPU that torch can use; TRITON_INTERPRET=1 and --on cpu try it without"
        )
    return torch.cuda.device_count()


def measure_device(schedules: Sequence[AnySchedule], job: DeviceJob, *, gpus: int) -> dict[str, Any]:
    """Run a job on as many processes as the schedules' topology has ranks; the results file as a value.

    Args:
        schedules: correct ones, on one topology, whose ranks all take part.
        job: its `schedules` are not used.
        gpus: see `gpus_for`; where there are fewer than ranks, ranks share them.

    Raises:
        InputError: what the kernel does not serve.
        RunError: a rank failed.
        TimedOutError: the time ran out.
    """
    ranks = schedules[0].topology.ranks
    names = tuple(f"schedule{at}.json" for at in range(len(schedules)))
    with tempfile.TemporaryDirectory(prefix="arborcast-device-") as home:
        folder = Path(home)
        for name, schedule in zip(names, schedules, strict=True):
            write_schedule(schedule, folder / name)
        (folder / JOB).write_text(json.dumps(asdict(replace(job, schedules=names))), encoding="utf-8")
        _launch(folder, ranks, job.timeout_s, shares=0 < gpus < ranks)
        found = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    return results(schedules, job, found)


def _launch(folder: Path, ranks: int, timeout_s: float, *, shares: bool) -> None:
    """Start the ranks and wait; none is left."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words += ["-m", "arborcast.backends.measure.device_worker", str(folder)]
    told = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"} if shares else {}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment = {"GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1"} | dict(os.environ) | told
    with (folder / "log.txt").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimedOutError(f"bench device: not finished after {timeout_s:g} s") from None
        finally:
            if process.poll() is None:
                process.terminate()  # it ends its ranks first
                process.wait(_END_S)
        if status == 0 and (folder / RESULT).is_file():
            return
        log.seek(0)
        said = log.read().split("\n")
    if (folder / FAILURE_FILE).is_file():
        reason = (folder / FAILURE_FILE).read_text(encoding="utf-8")
        raise (RunError if reason.startswith("rank ") else InputError)(reason)
    last = next((line for line in reversed(said) if line.strip()), "torchrun said nothing")
    raise RunError(f"bench device: torchrun ended with status {status}: {last}")


def results(schedules: Sequence[AnySchedule], job: DeviceJob, found: Mapping[str, Any]) -> dict[str, Any]:
    """The results file of what rank 0 said."""
    return document(
        "Is the kernel right on this machine, and how fast is it beside the library?",
        found["rows"],
        keys=_KEYS,
        measures=TIME,
        units={
            "time_us": "of a call of the slowest rank, mean of calls back to back; median over measurements "
            "in turns",
            "spread": "longest minus shortest measurement, us",
            "bytes": "of the whole buffer",
            "wrong": "elements over all ranks and lengths, two calls each; lengths are of a block",
        },
        packages=("arborcast", "torch", "triton"),
        code=("synth", "topologies", "backends"),
        format=FORMAT,
        device=found["device"],
        asked=asdict(job),
        schedules=[
            {"topology": it.topology.name, "collective": str(it.collective.kind), "method": it.method.name}
            for it in schedules
        ],
        checks=found["checks"],
    )


def read_device_results(path: Path | str) -> dict[str, Any]:
    """A file that `synth bench device -o` wrote.

    Raises:
        InputError: it is none, with its first wrong entry.
    """
    told = parse_json(read_text(path, max_bytes=_MAX_BYTES), str(path))
    check_format(told, (FORMAT,), str(path))
    shaped: dict[str, Any] = check_shape(DeviceResultShape, told, str(path))
    return shaped


def fitted(schedule: AnySchedule, times_us: Mapping[int, float], name: str) -> Topology:
    """The schedule's fabric as the kernel was measured: one factor of all latencies, one of all rates.

    With them the schedule's simulation takes the times of the smallest and of the largest size. Switches have
    names that say nothing, as the topology should, so that no prices of links come on top.

    Args:
        schedule: that was timed.
        times_us: by bytes of the whole buffer.
        name: of the topology.

    Raises:
        InputError: no two factors give these times.
    """
    fabric, (small, large) = schedule.topology, (min(times_us), max(times_us))

    def scaled(latency: float, rate: float) -> Topology:
        slower, faster = (Fraction(max(1, round(it * 10**6)), 10**6) for it in (latency, rate))
        links = [
            replace(it, bandwidth=it.bandwidth * faster, latency_us=it.latency_us * slower)
            for it in fabric.links
        ]
        switches = [replace(it, name=f"measured{at}") for at, it in enumerate(fabric.switches)]
        return replace(fabric, name=name, links=tuple(links), switches=tuple(switches))

    latency = rate = 1.0
    for _ in range(_ROUNDS):
        found = scaled(latency, rate)
        at = [simulate(replace(schedule, topology=found), size).time_us for size in (small, large)]
        off = times_us[small] / at[0], at[1] / times_us[large]
        if all(abs(it - 1) < _CLOSE for it in off):
            return found
        latency, rate = (min(max(it, 1e-5), 1e5) for it in (latency * off[0], rate * off[1]))
    raise InputError(
        f"bench device: {times_us[small]:.1f} us of {small} bytes and {times_us[large]:.1f} us of {large} "
        f"are not those of {schedule.method.name} on {fabric.name} at any latencies and rates"
    )
