"""Hosts that vanish without a word, on emulated links: the switch between them drops what is for them."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from arborcast import topologies
from arborcast.backends import lower
from arborcast.backends.dataflow.engine import Engine
from arborcast.backends.dataflow.task_graph import compile_graph
from arborcast.backends.errors import ChannelClosedError, ExecutionError
from arborcast.backends.lowering.layout import Buffer
from arborcast.backends.tensors.torch_reduction import operator_of
from arborcast.backends.transport.fingerprint import CollectiveFingerprint
from arborcast.backends.transport.network import Network
from arborcast.backends.transport.silence import SilenceWatch, keep_asking, unheard_s
from arborcast.backends.transport.stream import StreamChannel
from arborcast.bench.emulation import machine, network
from arborcast.bench.emulation.plan import plan_emulation
from arborcast.bench.emulation.processes import run_inside
from arborcast.synth.collective import Kind
from tests.support.drawn_schedules import ring_allreduce

LARGE = 16 << 20  # elements: many times what sockets hold


def reduced(engine: Engine, count: int, sequence: int) -> None:
    graph = compile_graph(lower(ring_allreduce(2), count, pieces=4)[engine.rank])
    opening = CollectiveFingerprint(sequence, count, -1, Kind.ALLREDUCE, "float32 sum", b"schedule")
    operator = operator_of(dist.ReduceOp.SUM, torch.float32)
    engine.run(graph, {Buffer.OUTPUT: torch.ones(count)}, opening, operator)


def cut(switch: str, victims: list[str]) -> None:
    """From now on the switch drops what is for these addresses, and says so to nobody."""

    def inside() -> None:
        machine.enter(switch)
        machine.Namespace(os.open("/proc/thread-self/ns/net", os.O_RDONLY)).batch(
            "ip", [f"route replace blackhole {victim}/32" for victim in victims]
        )

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()


def ends_in_silence(rank: int, address: str, store: str, switch: str, how: str) -> str:
    """What the call says that is in flight, or is waited for in vain, when the way is cut."""
    shared = dist.FileStore(store, 2)
    joined = Network(shared, rank, 2, timeout_s=90, lost_after_s=1)
    joined.connect({1 - rank})
    engine = Engine(rank, joined, timeout_s=1000, lost_after_s=1)
    reduced(engine, 1000, 0)
    shared.set(f"address {rank}", address)
    stopped = threading.Event()
    try:
        if how == "stop" and rank == 1:  # then its kernel goes on to answer for it
            shared.set("pid", str(os.getpid()))
        elif how == "stop":
            pid = int(shared.get("pid"))
            os.kill(pid, signal.SIGSTOP)

            def go_on() -> None:
                os.kill(pid, signal.SIGCONT)
                stopped.set()

            threading.Timer(6, go_on).start()
        elif rank == 0:
            victims = [shared.get(f"address {other}").decode() for other in range(2)]
            threading.Timer(0.2, lambda: cut(switch, victims)).start()
        elif how == "idle":
            shared.wait(["ended"])
            return ""
        if how == "idle":
            reduced(engine, 1000, 1)  # whose other half never comes
        for sequence in range(1, 2 if how == "stop" else 10_000):
            reduced(engine, LARGE, sequence)
    except ExecutionError as error:
        return str(error)
    finally:
        if how == "idle":
            shared.set("ended", "")
        if how == "stop" and rank == 0:
            stopped.wait()
    return "went on"


@pytest.mark.skipif(machine.why_not() is not None, reason="needs root and iproute2")
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("in flight", ["rank 1 has acknowledged nothing for 1 s", "rank 0 has acknowledged nothing for 1 s"]),
        pytest.param("idle", ["rank 1 has acknowledged nothing for 1 s", ""], marks=pytest.mark.long),
        # TCP_USER_TIMEOUT would end this: the window is closed for longer than a lost host is waited for.
        pytest.param("stop", ["went on", "went on"], marks=pytest.mark.long),
    ],
)
def test_a_way_that_is_cut_is_noticed_in_time_and_a_stopped_rank_is_waited_for(
    how: str, said: list[str]
) -> None:
    with network.emulate(plan_emulation(topologies.load("star:2"), 1000)) as emulation:
        found = run_inside(emulation, ends_in_silence, emulation.path(2), how, timeout_s=90)
    for one, expected in zip(found, said, strict=True):
        assert expected in one


def test_a_probe_on_its_way_to_a_peer_that_was_not_asked_for_long_is_no_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    ours, theirs = socket.socketpair()
    channel = StreamChannel(ours, 7)
    watch = SilenceWatch(8)
    silence = iter([9.0, 9.02, 0.0, 9.0, 9.5, 10.1])
    monkeypatch.setattr(channel, "unheard_s", lambda: next(silence))
    for now in (100, 100.02, 100.04, 200, 200.5):  # noqa: B007 - `monotonic` gives it
        watch.look({7: channel})
    now = 201.1
    with pytest.raises(ChannelClosedError, match=r"rank 7 has acknowledged nothing for 8 s: its host or the"):
        watch.look({7: channel})
    channel.close()
    theirs.close()


def test_connections_within_a_host_and_those_that_answer_are_never_silent() -> None:
    pair = socket.socketpair()
    keep_asking(pair[0], 5)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as tcp,
    ):
        accepted = server.accept()[0]
        keep_asking(tcp, 3)
        assert tcp.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        keep_asking(accepted, 0)
        assert not accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert unheard_s(pair[0]) == unheard_s(tcp) == 0.0
    assert unheard_s(tcp) == 0.0
    for sock in (*pair, accepted):
        sock.close()
