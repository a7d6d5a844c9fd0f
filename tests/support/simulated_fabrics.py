"""Fabrics that are known, and what `synth probe` would measure on them, with noise.

A fabric is said by what each flow passes: names of resources, each with a capacity. Rates are shared fairly,
found here by raising all of them together in small exact steps from one full resource to the next.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import permutations

from arborcast.backends.probe.measurements import Flow, Load, Measurements, Spread
from arborcast.backends.probe.plan import broad_loads, concurrent_loads, solo_rounds, targeted_loads


@dataclass
class Fabric:
    """Of each ordered pair what it passes, and how much of it there is (GB/s)."""

    ranks: int
    capacity: dict[str, Fraction] = field(default_factory=dict)
    passes: dict[Flow, list[str]] = field(default_factory=dict)
    latency_us: dict[Flow, float] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()

    def share(self, name: str, capacity: Fraction | int, flows: Iterable[Flow]) -> Fabric:
        self.capacity[name] = Fraction(capacity)
        for flow in flows:
            self.passes.setdefault(flow, []).append(name)
        return self

    def rates(self, flows: Iterable[Flow]) -> dict[Flow, Fraction]:
        growing, rates = set(flows), dict.fromkeys(flows, Fraction(0))
        while growing:
            users = {name: [flow for flow in growing if name in self.passes[flow]] for name in self.capacity}
            room = {
                name: (self.capacity[name] - sum(rates[flow] for flow in rates if name in self.passes[flow]))
                / len(users[name])
                for name in users
                if users[name]
            }
            step = min(room.values())
            for flow in growing:
                rates[flow] += step
            growing -= {flow for name, left in room.items() if left == step for flow in users[name]}
        return rates

    def measured(
        self, *, noise: float, seed: int = 0, repeats: int = 3, streams: bool = False
    ) -> Measurements:
        """What a probe finds where each single measurement is off by up to `noise`, relatively.

        With `streams` also how many flows of a rank go well at once.
        """
        chance = random.Random(seed)

        def blurred(value: float) -> Spread:
            return Spread.of(float(value) * (1 + chance.uniform(-noise, noise)) for _ in range(repeats))

        def ask(flows: Iterable[Flow]) -> dict[Flow, Spread]:
            return {flow: blurred(float(rate)) for flow, rate in self.rates(flows).items()}

        solo = {
            flow: spread
            for flows in solo_rounds(self.ranks, parallel=False)
            for flow, spread in ask(flows).items()
        }
        asked = broad_loads(self.ranks) + (concurrent_loads(self.ranks) if streams else [])
        loads = [Load(ask(flows)) for flows in dict.fromkeys(asked)]
        loads += [Load(ask(flows)) for flows in targeted_loads(solo, loads, slowed=0.2)]
        return Measurements(
            ranks=self.ranks,
            latency_us={flow: blurred(self.latency_us.get(flow, 10.0)) for flow in solo},
            solo=solo,
            loads=tuple(loads),
            hosts=self.hosts or ("host",) * self.ranks,
            transports=dict.fromkeys(solo, "sockets"),
        )


class Jammed(Fabric):
    """Where a rank that sends, or gets, more than `well` flows at once gets a third of each through."""

    well: int = 1

    def rates(self, flows: Iterable[Flow]) -> dict[Flow, Fraction]:
        flows = list(flows)
        ends = [Counter(flow[end] for flow in flows) for end in (0, 1)]
        return {
            flow: rate / (3 * max(out, into) if max(out, into) > self.well else 1)
            for flow, rate in super().rates(flows).items()
            for out, into in [(ends[0][flow[0]], ends[1][flow[1]])]
        }


def mesh(rates: dict[Flow, Fraction | int], ranks: int) -> Fabric:
    """A link of its own for each ordered pair."""
    fabric = Fabric(ranks)
    for flow in permutations(range(ranks), 2):
        fabric.share(f"link {flow}", rates[flow], [flow])
    return fabric


def star(ports_out: list[Fraction | int], ports_in: list[Fraction | int]) -> Fabric:
    """Each rank has one port for all that it sends and one for all that it gets."""
    ranks = len(ports_out)
    fabric = Fabric(ranks)
    for rank in range(ranks):
        others = [other for other in range(ranks) if other != rank]
        fabric.share(f"out {rank}", ports_out[rank], [(rank, other) for other in others])
        fabric.share(f"in {rank}", ports_in[rank], [(other, rank) for other in others])
    return fabric


def boxes(
    groups: list[list[int]], inside: int, uplink: int, *, ports: bool = False, named: bool = False
) -> Fabric:
    """Boxes with `inside` GB/s per pair (per port with `ports`) and one uplink each way of each box."""
    ranks = sum(map(len, groups))
    box = {rank: number for number, group in enumerate(groups) for rank in group}
    flows = list(permutations(range(ranks), 2))
    fabric = star([inside] * ranks, [inside] * ranks) if ports else Fabric(ranks)
    for flow in flows:
        source, destination = box[flow[0]], box[flow[1]]
        if source == destination and not ports:
            fabric.share(f"link {flow}", inside, [flow])
        fabric.latency_us[flow] = 10.0 if source == destination else 30.0
    for number in range(len(groups)):
        fabric.share(f"up {number}", uplink, [f for f in flows if box[f[0]] == number != box[f[1]]])
        fabric.share(f"down {number}", uplink, [f for f in flows if box[f[1]] == number != box[f[0]]])
    if named:
        fabric.hosts = tuple(f"host{box[rank]}" for rank in range(ranks))
    return fabric
