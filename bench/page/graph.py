"""The picture of a topology from the links that a results file lists, with what each of them delivered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from typing import Any

from arborcast.bench.page.results import Row, number
from arborcast.bench.page.words import digits, percent
from arborcast.synth.pictures.placement import place
from arborcast.synth.topology import Link, Topology

LEAST_DELIVERED = 0.9
"""Share of its nominal rate below which a link is drawn as one that did not keep its promise."""

_WIDTH, _HEIGHT = 300.0, 190.0


@dataclass(frozen=True, slots=True)
class Delivered:
    """A link as it was measured, in Mbit/s; None where that was not.

    Attributes:
        src: where it starts: the number of a rank, or the name of a switch.
        dst: where it ends.
        nominal: what it was set to.
        alone: what it delivered with all others idle.
        together: what it delivered with all others busy.
    """

    src: int | str
    dst: int | str
    nominal: float | None
    alone: float | None
    together: float | None

    @property
    def share(self) -> float | None:
        """The least that it delivered, of what it was set to."""
        measured = [rate for rate in (self.alone, self.together) if rate is not None]
        return min(measured) / self.nominal if measured and self.nominal else None


def links_of(listed: Any, topology: str) -> list[Delivered]:
    """The links of a topology from a results file's `links`; those that lack an end are left out."""
    rows = listed.get(topology, []) if isinstance(listed, dict) else listed
    if isinstance(rows, dict):
        rows = rows.get("links", [])
    found = []
    for row in rows if isinstance(rows, list) else []:
        if not isinstance(row, dict) or row.get("topology", topology) != topology:
            continue
        src, dst = (next((row[key] for key in keys if key in row), None) for keys in _ENDS)
        if isinstance(src, int | str) and isinstance(dst, int | str):
            found.append(
                Delivered(src, dst, *(_rate(row, part) for part in ("nominal", "alone", "together")))
            )
    return found


_ENDS = (("from", "src"), ("to", "dst"))


def _rate(row: Row, part: str) -> float | None:
    return next((number(value) for key, value in row.items() if key.startswith(part)), None)


def graph(links: Sequence[Delivered], description: str) -> str:
    """Ranks as discs, switches as squares, links as lines as wide as they are fast; "" where none is listed.

    A link that delivered less than `LEAST_DELIVERED` of its nominal rate is red.
    """
    vertices = sorted({end for link in links for end in (link.src, link.dst)}, key=_order)
    if not vertices:
        return ""
    index = {vertex: number for number, vertex in enumerate(vertices)}
    ranks = sum(isinstance(vertex, int) for vertex in vertices)
    if not ranks:
        return ""
    # Only where the vertices go is asked of it; names are drawn from the results.
    topology = Topology.build(
        "drawn",
        ranks,
        [Link(index[link.src], index[link.dst], Fraction(1)) for link in links if link.src != link.dst],
        [f"switch {number}" for number in range(len(vertices) - ranks)],
    )
    points = place(topology).points
    xs, ys = [x for x, _ in points.values()], [y for _, y in points.values()]
    width, height = max(xs) - min(xs) + 1.0, max(ys) - min(ys) + 1.0
    scale = min(_WIDTH / width, _HEIGHT / height, 62.0)
    lift = (_HEIGHT - height * scale) / 2  # pictures side by side are equally high
    at = {
        vertex: (
            (points[number][0] - min(xs) + 0.5) * scale,
            lift + (max(ys) - points[number][1] + 0.5) * scale,
        )
        for vertex, number in index.items()
    }
    widest = max((link.nominal or 0.0 for link in links), default=0.0)
    drawn = [_cable(pair, at, widest) for pair in _pairs(links)]
    drawn += [_vertex(vertex, at[vertex]) for vertex in vertices]
    return (
        f'<svg viewBox="0 0 {width * scale:.0f} {_HEIGHT:.0f}" role="img" '
        f'style="max-width:{width * scale:.0f}px" aria-label="{escape(description)}">{"".join(drawn)}</svg>'
    )


def _order(vertex: int | str) -> tuple[bool, int, str]:
    return (isinstance(vertex, str), vertex if isinstance(vertex, int) else 0, str(vertex))


def _pairs(links: Sequence[Delivered]) -> list[list[Delivered]]:
    """Both directions of a link together."""
    found: dict[frozenset[int | str], list[Delivered]] = {}
    for link in links:
        found.setdefault(frozenset((link.src, link.dst)), []).append(link)
    return list(found.values())


def _cable(pair: Sequence[Delivered], at: dict[int | str, tuple[float, float]], widest: float) -> str:
    (x, y), (to_x, to_y) = at[pair[0].src], at[pair[0].dst]
    nominal = max(link.nominal or 0.0 for link in pair)
    width = 1.0 + 2.6 * math.sqrt(nominal / widest) if widest else 1.5
    shares = [link.share for link in pair if link.share is not None]
    bad = " bad" if shares and min(shares) < LEAST_DELIVERED else ""
    hint = "; ".join(map(_described, pair))
    return (
        f'<path class="cable{bad}" stroke-width="{width:.1f}" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}">'
        f"<title>{escape(hint)}</title></path>"
    )


def _described(link: Delivered) -> str:
    rates = ((link.nominal, "nominal"), (link.alone, "alone"), (link.together, "with all others"))
    told = ", ".join(f"{digits(rate)} Mbit/s {when}" for rate, when in rates if rate is not None)
    return f"{link.src} to {link.dst}: {told or 'not measured'}"


def _vertex(vertex: int | str, point: tuple[float, float]) -> str:
    x, y = point
    if isinstance(vertex, str):
        return (
            f'<rect class="switch" x="{x - 8:.1f}" y="{y - 8:.1f}" width="16" height="16" rx="2">'
            f"<title>{escape(vertex)}</title></rect>"
        )
    return (
        f'<circle class="rank" cx="{x:.1f}" cy="{y:.1f}" r="9"/>'
        f'<text class="number" x="{x:.1f}" y="{y + 3.7:.1f}">{vertex}</text>'
    )


def delivery(links: Sequence[Delivered]) -> str:
    """In one line what the links delivered, alone and together, as a share of what they were set to."""
    told = []
    for name, pairs in (
        ("alone", [(link.alone, link.nominal) for link in links]),
        ("all at once", [(link.together, link.nominal) for link in links]),
    ):
        shares = [rate / nominal for rate, nominal in pairs if rate is not None and nominal]
        if shares:
            low, high = percent(min(shares)), percent(max(shares))
            told.append(f"{name} {low if low == high else f'{low} to {high}'}")
    rates = sorted({link.nominal for link in links if link.nominal is not None})
    if not rates:
        return ""
    span = digits(rates[0]) if len(rates) == 1 else f"{digits(rates[0])} to {digits(rates[-1])}"
    return f"Links of {span} Mbit/s" + (f"; delivered {', '.join(told)}" if told else "") + "."
