"""When PCIe paths become links: where they are asked for, and where nothing else joins all GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from arborcast.synth.topology import Link
from arborcast.topologies.builders import joined
from arborcast.topologies.readers.options import Said

SEPARATE = (
    "its NVLinks or xGMI do not join all GPUs: PCIe and sockets join them, at the rates of slots; "
    "--no-pcie leaves them apart"
)
"""The note on PCIe paths that join what other links leave apart."""

NO_SOCKETS = "PCIe paths are no links here, so that --between-sockets changes nothing; --pcie takes them"
"""The note on a rate between sockets that was stated in vain."""


def wants_pcie(said: Said, ranks: int, links: Sequence[Link], alone: str, notes: list[str]) -> bool:
    """Whether PCIe paths become links beside these, among so many ranks and any switches; says so in a note.

    Where nobody says it, they do where the links do not join all ranks. Where there are no links at all, PCIe
    is all that there is, whatever is said: the note is then `alone`.
    """
    wanted = not links or (_are_apart(ranks, links) if said.pcie is None else said.pcie)
    if wanted and said.pcie is None:
        notes.append(SEPARATE if links else alone)
    if not wanted and said.between_sockets is not None:
        notes.append(NO_SOCKETS)
    return wanted


def _are_apart(ranks: int, links: Sequence[Link]) -> bool:
    """Whether the links do not join all ranks."""
    size = 1 + max(link.src for link in links)
    return not set(range(ranks)) <= set(joined(max(ranks, size), ((link.src, link.dst) for link in links))[0])
