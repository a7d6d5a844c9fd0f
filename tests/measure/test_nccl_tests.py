"""Schedules measured as nccl-tests does: sizes, rounding, columns, real processes, torchrun, refusals."""

from __future__ import annotations

import json
import os
import select
import uuid
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arborcast import synth, topologies
from arborcast.backends.measure import nccl_tests
from arborcast.backends.measure.job import Row, RunError, Sweep, count_as_nccl_tests, row_of
from arborcast.backends.measure.launch import run_local
from arborcast.backends.measure.nccl_tests import sizes_between, sweep_of
from arborcast.backends.measure.sweep import run_sweep, run_under_torchrun
from arborcast.synth.errors import InputError, TimedOutError
from arborcast.synth.schedule import Chunk, Schedule, Transfer
from tests.support.commands import Command, Said, run_job
from tests.support.drawn_schedules import (
    custom_exchange,
    direct,
    make,
    ring_allreduce,
)
from tests.support.forked_solvers import started_anew
from tests.support.in_network import star, turning
from tests.support.ranks import rendezvous, run_ranks, store_path, threads_of_gloo

SHORT = ("-n", "2", "-w", "1")


# ------------------------------------------------------------------------------------------------ sizes


@given(st.integers(1, 1000), st.integers(0, 5000), st.integers(2, 7))
def test_sizes_by_a_factor_are_all_up_to_the_last(first: int, more: int, factor: int) -> None:
    sizes = sizes_between(first, first + more, factor=factor)
    assert list(sizes) == [size for k in range(14) if (size := first * factor**k) <= first + more]


@given(st.integers(1, 1000), st.integers(0, 5000), st.integers(1, 900))
def test_sizes_by_a_step_are_all_up_to_the_last(first: int, more: int, step: int) -> None:
    sizes = sizes_between(first, first + more, step=step)
    assert list(sizes) == [s for s in range(first, first + more + 1) if (s - first) % step == 0]


def test_the_sizes_of_the_usual_command() -> None:
    assert sizes_between(8, 128 << 20) == tuple(8 << k for k in range(25))


@pytest.mark.parametrize(
    ("first", "last", "more", "words"),
    [
        (9, 8, {}, "maxbytes 8: must not be below minbytes, got 9"),
        (0, 8, {}, "minbytes 0: must be at least 1"),
        (8, 16, {"factor": 1}, "stepfactor 1: must be at least 2"),
        (8, 16, {"step": 0}, "stepbytes 0: must be at least 1"),
        (8, 128 << 20, {"step": 1}, "stepbytes 1: must give at most 10000 sizes, got 134217721"),
    ],
)
def test_sizes_that_make_no_sweep_are_refused(
    first: int, last: int, more: dict[str, int], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        sizes_between(first, last, **more)


def test_counts_are_rounded_as_nccl_tests_rounds_them() -> None:
    """Blocks of ranks are multiples of 16 bytes there: 4 floats, 2 doubles, 8 of bfloat16."""
    rows = [
        # collective    ranks  type      bytes  elements of the whole buffer
        ("allreduce", 3, "float32", 8, 2),
        ("allreduce", 3, "float32", 7, 1),
        ("allreduce", 3, "float64", 7, 0),
        ("broadcast", 3, "bfloat16", 15, 7),
        ("alltoall", 3, "float32", 47, 0),
        ("alltoall", 3, "float32", 48, 12),
        ("alltoall", 3, "float32", 95, 12),
        ("gather", 3, "float64", 128, 12),
        ("scatter", 2, "bfloat16", 64, 32),
    ]
    for kind, ranks, dtype, size, count in rows:
        schedule = synth.solve(topologies.load(f"full:{ranks}"), "allreduce", method="ring")
        if kind not in {"allreduce", "broadcast"}:
            schedule = direct(kind, ranks)
        elif kind == "broadcast":
            schedule = make(kind, [Chunk(Fraction(1), 0)], [Transfer(0, 0, 1, 0)], total=ranks)
        assert count_as_nccl_tests(schedule, size, dtype) == count, (kind, size)
    assert count_as_nccl_tests(custom_exchange(), 4 * 7, "float32") == 6  # three blocks of two


# -------------------------------------------------------------------------------------------------- rows


def sweep(schedule: Schedule | None = None, sizes: tuple[int, ...] = (8,), **asked: Any) -> Sweep:
    return sweep_of(schedule or ring_allreduce(4), sizes, **asked)


@pytest.mark.parametrize(
    ("average", "time_us", "spread"),
    [
        # of the calls: rank 0 1, 3, 5 us; rank 1 2, 2, 8 us
        ("rank 0", 3.0, 4.0),
        ("average", 3.5, 5.0),  # 1.5, 2.5, 6.5
        ("min", 3.0, 4.0),  # 1, 2, 5: each call's fastest rank; the fastest rank is 0
        ("max", 4.0, 6.0),  # 2, 3, 8
    ],
)
def test_the_time_of_a_row(average: str, time_us: float, spread: float) -> None:
    asked = sweep(ring_allreduce(2), (8000,), average=average)
    row = row_of(asked, 8000, 2000, [[1e-6, 3e-6, 5e-6], [2e-6, 2e-6, 8e-6]], 7)
    assert row.time_us == pytest.approx(time_us)
    assert row.spread == pytest.approx(spread)
    assert (row.bytes, row.count, row.redop, row.root, row.wrong) == (8000, 2000, "sum", -1, 7)
    assert row.algbw == pytest.approx(8000 / time_us / 1000)
    assert row.busbw == pytest.approx(row.algbw)  # 2(n-1)/n = 1 for two ranks


def test_the_columns_are_those_of_nccl_tests() -> None:
    def row(size: int, time_us: float, wrong: int | None) -> Row:
        return Row(size, size, size // 4, "float32", "sum", -1, time_us, 1.5, 2.25, wrong, 0.0, 20)

    asked = sweep(sizes=sizes_between(8, 32), warmup=1)
    lines = nccl_tests.header_lines(asked)
    lines += map(nccl_tests.row_line, (row(8, 9.876, 0), row(16, 123.44, 3), row(1 << 27, 54321.9, None)))
    lines += nccl_tests.footer_lines([row(8, 1, 0), row(16, 1, 3)])
    assert lines == [
        "# allreduce by drawn on full-4, 4 ranks of 4, by process group synth, on local processes",
        "# minBytes 8 maxBytes 32 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 "
        "validation: 1 graph: 0",
        "# time: mean of a rank's calls back to back; of the ranks: average (as nccl-tests by default)",
        "# in-place only: this runtime has no other half of allreduce; warm-up before every size",
        "#",
        "#                                                                 in-place",
        "#       size         count      type   redop    root     time   algbw   busbw #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)",
        "           8             2     float     sum      -1     9.88    1.50    2.25      0",
        "          16             4     float     sum      -1    123.4    1.50    2.25      3",
        "   134217728      33554432     float     sum      -1    54322    1.50    2.25    N/A",
        "# Out of bounds values : 1 FAILED",
        "# Avg bus bandwidth    : 2.25",
        "#",
    ]
    assert nccl_tests.footer_lines([row(8, 1, None)])[0] == "# Out of bounds values : N/A (not checked)"
    assert nccl_tests.footer_lines([row(8, 1, 0)])[0] == "# Out of bounds values : 0 OK"
    out_of_place = nccl_tests.header_lines(sweep(direct("alltoall", 3), (48, 80), check=False))
    assert "step: 32(bytes)" in out_of_place[1] and "validation: 0" in out_of_place[1]
    assert out_of_place[3].startswith("# out-of-place only")


def test_what_is_not_there_is_refused() -> None:
    for asked, words in (
        ({"dtype": "half"}, "datatype half: must be one of float32, float64, bfloat16, int64, float, double"),
        ({"op": "xor"}, "reduction xor: must be one of"),
        ({"iterations": 0}, "iters 0: must be at least 1"),
        ({"warmup": -1}, "warmup iters -1: must be at least 0"),
        ({"via": "pigeons"}, "via pigeons: must be one of group, messages"),
        ({"average": "median"}, "average median: must be one of rank 0, average, min, max"),
    ):
        with pytest.raises(InputError, match=words):
            sweep(**asked)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="sizes: must be at least one"):
        sweep(sizes=())
    for via in ("group", "messages"):
        with pytest.raises(
            InputError, match=r"run: must be .* only forward .*, got .* switch s adds or copies$"
        ):
            sweep(turning(star(3)), via=via)
    assert sweep(dtype="double", op="prod").reduction == "product"
    assert sweep(op="avg", dtype="int64", via="messages").dtype == "int64"


# -------------------------------------------------------------------------------------- real processes


def broadcast_of_half() -> Schedule:
    """Chunk 1, the second half, stays behind."""
    half = [Chunk(Fraction(1, 2), 0), Chunk(Fraction(1, 2), 0)]
    return make("broadcast", half, [Transfer(0, 0, 1, 0), Transfer(0, 0, 2, 0)], total=3)


def added_twice() -> Schedule:
    """Rank 1 adds what rank 0 gives twice, and rank 0 adopts it."""
    steps = [Transfer(0, 0, 1, 0, True), Transfer(0, 0, 1, 1, True), Transfer(0, 1, 0, 2)]
    return make("allreduce", [Chunk(Fraction(1), 1)], steps, total=2)


def sweeps(rank: int, size: int, asked: list[Sweep]) -> list[tuple[Row, ...]]:
    """The rows of several sweeps on these ranks, all of which take part in each."""
    store = torch.distributed.FileStore(str(store_path()), size)
    found = []
    for number, one in enumerate(asked):
        heard: list[Row] = []
        own = torch.distributed.PrefixStore(f"sweep {number}", store)
        rows = run_sweep(one, own, timeout_s=90, on_row=heard.append if rank == 0 else None)
        assert heard == (list(rows) if rank == 0 else [])
        found.append(rows)
    return found


def test_wrong_elements_are_counted_by_both_runtimes() -> None:
    for ranks, schedule, elements, wrong in (
        (3, broadcast_of_half(), 100, 2 * 50),  # of two ranks the second half
        (2, added_twice(), 64, 2 * 64),  # on both; no value of the data is 0 at these places
    ):
        asked = [
            sweep(schedule, (4 * elements,), iterations=1, warmup=0, via=v) for v in ("group", "messages")
        ]
        first, *others = run_ranks(ranks, sweeps, asked)
        assert all(other == first for other in others)  # every rank knows every row
        for (row,) in first:
            assert (row.wrong, row.bytes, row.iterations) == (wrong, 4 * elements, 1)
            assert row.time_us > 0 and row.spread >= 0
    unchecked = sweep(broadcast_of_half(), (400,), iterations=1, warmup=0, check=False)
    assert run_ranks(3, sweeps, [unchecked])[0][0][0].wrong is None


def sends_what_it_lacks() -> Schedule:
    """Wrong: rank 1 has nothing to send."""
    steps = [Transfer(0, 1, 2, 0), Transfer(0, 2, 0, 1)]
    return make("broadcast", [Chunk(Fraction(1), 0)], steps, total=3)


def threads_left(rank: int, size: int, told: list[dict[str, str]]) -> list[tuple[str, int]]:
    """What three measurements in a row ended with, and the threads of gloo that were there then."""
    os.environ["RANK"] = str(rank)

    def refuse(_: int) -> Sweep:
        raise InputError("not this one")

    found = []
    asked = (
        refuse,
        lambda _: sweep(sends_what_it_lacks(), iterations=1, via="messages"),
        lambda _: sweep(ring_allreduce(3), iterations=1, warmup=0),
    )
    for settings, prepare in zip(told, asked, strict=True):
        os.environ |= settings
        held: BaseException | None = None
        try:
            run_under_torchrun(prepare, timeout_s=90, on_row=lambda _: None)
        except Exception as error:
            held = error  # and with it all that its traceback leads to
        found.append((type(held).__name__, threads_of_gloo()))
    return found


def test_no_thread_of_gloo_is_left() -> None:
    """Even while an error lives: one that is left when the process ends can abort it."""
    with rendezvous(3) as one, rendezvous(3) as two, rendezvous(3) as three:
        results = run_ranks(3, threads_left, [one, two, three], backend=None)
    for found in results:
        assert [threads for _, threads in found] == [0, 0, 0]
        first, second, third = (error for error, _ in found)
        assert (first, third) == ("InputError", "NoneType")
        assert second in {"ScheduleError", "ExecutionError"}  # the rank's own, or that it lost others


def workers(mark: str) -> list[int]:
    """All workers that were started with this in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_worker = b"arborcast.backends.measure.worker" in (process / "cmdline").read_bytes()
            if is_worker and mark.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_rows_come_one_by_one_and_an_interruption_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"sweep-{uuid.uuid4()}"  # other tests run sweeps at the same time
    monkeypatch.setenv("SWEEP_OF_THIS_TEST", mark)
    seen: list[Row] = []
    ends: list[int] = []

    def show(row: Row) -> None:
        seen.append(row)
        if len(seen) == 2:
            ends.extend(map(os.pidfd_open, workers(mark)))
            raise KeyboardInterrupt  # as Ctrl-C does while we wait

    with pytest.raises(KeyboardInterrupt), started_anew():
        run_local(sweep_of(ring_allreduce(2), (8, 64, 256 << 20), iterations=2), on_row=show, timeout_s=100)
    assert [row.asked_bytes for row in seen] == [8, 64]
    assert len(ends) >= 2  # the ranks, and what they were forked from
    for end in ends:  # what is killed ends soon, not at once
        assert select.select([end], [], [], 60.0)[0], "a worker goes on"
        os.close(end)
    assert workers(mark) == []


@pytest.mark.usefixtures("forked_workers")
def test_a_rank_that_fails_ends_all_with_its_reason() -> None:
    for via in ("group", "messages"):  # ranks 1 and 2 see what is wrong; rank 0 would wait for ever
        with pytest.raises(RunError, match="rank 1: step 0: rank 1 sends chunk 0 before it holds it"):
            run_local(sweep_of(sends_what_it_lacks(), (8,), iterations=1, via=via), timeout_s=100)
    with pytest.raises(TimedOutError, match=r"not finished after 0.2 s"):
        run_local(sweep_of(ring_allreduce(2), (64 << 20,), iterations=1000), timeout_s=0.2)


def test_settings_of_the_group_are_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARBORCAST_TRANSPORT", "pigeons")
    with pytest.raises(InputError, match="ARBORCAST_TRANSPORT"):
        run_local(sweep_of(ring_allreduce(2), (8,)))


# ------------------------------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "ring.json"
    synth.write_schedule(synth.solve(topologies.load("full:2"), "allreduce", method="ring"), path)
    return path


@pytest.mark.usefixtures("forked_workers")
def test_the_command_prints_what_users_of_nccl_tests_know(command: Command, file: Path) -> None:
    options = ("-b", "8", "-e", "128", "-f", "4", *SHORT, "--check", "-d", "double")
    ran = command("bench", "run", str(file), *options)
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [row[:5] + row[8:] for row in rows] == [
        ["8", "1", "double", "sum", "-1", "0"],
        ["32", "4", "double", "sum", "-1", "0"],
        ["128", "16", "double", "sum", "-1", "0"],
    ]
    assert lines[-3:-1] == [
        "# Out of bounds values : 0 OK",
        "# Avg bus bandwidth    : " + lines[-2].split()[-1],
    ]


@pytest.mark.usefixtures("forked_workers")
def test_json_has_one_row_for_each_tuple_of_independent_variables(command: Command, file: Path) -> None:
    options = ("-b", "8", "-e", "24", "-i", "8", "-c", "0", "-a", "3", "--via", "messages", "--json")
    ran = command("bench", "run", str(file), *options, *SHORT)
    assert ran.status == 0, ran.err
    document = ran.document
    keys, rows = document["keys"], document["rows"]
    assert len({tuple(row[key] for key in keys) for row in rows}) == len(rows) == 3
    assert {"question", "command", "machine", "versions", "date", "measures", "units"} <= document.keys()
    for row, size in zip(rows, (8, 16, 24), strict=True):
        expected = {"topology": "full:2", "collective": "allreduce", "method": "ring", "via": "messages"}
        expected |= {"average": "max", "bytes": size, "dtype": "float32", "root": None, "wrong": None}
        assert {key: row[key] for key in expected} == expected
        assert row["algbw"] == pytest.approx(size / row["time_us"] / 1000)
        assert {"spread", "busbw", "share_of_optimum", "share_of_nominal"} <= row.keys()
    assert document["correct"] is None and document["file"] == "ring.json"


def test_ranks_of_a_job_measure_together_and_rank_0_speaks(file: Path) -> None:
    options = ("-b", "8", "-e", "64K", "-f", "64", *SHORT, "--json")
    first, second = run_job(2, "bench", "run", str(file), *options)
    assert (first.status, first.err, second) == (0, "", Said(0, "", ""))
    document = json.loads(first.out)
    assert (document["processes"], document["correct"]) == ("torchrun", True)
    assert [row["bytes"] for row in document["rows"]] == [8, 512, 32768]
    for row in document["rows"]:  # on the fabric the rate is a share of the bound of the file
        # Two ranks with 1 GB/s each way reduce and spread halves: at most 1 GB/s.
        assert row["share_of_nominal"] == pytest.approx(row["algbw"] / 1)


def test_a_job_of_another_size_is_refused_once(tmp_path: Path) -> None:
    file = tmp_path / "of-three.json"
    synth.write_schedule(synth.solve(topologies.load("full:3"), "allreduce", method="ring"), file)
    first, second = run_job(2, "bench", "run", str(file), "-b", "8", "-e", "8")
    line = f"synth: {file}: needs a process for each of its 3 ranks, got 2 processes\n"
    assert (first, second) == (Said(2, "", line), Said(2, "", ""))
