"""Calls of a process group by groups of messages: over gloo in real processes, and how GPUs would be asked.

What the calls give stands in `group/test_group_operations`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from arborcast.backends import Options
from arborcast.backends.errors import ExecutionError
from arborcast.backends.p2p import carriers, run
from arborcast.backends.p2p.carriers import CudaCarrier
from tests.support.faults import (
    PATIENCE_S,
    RANKS,
    Ended,
    allreduce,
    check_failed,
    check_right,
    launch,
    signal_self,
)
from tests.support.ranks import Failure, run_ranks

GROUPED = {"ARBORCAST_P2P": "cpu", "ARBORCAST_METHOD": "trees", "ARBORCAST_DEADLINE": "100"}


def strike_at(number: int, strike: Any) -> None:
    """Have something happen before this process begins its group of messages of that number."""
    exchange, begun = run.exchange, []

    def counted(backend: Any, messages: Any) -> None:
        begun.append(backend)
        if len(begun) == number:
            strike()
        exchange(backend, messages)

    run.exchange = counted


def _failing(rank: int, size: int) -> tuple[list[Ended], int]:
    def fail() -> None:
        raise RuntimeError("the link has fallen off the bus")

    has_ended: list[str] = []
    carriers.HostCarrier.end = lambda self: has_ended.append("messages")  # type: ignore[method-assign]
    carriers.HostCarrier.entering = lambda self, tensor: leaving(has_ended)  # type: ignore[method-assign]
    first = allreduce(rank, size, count=5000)
    if rank == 1:
        strike_at(2, fail)
    has_ended.clear()
    calls = [first, allreduce(rank, size)]
    before_the_call = has_ended.index("call")
    return [*calls, allreduce(rank, size, count=5000)], before_the_call


@contextmanager
def leaving(has_ended: list[str]) -> Iterator[None]:
    """Notes when a call has ended, for which a device would be waited for."""
    try:
        yield
    finally:
        has_ended.append("call")


def test_a_message_that_fails_is_told_to_all_and_ends_the_group() -> None:
    for rank, result in enumerate(launch(_failing, environ=GROUPED, group_timeout_s=PATIENCE_S)):
        (first, second, third), ended_before = result
        assert ended_before, "messages end before anybody waits for the device"
        check_right(first)
        check_failed(second, f"rank {rank}: allreduce", "fallen off the bus" if rank == 1 else "rank ")
        check_failed(third, "an earlier call failed")


def _killed(rank: int, size: int) -> Ended:
    check_right(allreduce(rank, size, count=5000))
    if rank == 2:
        strike_at(2, signal_self(signal.SIGKILL))
    return allreduce(rank, size)


def test_a_rank_killed_between_groups_ends_the_call_of_all_others() -> None:
    results = launch(_killed, environ=GROUPED, group_timeout_s=PATIENCE_S)
    assert results[2] == Failure("killed", "ended without an answer")
    for rank in set(range(RANKS)) - {2}:
        check_failed(results[rank], f"rank {rank}: allreduce", "rank 2")


def _differ(rank: int, size: int, name: str, told: Sequence[Any]) -> None:
    options = Options(topology="full:2", **{name: told[rank]})
    dist.new_group(backend="synth", pg_options=options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "told"), [("p2p", ("off", "cpu")), ("kernel_below", (1024, 2048))])
def test_ranks_that_differ_are_refused(name: str, told: Sequence[Any]) -> None:
    import arborcast.torch_backend  # noqa: F401

    results = run_ranks(2, _differ, name, told, may_fail=True)
    assert all(isinstance(result, Failure) and name in result.message for result in results)


def _cuda(rank: int, size: int, p2p: str) -> None:
    dist.new_group(backend="synth", pg_options=Options(p2p=p2p))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("p2p", ["cuda", "kernel"])
def test_gpus_where_there_are_none_are_refused(p2p: str) -> None:
    message = f"p2p: {p2p} needs a GPU and NCCL or RCCL, and torch finds none"
    assert run_ranks(2, _cuda, p2p, may_fail=True) == [Failure("InputError", message)] * 2


class Drawn:
    """Torch's streams and events, and an NCCL, which write down what they are asked for."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.said: list[str] = []
        self.current = self.stream("caller")

    def stream(self, name: str) -> Any:
        said = self.said

        class Event:
            def query(self) -> bool:
                return f"{name} is through" in said

            def __str__(self) -> str:
                return f"what {name} has"

        class Stream:
            def wait_event(self, event: Any) -> None:
                said.append(f"{name} waits for {event}")

            def record_event(self) -> Any:
                said.append(f"{name} records")
                return Event()

            def synchronize(self) -> None:
                said.append(f"host waits for {name}")

            def __str__(self) -> str:
                return name

        return Stream()

    @contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        self.said.append(f"into {stream}")
        yield
        self.current = before

    def _start_coalescing(self) -> None:
        self.said.append("group begins")

    def _end_coalescing(self) -> Any:
        self.said.append("group ends")
        return self

    def send(self, tensors: Any, peer: int, tag: int) -> None:
        self.said.append(f"send {tensors[0].numel()} bytes to {peer}")

    def recv(self, tensors: Any, peer: int, tag: int) -> None:
        self.said.append(f"receive {tensors[0].numel()} bytes from {peer}")

    def wait(self) -> None:
        self.said.append(f"{self.current} waits for the group")

    def abort(self) -> None:
        self.said.append("abort")

    def _set_default_timeout(self, timeout: Any) -> None:
        self.said.append(f"{timeout.total_seconds():g} s")


def test_a_call_on_a_gpu_runs_on_a_stream_that_follows_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Drawn()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: drawn.stream("call"))
    monkeypatch.setattr(torch.cuda, "stream", drawn.entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: drawn.current)
    monkeypatch.setattr(carriers, "new_nccl", lambda store, rank, size, timeout: drawn)
    carrier, tensor = CudaCarrier(None, 0, 2), torch.arange(4.0)  # type: ignore[arg-type]
    for _ in range(2):
        with carrier.entering(tensor):
            run.exchange(carrier.backend(7), [("send", tensor, 1), ("recv", tensor[:2], 1)])
            is_done = carrier.mark(tensor)
            assert not is_done()
            drawn.said.append("call is through")
            assert is_done()
        assert drawn.said == [
            "caller records",
            "call waits for what caller has",
            "into call",
            "7 s",
            "group begins",
            "send 16 bytes to 1",
            "receive 8 bytes from 1",
            "group ends",
            "call waits for the group",
            "call records",
            "call is through",
            "host waits for call",
        ]
        drawn.said.clear()
    with carrier.entering(tensor):
        is_done = carrier.launch(lambda: drawn.said.append(f"kernel on {drawn.current}"), tensor)
        assert not is_done()
    begun = ["caller records", "call waits for what caller has", "into call"]
    assert drawn.said == [*begun, "kernel on call", "call records", "host waits for call"]
    drawn.said.clear()
    carrier.end()
    assert drawn.said == ["abort"]
    with pytest.raises(ExecutionError, match="the group has failed, and starts nothing more"):
        carrier.backend(7)
