"""How much of the links does each allocation of a box give? The question of BLINK (MLSys 2020), for any box.

Every set of ranks up to isomorphism, broadcast and allreduce: the proven optimum, rings, NCCL's ring by its
planning model, and trees, all at NCCL's own link rates. Nothing is timed: rates of schedules are exact, those
of NCCL are figures of a model. Results go to `bench/results/fragments.json`.

BLINK counts 46 different allocations of 3 to 8 GPUs on the box with V100 and 14 on that with P100: those
whose GPUs the NVLinks join at all. With those that they leave apart there are 53 and 17.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from arborcast import synth, topologies
from arborcast.bench.allocations.nccl import MODELLED, NCCL, NCCL_RELAYS, PCIE, Over, nccl_rate, nccl_rings
from arborcast.bench.harness.script import KEPT, command_line, keep, one_line
from arborcast.synth.baselines.nccl_model import NOT_RUN
from arborcast.synth.cli.console import progress, table
from arborcast.synth.collective import Collective, Kind, bandwidths
from arborcast.synth.errors import CollectiveError, InfeasibleError
from arborcast.synth.formats.results import Measure, document
from arborcast.synth.progress import report
from arborcast.synth.sweeps.fragments import Fragment, representatives
from arborcast.synth.topology import Topology

RESULTS = KEPT / "fragments.json"
MACHINES = ("dgx1", "dgx1-p100")
SIZE_BYTES = 1 << 30
MWU_TOLERANCE = Fraction(1, 20)
_BLINK = "3 and more"  # the allocations that BLINK counts
KEYS = ("topology", "collective", "method")
UNITS = {
    "algbw": "GB/s that large messages approach: exact for schedules, from a formula for methods named model",
    "time_us": "of 1 GiB at this rate, without latency",
    "spread": "null: nothing is timed",
    "optimum": "proven, GB/s over the NVLinks among these GPUs; 0 where they leave some apart",
    "over_ring": "algbw over that of the best single ring; null where there is none",
    "over_nccl": "algbw over that of nccl-ring-model (rings of direct NVLinks, else PCIe)",
    "over_nccl_relays": "algbw over that of nccl-relay-model (as NCCL since 2.8.3: also through another GPU)",
    "nccl_over": "what NCCL's rings run over: nvlink, nvlink-relay (some hops through another GPU) or pcie",
    "allocations": "how many sets of as many GPUs have the same links among them",
    "trees": "how many",
    "optimum_least": "over all roots, like optimum_most; where links are alike both ways no root matters",
    "algbw_least": "over all roots, like algbw_most; null for what has no root",
}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Found:
    """What a method makes of a fragment.

    Attributes:
        rates: algbw for each root, or one; empty where there is none.
        trees: of the first rate, for methods that have any.
        over: for NCCL, what its rings run over.
        why: there is none.
    """

    rates: tuple[Fraction, ...] = ()
    trees: int | None = None
    over: Over | None = None
    why: str | None = None


def survey(
    topology: Topology,
    kinds: Iterable[Kind | str] = MODELLED,
    sizes: Iterable[int] | None = None,
    *,
    pcie: Fraction = PCIE,
    seed: int = 0,
) -> list[Row]:
    """One row for each different fragment, collective and method.

    Args:
        topology: the box, with link rates as NCCL plans with them (`topologies.load(..., rates="nccl")`), or
            its column compares unlike things.
        kinds: broadcast and allreduce or one of them; a broadcast is from rank 0 of the fragment, with the
            least and the most over all roots beside it.
        sizes: ranks of the fragments; None for all from 2 on.
        pcie: GB/s of NCCL's ring where it must go over PCIe.
        seed: of the searches.

    Raises:
        InputError: too many ranks, a size or a collective that is not surveyed.
    """
    wanted = [_kind(kind) for kind in kinds]
    fragments = representatives(topology, sizes)
    rows: list[Row] = []
    for done, fragment in enumerate(fragments):
        report(f"ranks {_gpus(fragment)}", done, len(fragments))
        for kind in wanted:
            rows += _rows(topology.name, fragment, kind, pcie, seed)
    return rows


def _kind(kind: Kind | str) -> Kind:
    if kind not in MODELLED:
        raise CollectiveError(f"{kind}: fragments are surveyed for {', '.join(MODELLED)}")
    return Kind(kind)


def _rows(box: str, fragment: Fragment, kind: Kind, pcie: Fraction, seed: int) -> list[Row]:
    topology = fragment.topology
    asked = [
        Collective.on(topology, kind, root=root) for root in (range(topology.ranks) if kind.has_root else [0])
    ]
    optima = [synth.bound(topology, collective).rate for collective in asked]
    found = {
        "ring": _solved(topology, asked[:1], "ring", seed),
        "multiring": _solved(topology, asked[:1], "multiring", seed),
        NCCL: _by_nccl(topology, kind, False, pcie, seed),
        NCCL_RELAYS: _by_nccl(topology, kind, True, pcie, seed),
        "trees": _solved(topology, asked, "trees", seed),
        "mwu": _solved(topology, asked, "mwu", seed),
    }
    head = {
        "topology": topology.name,
        "box": box,
        "gpus": _gpus(fragment),
        "ranks": topology.ranks,
        "allocations": fragment.allocations,
        "collective": str(kind),
        "root": fragment.ranks[0] if kind.has_root else None,
    }
    return [head | _columns(method, found, optima, kind, topology.ranks) for method in found]


def _gpus(fragment: Fragment) -> str:
    return ",".join(map(str, fragment.ranks))


def _solved(topology: Topology, asked: Sequence[Collective], method: str, seed: int) -> _Found:
    """The verified rates of a method, one for each collective; a ring is as fast from every root."""
    tolerance = MWU_TOLERANCE if method == "mwu" else None
    try:
        schedules = [
            synth.solve(topology, collective, method=method, tolerance=tolerance, seed=seed)
            for collective in asked
        ]
    except InfeasibleError as error:
        return _Found(why=str(error))
    rates = []
    for schedule in schedules:
        verdict = synth.verify(schedule)
        if not verdict.correct:
            raise AssertionError(f"{topology.name}: {method} is not correct: {verdict.errors[0]}")
        rates.append(verdict.rate)
    return _Found(tuple(rates), len(schedules[0].chunks) if method in {"trees", "mwu"} else None)


def _by_nccl(topology: Topology, kind: Kind, relays: bool, pcie: Fraction, seed: int) -> _Found:
    rings = nccl_rings(topology, relays=relays, pcie=pcie, seed=seed)
    return _Found((nccl_rate(topology, kind, rings),), over=rings.over)


def _columns(
    method: str, all_found: Mapping[str, _Found], optima: Sequence[Fraction], kind: Kind, ranks: int
) -> Row:
    found = all_found[method]
    rate = found.rates[0] if found.rates else None
    time_us = None if rate is None else float(SIZE_BYTES / (1000 * rate))
    _, busbw = (None, None) if time_us is None else bandwidths(kind, ranks, SIZE_BYTES, time_us)
    on_nvlink = rate is not None and optima[0] and found.over is not Over.PCIE
    return {
        "method": method,
        "bytes": SIZE_BYTES,
        "time_us": time_us,
        "spread": None,
        "algbw": _number(rate),
        "busbw": busbw,
        "algbw_least": _number(min(found.rates, default=None)) if kind.has_root else None,
        "algbw_most": _number(max(found.rates, default=None)) if kind.has_root else None,
        "optimum": float(optima[0]),
        "optimum_least": float(min(optima)) if kind.has_root else None,
        "optimum_most": float(max(optima)) if kind.has_root else None,
        "share_of_optimum": _ratio(rate, optima[0]) if on_nvlink else None,
        "share_of_nominal": None,
        "over_ring": _ratio(rate, *all_found["ring"].rates[:1]),
        "over_nccl": _ratio(rate, *all_found[NCCL].rates[:1]),
        "over_nccl_relays": _ratio(rate, *all_found[NCCL_RELAYS].rates[:1]),
        "nccl_over": None if found.over is None else str(found.over),
        "trees": found.trees,
        "why": found.why,
    }


def _number(value: Fraction | None) -> float | None:
    return None if value is None else float(value)


def _ratio(rate: Fraction | None, other: Fraction | None = None) -> float | None:
    return None if rate is None or not other else float(rate / other)


# --------------------------------------------------------------------------------------- the answers


def summarize(rows: Iterable[Row]) -> list[Row]:
    """Speed-ups of the trees over NCCL's model: for each machine, collective and size, and 3 ranks and more.

    Only fragments that the NVLinks join count, each once, as in BLINK; geometric means, and the most. Figures
    of a model: NCCL itself was not run.
    """
    by_case: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        if row["method"] == "trees":
            by_size = by_case.setdefault((row["box"], row["collective"]), {})
            by_size.setdefault(str(row["ranks"]), []).append(row)
    for by_size in by_case.values():
        by_size[_BLINK] = [row for group in by_size.values() for row in group if row["ranks"] >= 3]
    return [
        {"box": box, "collective": collective, "ranks": size} | _summary(group)
        for (box, collective), by_size in by_case.items()
        for size, group in by_size.items()
        if group
    ]


def _summary(group: Sequence[Row]) -> Row:
    joined = [row for row in group if row["optimum"]]
    found: Row = {
        "fragments": len(group),
        "joined": len(joined),
        "with_ring": sum(row["over_ring"] is not None for row in joined),
    }
    for column in ("over_nccl", "over_nccl_relays"):
        ratios = [row[column] for row in joined]
        found[f"{column}_mean"] = math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else None
        found[f"{column}_most"] = max(ratios, default=None)
    return found


def format_table(rows: Iterable[Row]) -> list[str]:
    """One line for each fragment and collective, the methods side by side, GB/s."""
    by_case: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        by_case.setdefault((row["box"], row["collective"], row["gpus"]), {})[row["method"]] = row
    header = (
        *("box", "collective", "ranks", "of", "optimum", "trees", "no.", "mwu", "no."),
        *("ring", "multiring", "NCCL*", "relays*", "x ring", "x NCCL*", "x relays*"),
    )
    lines = table(header, (_cells(case, found) for case, found in by_case.items()), left=3)
    notes = (
        "rates   GB/s of algbw; no.: how many trees; x ...: rate of the trees over that of the method named",
        "of      so many allocations have these links; a broadcast is from the first rank",
        f"*       {NOT_RUN}; p: over PCIe, because there is no ring",
        "relays  rings may pass through another GPU (r), as NCCL's since 2.8.3",
    )
    return [*lines, "", *notes]


def _cells(case: tuple[str, ...], found: Mapping[str, Row]) -> list[str]:
    trees = found["trees"]
    mark = {Over.PCIE: "p", Over.RELAY: "r", None: ""}

    def rate(method: str) -> str:
        return _shown(found[method]["algbw"]) + mark.get(found[method]["nccl_over"], "")

    return [
        *case,
        str(trees["allocations"]),
        _shown(trees["optimum"]),
        *(rate("trees"), _count(trees), rate("mwu"), _count(found["mwu"])),
        *(rate(method) for method in ("ring", "multiring", NCCL, NCCL_RELAYS)),
        *(_shown(trees[column]) for column in ("over_ring", "over_nccl", "over_nccl_relays")),
    ]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}".rstrip("0").rstrip(".")


def _count(row: Row) -> str:
    return "-" if row["trees"] is None else str(row["trees"])


def format_summary(summary: Iterable[Row]) -> list[str]:
    """The speed-ups of `summarize` as a table."""
    header = (
        *("box", "collective", "ranks", "fragments", "joined", "with ring"),
        *("x NCCL*", "most", "x relays*", "most"),
    )
    figures = ("over_nccl_mean", "over_nccl_most", "over_nccl_relays_mean", "over_nccl_relays_most")
    return table(
        header,
        (
            [str(row[key]) for key in ("box", "collective", "ranks", "fragments", "joined", "with_ring")]
            + [_shown(row[key]) for key in figures]
            for row in summary
        ),
        left=3,
    )


@one_line("fragments")
def main() -> None:
    """Survey the machines of the command line, print the tables, write results and pictures."""
    arguments = _arguments()
    rows: list[Row] = []
    for spec in arguments.machine:
        with progress(f"fragments of {spec}", quiet=False):
            rows += survey(topologies.load(spec, rates=arguments.rates), arguments.collectives)
    print("\n".join([*format_table(rows), "", *format_summary(summarize(rows))]))
    is_part = [*arguments.machine, *arguments.collectives] != [*MACHINES, *MODELLED]
    keep(arguments.json, results_document(rows, rates=arguments.rates), is_part=is_part)


def results_document(rows: Sequence[Row], *, rates: str) -> dict[str, Any]:
    """The results file; `rates` is what the links' rates are, nccl or datasheet."""
    return document(
        "How much of the links does each allocation of a box give?",
        rows,
        keys=KEYS,
        measures={"algbw": Measure("more"), "optimum": Measure("more")},
        units=UNITS,
        packages=("arborcast", "numpy", "highspy"),
        rates=rates,
        summary=summarize(rows),
    )


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, RESULTS)
    parser.add_argument("--machine", nargs="+", default=MACHINES, metavar="SPEC")
    parser.add_argument("--collectives", nargs="+", choices=MODELLED, default=MODELLED)
    parser.add_argument(
        "--rates", choices=["nccl", "datasheet"], default="nccl", help="of links; like NCCL's own by default"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
