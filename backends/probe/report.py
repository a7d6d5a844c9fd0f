"""Measurements for people and tools: a topology file with every spread in it, a table, a JSON object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborcast.backends.probe.comparison import Discrepancies
from arborcast.backends.probe.inference import Inference
from arborcast.backends.probe.likeness import Resemblance
from arborcast.backends.probe.measurements import Flow, Measurements, Spread
from arborcast.backends.probe.prediction import Predictor
from arborcast.backends.probe.traffic import PIECE_BYTES
from arborcast.synth.formats import topology_to_document
from arborcast.synth.formats.topology_text import topology_to_yaml
from arborcast.synth.topology import Topology

if TYPE_CHECKING:
    from arborcast.backends.probe.cables import FoundCables

_MOST_NAMED = 4  # machines that are as near as the one that is named


def topology_file(found: Inference, measured: Measurements) -> str:
    """A topology file (YAML) that says in its comments what it was made of. It holds no date."""
    return topology_to_yaml(found.topology, head=_head(found, measured), foot=_foot(measured))


def cables_file(found: FoundCables, topology: Topology) -> str:
    """The same of cables."""
    head = [
        f"Measured by `synth probe --cables`. {_UNITS}",
        f"Rates: each direction of each cable alone, {_repeats(found.measured)} times, over TCP.",
        *describe_cables(found),
        *found.notes,
    ]
    return topology_to_yaml(topology, head=head, foot=_foot(found.measured))


def describe_cables(found: FoundCables) -> Iterator[str]:
    """A line for each cable, and one for what messages cost."""
    for cable in found.cables:
        yield f"cable      {cable}"
    yield f"messages   {_costs(found.measured)}"


def cables_document(found: FoundCables, topology: Topology) -> dict[str, Any]:
    """Everything for `--json`; see `document`."""
    return {
        "ranks": topology.ranks,
        "cables": [asdict(cable) for cable in found.cables],
        "notes": list(found.notes),
        **_measured_document(found.measured, {flow: float(it.bandwidth) for flow, it in found.links.items()}),
        "topology": topology_to_document(topology),
    }


_UNITS = "Bandwidths are GB/s (1e9 bytes), latencies one way in us."


def _head(found: Inference, measured: Measurements) -> Iterator[str]:
    yield f"Measured by `synth probe`. {_UNITS}"
    yield from describe(found, measured)
    yield "Rates that the measurement cannot tell apart are made equal, all are rounded to two digits."
    for miss in found.misses:
        yield f"NOT EXPLAINED {miss}"


def _foot(measured: Measurements) -> Iterator[str]:
    yield "Every measurement: minimum / median / maximum."
    yield "pair   latency us   GB/s alone"
    for flow in sorted(measured.solo):
        numbers = f"{_three(measured.latency_us[flow])}   {_three(measured.solo[flow])}"
        yield f"{_arrow(flow, measured)}   {numbers}"
    yield "GB/s of flows that ran at once"
    for load in measured.loads:
        repeats = next(iter(load.rates.values())).repeats
        each = ", ".join(f"{_arrow(flow, measured)} {_three(load.rates[flow])}" for flow in load.flows)
        yield f"{repeats} times: {each}"


def describe_shape(found: Inference) -> str:
    """In words, what shares what."""
    shape = found.shape
    parts = []
    if len(shape.groups) > 1:
        boxes = " | ".join(" ".join(map(str, group)) for group in shape.groups)
        parts.append(f"boxes {boxes} with uplinks")
    if shape.shared:
        parts.append("all flows (of a box) share one resource")
    elif shape.stars:
        parts.append("each rank has a port that its flows share")
    elif shape.out_ports or shape.in_ports:
        parts.append(f"shared ports out of {_ranks(shape.out_ports)}, into {_ranks(shape.in_ports)}")
    else:
        parts.append(
            "a link of its own for each pair (of a box)" if parts else "a link of its own for each pair"
        )
    return "; ".join(parts)


def table_rows(measured: Measurements) -> list[tuple[str, ...]]:
    """A row for each pair: latency, rate alone, its spread, the lowest rate under load."""
    rows: list[tuple[str, ...]] = []
    for flow in sorted(measured.solo):
        rate, loaded = measured.solo[flow], measured.lowest_loaded(flow)
        rows.append(
            (
                _arrow(flow, measured),
                f"{measured.latency_us[flow].median:.1f}",
                f"{rate.median:.3g}",
                f"{rate.minimum:.3g} to {rate.maximum:.3g}",
                "-" if loaded is None else f"{loaded.median:.3g}",
            )
        )
    return rows


TABLE_HEADER = ("pair", "latency us", "GB/s", "spread", "loaded GB/s")
"""Of `table_rows`."""


def describe(
    found: Inference,
    measured: Measurements,
    comparison: Discrepancies | None = None,
    output: Path | None = None,
    like: Resemblance | None = None,
) -> Iterator[str]:
    """The lines under the table, which head the file, too."""
    alone = "each pair alone" if measured.exact else "disjoint pairs at once, so rates alone may be higher"
    for host, ranks in hosts(measured).items():
        yield f"host       {host}: ranks {', '.join(map(str, ranks))}"
    yield f"measured   {alone}, {_repeats(measured)} times; {transports(measured)}"
    if measured.message_us is not None:
        yield f"messages   {_costs(measured)}"
    yield f"topology   {describe_shape(found)}"
    counts = Counter(count for count in found.topology.streams if count is not None)
    for count, having in sorted(counts.items()):
        yield f"streams    {having} ranks have {count}: more at once got less than one after the other"
    if comparison is not None:
        if comparison.scale != 1:
            yield f"compared   after scaling all given rates by {comparison.scale:.3g}, which fits best"
        if comparison.unlinked:
            pairs = ", ".join(_arrow(flow, measured) for flow in comparison.unlinked)
            yield f"           not compared, as the given topology has no link: {pairs}"
        count = len(comparison.contradictions)
        yield f"           {count or 'no'} contradiction{'s' if count > 1 else ''}"
    if like is not None:
        yield from _describe_likeness(like)
    if output is not None:
        yield f"written    {output}"


def _describe_likeness(like: Resemblance) -> Iterator[str]:
    best = like.best
    if best is None:
        yield "resembles  no machine of the catalog or of --like has such a pattern of rates"
        return
    alike = f"; as near: {', '.join(like.alike[:_MOST_NAMED])}" if like.alike else ""
    alike += ", ..." if len(like.alike) > _MOST_NAMED else ""
    if like.found:
        ranks = " ".join(map(str, best.ranks))
        yield f"resembles  {best.name} with its rates times {best.scale:.3g}; ranks are its {ranks}{alike}"
    else:
        yield f"resembles  none within {like.tolerance:.0%}; the nearest is {best.name}{alike}"
    for each in best.classes:
        what = "without a link" if each.bandwidth is None else f"of {each.bandwidth:.4g} GB/s"
        off = "" if each.deviation is None else f", off by {each.deviation:.0%} at most"
        yield f"           {each.pairs} pairs {what}: measured {each.measured:.3g} GB/s{off}"
    yield f"           totals of flows at once: off by {best.loaded:.0%} at most"


def document(
    found: Inference,
    measured: Measurements,
    comparison: Discrepancies | None,
    like: Resemblance | None = None,
) -> dict[str, Any]:
    """Everything for `--json`; spreads are lists of minimum, median and maximum."""
    predictor = Predictor(found.topology)
    return {
        "ranks": measured.ranks,
        "shape": describe_shape(found),
        **_measured_document(measured, {flow: predictor.rates([flow])[flow] for flow in measured.solo}),
        "unexplained": [str(miss) for miss in found.misses],
        "topology": topology_to_document(found.topology),
        "check": None
        if comparison is None
        else {
            "scale": comparison.scale,
            "contradictions": list(comparison.contradictions),
            "not_compared": [list(flow) for flow in comparison.unlinked],
        },
        "resembles": None if like is None else _likeness_document(like),
    }


def _measured_document(measured: Measurements, predicted: Mapping[Flow, float]) -> dict[str, Any]:
    return {
        "hosts": list(measured.hosts),
        "exact": measured.exact,
        "message_us": None if measured.message_us is None else measured.message_us.to_document(),
        "piece_us": None if measured.piece_us is None else measured.piece_us.to_document(),
        "pairs": [
            {
                **_said_of(flow, measured),
                "transport": measured.transports.get(flow),
                "latency_us": measured.latency_us[flow].to_document(),
                "bandwidth": measured.solo[flow].to_document(),
                "predicted": predicted[flow],
            }
            for flow in sorted(measured.solo)
        ],
        "loads": [
            [{**_said_of(flow, measured), "bandwidth": load.rates[flow].to_document()} for flow in load.flows]
            for load in measured.loads
        ],
    }


def _likeness_document(like: Resemblance) -> dict[str, Any]:
    best = like.best
    told: dict[str, Any] = {"found": like.found, "tolerance": like.tolerance, "alike": list(like.alike)}
    if best is None:
        return {**told, "name": None}
    return {**told, **asdict(best), "deviation": best.deviation}


def hosts(measured: Measurements) -> dict[str, list[int]]:
    """The ranks on each host."""
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(measured.hosts):
        found.setdefault(host, []).append(rank)
    return found


def _costs(measured: Measurements) -> str:
    """What messages cost their ends, in words: medians of ranks."""
    assert measured.message_us is not None, "asked where it was measured"
    short = f"a short one keeps each of its ends at work for {measured.message_us.median:.3g} us"
    if measured.piece_us is None:
        return short
    return f"{short}, one of {PIECE_BYTES >> 10} KiB for {measured.piece_us.median:.3g} us"


def transports(measured: Measurements) -> str:
    """How the bytes travel: one name where all pairs go alike."""
    names = sorted(set(measured.transports.values()))
    return " and ".join(names) or "unknown"


def _repeats(measured: Measurements) -> int:
    return next(iter(measured.solo.values())).repeats


def _ranks(ranks: Sequence[int] | frozenset[int]) -> str:
    return ", ".join(map(str, sorted(ranks))) or "none"


def _arrow(flow: Flow, measured: Measurements) -> str:
    (src, dst), lane = _ends(flow, measured)
    return f"{src}->{dst}" + (f" by cable {lane + 1}" if lane else "")


def _said_of(flow: Flow, measured: Measurements) -> dict[str, int]:
    (src, dst), lane = _ends(flow, measured)
    return {"from": src, "to": dst} | ({"cable": lane + 1} if lane else {})


def _ends(flow: Flow, measured: Measurements) -> tuple[Flow, int]:
    """The ranks of a flow, and which of the cables between them it takes."""
    (lane, src), (_, dst) = (divmod(end, measured.ranks) for end in flow)
    return (src, dst), lane


def _three(spread: Spread) -> str:
    return f"{spread.minimum:.3g}/{spread.median:.3g}/{spread.maximum:.3g}"
