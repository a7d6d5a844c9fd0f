"""Topology XML as NCCL, RCCL and clouds write it, of machines drawn after real ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

FABRIC = "fffffff:ff:ff.0"
INTEL = 'arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85"'  # Skylake
SAPPHIRE = 'arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143"'
EPYC = 'arch="x86_64" vendor="AuthenticAMD" familyid="143" modelid="49"'
GRACE = 'arch="arm64"'


def busid(dev: int) -> str:
    """The address of the slot of a GPU."""
    return f"0000:{dev + 1:02x}:00.0"


def slot(
    address: str,
    *inside: str,
    kind: str = "0x060400",
    speed: str = "8.0 GT/s PCIe",
    width: str = "16",
    device: str = "",
) -> str:
    """A pci element; `device` is "vendor:device" in hexadecimal."""
    vendor, _, number = device.partition(":")
    named = f' vendor="0x{vendor}" device="0x{number}"' if device else ""
    return (
        f'<pci busid="{address}" class="{kind}"{named} link_speed="{speed}" link_width="{width}">'
        f"{''.join(inside)}</pci>"
    )


def gpu(
    dev: int,
    links: Iterable[tuple[str, int, str]] = (),
    what: str = 'sm="70"',
    *,
    rank: str | None = None,
    tag: str = "nvlink",
    more: str = "",
    **of_slot: str,
) -> str:
    """A GPU in its slot; links are (target, count, class)."""
    inner = "".join(f'<{tag} target="{t}" count="{c}" tclass="{k}"/>' for t, c, k in links)
    ranked = "" if rank is None else f' rank="{rank}"'
    return slot(
        of_slot.pop("address", busid(dev)),
        f'<gpu dev="{dev}" {what}{ranked} gdr="1">{inner}{more}</gpu>',
        **{"kind": "0x030200", **of_slot},
    )


def nic(name: str, mbits: int | None, *, address: str = "0000:e0:00.0") -> str:
    """A NIC with one port in its slot."""
    speed = "" if mbits is None else f' speed="{mbits}"'
    return slot(address, f'<nic><net name="{name}" dev="0"{speed} port="1" gdr="1"/></nic>', kind="0x020700")


def system(*cpus: Sequence[str], cpu: str = INTEL, hosts: Sequence[str] = ()) -> str:
    """The XML of CPUs with these elements on them; `hosts` says of which host each is."""
    inner = "".join(
        f'<cpu numaid="{numa}" {cpu}{f" host_hash={chr(34)}{hosts[numa]}{chr(34)}" if hosts else ""}>'
        f"{''.join(elements)}</cpu>"
        for numa, elements in enumerate(cpus)
    )
    return f'<system version="1">{inner}</system>'


def linked(
    counts: Mapping[tuple[int, int], int], ranks: int, what: str, *, tag: str = "nvlink", device: str = ""
) -> list[str]:
    """GPUs with so many links between each pair, as the file of the machine shows them."""
    kind = "0x038000" if tag == "xgmi" else "0x030200"
    return [
        gpu(
            dev,
            [
                (busid(other), counts[min(dev, other), max(dev, other)], kind)
                for other in range(ranks)
                if (min(dev, other), max(dev, other)) in counts
            ],
            what,
            tag=tag,
            kind=kind,
            device=device,
        )
        for dev in range(ranks)
    ]
