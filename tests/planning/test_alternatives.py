"""Data parallel and GPipe as plans: partitions against brute force, comparisons of all methods."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import pipeline
from arborcast.pipeline.costs.devices import with_reserve
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import BatchError, PlanError, ProfileError
from arborcast.pipeline.planning.alternatives import (
    METHODS,
    alternatives,
    data_parallel,
    straight_gpipe,
)
from arborcast.pipeline.planning.formats import read_plan, write_plan
from arborcast.pipeline.planning.hosts import levels
from arborcast.pipeline.planning.memory_need import check_memory, range_fits, stage_memory
from arborcast.pipeline.planning.plan_comparison import EVERY, OURS, compare
from arborcast.pipeline.planning.plan_prediction import predict
from arborcast.pipeline.planning.planner import PlanWishes
from arborcast.pipeline.planning.planner import plan as planned
from arborcast.pipeline.planning.stage_balance import balanced, balanced_by
from arborcast.pipeline.profiles import Layer, Profile
from arborcast.pipeline.stages import Plan
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load

MB = 1_000_000


def model(times: list[float], *, output: int = 1_000, saved: int = 10 * MB, weights: int = MB) -> Profile:
    layers = [
        Layer(f"layer{i}", time, 2 * time, output, saved, weights, weights) for i, time in enumerate(times)
    ]
    return Profile("drawn", 32, tuple(layers))


def two_hosts(size: int = 2, hosts: int = 2, inside: int = 12, across: int = 3) -> Topology:
    """Hosts with a switch each (inside GB/s per rank), all on one switch (across GB/s per host)."""
    ranks = size * hosts
    links = []
    for rank in range(ranks):
        links += [
            Link(rank, ranks + rank // size, Fraction(inside)),
            Link(ranks + rank // size, rank, Fraction(inside)),
        ]
    for host in range(hosts):
        links += [
            Link(ranks + host, ranks + hosts, Fraction(across)),
            Link(ranks + hosts, ranks + host, Fraction(across)),
        ]
    return Topology.build("hosts", ranks, links, [*(f"pcie{it}" for it in range(hosts)), "switch"])


def stages(plan: Plan) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(stage.start, stage.end, stage.ranks) for stage in plan.stages]


def divisions(depth: int, parts: int) -> list[tuple[tuple[int, int], ...]]:
    return [tuple(pairwise((0, *cuts, depth))) for cuts in combinations(range(1, depth), parts - 1)]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_balance_is_the_least_of_all_divisions(costs: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    ranges = balanced(costs, parts)
    assert ranges in divisions(len(costs), parts)
    assert max(sum(costs[a:b]) for a, b in ranges) == min(
        max(sum(costs[a:b]) for a, b in division) for division in divisions(len(costs), parts)
    )


@settings(max_examples=60)
@given(st.integers(1, 7), st.data())
def test_balance_with_costs_of_parts_and_forbidden_ranges(depth: int, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, depth))
    costs = {
        (part, a, b): data.draw(st.sampled_from([0.0, 1.0, 2.0, 3.0, inf]))
        for part in range(parts)
        for a in range(depth)
        for b in range(a + 1, depth + 1)
    }

    def worst(division: tuple[tuple[int, int], ...]) -> float:
        return max(costs[part, a, b] for part, (a, b) in enumerate(division))

    least = min(worst(division) for division in divisions(depth, parts))
    if least == inf:
        with pytest.raises(PlanError, match=f"no division of {depth} layers into {parts} parts"):
            balanced_by(lambda *it: costs[it], depth, parts)
    else:
        assert worst(balanced_by(lambda *it: costs[it], depth, parts)) == least


def test_balance_refuses_more_parts_than_layers() -> None:
    with pytest.raises(PlanError, match="3 parts need at least as many layers, got 2"):
        balanced([1.0, 2.0], 3)


def test_levels_are_read_from_the_rates() -> None:
    assert levels(LinkCosts(two_hosts())) == (((0, 1), (2, 3)), ((0, 1, 2, 3),))
    assert levels(LinkCosts(load("dgx1"))) == ((tuple(range(8)),),)
    assert levels(LinkCosts(load("full:4"))) == (((0, 1, 2, 3),),)
    # Hosts of 2 and 1 rank are no level: all groups must be alike.
    assert levels(LinkCosts(two_hosts().subset([0, 1, 2]))) == (((0, 1, 2),),)


def test_levels_where_no_path_leads() -> None:
    halves = Topology.build("halves", 4, [Link(a, b, 1) for a, b in ((0, 1), (1, 0), (2, 3), (3, 2))])
    assert levels(LinkCosts(halves)) == (((0, 1), (2, 3)), ((0, 1, 2, 3),))


def test_gpipe_balances_time_in_the_order_of_the_ranks() -> None:
    #            |  4  |   4   | 5 |  3  |: no division of these in four parts stays below 5
    plan = straight_gpipe(model([1, 3, 2, 2, 5, 3]), LinkCosts(load("ring:4")), batch=32, microbatches=4)
    assert max(sum([1, 3, 2, 2, 5, 3][a:b]) for a, b, _ in stages(plan)) == 5
    assert [ranks for _, _, ranks in stages(plan)] == [(0,), (1,), (2,), (3,)]
    assert (plan.order, plan.recompute, plan.microbatches, plan.method) == ("gpipe", False, 4, "gpipe")


def test_gpipe_with_fewer_layers_than_ranks_has_a_stage_per_layer() -> None:
    plan = straight_gpipe(model([1, 1, 1]), LinkCosts(load("full:4")), batch=8, microbatches=2)
    assert stages(plan) == [(0, 1, (0,)), (1, 2, (1,)), (2, 3, (2,))]


def test_gpipe_recomputes_where_memory_asks_for_it() -> None:
    # A stage of one layer: 10 MB saved, all four microbatches in flight, 2 MB of weights and gradients.
    profile, network = model([1, 1, 1, 1]), LinkCosts(load("full:4"))
    assert not straight_gpipe(
        profile, network, batch=32, microbatches=4, memory_bytes=with_reserve(13 * MB)
    ).recompute
    assert straight_gpipe(
        profile, network, batch=32, microbatches=4, memory_bytes=with_reserve(6 * MB)
    ).recompute
    with pytest.raises(
        PlanError, match=r"stage \d .* must fit into 3\.81 MiB with 10 % to spare, got .* too many"
    ):
        straight_gpipe(profile, network, batch=32, microbatches=4, memory_bytes=4 * MB)


def test_data_parallel_divides_the_batch_as_asked_and_says_what_memory_lacks() -> None:
    profile, network = model([1, 1, 1, 1]), LinkCosts(load("full:4"))
    # Of 32 samples a rank has 8: 4 layers x 10 MB / 4 saved, 8 MB of weights and gradients.
    for microbatches, limit in (
        (1, None),
        (4, None),
        (8, None),
        (1, with_reserve(18 * MB + 1)),
        (4, with_reserve(13 * MB)),
    ):
        plan = data_parallel(profile, network, batch=32, microbatches=microbatches, memory_bytes=limit)
        assert stages(plan) == [(0, 4, (0, 1, 2, 3))]
        assert (plan.microbatches, plan.recompute) == (microbatches, False)
    with pytest.raises(PlanError, match=r"got 10\.01 MiB, 488.* too many"):
        data_parallel(profile, network, batch=32, microbatches=4, memory_bytes=with_reserve(10 * MB))
    # Of several numbers, the largest that the batch has samples for comes closest to what memory holds.
    refusal = alternatives(
        profile, network, batch=32, microbatches=[1, 4, 32], memory_bytes=9 * MB, methods=["data-parallel"]
    )
    assert "1 of 4 microbatches in flight" in str(refusal["data-parallel"])


@settings(max_examples=15)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from(["full:2", "ring:4", "full:3"]),
    st.integers(1, 24),
    st.integers(1, 12),
    st.sampled_from([None, 20 * MB, 60 * MB]),
)
def test_so_many_microbatches_as_asked_or_a_refusal(
    times: list[float], spec: str, batch: int, microbatches: int, memory: int | None
) -> None:
    """The number that somebody gives holds for every method, also where fewer would be faster."""
    wishes: PlanWishes = {"batch": batch, "microbatches": microbatches, "memory_bytes": memory}
    try:
        found = compare(model(times), load(spec), **wishes)
    except (PlanError, BatchError) as error:
        assert "\n" not in str(error)
        return
    for it in found.alternatives:
        assert it.why_not if it.plan is None else it.plan.microbatches == microbatches
        if batch < microbatches * load(spec).ranks and it.method == "data-parallel":
            assert f"must have at least {microbatches * load(spec).ranks}" in str(it.why_not)


def test_data_parallel_refuses_what_cannot_be() -> None:
    halves = Topology.build("halves", 2, [])
    with pytest.raises(PlanError, match="the ranks of halves must be connected"):
        data_parallel(model([1]), LinkCosts(halves), batch=32)
    with pytest.raises(BatchError, match="batch of 3 samples: must have at least 4"):
        data_parallel(model([1]), LinkCosts(load("full:4")), batch=3)


def test_room_counts_as_the_real_check() -> None:
    profile = model([1, 1, 1, 1, 1])
    plan = Plan([(0, 2, [0, 1]), (2, 3, [2]), (3, 5, [3])], 4)
    for recompute in (False, True):
        there = replace(plan, recompute=recompute)
        for index, stage in enumerate(plan.stages):
            needed = stage_memory(there, profile, batch=32, stage=index).total
            for limit, fits in ((with_reserve(needed), True), (with_reserve(needed) - 1, False)):
                fit = range_fits(profile, limit, (0, 1, 2, 3), batch=32, microbatches=4, recompute=recompute)
                assert fit(stage.start, stage.end, stage.ranks, 2 - index) is fits


def test_all_alternatives_fit_or_say_by_how_much() -> None:
    profile, network = model([1, 3, 2, 2, 5, 3]), LinkCosts(two_hosts())
    plans = alternatives(profile, network, batch=32, microbatches=4, memory_bytes=with_reserve(20 * MB))
    assert list(plans) == list(METHODS)
    for plan in plans.values():
        assert isinstance(plan, Plan)
        assert plan.depth == 6
        assert plan.topology == network.topology
        assert sorted(plan.ranks) == [0, 1, 2, 3]
        check_memory(plan, profile, with_reserve(20 * MB), batch=32)
    for refusal in alternatives(profile, network, batch=32, microbatches=4, memory_bytes=2 * MB).values():
        with pytest.raises(PlanError, match=r"must fit into 1\.91 MiB with 10 % to spare, got .* too many"):
            raise refusal if isinstance(refusal, PlanError) else AssertionError(refusal)


def test_of_numbers_of_microbatches_the_one_predicted_to_be_fastest() -> None:
    """PipeDream makes eight replicas of one microbatch, fastest by their bytes alone, not with latencies."""
    layers = (
        Layer(f"layer{i}", time, 2 * time, 10_000, 0, 100_000, 100_000) for i, time in enumerate([5, 10] * 2)
    )
    profile, network = Profile("small", 16, tuple(layers)), LinkCosts(load("star:8,latency=50"))

    def time_us(*counts: int) -> float:
        plan = alternatives(profile, network, batch=16, microbatches=counts)["pipedream"]
        assert isinstance(plan, Plan)
        return predict(plan, profile, network).time_us

    assert time_us(1, 4) == time_us(4) < time_us(1)


def test_a_batch_too_small_is_said_for_each() -> None:
    plans = alternatives(model([1] * 4), LinkCosts(load("full:4")), batch=3, microbatches=4)
    for plan in plans.values():
        assert isinstance(plan, PlanError)
        assert re.match("batch of 3 samples: must have at least (4|16), one for each of 4", str(plan))


def test_every_alternative_is_a_plan_to_save_and_to_run_or_says_why_not(tmp_path: Path) -> None:
    """Ours is that of `plan`; the others are those of their methods; files give them back."""
    profile, fabric = model([100, 300, 200, 400]), two_hosts()
    wishes: PlanWishes = {"batch": 16, "microbatches": 4, "memory_bytes": 80 * MB}
    found = compare(profile, fabric, **wishes)
    assert [it.method for it in found.alternatives] == list(EVERY)
    expected = alternatives(profile, LinkCosts(fabric), batch=16, microbatches=4, memory_bytes=80 * MB)
    expected[OURS] = planned(profile, fabric, **wishes)
    for it in found.alternatives:
        if isinstance(expected[it.method], Plan):
            plan, prediction = it.runnable()
            write_plan(plan, tmp_path / "plan.json")
            assert plan == expected[it.method] == read_plan(tmp_path / "plan.json")
            assert prediction == predict(plan, profile, batch=16)
        else:
            assert (it.plan, it.why_not) == (None, str(expected[it.method]))
    assert found.best.time_us == min(it.time_us for it in found.alternatives if it.plan and it.time_us)
    with pytest.raises(PlanError, match=r"method: must be one of arborcast, .*, got hobby"):
        found["hobby"]


def test_the_best_plan_keeps_to_what_was_asked_for() -> None:
    """Data parallelism is fastest where messages are dear, and is no pipeline of two stages."""
    profile, fabric = model([100, 300, 200, 400], output=10 * MB, weights=0), load("full:2")
    assert len(compare(profile, fabric).plan.stages) == 1
    found = compare(profile, fabric, stages=2, order="gpipe")
    dp = found["data-parallel"]
    assert dp.time_us is not None and dp.time_us < found.prediction.time_us
    assert (len(found.plan.stages), found.plan.order) == (2, "gpipe")
    alone = compare(profile, fabric, methods=["data-parallel"], stages=2)
    assert alone.best.plan == dp.plan, "the only one is told all the same"


def test_models_are_costed_for_what_the_fabric_says() -> None:
    torch = pytest.importorskip("torch")
    module = pipeline.Divisible([torch.nn.Linear(8, 8) for _ in range(3)])
    found = compare(module, "dgx1", torch.zeros(16, 8), methods=["data-parallel"], microbatches=1)
    assert found.costed.device is not None
    assert (found.costed.device.name, found.costed.said_by) == ("v100", "topology")
    assert (found.batch, found.memory_bytes) == (16, 16 << 30)
    for fault, arguments in (
        ("example: a module is costed with inputs", (module, "dgx1")),
        ("device v100: a profile has its costs already", (found.profile, "dgx1")),
        ("model nothing: must be a profile file", ("nothing", "dgx1")),
    ):
        with pytest.raises(ProfileError, match=fault):
            compare(*arguments, device="v100")


def test_a_comparison_offers_the_alternatives_several_numbers_of_microbatches() -> None:
    profile, fabric = model([100, 300, 200, 400]), two_hosts()
    found = compare(profile, fabric, methods=[OURS, "gpipe"])
    assert found["gpipe"].runnable()[0].microbatches in {found[OURS].runnable()[0].microbatches, 4, 16}
    assert found.batch == 32


def test_a_method_without_a_plan_says_why_where_its_plan_is_asked_for() -> None:
    found = compare(model([1] * 4), load("full:4"), batch=3, methods=[OURS, "data-parallel"])
    with pytest.raises(PlanError, match="method data-parallel: batch of 3 samples: must have at least"):
        found["data-parallel"].runnable()


def test_wishes_are_what_planning_may_be_told() -> None:
    asked = [it for it in inspect.signature(planned).parameters.values() if it.kind is it.KEYWORD_ONLY]
    assert {it.name: it.annotation for it in asked} == {
        name: kind.__forward_arg__ for name, kind in PlanWishes.__annotations__.items()
    }
