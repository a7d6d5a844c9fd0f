"""GPU instances of clouds: the boxes of NVIDIA and AMD with the networks that clouds give them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import partial

from arborcast.topologies.entries import BOTH, Entry
from arborcast.topologies.machines.boxes import BOXES, box_entry, nic
from arborcast.topologies.machines.nvidia import dgx1
from arborcast.topologies.rates import INFINIBAND

# Name, instance, GPU, GPUs, NICs x GB/s each way, what the cloud's document says of the NICs.
_AWS = (
    ("p4d", "p4d.24xlarge", "a100", 8, "4 x 12.5", "400 Gb/s, 4 EFA"),
    ("p5", "p5.48xlarge", "h100", 8, "32 x 12.5", "3200 Gb/s, 32 EFA"),
    ("p5en", "p5en.48xlarge", "h200", 8, "16 x 25", "3200 Gb/s, 16 EFA"),
    ("p6-b200", "p6-b200.48xlarge", "b200", 8, "8 x 50", "3200 Gb/s, 8 EFA"),
    ("p6-b300", "p6-b300.48xlarge", "b300", 8, "16 x 50", "6400 Gb/s, 16 EFA"),
)
_AZURE = (
    ("ndv4", "ND A100 v4", "a100", 8, "8 x 25", "200 Gb/s for each GPU"),
    ("ndv5", "ND H100 v5", "h100", 8, "8 x 50", "400 Gb/s for each GPU"),
    ("ndv5-h200", "ND H200 v5", "h200", 8, "8 x 50", "400 Gb/s for each GPU"),
    ("ndv5-mi300x", "ND MI300X v5", "mi300x", 8, "8 x 50", "400 Gb/s for each GPU"),
    ("ndv6-gb200", "ND GB200 v6", "gb200", 4, "4 x 50", "400 Gb/s for each GPU"),
)
_GOOGLE = (
    ("a3-high", "a3-highgpu-8g", "h100", 8, "4 x 25", "1000 Gb/s, 4 of 5 NICs for GPUs"),
    ("a3-mega", "a3-megagpu-8g", "h100", 8, "8 x 25", "1800 Gb/s, 8 of 9 NICs for GPUs"),
    ("a3-ultra", "a3-ultragpu-8g", "h200", 8, "8 x 50", "8 ConnectX-7, 3200 Gb/s"),
    ("a4", "a4-highgpu-8g", "b200", 8, "8 x 50", "8 ConnectX-7, 3200 Gb/s"),
    ("a4x", "a4x-highgpu-4g", "gb200", 4, "4 x 50", "4 ConnectX-7, 1600 Gb/s"),
)
_ORACLE = (
    ("oci-a100", "BM.GPU.A100-v2.8", "a100", 8, "16 x 12.5", "RDMA 16 x 100 Gb/s"),
    ("oci-h100", "BM.GPU.H100.8", "h100", 8, "16 x 25", "RDMA 8 x 2 x 200 Gb/s"),
    ("oci-h200", "BM.GPU.H200.8", "h200", 8, "8 x 50", "RDMA 8 x 400 Gb/s"),
    ("oci-b200", "BM.GPU.B200.8", "b200", 8, "8 x 50", "RDMA 8 x 400 Gb/s"),
    ("oci-mi300x", "BM.GPU.MI300X.8", "mi300x", 8, "8 x 50", "RDMA 8 x 400 Gb/s"),
)


_NETWORKS = {"AWS": "EFA", "Google Cloud": "Ethernet", "Oracle Cloud": "Ethernet"}


def _instance(vendor: str, document: str, line: tuple[str, str, str, int, str, str]) -> Entry:
    name, instance, gpu, gpus, nics, said = line
    mesh = gpu.startswith("mi")
    inside = "all joined" if mesh else "on NVSwitch"
    # A tray of a rack: the cloud may place several in one NVLink domain, or not.
    domain = "; trays of one NVLink domain are gb200-nvl72" if gpus == 4 else ""
    return box_entry(
        name,
        f"{instance}: {gpus} {gpu.upper()} {inside}, {nics} GB/s to a fabric{domain}",
        gpu,
        nics,
        vendor=vendor,
        source=f"{document}: {said}",
        gpus=gpus,
        shape="mesh" if mesh else "switch",
        network=_NETWORKS.get(vendor, INFINIBAND),
    )


_NDV2 = Entry(
    "ndv2",
    "ND40rs v2: 8 V100 wired as in a DGX-1, 1 x 12.5 GB/s to a fabric",
    partial(dgx1, gpu="v100", nics=1, rails=1),
    (BOXES, nic(Fraction("12.5"))),
    BOTH,
    "v100",
    "Azure",
    "V100 data sheet: NVLink 300 GB/s; Azure documentation: one EDR InfiniBand of 100 Gb/s",
)

ENTRIES: Sequence[Entry] = (
    *(_instance("AWS", "EC2's API as Karpenter's documentation lists it", line) for line in _AWS),
    _NDV2,
    *(_instance("Azure", "Azure documentation, GPU accelerated sizes", line) for line in _AZURE),
    *(
        _instance("Google Cloud", "Google Cloud documentation, Networking and GPU machines", line)
        for line in _GOOGLE
    ),
    *(_instance("Oracle Cloud", "OCI documentation, Compute Shapes", line) for line in _ORACLE),
)
