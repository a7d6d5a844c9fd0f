"""The proven bound of the list order: thousands of random pipelines keep to it; plans by hand."""

import heapq
import random
from collections import deque
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.order.actions import Phase
from arborcast.pipeline.order.list_order import list_order
from arborcast.pipeline.profiles import Layer, Profile, Tie
from arborcast.pipeline.simulation.lower_bound import bound_us, least_us, proven_bound_us
from arborcast.pipeline.simulation.pass_simulator import simulate
from arborcast.pipeline.stages import Plan
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load
from tests.support.planning_cases import model, wired


def step_us(times, messages, microbatches):
    """When each stage ends in the list order, played without links or ranks.

    Args:
        times: forward and backward of each stage.
        messages: forth and back over each boundary.
        microbatches: their number.
    """
    order = list_order(len(times), microbatches)
    at, computing, there = [0] * len(times), [False] * len(times), set()
    queues = {(cut, phase): deque() for cut in range(len(messages)) for phase in Phase}
    sending, events, ticket, ends = set(), [], count(), [0] * len(times)

    def compute(stage, now):
        if computing[stage] or at[stage] == len(order[stage]):
            return
        action = order[stage][at[stage]]
        first = stage == (0 if action.phase is Phase.FORWARD else len(times) - 1)
        if first or action in there:
            computing[stage] = True
            lasts = times[stage][action.phase is Phase.BACKWARD]
            heapq.heappush(events, (now + lasts, next(ticket), "computed", stage, action))

    def send(cut, phase, now):
        queue = queues[cut, phase]
        if queue and id(queue) not in sending:
            sending.add(id(queue))
            action = queue.popleft()
            lasts = messages[cut][action.phase is Phase.BACKWARD]
            heapq.heappush(events, (now + lasts, next(ticket), "sent", cut, action))

    for stage in range(len(times)):
        compute(stage, 0)
    while events:
        now, _, what, where, action = heapq.heappop(events)
        forward = action.phase is Phase.FORWARD
        if what == "computed":
            computing[where], ends[where] = False, now
            at[where] += 1
            cut = where if forward else where - 1
            if 0 <= cut < len(messages):
                queues[cut, action.phase].append(action)
                send(cut, action.phase, now)
            compute(where, now)
        else:
            receiver = where + 1 if forward else where
            there.add(action.taker(len(times)))
            sending.remove(id(queues[where, action.phase]))
            send(where, action.phase, now)
            compute(receiver, now)
    return ends


def drawn(rng, most_stages=6, most_microbatches=16):
    stages = rng.randint(1, most_stages)
    times = [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(stages)]
    messages = [(rng.randint(0, 15), rng.randint(0, 15)) for _ in range(stages - 1)]
    return times, messages, rng.randint(1, most_microbatches)


def test_thousands_of_random_pipelines_keep_to_it():
    rng, closest = random.Random(6), 0
    for _ in range(3000):
        times, messages, m = drawn(rng)
        allreduce = [rng.randint(0, 50) for _ in times]
        busiest = m * max([f + b for f, b in times] + [us for both in messages for us in both])
        time = max(end + us for end, us in zip(step_us(times, messages, m), allreduce, strict=True))
        bound = proven_bound_us(busiest, len(times), m, max(allreduce))
        assert time <= bound
        closest = max(closest, time / bound if bound else 0)
    assert closest == 1  # one stage


def test_the_bound_of_a_plan_by_hand():
    """Two stages of 3 us on 2 samples, 4 microbatches; 4 us forth and 8 us back: (1 + 4/4) · 4·8 = 64."""
    fabric = wired(2, {(0, 1): 2, (1, 0): 1}, both=False)
    costs = model([1, 1], samples=2, output=8000)
    plan = Plan([(0, 1, [0]), (1, 2, [1])], 4, "pe")
    assert bound_us(plan, costs, LinkCosts(fabric), batch=8) == 64
    updated = replace(costs, layers=(replace(costs.layers[0], update_us=5), costs.layers[1]))
    assert bound_us(plan, updated, LinkCosts(fabric, message_us=2), batch=8) == 85
    # The largest microbatch has 2 samples, so that 5 samples count like 8.
    assert bound_us(plan, costs, LinkCosts(fabric), batch=5) == 64


def test_messages_over_several_links_by_hand():
    """8000 bytes at the 1000 per us of the slower link, behind 1 + 2 us: 11 us, five times."""
    hops = [(0, 2, 2, 1), (2, 1, 1, 2), (1, 2, 4, 1), (2, 0, 4, 2)]
    links = [Link(u, v, Fraction(rate), Fraction(latency)) for u, v, rate, latency in hops]
    network = LinkCosts(Topology.build("hub", 2, links, ["hub"]), message_us=2)
    plan = Plan([(0, 1, [0]), (1, 2, [1])], 1, "pe")
    assert bound_us(plan, model([1, 1], samples=2, output=8000), network) == 5 * (2 + 11)


def test_messages_that_share_a_link_by_hand():
    """Two ranks send 1000 bytes each over the one link from the hub: 2 us at half of 1000 per us."""
    star = wired(3, {(rank, 3): 1 for rank in range(3)}, switches=["hub"])
    plan = Plan([(0, 1, [0, 1]), (1, 2, [2])], 1, "pe")
    assert bound_us(plan, model([0, 0], output=1000), LinkCosts(star), batch=2) == 5 * 2


@pytest.mark.parametrize(
    ("handling_us", "output_bytes", "busiest"), [(10, 0, 2 * 10 + 4 * 10), (0, 30_000, 60)]
)
def test_replicas_with_unequal_shares_by_hand(handling_us, output_bytes, busiest):
    """Of 6 samples two ranks send 3 each to three ranks, of which the middle one takes from both."""
    fabric = wired(5, dict.fromkeys(combinations(range(5), 2), 1))
    layers = (Layer("a", 0, 0, output_bytes, 0, 0, 0), Layer("b", 5, 5, 0, 0, 0, 0))
    plan = Plan([(0, 1, [0, 1]), (1, 2, [2, 3, 4])], 1, "pe")
    network = LinkCosts(fabric, handling_us=handling_us)
    assert bound_us(plan, Profile("drawn", 1, layers), network, batch=6) == 5 * busiest


@st.composite
def plans(draw):
    """Plans with replicas on fabrics where messages share links."""
    replicas = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    microbatches = draw(st.integers(1, 8))
    batch = draw(st.integers(microbatches * max(replicas), microbatches * max(replicas) + 9))
    fabric = load(draw(st.sampled_from(["star:12", "ring:12", "mesh:3x4"])))
    ranks = iter(draw(st.permutations(range(12))))
    stages = [(i, i + 1, [next(ranks) for _ in range(n)]) for i, n in enumerate(replicas)]
    number = st.integers(0, 9)
    layers = tuple(
        Layer(f"layer{i}", draw(number), draw(number), 1000 * draw(number), 0, 0, 0, update_us=draw(number))
        for i in range(len(replicas))
    )
    plan = Plan(stages, microbatches, "pe", recompute=draw(st.booleans()))
    return plan, Profile("drawn", 2, layers), fabric, batch


@settings(max_examples=150, deadline=None)
@given(plans(), st.sampled_from([0, 3]))
def test_the_simulator_keeps_to_it_on_any_topology(drawn, message_us):
    """Also where messages share links: they count at the even share, below which fairness never goes."""
    plan, costs, fabric, batch = drawn
    network = LinkCosts(fabric, message_us=message_us, handling_us=message_us / 2)
    time = simulate(plan, costs, network, batch=batch).time_us
    assert time <= bound_us(plan, costs, network, batch=batch) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(plans(), st.sampled_from(sorted(ORDERS)))
def test_no_order_goes_below_what_all_need(drawn, order):
    """The ranks of the drawn plan, with several stages each where the order lays them so."""
    plan, costs, fabric, batch = drawn
    if plan.recompute and ORDERS[order].splits:
        return
    workers = len(plan.stages)
    each = next(it for it in (1, 2) if ORDERS[order].layout(it * workers, workers))
    layout = ORDERS[order].layout(each * workers, workers)
    ranks = {stage: plan.stages[worker].ranks for worker, held in enumerate(layout) for stage in held}
    stages = [(stage, stage + 1, ranks[stage]) for stage in sorted(ranks)]
    layers = [replace(layer, name=f"{layer.name}.{it}") for it in range(each) for layer in costs.layers]
    costs = replace(costs, layers=tuple(layers))
    other = Plan(stages, plan.microbatches, order, recompute=plan.recompute)
    time = simulate(other, costs, LinkCosts(fabric), batch=batch).time_us
    assert time >= least_us(other, costs, batch=batch) * (1 - 1e-9)


def test_what_all_need_by_hand():
    """Rank 1 waits for 1 us of stage 0, works 2 · (2 + 4), and 3 us of stage 0 follow unless W can."""
    costs = Profile("drawn", 1, (Layer("a", 1, 3, 0, 0, 0, 9), Layer("b", 2, 4, 0, 0, 0, 9)))
    stages = [(0, 1, [0]), (1, 2, [1])]
    assert least_us(Plan(stages, 2, "1f1b"), costs, batch=2) == 1 + 12 + 3
    assert least_us(Plan(stages, 2, "1f1b", recompute=True), costs, batch=2) == 1 + 16 + 4
    assert least_us(Plan(stages, 2, "zb-h1"), costs, batch=2) == 1 + 12
    # Of 3 and 2 samples the smaller microbatch may be the first and the last.
    assert least_us(Plan(stages, 2, "1f1b"), costs, batch=5) == 2 * 1 + 5 * 6 + 2 * 3
    assert least_us(Plan(stages, 1, "1f1b"), replace(costs, samples=2)) == 1 + 6 + 3


def test_allreduces_and_ties_are_in_it():
    costs = model([(1, 1)] * 2, weights=5000, ties=[Tie("tied", 1000, (0, 1))])
    network = LinkCosts(load("full:3"))
    plan = Plan([(0, 1, [0, 1]), (1, 2, [2])], 4, "pe")
    exchange = network.allreduce_us([0, 1], 5000) + network.allreduce_us([0, 1, 2], 1000)
    # Each microbatch of 2 samples takes 4 us on rank 2.
    assert bound_us(plan, costs, network, batch=8) == pytest.approx(2 * 16 + exchange)
    assert simulate(plan, costs, network, batch=8).time_us <= 2 * 16 + exchange
