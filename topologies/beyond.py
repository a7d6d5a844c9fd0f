"""What machines of the catalog can do that schedules here do not use: said beside their bounds.

Here switches only forward. The NVSwitches of a DGX H100 also reduce and copy (NVLink SHARP), so that an
allreduce on the machine may be faster than the bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from arborcast.synth.topology import Topology


@dataclass(frozen=True, slots=True)
class Beyond:
    """Hardware that goes beyond the model.

    Attributes:
        hardware: its name.
        what: what it can do, in one line.
        allreduce: the GB/s that no allreduce on it exceeds, where that is known.
    """

    hardware: str
    what: str
    allreduce: Fraction | None = None


def nvlink_sharp(topology: Topology, ranks: int) -> Beyond:
    """What NVLink SHARP could give so many ranks of a DGX H100, or of a fragment of one.

    In a star of n ports of b GB/s each way, switches that only forward allow n / (2 (n - 1)) * b: in and out
    of every rank, all others' contributions to its part of the buffer and the sums of their parts must pass.
    A switch that adds up what its ports send and hands the sum to all of them needs each port once each way:
    b, which is also the limit, as the whole buffer must leave every rank. NCCL's NVLS, which reads sums and
    writes copies through the switch, moves 1 / n more: at most n / (n + 1) * b (both by our derivation).
    """
    what = "NVSwitches that also reduce and copy; here they only forward"
    rates = {link.bandwidth for link in topology.links}
    if len(topology.switches) != 1 or len(rates) != 1 or len(topology.links) != 2 * topology.ranks:
        return Beyond("NVLink SHARP", what)
    (rate,) = rates
    if ranks < 3:  # two ranks exchange at the rate of a port anyway
        return Beyond("NVLink SHARP", what, rate)
    reading = rate * ranks / (ranks + 1)
    measured = "; nccl-tests#212 tells of about 275" if ranks == 8 else ""
    return Beyond(
        "NVLink SHARP",
        f"{what}. An allreduce could reach {float(rate):.6g} GB/s, {float(reading):.6g} in the way of NCCL's "
        f"NVLS{measured}",
        rate,
    )
