"""Text of terminals as it is pasted: without colours and frames, and what it names besides its tables.

`nvidia_smi` and `rocm_smi` read the tables; which GPUs these are often stands nearby only, in the lines of
`nvidia-smi -L`, `nvidia-smi nvlink -s`, `rocm-smi --showproductname`, or in the name of the host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice

from arborcast.synth.errors import TopologyError
from arborcast.topologies.gpus import GPUS, Gpu, gpu_named
from arborcast.topologies.processors import Crossing, crossing
from arborcast.topologies.rates import Rates

_INVISIBLE = re.compile(
    "\x1b\\[[0-9;?]*[A-Za-z]|\x1b\\][^\x07\x1b]*\x07?|[\u200b-\u200f\u2060\ufeff\x00-\x08\x0b-\x1f]"
)
MOST_LINES = 5000
"""Lines in which names of GPUs are looked for."""

_FRAME = str.maketrans(dict.fromkeys("|│┃║*`", " "))


def lines_of(text: str) -> list[str]:
    """The lines without colours, frames of tables, marks of markdown and characters of no width."""
    return [_INVISIBLE.sub("", line).translate(_FRAME) for line in text.replace("\r\n", "\n").split("\n")]


@dataclass(frozen=True, slots=True)
class Named:
    """Which GPUs a text names.

    Attributes:
        by_index: those of lines such as "GPU 3: NVIDIA H100 80GB HBM3 (UUID: ...)", by their numbers.
        anywhere: all others, with the first line (from 1) that names each.
    """

    by_index: Mapping[int, Gpu] = field(default_factory=dict)
    anywhere: Mapping[str, int] = field(default_factory=dict)


# Products whose marketing name holds no name of the table, as "alike" in the table's sources.
_ALIKE = {
    "l40": "l40s",
    "rtx 6000 ada": "l40s",
    "a10g": "a10",
    "a5000": "a6000",
    "a4500": "a6000",
    "quadro rtx 8000": "rtx2080ti",
    "quadro rtx 6000": "rtx2080ti",
}


def _spelled(name: str) -> str:
    """A pattern for a product's name, letters and digits of it possibly apart: rtx3090 is RTX 3090."""
    parts = re.findall(r"[a-z]{2,}|[a-z]?[0-9]+[a-z]*|[a-z]+", name)
    maker = "(?:nvidia|tesla) " if len(name) < 3 else ""
    return maker + "[ _-]?".join(parts)


_END = "(?=pcie|sxm|nvl|x[0-9]|[^a-z0-9]|$)(?P<form>.{0,24})"


def _patterns() -> list[tuple[re.Pattern[str], str]]:
    found: dict[str, str] = dict(_ALIKE)
    for name in GPUS:
        found.setdefault(name.partition("-")[0], name.partition("-")[0])
    return [
        # "8xRTX4090" and "h100x6" are several of them; a maker must stand before L4 and T4
        (re.compile(rf"(?<![a-z0-9])(?:[0-9]{{1,2}} ?x ?)?{_spelled(name)}{_END}"), gpu)
        for name, gpu in found.items()
        if gpu in GPUS
    ]


_PATTERNS = _patterns()


def products(line: str) -> set[Gpu]:
    """The GPUs that a line names: of names within each other the longest, PCIe and NVL cards apart."""
    found: list[tuple[int, int, Gpu]] = []
    for pattern, name in _PATTERNS:
        match = pattern.search(line.lower())
        if match is not None:
            forms = [f"{name}-{form}" for form in re.findall("pcie|nvl", match["form"])]
            kind = next((GPUS[form] for form in forms if form in GPUS), GPUS[name])
            found.append((match.start(), match.start("form"), kind))
    spans = {(start, end) for start, end, _ in found}
    return {
        kind
        for start, end, kind in found
        if not any(first <= start and end <= last for first, last in spans - {(start, end)})
    }


_INDEXED = re.compile(r"^\W*GPU ?\[?([0-9]{1,3}(?:,[0-9]{1,3}){0,99})\]?\s*:")


def named_gpus(lines: Iterable[str], vendor: str) -> Named:
    """The GPUs of this vendor that the lines name."""
    by_index: dict[int, Gpu] = {}
    anywhere: dict[str, int] = {}
    for number, line in enumerate(islice(lines, MOST_LINES), 1):
        kinds = [kind for kind in products(line) if kind.vendor == vendor] if len(line) < 1000 else []
        indexed = _INDEXED.match(line)
        if indexed and len(kinds) == 1:
            by_index.update((int(index), kinds[0]) for index in indexed[1].split(","))
        else:
            for kind in kinds:
                anywhere.setdefault(kind.name, number)
    return Named(by_index, anywhere)


def assumed_from_names(
    named: Named, place: str, vendor: str, fits: Callable[[Gpu], bool]
) -> tuple[Gpu, str] | None:
    """The one GPU that fits among those that lines name, else the file's name, and where it stands."""
    by_file = [kind.name for kind in products(place.rpartition("/")[2]) if kind.vendor == vendor]
    hints = (
        {gpu.name: "what some of them are called" for gpu in named.by_index.values()},
        {name: f"the name in line {line}" for name, line in named.anywhere.items()},
        dict.fromkeys(by_file, "the name of the file"),
    )
    for group in hints:
        fitting = [(GPUS[name], why) for name, why in group.items() if fits(GPUS[name])]
        if len(fitting) == 1:
            return fitting[0]
    return None


def crossing_of(lines: Iterable[str], rates: Rates) -> Crossing:
    """The way between two CPUs of the model that `lscpu` printed among the lines."""
    said: dict[str, str] = {}
    for line in lines:
        key, colon, value = line.partition(":")
        if colon and key.strip() in _LSCPU:
            said.setdefault(key.strip(), value.strip())
    numbers = (said.get(key, "") for key in ("CPU family", "Model"))
    family, model = (int(number) if re.fullmatch("[0-9]{1,6}", number) else 0 for number in numbers)
    architecture = said.get("Architecture", "")
    known = {"aarch64": "arm64", "ppc64le": "ppc64"}.get(architecture, architecture)
    return crossing(known, said.get("Vendor ID", ""), family, model, rates)


_LSCPU = {"Architecture", "Vendor ID", "CPU family", "Model"}


def stated_gpu(name: str, vendor: str) -> Gpu:
    """The GPU that `--gpu` states for the text of a vendor's tool.

    Raises:
        TopologyError: it is unknown, or another vendor's.
    """
    gpu = gpu_named(name)
    if gpu.vendor != vendor:
        raise TopologyError(
            f"gpu {gpu.name}: must be {vendor}'s, whose tool printed this, got {gpu.vendor}'s"
        )
    return gpu


def taken_for(kind: Gpu, why: str) -> str:
    """Why the rates of links are assumed where a text does not name its GPUs."""
    return f"those of {kind.name}, from {why}"


def unnamed(assumed: str, why: str) -> str:
    """The note on GPUs that a text does not name."""
    return f"does not say which GPUs these are: {assumed} assumed, from {why}; --gpu says otherwise"


_LINK = re.compile(r"^\s*Link\s+[0-9]+\s*:\s*([0-9]{1,4}(?:\.[0-9]{1,6})?)\s*GB/s")


def nvlink_status(lines: Iterable[str]) -> dict[int, Fraction]:
    """GB/s each way per NVLink, by the number of the GPU, out of `nvidia-smi nvlink -s`.

    Links that are inactive count for nothing here (the matrix says how many work); of different rates at
    one GPU the least counts.
    """
    rates: dict[int, Fraction] = {}
    current: int | None = None
    for line in lines:
        indexed = _INDEXED.match(line)
        link = _LINK.match(line)
        if indexed:
            current = int(indexed[1].split(",")[0])
        elif link and current is not None and Fraction(link[1]):
            rates[current] = min(rates.get(current, Fraction(link[1])), Fraction(link[1]))
    return rates
