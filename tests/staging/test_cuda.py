"""The order in which the CUDA device asks torch for things; streams and events are drawn, no GPU is there."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from arborcast.backends.staging.cuda import CudaDevice
from arborcast.backends.staging.device import CopyDirection


class Drawn:
    """Torch's streams and events, which write down what they are asked for."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.current = self.stream("caller")

    def stream(self, name: str) -> Any:
        said = self.said

        class Stream:
            def wait_stream(self, other: Any) -> None:
                said.append(f"{name} follows {other}")

            def wait_event(self, event: Any) -> None:
                said.append(f"{name} waits for {event}")

            def record_event(self, event: Any = None) -> Any:
                said.append(f"{name} records")
                return Event(name)

            def synchronize(self) -> None:
                said.append(f"host waits for {name}")

            def __str__(self) -> str:
                return name

        class Event:
            def __init__(self, of: str) -> None:
                self.of = of

            def synchronize(self) -> None:
                said.append(f"host waits for the event of {self.of}")

            def __str__(self) -> str:
                return f"the event of {self.of}"

        return Stream()

    @contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        self.said.append(f"into {stream}")
        yield
        self.current = before


def test_a_copy_follows_the_call_and_is_done_when_its_event_is(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Drawn()
    names = iter(("call", "way in"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: drawn.stream(next(names)))
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: None)
    monkeypatch.setattr(torch.cuda, "stream", drawn.entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: drawn.current)
    device, done = CudaDevice(), queue.SimpleQueue[BaseException | None]()
    host, there = torch.zeros(4), torch.arange(4.0)
    with device.entering(there):
        device.copy(CopyDirection.IN, host, there, done.put)
        assert done.get(timeout=60) is None
    device.close()
    assert torch.equal(host, there)
    assert drawn.said == [
        "caller records",
        "call waits for the event of caller",
        "into call",
        "way in follows call",
        "into way in",
        "way in records",
        "host waits for the event of way in",
        "host waits for call",
    ]
