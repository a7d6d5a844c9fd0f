"""PipeDream's program against brute force, flat and by levels, and its plans on drawn fabrics."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.pipeline.costs.devices import with_reserve
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.planning.pipedream import DeviceRange, pipedream, program
from arborcast.pipeline.planning.planning_problem import PlanningProblem
from arborcast.topologies import load
from tests.support.planning_cases import MB, model, wired


def compositions(total: int, parts: int) -> list[tuple[tuple[int, int], ...]]:
    return [tuple(pairwise((0, *cuts, total))) for cuts in combinations(range(1, total), parts - 1)]


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_the_program_is_the_least_of_all_pipelines(depth: int, devices: int, data: st.DataObject) -> None:
    """Any costs at all: every division of the layers with every division of the devices."""
    amount = st.integers(0, 9)
    costs = {
        (a, b, first, count): data.draw(amount)
        for a, b in combinations(range(depth + 1), 2)
        for first in range(devices)
        for count in range(1, devices - first + 1)
    }
    boundary = {key: data.draw(amount) for key in product(range(1, depth), range(1, devices))}

    def time(pieces: list[DeviceRange]) -> float:
        stages = [costs[it.start, it.end, it.first, it.count] for it in pieces]
        return max(stages + [boundary[it.start, it.first] for it in pieces[1:]])

    candidates = [
        [DeviceRange(a, b, p, q - p) for (a, b), (p, q) in zip(layers, ranks, strict=True)]
        for parts in range(1, min(depth, devices) + 1)
        for layers, ranks in product(compositions(depth, parts), compositions(devices, parts))
    ]
    value, pieces = program(depth, devices, lambda *it: costs[it], lambda *it: boundary[it])[depth]
    assert value == min(time(candidate) for candidate in candidates) == time(list(pieces))
    assert list(pieces) in candidates


def problem(
    depth: int, time: float, output: int, weights: int, fabric: str = "full:4", batch: int = 32
) -> PlanningProblem:
    profile = model([time] * depth, samples=32, output=output, saved=output, weights=weights)
    return PlanningProblem(profile, LinkCosts(load(fabric)), batch, 4)


def test_light_weights_are_replicated_heavy_ones_cut() -> None:
    light = pipedream(problem(8, 1000, output=10**8, weights=8))
    assert [stage.ranks for stage in light.stages] == [(0, 1, 2, 3)]
    heavy = pipedream(problem(8, 1000, output=8, weights=10**8))
    cut = [(2 * rank, 2 * rank + 2, (rank,)) for rank in range(4)]
    assert [(it.start, it.end, it.ranks) for it in heavy.stages] == cut
    assert (heavy.order, heavy.method) == ("1f1b", "pipedream")


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_by_levels_pipelines_stay_inside_hosts(ranks: tuple[int, ...]) -> None:
    """Fat activations, light weights, a batch that replicas of single ranks cannot share: host replicas.

    Two hosts of two ranks have 100 GB/s inside, 1 GB/s across; ranks are numbered as told.
    """
    a, b, c, d = ranks
    hosts = wired(4, {(a, b): 100, (c, d): 100} | {(rank, 4): 1 for rank in range(4)}, switches=["switch"])
    asked = problem(4, 30_000, output=400 * MB, weights=MB, batch=8)
    plan = pipedream(replace(asked, network=LinkCosts(hosts)))
    assert [(it.start, it.end, it.ranks) for it in plan.stages] == [(0, 2, (a, c)), (2, 4, (b, d))]
    assert plan.method == "pipedream by levels"


def test_where_its_plan_does_not_fit_the_program_runs_again_over_what_fits() -> None:
    """Light weights ask for replicas of everything; memory holds two of three layers on a rank.

    A layer has 1 MB of weights and 1 MB of gradients.
    """
    free = problem(3, 10_000, output=10**3, weights=MB, fabric="full:2")
    assert len(pipedream(free).stages) == 1
    tight = pipedream(replace(free, memory_bytes=with_reserve(5 * MB)))
    assert [it.replicas for it in tight.stages] == [1, 1]
    with pytest.raises(PlanError, match="too many"):
        pipedream(replace(free, memory_bytes=MB))


def test_replicas_never_outnumber_the_samples_of_a_microbatch() -> None:
    plan = pipedream(problem(3, 1000, output=8, weights=8, batch=8))
    assert max(stage.replicas for stage in plan.stages) == 2
    assert plan.microbatch_sizes(8) == (2, 2, 2, 2)


def test_bad_input() -> None:
    asked = problem(2, 1, output=8, weights=8, batch=4)
    for change, error, said in (
        ({"batch": 3}, BatchError, "batch of 3 samples: must have at least 4"),
        ({}, PlanError, "no pipeline of 2 layers takes all of 4 ranks"),
        ({"network": LinkCosts(wired(2, {}))}, PlanError, "no path leads from rank 0 to rank 1"),
    ):
        with pytest.raises(error, match=said):
            pipedream(replace(asked, **change))
