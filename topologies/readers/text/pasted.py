"""Text of terminals as it is pasted: without colours and frames, and what it names besides its tables.

`nvidia_smi` and `rocm_smi` read the tables; which GPUs these are often stands nearby only, in the lines of
`nvidia-smi -L`, `nvidia-smi nvlink -s`, `rocm-smi --showproductname`, or in the name of the host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice

from arborcast.synth.errors import TopologyError
from arborcast.topologies.gpus import GPUS, Gpu, gpu_named
from arborcast.topologies.processors import Crossing, crossing, processor_named
from arborcast.topologies.rates import Rates

_INVISIBLE = re.compile(
    "\x1b\\[[0-9;?]*[A-Za-z]|\x1b\\][^\x07\x1b]*\x07?|[\u200b-\u200f\u2060\ufeff\x00-\x08\x0b-\x1f]"
)
MOST_LINES, MOST_CHARACTERS = 5000, 1000
"""Lines in which names and words are looked for, and how long they may be."""

_FRAME = str.maketrans(dict.fromkeys("|│┃║*`", " "))


def lines_of(text: str) -> list[str]:
    """The lines without colours, frames of tables, marks of markdown and characters of no width."""
    return [_INVISIBLE.sub("", line).translate(_FRAME) for line in text.replace("\r\n", "\n").split("\n")]


def short_lines(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """The lines that are looked through, with their numbers from 1; tools print no longer ones."""
    return (
        (at, line) for at, line in enumerate(islice(lines, MOST_LINES), 1) if len(line) <= MOST_CHARACTERS
    )


@dataclass(frozen=True, slots=True)
class Named:
    """Which GPUs a text names.

    Attributes:
        by_index: those of lines such as "GPU 3: NVIDIA H100 80GB HBM3 (UUID: ...)", by their numbers.
        anywhere: all others, with the first line (from 1) that names each.
        unknown: products that such lines name and the table of GPUs does not have.
    """

    by_index: Mapping[int, Gpu] = field(default_factory=dict)
    anywhere: Mapping[str, int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


# Products whose marketing name holds no name of the table, as "alike" in the table's sources.
_ALIKE = {
    "l40": "l40s",
    "rtx 6000 ada": "l40s",
    "a10g": "a10",
    "a5000": "a6000",
    "a4500": "a6000",
    "quadro rtx 8000": "rtx2080ti",
    "quadro rtx 6000": "rtx2080ti",
    "rtx 4000 ada": "rtx4000ada",
    "rtx 5000 ada": "rtx4000ada",
    "rtx 3080 ti": "rtx3080",
    "rtx 5070": "rtx5080",
    "rtx 5060": "rtx5060ti",
    "rtx pro 4000": "pro4500",
    "mi300": "mi300x",
}

# Instances of clouds: Amazon's documentation of accelerated instances, Google's of GPU machine types.
_INSTANCES = {
    **{
        "p3": "v100",
        "p3dn": "v100",
        "p4d": "a100",
        "p4de": "a100",
        "p5": "h100",
        "p5e": "h200",
        "p5en": "h200",
    },
    **{"p6-b200": "b200", "p6-b300": "b300", "g4dn": "t4", "g5": "a10", "g6": "l4", "g6e": "l40s"},
    **{"a2-highgpu": "a100", "a2-megagpu": "a100", "a2-ultragpu": "a100", "a3-highgpu": "h100"},
    **{"a3-megagpu": "h100", "a3-ultragpu": "h200", "a4-highgpu": "b200", "g2-standard": "l4"},
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
    instances = [
        (re.compile(rf"(?<![a-z0-9]){name}(?:\.(?:[0-9]{{0,2}}xlarge|metal)|-[0-9]+g?)(?P<form>)"), gpu)
        for name, gpu in _INSTANCES.items()
    ]
    counted = [
        # "4x4090": a number alone names a product where a count stands before it
        (
            re.compile(
                rf"(?<![a-z0-9])[0-9]{{1,2}} ?(?:x|cards?) ?{name.removeprefix('rtx')}(?![0-9a-z])(?P<form>)"
            ),
            name,
        )
        for name in GPUS
        if name.startswith("rtx") and name[3:].isdecimal()
    ]
    named = [
        # "8xRTX4090" and "h100x6" are several of them; a maker must stand before L4 and T4
        (re.compile(rf"(?<![a-z0-9])(?:[0-9]{{1,2}} ?x ?)?{_spelled(name)}{_END}"), gpu)
        for name, gpu in found.items()
        if gpu in GPUS
    ]
    return [*instances, *counted, *named]


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


_PRODUCT = re.compile(r"\W*GPU ?\[?[0-9]{1,3}\]?\s*:\s*((?:NVIDIA|AMD|Tesla|Quadro|GeForce)\b[^(|,]{2,50})")
_INDEXED = re.compile(r"^\W*GPU ?\[?([0-9]{1,3}(?:,[0-9]{1,3}){0,99})\]?\s*:")


def named_gpus(lines: Iterable[str], vendor: str) -> Named:
    """The GPUs of this vendor that the lines name."""
    by_index: dict[int, Gpu] = {}
    anywhere: dict[str, int] = {}
    unknown: dict[str, None] = {}
    for number, line in short_lines(lines):
        kinds = [kind for kind in products(line) if kind.vendor == vendor]
        indexed = _INDEXED.match(line)
        if indexed and len(kinds) == 1:
            by_index.update((int(index), kinds[0]) for index in indexed[1].split(","))
        else:
            for kind in kinds:
                anywhere.setdefault(kind.name, number)
            product = _PRODUCT.match(line) if indexed and not kinds else None
            if product is not None:
                unknown.setdefault(product[1].strip())
    return Named(by_index, anywhere, tuple(unknown))


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
    texts = [line for _, line in short_lines(lines)]
    said = _lscpu(texts)
    numbers = (said.get(key, "") for key in ("CPU family", "Model"))
    family, model = (int(number) if re.fullmatch("[0-9]{1,6}", number) else 0 for number in numbers)
    architecture = said.get("Architecture", "")
    if not family:
        named = {found.called: found for found in map(processor_named, texts) if found is not None}
        ways = {found.crossing for found in named.values() if found.crossing is not None}
        if len(ways) == 1 and rates is Rates.DATASHEET:
            return ways.pop()
    known = {"aarch64": "arm64", "ppc64le": "ppc64"}.get(architecture, architecture)
    return crossing(known, said.get("Vendor ID", ""), family, model, rates)


def sockets_counted(lines: Iterable[str]) -> tuple[int, int] | None:
    """How many sockets and NUMA nodes `lscpu` printed among the lines; None where it did not."""
    said = _lscpu(lines)
    numbers = [said.get(key, "") for key in ("Socket(s)", "NUMA node(s)")]
    if not all(re.fullmatch("[1-9][0-9]{0,3}", number) for number in numbers):
        return None
    return int(numbers[0]), int(numbers[1])


def _lscpu(lines: Iterable[str]) -> dict[str, str]:
    said: dict[str, str] = {}
    for line in lines:
        key, colon, value = line.partition(":")
        if colon and key.strip() in _LSCPU:
            said.setdefault(key.strip(), value.strip())
    return said


_LSCPU = {"Architecture", "Vendor ID", "CPU family", "Model", "Socket(s)", "NUMA node(s)"}


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


def nothing_known(products: tuple[str, ...]) -> str:
    """The note on products that the table of GPUs does not have."""
    return f"names {', '.join(products)}, of which nothing is known here"


def unnamed(assumed: str, why: str, unknown: tuple[str, ...] = ()) -> str:
    """The note on GPUs that a text does not name, or by names that are `unknown` here."""
    if unknown:
        return f"{nothing_known(unknown)}: {assumed} assumed, from {why}; --gpu says otherwise"
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
