"""`synth bench device` on the host: torchrun, the kernel interpreted, gloo in the place of the library."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from arborcast import synth, topologies
from arborcast.backends.measure import device_bench
from arborcast.backends.measure.device_bench import (
    DeviceJob,
    fitted,
    measure_device,
    read_device_results,
    results,
)
from arborcast.backends.measure.job import RunError
from arborcast.synth.cli.bench_device import result_lines
from arborcast.synth.collective import NAMED_KINDS, Collective
from arborcast.synth.errors import InputError, TimedOutError
from arborcast.synth.simulation.prices import at_prices
from arborcast.synth.topology import Link
from tests.device.needs_triton import NEEDS_TRITON
from tests.support.commands import Command, refused
from tests.support.definition import define
from tests.support.ranks import run_ranks

pytestmark = NEEDS_TRITON

SMALL = ("--on", "cpu", "--groups", "1", "--lanes", "2", "--piece", "64")
RANKS = 3


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_it_checks_and_times_as_where_each_rank_has_a_gpu(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_bench, "gpus_for", lambda device: 2)
    file = tmp_path / "found.json"
    asked = ("full:2", "reduce-scatter", "--dtypes", "bfloat16", "--lengths", "1,37")
    measured = ("--sizes", "64:128", "--repeats", "3", "-n", "1", "-o", str(file))
    ran = command("bench", "device", *asked, *SMALL, *measured)
    assert (ran.status, ran.err) == (0, "")
    assert "reduce-scatter by trees: 1 of 1 types right, 0 wrong elements" in ran.out
    assert "no times" not in ran.out
    found = read_device_results(file)
    assert [(it["dtype"], it["lengths"], it["wrong"]) for it in found["checks"]] == [("bfloat16", [1, 37], 0)]
    assert [(it["bytes"], it["by"], it["dtype"]) for it in found["rows"]] == [
        (size, by, "bfloat16") for size in (64, 128) for by in ("kernel", "gloo")
    ]
    assert all(it["time_us"] > 0 for it in found["rows"])
    assert sum("64 B" in line for line in ran.out.splitlines()) == 1


@pytest.mark.long
def test_a_rank_that_fails_says_why() -> None:
    schedule = synth.solve(topologies.load("full:2"), "allreduce")
    job = DeviceJob(device="cpu", dtypes=("float32",), lengths=(-1,), times=False)
    with pytest.raises(RunError, match=r"rank \d: Trying to create tensor with negative dimension"):
        measure_device([schedule], job, gpus=0)


def test_time_that_is_up_is_said() -> None:
    schedule = synth.solve(topologies.load("full:2"), "allreduce")
    with pytest.raises(TimedOutError, match=r"bench device: not finished after 0.5 s"):
        measure_device([schedule], DeviceJob(device="cpu", timeout_s=0.5), gpus=0)


def wrong_elements(rank: int, size: int) -> list[int]:
    """What is counted of a right call, one wrong in an element of one rank, a short one, one that writes."""
    from arborcast.backends.measure.device_worker import DeviceRank

    class Broken:
        def __init__(self, spoil: str) -> None:
            self._spoil = spoil

        def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
            result = tensor.clone()
            dist.all_reduce(result)
            if rank == 1 and self._spoil == "element":
                result[3] += 1
            if rank == 1 and self._spoil == "input":
                tensor[:2] += 1
            return result[:-1] if self._spoil == "length" else result

        def finish(self) -> None:
            pass

    checker = DeviceRank(DeviceJob(device="cpu", lengths=(5, 8)))
    collective = Collective.on(topologies.load(f"full:{size}"), "allreduce")
    calls: list[Any] = [Broken(spoil) for spoil in ("", "element", "length", "input")]
    return [checker.checked(collective, call, "float32")["wrong"] for call in calls]


def test_wrong_elements_are_counted() -> None:
    # Two calls of 5 and of 8 elements: one element each; all on three ranks; two inputs on one.
    assert run_ranks(RANKS, wrong_elements) == [[0, 4, 2 * 13 * RANKS, 8]] * RANKS


def by_library(rank: int, size: int) -> list[str]:
    from arborcast.backends.measure.device_worker import library_call

    fabric, wrong = topologies.load(f"ring:{size}"), []
    for kind in sorted(NAMED_KINDS):
        collective = Collective.on(fabric, kind, root=1)
        given = [torch.arange(6) + 100 * one for one in range(size)]
        wanted = define(collective, [it.numpy().copy() for it in given])[rank]
        want = torch.zeros(0, dtype=torch.int64) if wanted is None else torch.from_numpy(wanted)
        assert dist.group.WORLD is not None
        if not torch.equal(library_call(collective, given[rank], dist.group.WORLD)(), want):
            wrong.append(str(kind))
    return wrong


def test_the_library_gives_what_collectives_are_defined_to() -> None:
    assert run_ranks(RANKS, by_library) == [[]] * RANKS


def test_a_machine_without_a_gpu_is_told_in_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(
        command("bench", "device", "full:2", "allreduce"),
        "bench device: needs a GPU that torch can use; TRITON_INTERPRET=1 and --on cpu try it without",
    )
    monkeypatch.delenv("TRITON_INTERPRET")
    asked = ("bench", "device", "full:2", "allreduce", "--on", "cpu")
    refused(command(*asked), "--on cpu needs Triton's interpreter: set TRITON_INTERPRET=1")


def test_types_are_the_kernels() -> None:
    from arborcast.backends.device.executor import TYPES

    assert {f"torch.{name}" for name in device_bench.TYPES} == {str(dtype) for dtype in TYPES}


def drawn(**device: Any) -> dict[str, Any]:
    schedule = synth.solve(topologies.load("full:2"), "allreduce")
    said = {"name": "drawn", "count": 1, "nccl": "2.28.9", "ranks": 2} | device
    checks = [{"collective": "allreduce", "dtype": "int8", "lengths": [1], "wrong": 3}]
    return results([schedule], replace(DeviceJob(), lanes=8), {"device": said, "checks": checks, "rows": []})


@pytest.mark.parametrize(
    ("device", "line"),
    [({}, "no times: 2 ranks share 1 GPU"), ({"count": 0}, "no times: an interpreter's say nothing")],
)
def test_it_says_why_there_are_no_times(device: dict[str, Any], line: str) -> None:
    lines = list(result_lines(drawn(**device), None))
    assert lines[-1] == line
    assert "allreduce by trees: 0 of 1 types right, 3 wrong elements" in lines


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    file, told = tmp_path / "found.json", drawn()
    for change, fact in (
        ({"format": "arborcast.device-results/9"}, "format: must be arborcast.device-results/1"),
        ({"checks": [told["checks"][0] | {"wrong": "none"}]}, "checks[0].wrong"),
        ({"more": 1}, "more"),
    ):
        file.write_text(json.dumps(told | change))
        with pytest.raises(InputError, match=r"found\.json: ") as error:
            read_device_results(file)
        assert fact in str(error.value)


def test_wrong_elements_are_an_answer_of_no(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device_bench, "measure_device", lambda schedules, job, gpus: drawn())
    ran = command("bench", "device", "full:2", "allreduce", "--on", "cpu", "-o", str(tmp_path / "a.json"))
    assert (ran.status, ran.err) == (1, "synth: bench device: 3 wrong elements\n")
    assert read_device_results(tmp_path / "a.json")["checks"][0]["wrong"] == 3


@pytest.mark.parametrize("spec", ["dgx1", "dgx-h100"])
def test_a_fabric_with_the_kernels_times_answers_as_it_was_measured(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spec: str
) -> None:
    """Times of a fabric with other latencies and rates give that fabric back, under names without prices."""
    fabric = topologies.load(spec).forwarding
    schedule = synth.solve(fabric, "allreduce")
    links = [replace(it, bandwidth=it.bandwidth / 2, latency_us=3 * it.latency_us) for it in fabric.links]
    slow = replace(schedule, topology=replace(fabric, links=tuple(links)))
    sizes = (1 << 10, 1 << 28)

    def measured(schedules: Any, job: DeviceJob, *, gpus: int) -> dict[str, Any]:
        rows = [
            {"topology": spec, "ranks": 8, "collective": "allreduce", "root": None, "by": by, "graph": graph}
            | {"dtype": "int8", "bytes": size, "method": "drawn", "spread": 0, "algbw": 1, "busbw": 1}
            | {"time_us": synth.simulate(slow, size).time_us if (by, graph) == ("kernel", False) else 1.0}
            for size in sizes
            for by in ("kernel", "NCCL")
            for graph in (False, True)
        ]
        return results(schedules, job, {"device": drawn()["device"], "checks": [], "rows": rows})

    monkeypatch.setattr(device_bench, "measure_device", measured)
    monkeypatch.setattr(device_bench, "gpus_for", lambda device: 8)
    file = tmp_path / f"{spec}.yaml"
    ran = command("bench", "device", spec, "allreduce", "--topology", str(file))
    assert (ran.status, ran.err) == (0, "")
    found = topologies.load(str(file))
    for one, link in zip(sorted(found.links, key=ends), sorted(links, key=ends), strict=True):
        assert ends(one) == ends(link)
        assert float(one.bandwidth) == pytest.approx(float(link.bandwidth), rel=0.02)
        assert float(one.latency_us) == pytest.approx(float(link.latency_us), rel=0.02)
    assert at_prices(replace(schedule, topology=found))[1] == 0


def ends(link: Link) -> tuple[int, int]:
    return link.src, link.dst


def test_times_that_no_latencies_and_rates_give_are_refused() -> None:
    schedule = synth.solve(topologies.load("dgx1"), "allreduce")
    with pytest.raises(InputError, match=r"900.0 us of 1024 bytes and 5.0 us of 2048 are not those of trees"):
        fitted(schedule, {1024: 900.0, 2048: 5.0}, "here")


def test_a_fabric_needs_times(command: Command, tmp_path: Path) -> None:
    asked = ("full:2", "allreduce", "--on", "cpu", "--topology", str(tmp_path / "here.yaml"))
    refused(command("bench", "device", *asked), "--topology: needs times of two sizes, with a GPU for each")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_all_kinds_and_types_in_the_interpreter(command: Command) -> None:
    ran = command("bench", "device", "ring:3", *sorted(NAMED_KINDS), "--lengths", "1,5,64", *SMALL)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.count("9 of 9 types right, 0 wrong elements") == len(NAMED_KINDS)
