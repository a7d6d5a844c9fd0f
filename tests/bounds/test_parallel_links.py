"""Parallel links of unequal latency: each counts, is planned, simulated, written and read as itself."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import backends
from arborcast.synth.api import solve
from arborcast.synth.bounds import bound
from arborcast.synth.bounds.time_limits import time_limit
from arborcast.synth.certification.proven_rates import certified_rate
from arborcast.synth.collective import Collective
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.faults.faulty import without
from arborcast.synth.formats import topology_from_document, topology_to_document
from arborcast.synth.formats.schedules import schedule_from_document, schedule_to_document
from arborcast.synth.formats.topology_text import topology_to_yaml
from arborcast.synth.formats.yaml_text import parse_yaml
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.topology import Link, Topology
from arborcast.synth.verification.verifier import verify
from arborcast.topologies import load
from tests.support.commands import Command

KINDS = ("broadcast", "reduce", "allgather", "reduce-scatter", "allreduce", "alltoall")


@st.composite
def multigraphs(draw: st.DrawFn) -> list[Link]:
    """The links of 2 to 5 ranks in a circle both ways, most with others beside them, some ways across."""
    ranks = draw(st.integers(2, 5))
    pairs = {
        pair for rank in range(ranks) for pair in ((rank, (rank + 1) % ranks), ((rank + 1) % ranks, rank))
    }
    pairs |= draw(st.sets(st.sampled_from([(a, b) for a in range(ranks) for b in range(ranks) if a != b])))
    numbers = st.tuples(st.sampled_from([1, 2, 3, 100]), st.sampled_from([0, 1, 7, 100]))
    return [
        Link(*pair, Fraction(rate), Fraction(us))
        for pair in sorted(pairs)
        for rate, us in draw(st.lists(numbers, min_size=1, max_size=3))
    ]


def built(links: list[Link]) -> Topology:
    return Topology.build("drawn", 1 + max(link.src for link in links), links)


def merged(links: list[Link]) -> Topology:
    """What counts for rates alone: all links of a pair as one."""
    return built([replace(link, latency_us=Fraction(0)) for link in links])


@settings(max_examples=25)
@given(links=multigraphs(), kind=st.sampled_from(KINDS))
def test_rates_are_those_of_all_links_together(links: list[Link], kind: str) -> None:
    topology = built(links)
    collective = Collective.on(topology, kind)
    found = bound(topology, collective)
    assert found.rate == bound(merged(links), collective).rate
    assert found.rate == certified_rate(topology, collective, found.certificate)
    schedule = solve(topology, kind, method="routes" if kind == "alltoall" else "trees")
    assert schedule.rate == found.rate
    assert verify(schedule).correct


@settings(max_examples=40)
@given(links=multigraphs(), size=st.sampled_from([1, 1 << 10, 1 << 20]), seed=st.integers(0, 3))
def test_no_limit_of_time_is_above_what_can_be_done(links: list[Link], size: int, seed: int) -> None:
    """A message that goes whole along the quickest ways, by networkx over the links as they were drawn."""
    topology = built(links)
    ways = networkx.MultiDiGraph()
    for link in links:
        together = sum(x.bandwidth for x in links if (x.src, x.dst, x.latency_us) == _place(link))
        ways.add_edge(link.src, link.dst, weight=link.latency_us + size / (1000 * together))
    root = seed % topology.ranks
    arrival = networkx.single_source_dijkstra_path_length(ways, root)
    collective = Collective.on(topology, "broadcast", root=root)
    assert time_limit(topology, collective, bound(topology, collective)).at(size) <= max(arrival.values())


def _place(link: Link) -> tuple[int, int, Fraction]:
    return link.src, link.dst, link.latency_us


@settings(max_examples=25)
@given(links=multigraphs(), kind=st.sampled_from(KINDS), size=st.sampled_from([1, 1 << 12, 1 << 24]))
def test_nothing_is_simulated_below_the_limit(links: list[Link], kind: str, size: int) -> None:
    topology = built(links)
    collective = Collective.on(topology, kind)
    least = time_limit(topology, collective, bound(topology, collective)).at(size)
    for method in ("routes",) if kind == "alltoall" else ("trees", "ring"):
        try:
            schedule = solve(topology, collective, method=method)
        except InfeasibleError:  # no ring passes all ranks
            continue
        assert simulate(schedule, size).time_us >= float(least) * (1 - 1e-9)


def test_commands_show_the_links_alone(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "pair.yaml"
    beside = [
        f"{{between: [0, 1], bandwidth: {rate}, latency_us: {us}}}" for rate, us in ((100, 1), (1, 100))
    ]
    file.write_text(f"ranks: 2\nlinks: [{', '.join(beside)}]")
    shown = command("show", str(file), "--picture", str(tmp_path / "pair.svg")).out
    assert "2 ranks, 0 switches, 4 directed links" in shown
    assert "100+1" in shown
    said = command("bound", str(file), "broadcast").out
    assert "101 GB/s leave {0}" in said
    assert "forward" not in said
    (tmp_path / "again.json").write_text(command("show", str(file), "--json").out)
    assert load(str(tmp_path / "again.json")) == load(str(file))


def test_a_quick_link_beside_a_slow_one() -> None:
    """100 GB/s at 1 us beside 1 GB/s at 100 us: a kilobyte needs 1.01 us, and by the slow link 101."""
    pair = [
        Link(*ends, Fraction(rate), Fraction(us))
        for ends in ((0, 1), (1, 0))
        for rate, us in ((100, 1), (1, 100))
    ]
    topology = built(pair)
    collective = Collective.on(topology, "broadcast")
    limit = time_limit(topology, collective, bound(topology, collective))
    assert limit.at(1000) == 1 + Fraction(1000, 100_000)
    schedule = solve(topology, "broadcast", method="trees")
    assert schedule.rate == 101
    (quick,) = (index for index, transfer in enumerate(schedule.transfers) if not transfer.via)
    slow = schedule.transfers[1 - quick]
    assert topology.label(slow.via[0]) == "0-1 of 100 us"
    shares = [schedule.chunks[transfer.chunk].share for transfer in (schedule.transfers[quick], slow)]
    expected = max(1 + 1000 * shares[0] / 100_000, 100 + 1000 * shares[1] / 1_000)
    assert simulate(schedule, 1000).time_us == pytest.approx(float(expected))
    sends, receives = backends.lower(schedule, 101)  # a link of each kind carries its share to the other rank
    assert len(sends.operations) == len(receives.operations) == 2


@settings(max_examples=25)
@given(links=multigraphs())
def test_files_hold_the_links_as_they_were_given(links: list[Link]) -> None:
    topology = built(links)
    document = topology_to_document(topology)
    assert not document["switches"]
    given_places = {(link.src, link.dst, link.latency_us) for link in links}
    assert {(x["from"], x["to"], Fraction(x["latency_us"])) for x in document["links"]} == given_places
    assert topology_from_document(document, "f") == topology
    assert topology_from_document(parse_yaml(topology_to_yaml(topology), "f"), "f") == topology
    schedule = solve(topology, "broadcast", method="trees")
    assert schedule_from_document(schedule_to_document(schedule), "f") == schedule


@settings(max_examples=25)
@given(links=multigraphs(), data=st.data())
def test_a_fault_takes_all_links_of_a_pair(links: list[Link], data: st.DataObject) -> None:
    topology = built(links)
    gone = data.draw(st.sampled_from(sorted({(link.src, link.dst) for link in links})))
    lost = data.draw(st.sampled_from([[], [topology.ranks - 1]])) if topology.ranks > 2 else []
    left = without(topology, links=[gone], ranks=lost)
    assert {*left.topology.cables} == {
        link
        for link in topology.cables
        if {link.src, link.dst} != set(gone) and not {link.src, link.dst} & {*lost}
    }
    for link in left.topology.links:  # every vertex is told which one it was
        before = topology.bandwidth[left.kept[link.src], left.kept[link.dst]]
        assert before == link.bandwidth
