"""When PCIe paths become links: where they are asked for, and where nothing else joins all GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from arborcast.synth.topology import Link

SEPARATE = (
    "its NVLinks or xGMI do not join all GPUs: PCIe and sockets join them, at the rates of slots; "
    "--no-pcie leaves them apart"
)
"""The note on PCIe paths that join what other links leave apart."""


def wants_pcie(stated: bool | None, ranks: int, links: Sequence[Link]) -> bool:
    """Whether PCIe paths become links beside these, among so many ranks and any switches.

    `stated` is what somebody says; None lets them where the links do not join all ranks. Where there are no
    links at all, PCIe is all that there is, whatever is said.
    """
    if not links or stated is not None:
        return not links or bool(stated)
    neighbours: dict[int, list[int]] = {}
    for link in links:
        neighbours.setdefault(link.src, []).append(link.dst)
    reached, todo = {0}, [0]
    while todo:
        ahead = [vertex for vertex in neighbours.get(todo.pop(), ()) if vertex not in reached]
        reached.update(ahead)
        todo += ahead
    return not reached.issuperset(range(ranks))
