"""Orders with their messages: drawn ones, no deadlock with blocking sends, and what the check refuses."""

import re
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.order.actions import Action, Phase, parse
from arborcast.pipeline.order.cap import capped
from arborcast.pipeline.order.gpipe import gpipe
from arborcast.pipeline.order.interleaved import interleaved
from arborcast.pipeline.order.list_order import list_order
from arborcast.pipeline.order.one_forward_one_backward import one_forward_one_backward
from arborcast.pipeline.order.pass_messages import WorkerStep, with_messages
from arborcast.pipeline.order.zero_bubble import zb_h1, zb_v
from tests.support.blocking_sends import check_order
from tests.support.refusals import refuses

CAPPED = gpipe, one_forward_one_backward, list_order
"""Those that a cap may be put on."""

MAKERS = (
    *CAPPED,
    zb_h1,
    lambda workers, microbatches: zb_v(2 * workers, microbatches),
    lambda workers, microbatches: interleaved((2 + microbatches % 3) * workers, microbatches, workers),
)


def drawn(*lines):
    """Steps of stages 0, 1, ... from text: `+F0` posts a receive, `F0` computes, `F0>` sends."""
    return tuple(tuple(step(word, stage) for word in line.split()) for stage, line in enumerate(lines))


def step(word, stage):
    kind = "receive" if word[0] == "+" else "send" if word[-1] == ">" else "compute"
    return WorkerStep(kind, *parse(word.strip("+>"), stage))


def passes(*lines):
    """Those of stages 0, 1, ..."""
    return tuple(parse(line, stage) for stage, line in enumerate(lines))


def picture(steps):
    marks = {"receive": "+{}", "compute": "{}", "send": "{}>"}
    return [" ".join(marks[it.kind].format(it.action) for it in own) for own in steps]


def peak_posted(steps):
    """Most receives posted whose pass has not been done."""
    now = peak = 0
    received = {it.action for it in steps if it.kind == "receive"}
    for it in steps:
        now += it.kind == "receive"
        now -= it.kind == "compute" and it.action in received
        peak = max(peak, now)
    return peak


@st.composite
def any_orders(draw):
    """Orders that some execution gives: what is ready is done in any order, on every stage another."""
    home = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))  # of each stage
    splits, microbatches = draw(st.booleans()), draw(st.integers(1, 5))
    order = {worker: [] for worker in sorted(set(home))}
    ready = [Action(Phase.FORWARD, m, 0) for m in range(microbatches)]
    while ready:
        action = ready.pop(draw(st.integers(0, len(ready) - 1)))
        _, m, stage = action.phase, action.microbatch, action.stage
        order[home[stage]].append(action)
        match action.phase:
            case Phase.FORWARD if stage == len(home) - 1:
                ready.append(Action(Phase.BACKWARD, m, stage))
            case Phase.FORWARD:
                ready.append(Action(Phase.FORWARD, m, stage + 1))
            case Phase.BACKWARD:
                ready += [Action(Phase.WEIGHTS, m, stage)] if splits else []
                ready += [Action(Phase.BACKWARD, m, stage - 1)] if stage else []
    return tuple(map(tuple, order.values()))


def test_receives_are_posted_before_passes_that_begin_later():
    assert picture(with_messages(one_forward_one_backward(2, 3))) == [
        "F0 F0> F1 F1> +B0 B0 F2 F2> +B1 B1 +B2 B2",
        "+F0 +F1 F0 B0 B0> F1 +F2 B1 B1> F2 B2 B2>",
    ]
    assert picture(with_messages(gpipe(2, 3))) == [
        "F0 F0> F1 F1> F2 F2> +B0 +B1 B0 +B2 B1 B2",
        "+F0 +F1 F0 +F2 F1 F2 B0 B0> B1 B1> B2 B2>",
    ]


def test_stages_of_one_worker_exchange_no_messages():
    """A V: stages 0 and 3 on worker 0, stages 1 and 2, between which nothing is sent, on worker 1."""
    assert picture(with_messages(zb_v(4, 1))) == [
        "F0 F0> +F0 F0 B0 B0> W0 +B0 B0 W0",
        "+F0 F0 F0 F0> +B0 B0 W0 B0 B0> W0",
    ]


def check(order):
    """The steps; nothing deadlocks where sends block, passes wait for all messages, or tags tell these."""
    steps = with_messages(order)
    for strictly in ({}, {"passes_wait": True}, {"tags": True}):
        check_order(steps, **strictly)
    for actions, own in zip(order, steps, strict=True):
        assert tuple(it.action for it in own if it.kind == "compute") == actions
    return steps


@pytest.mark.parametrize(("maker", "most"), [*zip(MAKERS, (2, 2, 5, 2, 3, 4), strict=True)])
def test_nothing_deadlocks_and_few_buffers_wait(maker, most):
    for stages, microbatches in product(range(1, 6), range(1, 9)):
        assert max(map(peak_posted, check(maker(stages, microbatches)))) <= most


@given(st.sampled_from(CAPPED), st.integers(1, 6), st.integers(1, 12), st.integers(1, 12))
def test_nothing_deadlocks_with_a_cap(maker, stages, microbatches, cap):
    check(capped(maker(stages, microbatches), cap))


@given(any_orders())
def test_nothing_deadlocks_in_any_order_that_can_be_done_and_results_are_sent_at_once(order):
    for own in check(order):
        for before, it in pairwise(own):
            if it.kind == "send":
                assert before.action == it.action or before.kind == "receive"


GOOD = drawn("F0 F0> +B0 F1 F1> +B1 B0 B1", "+F0 F0 +F1 B0 B0> F1 B1 B1>")


def test_posted_one_pass_ahead_a_receive_stops_passes_that_wait_for_messages():
    """What happened on a GPU: stage 1 must do B0 before F1 is sent, and loads code that waits for F1."""
    check_order(GOOD)
    with pytest.raises(PlanError, match="stage 0 waits in compute F1 for send B0 of stage 1; stage 1 waits"):
        check_order(GOOD, passes_wait=True)


def test_the_check_accepts_a_drawn_order():
    check_order(GOOD)
    check_order(drawn("F0 B0 F1 B1"))


@refuses("lines", "message")
def test_the_check_refuses(lines, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        check_order(drawn(*lines))


def test_tags_find_their_receives_in_any_order():
    steps = drawn("F0 F0> +B1 +B0 F1 F1> B0 B1", "+F0 +F1 F0 F1 B0 B0> B1 B1>")
    check_order(steps, tags=True)
    with pytest.raises(PlanError, match="must be received as B0"):
        check_order(steps)


def test_orders_that_cannot_be_done():
    with pytest.raises(
        PlanError,
        match="passes must not wait for each other in a circle, got stage 0 before B0, stage 1 before F1",
    ):
        with_messages(passes("F0 B0 F1 B1", "F0 F1 B0 B1"))
    with pytest.raises(PlanError, match="in a circle, got stage 1 before F0"):
        with_messages((parse("F0@1 B0@1 F0@0 B0@0"),))  # of one worker
    with pytest.raises(PlanError, match="order: stage 1: the input of F1 must be sent, no stage does"):
        with_messages(passes("F0 B0", "F0 F1 B0 B1"))
