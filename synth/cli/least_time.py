"""What `synth bound --size` says: the least time of a buffer, and what proves it."""

from __future__ import annotations

from dataclasses import dataclass

from arborcast.synth.certificate import Bound
from arborcast.synth.cli.console import Json
from arborcast.synth.collective import Collective
from arborcast.synth.topology import PLANNED, Topology


@dataclass(frozen=True, slots=True)
class LeastTime:
    """Keys for `--json`, and the same in words."""

    document: Json
    lines: list[str]


def least_time_at(topology: Topology, collective: Collective, found: Bound, size_bytes: int) -> LeastTime:
    """The least time by lines and, where they say more, by tolls.

    Args:
        topology: the fabric.
        collective: on it.
        found: the bound of its rate, above zero.
        size_bytes: of the buffer.
    """
    from arborcast.synth.bounds.layered_flows import why_no_tolls, with_least_time
    from arborcast.synth.bounds.time_limits import time_limit
    from arborcast.synth.formats.documents import tolls_to_document
    from arborcast.synth.formats.sizes import format_size
    from arborcast.synth.formats.words import every_schedule

    why = why_no_tolls(topology, collective)
    if size_bytes and why is None:
        found = with_least_time(topology, collective, found, size_bytes)
    least_us = float(time_limit(topology, collective, found).at(size_bytes))
    if found.times:
        (tolls,) = found.times
        passages = sum(len(flow.tolls) for flow in tolls.flows)
        over = f"{tolls.intervals} intervals of {float(tolls.step_us):.4g} us"
        within = f"{float(tolls.bytes):.0f} B in {float(tolls.time_us):.4g} us at most"
        how = f"tolls on {passages} passages in {over}: {within}"
    else:
        how = "latencies and the certificate of the rate"
    document: Json = {
        "size": size_bytes,
        "least_us": least_us,
        "times": [tolls_to_document(tolls, topology) for tolls in found.times],
    }
    if why is not None:
        document["why_no_tolls"] = why
        how += f" ({why})"
    said = f"{every_schedule(found)} takes at least {least_us:.4g} us"
    if topology.is_planned:
        said = f"{least_us:.4g} us by {PLANNED}"
    return LeastTime(document, [f"  at       {format_size(size_bytes)}: {said}", f"  by       {how}"])
