"""Stages as graphs of their own: what crosses, skips and shares, as drawn, and what stages cost."""

from __future__ import annotations

from itertools import count

from arborcast.pipeline.meshes import Mesh
from arborcast.pipeline.sharding.graph import Graph
from arborcast.pipeline.sharding.sharding_program import shard
from arborcast.pipeline.sharding.slices import Sliced
from arborcast.pipeline.sharding.stage_prices import StagePrices
from tests.sharding.examples import UNIT, Writer, on_ring, ring


def skipping() -> Graph:
    """Layer 0: up; 1: gelu of it; 2: a product with the weight of layer 0, and the sum with up."""
    it = Writer()
    up = it.linear("up", it.input("x", 8, 4), it.weight("w", 4, 4))
    it.place = 1
    gelu = it.gelu("gelu", it.linear("inner", up, it.weight("v", 4, 4)))
    it.place = 2
    it.softmax("softmax", it.add("sum", it.linear("down", gelu, "w"), up))
    return it.graph()


def test_stages_as_drawn():
    sliced = Sliced(skipping(), 4)
    assert sliced.depth == 3
    assert [[it.value for it in sliced.crossing(cut)] for cut in range(4)] == [[], ["up"], ["up", "gelu"], []]
    drawn = {
        (start, end): " ".join(f"{it.kind}:{it.name}" for it in sliced.stage(start, end).operators)
        for start, end in ((0, 1), (1, 2), (2, 3), (0, 3))
    }
    assert drawn == {
        (0, 1): "input:x parameter:w linear:up send:up sent",
        (1, 2): "parameter:v receive:up linear:inner send:up sent send:gelu sent",
        (2, 3): "parameter:w receive:up receive:gelu linear:down softmax:softmax",
        (0, 3): "input:x parameter:w parameter:v linear:up linear:inner linear:down softmax:softmax",
    }
    assert sliced.shared == {"w": (0, 2)}
    # rows are divided among four, eight of them; nothing crosses in parts among five
    assert [it.labels for it in sliced.crossing(2)] == [(0, None)] * 2
    assert [it.labels for it in Sliced(skipping(), 5).crossing(2)] == [(None, None)] * 2


def test_a_stage_reads_what_crosses_as_it_likes_and_pays_for_it():
    # Two rows of a large product: columns are divided, and what came in equal parts must be gathered.
    it = Writer()
    up = it.linear("up", it.input("x", 2, 64), it.weight("w", 64, 64))
    it.place = 1
    it.gelu("gelu", it.linear("down", up, it.weight("v", 4096, 64)))
    setting = on_ring((2,), 1)
    behind = shard(Sliced(it.graph(), 2).stage(1, 2), setting)
    receive = next(way for op, way in zip(behind.graph.operators, behind.chosen, strict=True) if op.is_end)
    assert receive is not None
    assert receive.outputs == ((0,),)
    down = next(
        way for op, way in zip(behind.graph.operators, behind.chosen, strict=True) if op.name == "down"
    )
    assert down is not None
    assert down.demands[0].spec == (None,)
    assert down.demands[0].gradient == (-1,)  # summands, which leave in parts again
    free = shard(Sliced(it.graph(), 2).layer(1), setting)
    gathered = 4 * 2 * 64 * 1000 // 2 + 4 * 2 * 64 * 1000 // 2  # allgather, reduce-scatter: 2 GB/s
    assert behind.cost.communication_ps == free.cost.communication_ps + gathered
    assert behind.total_ps == free.total_ps + gathered


def test_a_layer_alone_costs_no_more_than_in_any_stage():
    sliced, setting = Sliced(skipping(), 4), on_ring((4,), 3)
    alone = [shard(sliced.layer(number), setting).total_ps for number in range(3)]
    for start in range(3):
        for end in range(start + 1, 4):
            assert shard(sliced.stage(start, end), setting).total_ps >= sum(alone[start:end])


def test_limits_hold_where_blocks_repeat_within_a_layer():
    # Alone, a layer folds its three blocks; two layers are two blocks, in which the three may differ.
    it, number = Writer(), count()
    x = it.input("x", 4, 12)
    for it.place in range(2):
        for _ in range(3):
            x = it.softmax(f"s{next(number)}", x)
            for outer in (12, 6, 1024, 12):
                inner, at = it.shapes[x][1], next(number)
                x = it.linear(f"l{at}", x, it.weight(f"w{at}", outer, inner))
        x = it.softmax(f"end{it.place}", x)
    prices = StagePrices(Sliced(it.graph(), 2), ring(2, 5), UNIT, 4)
    stage, (setting,) = prices.sliced.stage(0, 2), prices.settings((0, 1))
    folded = [shard(prices.sliced.layer(layer), setting).bound_ps for layer in range(2)]
    assert sum(folded) > shard(stage, setting).total_ps >= prices.limits_ps((0, 1))[0][-1]


def test_meshes_on_which_ranks_cannot_ascend_are_left_out():
    # 0 3 above 2 1: 0 must be left of 3, and with it 2 left of 1
    prices = StagePrices(Sliced(skipping(), 4), ring(4, 5), UNIT, 4)
    assert [it.sizes for it in prices.settings((0, 3, 2, 1))] == [(4,)]
    assert [it.sizes for it in prices.settings((2, 1, 0, 3))] == [(4,)]
    assert [it.sizes for it in prices.settings((2, 3, 0, 1))] == [(4,), (2, 2)]
    assert len(prices.limits_ps((0, 3, 2, 1))) == 1
    for ranks in ((0, 3, 2, 1), (0, 1, 2, 3)):
        found = prices.priced(0, 3, ranks, 1)
        assert Mesh(found.setting.sizes, ranks).ascending().shape == found.setting.sizes
