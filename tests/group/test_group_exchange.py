"""One table for all ranks: over every store, when rank 0 fails, when bytes change on the way."""

from __future__ import annotations

import json
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from arborcast import synth
from arborcast.backends import Options
from arborcast.backends.errors import ChannelClosedError, ExecutionError
from arborcast.backends.schedules import rendezvous as module
from arborcast.backends.schedules import synthesis
from arborcast.backends.schedules.rendezvous import share_table
from arborcast.backends.schedules.schedule_table import ScheduleTable
from arborcast.synth.chunks.solvers.cache import ChunkCache
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError, TopologyError
from arborcast.synth.selection import Choice
from arborcast.topologies import load
from tests.support.ranks import run_ranks, store_path


@cache
def small_table() -> ScheduleTable:
    return ScheduleTable.of([Choice(0, synth.solve(load("ring:3"), "allreduce", method="ring"))])


def fail(error: Exception) -> Any:
    def make() -> ScheduleTable:
        raise error

    return make


def nobody_asks() -> ScheduleTable:
    raise AssertionError("only rank 0 makes tables")


def test_others_get_what_rank_0_made() -> None:
    store = dist.HashStore()
    threads_got: list[ScheduleTable] = []
    waiting = threading.Thread(
        target=lambda: threads_got.append(share_table(store, "key", 1, nobody_asks, timeout_s=100))
    )
    waiting.start()
    assert share_table(store, "key", 0, small_table) is small_table()
    waiting.join()
    assert threads_got == [small_table()]
    assert threads_got[0].digest == small_table().digest


def test_long_tables_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 500)
    store = dist.HashStore()
    share_table(store, "key", 0, small_table)
    assert json.loads(store.get("key"))["parts"] == -(-len(small_table().to_bytes()) // 500) > 2
    assert share_table(store, "key", 1, nobody_asks) == small_table()


@pytest.mark.parametrize(
    ("error", "kind", "line"),
    [
        (InputError("ranks: wrong"), InputError, "ranks: wrong"),
        (TopologyError("link 0->1:\n bad"), InputError, "link 0->1: bad"),
        (InfeasibleError("rank 2 cut off"), InfeasibleError, "rank 2 cut off"),
        (TimedOutError("not within 3 s"), TimedOutError, "not within 3 s"),
        (ExecutionError("the child died"), ExecutionError, "the child died"),
        (ChannelClosedError(3), ExecutionError, "rank 3 closed its connection: it died or was ended"),
        (ZeroDivisionError("by zero"), ExecutionError, "ZeroDivisionError: by zero"),
    ],
)
def test_what_fails_at_rank_0_fails_everywhere(error: Exception, kind: type[Exception], line: str) -> None:
    store = dist.HashStore()
    for rank, make in ((0, fail(error)), (1, nobody_asks), (2, nobody_asks)):
        with pytest.raises(kind) as caught:
            share_table(store, "key", rank, make)
        assert type(caught.value) is kind
        assert str(caught.value) == line


def test_bytes_that_changed_on_the_way() -> None:
    store = dist.HashStore()
    share_table(store, "key", 0, small_table)
    changed = store.get("key/0").replace(b'"owner":0', b'"owner":1', 1)
    store.set("key/0", changed)
    sent, got = small_table().digest, module._hash(changed)
    with pytest.raises(
        ExecutionError,
        match=rf"rank 2: schedules of rank 0 \(key\): SHA-256 .* must be {sent}, got {got}",
    ):
        share_table(store, "key", 2, nobody_asks)


def test_a_rank_0_that_does_not_answer() -> None:
    with pytest.raises(
        ExecutionError, match=r"rank 1: rank 0 did not say within 0\.05 s which schedules to run \(key\)"
    ) as caught:
        share_table(dist.HashStore(), "key", 1, nobody_asks, timeout_s=0.05)
    assert "\n" not in str(caught.value)


def over_stores(rank: int, size: int) -> list[str]:
    """The digests of one table over a store of each kind."""
    file = dist.FileStore(str(store_path()), size)
    if rank == 0:
        tcp = dist.TCPStore("localhost", 0, size, is_master=True, wait_for_workers=False)
        file.set("port", str(tcp.port))
    else:
        tcp = dist.TCPStore("localhost", int(file.get("port")), size, wait_for_workers=False)
    digests = []
    for store in (file, tcp, dist.PrefixStore("group 7", tcp), dist.PrefixStore("a", file)):
        make = small_table if rank == 0 else nobody_asks
        table = share_table(store, "table/1", rank, make)
        assert table is not None
        digests.append(table.digest)
    # The server of the store is in rank 0, which therefore ends last.
    tcp.add("done", 1)
    while rank == 0 and tcp.add("done", 0) < size:
        pass
    return digests


def test_real_processes_over_every_store() -> None:
    results = run_ranks(3, over_stores, backend=None)
    assert results == [[small_table().digest] * 4] * 3


def synthesized(rank: int, size: int, specs: list[str]) -> list[tuple[str, str]]:
    """What each rank has of the fabrics, one after the other: a digest, or an error."""
    store = dist.FileStore(str(store_path()), size)
    found = []
    for index, spec in enumerate(specs):
        options = Options(topology=spec, method="ring", deadline_s=0.01 if spec == "ring:64" else 100)
        topology = load(spec)

        def make(topology: Any = topology, options: Options = options) -> ScheduleTable:
            return synthesis.synthesize_table(topology, Kind.ALLREDUCE, None, options)

        try:
            table = share_table(store, f"{index}", rank, make, timeout_s=150)
            assert table is not None
            found.append(("table", table.digest))
        except (InputError, InfeasibleError, TimedOutError, ExecutionError) as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_real_processes_share_what_rank_0_finds() -> None:
    specs = ["ring:3", "full:1", "ring:64"]
    first, *others = run_ranks(3, synthesized, specs, backend=None)
    assert others == [first, first]
    assert first == [
        ("table", small_table().digest),
        ("InputError", "allreduce: needs at least 2 ranks, got 1"),
        ("TimedOutError", "allreduce on ring:64: there was no schedule within 0.01 s"),
    ]


def forged() -> bytes:
    """The table, but nobody sends the last transfer; its shape is right, and so is its checksum."""
    document = json.loads(small_table().to_bytes())
    document["entries"][0]["schedule"]["transfers"].pop()
    return json.dumps(document).encode()


def test_a_forged_table_of_rank_0_is_refused_though_its_checksum_is_right() -> None:
    data = forged()
    store = dist.HashStore()
    store.set("key/0", data)  # type: ignore[arg-type]  # takes both
    store.set("key", json.dumps({"sha256": module._hash(data), "bytes": len(data), "parts": 1}))
    with pytest.raises(
        ExecutionError,
        match=r"rank 1: schedules of rank 0 \(key\): entries\[0\]: a schedule that is not correct: ",
    ):
        share_table(store, "key", 1, nobody_asks)


def test_a_forged_table_in_the_cache_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = ChunkCache(tmp_path)
    table = small_table()
    for text, found in ((forged().decode(), None), (table.to_bytes().decode(), table)):
        kept.put_json("key", text)
        assert synthesis._kept(kept, "key", table.topology, table.collective, Options()) == found
    (line,) = caplog.messages
    assert "a table is made anew: kept table" in line and "a schedule that is not correct: " in line
