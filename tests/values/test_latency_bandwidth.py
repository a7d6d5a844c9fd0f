"""The frontier between latency and rate on large fabrics: its points, its times, limits beside them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from arborcast.synth.api import approach
from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
from arborcast.synth.latency_bandwidth import latency_bandwidth, wire_latency_us
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Topology
from arborcast.topologies import load
from tests.support.commands import Command, refused

SIZES = (1 << 10, 1 << 16, 1 << 24)


def of_no_width(topology: Topology) -> Topology:
    """The same, on which bytes cost nothing that a test would see."""
    links = tuple(replace(link, bandwidth=link.bandwidth * 10**9) for link in topology.links)
    return replace(topology, links=links)


def found_on(spec: str, kind: str) -> tuple[AnySchedule, ...]:
    return (
        approach(load(spec), kind, form="implicit", options=SolveOptions(cache=False)).selection().schedules
    )


@pytest.mark.parametrize("spec", ["torus:3x4", "dgx-a100:boxes=2"])
def test_the_latency_of_a_schedule_is_its_time_for_no_bytes(spec: str) -> None:
    for schedule in found_on(spec, "allreduce"):
        wide = replace(schedule, topology=of_no_width(schedule.topology))
        latency_us = wire_latency_us(schedule)
        assert float(latency_us) == pytest.approx(simulate(wide, 1).time_us, abs=1e-3)
        if isinstance(schedule, ImplicitSchedule):
            assert wire_latency_us(schedule.expand()) == latency_us


@pytest.mark.parametrize("kind", ["allgather", "allreduce"])
def test_points_beat_all_candidates_and_keep_to_the_limits(kind: str) -> None:
    fabric = load("torus:3x4,bandwidth=25,latency=0.7")
    asked = approach(fabric, kind, form="implicit", options=SolveOptions(cache=False))
    found = latency_bandwidth(asked, SIZES)
    assert found.why_incomplete is None
    assert [each.size_bytes for each in found.sizes] == list(SIZES)
    assert found.points[-1].schedule.rate == max(point.schedule.rate for point in found.points)
    for point in found.points:
        assert point.latency_us >= found.limit.at(0)
        assert point.schedule.rate <= found.bound.rate
    for schedule in asked.selection().schedules:
        latency_us = wire_latency_us(schedule)
        assert any(
            point.latency_us <= latency_us and point.schedule.rate >= schedule.rate for point in found.points
        )
        for each in found.sizes:
            assert each.time_us <= simulate(schedule, each.size_bytes).time_us
            assert float(each.least_us) <= each.time_us * (1 + 1e-9)
    for each in found.sizes:
        assert simulate(found.points[each.point].schedule, each.size_bytes).time_us == each.time_us


def test_pareto_of_many_ranks_compares_latency_with_rate(command: Command) -> None:
    document = command("pareto", "hypercube:7", "allgather", "--json").document
    # Seven links in a row; 7 links of 1 GB/s into each rank, which lacks 127 of 128 parts.
    assert Fraction(document["bound"]["rate"]) == Fraction(7 * 128, 127)
    latencies = [point["latency_us"] for point in document["points"]]
    assert latencies == sorted(latencies)
    assert max(point["share_of_bound"] for point in document["points"]) == 1
    assert {each["point"] for each in document["sizes"]} <= set(range(len(latencies)))
    assert all(each["least_us"] <= each["time_us"] * (1 + 1e-9) for each in document["sizes"])


def test_pareto_of_many_ranks_refuses_what_only_a_search_knows(command: Command) -> None:
    refused(command("pareto", "hypercube:7", "allgather", "--max-steps", "7"), "--max-steps 7", "64 ranks")
