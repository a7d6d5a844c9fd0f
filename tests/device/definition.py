"""What a collective must give, by its definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from arborcast.synth.collective import Collective, Kind


def call(
    collective: Collective,
    ranks: int,
    count: int,
    seed: int,
    most: int = 99,
    add: Callable[[list[Any]], Any] = sum,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Inputs of all ranks, room for outputs, and what must stand there.

    Args:
        collective: of blocks of one size.
        ranks: of the topology.
        count: elements of the whole buffer.
        seed: of the inputs.
        most: the largest element.
        add: combines contributions.
    """
    draw = np.random.default_rng(seed)
    members, root, kind = collective.ranks, collective.root, collective.kind
    block = count // len(members)
    inputs = [draw.integers(0, most + 1, count) for _ in range(ranks)]
    every = [inputs[rank] for rank in members]
    wanted = [np.zeros(0, np.int64)] * ranks
    for own, rank in enumerate(members):
        mine = slice(own * block, (own + 1) * block)
        match kind:
            case Kind.REDUCE | Kind.GATHER if rank != root:
                continue
            case Kind.ALLREDUCE | Kind.REDUCE:
                wanted[rank] = add(every)
            case Kind.REDUCE_SCATTER:
                wanted[rank] = add(every)[mine]
            case Kind.BROADCAST:
                wanted[rank] = inputs[root]
            case Kind.SCATTER:
                wanted[rank] = inputs[root][mine]
            case Kind.ALLGATHER | Kind.GATHER:
                wanted[rank] = np.concatenate([it[:block] for it in every])
            case Kind.ALLTOALL:
                wanted[rank] = np.concatenate([it[mine] for it in every])
    return inputs, [np.full(count, -1) for _ in range(ranks)], wanted
