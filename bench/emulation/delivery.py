"""What the links really deliver, each alone and all at once, in payload bytes per second.

One thread pumps all transfers, so that the measurement itself takes little of the processors.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass

from bench.emulation.network import Emulation
from synth.topology import Hop

_CHUNK = bytes(1 << 18)


@dataclass
class _Flow:
    link: Hop
    sender: socket.socket
    receiver: socket.socket
    received: int = 0
    started: tuple[float, int] | None = None
    ended: tuple[float, int] | None = None


def delivered(
    emulation: Emulation, *, seconds: float = 0.5, settle_s: float = 0.25
) -> dict[str, dict[Hop, float]]:
    """Bits per second of payload of every link of the topology: `alone` and `together`.

    Args:
        emulation: the network.
        seconds: how long each measurement takes.
        settle_s: what goes before it, until buffers are full and the sender has found its pace.
    """
    links = [(link.src, link.dst) for link in emulation.plan.topology.links]
    alone: dict[Hop, float] = {}
    for link in links:
        alone |= _measure(emulation, [link], seconds, settle_s)
    return {"alone": alone, "together": _measure(emulation, links, seconds, settle_s)}


def _measure(emulation: Emulation, links: Iterable[Hop], seconds: float, settle_s: float) -> dict[Hop, float]:
    flows = [_open(emulation, link) for link in links]
    selector = selectors.DefaultSelector()
    try:
        for each in flows:
            selector.register(each.sender, selectors.EVENT_WRITE, each)
            selector.register(each.receiver, selectors.EVENT_READ, each)
        begin = time.perf_counter() + settle_s
        end = begin + seconds
        room = bytearray(1 << 18)
        while any(each.ended is None for each in flows):
            for key, _ in selector.select(0.1):
                flow: _Flow = key.data
                if key.events == selectors.EVENT_WRITE:
                    flow.sender.send(_CHUNK)
                    continue
                flow.received += flow.receiver.recv_into(room)
                now = time.perf_counter()
                if flow.started is None and now >= begin:
                    flow.started = now, flow.received
                elif flow.started is not None and flow.ended is None and now >= end:
                    flow.ended = now, flow.received
        found = {}
        for each in flows:
            assert each.started is not None and each.ended is not None
            (first, before), (last, after) = each.started, each.ended
            found[each.link] = 8 * (after - before) / (last - first)
        return found
    finally:
        selector.close()
        for each in flows:
            each.sender.close()
            each.receiver.close()


def _open(emulation: Emulation, link: Hop) -> _Flow:
    src, dst = link
    with emulation.socket(dst) as listener:
        listener.bind((emulation.plan.address(dst), 0))
        listener.listen(1)
        listener.settimeout(10)
        sender = emulation.socket(src)
        sender.setblocking(False)
        sender.connect_ex(listener.getsockname())
        receiver, _ = listener.accept()
    receiver.setblocking(False)
    return _Flow(link, sender, receiver)
