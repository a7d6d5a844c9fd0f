"""Resharding: every sequence of collectives carried out on real arrays, and no detour cheaper."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from arborcast.pipeline.meshes import SUM, Mesh, Spec, shown
from arborcast.pipeline.sharding.fabric_prices import FabricPrices
from arborcast.pipeline.sharding.resharding import Resharder, ReshardingStep
from arborcast.pipeline.sharding.specs import divides
from arborcast.synth.collective import Kind
from tests.sharding.examples import on_ring, ring

Array = NDArray[np.int64]
SHAPE = (4, 8)
MESH = Mesh((2, 2), (0, 1, 2, 3))
SPECS = [it for it in product((None, 0, 1), repeat=2) if divides(it, SHAPE, MESH.shape)]


def laid(whole: Array, spec: Spec) -> list[Array]:
    """What each rank has; summands are unlike on every rank."""
    random = np.random.default_rng(7)
    parts: dict[tuple[int, ...], Array] = {(): whole}
    for at, size in zip(spec, MESH.shape, strict=True):
        finer = {}
        for where, array in parts.items():
            if at is None:
                pieces = [array] * size
            elif at == SUM:
                noise = random.integers(0, 99, (size - 1, *array.shape))
                pieces = [*noise, array - noise.sum(axis=0)]
            else:
                pieces = np.split(array, size, axis=at)
            finer |= {(*where, index): piece for index, piece in enumerate(pieces)}
        parts = finer
    return [parts[where] for where in sorted(parts)]


def carried_out(step: ReshardingStep, held: Sequence[Array], before: Spec) -> list[Array]:
    result = list(held)
    old, new = before[step.axes[0]], step.spec[step.axes[0]]
    for group in MESH.groups(step.axes):
        mine = [held[rank] for rank in group]
        count = len(group)
        if step.kind is None:
            made = [np.split(array, count, axis=new)[at] for at, array in enumerate(mine)]
        elif step.kind is Kind.ALLREDUCE:
            made = [sum(mine[1:], mine[0])] * count
        elif step.kind is Kind.REDUCE_SCATTER:
            made = np.split(sum(mine[1:], mine[0]), count, axis=new)
        elif step.kind is Kind.ALLGATHER:
            made = [np.concatenate(mine, axis=old)] * count
        else:
            assert step.kind is Kind.ALLTOALL
            sent = [np.split(array, count, axis=new) for array in mine]
            made = [np.concatenate([them[at] for them in sent], axis=old) for at in range(count)]
        for rank, array in zip(group, made, strict=True):
            result[rank] = array
    return result


@pytest.mark.parametrize("source", [*SPECS, (SUM, None), (SUM, SUM), (0, SUM), (SUM, 1)], ids=shown)
def test_steps_lead_where_they_should(source):
    resharder = Resharder(
        FabricPrices(ring(4), Mesh((2, 2), (0, 1, 3, 2)))
    )  # rows and columns are neighbours
    whole = np.arange(32).reshape(SHAPE)
    for target in SPECS:
        path = resharder.path(SHAPE, 4 * 32, source, target)
        assert path is not None
        held, spec, total = laid(whole, source), source, 0
        for step in path.steps:
            held = carried_out(step, held, spec)
            buffer = max(it.nbytes for it in held) // 2  # int64 here, four bytes each there
            if step.kind is Kind.ALLGATHER:
                assert step.size_bytes == buffer
            total += resharder.prices.ps(step.kind, step.axes, step.size_bytes) if step.kind else 0
            spec = step.spec
        assert (spec, total) == (target, path.ps)
        for mine, wanted in zip(held, laid(whole, target), strict=True):
            np.testing.assert_array_equal(mine, wanted)
        for between in SPECS:
            first, second = (resharder.path(SHAPE, 128, *it) for it in ((source, between), (between, target)))
            assert path.ps <= first.ps + second.ps


def test_paths_as_drawn():
    resharder = on_ring((4,)).resharder

    def words(source: Spec, target: Spec) -> str:
        path = resharder.path((8, 8), 256, source, target)
        assert path is not None
        return " ".join(f"{it.kind or 'slice'} {it.size_bytes}" for it in path.steps) + f" = {path.ps}"

    # ring of four at 1 GB/s each way: allgather 8/3 GB/s, allreduce 4/3
    assert words((0,), (None,)) == "allgather 256 = 96000"
    assert words((SUM,), (None,)) == "allreduce 256 = 192000"
    assert words((SUM,), (1,)) == "reduce-scatter 256 = 96000"
    assert words((None,), (0,)) == "slice 0 = 0"
    # of a rank's 64 bytes 16 go over one link to each neighbour, 16 over two links: 64 on its two, 32 on each
    assert words((0,), (1,)) == "alltoall 64 = 32000"
    assert shown((0, None, SUM)) == "S(0) R P"
