"""Memory of stages against sums by hand, and what is said where a plan does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.pipeline.costs.devices import with_reserve
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.order import actions
from arborcast.pipeline.planning.memory_need import (
    MemoryNeed,
    check_memory,
    fits,
    largest_share,
    peak_in_flight,
    rank_limits,
    readable,
    stage_memory,
)
from arborcast.pipeline.profiles import Layer, Profile, Tie
from arborcast.pipeline.stages import Plan
from tests.support.planning_cases import PLANNED

# Of 8 samples: (output, saved, parameters, gradients, optimizer) bytes.
BYTES = [(80, 800, 100, 90, 180), (160, 1600, 200, 200, 400), (240, 2400, 300, 300, 600), (8, 16, 10, 10, 20)]
PROFILE = Profile(
    "drawn",
    8,
    tuple(Layer(f"layer{index}", 1.0, 2.0, *sizes) for index, sizes in enumerate(BYTES)),
)


def test_the_terms_of_a_stage_by_hand():
    # 24 samples in 4 microbatches of 6, 3 on each replica. Stage 1 is the last but one: 1F1B keeps 2.
    plan = Plan([(0, 1, [0]), (1, 3, [1, 2]), (3, 4, [3])], 4)
    assert stage_memory(plan, PROFILE, batch=24, stage=1) == MemoryNeed(
        parameters=200 + 300,
        gradients=200 + 300,
        optimizer=400 + 600,
        activations=2 * (1600 + 2400) * 3 // 8,
        boundary=2 * (80 + 240) * 3 // 8,
    )


def test_recomputation_keeps_inputs_and_one_microbatch():
    """Of the microbatch under way the input is among what it holds."""
    plan = Plan([(0, 1, [0]), (1, 3, [1, 2]), (3, 4, [3])], 4, recompute=True)
    memory = stage_memory(plan, PROFILE, batch=24, stage=1)
    assert memory.activations == 1 * 80 * 3 // 8 + (1600 + 2400) * 3 // 8


def test_the_ends_have_no_boundary_outside():
    plan = Plan([(0, 1, [0]), (1, 4, [1])], 1)
    assert stage_memory(plan, PROFILE, batch=8, stage=0).boundary == 2 * 80
    assert stage_memory(plan, PROFILE, batch=8, stage=1).boundary == 2 * 80


def test_a_rank_with_several_stages_needs_the_sum_at_its_fullest_moment():
    """Rank 0: F0@0 F1@0 F0@2 F1@2 B0@2 ...: both microbatches of both stages; rank 1 ends F1@3 with three."""
    stages = [(0, 1, [0]), (1, 2, [1]), (2, 3, [0]), (3, 4, [1])]
    tied = Profile("tied", 8, PROFILE.layers, (Tie("weight", 50, (0, 2)),))
    plan = Plan(stages, 2, "interleaved")
    first, second = (stage_memory(plan, tied, batch=16, stage=it) for it in (0, 1))
    assert (
        first
        == stage_memory(plan, tied, batch=16, stage=2)
        == MemoryNeed(
            parameters=100 + 300 - 50,
            gradients=90 + 300 - 50,
            optimizer=180 + 600,
            activations=2 * 800 + 2 * 2400,
            boundary=2 * (80 + 160 + 240),
        )
    )
    assert second.activations == 2 * 1600 + 16
    again = stage_memory(Plan(stages, 2, "interleaved", recompute=True), tied, batch=16, stage=0)
    assert again.activations == 2 * 160 + 2400 - 160  # inputs of stage 2, and the rest of it once


def test_zero_bubble_keeps_what_the_first_stage_keeps():
    plan = Plan([(0, 1, [0]), (1, 3, [1]), (3, 4, [2])], 6, "zb-h1")
    saved = [800, 1600 + 2400, 16]
    for stage, size in enumerate(saved):
        assert stage_memory(plan, PROFILE, batch=48, stage=stage).activations == 3 * size
    with pytest.raises(PlanError, match=r"3 of 6 microbatches in flight$"):
        check_memory(plan, PROFILE, 1, batch=48)


def test_uneven_batches_count_by_the_largest_share_rounded_up():
    # 7 samples in 2 microbatches: 4 and 3; on 3 replicas 2 and 1 and 1.
    assert largest_share(7, 2, 3) == 2
    plan = Plan([(0, 4, [0, 1, 2])], 2)
    assert stage_memory(plan, PROFILE, batch=7, stage=0).activations == (800 + 1600 + 2400 + 16) * 2 // 8


def test_a_shared_parameter_lies_once_in_a_stage():
    tied = Profile("tied", 8, PROFILE.layers, (Tie("weight", 50, (0, 2)),))
    whole, cut = Plan([(0, 4, [0])], 1), Plan([(0, 1, [0]), (1, 4, [1])], 1)
    assert stage_memory(whole, tied, batch=8, stage=0).parameters == 610 - 50
    assert stage_memory(cut, tied, batch=8, stage=1).parameters == 510


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
    # stage 1: 500 + 500 + 1000 + 3000 + 240
    check_memory(plan, PROFILE, with_reserve(5240), batch=24)
    with pytest.raises(PlanError, match="1 B too many"):
        check_memory(plan, PROFILE, with_reserve(5240) - 1, batch=24)
    with pytest.raises(
        PlanError,
        match=r"plan: stage 1 \(layers \[1, 3\)\) on rank 2 must fit into 5.50 KiB with 10 % to spare, got "
        r"5.12 KiB, 120 B too many: parameters 500 B, gradients 500 B, optimizer 1000 B, activations "
        r"2.93 KiB, messages 240 B, 2 of 4 microbatches in flight$",
    ):
        check_memory(plan, PROFILE, {0: 10**6, 1: 5633, 2: 5632, 3: 10**6}, batch=24)


def test_the_stage_that_misses_most_is_named():
    plan = Plan([(0, 1, [0]), (1, 4, [1])], 1)
    with pytest.raises(PlanError, match=r"stage 1 .* recomputation"):
        check_memory(Plan(plan.stages, 1, recompute=True), PROFILE, 1, batch=8)


@given(st.sampled_from(PLANNED), st.integers(1, 8), st.booleans(), st.integers(1000, 40000))
def test_fits_is_what_the_check_says(order, microbatches, recompute, limit):
    plan = Plan([(0, 1, [0]), (1, 3, [1, 2]), (3, 4, [3])], microbatches, order=order, recompute=recompute)
    try:
        check_memory(plan, PROFILE, limit, batch=24)
        passed = True
    except PlanError:
        passed = False
    assert fits(plan, PROFILE, dict.fromkeys(range(4), limit), batch=24) == passed


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
