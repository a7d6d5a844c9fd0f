"""PipeDream's program against brute force, flat and by levels, and its plans on drawn fabrics."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.pipeline.costs.devices import with_reserve
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.planning.pipedream import DeviceRange, pipedream, program
from arborcast.pipeline.profiles import Layer, Profile
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load


def compositions(total: int, parts: int) -> list[tuple[tuple[int, int], ...]]:
    return [tuple(pairwise((0, *cuts, total))) for cuts in combinations(range(1, total), parts - 1)]


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_the_program_is_the_least_of_all_pipelines(depth: int, devices: int, data: st.DataObject) -> None:
    """Any costs at all: every division of the layers with every division of the devices."""
    amount = st.integers(0, 9)
    costs = {
        (a, b, first, count): data.draw(amount)
        for a in range(depth)
        for b in range(a + 1, depth + 1)
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
        for layers in compositions(depth, parts)
        for ranks in compositions(devices, parts)
    ]
    value, pieces = program(depth, devices, lambda *it: costs[it], lambda *it: boundary[it])[depth]
    assert value == min(time(candidate) for candidate in candidates)
    assert value == time(list(pieces))
    assert list(pieces) in candidates


def uniform(depth: int, *, time: float, output: int, weights: int) -> Profile:
    layers = [Layer(f"layer{i}", time, 2 * time, output, output, weights, weights) for i in range(depth)]
    return Profile("uniform", 32, tuple(layers))


def hosts(permutation: tuple[int, ...] = (0, 1, 2, 3)) -> Topology:
    """Two hosts of two ranks: 100 GB/s inside, 1 GB/s across; ranks numbered as told."""
    a, b, c, d = permutation
    links = [Link(u, v, 100) for pair in ((a, b), (c, d)) for u, v in (pair, pair[::-1])]
    links += [Link(rank, 4, 1) for rank in range(4)] + [Link(4, rank, 1) for rank in range(4)]
    return Topology.build("two hosts", 4, links, ["switch"])


def test_light_weights_are_replicated_heavy_ones_cut() -> None:
    network = LinkCosts(load("full:4"))
    light = pipedream(uniform(8, time=1000, output=10**8, weights=8), network, batch=32, microbatches=4)
    assert [stage.ranks for stage in light.stages] == [(0, 1, 2, 3)]
    heavy = pipedream(uniform(8, time=1000, output=8, weights=10**8), network, batch=32, microbatches=4)
    assert [(it.start, it.end, it.ranks) for it in heavy.stages] == [
        (0, 2, (0,)),
        (2, 4, (1,)),
        (4, 6, (2,)),
        (6, 8, (3,)),
    ]
    assert (heavy.order, heavy.method) == ("1f1b", "pipedream")


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_by_levels_pipelines_stay_inside_hosts(ranks: tuple[int, ...]) -> None:
    """Fat activations, light weights, a batch that replicas of single ranks cannot share: host replicas."""
    profile = uniform(4, time=30_000, output=4 * 10**8, weights=10**6)
    plan = pipedream(profile, LinkCosts(hosts(ranks)), batch=8, microbatches=4)
    a, b, c, d = ranks
    assert [(it.start, it.end, it.ranks) for it in plan.stages] == [(0, 2, (a, c)), (2, 4, (b, d))]
    assert plan.method == "pipedream by levels"


def test_where_its_plan_does_not_fit_the_program_runs_again_over_what_fits() -> None:
    """Light weights ask for replicas of everything; memory holds two of three layers on a rank."""
    profile = uniform(3, time=10_000, output=10**3, weights=10**6)  # 1 MB and 1 MB of gradients a layer
    network = LinkCosts(load("full:2"))
    free = pipedream(profile, network, batch=32, microbatches=4)
    assert len(free.stages) == 1
    tight = pipedream(profile, network, batch=32, microbatches=4, memory_bytes=with_reserve(5_000_000))
    assert [it.replicas for it in tight.stages] == [1, 1]
    with pytest.raises(PlanError, match="too many"):
        pipedream(profile, network, batch=32, microbatches=4, memory_bytes=1_000_000)


def test_replicas_never_outnumber_the_samples_of_a_microbatch() -> None:
    profile = uniform(3, time=1000, output=8, weights=8)
    plan = pipedream(profile, LinkCosts(load("full:4")), batch=8, microbatches=4)
    assert max(stage.replicas for stage in plan.stages) == 2
    assert plan.microbatch_sizes(8) == (2, 2, 2, 2)


def test_bad_input() -> None:
    profile = uniform(2, time=1, output=8, weights=8)
    with pytest.raises(BatchError, match="batch of 3 samples: must have at least 4"):
        pipedream(profile, LinkCosts(load("full:2")), batch=3, microbatches=4)
    with pytest.raises(PlanError, match="no pipeline of 2 layers takes all of 4 ranks"):
        pipedream(profile, LinkCosts(load("full:4")), batch=4, microbatches=4)
    halves = Topology.build("halves", 2, [])
    with pytest.raises(PlanError, match="no path leads from rank 0 to rank 1"):
        pipedream(profile, LinkCosts(halves), batch=4, microbatches=4)
