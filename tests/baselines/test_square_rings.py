"""Rings of square tori: drawn, link-disjoint, and the same in both forms."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from arborcast import synth, topologies
from arborcast.synth.baselines import solve_baseline
from arborcast.synth.baselines.square_rings import implicit_square_rings, square_rings
from arborcast.synth.bounds import bound
from arborcast.synth.collective import Collective
from arborcast.synth.symmetry.translation_search import translations_of
from arborcast.synth.topology import Topology


def test_a_ring_as_drawn() -> None:
    fabric = topologies.load("torus:4x4")
    drawn = {"0 1 2 3 7 4 5 6 a b 8 9 d e f c", "0 4 8 c d 1 5 9 a e 2 6 7 b f 3"}
    first = square_rings(fabric, translations_of(fabric))[::2]
    assert {" ".join(f"{path.src:x}" for path in ring) for ring in first} == drawn


@pytest.mark.parametrize("side", [3, 4, 5, 8])
def test_rings_pass_all_ranks_and_each_link_once(side: int) -> None:
    fabric = topologies.load(f"torus:{side}x{side}")
    rings = square_rings(fabric, translations_of(fabric))
    assert all(sorted(path.src for path in ring) == list(range(side * side)) for ring in rings)
    passed = Counter(hop for ring in rings for path in ring for hop in path.hops)
    assert passed == dict.fromkeys(fabric.bandwidth, 1)


@pytest.mark.parametrize("kind", ["allgather", "reduce-scatter", "allreduce"])
def test_the_implicit_form_is_the_same(kind: str) -> None:
    fabric = topologies.load("torus:5x5")
    collective = Collective.on(fabric, kind)
    limit = bound(fabric, collective)
    found = implicit_square_rings(fabric, collective, limit, translations_of(fabric))
    assert found is not None and synth.verify(found).correct
    explicit = solve_baseline(fabric, collective, "multiring")
    assert dict(explicit.method.settings)["proved_largest"] == "yes"
    assert found.rate == explicit.rate == found.expand().rate
    assert synth.verify(explicit).correct and synth.verify(found.expand()).correct
    times = [synth.simulate(form, 1 << 20, pieces=2).time_us for form in (found, explicit)]
    assert times[0] == pytest.approx(times[1])


@pytest.mark.parametrize("spec", ["torus:4x5", "torus:3x3x3", "ring:9", "dgx1", "hypercube:3"])
def test_what_is_no_square_torus_has_none(spec: str) -> None:
    fabric = topologies.load(spec)
    assert not square_rings(fabric, translations_of(fabric))


def test_unequal_links_have_none() -> None:
    even = topologies.load("torus:4x4")
    wide = [replace(link, bandwidth=2 * link.bandwidth) if link.src == 0 else link for link in even.links]
    fabric = Topology.build("uneven", 16, wide)
    assert not square_rings(fabric, translations_of(even))
