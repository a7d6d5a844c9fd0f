"""What real machines take: the part of a link's rate that is reached, and what messages and calls cost.

Bounds, rates and plain simulations know links alone, at the rates of data sheets, and no machine is as fast.
A price is the time of the same simulation on the same topology, with links as fast and as slow to begin as
they were measured to be, plus what a call costs (`at_prices`). Prices choose between schedules and tell
times. They prove nothing: no bound and no rate is made of one.

What a link is made of is told by names: that of a switch at one of its ends, or that of the machine in the
catalog. Of links whose medium is unknown the topology's own numbers count, and a topology of which no link is
known has no prices: its times are those of its links, as `synth probe` or its file has them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
from arborcast.synth.topology import Link, Topology, Vertex

CALL_US = Fraction(9, 2)
"""From the launch of a kernel to its first message, and from the last one to its end: what is left of a
kernel by hand on 4 to 32 GPUs (5 to 8 us) and of a library's rings (13 us on 8 H100) without their steps."""


@dataclass(frozen=True, slots=True)
class Price:
    """What is measured of a medium.

    Attributes:
        forwards: the part of its links' rate that messages reach.
        adds: the same of schedules in which switches add and multicast.
        message_us: what a message that crosses it takes beside the latencies of links: its flag, who waits
            for that, and the software of a network.
        source: of whose measurements in `topologies/published.tsv` these are the medians.
    """

    forwards: Fraction
    adds: Fraction
    message_us: Fraction
    source: str


def _price(forwards: str, adds: str, message_us: str, source: str) -> Price:
    return Price(Fraction(forwards), Fraction(adds or forwards), Fraction(message_us), source)


PRICES: Mapping[str, Price] = {
    "nvlink": _price("0.78", "", "0.1", "A100"),
    "nvlink4": _price("0.81", "0.67", "0.1", "H20, H100, H200, H800"),
    "nvlink5": _price("0.75", "0.56", "0.1", "B200 and racks of GB200, where it is 0.60 and 0.47 that add"),
    "nvlink-bridge": _price("0.78", "", "0.1", "none: as NVLink"),
    "xgmi": _price("0.74", "", "0.2", "MI250, MI250X, MI300X"),
    "ici": _price("0.75", "", "0.2", "TPU v5p and v6e: 0.92 by hand, 0.59 by XLA; messages as xGMI"),
    "neuronlink": _price("0.75", "", "0.2", "none: as ICI"),
    "gaudi": _price("0.97", "", "0.2", "Gaudi 3; messages as xGMI"),
    "pcie": _price("0.65", "", "1.1", "RTX PRO 6000 on PCIe switches: 0.74 and 0.56"),
    "pcie-root": _price("0.54", "", "1.1", "RTX 5090, RTX PRO 6000 at their processors; messages as above"),
    "infiniband": _price("0.90", "", "6", "clusters of V100, A100 and GB200; messages between two A100"),
    "ethernet": _price("0.90", "", "13", "clusters of MI300X and MI350X, DGX Spark"),
    "efa1": _price("0.84", "", "38", "p4d"),
    "efa": _price("0.88", "", "23", "p5, p5en, p6-b200"),
    "tcpx": _price("0.90", "", "57", "A3 Mega"),
    "slingshot": _price("0.90", "", "10", "none: as InfiniBand and Ethernet"),
}
"""By medium; `bench/published.py` prints what each is fitted to, and a test keeps them near it."""

_INSIDE = {
    "nvlink": "dgx1 dgx1-p100 ndv2 perlmutter leonardo juwels-booster jupiter",
    "nvlink-bridge": "rtx3090 a6000 a100-pcie h100-pcie h100-nvl",
    "xgmi": "mi250 mi300a mi300x mi325x mi350x mi355x frontier ndv5-mi300x oci-mi300x",
    "ici": "tpu-v4 tpu-v5p tpu-7x tpu-v5e tpu-v6e",
    "neuronlink": "trn1 trn1n trn2 trn2-ultra",
    "gaudi": "gaudi2 gaudi3",
    "ethernet": "dgx-spark",
}
_BETWEEN = {
    "efa1": "p4d",
    "efa": "p5 p5en p6-b200 p6-b300 trn1 trn1n trn2 trn2-ultra",
    "tcpx": "a3-high a3-mega",
    "ethernet": "a3-ultra a4 a4x oci-a100 oci-h100 oci-h200 oci-b200 oci-mi300x mi300x mi325x mi350x mi355x "
    "gaudi2 gaudi3 dgx-spark",
    "slingshot": "frontier perlmutter mi300a",
    "infiniband": "dgx1 dgx1-p100 dgx2 dgx-a100 dgx-h100 dgx-h200 dgx-b200 dgx-b300 hgx-a800 hgx-h800 "
    "hgx-h20 gb200-nvl72 gb300-nvl72 leonardo juwels-booster jupiter ndv2 ndv4 ndv5 ndv5-h200 ndv5-mi300x "
    "ndv6-gb200 mi250 boxes",
}
_OF_INSIDE = {name: medium for medium, names in _INSIDE.items() for name in names.split()}
_OF_BETWEEN = {name: medium for medium, names in _BETWEEN.items() for name in names.split()}
"""What joins accelerators without a switch, and what joins boxes, by the names of the catalog."""

_FASTEST_NVLINK3, _FASTEST_NVLINK4 = 300, 500
"""GB/s each way of one GPU: 300 of Ampere, 450 of Hopper, 900 from Blackwell on. From Hopper on switches add,
those of the H800 at 200 GB/s, too."""


def medium(topology: Topology, link: Link) -> str | None:
    """The medium of a link, a key of `PRICES`; None where it is unknown."""
    machine = re.split(r"[:\[]", topology.name, maxsplit=1)[0]
    ends = [end for end in (link.src, link.dst) if topology.is_switch(end)]
    kinds = [_kind(topology, end) for end in ends]
    if "nvlink" in kinds:
        if link.bandwidth > _FASTEST_NVLINK4:
            return "nvlink5"
        is_able = topology.switches[ends[0] - topology.ranks].is_able
        return "nvlink4" if is_able or link.bandwidth > _FASTEST_NVLINK3 else "nvlink"
    if kinds and set(kinds) == {"pcie"}:
        return "pcie" if any("pcie" in switch.name for switch in topology.switches) else "pcie-root"
    return (_OF_BETWEEN if kinds else _OF_INSIDE).get(machine)


def _kind(topology: Topology, switch: Vertex) -> str:
    """By the last word of its name "nvlink" or "pcie", "" for a switch of a network."""
    last = str(topology.label(switch)).rpartition(".")[2].rstrip("0123456789")
    return {"nvswitch": "nvlink", "pcie": "pcie", "cpu": "pcie"}.get(last, "")


def effective(topology: Topology, *, adds: bool = False, prices: Mapping[str, Price] = PRICES) -> Topology:
    """The topology with links as they are measured; itself where it has no prices.

    A message pays once for each medium that it crosses: half at the link into its switches and half at the
    link out of them, or all of it where there are none.

    Args:
        topology: the fabric.
        adds: whether it is for schedules in which switches add and multicast.
        prices: by medium.
    """
    if topology.is_planned:  # NCCL's planning rates are what it expects to reach
        return topology
    return _effective(topology, adds, tuple(prices.items())) or topology


@lru_cache(maxsize=16)  # all candidates of a selection are priced on one fabric
def _effective(topology: Topology, adds: bool, prices: tuple[tuple[str, Price], ...]) -> Topology | None:
    """As `effective`; None where it has no prices."""
    by_medium = dict(prices)
    links = tuple(_measured(topology, link, adds, by_medium) for link in topology.links)
    return None if links == topology.links else replace(topology, links=links)


def _measured(topology: Topology, link: Link, adds: bool, prices: Mapping[str, Price]) -> Link:
    name = medium(topology, link)
    if name is None:
        return link
    price, plain = prices[name], name.rstrip("45").removesuffix("-root")
    kind = plain if plain in {"nvlink", "pcie"} else ""
    outer = sum(not topology.is_switch(end) or _kind(topology, end) != kind for end in (link.src, link.dst))
    return replace(
        link,
        bandwidth=link.bandwidth * (price.adds if adds else price.forwards),
        latency_us=link.latency_us + price.message_us * outer / 2,
    )


def at_prices(schedule: AnySchedule) -> tuple[AnySchedule, float]:
    """The schedule on links as they are measured, and what its call costs in us beside."""
    topology = effective(schedule.topology, adds=schedule.uses_switches)
    if topology is schedule.topology:
        return schedule, 0.0
    on_these = replace(schedule, topology=topology)
    origin = None if isinstance(schedule, ImplicitSchedule) else schedule.expanded_from
    if origin is not None:  # the same links for both, so that it still stands for what was written out
        object.__setattr__(on_these, "expanded_from", replace(origin, topology=topology))
    return on_these, float(CALL_US)


def is_priced(topology: Topology) -> bool:
    """Whether the medium of some link is known."""
    return effective(topology) is not topology
