from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from arborcast.topologies import GPUS, Rates
from arborcast.topologies.gpus import gpu_named, gpu_of_architecture, gpu_of_capability, gpu_of_device

# GB/s of all links of a GPU in both directions together, as documents print it; those of
# MI50 (rate) and MI300A (number of links) are assumed
PRINTED = {
    **{"p100": 160, "v100": 300, "rtx2080ti": 100, "a100": 600, "a800": 400, "a30": 200, "a40": 112.5},
    **{"h100": 900, "h800": 400, "h100-nvl": 600, "b200": 1800, "gb300": 1800, "mi50": 184, "mi100": 276},
    **{"mi250x": 800, "mi210": 300, "mi300x": 896, "mi300a": 1024, "mi355x": 1075.2, "rtx4090": 0, "k80": 0},
}


@pytest.mark.parametrize(("name", "printed"), PRINTED.items())
def test_links_are_the_data_sheets(name: str, printed: float) -> None:
    gpu = gpu_named(name.upper())
    assert 2 * gpu.links * gpu.link == Fraction(str(printed))
    assert bool(gpu.links) == bool(gpu.link) == bool(gpu.link_nccl)
    assert gpu.rate(Rates.NCCL) <= gpu.rate(Rates.DATASHEET)


def test_names_are_understood_in_any_spelling() -> None:
    for name in GPUS:
        for spelled in (name.upper(), name.replace("-", "_"), name.replace("-", ""), f"{name[0]}-{name[1:]}"):
            assert gpu_named(spelled).name == name


def test_every_gpu_has_what_its_vendor_says_of_it() -> None:
    for name, gpu in GPUS.items():
        assert gpu.name == name and gpu.source and gpu.devices
        assert (gpu.vendor == "NVIDIA") == (gpu.capability is not None) == (not gpu.architecture)
    of_vendor = Counter((gpu.vendor, device) for gpu in GPUS.values() for device in gpu.devices)
    assert set(of_vendor.values()) == {1}


@pytest.mark.parametrize(
    ("capability", "links", "name"),
    [
        *(
            (80, 12, "a100"),
            (80, 8, "a800"),
            (80, 4, "a30"),
            (80, 3, "a30"),
            (80, 0, "a100"),
            (86, 4, "a6000"),
        ),
        *((90, 18, "h100"), (90, 8, "h800"), (90, 12, "h100-pcie"), (90, 10, "h100-pcie"), (100, 18, "b200")),
        *((70, 6, "v100"), (60, 4, "p100"), (75, 0, "t4"), (75, 2, "rtx2080ti"), (89, 0, "l40s")),
        *((120, 0, "pro6000"), (121, 0, "gb10"), (103, 18, "b300"), (70, 99, "v100"), (72, 0, "v100")),
    ],
)
def test_capabilities_and_counts_of_links_say_which(capability: int, links: int, name: str) -> None:
    found = gpu_of_capability(capability, links=links)
    assert found is not None and found.name == name
    assert gpu_of_capability(20, links=links) is None


@pytest.mark.parametrize(
    ("gcn", "links", "name"),
    [
        *(
            ("906", 2, "mi50"),
            ("gfx908", 3, "mi100"),
            ("910", 8, "mi250x"),
            ("gfx90a:sramecc+:xnack-", 3, "mi210"),
        ),
        *(("gfx942", 7, "mi300x"), ("940", 8, "mi300a"), ("GFX950", 7, "mi350x"), ("gfx906", 9, "mi50")),
    ],
)
def test_architectures_in_all_their_forms(gcn: str, links: int, name: str) -> None:
    found = gpu_of_architecture(gcn, links=links)
    assert found is not None and found.name == name


def test_what_is_not_known_is_none() -> None:
    assert gpu_of_architecture("", links=1) is gpu_of_architecture("gfx1100", links=0) is None
    assert gpu_of_device(0x10DE, 0x74A1) is gpu_of_device(0x8086, 0x20B0) is None
    assert gpu_of_device(0x10DE, 0x20B0) is GPUS["a100"]
    assert gpu_of_device(0x1002, 0x740C) is GPUS["mi250"]
