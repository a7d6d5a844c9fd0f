"""How boards whose tools do not count links well are wired: how many Infinity Fabric links join each pair.

Tools of AMD may count one link for every pair (RCCL's files of MI300A and of early MI250X), or leave the
number out. Where the pairs that are linked are those of a known board, its numbers stand here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from arborcast.topologies.gpus import Gpu

Pair = tuple[int, int]

MI250_BOX: Sequence[tuple[int, int, int]] = (
    *((0, 1, 4), (0, 4, 2), (0, 8, 1), (1, 5, 1), (1, 9, 1), (1, 10, 1), (2, 3, 4), (2, 6, 1), (2, 9, 1)),
    *((2, 10, 1), (3, 7, 2), (3, 11, 1), (4, 5, 4), (4, 6, 1), (5, 6, 1), (5, 7, 1), (6, 7, 4), (8, 9, 4)),
    *((8, 12, 2), (9, 13, 1), (10, 11, 4), (10, 14, 1), (11, 15, 2), (12, 13, 4), (12, 14, 1), (13, 14, 1)),
    *((13, 15, 1), (14, 15, 4)),
)
"""16 dies of MI250 in 8 packages: two dies and how many links they have (ForestColl's topologies.py)."""

FRONTIER_NODE: Sequence[tuple[int, int, int]] = (
    *((0, 1, 4), (2, 3, 4), (4, 5, 4), (6, 7, 4), (0, 6, 2), (2, 4, 2), (0, 2, 1), (4, 6, 1)),
    *((1, 3, 1), (1, 5, 1), (3, 7, 1), (5, 7, 1)),
)
"""8 dies of MI250X in 4 packages (Frontier user guide, node diagram)."""

MI300A_NODE: Sequence[tuple[int, int, int]] = tuple(
    (one, other, 2) for one in range(4) for other in range(one + 1, 4)
)
"""4 MI300A, all joined by two links of 64 GB/s (arXiv 2508.11298: 128 GB/s each way between two)."""

_BOARDS = {"gfx90a": (MI250_BOX, FRONTIER_NODE), "gfx942": (MI300A_NODE,)}
"""By the architecture of GPUs that are wired differently from board to board."""


def links_of_board(kind: Gpu, pairs: Collection[Pair]) -> dict[Pair, int] | None:
    """How many links each of these pairs, smaller number first, has on the board that joins just these.

    None where no known board of the GPU's architecture does. MI250 and MI250X are named for each other.
    """
    for board in _BOARDS.get(kind.architecture, ()) if kind.board == "wired" else ():
        counts = {(one, other): links for one, other, links in board}
        if counts.keys() == set(pairs):
            return counts
    return None
