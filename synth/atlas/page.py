"""Pages of the atlas from figures: the part that the site shows, the same as a page of its own, the index.

First what decides: the rate, whether it is proved, how much faster that is than rings, and the command.
"""

from __future__ import annotations

import gzip
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborcast.synth.atlas.figures import Figures, KindRates, SizeCurve
from arborcast.synth.certificate import Scope
from arborcast.synth.collective import Kind, busbw_factor
from arborcast.synth.errors import InputError
from arborcast.synth.formats.sizes import format_size

if TYPE_CHECKING:
    from jinja2 import Environment

FIGURES, PICTURE = "figures.json", "fabric.svg.gz"
NONE = "–"  # in tables, where there is no number
STYLE = files(__package__) / "atlas.css"
PRICED = """Both are of links as fast as these were measured to be, and with what a call costs: large buffers
stay below the rates above, and the least time is above that of links at their own rates, which synth explain
prints."""
MODEL = " NCCL's model counts with constants of its own, and may promise less than links take at least."
UNPRICED = "Both are of the links alone: nothing measured is known of these."
ADVICE = """synth solve {spec} allreduce -o fast.json  # the schedule, with its proof
synth solve {spec} allreduce --size 64KiB -o small.json  # the one for a size"""


def part_of(rate: Fraction | None, limit: Fraction) -> str:
    """A rate as whole percent of the limit, rounded down so that 100 % means equal."""
    return NONE if rate is None else f"{int(100 * rate / limit)} %"


def among(row: KindRates) -> str:
    """Of which schedules a limit speaks, where not of all."""
    return " along trees" if row.scope == Scope.TREES else ""


def page_of(figures: Figures, picture: str = "fabric.svg") -> str:
    """What is shown of a machine, as HTML without head and title.

    Args:
        figures: of it.
        picture: where that of the fabric is.

    Raises:
        InputError: Jinja2 is not installed.
    """
    return _rendered("machine", **_shown(figures), picture=picture)


def picture_of(figures: Figures, folder: Path) -> bytes:
    """The fabric as SVG, from the folder of the figures; nothing where it is not drawn."""
    return b"" if figures.no_picture else gzip.decompress((folder / PICTURE).read_bytes())


def whole_page(figures: Figures, folder: Path) -> str:
    """The same as a document of its own, which asks no other file for anything but downloads."""
    picture = f"data:image/svg+xml;base64,{b64encode(picture_of(figures, folder)).decode()}"
    page, style = page_of(figures, picture), STYLE.read_text(encoding="utf-8")
    return _rendered("alone", name=figures.name, page=page, style=style)


def index_of(machines: Sequence[Figures]) -> str:
    """The table of all machines."""
    return _rendered("index", machines=machines)


def read_atlas(folder: Path) -> list[Figures]:
    """The figures of all machines in a folder, by name, 2 boxes before 16.

    Raises:
        InputError: a file of it is damaged.
    """
    found = [
        Figures.from_document(path.read_bytes(), str(path)) for path in sorted(folder.glob(f"*/{FIGURES}"))
    ]
    return sorted(found, key=lambda it: re.sub(r"\d+", lambda found: found[0].zfill(6), it.name))


def _shown(it: Figures) -> dict[str, Any]:
    """What the template writes beside the figures."""
    from arborcast.synth.atlas.curve import shown

    best = it.of(Kind.ALLREDUCE)
    at = " at measured rates" if it.priced else ""
    why_not: dict[str, list[str]] = {}
    for row in it.rates:
        for why in {row.why_no_ring, row.why_no_nccl} - {""}:
            why_not.setdefault(why.removeprefix(f"{row.kind}: "), []).append(row.kind)
    return {
        "it": it,
        "best": best,
        "beside": list(_beside(best)),
        "small": _small(it.curve(Kind.ALLREDUCE), among(best) + at),
        "advice": "" if best.rate is None else ADVICE.format(spec=it.spec),
        "charts": [shown(curve, among(it.of(curve.kind)) + at) for curve in it.curves],
        "why_not": [f"{', '.join(kinds)}: {why}" for why, kinds in sorted(why_not.items())],
        "commands": [each for each in it.downloads if each.command and not each.name],
        "refused": [f"{each.what}: {each.why}" for each in it.downloads if not each.command],
        "how_timed": (PRICED if it.priced else UNPRICED) + MODEL * any(each.promised for each in it.curves),
        "busbw": lambda row: float(row.rate * busbw_factor(Kind(row.kind), it.ranks)),
    }


def _beside(best: KindRates) -> Iterator[tuple[float, str, str]]:
    """Of what is slower: how many times, what it is, and which part of the limit it reaches."""
    others = ((best.ring, "the best rings"), (best.nccl, "what NCCL's model plans with"))
    for rate, who in others if best.rate is not None else ():
        if rate is not None and best.rate is not None and rate < best.rate:
            yield float(best.rate / rate), who, part_of(rate, best.limit)


def _small(curve: SizeCurve, among: str) -> str:
    """Of small buffers, where latencies count."""
    gap = curve.worst_gap()
    if gap is None:
        return ""
    told = "Up to 1 MiB the schedule chosen for each size takes at most "
    told += f"{gap:.0%} longer than the least time of any schedule{among}."
    faster = [(each.ring_us / each.time_us, each.bytes) for each in curve.small if each.ring_us]
    if faster and max(faster)[0] >= 1.05:
        told += f" It is up to {max(faster)[0]:.3g}x as fast as the rings (at {format_size(max(faster)[1])})."
    return told


def _rendered(template: str, /, **said: Any) -> str:
    return _environment().get_template(f"{template}.html.jinja").render(**said)


@cache
def _environment() -> Environment:
    try:
        from jinja2 import Environment, PackageLoader
    except ModuleNotFoundError as error:
        raise InputError(
            "pages need Jinja2 and matplotlib; install them with: pip install 'arborcast[viz]'"
        ) from error
    made = Environment(
        loader=PackageLoader(__package__, ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    made.globals |= {"part_of": part_of, "among": among}
    made.filters |= {
        "size": format_size,
        "us": lambda us: NONE if us is None else f"{us:,.0f}" if us >= 1000 else f"{us:.4g}",
        "gap": lambda gap: NONE if gap is None else f"{gap:.1%}",
        "rate": lambda rate: NONE if rate is None else f"{float(rate):.4g}",
    }
    return made
