"""Which NUMA nodes are one socket: a processor may show as several (NPS of AMD's, SNC of Intel's)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

MOST = 2
"""Sockets of a host, where nothing tells: those of nearly all hosts with GPUs and several NUMA nodes."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """How nodes stand on sockets.

    Attributes:
        nodes: of each socket; 1 where each node is one.
        note: what was assumed; empty where somebody says it, or nothing is to be known.
    """

    nodes: int = 1
    note: str = ""

    def of(self, node: int) -> int:
        """The socket of a NUMA node."""
        return node // self.nodes


def sockets_of(
    nodes: Collection[int],
    *,
    stated: int | None = None,
    counted: tuple[int, int] | None = None,
    total: int = 0,
) -> Sockets:
    """How the NUMA nodes with GPUs stand on sockets, which the numbers of nodes count through in order.

    Up to two nodes, 0 and 1, are a socket each. Of more, half are on each of two sockets, which is noted.

    Args:
        nodes: those that GPUs are at.
        stated: nodes of a socket, where somebody says so.
        counted: sockets and NUMA nodes of the host, where its tools say so.
        total: NUMA nodes that the host has at least.
    """
    if stated is not None:
        return Sockets(stated)
    if counted is not None and counted[1] % counted[0] == 0:
        return Sockets(counted[1] // counted[0])
    known = max(total, max(nodes, default=0) + 1)
    if known <= MOST or len(set(nodes)) < 2:
        return Sockets()
    per = 1 << ((known - 1).bit_length() - 1)
    many = f"its NUMA nodes count as {MOST} sockets with {per} nodes each"
    return Sockets(per, f"{many}, as with NPS or SNC; --numa-per-socket says otherwise")
