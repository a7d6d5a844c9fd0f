"""The machines of the catalog: DGX and MI250 boxes, alone or joined by a fabric.

Ranks are numbered box by box, inside a box as the machine's own tools number the GPUs. Latencies are those
of `topologies.rates`; where none has been published it says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from arborcast.synth.errors import TopologyError
from arborcast.synth.topology import Link, Topology
from arborcast.topologies.builders import cable, check_size, rotation, side_by_side, without_identity
from arborcast.topologies.gpus import GPUS
from arborcast.topologies.rates import FABRIC_HOP_US, NVLINK_LATENCY_US, NVSWITCH_HOP_US, Rates

# NVLinks per pair of GPUs of a DGX-1 with V100, numbered as nvidia-smi does (NCCL issue 671).
DGX1_NVLINKS = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)

# Infinity Fabric links per pair of dies of an MI250 box (16 dies in 8 packages).
MI250_LINKS = (
    *((0, 1, 4), (0, 4, 2), (0, 8, 1), (1, 5, 1), (1, 9, 1), (1, 10, 1), (2, 3, 4), (2, 6, 1), (2, 9, 1)),
    *((2, 10, 1), (3, 7, 2), (3, 11, 1), (4, 5, 4), (4, 6, 1), (5, 6, 1), (5, 7, 1), (6, 7, 4), (8, 9, 4)),
    *((8, 12, 2), (9, 13, 1), (10, 11, 4), (10, 14, 1), (11, 15, 2), (12, 13, 4), (12, 14, 1), (13, 14, 1)),
    *((13, 15, 1), (14, 15, 4)),
)
MI250_MIRROR = (3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12)


def dgx1(*, name: str, rates: Rates) -> Topology:
    """DGX-1 with 8 V100: a hybrid cube mesh of NVLinks, some pairs joined by two.

    Rates: 25 GB/s each way per link (V100 data sheet: 300 GB/s over 6 links, both ways); 20 in NCCL's
    model. Symmetries: {0,1,4,5} and {2,3,6,7} are the two orbits of ranks.
    """
    return _cube_mesh(name, GPUS["v100"].rate(rates), flips=(1, 4))


def dgx1_p100(*, name: str, rates: Rates) -> Topology:
    """DGX-1 with 8 P100: the same cube mesh with one link per pair, 20 GB/s each way; 18 in NCCL's model.

    Source: P100 data sheet, 160 GB/s over 4 links, both ways. All ranks are alike.
    """
    return _cube_mesh(name, GPUS["p100"].rate(rates), most=1, flips=(1, 2, 4))


def _cube_mesh(name: str, rate: Fraction, *, most: int = 2, flips: Sequence[int]) -> Topology:
    """The mesh of both, with at most so many links per pair; flipped bits of rank numbers are symmetries."""
    links = [
        link
        for first, row in enumerate(DGX1_NVLINKS)
        for second, count in enumerate(row[:first])
        if count
        for link in cable(first, second, min(count, most) * rate, NVLINK_LATENCY_US)
    ]
    symmetries = [tuple(rank ^ bit for rank in range(8)) for bit in flips]
    return Topology.build(name, 8, links, symmetries=symmetries)


def dgx2(*, name: str, rates: Rates) -> Topology:
    """DGX-2: 16 V100 around NVSwitches, 150 GB/s each way per GPU (6 links of 25; 20 in NCCL's model).

    The 12 NVSwitch chips carry every pair of GPUs at full rate together and are one switch here.
    """
    rate = 6 * GPUS["v100"].rate(rates)
    links = [link for gpu in range(16) for link in cable(gpu, 16, rate, NVSWITCH_HOP_US)]
    return Topology.build(name, 16, links, ["nvswitch"], [side_by_side(rotation(16), [0])])


def dgx_a100(*, name: str, boxes: int, rails: int, rates: Rates) -> Topology:
    """DGX A100 boxes: 8 GPUs on an NVSwitch, and a NIC per GPU to the fabric where there are several boxes.

    Rates each way: GPU to NVSwitch 300 GB/s (12 links of 25, A100 data sheet; of 20 in NCCL's model), GPU
    to fabric 25 GB/s (200 Gb/s NIC; NCCL takes the speed the NIC reports, so the same).
    """
    return _nvswitch_boxes(name, boxes, rails, 12 * GPUS["a100"].rate(rates), Fraction(25))


def dgx_h100(*, name: str, boxes: int, rails: int, rates: Rates) -> Topology:
    """DGX H100 boxes, joined as the A100 ones are.

    Rates each way: GPU to NVSwitch 450 GB/s (18 links of 25, H100 data sheet; of 20.6 in NCCL's model), GPU
    to fabric 50 GB/s (400 Gb/s NIC, in both). In-switch reduction (NVLS) is not modelled.
    """
    return _nvswitch_boxes(name, boxes, rails, 18 * GPUS["h100"].rate(rates), Fraction(50))


def _nvswitch_boxes(name: str, boxes: int, rails: int, inside: Fraction, outside: Fraction) -> Topology:
    """Boxes of 8; GPU i of each box reaches fabric switch i mod `rails`. One box has no fabric."""
    if rails not in {1, 2, 4, 8}:
        raise TopologyError(
            f"{name}: rails must be 1, 2, 4 or 8 so that 8 GPUs share them evenly, got {rails}"
        )
    ranks, fabrics = 8 * boxes, rails if boxes > 1 else 0
    check_size(name, ranks + boxes + fabrics, 4 * ranks)
    links: list[Link] = []
    for rank in range(ranks):
        links += cable(rank, ranks + rank // 8, inside, NVSWITCH_HOP_US)
        if fabrics:
            links += cable(rank, ranks + boxes + rank % rails, outside, FABRIC_HOP_US)
    in_box = [8 * box + gpu for box in range(boxes) for gpu in rotation(8)]
    symmetries = (
        side_by_side(in_box, range(boxes), rotation(fabrics)),
        side_by_side(rotation(ranks, 8), rotation(boxes), range(fabrics)),
    )
    nvswitches = ["nvswitch"] if boxes == 1 else [f"box{box}.nvswitch" for box in range(boxes)]
    switches = [*nvswitches, *(f"fabric{rail}" for rail in range(fabrics))]
    if boxes == 1:  # whatever the rails are: it is the plain machine
        name = name.partition(":")[0]
    return Topology.build(name, ranks, links, switches, without_identity(symmetries))


def mi250(*, name: str, boxes: int, rates: Rates) -> Topology:
    """Boxes of 16 MI250 dies in Infinity Fabric, joined by a fabric switch where there are several.

    Rates each way: 50 GB/s per Infinity Fabric link (MI250 data sheet: 100 GB/s both ways; pairs have 1, 2
    or 4 links), 16 GB/s per die to the fabric, its share of the box's NICs. No latency of Infinity Fabric
    is public: that of NVLink is assumed.
    """
    ranks, fabrics = 16 * boxes, int(boxes > 1)
    check_size(name, ranks + fabrics, 4 * len(MI250_LINKS) * boxes)
    links: list[Link] = []
    for box in range(boxes):
        for first, second, count in MI250_LINKS:
            links += cable(16 * box + first, 16 * box + second, 50 * count, NVLINK_LATENCY_US)
    if fabrics:
        for rank in range(ranks):
            links += cable(rank, ranks, 16, FABRIC_HOP_US)
    symmetries = (
        side_by_side(rotation(ranks, 16), range(fabrics)),
        side_by_side(*(rotation(16, 8) for _ in range(boxes)), range(fabrics)),
        side_by_side(*(MI250_MIRROR for _ in range(boxes)), range(fabrics)),
    )
    return Topology.build(name, ranks, links, ["fabric"] * fabrics, without_identity(symmetries))
