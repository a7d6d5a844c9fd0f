"""Which sharding is best: by hand on two layers, by trying all choices, and beside fixed layouts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.meshes import Spec, shown
from arborcast.pipeline.sharding.evaluation import CollectiveCall, calls, cost_of
from arborcast.pipeline.sharding.graph import Graph
from arborcast.pipeline.sharding.layouts import LAYOUTS
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.sharding_program import Sharding, shard
from arborcast.pipeline.sharding.specs import local_bytes, spec_of
from arborcast.pipeline.sharding.strategies import Strategy, strategies
from arborcast.synth.collective import Kind
from tests.sharding.examples import Writer, mlp, on_ring

RATES = {2: (1, 2), 4: (4 / 3, 8 / 3)}
"""Of an allreduce and an allgather on rings of 1 GB/s each way."""


def drawn(found: Sharding) -> dict[str, str]:
    """How everything lies, with the update of a weight behind the slash."""
    return {
        it.name: " ".join(map(shown, way.outputs)) + ("" if way.update is None else f" / {shown(way.update)}")
        for it, way in zip(found.graph.operators, found.chosen, strict=True)
        if way is not None
    }


def kernel(flops: int, backward: int, size: int) -> int:
    """Picoseconds, forward and backward, on the device of the examples."""
    return max(flops, size) + max(backward, 2 * size)


@pytest.mark.parametrize("ranks", [2, 4])
def test_many_samples_and_small_weights_give_data_parallelism(ranks):
    batch, width, inner = 4096, 8, 16
    graph, setting = mlp(batch, width, inner), on_ring((ranks,))
    found = shard(graph, setting)
    rows, weights = batch // ranks, 4 * width * inner
    product_flops = 2 * rows * width * inner
    compute = (
        kernel(product_flops, product_flops, 4 * rows * (width + inner) + weights)  # x needs no gradient
        + kernel(0, 0, 8 * rows * inner)
        + kernel(product_flops, 2 * product_flops, 4 * rows * (width + inner) + weights)
        + kernel(0, 0, 8 * rows * width)
    )
    # of both weights: read and write them and Adam's two, read the gradient
    allreduce, allgather = RATES[ranks]
    whole = compute + 2 * (weights * 1000 / allreduce + 7 * weights)
    zero = compute + 2 * (2 * weights * 1000 / allgather + 7 * weights / ranks)
    assert found.total_ps == zero
    assert found.is_optimal
    assert shard(graph, setting, allowed=LAYOUTS["data-parallel"]((ranks,))).total_ps == whole
    assert drawn(found) == {
        "w1": "R / S(0)",
        "w2": "R / S(0)",
        "up": "S(0)",
        "down": "S(0)",
        "softmax": "S(0)",
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_sample_and_large_weights_give_columns_then_rows_with_one_allreduce(ranks):
    width, inner = 64, 512
    graph, setting = mlp(1, width, inner), on_ring((ranks,))
    found = shard(graph, setting)
    part = inner // ranks
    weights, flops = 4 * width * part, 2 * width * part
    total = (
        kernel(flops, flops, 4 * (width + part) + weights)
        + kernel(0, 0, 8 * part)
        + kernel(flops, 2 * flops, 4 * (width + part) + weights)
        + 4 * width * 1000 / RATES[ranks][0]  # the one allreduce
        + kernel(0, 0, 8 * width)
        + 2 * 7 * weights
    )
    assert found.total_ps == total
    assert found.is_optimal
    assert drawn(found) == {
        "w1": "S(0) / S(0)",
        "w2": "S(1) / S(1)",
        "up": "S(1)",
        "down": "R",
        "softmax": "R",
    }
    assert calls(graph, found.chosen, setting) == (CollectiveCall(Kind.ALLREDUCE, (0,), 4 * width, 1, 0),)
    assert shard(graph, setting, allowed=LAYOUTS["megatron"]((ranks,))).total_ps == total


def test_gradients_come_back_as_drawn():
    it = Writer()
    up = it.linear("up", it.input("x", 4, 8), it.weight("w1", 8, 8))
    it.linear("down", up, it.weight("w2", 6, 8), it.weight("bias", 6))
    graph, setting = it.graph(), on_ring((2,))
    operator = next(it for it in graph.operators if it.name == "down")
    labels = ["samples", "columns", "rows"]
    found = {
        labels[way.before[0]]: [shown(it.gradient) for it in way.demands if it.gradient is not None]
        for way in strategies(graph, operator, setting)
        if way.before[0] is not None and way.after[0] in (None, way.before[0])
    }
    # of what it reads, of its weight, of its bias: what does not have the label has summands, but along rows
    # the gradient of the sum is the same everywhere, and so is that of the bias
    assert found == {
        "samples": ["S(0)", "P", "P"],
        "columns": ["P", "S(0)", "S(0)"],
        "rows": ["S(1)", "S(1)", "R"],
    }


@st.composite
def questions(draw: st.DrawFn, shapes: Sequence[tuple[int, ...]] = ((2,),)) -> tuple[Graph, Setting]:
    """Two products with weights, with or without a residual."""
    batch, width, inner = (draw(st.sampled_from([1, 2, 3, 8, 64])) for _ in range(3))
    it = Writer()
    x = it.input("x", batch, width)
    up = it.linear("up", x, it.weight("w1", inner, width))
    if draw(st.booleans()):
        up = it.gelu("gelu", up)
    if draw(st.booleans()):
        up = it.softmax("inner softmax", up)
    down = it.linear("down", up, it.weight("w2", inner, inner))
    it.softmax("softmax", it.add("sum", down, up) if draw(st.booleans()) else down)
    shape, rate = draw(st.sampled_from(shapes)), draw(st.sampled_from([1, 5, 100]))
    counts = st.integers(1, 3)
    return it.graph(), on_ring(shape, rate, microbatches=draw(counts), in_flight=draw(counts))


def memory_of(graph: Graph, chosen: Sequence[Strategy | None], setting: Setting) -> int:
    """Bytes of a rank: weights and gradients as stored, Adam's state as updated, and each tensor that a
    backward pass reads once for every microbatch in flight."""
    weights = 0
    kept: dict[tuple[str, Spec], int] = {}
    for operator, way in zip(graph.operators, chosen, strict=True):
        if way is None:
            continue
        if way.update is not None:
            (whole,) = operator.outputs
            weights += 2 * local_bytes(whole.size_bytes, way.outputs[0], setting.sizes)
            weights += 2 * local_bytes(whole.size_bytes, way.update, setting.sizes)
        read = [(it, demand.spec) for it, demand in zip(operator.reads, way.demands, strict=True) if it.kept]
        for tensor, spec in read + [(it, spec_of(it, way.after)) for it in operator.kept]:
            source = graph.operators[graph.maker[tensor.value][0]] if tensor.value in graph.maker else None
            if source is None or source.kind != "parameter":
                key = graph.memory[tensor.value], spec
                kept[key] = local_bytes(tensor.size_bytes, spec, setting.sizes)
    return weights + setting.in_flight * sum(kept.values())


@given(questions(), st.integers(0, 3))
@settings(max_examples=8, deadline=None)
def test_no_choice_of_all_is_better(question, tightness):
    graph, setting = question
    ways = [strategies(graph, it, setting) or (None,) for it in graph.operators]
    choices = list(product(*ways))
    costs = [cost_of(graph, choice, setting) for choice in choices]
    for choice, cost in list(zip(choices, costs, strict=True))[:: max(1, len(costs) // 50)]:
        assert cost.memory_bytes == memory_of(graph, choice, setting)
    sizes = sorted({it.memory_bytes for it in costs})
    limit = sizes[len(sizes) * tightness // 4]
    best = min(it.total_ps(setting.microbatches) for it in costs if it.memory_bytes <= limit)
    found = shard(graph, setting, memory_bytes=limit, alike=False)
    assert found.cost == cost_of(graph, found.chosen, setting)
    assert found.cost.memory_bytes <= limit
    assert found.total_ps == best
    assert found.is_optimal
    with pytest.raises(PlanError, match=rf"at least {sizes[0]} bytes .*, got {sizes[0] - 1}: 1 short"):
        shard(graph, setting, memory_bytes=sizes[0] - 1, alike=False)


@given(questions(((2,), (4,), (2, 2))), st.sampled_from([None, 2, 3]))
@settings(max_examples=12, deadline=None)
def test_never_worse_than_a_fixed_layout(question, tightness):
    graph, setting = question
    free = shard(graph, setting)
    limit = None if tightness is None else free.cost.memory_bytes * tightness // 4
    try:
        free = shard(graph, setting, memory_bytes=limit)
    except PlanError as error:  # what does not fit freely fits no layout
        free, short = None, str(error)
        assert "short" in short
    for layout in LAYOUTS.values():
        try:
            fixed = shard(graph, setting, memory_bytes=limit, allowed=layout(setting.sizes))
        except PlanError as error:
            # nothing fits, or two groups of a ring of four that are no neighbours
            assert "short" in str(error) or setting.prices.ps(Kind.ALLREDUCE, (0,), 4) is None
        else:
            assert free is not None
            assert free.total_ps <= fixed.total_ps
            assert limit is None or fixed.cost.memory_bytes <= limit


def test_memory_makes_weights_be_gathered():
    graph, setting = mlp(256, 64, 64), on_ring((4,), 100, microbatches=2)
    free = shard(graph, setting)
    tight = shard(graph, setting, memory_bytes=free.cost.memory_bytes - 1)
    assert tight.cost.memory_bytes < free.cost.memory_bytes
    assert tight.total_ps > free.total_ps
    whole = shard(graph, setting, allowed=LAYOUTS["zero-3"]((4,)))
    weights = 4 * 64 * 64 // 4
    kept = [4 * 64 * 64 for _ in ("x", "up", "gelu", "softmax")]  # 256 rows of 64 floats, on four ranks
    assert whole.cost.memory_bytes == 2 * weights * 4 + sum(kept)


def test_blocks_that_repeat_are_divided_alike_and_as_well():
    it = Writer()
    x = it.input("x", 64, 32)
    for block in range(3):
        up = it.gelu(
            f"g{block}", it.linear(f"u{block}", it.softmax(f"s{block}", x), it.weight(f"w{block}", 64, 32))
        )
        down = it.linear(f"d{block}", it.softmax(f"t{block}", up), it.weight(f"v{block}", 32, 64))
        x = it.add(f"a{block}", down, x) if block else down
    graph, setting = it.graph(), on_ring((2,), 10)
    alike, each = shard(graph, setting), shard(graph, setting, alike=False)
    assert each.total_ps <= alike.total_ps <= 1.02 * each.total_ps
    chosen = drawn(alike)
    assert chosen["u1"] == chosen["u2"]
    assert chosen["w1"] == chosen["w2"]
