"""Published planners as plans: partitions by hand, what memory and batches lack, comparisons of all."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import pipeline
from arborcast.pipeline.costs.devices import with_reserve
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import BatchError, PlanError, ProfileError
from arborcast.pipeline.planning.alternatives import METHODS, alternatives, data_parallel, straight_gpipe
from arborcast.pipeline.planning.formats import read_plan, write_plan
from arborcast.pipeline.planning.hosts import levels
from arborcast.pipeline.planning.memory_need import check_memory, most_memory
from arborcast.pipeline.planning.plan_comparison import EVERY, OURS, compare
from arborcast.pipeline.planning.plan_prediction import predict
from arborcast.pipeline.planning.planner import PlanWishes
from arborcast.pipeline.planning.planner import plan as planned
from arborcast.pipeline.planning.planning_problem import PlanningProblem
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.stages import Plan
from arborcast.synth.topology import Topology
from arborcast.topologies import load
from tests.support.planning_cases import MB, model, wired

FULL = LinkCosts(load("full:4"))


def drawn(times: list[float], *, output: int = 1_000, weights: int = MB) -> Profile:
    return model(times, samples=32, output=output, saved=10 * MB, weights=weights)


def two_hosts() -> Topology:
    """Hosts of two ranks with a switch each (12 GB/s a rank), both on one switch (3 GB/s a host)."""
    inside = {(rank, 4 + rank // 2): 12 for rank in range(4)}
    return wired(4, inside | {(4, 6): 3, (5, 6): 3}, switches=("pcie0", "pcie1", "switch"), name="hosts")


def stages(plan: Plan) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(stage.start, stage.end, stage.ranks) for stage in plan.stages]


def test_levels_are_read_from_the_rates() -> None:
    halves = wired(4, {(0, 1): 1, (2, 3): 1})
    for fabric in (two_hosts(), halves):
        assert levels(LinkCosts(fabric)) == (((0, 1), (2, 3)), ((0, 1, 2, 3),))
    # Hosts of 2 and 1 rank are no level: all groups must be alike.
    for fabric in (load("dgx1"), load("full:4"), two_hosts().subset([0, 1, 2])):
        assert levels(LinkCosts(fabric)) == ((tuple(range(fabric.ranks)),),)


def test_gpipe_balances_time_in_the_order_of_the_ranks() -> None:
    times = [1, 3, 2, 2, 5, 3]  # no division of these in four parts stays below 5
    plan = straight_gpipe(PlanningProblem(drawn(times), LinkCosts(load("ring:4")), 32, 4))
    assert max(sum(times[a:b]) for a, b, _ in stages(plan)) == 5
    assert [ranks for _, _, ranks in stages(plan)] == [(0,), (1,), (2,), (3,)]
    assert (plan.order, plan.recompute, plan.microbatches, plan.method) == ("gpipe", False, 4, "gpipe")
    fewer_layers = straight_gpipe(PlanningProblem(drawn([1, 1, 1]), FULL, 8, 2))
    assert stages(fewer_layers) == [(0, 1, (0,)), (1, 2, (1,)), (2, 3, (2,))]


def test_gpipe_recomputes_where_memory_asks_for_it() -> None:
    """A stage of one layer: 10 MB saved, all four microbatches in flight, 2 MB of weights and gradients."""
    problem = PlanningProblem(drawn([1, 1, 1, 1]), FULL, 32, 4)
    for megabytes, recompute in ((13, False), (6, True)):
        tight = replace(problem, memory_bytes=with_reserve(megabytes * MB))
        assert straight_gpipe(tight).recompute is recompute
    with pytest.raises(PlanError, match=r"stage \d .* into 3\.81 MiB with 10 % to spare, got .* too many"):
        straight_gpipe(replace(problem, memory_bytes=4 * MB))


def test_data_parallel_divides_the_batch_as_asked_and_says_what_memory_lacks() -> None:
    """Of 32 samples a rank has 8: 4 layers x 10 MB / 4 saved, 8 MB of weights and gradients."""
    problem = PlanningProblem(drawn([1, 1, 1, 1]), FULL, 32, 1)
    free = [(1, None), (4, None), (8, None)]
    for count, limit in [*free, (1, with_reserve(18 * MB + 1)), (4, with_reserve(13 * MB))]:
        plan = data_parallel(replace(problem, microbatches=count, memory_bytes=limit))
        assert stages(plan) == [(0, 4, (0, 1, 2, 3))]
        assert (plan.microbatches, plan.recompute) == (count, False)
    with pytest.raises(PlanError, match=r"got 10\.01 MiB, 488.* too many"):
        data_parallel(replace(problem, microbatches=4, memory_bytes=with_reserve(10 * MB)))
    # Of several numbers, the largest that the batch has samples for comes closest to what memory holds.
    tight = [replace(problem, microbatches=it, memory_bytes=9 * MB) for it in (1, 4, 32)]
    assert "1 of 4 microbatches in flight" in str(alternatives(tight, ["data-parallel"])["data-parallel"])
    with pytest.raises(PlanError, match="the ranks of halves must be connected"):
        data_parallel(replace(problem, network=LinkCosts(wired(2, {}, name="halves"))))
    with pytest.raises(BatchError, match="batch of 3 samples: must have at least 4"):
        data_parallel(replace(problem, batch=3))


@pytest.mark.few(4)
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
        found = compare(drawn(times), load(spec), **wishes)
    except (PlanError, BatchError) as error:
        assert "\n" not in str(error)
        return
    for it in found.alternatives:
        assert it.why_not if it.plan is None else it.plan.microbatches == microbatches
        if batch < microbatches * load(spec).ranks and it.method == "data-parallel":
            assert f"must have at least {microbatches * load(spec).ranks}" in str(it.why_not)


def test_room_is_the_most_that_a_plan_may_need() -> None:
    problem = PlanningProblem(drawn([1, 1, 1, 1, 1]), FULL, 32, 4)
    plan = Plan([(0, 2, [0, 1]), (2, 3, [2]), (3, 5, [3])], 4)
    for recompute in (False, True):
        for index, stage in enumerate(plan.stages):
            there = replace(plan, recompute=recompute)
            needed = most_memory(there, problem.profile, batch=32, stage=index).total
            least = with_reserve(needed)
            for limit, fits in ((least, True), (least - 1, False), (None, True)):
                fit = replace(problem, memory_bytes=limit).range_fits(recompute=recompute)
                assert fit(stage.start, stage.end, stage.ranks, 2 - index) is fits


def test_all_alternatives_fit_or_say_by_how_much() -> None:
    problem = PlanningProblem(drawn([1, 3, 2, 2, 5, 3]), LinkCosts(two_hosts()), 32, 4, with_reserve(20 * MB))
    plans = alternatives([problem])
    assert list(plans) == list(METHODS)
    for plan in plans.values():
        assert isinstance(plan, Plan)
        assert (plan.depth, plan.topology, sorted(plan.ranks)) == (6, problem.network.topology, [0, 1, 2, 3])
        check_memory(plan, problem.profile, with_reserve(20 * MB), batch=32)
    for change, said in (
        ({"memory_bytes": 2 * MB}, r"must fit into 1\.91 MiB with 10 % to spare, got .* too many"),
        ({"batch": 3}, r"^batch of 3 samples: must have at least (4|16), one for each of 4"),
    ):
        for refusal in alternatives([replace(problem, **change)]).values():
            with pytest.raises(PlanError, match=said):
                raise refusal if isinstance(refusal, PlanError) else AssertionError(refusal)


def test_of_numbers_of_microbatches_the_one_predicted_to_be_fastest() -> None:
    """PipeDream makes eight replicas of one microbatch, fastest by their bytes alone, not with latencies."""
    profile = model([5, 10, 5, 10], samples=16, output=10_000, weights=100_000)
    problem = PlanningProblem(profile, LinkCosts(load("star:8,latency=50")), 16, 1)

    def time_us(*counts: int) -> float:
        plan = alternatives([replace(problem, microbatches=it) for it in counts], ["pipedream"])["pipedream"]
        assert isinstance(plan, Plan)
        return predict(plan, profile, problem.network).time_us

    assert time_us(1, 4) == time_us(4) < time_us(1)


def test_every_alternative_is_a_plan_to_save_and_to_run_or_says_why_not(tmp_path: Path) -> None:
    """Ours is that of `plan`; the others are those of their methods; files give them back."""
    profile, fabric = drawn([100, 300, 200, 400]), two_hosts()
    wishes: PlanWishes = {"batch": 16, "microbatches": 4, "memory_bytes": 80 * MB}
    found = compare(profile, fabric, **wishes)
    assert [it.method for it in found.alternatives] == list(EVERY)
    expected = alternatives([PlanningProblem(profile, LinkCosts(fabric), 16, 4, 80 * MB)])
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
    profile, fabric = drawn([100, 300, 200, 400], output=10 * MB, weights=0), load("full:2")
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


def test_alternatives_may_choose_of_several_numbers_of_microbatches_and_say_why_they_have_no_plan() -> None:
    found = compare(drawn([100, 300, 200, 400]), two_hosts(), methods=[OURS, "gpipe"])
    assert found["gpipe"].runnable()[0].microbatches in {found[OURS].runnable()[0].microbatches, 4, 16}
    assert found.batch == 32
    found = compare(drawn([1] * 4), FULL.topology, batch=3, methods=[OURS, "data-parallel"])
    with pytest.raises(PlanError, match="method data-parallel: batch of 3 samples: must have at least"):
        found["data-parallel"].runnable()


def test_wishes_are_what_planning_may_be_told() -> None:
    asked = [it for it in inspect.signature(planned).parameters.values() if it.kind is it.KEYWORD_ONLY]
    assert {it.name: it.annotation for it in asked} == {
        name: kind.__forward_arg__ for name, kind in PlanWishes.__annotations__.items()
    }
