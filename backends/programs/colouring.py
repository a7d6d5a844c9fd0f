"""Messages in rounds in which nobody sends two or receives two: edge colouring of a bipartite graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count


def colours_of(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """The round of each message, given as sender and receiver.

    There are no more rounds than somebody sends or receives messages at most (König 1916). Time grows with
    messages times ranks.
    """
    at: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)  # of a side and an end: message by colour
    colours: list[int] = []
    for number, ends in enumerate(pairs):
        colour, other = (next(c for c in count() if c not in at[end]) for end in enumerate(ends))
        # From the receiver a path of both colours in turn never comes to the sender: they are swapped there.
        path: list[int] = []
        end, wanted = (1, ends[1]), colour
        while (step := at[end].get(wanted)) is not None:
            path.append(step)
            end = 1 - end[0], pairs[step][1 - end[0]]
            wanted = other if wanted == colour else colour
        for step in path:
            for end in enumerate(pairs[step]):
                del at[end][colours[step]]
            colours[step] = other if colours[step] == colour else colour
        colours.append(colour)
        for step in (*path, number):
            for end in enumerate(pairs[step]):
                at[end][colours[step]] = step
    return colours
