"""How far are prices from what others measured? Every row of `topologies/published.tsv`, priced beside it.

Each row is priced with figures that are fitted to the rows of all other machines (`Fit`), so that none helps
to tell its own. Large buffers are priced at the limit of the rate on links as they are measured, the better
of switches that add and switches that only forward; small ones by simulation, a library's as its rings, or
across hosts the better of rings and trees by levels, at half of the rates (NCCL's protocol LL sends a flag
with every 4 bytes), a kernel's as the fastest schedule known. Results go to `bench/results/published.json`.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from arborcast.bench.harness.script import KEPT, command_line, keep
from arborcast.bench.page.console import print_results
from arborcast.synth.api import approach
from arborcast.synth.baselines import solve_baseline
from arborcast.synth.bounds import bound
from arborcast.synth.cli.console import print_lines
from arborcast.synth.collective import Collective, bandwidths
from arborcast.synth.errors import CollectiveError, InfeasibleError
from arborcast.synth.formats.results import Measure, document
from arborcast.synth.formats.sizes import parse_size
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.simulation.prices import CALL_US, PRICES, Price, effective, medium
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.topology import Topology
from arborcast.topologies import Rates, load
from arborcast.topologies.processors import crossing
from arborcast.topologies.published import Measurement, measurements

LARGE = 8 << 30
"""Bytes of a buffer whose size is not published but as large."""

PCIE = {"pcie", "pcie-root"}
_SOLD = {"efa", "efa1", "tcpx"}
_NETWORKS = {"infiniband", "ethernet", "slingshot", *_SOLD}

Prices = Mapping[str, Price]


@dataclass(frozen=True)
class Published(Measurement):
    """A row of the table, and what it costs by prices."""

    @property
    def machine(self) -> str:
        """Its name in the catalog, with its PCIe switches: all rows of it are left out together."""
        name, _, rest = self.spec.partition(":")
        return " ".join([name, *(word for word in rest.split(",") if word.startswith("switch="))])

    @property
    def boxes(self) -> int:
        """How many a network joins."""
        found = re.search(r"boxes[=:](\d+)", self.spec)
        return int(found[1]) if found else 1

    @property
    def is_large(self) -> bool:
        """Whether a rate was published, and no time."""
        return not self.time_us

    @property
    def bytes(self) -> int:
        """Of the buffer; the largest of a range."""
        return parse_size(self.last_size) if self.last_size else LARGE

    @cached_property
    def topology(self) -> Topology:
        """The machine as the catalog has it; where two sockets are known, with what joins these."""
        spec = self.spec
        if self.processors:
            vendor, family, model = self.processors.split()
            way = crossing("x86_64", vendor, int(family), int(model), Rates.DATASHEET)
            spec += f"{',' if ':' in spec else ':'}between={way.rate}"
        return load(spec, ranks=self.chosen)

    @cached_property
    def asked(self) -> Collective:
        """On those ranks."""
        return Collective.on(self.topology, self.collective)

    @cached_property
    def measured_us(self) -> float:
        """As it was published, or by the rate that was."""
        if self.time_us:
            return float(self.time_us)
        return self.bytes * float(self.busbw_of_one) / (1000 * float(self.busbw))

    @property
    def busbw_of_one(self) -> Fraction:
        """GB/s of busbw for each of algbw."""
        busbw = bandwidths(self.asked.kind, self.topology.ranks, 1000, 1.0)[1]
        return Fraction(busbw).limit_denominator(1 << 20)

    def rate(self, prices: Prices, *, adds: bool) -> Fraction:
        """The limit of the rate on measured links."""
        topology = effective(self.topology, adds=adds, prices=prices)
        if self.by == "ring":  # every NIC carries what each of its rings does: all but a share of the buffer
            is_between = [False] * topology.ranks + ["." not in switch.name for switch in topology.switches]
            sent = sum((link.bandwidth for link in topology.links if is_between[link.dst]), Fraction(0))
            return sent / self.boxes / self.busbw_of_one
        return bound(topology if adds else topology.forwarding, self.asked).rate

    @cached_property
    def adds(self) -> bool:
        """Whether switches add: as its source says, or where that is the faster way at today's prices."""
        if self.topology.forwarding is self.topology or self.by in {"forwarding", "copy", "ring"}:
            return False
        return self.by == "nvls" or self.rate(PRICES, adds=True) > self.rate(PRICES, adds=False)

    @cached_property
    def schedules(self) -> Sequence[AnySchedule]:
        """What may have been run."""
        if self.by == "kernel":
            return approach(self.topology, self.asked).selection().schedules
        found = []
        for name in ("ring", *(["levels"] if self.boxes > 1 else [])):
            try:
                found.append(solve_baseline(self.topology, self.asked, name))
            except (InfeasibleError, CollectiveError):
                continue  # no ring, or no boxes: the other one counts
        return found

    def priced_us(self, prices: Prices = PRICES) -> float:
        """What it costs on measured links."""
        call_us = 0.0 if self.by == "copy" else float(CALL_US)
        if self.is_large:
            ways = [self.adds] if self.by else [False, *([True] if self.adds else [])]
            rate = max(self.rate(prices, adds=adds) for adds in ways)
            return call_us + self.bytes / (1000 * float(rate))
        size = self.bytes if self.by else 2 * self.bytes
        return call_us + min(
            simulate(
                replace(one, topology=effective(one.topology, adds=one.uses_switches, prices=prices)), size
            ).time_us
            for one in self.schedules
        )

    @property
    def is_priced(self) -> bool:
        """Whether it is a call of usual speed; peer writes are none, and complaints are not."""
        return self.by != "slow" and (self.is_large or self.by != "copy")

    @cached_property
    def medium(self) -> str:
        """Whose price it tells: of boxes the network's, unless switches add; else of what is inside."""
        media = {medium(self.topology, link) or "" for link in self.topology.links} - {""}
        if self.is_large and self.adds:
            return min(media & {"nvlink4", "nvlink5"})
        return min(media & _NETWORKS or media - PCIE or media, default="")


def rows() -> list[Published]:
    """The table."""
    return [Published(**asdict(row)) for row in measurements()]


@dataclass(frozen=True)
class Told:
    """What a row alone says of a price: which figure of which medium, and how much."""

    machine: str
    medium: str
    figure: str
    value: float


def told(row: Published) -> Told | None:
    """What a row says: the part of the limit that it reached, or the price of a message that makes its time.

    The price of a message stands in the times of two prices, between and beyond which times are on a line.
    Kernels, which wait for few messages, tell nothing of it.
    """
    if not row.medium or not row.is_priced or (row.by and not row.is_large):
        return None
    if row.is_large:
        plain = {name: Price(Fraction(1), Fraction(1), Fraction(0), "") for name in PRICES}
        reached = (row.priced_us(plain) - (row.by != "copy") * float(CALL_US)) / row.measured_us
        return Told(row.machine, row.medium, "adds" if row.adds else "forwards", reached)
    price = PRICES[row.medium]
    times = [
        row.priced_us({**PRICES, row.medium: replace(price, message_us=price.message_us + more)})
        for more in (0, 1)
    ]
    if times[1] == times[0]:
        return None
    message_us = float(price.message_us) + (row.measured_us - times[0]) / (times[1] - times[0])
    return Told(row.machine, row.medium, "message_us", max(0.0, message_us))


def fit(found: Iterable[Told], without: str = "") -> Prices:
    """Medians over machines of their medians.

    Without a machine, where one other has its medium, the mean of that and of all media like it; where none
    has, that of these.
    """
    by: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in found:
        if one.machine != without:
            by[one.figure, one.medium][one.machine].append(one.value)
            by[one.figure, _like(one.medium)][f"{one.medium} {one.machine}"].append(one.value)

    def median(figure: str, name: str) -> Fraction | None:
        own, like = by.get((figure, name)), by.get((figure, _like(name)))
        found = [
            statistics.median(map(statistics.median, machines.values()))
            for machines in ([own] if own and (len(own) > 1 or not without) else [own, like])
            if machines
        ]
        if not found:
            return None
        value = statistics.mean(found)
        return Fraction(round(value, 3)).limit_denominator(1000)

    prices = {}
    for name, price in PRICES.items():
        forwards = median("forwards", name) or price.forwards
        adds = median("adds", name) if name in {"nvlink4", "nvlink5"} else None
        message_us = median("message_us", name)
        prices[name] = replace(
            price,
            forwards=forwards,
            adds=min(adds or forwards, forwards),
            message_us=price.message_us if message_us is None else message_us,
        )
    return prices


def _like(name: str) -> str:
    """Which media are alike: in a box, through processors, by verbs of InfiniBand, by a cloud's network."""
    if name in _SOLD or name == "pcie-root":
        return "cloud" if name in _SOLD else name
    return "verbs" if name in _NETWORKS else "inside"


KEYS = ("topology", "ranks", "processors", "collective", "bytes", "by", "source", "measured_us")
UNITS = {
    "measured_us": "us; of large buffers by the published busbw",
    "priced_us": "us, with figures fitted to all other machines",
    "priced_with_it_us": "us, with the figures of the product",
    "error": "priced over measured, less 1",
}


def judged(published: Sequence[Published]) -> list[dict[str, Any]]:
    """Each row with its prices."""
    found = [one for row in published if (one := told(row)) is not None]
    fitted: dict[str, Prices] = {}
    listed = []
    for row in published:
        if not row.is_priced:
            continue
        prices = fitted.setdefault(row.machine, fit(found, without=row.machine))
        priced_us = row.priced_us(prices)
        listed.append(
            {
                "topology": row.spec,
                "ranks": row.ranks,
                "processors": row.processors,
                "collective": row.collective,
                "bytes": row.bytes,
                "by": row.by,
                "source": row.source,
                "medium": row.medium,
                "adds": row.adds if row.is_large else None,
                "measured_us": row.measured_us,
                "priced_us": priced_us,
                "priced_with_it_us": row.priced_us(),
                "error": priced_us / row.measured_us - 1,
            }
        )
    return listed


def main() -> None:
    """Price every row, print it, write the results."""
    parser = command_line(__doc__, KEPT / "published.json")
    arguments = parser.parse_args()
    published = rows()
    listed = judged(published)
    errors = [abs(row["error"]) for row in listed]
    found = fit([one for row in published if (one := told(row)) is not None])
    question = "How far are prices from what others measured?"
    results = document(question, listed, keys=KEYS, measures={"priced_us": Measure("less")}, units=UNITS)
    print_results(results, "medium", "adds", "error")
    print_lines(
        [
            "",
            f"median error {statistics.median(errors):.1%}, {sum(error > 0.4 for error in errors)} of "
            f"{len(errors)} beyond 40 %",
            *(
                f"{name}: forwards {float(price.forwards):.3f}, adds {float(price.adds):.3f}, "
                f"message {float(price.message_us):.3g} us"
                for name, price in found.items()
            ),
        ]
    )
    keep(arguments.json, results)


if __name__ == "__main__":
    main()
