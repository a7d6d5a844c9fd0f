"""RaNNC's phases: blocks as drawn, stages against brute force, as few of them as fit, repeated over hosts."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.pipeline.costs.devices import with_reserve
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.planning.memory_need import check_memory
from arborcast.pipeline.planning.rannc import BlockRange, rannc, stages
from arborcast.pipeline.profiles import Layer, Profile
from arborcast.topologies import load

MB = 1_000_000


def model(times: list[float], *, output: int = 1_000, saved: int = 10 * MB, weights: int = MB) -> Profile:
    layers = (Layer(f"{i}", time, 2 * time, output, saved, weights, weights) for i, time in enumerate(times))
    return Profile("drawn", 32, tuple(layers))


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_stages_are_the_best_where_backward_follows_forward(
    blocks: int, devices: int, data: st.DataObject
) -> None:
    """Then the sum of both maxima is in proportion to one of them, and the program is exact."""
    count = data.draw(st.integers(1, min(blocks, devices)))
    times = data.draw(st.lists(st.integers(1, 9), min_size=blocks, max_size=blocks))
    most = data.draw(st.integers(1, 30))

    def cost(start: int, end: int, on: int) -> tuple[float, float]:
        total = sum(times[start:end])
        return (inf, inf) if total > most * on else (total / on, 2 * total / on)

    def value(parts: list[BlockRange]) -> float:
        return sum(max(cost(*part)[way] for part in parts) for way in (0, 1))

    every = [
        [BlockRange(a, b, d - c) for (a, b), (c, d) in zip(pairwise(cuts), pairwise(ranks), strict=True)]
        for cuts in ((0, *inner, blocks) for inner in combinations(range(1, blocks), count - 1))
        for ranks in ((0, *inner, devices) for inner in combinations(range(1, devices), count - 1))
    ]
    least = min(map(value, every))
    found = stages(blocks, devices, range(count, count + 1), cost)
    if found is None:
        assert least == inf
    else:
        assert list(found) in every
        assert value(list(found)) == pytest.approx(least)


def test_a_model_that_fits_on_one_device_has_one_stage() -> None:
    plan = rannc(model([1] * 6), LinkCosts(load("dgx1")), batch=32, microbatches=1, memory_bytes=1 << 30)
    assert [(it.start, it.end, it.replicas) for it in plan.stages] == [(0, 6, 8)]
    assert (plan.order, plan.recompute, plan.method) == ("gpipe", False, "rannc")


def test_as_few_stages_as_fit_and_each_pipeline_in_its_host() -> None:
    """Of 6 layers with 3 MB of weights and gradients each, 10 MB hold three: two stages, on both hosts."""
    profile, network = model([1] * 6, saved=MB, weights=3 * MB // 2), LinkCosts(load("dgx-a100:boxes=2"))
    plan = rannc(profile, network, batch=64, microbatches=4, memory_bytes=with_reserve(10 * MB))
    check_memory(plan, profile, with_reserve(10 * MB), batch=64)
    assert [(it.start, it.end, it.ranks) for it in plan.stages] == [
        (0, 3, (0, 1, 2, 3, 8, 9, 10, 11)),
        (3, 6, (4, 5, 6, 7, 12, 13, 14, 15)),
    ]
    assert plan.recompute, "there are several microbatches"
    # One host does not hold a layer on each of its devices: nothing does.
    with pytest.raises(PlanError, match=r"must fit into 1\.91 MiB with 10 % to spare, got .* too many"):
        rannc(profile, network, batch=64, microbatches=4, memory_bytes=2 * MB)


def test_a_pipeline_takes_more_hosts_where_one_is_too_small() -> None:
    """16 layers of 6 MB: eight devices of a box have 8 x 10 MB and hold 8 of them, two boxes hold all."""
    profile = model([1] * 16, saved=0, weights=3 * MB)
    plan = rannc(
        profile,
        LinkCosts(load("dgx-a100:boxes=2")),
        batch=16,
        microbatches=4,
        memory_bytes=with_reserve(10 * MB),
    )
    assert [it.ranks for it in plan.stages] == [(rank,) for rank in range(16)]


def test_blocks_are_few_unless_memory_asks_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 layers a block of two needs 12 MB; into 8 only single layers fit. Published are 32 blocks."""
    monkeypatch.setattr("arborcast.pipeline.planning.rannc.BLOCKS", 3)
    profile, network = model([1] * 6, saved=0, weights=3 * MB), LinkCosts(load("star:6"))
    for limit, most in ((13 * MB, 3), (8 * MB, 6)):
        plan = rannc(profile, network, batch=6, microbatches=1, memory_bytes=with_reserve(limit))
        assert len(plan.stages) == most
