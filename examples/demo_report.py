"""The demo's report: one HTML page that needs no network, with the pictures inside."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from arborcast.synth import Schedule, Topology
from arborcast.synth.certificate import Bound, Cut, Dual, Partition
from arborcast.synth.formats.atomic import write_atomically
from arborcast.synth.formats.sizes import format_size

if TYPE_CHECKING:
    from demo import Result

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem;
       margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin-bottom: .4rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; padding-top: .9rem; border-top: 1px solid #ddd; }
h3 { font-size: 1.02rem; margin: 1.6rem 0 .4rem; }
p, ul { max-width: 46rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .6rem 0; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid #e8e8e8; }
th { font-weight: 600; border-bottom: 1px solid #999; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0; }
svg { max-width: 100%; height: auto; }
.key td { font-size: 1.05rem; }
.quiet { color: #666; font-size: .9rem; }
code { background: #f4f4f4; padding: .1em .3em; border-radius: 3px; }
pre { background: #f4f4f4; padding: .8rem 1rem; overflow-x: auto; font-size: .9rem; }
pre code { padding: 0; }
"""


def picture_name(what: str, kind: str = "") -> str:
    """The file of a picture in the demo's folder."""
    return f"{kind}-{what}.svg" if kind else f"{what}.svg"


def certificate_in_words(bound: Bound, topology: Topology) -> str:
    """Why nothing is faster, in a sentence or two that can be checked by hand."""
    match bound.certificate:
        case Cut(side, capacity):
            inside = ", ".join(str(topology.label(vertex)) for vertex in sorted(side))
            return f"Only {capacity} GB/s lead out of {{{inside}}}, and the whole buffer has to pass there."
        case Partition(blocks, capacity):
            sets = " ".join("{" + ",".join(map(str, sorted(block))) + "}" for block in blocks)
            return (
                f"Between the {len(blocks)} sets {sets} lie {capacity} GB/s each way, and every tree over "
                f"all ranks crosses between them at least {len(blocks) - 1} times."
            )
        case Dual(_, capacity, distance):
            return (
                f"Under the certificate's link lengths all links offer {capacity}, and each GB of the buffer "
                f"costs {distance}."
            )


def write_report(results: Sequence[Result], out: Path) -> Path:
    """Write `report.html` beside the pictures and schedules of the demo, and say where it is."""
    fabric = results[0].schedule.topology
    sections = [
        _summary(results),
        _heading("The links"),
        _figure(out, picture_name("topology"), f"The links of {fabric.name}"),
        *(_collective(result, out) for result in results),
        _heading("How full the links are"),
        _loads([result.schedule for result in results]),
        _heading("Again, by hand"),
        _commands(),
    ]
    title = "The best collectives on six GPUs of a DGX-1"
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )
    path = out / "report.html"
    write_atomically(path, page)
    return path


def _summary(results: Sequence[Result]) -> str:
    rows = [
        (
            result.schedule.collective.kind,
            _rate(result.schedule.bound.rate),
            _rate(result.schedule.rate),
            "yes" if result.schedule.is_optimal else "no",
            len(result.schedule.chunks),
            _against_baselines(result),
            "wrong" if any(row.wrong for row in result.rows) else "all right",
        )
        for result in results
    ]
    header = (
        *("collective", "bound (GB/s)", "schedule (GB/s)", "provably optimal", "trees"),
        *("best baseline takes", "elements checked"),
    )
    return (
        "<p>Arborcast took the NVLinks between GPUs 0 to 5 of a DGX-1 with V100 (25 GB/s a link each way), "
        "proved how fast each collective can be on them, and packed spanning trees that are as fast. "
        "Rates are GB/s of the whole buffer (algbw, 1 GB = 10<sup>9</sup> bytes).</p>\n"
        + _table(header, rows, "key")
    )


def _against_baselines(result: Result) -> str:
    """The best baseline's simulated time over the schedule's at the largest size."""
    own, *others = (timings[-1].time_us for timings in result.comparison.by_method.values())
    return f"{min(others) / own:.2f} times as long" if others else "none exists"


def _collective(result: Result, out: Path) -> str:
    schedule = result.schedule
    kind = schedule.collective.kind
    root = "" if schedule.collective.root is None else f" from rank {schedule.collective.root}"
    parts = [
        _heading(f"{kind.value.capitalize()}{root}"),
        f"<p><strong>At most {_rate(schedule.bound.rate)} GB/s.</strong> "
        f"{escape(certificate_in_words(schedule.bound, schedule.topology))} "
        f"This holds for {escape(schedule.bound.scope.value)}.</p>",
        f"<p>{len(schedule.chunks)} trees, found in {result.seconds:.2f} s, carry "
        f"{_rate(schedule.rate)} GB/s. An independent replay found every contribution exactly once where "
        "it belongs and no link "
        f"more than {float(result.verdict.max_link_load):.0%} full.</p>",
        _trees(schedule),
        _figure(out, picture_name("trees", kind), f"The trees of the {kind}"),
        "<h3>Simulated times</h3>",
        "<p>Every piece on every link, store and forward, with the links' latencies. Baselines are simulated "
        "in the same way; NCCL's models are its own formulas for rings and trees on the same link rates.</p>",
        _times(result),
        _figure(out, picture_name("times", kind), f"Simulated time and bus bandwidth of the {kind}"),
        _figure(out, picture_name("links", kind), f"What each link carries during the {kind}"),
        "<h3>On real tensors</h3>",
        f"<p>{schedule.topology.ranks} local processes over torch.distributed (gloo); every element compared "
        "with the reference. These are times of one machine's loopback, not of NVLinks.</p>",
        _runs(result),
    ]
    return "\n".join(parts)


def _trees(schedule: Schedule) -> str:
    steps = {
        index: 1 + max(transfer.step for transfer in schedule.transfers if transfer.chunk == index)
        for index in range(len(schedule.chunks))
    }
    rows = [
        (index, chunk.owner, chunk.share, _rate(chunk.share * schedule.rate), steps[index])
        for index, chunk in enumerate(schedule.chunks)
    ]
    return _table(("tree", "root", "share of the buffer", "weight (GB/s)", "steps"), rows)


def _times(result: Result) -> str:
    methods = result.comparison.by_method
    first = next(iter(methods.values()))
    chosen = [index for index in range(len(first)) if (len(first) - 1 - index) % 2 == 0]
    rows = [
        (format_size(first[index].bytes), *(f"{timings[index].time_us:,.1f}" for timings in methods.values()))
        for index in chosen
    ]
    missing = "".join(
        f"<li>{escape(name)}: {escape(why)}</li>" for name, why in result.comparison.unavailable.items()
    )
    note = f'<p class="quiet">Not compared:</p><ul class="quiet">{missing}</ul>' if missing else ""
    return _table(("buffer", *(f"{method} (us)" for method in methods)), rows) + note


def _runs(result: Result) -> str:
    rows = [
        (
            format_size(row.bytes),
            f"{row.dtype}{'' if row.redop == 'none' else f', {row.redop}'}",
            f"{row.time_us:,.0f}",
            f"{row.algbw:.3f}",
            f"{row.busbw:.3f}",
            row.wrong,
        )
        for row in result.rows
    ]
    return _table(("buffer", "type", "time (us)", "algbw (GB/s)", "busbw (GB/s)", "wrong elements"), rows)


def _loads(schedules: Sequence[Schedule]) -> str:
    """GB/s on each link while the schedule runs at its rate, and what part of the link that is."""
    topology = schedules[0].topology
    rows = []
    for link in topology.links:
        cells: list[object] = [
            f"{topology.label(link.src)} → {topology.label(link.dst)}",
            _rate(link.bandwidth),
        ]
        for schedule in schedules:
            carried = schedule.load.get((link.src, link.dst), Fraction(0)) * schedule.rate
            cells += [_rate(carried), f"{float(carried / link.bandwidth):.0%}"]
        rows.append(cells)
    header = ["link", "bandwidth (GB/s)"]
    for schedule in schedules:
        header += [f"{schedule.collective.kind} (GB/s)", "full"]
    return _table(header, rows)


def _commands() -> str:
    commands = "\n".join(
        [
            "synth bound dgx1 allreduce --ranks 0,1,2,3,4,5",
            "synth solve dgx1 allreduce --ranks 0,1,2,3,4,5 -o allreduce.json",
            "synth verify allreduce.json",
            "synth simulate allreduce.json --sizes 64KiB:256MiB --picture times.svg",
            "synth run allreduce.json --sizes 4MiB",
        ]
    )
    return f"<pre><code>{commands}</code></pre>"


def _heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def _rate(rate: Fraction) -> str:
    return f"{float(rate):g}"


def _table(header: Sequence[str], rows: Iterable[Sequence[object]], css_class: str = "") -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    css = f' class="{css_class}"' if css_class else ""
    table = f"<table{css}>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _figure(out: Path, name: str, label: str) -> str:
    """The drawing itself, without the parts of the file that a page has no use for."""
    drawing = (out / name).read_text(encoding="utf-8")
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    # Ids are unique within a file only.
    prefix = name.removesuffix(".svg")
    drawing = re.sub(r'\bid="', f'id="{prefix}-', drawing)
    drawing = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", drawing)
    drawing = drawing.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)
    return f"<figure>{drawing}</figure>"
