"""The machines that people own, the most popular first: every machine of the catalog, fragments, and boxes.

`synth atlas --catalog` makes a page of each row. A machine that enters the catalog appears by itself; what
stands here by hand is which are popular, and which parts of them are handed out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

from arborcast.topologies.catalog import catalog
from arborcast.topologies.entries import Entry
from arborcast.topologies.files import load
from arborcast.topologies.published import measurements


@dataclass(frozen=True, slots=True)
class Owned:
    """A machine, or the fragment of it that a scheduler hands out: a catalog spec, and ranks as `--ranks`."""

    spec: str
    ranks: str | None = None


POPULAR = (
    *("dgx-h100", "dgx-a100", "dgx1", "dgx-h200", "dgx-b200", "mi300x", "gb200-nvl72"),
    *("rtx4090", "rtx3090", "p5", "p4d", "mi250", "dgx-spark"),
)
"""Whose pages are made first; all others follow as the catalog has them."""

FRAGMENTS = {
    "dgx1": ("0-5", "0-3", "1,4,5,6", "0-2"),
    "dgx-h100": ("0-3",),
    "dgx-a100": ("0-3",),
    "mi300x": ("0-3",),
    "mi250": ("0-7",),
    "trn1": ("0-7",),
    "trn2": ("0-7",),
    "gaudi3": ("0-3",),
    "rtx3090": ("0-3", "0,2,4,6"),
    "rtx4090": ("0-3",),
}
"""Parts of a box that schedulers hand out, most of them less symmetric than the whole."""

SIZES = {
    "dgx-spark": (":2", ":3"),
    "mac-studio": (":2", ":3"),
    "gb200-nvl72": (":gpus=4", ":gpus=8", ":gpus=16", ":gpus=36"),
    "tpu-v4": (":4x4x4",),
    "tpu-v5p": (":2x2x1", ":4x4x4"),
    "tpu-v5e": (":2x4", ":4x4", ":8x8"),
    "tpu-v6e": (":2x4", ":4x4", ":8x8"),
    "mi300x": (":partition=cpx-nps1",),
    "h100-nvl": (":gpus=4",),
}
"""Other sizes and partitions in which they are sold or rented."""

BOXES = {
    (2, 4, 8, 16): ("dgx-h100", "dgx-a100", "dgx-h200", "dgx-b200", "mi300x"),
    (2, 4): ("dgx1", "p5", "p4d", "mi250", "perlmutter", "a3-mega", "ndv5", "ndv4", "gaudi3", "trn1"),
}
"""How many boxes of a popular machine on one fabric."""

WITHOUT_NCCL = ("gaudi", "mac-studio", "tpu", "trn")
"""How the names of machines begin on which neither NCCL nor RCCL runs."""

FEW_NODES = {"perlmutter": "nodes"}
"""What boxes are called, where it is something else."""


def owned() -> Iterator[Owned]:
    """Every row once: machines and their parts, sizes and boxes, what others measured; the popular first."""
    entries = [entry for entry in catalog() if entry.vendor]
    popular = {name: place for place, name in enumerate(POPULAR)}
    entries.sort(key=lambda entry: popular.get(entry.name, len(POPULAR)))
    several = (row for entry in entries for row in _several(entry))
    measured = (row.spec for row in measurements() if not row.processors and not row.ranks)
    listed = dict.fromkeys(
        [
            *(row for entry in entries for row in _of(entry)),
            *(row for count, row in sorted(several, key=itemgetter(0))),
            *(Owned(load(spec).name) for spec in dict.fromkeys(measured)),
        ]
    )
    names = {entry.name for entry in entries}
    yield from (row for row in listed if row.spec.partition(":")[0] in names)


def _of(entry: Entry) -> Iterator[Owned]:
    """One box or the size that the catalog shows, then its parts."""
    required = [parameter.shown.replace("N", "4") for parameter in entry.parameters if parameter.required]
    yield Owned(f"{entry.name}:{','.join(required)}" if required else entry.name)
    yield from (Owned(entry.name, ranks) for ranks in FRAGMENTS.get(entry.name, ()))


def _several(entry: Entry) -> Iterator[tuple[int, Owned]]:
    """Its other sizes, and how many boxes of it."""
    yield from ((1, Owned(f"{entry.name}{size}")) for size in SIZES.get(entry.name, ()))
    boxes = FEW_NODES.get(entry.name, "boxes")
    counts = [count for counts, names in BOXES.items() if entry.name in names for count in counts]
    yield from ((count, Owned(f"{entry.name}:{boxes}={count}")) for count in counts)
