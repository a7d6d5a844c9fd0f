"""What the links really deliver, each alone and all at once, in payload bits per second.

One thread pumps all transfers, so that the measurement itself takes little of the processors. Links on
different wires are measured alone at the same time, as long as they are slow together.
"""

from __future__ import annotations

import selectors
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from arborcast.bench.emulation.machine import EmulationError, real_time
from arborcast.bench.emulation.network import MTU, Emulation
from arborcast.bench.emulation.plan import EmulationPlan
from arborcast.synth.topology import Hop

LEAST_ALONE = 0.9
"""Share of its nominal rate that a link must deliver alone for anything to be measured on it."""

LEAST_TOGETHER = 0.9
"""Share of what they deliver alone that all links must deliver at once for the processors to keep up."""

BATCH_BITS_PER_S = 1_000_000_000
"""Of links that are measured at the same time without being together: far below what one core pumps."""

LEAST_FRAMES = 30
"""That a measurement must see of the slowest link."""

_PATIENCE_S = 10.0
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
    emulation: Emulation, *, seconds: float = 0.15, settle_s: float = 0.1, passes: int = 3
) -> dict[str, dict[Hop, float]]:
    """Bits per second of payload of every link of the topology: `alone` and `together`.

    Args:
        emulation: the network.
        seconds: how long each measurement takes; longer on links that would pass few frames meanwhile.
        settle_s: what goes before it, until bursts are used up and the sender has found its pace.
        passes: how often each link is measured alone; the median counts. Links that seem too slow get as
            many more, since the machine may have been busy with something else.

    Raises:
        EmulationError: a link delivers nothing.
    """
    plan = emulation.plan
    links = [(link.src, link.dst) for link in plan.topology.links]

    def medians(batch: Sequence[Hop]) -> dict[Hop, float]:
        seen = [_measure(emulation, batch, seconds, settle_s) for _ in range(passes)]
        return {link: statistics.median(one[link] for one in seen) for link in batch}

    alone: dict[Hop, float] = {}
    with real_time():
        for batch in _batches(plan, links):
            alone |= medians(batch)
        for link in links:
            if alone[link] < LEAST_ALONE * plan.rate(*link):
                alone[link] = max(alone[link], medians([link])[link])
        return {"alone": {link: alone[link] for link in links}, "together": medians(links)}


def check_delivery(
    plan: EmulationPlan, found: Mapping[str, Mapping[Hop, float]], warn: Callable[[str], None]
) -> None:
    """Refuse links that do not deliver their rate, and warn where they do so only one by one.

    Args:
        plan: what the links should deliver.
        found: what `delivered` gave.
        warn: told in one line.

    Raises:
        EmulationError: a link delivers less than `LEAST_ALONE` of its rate alone; the worst one is named.
    """
    alone, together = found["alone"], found["together"]
    worst = min(alone, key=lambda link: alone[link] / plan.rate(*link))
    if alone[worst] < LEAST_ALONE * plan.rate(*worst):
        raise EmulationError(
            f"{_named(plan, worst)} delivers {_mbit(alone[worst])} alone, which must be at least "
            f"{LEAST_ALONE:g} of its {_mbit(plan.rate(*worst))}; lower rates, or a machine that does less "
            "besides, may help"
        )
    worst = min(together, key=lambda link: together[link] / alone[link])
    if together[worst] < LEAST_TOGETHER * alone[worst]:
        warn(
            f"warning: {_named(plan, worst)} delivers {_mbit(together[worst])} when all links are busy, less "
            f"than {LEAST_TOGETHER:g} of its {_mbit(alone[worst])} alone: the processors, not the links, may "
            "be the limit"
        )


def _named(plan: EmulationPlan, link: Hop) -> str:
    label = plan.topology.label
    return f"{plan.topology.name}: link {label(link[0])} -> {label(link[1])}"


def _mbit(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e6:.4g} Mbit/s"


def _batches(plan: EmulationPlan, links: Iterable[Hop]) -> Sequence[Sequence[Hop]]:
    """Links that share no wire, together no faster than `BATCH_BITS_PER_S` where they are several."""
    batches: list[list[Hop]] = []
    for link in links:
        for batch in batches:
            total = sum(plan.rate(*other) for other in (*batch, link))
            if total <= BATCH_BITS_PER_S and link[::-1] not in batch:
                batch.append(link)
                break
        else:
            batches.append([link])
    return batches


def _measure(emulation: Emulation, links: Sequence[Hop], seconds: float, settle_s: float) -> dict[Hop, float]:
    slowest = min(rate for link in links for rate in emulation.plan.rates(*link))
    seconds = max(seconds, LEAST_FRAMES * 8 * MTU / slowest)
    flows: list[_Flow] = []
    try:
        for link in links:
            for end in emulation.ends(*link):  # one by one, so that those before are closed if one fails
                flows.append(_open(emulation, link, end))
        _pump(emulation.plan, flows, seconds, settle_s)
        found = dict.fromkeys(links, 0.0)
        for each in flows:
            assert each.started is not None and each.ended is not None
            (first, before), (last, after) = each.started, each.ended
            found[each.link] += 8 * (after - before) / (last - first)
        return found
    finally:
        for each in flows:
            each.sender.close()
            each.receiver.close()


def _pump(plan: EmulationPlan, flows: Sequence[_Flow], seconds: float, settle_s: float) -> None:
    """Keep all links busy until each has been seen for so long."""
    room = bytearray(1 << 18)
    begin = time.perf_counter() + settle_s
    end = begin + seconds
    with selectors.DefaultSelector() as selector:
        for each in flows:
            selector.register(each.sender, selectors.EVENT_WRITE, each)
            selector.register(each.receiver, selectors.EVENT_READ, each)
        missing = len(flows)
        while missing:
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
                    missing -= 1
            if missing and time.perf_counter() > end + _PATIENCE_S:
                silent = next(each.link for each in flows if each.ended is None)
                raise EmulationError(f"{_named(plan, silent)} delivers nothing for {_PATIENCE_S:g} s")


def _open(emulation: Emulation, link: Hop, end: str) -> _Flow:
    src, dst = link
    sender = emulation.socket(src)
    try:
        with emulation.socket(dst) as listener:
            listener.bind((end, 0))
            listener.listen(1)
            listener.settimeout(_PATIENCE_S)
            sender.setblocking(False)
            sender.connect_ex(listener.getsockname())
            receiver, _ = listener.accept()
    except OSError as error:
        sender.close()
        raise EmulationError(f"{_named(emulation.plan, link)} carries nothing: {error}") from error
    receiver.setblocking(False)
    return _Flow(link, sender, receiver)
