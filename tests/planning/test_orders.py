"""Orders: drawn ones, and what holds for all of them."""

from itertools import product

import pytest

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.order.actions import Action, Phase, parse, peak_in_flight
from arborcast.pipeline.order.cap import capped
from arborcast.pipeline.stages import Plan

SIZES = list(product(range(1, 7), range(1, 13)))
"""Stages and microbatches."""

MAKERS = gpipe, one_forward_one_backward, list_order = [ORDERS[it].make for it in ("gpipe", "1f1b", "pe")]


def drawn(*lines):
    return tuple(parse(line) for line in lines)


def test_gpipe_fills_and_drains():
    assert gpipe(2, 3) == drawn("F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2")


def test_1f1b_warms_up_and_alternates():
    assert one_forward_one_backward(3, 4) == drawn(
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    )


def test_1f1b_with_fewer_microbatches_than_stages():
    assert one_forward_one_backward(4, 2) == drawn("F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1")


def test_the_list_order_keeps_four_more_per_stage():
    assert list_order(2, 7) == drawn(
        "F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 B3 B4 B5 B6",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6",
    )
    assert list_order(3, 7) == drawn(
        "F0 F1 F2 F3 F4 F5 F6 B0 B1 B2 B3 B4 B5 B6",
        "F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 B3 B4 B5 B6",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6",
    )


def test_microbatches_in_flight_of_four_stages():
    """The figures that SPP's closed form gives, and those of 1F1B beside them."""
    assert [peak_in_flight(actions) for actions in list_order(4, 32)] == [13, 9, 5, 1]
    assert [peak_in_flight(actions) for actions in one_forward_one_backward(4, 32)] == [4, 3, 2, 1]
    assert [peak_in_flight(actions) for actions in gpipe(4, 32)] == [32, 32, 32, 32]


@pytest.mark.parametrize("maker", MAKERS)
def test_every_pass_once_forward_first(maker):
    for stages, microbatches in SIZES:
        order = maker(stages, microbatches)
        assert len(order) == stages
        for actions in order:
            for phase in Phase:
                passes = [action.microbatch for action in actions if action.phase is phase]
                assert passes == list(range(microbatches))
            for m in range(microbatches):
                assert actions.index(Action(Phase.FORWARD, m)) < actions.index(Action(Phase.BACKWARD, m))


@pytest.mark.parametrize("maker", [one_forward_one_backward, list_order])
def test_the_last_stage_goes_back_at_once(maker):
    for stages, microbatches in SIZES:
        wanted = " ".join(f"F{m} B{m}" for m in range(microbatches))
        assert maker(stages, microbatches)[-1] == parse(wanted)


def test_warm_ups_of_the_list_order_have_a_closed_form():
    for stages, microbatches in SIZES:
        for stage, actions in enumerate(list_order(stages, microbatches)):
            warm_ups = actions.index(Action(Phase.BACKWARD, 0))
            assert warm_ups == min(microbatches, 4 * (stages - 1 - stage) + 1)
            assert peak_in_flight(actions) == warm_ups


def test_the_list_order_is_a_march():
    """No queue ever holds two microbatches but the first, so that microbatch m leaves block b in pass m+b."""
    for stages, microbatches in SIZES:
        for stage, actions in enumerate(list_order(stages, microbatches)):
            passes = {
                Action(phase, m): (m + block, phase is Phase.BACKWARD)
                for phase, block in ((Phase.FORWARD, 2 * stage), (Phase.BACKWARD, 4 * stages - 4 - 2 * stage))
                for m in range(microbatches)
            }
            assert list(actions) == sorted(passes, key=passes.__getitem__)


def runs(order):
    """Whether all stages finish where messages wait in buffers of any size."""
    at, done = [0] * len(order), set()
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(order):
            while at[stage] < len(actions):
                action = actions[at[stage]]
                source = stage - 1 if action.phase is Phase.FORWARD else stage + 1
                if 0 <= source < len(order) and (source, action) not in done:
                    break
                done.add((stage, action))
                at[stage] += 1
                moved = True
    return all(index == len(actions) for index, actions in zip(at, order, strict=True))


@pytest.mark.parametrize("maker", MAKERS)
def test_a_cap_is_kept_and_nothing_waits_for_ever(maker):
    for stages, microbatches in SIZES:
        order = maker(stages, microbatches)
        assert runs(order)
        for cap in range(1, microbatches + 1):
            limited = capped(order, cap)
            assert runs(limited)
            for before, after in zip(order, limited, strict=True):
                assert sorted(map(str, after)) == sorted(map(str, before))
                assert peak_in_flight(after) == min(cap, peak_in_flight(before))


def test_a_cap_delays_forward_passes():
    assert capped(gpipe(1, 3), 2) == drawn("F0 F1 B0 F2 B1 B2")
    assert capped(list_order(2, 6), 2) == drawn(
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5", "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"
    )
    assert capped(list_order(3, 8), 99) == list_order(3, 8)


def test_a_cap_that_cannot_be_kept():
    with pytest.raises(PlanError, match="max_in_flight: must be at least 1, got 0"):
        capped(list_order(2, 2), 0)
    backwards = drawn("F0 F1 F2 B2 B1 B0")
    with pytest.raises(
        PlanError, match=r"stage 0: B2 must be one of the 2 oldest microbatches in flight, which are \[0, 1\]"
    ):
        capped(backwards, 2)


def test_the_order_of_a_plan():
    stages = [(0, 1, [0]), (1, 2, [1, 2])]
    assert Plan(stages, 6, order="gpipe").passes == gpipe(2, 6)
    assert Plan(stages, 6, order="1f1b").passes == one_forward_one_backward(2, 6)
    assert Plan(stages, 6, order="pe").passes == list_order(2, 6)
    assert Plan(stages, 6, order="pe", max_in_flight=3).passes == capped(list_order(2, 6), 3)
    assert (
        Plan(stages, 6, order="gpipe", max_in_flight=1).passes
        == (parse("F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"),) * 2
    )
