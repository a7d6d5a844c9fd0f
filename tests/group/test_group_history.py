"""What a group tells of its calls: sums, the record of a flight, a trace; real processes."""

from __future__ import annotations

import json
import logging
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from arborcast.backends import ExecutionError, Options
from arborcast.backends.group.history import KEPT, History, calls_to_keep
from arborcast.backends.transport.fingerprint import CollectiveFingerprint
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.viewer import scene_of_traces
from tests.support.chrome_trace import events_of
from tests.support.ranks import StandingRanks, run_ranks
from tests.support.waiting import until

ABSENT = 1
COUNT = 3 << 13
ranks = StandingRanks(3, backend="gloo")


def new_group(timeout_s: float = 60, **options: Any) -> Any:
    options = {"topology": "full:3", "method": "trees", **options}
    return dist.new_group(
        backend="synth", timeout=timedelta(seconds=timeout_s), pg_options=Options(**options)
    )


@ranks.check
def test_counters_are_what_was_called(rank: int, size: int) -> None:
    group, small = new_group(), new_group(gloo_below=1 << 20)
    begun = time.perf_counter()
    for count in (COUNT, COUNT, 3):
        dist.all_reduce(torch.ones(count), group=group)
    dist.broadcast(torch.ones(5, dtype=torch.int8), 0, group=group)
    dist.all_reduce(torch.ones(3).to_sparse(), group=group)
    dist.barrier(group)
    dist.all_reduce(torch.ones(7), group=small)
    took = time.perf_counter() - begun
    counters, sums, few = group.counters(), group.counters()["allreduce"], small.counters()["allreduce"]
    nbytes = 4 * (2 * COUNT + 3)
    assert sums.items() >= {"schedule": 3, "gloo": 0, "bytes": nbytes, "handed over": 1}.items()
    assert 0 < sums["seconds"] < took
    # Three ranks with links of 1 GB/s to each other: 2/3 of the buffer leave each over two links, twice.
    assert sums["share"] == pytest.approx(nbytes / 1.5e9 / sums["seconds"])
    assert (counters["broadcast"]["schedule"], counters["broadcast"]["bytes"]) == (1, 5)
    assert few.keys() == {"schedule", "gloo", "bytes", "seconds"}
    assert (few["gloo"], few["bytes"]) == (1, 28)


def one_is_late(rank: int, size: int) -> str | None:
    patient, group = new_group(), new_group()
    dist.all_reduce(torch.ones(COUNT), group=patient)
    group._communicator.member.engine.timeout_s = 1.0
    error = None
    path = Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}meanwhile-{rank}.json")
    if rank != ABSENT:
        work = dist.all_reduce(torch.ones(COUNT), group=patient, async_op=True)

        def is_waiting() -> bool:
            patient.dump(path)
            return bool(json.loads(path.read_text())["groups"][0]["calls"][-1].get("waits_for"))

        until(is_waiting)
    dist.barrier()
    if rank == ABSENT:
        work = dist.all_reduce(torch.ones(COUNT), group=patient, async_op=True)
    assert work is not None
    work.wait()
    if rank != ABSENT:
        try:
            dist.all_reduce(torch.ones(COUNT), group=group)
        except ExecutionError as caught:
            error = str(caught)
    dist.barrier()
    if rank == ABSENT:
        group.abort()
        error = "rank 1 aborted the group"
    patient.dump(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}dumped-{rank}.json")
    dist.barrier()
    return error


def test_a_timeout_leaves_a_record_that_names_who_was_waited_for(tmp_path: Path) -> None:
    environ = {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/rank-"}
    errors = run_ranks(3, one_is_late, environ=environ)
    for rank, error in enumerate(errors):
        document = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert document["format"] == "arborcast.flight/1"
        assert json.loads((tmp_path / f"rank-dumped-{rank}.json").read_text())["groups"] == document["groups"]
        first, second = document["groups"]
        whole, late = first["calls"]
        assert late["state"] == "completed" and "waits_for" not in late
        assert (first["rank"], first["ranks"], first["failure"]) == (rank, [0, 1, 2], None)
        assert (whole["state"], whole["bytes"], whole["elements"]) == ("completed", 4 * COUNT, "float32 sum")
        assert whole["begun_ns"] < whole["ended_ns"] < document["at_ns"]
        assert whole["schedule"].startswith("trees (3 trees")
        assert second["failure"] == error
        if rank == ABSENT:
            continue
        meanwhile = json.loads((tmp_path / f"rank-meanwhile-{rank}.json").read_text())["groups"][0]["calls"][
            -1
        ]
        assert (meanwhile["state"], meanwhile["ended_ns"]) == ("started", None)
        assert ABSENT in meanwhile["waits_for"] and rank not in meanwhile["waits_for"]
        assert error is not None and "nothing happened for 1 s" in error
        (failed,) = second["calls"]
        assert (failed["state"], failed["ended_ns"], failed["error"]) == ("failed", None, error)
        assert ABSENT in failed["waits_for"] and rank not in failed["waits_for"]


def test_the_last_calls_are_kept_and_written_at_the_first_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/calls-")
    history = History(1, (4, 7))
    for sequence in range(3):
        with history.begin(CollectiveFingerprint(sequence, 2, -1, Kind.ALLREDUCE, "int8 max"), 2, None):
            pass
    for reason in ("the first", "the second"):
        history.fail(reason)
    groups = json.loads((tmp_path / "calls-7.json").read_text())["groups"]
    (found,) = [group for group in groups if group["ranks"] == [4, 7]]
    assert found["failure"] == "the first"
    assert [call["sequence"] for call in found["calls"]] == [1, 2]
    assert history.counters()["allreduce"]["gloo"] == 3


@pytest.mark.parametrize("said", ["many", "-1", "1.5", "٣", "9" * 10, "9" * 5000])
def test_what_is_no_number_of_calls_is_refused(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", said)
    with pytest.raises(InputError, match="TORCH_FR_BUFFER_SIZE: must be a number of calls") as caught:
        calls_to_keep()
    assert len(str(caught.value)) < 200
    for number, kept in (("0", 0), (" 7", 7), ("", KEPT)):
        monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", number)
        assert History(0, (0,)).calls.maxlen == kept


def refused(rank: int, size: int) -> list[object]:
    """What gloo refuses alike on all ranks ends nothing, and leaves no record."""
    try:
        dist.all_to_all_single(torch.empty(4), torch.ones(4), [3], [4])
    except RuntimeError:
        found: list[object] = [Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}.json").exists()]
    dist.all_reduce(total := torch.ones(1))
    group: Any = dist.group.WORLD
    group.abort()
    document = json.loads(Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}.json").read_text())
    # Ranks meet for it, and then gloo begins it.
    states = [call["state"] for call in document["groups"][0]["calls"] if call["collective"] == "alltoall"]
    return [*found, total.item(), states, document["groups"][0]["failure"]]


def test_a_harmless_refusal_leaves_the_record_to_what_ends_the_group(tmp_path: Path) -> None:
    environ = {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/rank-"}
    assert run_ranks(1, refused, backend="synth", environ=environ) == [
        [False, 1, ["completed", "failed"], "rank 0 aborted the group"]
    ]


def traced(rank: int, size: int, folder: str) -> None:
    group = new_group(piece_bytes=8192)
    dist.all_reduce(torch.ones(COUNT), group=group)
    with group.trace(f"{folder}/{rank}.json"):
        dist.all_reduce(torch.ones(COUNT), group=group)
        dist.broadcast(torch.ones(COUNT), 0, group=group)
    dist.all_reduce(torch.ones(COUNT), group=group)
    dist.barrier()


def test_a_trace_has_the_calls_of_its_block_and_all_their_bytes(tmp_path: Path) -> None:
    ranks(traced, str(tmp_path))
    sent: dict[tuple[int, int], int] = {}
    received: dict[tuple[int, int], int] = {}
    for rank in range(3):
        events = events_of(tmp_path / f"{rank}.json")
        assert {event["pid"] for event in events} == {rank}
        names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        bars = [event for event in events if event["ph"] == "X"]
        calls = [bar for bar in bars if names[bar["tid"]] == "calls"]
        assert [call["name"] for call in calls] == ["allreduce 96 KiB", "broadcast 96 KiB"]
        assert calls[0]["args"]["elements"] == "float32 sum"
        for bar in bars:
            (call,) = [it for it in calls if it["ts"] <= bar["ts"] < it["ts"] + it["dur"]]
            assert bar["ts"] + bar["dur"] <= call["ts"] + call["dur"]
            way, _, peer = names[bar["tid"]].partition(" rank ")
            if way == "to":
                sent[rank, int(peer)] = sent.get((rank, int(peer)), 0) + bar["args"]["bytes"]
                assert bar["name"].startswith("send ")
            elif way == "from":
                received[int(peer), rank] = received.get((int(peer), rank), 0) + bar["args"]["bytes"]
        adds = [bar for bar in bars if bar["name"].startswith("receive and add")]
        # Each rank is the root of one of three trees, and adds what two others send of its third.
        assert sum(bar["args"]["bytes"] for bar in adds) == 2 * 4 * COUNT // 3
    assert sent == received
    # Of an allreduce 4/3 of the buffer leave each rank; of a broadcast each of two ranks gets all of it.
    assert sum(sent.values()) == 4 * COUNT * (3 * 4 // 3 + 2)
    shown = scene_of_traces([tmp_path / f"{rank}.json" for rank in range(3)])
    assert shown["chunks"] == ["allreduce 96 KiB", "broadcast 96 KiB"]
    assert {(link["src"], link["dst"]) for link in shown["links"]} == set(sent)


def spoken(rank: int, size: int, *levels: str) -> list[list[str]]:
    """What is logged at each level of torch's."""
    said: list[list[str]] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said[-1].append(record.getMessage())

    logging.getLogger("arborcast").addHandler(Kept())
    for level in levels:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = level
        dist.set_debug_level_from_env()
        said.append([])
        group = new_group()
        dist.all_reduce(torch.ones(COUNT), group=group)
        dist.barrier()
    return said


def test_torch_s_debug_level_says_which_schedule_serves() -> None:
    for rank, said in enumerate(run_ranks(3, spoken, "OFF", "INFO", "DETAIL")):
        tables, calls = (
            [[line for line in lines if line.startswith(words)] for lines in said]
            for words in ("allreduce on full:3: trees (3 trees", f"rank {rank}: allreduce 96 KiB in ")
        )
        assert [len(lines) for lines in tables] == [0, 1, 1] or rank
        assert [len(lines) for lines in calls] == [0, 0, 1]
        assert " ms by trees (3 trees, height 1" in calls[2][0]
