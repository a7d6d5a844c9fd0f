"""The simulator of a step: drawn timelines, closed forms, longest paths, and links that messages share."""

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise, permutations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.meshes import Mesh
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.order.actions import Phase, parse
from arborcast.pipeline.profiles import Layer, Profile, Tie
from arborcast.pipeline.simulation.clock import Clock
from arborcast.pipeline.simulation.deliveries import Deliveries, Pair
from arborcast.pipeline.simulation.link_sharing import MessageInFlight, SharedLinks
from arborcast.pipeline.simulation.pass_simulator import simulate
from arborcast.pipeline.simulation.synchronisation import bucket_runs, ties_us
from arborcast.pipeline.stage_sharding import StageSharding
from arborcast.pipeline.stages import BUCKET_BYTES, Plan, Stage, divided
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load
from tests.support.planning_cases import line, model, wired


def halved(times, share=0.5, **more):
    """A share of each backward pass computes gradients of parameters."""
    profile = model(times, **more)
    return replace(
        profile, layers=tuple(replace(it, weights_us=share * it.backward_us) for it in profile.layers)
    )


def one_layer_each(stages, microbatches, order, **options):
    return Plan([(i, i + 1, [i]) for i in range(stages)], microbatches, order, **options)


def picture(timeline):
    """Each rank's line, what is waited for and under way apart: F0 0-10, and m0 0>1 10-15."""
    lines = defaultdict(list)
    marks = {"forward": "F", "backward": "B", "weights": "W", "communication": "m"}
    for it in timeline.intervals:
        name = it.kind if it.microbatch is None else f"{marks[it.kind]}{it.microbatch}"
        kind = it.kind if it.kind in ("communication", "waiting") else it.rank
        who = (
            f" {it.rank}>{it.peer}" if kind == "communication" else f" {it.rank}" if kind == "waiting" else ""
        )
        lines[kind].append(f"{name}{who} {it.start_us:g}-{it.end_us:g}")
    return {kind: ", ".join(words) for kind, words in lines.items()}


def test_two_stages_and_messages_for_nothing():
    plan = one_layer_each(2, 2, "1f1b")
    assert picture(simulate(plan, model([(10, 20)] * 2), LinkCosts(line(2)), batch=2)) == {
        0: "F0 0-10, F1 10-20, B0 40-60, B1 70-90",
        1: "F0 10-20, B0 20-40, F1 40-50, B1 50-70",
        "waiting": "waiting 1 0-10, waiting 0 20-40, waiting 0 60-70, waiting 1 70-90",
        "communication": "m0 0>1 10-10, m1 0>1 20-20, m0 1>0 40-40, m1 1>0 70-70",
    }


def test_messages_occupy_their_pair_for_software_and_bytes_and_arrive_after_the_latency():
    """Per message 2 us of software, 5 us of bytes, 3 us of latency; bytes do not overlap."""
    plan = one_layer_each(2, 2, "gpipe")
    network = LinkCosts(line(2, latency_us=3), message_us=2)
    assert picture(simulate(plan, model([(1, 10), (1, 1)], output=5000), network, batch=2)) == {
        0: "F0 0-1, F1 1-2, B0 30-40, B1 40-50",
        1: "F0 11-12, F1 18-19, B0 19-20, B1 20-21",
        "communication": "m0 0>1 1-11, m1 0>1 8-18, m0 1>0 20-30, m1 1>0 27-37",
        "waiting": "waiting 1 0-11, waiting 0 2-30, waiting 1 12-18, waiting 1 21-50",
    }
    uneven = simulate(plan, model([(1, 10), (1, 1)], output=5000), LinkCosts(line(2)), batch=3)
    assert picture(uneven)["communication"] == "m0 0>1 2-12, m1 0>1 12-17, m0 1>0 20-30, m1 1>0 30-35"


def test_a_rank_handles_its_messages_once_its_results_are_on_their_way():
    """3 us for each message sent or received: the pass behind waits, the message does not."""
    plan = one_layer_each(2, 2, "gpipe")
    network = LinkCosts(line(2), handling_us=3)
    assert picture(simulate(plan, model([(10, 20)] * 2), network, batch=2)) == {
        0: "F0 0-10, F1 13-23, B0 56-76, B1 79-99",
        1: "F0 10-20, F1 23-33, B0 36-56, B1 59-79",
        "communication": "m0 0>1 10-10, m1 0>1 23-23, m0 1>0 56-56, m1 1>0 79-79",
        "waiting": "waiting 1 0-10, waiting 0 26-56, waiting 1 82-99",
    }
    split = simulate(  # their second half has no messages
        one_layer_each(2, 1, "zb-h1"), halved([(10, 20)] * 2), network, batch=1
    )
    assert picture(split)[0] == "F0 0-10, B0 33-43, W0 46-56"
    assert picture(split)[1] == "F0 10-20, B0 23-33, W0 36-46"
    assert picture(split)["waiting"] == "waiting 1 0-10, waiting 0 13-33, waiting 1 46-56"


def test_passes_take_longer_while_other_ranks_compute():
    """Half as long again from 10 to 25, where both do; then rank 1 alone."""
    plan, costs = one_layer_each(2, 2, "gpipe"), replace(model([(10, 20)] * 2), crowding=1.5)
    found = picture(simulate(plan, costs, LinkCosts(line(2)), batch=2))
    assert found[0].startswith("F0 0-10, F1 10-25, ")
    assert found[1].startswith("F0 10-25, F1 25-35, B0 35-55")
    # Three replicas with 2, 2 and 1 samples: of two ranks beside, then of one.
    costs, plan = replace(model([(8, 0)]), crowding=2.0), Plan([(0, 1, [0, 1, 2])], 1)
    thirds = simulate(plan, costs, LinkCosts(load("full:3")), batch=5)
    ends = sorted(it.end_us for it in thirds.intervals if it.kind == "forward")
    assert ends == [16, 16 + 1.5 * 8, 16 + 1.5 * 8]


def test_buckets_begin_within_a_crowded_pass_where_its_layers_are_through():
    """Two layers, 10 us back each and twice that beside the other replica: the last one is through at 60."""
    layers = tuple(Layer(f"{it}", 10, 10, 0, 0, 0, size) for it, size in enumerate((0, 4000)))
    costs = Profile("two", 1, layers, crowding=2.0)
    timeline = simulate(Plan([(0, 2, [0, 1])], 1), costs, LinkCosts(line(2)), batch=2)
    assert {it.start_us for it in timeline.intervals if it.kind == "allreduce"} == {60}


def test_an_update_waits_for_all_replicas():
    costs = Profile("drawn", 1, (Layer("layer", 10, 20, 0, 0, 0, 0, update_us=7),))
    timeline = simulate(Plan([(0, 1, [0, 1])], 1), costs, LinkCosts(line(2)), batch=3)
    assert picture(timeline)[0] == "F0 0-20, B0 20-60, update 60-67"
    assert picture(timeline)[1] == "F0 0-10, B0 10-30, update 60-67"


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_buckets_are_full_one_after_another_and_a_shared_parameter_is_in_one_of_them(data):
    """Beside parameters that are put into buckets quarter by quarter, from the last layer to the first."""
    quarter, layers = BUCKET_BYTES // 4, data.draw(st.integers(4, 6))
    own = data.draw(st.lists(st.integers(0, 6), min_size=layers, max_size=layers))
    users = st.sets(st.integers(0, layers - 1), min_size=2).map(sorted).map(tuple)
    shared = data.draw(st.lists(st.tuples(st.integers(1, 5), users), max_size=2))
    sizes = [
        (size + sum(more for more, those in shared if i in those)) * quarter for i, size in enumerate(own)
    ]
    ties = [Tie(f"shared{i}", size * quarter, those) for i, (size, those) in enumerate(shared)]
    costs = Profile(
        "drawn",
        1,
        tuple(Layer(f"layer{i}", 1, 2, 0, 0, size, size, 0) for i, size in enumerate(sizes)),
        ties=tuple(ties),
    )
    cuts = sorted(data.draw(st.sets(st.integers(1, layers - 1), min_size=3, max_size=3)))
    replicas = data.draw(st.integers(1, 2))
    ranks = [list(range(replicas)), list(range(replicas, 2 * replicas))] * 2
    plan = Plan([*zip([0, *cuts], [*cuts, layers], ranks, strict=True)], 1, order="interleaved")
    network = LinkCosts(wired(2 * replicas, dict.fromkeys(combinations(range(2 * replicas), 2), 1)))
    for worker in plan.workers:
        stage_of = {
            layer: stage
            for stage in worker.stages
            for layer in range(plan.stages[stage].start, plan.stages[stage].end)
        }
        held = [(size, layer) for layer, size in enumerate(own) if layer in stage_of]
        held += [(size, min(here)) for size, those in shared if (here := stage_of.keys() & set(those))]
        line_up = [layer for size, layer in sorted(held, key=lambda it: -it[1]) for _ in range(size)]
        buckets = [line_up[at : at + 4] for at in range(0, len(line_up), 4)] if replicas > 1 else []
        expected = {}
        for bucket in buckets:
            at = bucket[-1], len(bucket) == 4
            time_us, firsts = expected.get(at, (0, {}))
            firsts |= {stage_of[layer]: layer for layer in bucket}
            expected[at] = time_us + network.allreduce_us(worker.ranks, len(bucket) * quarter), firsts
        runs = bucket_runs(plan, costs, network, worker)
        assert [it.time_us for it in runs] == pytest.approx([time_us for time_us, _ in expected.values()])
        assert [it.firsts for it in runs] == [firsts for _, firsts in expected.values()]


def test_replicas_then_allreduce_and_update():
    """Three samples: two on rank 0, one on rank 1, whose part of the message is shorter.

    Rank 2 is through at 112, and updates only once the others are, which is when they know the loss.
    """
    plan = Plan([(0, 1, [0, 1]), (1, 2, [2])], 1)
    costs = model([(10, 20)] * 2, output=1000, weights=4000)
    costs = replace(costs, layers=tuple(replace(it, update_us=7) for it in costs.layers))
    timeline = simulate(plan, costs, LinkCosts(load("full:3")), batch=3)
    assert picture(timeline) == {
        0: "F0 0-20, B0 114-154, allreduce 154-158, update 158-165",
        1: "F0 0-10, B0 113-133, allreduce 154-158, update 158-165",
        2: "F0 22-52, B0 52-112, update 154-161",
        "communication": "m0 1>2 10-11, m0 0>2 20-22, m0 2>0 112-114, m0 2>1 112-113",
        "waiting": "waiting 2 0-22, waiting 1 10-113, waiting 0 20-114, waiting 2 112-154, "
        "waiting 1 133-154, waiting 2 161-165",
    }


@pytest.mark.parametrize(
    ("buckets", "order", "wanted"),
    [
        ((1, 1, 1), "1f1b", [(50, 150), (150, 250), (250, 350)]),  # the last layer's while others go back
        ((0.25, 0.5, 0.25), "1f1b", [(90, 190)]),  # one bucket: behind all passes
        ((0.5, 0.75, 1.5), "1f1b", [(50, 150), (150, 250), (250, 325)]),
        ((2.5, 0, 0), "1f1b", [(90, 290), (290, 340)]),
        ((1, 1, 1), "zb-h1", [(70, 170), (170, 270), (270, 370)]),  # gradients come in the second half
    ],
)
def test_buckets_of_gradients_are_summed_while_backward_passes_go_on(buckets, order, wanted):
    """Two replicas, each 10 us forward and 20 us back, half of it for gradients, in each of three layers.

    The last layer is through at 50 us, the first one at 90; a bucket takes 100 us.
    """
    layers = tuple(
        Layer(f"{i}", 20, 40, 0, 0, 0, int(n * BUCKET_BYTES), weights_us=20) for i, n in enumerate(buckets)
    )
    network = LinkCosts(wired(2, {(0, 1): Fraction(BUCKET_BYTES, 100_000)}))
    timeline = simulate(Plan([(0, 3, [0, 1])], 1, order), Profile("three", 2, layers), network)
    for rank in (0, 1):
        own = [it for it in timeline.intervals if (it.kind, it.rank) == ("allreduce", rank)]
        assert [it for one in own for it in (one.start_us, one.end_us)] == pytest.approx(sum(wanted, ()))
    waited = [(it.start_us, it.end_us) for it in timeline.intervals if it.kind == "waiting"]
    assert waited == []


def test_buckets_wait_for_the_replica_that_gets_its_input_last():
    """It comes 5 us later to rank 1, 85 us after the start; of two layers the last one is through at 105."""
    links = [Link(a, b, Fraction(1), Fraction(5 * (b == 1 and a == 2))) for a, b in permutations(range(3), 2)]
    layers = tuple(Layer(f"{i}", 10, 20, 0, 0, 0, size) for i, size in enumerate((0, 4000, 0)))
    plan = Plan([(0, 2, [0, 1]), (2, 3, [2])], 1)
    network = LinkCosts(Topology.build("late", 3, links))
    timeline = simulate(plan, Profile("late", 1, layers), network, batch=2)
    assert {it.start_us for it in timeline.intervals if it.kind == "allreduce"} == {105}


def test_recomputation_adds_a_forward_pass_to_each_backward_pass():
    plan = one_layer_each(2, 1, "1f1b", recompute=True)
    assert picture(simulate(plan, model([(10, 20), (1, 2)]), LinkCosts(line(2)), batch=1)) == {
        0: "F0 0-10, B0 14-44",
        1: "F0 10-11, B0 11-14",
        "waiting": "waiting 1 0-10, waiting 0 10-14, waiting 1 14-44",
        "communication": "m0 0>1 10-10, m0 1>0 14-14",
    }


def test_split_backward_passes_send_before_gradients_of_parameters():
    """B and W are 5 us each of the 10 of a layer with gradients; without, W takes nothing."""
    plan = one_layer_each(2, 2, "zb-h1")
    assert picture(simulate(plan, model([(10, 10)] * 2, weights=4), LinkCosts(line(2)), batch=2)) == {
        0: "F0 0-10, F1 10-20, B0 25-30, W0 30-35, B1 40-45, W1 45-50",
        1: "F0 10-20, B0 20-25, F1 25-35, B1 35-40, W0 40-45, W1 45-50",
        "waiting": "waiting 1 0-10, waiting 0 20-25, waiting 0 35-40",
        "communication": "m0 0>1 10-10, m1 0>1 20-20, m0 1>0 25-25, m1 1>0 40-40",
    }
    whole = simulate(plan, model([(10, 10)] * 2), LinkCosts(line(2)), batch=2)
    assert {it.end_us - it.start_us for it in whole.intervals if it.kind == "weights"} == {0}


def test_stages_on_one_rank_hand_over_without_a_message():
    """A V on two ranks: between stages 1 and 2 nothing is sent, and their gradients are summed once."""
    plan = Plan([(0, 1, [0]), (1, 2, [1]), (2, 3, [1]), (3, 4, [0])], 1, "zb-v")
    costs = model([(10, 10)] * 4, output=1000, weights=4, ties=[Tie("shared", 4, (0, 3))])
    assert picture(simulate(plan, costs, LinkCosts(line(2)), batch=1)) == {
        0: "F0 0-10, F0 32-42, B0 42-47, W0 47-52, B0 64-69, W0 69-74",
        1: "F0 11-21, F0 21-31, B0 48-53, W0 53-58, B0 58-63, W0 63-68",
        "waiting": "waiting 1 0-11, waiting 0 10-32, waiting 1 31-48, waiting 0 52-64, waiting 1 68-74",
        "communication": "m0 0>1 10-11, m0 1>0 31-32, m0 0>1 47-48, m0 1>0 63-64",
    }


def test_tied_stages_sum_once_more():
    """4000 bytes of stage 1's replicas, then 1000 of a parameter that stages 0 and 1 share, on 3 ranks."""
    costs = model([(10, 20)] * 2, weights=4000, ties=[Tie("shared", 1000, (0, 1))])
    costs = replace(costs, layers=tuple(replace(it, update_us=7) for it in costs.layers))
    network = LinkCosts(load("full:3"))
    plan = Plan([(0, 1, [0]), (1, 2, [1, 2])], 1)
    timeline = simulate(plan, costs, network, batch=2)
    shared_us = network.allreduce_us([0, 1, 2], 1000)
    own_us = network.allreduce_us([1, 2], 4000)
    # Two samples: stage 0 takes 20 + 40 us, each of stage 1's replicas 10 + 20.
    allreduces = [(it.rank, it.start_us, it.end_us) for it in timeline.intervals if it.kind == "allreduce"]
    start = max(20 + 10 + 20 + 40, 50 + own_us)
    assert sorted(allreduces) == sorted(
        [(1, 50, 50 + own_us), (2, 50, 50 + own_us)] + [(rank, start, start + shared_us) for rank in range(3)]
    )
    assert {it.start_us for it in timeline.intervals if it.kind == "update"} == {start + shared_us}


def test_all_that_the_same_workers_share_is_summed_together():
    """1000 and 3000 bytes of stages 0 and 1; what stages 0 and 2 share stays on worker 0."""
    ties = [Tie("small", 1000, (0, 1)), Tie("large", 3000, (0, 1)), Tie("own", 7000, (0, 2))]
    costs = model([(10, 20)] * 4, ties=ties)
    network = LinkCosts(load("full:2"))
    plan = Plan([(0, 1, [0]), (1, 2, [1]), (2, 3, [0]), (3, 4, [1])], 1, order="interleaved")
    assert ties_us(plan, costs, network) == {(0, 1): network.allreduce_us([0, 1], 4000)}


def test_ties_between_ranks_that_no_links_join_go_around_a_ring_of_paths():
    """Stages 0 and 2 of a line: two steps of 500 bytes over two links each way."""
    costs = model([(1, 1)] * 3, ties=[Tie("shared", 1000, (0, 2))], weights=1000)
    timeline = simulate(one_layer_each(3, 1, "1f1b"), costs, LinkCosts(line(3)), batch=1)
    assert [it.end_us - it.start_us for it in timeline.intervals if it.kind == "allreduce"] == [1, 1]


def test_a_shared_parameter_is_summed_once_the_replicas_of_all_its_stages_have_summed_their_gradients():
    costs = model([(10, 20)] * 2, weights=4000, ties=[Tie("shared", 1000, (0, 1))], samples=2)
    network = LinkCosts(wired(3, dict.fromkeys(combinations(range(3), 2), 1)))
    timeline = simulate(Plan([(0, 1, [0, 1]), (1, 2, [2])], 1), costs, network, batch=2)
    sums = {
        rank: [it for it in timeline.intervals if (it.kind, it.rank) == ("allreduce", rank)]
        for rank in (0, 2)
    }
    (replicas, tie), (alone,) = sums[0], sums[2]
    assert alone.start_us == tie.start_us == replicas.end_us > replicas.start_us


def test_a_message_alone_is_as_fast_as_the_narrowest_link_on_its_way():
    rates = {(0, 2): 1, (2, 1): Fraction(1, 2), (1, 2): Fraction(1, 4), (2, 0): 1}
    fabric = wired(2, rates, switches=["hub"], both=False)
    costs = model([(1, 1)] * 2, output=1000)
    timeline = simulate(one_layer_each(2, 1, "1f1b"), costs, LinkCosts(fabric), batch=1)
    assert picture(timeline)["communication"] == "m0 0>1 1-3, m0 1>0 5-9"


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_equal_stages_take_as_long_as_equation_2_says(order):
    """t_pipe = (m+d-1)/m · t_comp/d, where t_comp is the whole model's time for the whole batch."""
    for d in range(1, 6):
        for m in range(1, 8):
            timeline = simulate(
                one_layer_each(d, m, order), model([(10, 20)] * d), LinkCosts(line(d)), batch=m
            )
            t_comp = m * d * 30
            assert timeline.time_us == pytest.approx((m + d - 1) / m * t_comp / d)


@st.composite
def plans(draw):
    """A plan with replicas on a full fabric, where no two pairs of ranks share a link, and its costs."""
    replicas = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    microbatches = draw(st.integers(1, 6))
    batch = draw(st.integers(microbatches * max(replicas), microbatches * max(replicas) + 9))
    ranks = iter(draw(st.permutations(range(sum(replicas)))))
    groups = [[next(ranks) for _ in range(n)] for n in replicas]
    name = draw(st.sampled_from(sorted(ORDERS)))
    order, workers = ORDERS[name], len(groups)
    layout = next(
        filter(None, (order.layout(it * workers, workers) for it in (1, draw(st.integers(2, 3)), 2)))
    )
    home = {stage: groups[worker] for worker, held in enumerate(layout) for stage in held}
    plan = Plan(
        [(stage, stage + 1, home[stage]) for stage in sorted(home)],
        microbatches,
        name,
        recompute=draw(st.booleans()) and not order.splits,
        max_in_flight=draw(st.none() | st.integers(1, 6)) if order.in_flight else None,
    )
    times = st.tuples(st.integers(0, 20), st.integers(0, 20))
    layers = draw(st.lists(times, min_size=len(home), max_size=len(home)))
    size, weights = draw(st.integers(0, 9000)), draw(st.sampled_from([0, 0.5, 1]))
    costs = halved(layers, weights, output=size, samples=draw(st.integers(1, 4)))
    return plan, costs, batch


def owners(samples, ranks):
    """The rank of each sample of a microbatch."""
    return [rank for rank, n in zip(ranks, divided(samples, len(ranks)), strict=True) for _ in range(n)]


def longest_path_us(plan, costs, batch, message_us, latency_us, bytes_per_us):
    """The step as a graph of passes and messages, each as long as it takes; no link is shared."""
    graph = nx.DiGraph()
    graph.add_node("start")

    def lasts(vertex, time, after):
        graph.add_edges_from((one, vertex, {"us": graph.nodes[one].get("us", 0)}) for one in after)
        graph.nodes[vertex]["us"] = time

    order, depth = plan.passes, len(plan.stages)
    splits = ORDERS[plan.order].splits
    sizes = divided(batch, plan.microbatches)
    todo = [a for actions in order for a in actions]
    sent = defaultdict(list)  # messages of a pair, in order
    last = dict.fromkeys(plan.ranks, "start")
    at = [0] * len(order)
    while any(index < len(actions) for index, actions in zip(at, order, strict=True)):
        for worker, actions in enumerate(order):
            if at[worker] == len(actions):
                continue
            action = actions[at[worker]]
            phase, s, m = action.phase, action.stage, action.microbatch
            source, target = (s - 1, s + 1) if phase is Phase.FORWARD else (s + 1, s - 1)
            if phase is Phase.WEIGHTS:
                source = target = -1
            if 0 <= source < depth and not graph.has_node(("done", phase, m, source)):
                continue
            at[worker] += 1
            stage, layer = plan.stages[s], costs.layers[s]
            mine = owners(sizes[m], stage.ranks)
            half = layer.weights_us if splits else 0
            time = {
                Phase.FORWARD: layer.forward_us,
                Phase.BACKWARD: layer.backward_us - half + plan.recompute * layer.forward_us,
                Phase.WEIGHTS: half,
            }[phase]
            for rank in stage.ranks:
                inputs = [v for v in sent["to", rank] if v[3:] == (phase, m, s)]
                lasts((rank, action), time * mine.count(rank) / costs.samples, [last[rank], *inputs])
                last[rank] = (rank, action)
                if not 0 <= target < depth or plan.stages[target].ranks == stage.ranks:
                    continue
                theirs = owners(sizes[m], plan.stages[target].ranks)
                for peer in plan.stages[target].ranks:
                    both = sum((a, b) == (rank, peer) for a, b in zip(mine, theirs, strict=True))
                    if not both:
                        continue
                    size = costs.layers[min(s, target)].output_bytes * both / costs.samples
                    wire, there = ("wire", rank, peer, action), ("there", rank, peer, phase, m, target)
                    before = sent[rank, peer][-1:]
                    lasts(wire, message_us + size / bytes_per_us, [(rank, action), *before])
                    lasts(there, latency_us, [wire])
                    sent[rank, peer].append(wire)
                    sent["to", peer].append(there)
            graph.add_node(("done", phase, m, s))
    lasts("end", 0, list(last.values()))
    assert len(todo) == sum(at)
    return nx.dag_longest_path_length(graph, weight="us")


@settings(max_examples=60, deadline=None)
@given(plans(), st.sampled_from([0, 2]), st.sampled_from([0, 3]))
def test_without_shared_links_a_step_is_the_longest_path(drawn, message_us, latency_us):
    plan, costs, batch = drawn
    count = len(plan.ranks)
    full = wired(count, dict.fromkeys(combinations(range(count), 2), 1), latency_us=latency_us)
    network = LinkCosts(full, message_us=message_us)
    timeline = simulate(plan, costs, network, batch=batch)
    wanted = longest_path_us(plan, costs, batch, message_us, latency_us, 1000)
    computed = [it.end_us for it in timeline.intervals if it.kind in ("forward", "backward", "weights")]
    assert max(computed) == pytest.approx(wanted)


@settings(max_examples=40, deadline=None)
@given(plans(), st.sampled_from(["star", "ring"]), st.sampled_from([0, 2]))
def test_every_rank_keeps_its_order_and_does_one_thing_at_a_time(drawn, kind, message_us):
    plan, costs, batch = drawn
    fabric = load(f"{kind}:{max(3, len(plan.ranks))}")
    costs = replace(costs, layers=tuple(replace(it, update_us=5) for it in costs.layers))
    timeline = simulate(plan, costs, LinkCosts(fabric, message_us=message_us), batch=batch)
    for actions, worker in zip(plan.passes, plan.workers, strict=True):
        for rank in worker.ranks:
            own = [it for it in timeline.intervals if it.rank == rank and it.kind != "communication"]
            assert own[0].start_us == 0
            assert own[-1].end_us == timeline.time_us
            assert all(before.end_us == it.start_us for before, it in pairwise(own))
            # Passes that take no time stand where they are, in any order among those of the same time.
            done = [it for it in own if it.kind in ("forward", "backward", "weights")]
            assert sorted((it.kind[0].upper(), it.microbatch, it.stage) for it in done) == sorted(
                (str(action.phase), action.microbatch, action.stage) for action in actions
            )


# Links that several messages share.


def test_two_messages_on_one_link_take_twice_as_long_while_both_last():
    """4000 bytes beside 10000 at 500 bytes per us each until 8; the 6000 left then take 6 us alone."""
    rates = dict.fromkeys([(0, 4), (1, 4), (5, 2), (5, 3)], 10) | {(4, 5): 1}
    network, clock = LinkCosts(wired(4, rates, switches=("near", "far"), both=False)), Clock()
    pairs = [Pair(0, 2, network), Pair(1, 3, network)]
    deliveries, there = Deliveries(network, clock, pairs), []
    for pair, size_bytes in zip(pairs, (10000, 4000), strict=True):
        deliveries.send(pair, size_bytes, 0, 0.0, lambda now, who: there.append((who, now)), pair.src)
    clock.run()
    assert there == [(1, 8), (0, 14)]


HOSTS = wired(4, dict.fromkeys([(0, 4), (1, 4), (2, 5), (3, 5)], 1000) | {(4, 5): 1}, switches=("a", "b"))
"""Ranks 0 and 1 in one host, 2 and 3 in the other, behind one network card each of 1000 bytes per us."""


def crossings(ranks):
    """Forward messages from host to host of four stages of 10 us and 6 microbatches of 10000 bytes."""
    plan = Plan([(i, i + 1, [rank]) for i, rank in enumerate(ranks)], 6, "gpipe")
    timeline = simulate(plan, model([(10, 10)] * 4, output=10000), LinkCosts(HOSTS), batch=6)
    return [
        it
        for it in timeline.intervals
        if it.kind == "communication" and it.rank < 2 <= it.peer and it.start_us < 100
    ]


def test_messages_of_other_boundaries_share_a_network_card():
    """Over the card go those of the first and the third boundary: the last two meet the first two."""
    assert [
        f"m{it.microbatch} {it.rank}>{it.peer} {it.start_us:g}-{it.end_us:g}"
        for it in crossings([0, 2, 1, 3])
    ] == [
        "m0 0>2 10-20",
        "m1 0>2 20-30",
        "m2 0>2 30-40",
        "m3 0>2 40-50",
        "m4 0>2 50-70",
        "m0 1>3 50-70",
        "m5 0>2 70-90",
        "m1 1>3 70-90",
        "m2 1>3 90-100",
    ]


def test_stages_that_stay_in_their_host_do_not_share_its_card():
    assert [it.end_us - it.start_us for it in crossings([0, 1, 2, 3])] == pytest.approx([10] * 6)


def test_a_link_each_way_is_not_shared():
    """Forward and backward messages at once: each takes 10 us."""
    plan = one_layer_each(2, 6, "1f1b")
    timeline = simulate(plan, model([(10, 10)] * 2, output=10000), LinkCosts(line(2)), batch=6)
    assert {it.end_us - it.start_us for it in timeline.intervals if it.kind == "communication"} == {10}


def test_two_replicas_share_the_way_into_one_rank():
    """5000 bytes from each of two ranks through a switch into one: 10 us, as 10000 from one."""
    costs = model([(10, 10)] * 2, output=10000, samples=2)
    both = simulate(Plan([(0, 1, [0, 1]), (1, 2, [2])], 1), costs, LinkCosts(load("star:3")), batch=2)
    assert "m0 0>2 5-15, m0 1>2 5-15" in picture(both)["communication"]
    alone = simulate(Plan([(0, 1, [0]), (1, 2, [2])], 1), costs, LinkCosts(load("star:3")), batch=2)
    assert "m0 0>2 10-20" in picture(alone)["communication"]


@given(st.data())
def test_shares_are_max_min_fair(data):
    """Certificate: every message has a full link on which nobody is faster."""
    hops = [(i, i + 1) for i in range(5)]
    bandwidth = {hop: float(data.draw(st.integers(1, 9))) for hop in hops}
    links, active, now = SharedLinks(bandwidth), [], 0.0
    for _ in range(data.draw(st.integers(1, 10))):
        if active and data.draw(st.booleans()):
            flow = min(active, key=lambda it: it.end_us)
            now = flow.end_us
            active.remove(flow)
            links.end(flow, now)
        else:
            path = data.draw(st.lists(st.sampled_from(hops), min_size=1, max_size=3, unique=True))
            active.append(MessageInFlight(path, data.draw(st.integers(1, 50))))
            links.begin(active[-1], now)
        on = {hop: [flow.rate for flow in active if hop in flow.path] for hop in hops}
        for hop in hops:
            assert sum(on[hop]) <= bandwidth[hop] * (1 + 1e-9)
        for flow in active:
            assert any(
                sum(on[hop]) >= bandwidth[hop] * (1 - 1e-9) and flow.rate >= max(on[hop]) * (1 - 1e-9)
                for hop in flow.path
            )


# What cannot be simulated.


def test_a_plan_for_something_else():
    costs, network = model([(1, 1)] * 2), LinkCosts(line(2))
    with pytest.raises(PlanError, match="plan: must hold the 2 layers of profile drawn, got 3"):
        simulate(one_layer_each(3, 1, "pe"), costs, network)
    with pytest.raises(PlanError, match="plan: is for model other, got the profile of drawn"):
        simulate(one_layer_each(2, 1, "pe", model="other"), costs, network)
    for named in (replace(costs, model=""), replace(costs, model="other")):
        assert simulate(one_layer_each(2, 1, "pe", model="other"), named, network, batch=1).time_us == 4
    with pytest.raises(PlanError, match="plan: divides operators, of which a profile of layers alone"):
        whole = Stage.divided(0, 2, StageSharding(Mesh((2,), (0, 1)), (), ()))
        simulate(Plan([whole], 1, topology=line(2), batch=2), costs, network)
    with pytest.raises(PlanError, match=r"plan: rank must be in 0..1 of topology line, got 7"):
        simulate(Plan([(0, 1, [0]), (1, 2, [7])], 1), costs, network)
    with pytest.raises(PlanError, match="plan: is for topology ring:4, got line, which has other links"):
        simulate(one_layer_each(2, 1, "pe", topology=load("ring:4")), costs, network)
    with pytest.raises(BatchError, match="batch of 3 samples: must have at least 4"):
        simulate(one_layer_each(2, 4, "pe"), costs, network, batch=3)


def test_ranks_without_links():
    oneway = wired(3, {(0, 1): 1, (1, 2): 1}, both=False, name="oneway")
    with pytest.raises(PlanError, match="topology oneway: no path leads from rank 1 to rank 0"):
        simulate(one_layer_each(2, 1, "pe"), model([(1, 1)] * 2), LinkCosts(oneway))
    costs = model([(1, 1)] * 2, weights=8)
    with pytest.raises(
        PlanError, match=r"plan: stage 0: links between its ranks must connect them, .* got ranks 0, 2 of"
    ):
        simulate(Plan([(0, 1, [0, 2]), (1, 2, [1])], 1), costs, LinkCosts(line(3)), batch=2)


def test_passes_in_any_order():
    """Each as soon as its input is there; what would wait in a circle is refused."""
    plan, costs, network = one_layer_each(2, 2, "gpipe"), model([(10, 20)] * 2), LinkCosts(line(2))
    vars(plan)["passes"] = other = tuple(parse("F0 B0 F1 B1", stage) for stage in range(2))
    assert picture(simulate(plan, costs, network, batch=2))[0] == "F0 0-10, B0 40-60, F1 60-70, B1 100-120"
    vars(plan)["passes"] = other[0], parse("F0 F1 B0 B1", 1)
    with pytest.raises(
        PlanError, match="wait for each other in a circle, got stage 0 before B0, stage 1 before F1"
    ):
        simulate(plan, costs, network, batch=2)
    vars(plan)["passes"] = parse("F0 F1 B0 B1 W0 W1"), parse("F0 B0 F1 B1 W1 W0", 1)
    halves = simulate(plan, halved([(10, 20)] * 2), network, batch=2)
    assert picture(halves)[1] == "F0 10-20, B0 20-30, F1 30-40, B1 40-50, W1 50-60, W0 60-70"
