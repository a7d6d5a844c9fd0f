"""Memory of stages against sums by hand, and what is said where a plan does not fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arborcast.pipeline.costs.devices import with_reserve
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.order import ORDERS, actions
from arborcast.pipeline.order.actions import Phase
from arborcast.pipeline.order.pass_messages import with_messages
from arborcast.pipeline.planning.memory_need import (
    MemoryNeed,
    check_memory,
    fits,
    largest_share,
    most_memory,
    peak_in_flight,
    plan_memory,
    rank_limits,
    readable,
)
from arborcast.pipeline.profiles import Layer, Profile, Tie
from arborcast.pipeline.stages import Plan
from tests.support.planning_cases import PLANNED, profiles

# Of 8 samples: (output, saved, parameters, gradients, optimizer) bytes.
BYTES = [(80, 800, 100, 90, 180), (160, 1600, 200, 200, 400), (240, 2400, 300, 300, 600), (8, 16, 10, 10, 20)]
PROFILE = Profile(
    "drawn",
    8,
    tuple(Layer(f"layer{index}", 1.0, 2.0, *sizes) for index, sizes in enumerate(BYTES)),
)


def test_the_terms_of_a_stage_by_hand():
    """Of 24 samples in 4 microbatches of 6 each replica has 3; stage 1 is the last but one: 1F1B keeps 2.

    Its fullest moment is in the last layer of B0: besides both microbatches' results there are F1's output,
    for which no gradient came yet, and the input of F2, received ahead. The gradient of F0's output is what
    the layer's operators work on.
    """
    plan = Plan([(0, 1, [0]), (1, 3, [1, 2]), (3, 4, [3])], 4)
    assert plan_memory(plan, PROFILE, batch=24)[1] == MemoryNeed(
        parameters=200 + 300,
        gradients=200 + 300,
        optimizer=400 + 600,
        activations=2 * (1600 + 2400) * 3 // 8,
        boundary=(240 + 2 * 80) * 3 // 8,
    )


def test_recomputation_keeps_inputs_and_one_microbatch():
    """Of the microbatch under way the input is among what it holds."""
    plan = Plan([(0, 1, [0]), (1, 3, [1, 2]), (3, 4, [3])], 4, recompute=True)
    memory = plan_memory(plan, PROFILE, batch=24)[1]
    assert memory.activations == 1 * 80 * 3 // 8 + (1600 + 2400) * 3 // 8


def test_gradients_come_while_activations_go():
    """Of one microbatch: when the last layer goes back there are none, when the first does, all others."""
    plan = Plan([(0, 2, [0]), (2, 4, [1])], 1)
    for stage, (first, last) in enumerate([(0, 1), (2, 3)]):
        memory = plan_memory(plan, PROFILE, batch=8)[stage]
        at_end = BYTES[first][1] + BYTES[last][1]
        at_begin = BYTES[first][1] + BYTES[last][3]
        assert memory.gradients + memory.activations == max(at_end, at_begin)
    with_replicas = plan_memory(Plan([(0, 4, [0, 1])], 1), PROFILE, batch=16)[0]
    assert with_replicas.gradients == sum(it[3] for it in BYTES)


def test_uneven_batches_count_by_the_largest_share_rounded_up():
    # 7 samples in 2 microbatches: 4 and 3; on 3 replicas 2 and 1 and 1.
    assert largest_share(7, 2, 3) == 2
    plan = Plan([(0, 4, [0, 1, 2])], 2)
    assert plan_memory(plan, PROFILE, batch=7)[0].activations == (800 + 1600 + 2400 + 16) * 2 // 8


def test_a_shared_parameter_lies_once_in_a_stage():
    tied = Profile("tied", 8, PROFILE.layers, (Tie("weight", 50, (0, 2)),))
    whole, cut = Plan([(0, 4, [0])], 1), Plan([(0, 1, [0]), (1, 4, [1])], 1)
    assert plan_memory(whole, tied, batch=8)[0].parameters == 610 - 50
    assert plan_memory(cut, tied, batch=8)[1].parameters == 510


@given(
    st.sampled_from(PLANNED),
    st.integers(1, 6),
    st.integers(1, 30),
    st.one_of(st.none(), st.integers(1, 9)),
)
@settings(max_examples=150)
def test_the_closed_form_of_what_is_in_flight_is_that_of_the_orders(order, stages, microbatches, most):
    plan = Plan([(s, s + 1, [s]) for s in range(stages)], microbatches, order=order, max_in_flight=most)
    assert [peak_in_flight(order, stages - 1 - s, microbatches, most) for s in range(stages)] == [
        actions.peak_in_flight(own) for own in plan.passes
    ]


def test_what_does_not_fit_says_where_and_by_how_much():
    plan = Plan([(0, 1, [0]), (1, 3, [1, 2]), (3, 4, [3])], 4)
    # stage 1: 500 + 500 + 1000 + 3000 + 150
    check_memory(plan, PROFILE, with_reserve(5150), batch=24)
    with pytest.raises(PlanError, match="1 B too many"):
        check_memory(plan, PROFILE, with_reserve(5150) - 1, batch=24)
    with pytest.raises(
        PlanError,
        match=r"plan: stage 1 \(layers \[1, 3\)\) on rank 2 must fit into 5.50 KiB with 10 % to spare, got "
        r"5.03 KiB, 30 B too many: parameters 500 B, gradients 500 B, optimizer 1000 B, activations "
        r"2.93 KiB, messages 150 B, 2 of 4 microbatches in flight$",
    ):
        check_memory(plan, PROFILE, {0: 10**6, 1: 5633, 2: 5632, 3: 10**6}, batch=24)


def test_the_stage_that_misses_most_is_named():
    plan = Plan([(0, 1, [0]), (1, 4, [1])], 1)
    with pytest.raises(PlanError, match=r"stage 1 .* recomputation"):
        check_memory(Plan(plan.stages, 1, recompute=True), PROFILE, 1, batch=8)


@given(st.sampled_from(PLANNED), st.integers(1, 8), st.booleans(), st.integers(1000, 40000), st.booleans())
def test_fits_is_what_the_check_says(order, microbatches, recompute, limit, has_buffers):
    plan = Plan([(0, 1, [0]), (1, 3, [1, 2]), (3, 4, [3])], microbatches, order=order, recompute=recompute)
    peer_bytes = 9000 * has_buffers
    try:
        check_memory(plan, PROFILE, limit, batch=24, peer_bytes=peer_bytes)
        passed = True
    except PlanError as error:
        passed = False
        assert ("groups 8.79 KiB" in str(error)) == (has_buffers and "stage 1" in str(error))
    assert fits(plan, PROFILE, dict.fromkeys(range(4), limit), batch=24, peer_bytes=peer_bytes) == passed


def test_limits_are_needed_for_every_rank_and_positive():
    assert rank_limits(5, (0, 3)) == {0: 5, 3: 5}
    with pytest.raises(PlanError, match=r"memory: must have a limit for rank 1, got those of \[0\]"):
        rank_limits({0: 5}, (0, 1))
    with pytest.raises(PlanError, match="memory: limit of rank 0 must be at least 1 byte, got 0"):
        rank_limits(0, (0,))


def test_a_replica_without_samples_is_refused():
    with pytest.raises(BatchError, match="batch of 7 samples: must have at least 8"):
        largest_share(7, 4, 2)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (12 << 30, "12.00 GiB")]
)
def test_readable(size, text):
    assert readable(size) == text


def replayed_bytes(plan, profile, steps, *, has_replicas):  # noqa: PLR0912 - a case for each kind of step
    """The most that a rank holds beside parameters, tensor by tensor; one sample a microbatch, all kept."""
    last_stage = len(plan.stages) - 1
    here = {step.action.stage for step in steps}
    splits = any(step.action.phase is Phase.WEIGHTS for step in steps)
    layers = {it: range(plan.stages[it].start, plan.stages[it].end) for it in here}
    there: dict[tuple[object, ...], int] = {}
    on_their_way: list[tuple[object, ...]] = []
    in_flight = actions.peak_in_flight([it.action for it in steps if it.kind == "compute"])
    most = 0

    def crossing(stage):
        return profile.layers[plan.stages[stage].end - 1].output_bytes if 0 <= stage < last_stage else 0

    def note(working=0):
        nonlocal most
        most = max(most, sum(there.values()) + working)

    def update(stages):
        for stage in stages:
            for at in layers[stage]:
                there["gradient", at] = profile.layers[at].gradient_bytes

    if has_replicas:
        update(here)
    for step in steps:
        action, stage, m = step.action, step.action.stage, step.action.microbatch
        own = layers[stage]
        match step.kind, action.phase:
            case "receive", Phase.FORWARD:
                there["output", stage - 1, m] = crossing(stage - 1)
            case "receive", _:
                there["back", stage, m] = crossing(stage)
            case "compute", Phase.FORWARD:
                there.pop(("output", stage - 1, m), None)  # among what its first layer saves
                for at in own:
                    it = profile.layers[at]
                    there["saved", at, m] = it.saved_bytes - (it.passing_bytes if at > own[0] else 0)
                    note(it.working_bytes - it.working_fixed_bytes)
                there["output", stage, m] = crossing(stage)
            case "compute", Phase.BACKWARD:
                if stage + 1 not in here:
                    del there["output", stage, m]
                for at in reversed(own):
                    it = profile.layers[at]
                    again = crossing(stage) if at == own[-1] else 0
                    note((it.split_working_bytes if splits else it.working_bytes) - again)
                    if splits:
                        there["split", at, m] = it.split_bytes
                    else:
                        there["gradient", at] = it.gradient_bytes
                        del there["saved", at, m]
                for at in reversed(own if splits else ()):
                    it = profile.layers[at]
                    there["saved", at, m] -= it.tail_bytes if it.gradient_bytes else there["saved", at, m]
                    if it.gradient_bytes:
                        break
                there.pop(("back", stage, m), None)
                there["back", stage - 1, m] = crossing(stage - 1)
            case "compute", Phase.WEIGHTS:
                for at in reversed(own):
                    note(profile.layers[at].working_fixed_bytes)
                    there["gradient", at] = profile.layers[at].gradient_bytes
                    del there["saved", at, m], there["split", at, m]
            case "send", Phase.BACKWARD:
                on_their_way.append(("back", stage - 1, m))
                if len(on_their_way) > in_flight + 1:
                    del there[on_their_way.pop(0)]
    kept = {it: size for it, size in there.items() if it[0] == "gradient"}
    return max(most, sum(kept.values()) + max(profile.update_bytes(r.start, r.stop) for r in layers.values()))


@given(
    profiles(max_layers=5, samples=1),
    st.sampled_from(sorted(ORDERS)),
    st.integers(1, 6),
    st.integers(1, 2),
    st.data(),
)
@settings(max_examples=150)
def test_a_replay_of_steps_holds_as_much(drawn, order, microbatches, replicas, data):
    """And on ranks with one stage no more than programs reckon with before there is a plan."""
    profile = replace(drawn, ties=())
    count = data.draw(st.integers(1, profile.depth))
    workers = data.draw(
        st.sampled_from([it for it in range(1, count + 1) if ORDERS[order].layout(count, it)] or [0])
    )
    assume(workers)
    layout = ORDERS[order].layout(count, workers)
    home = {stage: worker for worker, held in enumerate(layout) for stage in held}
    cuts = sorted(data.draw(st.permutations(range(1, profile.depth)))[: count - 1])
    bounds = pairwise((0, *cuts, profile.depth))
    ranks = [range(replicas * home[it], replicas * home[it] + replicas) for it in range(count)]
    plan = Plan([(*at, own) for at, own in zip(bounds, ranks, strict=True)], microbatches, order)
    found = plan_memory(plan, profile, batch=microbatches * replicas)
    for worker, steps in zip(plan.workers, with_messages(plan.passes), strict=True):
        need = found[worker.stages[0]]
        least = replayed_bytes(plan, profile, steps, has_replicas=replicas > 1)
        assert need.total - need.parameters - need.optimizer == least
        if len(worker.stages) == 1 and order in PLANNED:
            most = most_memory(plan, profile, batch=microbatches * replicas, stage=worker.stages[0])
            assert need.total <= most.total
