"""Orders: drawn ones, and what holds for all of them."""

import re
from itertools import product

import pytest

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.order.actions import Action, Phase, parse, peak_in_flight
from arborcast.pipeline.order.cap import capped
from arborcast.pipeline.order.gpipe import gpipe
from arborcast.pipeline.order.interleaved import interleaved
from arborcast.pipeline.order.list_order import list_order
from arborcast.pipeline.order.one_forward_one_backward import one_forward_one_backward
from arborcast.pipeline.order.zero_bubble import zb_h1, zb_v
from arborcast.pipeline.stages import Plan
from tests.support.refusals import refuses

SIZES = list(product(range(1, 7), range(1, 13)))
"""Stages and microbatches."""

INTERLEAVED = [("interleaved", each) for each in (2, 3, 4)]
"""With so many stages on each worker."""

MAKERS = gpipe, one_forward_one_backward, list_order
"""Those of whole backward passes and one stage on each worker."""


def drawn(*lines):
    """What stages 0, 1, ... do."""
    return tuple(parse(line, stage) for stage, line in enumerate(lines))


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


def test_microbatches_in_flight_of_four_stages():
    """The figures that SPP's closed form gives, and those of 1F1B beside them."""
    for maker, peaks in (
        (list_order, [13, 9, 5, 1]),
        (one_forward_one_backward, [4, 3, 2, 1]),
        (gpipe, [32, 32, 32, 32]),
    ):
        assert [peak_in_flight(actions) for actions in maker(4, 32)] == peaks


def test_the_list_order_is_a_march():
    """No queue ever holds two microbatches but the first, so that microbatch m leaves block b in pass m+b."""
    for stages, microbatches in SIZES:
        for stage, actions in enumerate(list_order(stages, microbatches)):
            passes = {
                Action(phase, m, stage): (m + block, phase is Phase.BACKWARD)
                for phase, block in ((Phase.FORWARD, 2 * stage), (Phase.BACKWARD, 4 * stages - 4 - 2 * stage))
                for m in range(microbatches)
            }
            assert list(actions) == sorted(passes, key=passes.__getitem__)


def ends(order, times):
    """When each worker ends where a pass of a phase takes so long, messages nothing; None if one cannot."""
    stages = 1 + max(action.stage for actions in order for action in actions)
    at, now, done, moved = [0] * len(order), [0] * len(order), {}, True
    while moved:
        moved = False
        for worker, actions in enumerate(order):
            while at[worker] < len(actions):
                phase, m, stage = (it := actions[at[worker]]).phase, it.microbatch, it.stage
                match phase:
                    case Phase.FORWARD:
                        needs = [(phase, m, stage - 1)] if stage else []
                    case Phase.BACKWARD:
                        needs = [(Phase.FORWARD, m, stage)]
                        needs += [(phase, m, stage + 1)] if stage + 1 < stages else []
                    case Phase.WEIGHTS:
                        needs = [(Phase.BACKWARD, m, stage)]
                if any(need not in done for need in needs):
                    break
                start = max([now[worker], *(done[need] for need in needs)])
                now[worker] = done[phase, m, stage] = start + times[phase]
                at[worker] += 1
                moved = True
    return now if all(index == len(actions) for index, actions in zip(at, order, strict=True)) else None


WHOLE = {Phase.FORWARD: 1, Phase.BACKWARD: 2}
HALVES = dict.fromkeys(Phase, 1)


def test_interleaved_takes_groups_of_microbatches_through_stages_in_turn():
    assert interleaved(4, 4, 2) == drawn(
        "F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B1@2 F2@2 B0@0 F3@2 B1@0 B2@2 B3@2 B2@0 B3@0",
        "F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1",
    )


def test_interleaved_leaves_out_what_the_last_group_lacks():
    assert interleaved(4, 1, 2) == drawn("F0@0 F0@2 B0@2 B0@0", "F0@1 F0@3 B0@3 B0@1")


def test_zb_h1_puts_gradients_of_parameters_off():
    assert zb_h1(3, 4) == drawn(
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    )


def test_zb_v_goes_there_and_back():
    assert zb_v(4, 3) == drawn(
        "F0@0 F1@0 F2@0 F0@3 B0@3 W0@3 F1@3 B1@3 W1@3 B0@0 W0@0 F2@3 B2@3 W2@3 B1@0 W1@0 B2@0 W2@0",
        "F0@1 F0@2 F1@1 F1@2 B0@2 W0@2 F2@1 B0@1 W0@1 F2@2 B1@2 W1@2 B1@1 B2@2 B2@1 W1@1 W2@2 W2@1",
    )


def test_orders_that_split_backward_passes_say_so_and_where_their_stages_are():
    assert {name for name, order in ORDERS.items() if order.splits} == {"zb-h1", "zb-v"}
    layout = ORDERS["zb-v"].layout
    assert layout(6, 3) == ((0, 5), (1, 4), (2, 3))
    assert layout(3, 3) is layout(5, 3) is layout(9, 3) is None


def test_zb_v_of_few_microbatches_leaves_out_what_there_is_not():
    """Of fewer than fill it, the order of 2W-1 without the others, and no other one."""
    for workers in range(1, 7):
        full = zb_v(2 * workers, 2 * workers - 1)
        for microbatches in range(1, 2 * workers - 1):
            kept = tuple(tuple(it for it in actions if it.microbatch < microbatches) for actions in full)
            assert zb_v(2 * workers, microbatches) == kept


@pytest.mark.parametrize(
    ("name", "each"), [(it, 1) for it in ("gpipe", "1f1b", "pe", "zb-h1")] + [("zb-v", 2)] + INTERLEAVED
)
def test_every_pass_once_in_turn_and_nobody_waits_for_ever(name, each):
    phases = [it for it in Phase if ORDERS[name].splits or it is not Phase.WEIGHTS]
    for workers, microbatches in SIZES:
        order = ORDERS[name].make(each * workers, microbatches, workers)
        assert ends(order, HALVES) is not None
        passes = {(phase, stage): [] for phase in phases for stage in range(each * workers)}
        for it in (it for actions in order for it in actions):
            passes[it.phase, it.stage].append(it.microbatch)
        assert all(it == list(range(microbatches)) for it in passes.values())


def test_in_flight_of_split_and_interleaved_orders_has_a_closed_form():
    """Passes of stages, which are as many times smaller as a worker has stages."""
    for workers, microbatches in SIZES:
        for actions in zb_h1(workers, microbatches):
            assert peak_in_flight(actions) == min(microbatches, workers)
        peaks = [peak_in_flight(actions) for actions in zb_v(2 * workers, microbatches)]
        assert max(peaks) <= 2 * min(microbatches, workers)
        if microbatches >= 2 * workers:
            assert peaks == [2 * workers] * workers
        for each in (2, 3):
            for worker, actions in enumerate(interleaved(each * workers, microbatches, workers)):
                most = min(each * microbatches, 2 * (workers - 1 - worker) + (each - 1) * workers + 1)
                assert peak_in_flight(actions) <= most
                if microbatches % workers == 0:
                    assert peak_in_flight(actions) == most


def test_steps_of_equal_stages_have_a_closed_form():
    """Where messages cost nothing: in units of F = B = W for split passes, F = B / 2 for whole ones."""
    for workers, microbatches in SIZES:
        rest = workers - 1
        assert max(ends(one_forward_one_backward(workers, microbatches), WHOLE)) == 3 * (microbatches + rest)
        if microbatches >= workers:
            assert max(ends(zb_h1(workers, microbatches), HALVES)) == 3 * microbatches + rest
        if microbatches >= 2 * workers:  # nobody waits from the first pass on
            found = ends(zb_v(2 * workers, microbatches), HALVES)
            assert max(found) == 6 * microbatches + rest
        for each in (2, 3):
            if microbatches % workers == 0:
                found = ends(interleaved(each * workers, microbatches, workers), WHOLE)
                assert max(found) == 3 * (each * microbatches + rest)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_cap_is_kept_and_nothing_waits_for_ever(maker):
    for stages, microbatches in SIZES:
        order = maker(stages, microbatches)
        assert ends(order, HALVES)
        for cap in range(1, microbatches + 1):
            limited = capped(order, cap)
            assert ends(limited, HALVES)
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
    one = "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"
    assert Plan(stages, 6, order="gpipe", max_in_flight=1).passes == drawn(one, one)
    assert Plan(stages, 6, order="zb-h1").passes == zb_h1(2, 6)
    back = [*stages, (2, 3, [1, 2]), (3, 4, [0])]
    assert Plan(back, 6, order="zb-v").passes == zb_v(4, 6)
    assert [(it.stages, it.ranks) for it in Plan(back, 6, order="zb-v").workers] == [
        ((0, 3), (0,)),
        ((1, 2), (1, 2)),
    ]
    around = [*stages, (2, 3, [0]), (3, 4, [1, 2])]
    assert Plan(around, 6, order="interleaved").passes == interleaved(4, 6, 2)
    assert Plan(around, 6, order="interleaved").ranks == (0, 1, 2)


@refuses("ranks", "more", "message")
def test_plans_that_an_order_cannot_carry_out(ranks, more, message):
    with pytest.raises(PlanError, match=re.escape(f"plan: {message}")):
        Plan([(index, index + 1, it) for index, it in enumerate(ranks)], 4, **more)
