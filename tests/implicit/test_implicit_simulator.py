"""The run on orbits of links against the run of the whole schedule, piece by piece and link by link."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.simulation.simulator import Runs, simulate, sweep, timeline
from arborcast.synth.simulation.timing import Occupation
from arborcast.synth.topology import Link, Topology
from tests.support.drawn_implicit import KINDS, circulants, hub, parts, translated

SIZES = (1 << 10, 1 << 20, 1 << 27)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_equal_to_the_whole_run_where_no_translation_keeps_a_link(data: st.DataObject) -> None:
    topology = data.draw(circulants(latency_us=data.draw(st.sampled_from(["0", "1/2", "3"]))))
    kind = data.draw(st.sampled_from(KINDS))
    schedule = translated(topology, kind, seed=data.draw(st.integers(0, 99)), shares=data.draw(parts()))
    whole = replace(schedule.expand())  # which forgets its representatives
    size, pieces = data.draw(st.integers(1, 1 << 24)), data.draw(st.sampled_from([None, 1, 2, 5]))
    assert simulate(schedule, size, pieces=pieces) == simulate(whole, size, pieces=pieces)
    assert simulate(schedule.expand(), size, pieces=pieces) == simulate(whole, size, pieces=pieces)
    first_come = simulate(schedule, size, pieces=pieces, service="fifo")
    assert first_come == simulate(whole, size, pieces=pieces, service="fifo")
    if pieces is not None:
        passing = timeline(whole, size, pieces=pieces)
        for hop, seen in timeline(schedule, size, pieces=pieces).items():
            assert set(seen) == set(passing[hop])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["dgx-a100:boxes=2", "mi250:boxes=2"])
def test_equal_on_fabrics_where_no_translation_keeps_a_link(spec: str, kind: Kind) -> None:
    schedule = translated(topologies.load(spec), kind, seed=2)
    whole = replace(schedule.expand())  # which forgets its representatives
    for pieces in (1, 3):
        assert sweep(schedule, SIZES, pieces=pieces) == sweep(whole, SIZES, pieces=pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_the_whole_run_where_able_switches_only_pass_frames_on(kind: Kind) -> None:
    schedule = translated(topologies.load("dgx-h100:boxes=2"), kind, seed=2)
    whole, expanded = replace(schedule.expand()), schedule.expand()
    assert Runs(expanded).hops.images == schedule.translations.order > 1
    assert sweep(expanded, SIZES[:2]) == sweep(whole, SIZES[:2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("spec", "most"),
    [
        ("fat-tree:2x2x4", "0.17"),
        pytest.param("fat-tree:2x4x8", "0.05", marks=pytest.mark.long),
        ("dragonfly:3x2x2", "0.07"),
        ("hub", "0"),
    ],
)
def test_what_serves_images_as_one_costs(spec: str, most: str, kind: Kind) -> None:
    """Never less than the whole run here, and at most so much more, the most where pieces are few."""
    topology = hub(5) if spec == "hub" else topologies.load(spec)
    schedule = translated(topology, kind, seed=1)
    whole = replace(schedule.expand())  # which forgets its representatives
    for pieces in (1, 8):
        for coarse, exact in zip(
            sweep(schedule, SIZES, pieces=pieces), sweep(whole, SIZES, pieces=pieces), strict=True
        ):
            # Written out it is never run by its representatives.
            assert sweep(schedule.expand(), [exact.bytes], pieces=pieces) == (exact,)
            assert 1 <= coarse.time_us / exact.time_us <= 1 + float(most)
            assert coarse.algbw <= float(schedule.rate)


@pytest.mark.parametrize("service", ["random", "worst:3", "engine", "engine-worst:2"])
def test_orders_that_tell_the_links_of_an_orbit_apart_are_refused(service: str) -> None:
    schedule = translated(shared_trunk(), Kind.ALLGATHER)
    with pytest.raises(InputError, match="implicit form is simulated with priority or fifo"):
        simulate(schedule, 4000, service=service)
    assert simulate(schedule.expand(), 4000, service=service).time_us > 0


def test_images_that_share_a_link_are_served_as_one() -> None:
    schedule = translated(shared_trunk(), Kind.ALLGATHER)
    # Half of 4000 bytes at 1 GB/s up, then both halves over the trunk at 1 GB/s as one, then down.
    assert simulate(schedule, 4000, pieces=1).time_us == 2 + 4 + 2
    assert timeline(schedule, 4000, pieces=1)[2, 3] == (Occupation(2, 4, 0, 0), Occupation(4, 6, 1, 0))
    # Written out, chunk 0 goes down while chunk 1 is on the trunk, but chunk 1 is the last all the same.
    assert simulate(schedule.expand(), 4000, pieces=1).time_us == 2 + 4 + 2


def shared_trunk() -> Topology:
    """Two ranks that send into one switch and receive from another, with a trunk between the two."""
    links = [Link(src, dst, Fraction(1)) for src, dst in ((0, 2), (1, 2), (2, 3), (3, 0), (3, 1))]
    return Topology.build("trunk", 2, links, ["in", "out"], [[1, 0, 2, 3]])


def test_thousands_of_ranks_are_cut_into_pieces_like_a_few() -> None:
    large = translated(topologies.load("ring:512"), Kind.ALLGATHER)
    # 512 chunks pass 511 links each: written out, 1 << 20 passages allow 4 pieces.
    assert simulate(large, 1 << 30).pieces == 64
    assert simulate(large, 1 << 30, max_pieces=4).pieces == 4
    assert simulate(large, 1 << 30, min_piece_bytes=1 << 20).pieces == 2
