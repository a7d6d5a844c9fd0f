"""Custom collectives from files: who holds each block before, who must hold it after.

    name: halo-exchange
    blocks:
      - {at: [0], to: [1, 3]}
      - {at: [1, 2], to: [0]}

YAML or JSON, the same keys. All blocks are of one size, and all ranks of `at` hold the same data. The ranks
that the file names take part, in the numbering of the topology it is read for; all others are relays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from arborcast.synth.collective import Collective, Demand
from arborcast.synth.errors import CollectiveError, InputError
from arborcast.synth.formats.documents import Document, prefixed, raising
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.formats.reading import parse_json, read_text, shorten_path
from arborcast.synth.topology import Topology

MAX_COLLECTIVE_BYTES = 16 << 20


def read_collective(
    path: Path | str,
    topology: Topology,
    *,
    ranks: int | None = None,
    max_bytes: int = MAX_COLLECTIVE_BYTES,
) -> Collective:
    """The custom collective in a file, for a topology.

    A rank of `to` that holds the block already has nothing to get and is left out; a block that nobody is
    left to get is refused. Blocks may be alike: two of them are a block of twice the size.

    Args:
        path: YAML, or JSON under a name that ends so or as text that begins with a brace.
        topology: whose numbers the file uses.
        ranks: only the first so many may be named, where the others are relays (`Topology.reordered`); all
            where None.
        max_bytes: larger files are refused.

    Raises:
        InputError: the file cannot be read or is larger than `max_bytes`.
        CollectiveError: it is no such file, or names what the topology has not.

    Examples:
        >>> swap = "blocks: [{at: [0], to: [1]}, {at: [1], to: [0]}]"
        >>> _ = Path("swap.yaml").write_text(swap)
        >>> fabric = topologies.load("full:2")
        >>> synth.solve(fabric, synth.read_collective("swap.yaml", fabric)).rate  # of both blocks
        Fraction(2, 1)
    """
    place = shorten_path(path)
    text = read_text(path, max_bytes=max_bytes)
    try:
        with raising(CollectiveError):
            document = _parse(text, place)
        return collective_from_document(document, topology, place, ranks=ranks)
    except MemoryError as error:
        raise InputError(f"{place}: does not fit into memory") from error


def _parse(text: str, place: str) -> object:
    if place.lower().endswith(".json") or text.lstrip()[:1] == "{":
        return parse_json(text, place)
    from arborcast.synth.formats.yaml_text import parse_yaml

    return parse_yaml(text, place)


def collective_from_document(
    document: object, topology: Topology, place: str, *, ranks: int | None = None
) -> Collective:
    """The custom collective that a document describes; `place` (a file name) begins every error.

    Raises:
        CollectiveError: as for `read_collective`.
    """
    from arborcast.synth.formats.shapes import CustomShape, check_shape

    with raising(CollectiveError):
        shape = check_shape(CustomShape, document, place)
        demands = []
        with prefixed(place):
            for index, demand in enumerate(read_demands(shape["blocks"], "blocks")):
                _check_ranks(demand, topology.ranks if ranks is None else ranks, f"blocks[{index}]")
                wanting = demand.targets - demand.sources
                if not wanting:
                    text = f"must have a rank that does not hold it already, got {_listed(demand.targets)}"
                    raise InputError(f"blocks[{index}].to: {text}")
                demands.append(Demand(demand.sources, wanting))
            return Collective.custom(topology, demands)


def demands_to_documents(demands: Iterable[Demand]) -> list[Document]:
    """The blocks as files hold them."""
    return [{"at": sorted(demand.sources), "to": sorted(demand.targets)} for demand in demands]


def read_demands(shapes: Sequence[Mapping[str, Any]], prefix: str) -> tuple[Demand, ...]:
    """The blocks of a document that has the shape; `prefix` is where in the file they stand.

    Raises:
        InputError: a rank stands twice in one list.
    """
    return tuple(
        Demand(
            _read_ranks(shape["at"], f"{prefix}[{index}].at"),
            _read_ranks(shape["to"], f"{prefix}[{index}].to"),
        )
        for index, shape in enumerate(shapes)
    )


def _read_ranks(ranks: Sequence[int], place: str) -> frozenset[int]:
    found = frozenset(ranks)
    if len(found) < len(ranks):
        twice, _ = Counter(ranks).most_common(1)[0]
        raise InputError(f"{place}: must name each rank once, got {twice} twice")
    return found


def _check_ranks(demand: Demand, count: int, place: str) -> None:
    for key, ranks in (("at", demand.sources), ("to", demand.targets)):
        for rank in sorted(ranks):
            if not 0 <= rank < count:
                raise InputError(f"{place}.{key}: rank must be in 0..{count - 1}, got {rank}")


def _listed(ranks: Iterable[int]) -> str:
    return shorten(sorted(ranks))
