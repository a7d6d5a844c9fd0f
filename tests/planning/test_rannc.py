"""RaNNC's phases: blocks as drawn, stages against brute force, as few of them as fit, repeated over hosts."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.pipeline.costs.devices import with_reserve
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.planning.memory_need import check_memory
from arborcast.pipeline.planning.planning_problem import PlanningProblem
from arborcast.pipeline.planning.rannc import BlockRange, rannc, stages
from arborcast.topologies import load
from tests.support.planning_cases import MB, model


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

    cuts, ranks = (
        [list(pairwise((0, *inner, total))) for inner in combinations(range(1, total), count - 1)]
        for total in (blocks, devices)
    )
    every = [
        [BlockRange(a, b, d - c) for (a, b), (c, d) in zip(*both, strict=True)]
        for both in product(cuts, ranks)
    ]
    least = min(map(value, every))
    found = stages(blocks, devices, range(count, count + 1), cost)
    if found is None:
        assert least == inf
    else:
        assert list(found) in every
        assert value(list(found)) == pytest.approx(least)


def problem(
    depth: int, fabric: str, batch: int, microbatches: int, *, memory_bytes: int, saved: int, weights: int
) -> PlanningProblem:
    profile = model([1] * depth, samples=32, output=1_000, saved=saved, weights=weights)
    network = LinkCosts(load(fabric))
    return PlanningProblem(profile, network, batch, microbatches, with_reserve(memory_bytes))


def test_a_model_that_fits_on_one_device_has_one_stage() -> None:
    plan = rannc(problem(6, "dgx1", 32, 1, memory_bytes=1 << 30, saved=10 * MB, weights=MB))
    assert [(it.start, it.end, it.replicas) for it in plan.stages] == [(0, 6, 8)]
    assert (plan.order, plan.recompute, plan.method) == ("gpipe", False, "rannc")


def test_as_few_stages_as_fit_and_each_pipeline_in_its_host() -> None:
    """Of 6 layers with 3 MB of weights and gradients each, 10 MB hold three: two stages, on both hosts."""
    asked = problem(6, "dgx-a100:boxes=2", 64, 4, memory_bytes=10 * MB, saved=MB, weights=3 * MB // 2)
    plan = rannc(asked)
    check_memory(plan, asked.profile, with_reserve(10 * MB), batch=64)
    assert [(it.start, it.end, it.ranks) for it in plan.stages] == [
        (0, 3, (0, 1, 2, 3, 8, 9, 10, 11)),
        (3, 6, (4, 5, 6, 7, 12, 13, 14, 15)),
    ]
    assert plan.recompute, "there are several microbatches"
    # One host does not hold a layer on each of its devices: nothing does.
    with pytest.raises(PlanError, match=r"must fit into 1\.91 MiB with 10 % to spare, got .* too many"):
        rannc(replace(asked, memory_bytes=2 * MB))


def test_a_pipeline_takes_more_hosts_where_one_is_too_small() -> None:
    """16 layers of 6 MB: eight devices of a box have 8 x 10 MB and hold 8 of them, two boxes hold all."""
    plan = rannc(problem(16, "dgx-a100:boxes=2", 16, 4, memory_bytes=10 * MB, saved=0, weights=3 * MB))
    assert [it.ranks for it in plan.stages] == [(rank,) for rank in range(16)]


def test_blocks_are_few_unless_memory_asks_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 layers a block of two needs 12 MB; into 8 only single layers fit. Published are 32 blocks."""
    monkeypatch.setattr("arborcast.pipeline.planning.rannc.BLOCKS", 3)
    for limit, most in ((13 * MB, 3), (8 * MB, 6)):
        plan = rannc(problem(6, "star:6", 6, 1, memory_bytes=limit, saved=0, weights=3 * MB))
        assert len(plan.stages) == most
