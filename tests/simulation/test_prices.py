"""Prices tell times and choose; they change no bound, are above the times of links, and cover the catalog."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from arborcast import synth
from arborcast.synth.api import approach
from arborcast.synth.bounds.time_limits import time_limit
from arborcast.synth.collective import Collective
from arborcast.synth.simulation import prices
from arborcast.synth.simulation.prices import CALL_US, PRICES, effective, is_priced, medium
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.topology import Hop, Topology
from arborcast.topologies import load
from arborcast.topologies.catalog import catalog

BOXED = ("boxes=2", "nodes=2")
NEEDED = {"tpu-v4": "4x4x4", "tpu-v5p": "2x2x1", "tpu-7x": "4x4x4", "tpu-v5e": "4x4", "tpu-v6e": "4x4"}
NEEDED |= {"dgx-spark": "sparks=3", "mac-studio": "macs=3"}


def products() -> list[str]:
    """A spec of every machine that is sold, of several boxes where it can be."""
    specs = []
    for entry in catalog():
        if entry.vendor:
            several = {"boxes": "boxes=2", "nodes": "nodes=2"}
            words = [several[each.key] for each in entry.parameters if each.key in several]
            words = [NEEDED[entry.name]] if entry.name in NEEDED else words
            specs.append(":".join([entry.name, *words]))
    return specs


@pytest.mark.parametrize("spec", products())
def test_every_link_of_the_catalog_has_a_medium(spec: str) -> None:
    topology = load(spec)
    unknown = [link for link in topology.links if medium(topology, link) is None]
    assert (spec.partition(":")[0] == "mac-studio") == bool(unknown)


@pytest.mark.parametrize("spec", ["torus:4x4", "full:4", "star:4", "fat-tree:2x2x2", "ring:5"])
def test_what_is_no_machine_has_no_prices(spec: str) -> None:
    topology = load(spec)
    schedule = synth.solve(topology, "allreduce")
    assert not is_priced(topology)
    assert simulate(schedule, 1 << 20, priced=True) == simulate(schedule, 1 << 20)


def waits(topology: Topology, way: list[Hop]) -> Fraction:
    """What the links of a way add to their own latencies."""
    measured = effective(topology)
    return sum((measured.latency_us[hop] - topology.latency_us[hop] for hop in way), Fraction(0))


def test_a_message_pays_once_for_each_medium() -> None:
    boxes, pcie, mesh = load("p5:boxes=2"), load("pro6000:switch=4"), load("mi300x")
    across = boxes.ranks + 2  # two NVSwitches, then the fabric
    assert waits(boxes, [(0, across), (across, 8)]) == PRICES["efa"].message_us
    under, over = pcie.ranks, pcie.ranks + 2  # two PCIe switches, then two sockets
    assert waits(pcie, [(0, under), (under, 1)]) == PRICES["pcie"].message_us
    farthest = [(0, under), (under, over), (over, over + 1), (over + 1, under + 1), (under + 1, 7)]
    assert waits(pcie, farthest) == PRICES["pcie"].message_us
    assert waits(mesh, [(0, 1)]) == PRICES["xgmi"].message_us
    leaves = load("perlmutter:nodes=32")
    names = {switch.name: vertex for vertex, switch in enumerate(leaves.switches, leaves.ranks)}
    first, second = names["group0.switch0"], names["group0.switch4"]
    assert waits(leaves, [(0, first), (first, second), (second, 64)]) == PRICES["slingshot"].message_us


@pytest.mark.parametrize("spec", ["dgx1", "dgx-a100", "dgx-h100", "mi300x", "pro6000:gpus=4,sockets=1"])
@pytest.mark.parametrize("size", [8, 1 << 20])
def test_a_price_is_above_the_time_of_links(spec: str, size: int) -> None:
    schedule = synth.solve(load(spec), "allreduce")
    assert simulate(schedule, size, priced=True).time_us >= simulate(schedule, size).time_us + float(CALL_US)


def test_no_price_changes_a_bound_or_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = load("dgx-h100")
    asked = Collective.on(topology, "allreduce")

    def proved() -> tuple[Fraction, Fraction, Fraction]:
        limit, found = synth.bound(topology, asked), synth.solve(topology, asked)
        return limit.rate, found.rate, time_limit(topology, asked, found.bound).at(1 << 20)

    before, price = proved(), simulate(synth.solve(topology, asked), 1 << 20, priced=True).time_us
    halves = {
        name: replace(each, forwards=each.forwards / 2, adds=each.adds / 2) for name, each in PRICES.items()
    }
    monkeypatch.setattr(prices, "PRICES", halves)
    monkeypatch.setattr(effective, "__kwdefaults__", {"adds": False, "prices": halves})
    assert proved() == before
    assert simulate(synth.solve(topology, asked), 1 << 20, priced=True).time_us > price


@pytest.mark.parametrize(
    ("machine", "ranks"), [("dgx-h200", 4), ("dgx-h200", 5), ("dgx-b200", 5), ("dgx-b200", 6)]
)
def test_switches_add_from_as_many_ranks_as_in_nccl(machine: str, ranks: int) -> None:
    """Of NCCL (ml-engineering, network): rings on 4 of 8 H200 and 5 of 8 B200; with one more switches add."""
    topology = load(machine, ranks=range(ranks))
    found = approach(topology, "allreduce").selection()
    assert found.fastest(8 << 30).uses_switches == (ranks > {"dgx-h200": 4, "dgx-b200": 5}[machine])


def test_planning_rates_are_no_data_sheets() -> None:
    assert not is_priced(load("dgx-h100", rates="nccl"))
