"""Link-disjoint rings of a square torus, written down: what a search for rings does not find on many ranks.

On a torus of k x k, with R one to the right and D one down, the cycles (R^(k-1) D)^k and (D^(k-1) R)^k take
every link once, in both directions four rings in all (a case of Kotzig 1973: the product of two cycles falls
into two Hamiltonian cycles). Each round of the first begins one row lower and one column to the left, so that
the translation (1, -1) maps both to themselves: the schedule has an implicit form with k translations.

    0 > 1 > 2 > 3           the first cycle on 4 x 4: rank 4 r + c in row r and column c
                v
    4 > 5 > 6   7 >         row 1 begins at its right end and goes on at its left end
            v
    8 > 9   a > b >
        v
    c   d > e > f >         and back to 0
    v
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from arborcast.synth.baselines.rings import moves_on_ring
from arborcast.synth.baselines.switch_paths import Path, switch_paths
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Chunk, Method, Transfer
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Topology

Ring = tuple[Path, ...]


def square_rings(topology: Topology, translations: Translations) -> tuple[Ring, ...]:
    """The four rings; none where the fabric is no square torus of equal links with these translations."""
    side = _side(topology, translations)
    if not side:
        return ()
    paths = switch_paths(topology, range(topology.ranks))
    across, down = side, 1  # elements have the digits of the first generator first
    rings: list[Ring] = []
    for long, short in ((across, down), (down, across)):
        element, elements = 0, []
        for _ in range(side):
            for step in (*[long] * (side - 1), short):
                elements.append(element)
                element = _moved(element, step, side)
        places = translations.apply(np.array(elements, dtype=np.int64), 0).tolist()
        for order in (places, places[::-1]):
            pairs = zip(order, (*order[1:], order[0]), strict=True)
            rings.append(tuple(paths[pair][0] for pair in pairs))
    return tuple(rings)


def implicit_square_rings(
    topology: Topology, collective: Collective, bound: Bound, translations: Translations
) -> ImplicitSchedule | None:
    """The schedule over the four rings by the translations that map each to itself; None as above."""
    rings = square_rings(topology, translations)
    if not rings:
        return None
    diagonal = diagonal_of(topology, translations)
    chunks: list[Chunk] = []
    transfers: list[Transfer] = []
    for ring in rings:
        place = {path.src: position for position, path in enumerate(ring)}
        for rank in diagonal.representatives:
            transfers += moves_on_ring(collective.kind, ring, place[rank], len(chunks))
            chunks.append(Chunk(Fraction(1, len(rings) * topology.ranks), rank))
    method = Method("multiring", settings=(("rings", len(rings)),))
    return ImplicitSchedule.build(topology, collective, method, bound, diagonal, chunks, transfers)


def diagonal_of(topology: Topology, translations: Translations) -> Translations:
    """The translations that map each of the rings to itself: one right and one up, and what that makes."""
    first, second = (np.array(images, dtype=np.int64) for images in translations.generators)
    return Translations.generated(topology, [first[np.argsort(second)].tolist()])


def _side(topology: Topology, translations: Translations) -> int:
    """The side of a square torus; 0 of anything else."""
    side = next(iter(translations.orders), 0)
    if translations.orders != (side, side) or translations.order != topology.ranks or topology.switches:
        return 0
    steps = (side, 1, _moved(0, -side, side), _moved(0, -1, side))
    ends = {int(translations.apply(np.array([step], dtype=np.int64), 0)[0]) for step in steps}
    is_torus = ends == {link.dst for link in topology.links if link.src == 0}
    return side if is_torus and side > 2 and len(set(topology.capacities)) == 1 else 0


def _moved(element: int, step: int, side: int) -> int:
    """The element that many times `side` the first generator, and the rest the second, lead to."""
    rows, columns = divmod(abs(step), side)
    sign = 1 if step > 0 else -1
    row, column = divmod(element, side)
    return (row + sign * rows) % side * side + (column + sign * columns) % side
