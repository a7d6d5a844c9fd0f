"""What the testbed measures when nothing else is asked, and what it is to reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arborcast.synth.cli.options import rank_list
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.formats.results import Row
from arborcast.synth.topology import Topology

KINDS = (Kind.ALLREDUCE, Kind.BROADCAST, Kind.ALLGATHER)
MIB = 1 << 20
SIZES = (MIB // 16, MIB, 8 * MIB, 32 * MIB)
"""Bytes of the whole buffer, of every case."""

_EXAMPLES = Path(__file__).resolve().parent.parent.parent / "topologies" / "examples"


@dataclass(frozen=True)
class Case:
    """A topology at a rate that two cores can serve.

    Attributes:
        spec: for `topologies.load`.
        slowest_mbit: of its slowest link; the others are in proportion.
        ranks: of a fragment; None for all.
    """

    spec: str
    slowest_mbit: int
    ranks: tuple[int, ...] | None = None

    @property
    def topology(self) -> Topology:
        """What it is about."""
        from arborcast import topologies

        return topologies.load(self.spec, ranks=self.ranks)


CASES = (
    Case("full:4", 250),
    Case("star:4", 400),
    Case("dgx1", 400, ranks=(0, 1, 2)),
    Case("dgx1", 250, ranks=(0, 1, 2, 3, 4)),
    Case("dgx1", 120, ranks=(0, 1, 2, 3, 4, 5)),
    Case("dgx1", 60),
    Case(str(_EXAMPLES / "two-boxes.yaml"), 200),
)


def case_of(spec: str, ranks: str | None = None, slowest_mbit: int | None = None) -> Case:
    """The case of a topology, one of `CASES` or another one.

    Args:
        spec: for `topologies.load`, or the name of a topology of `CASES`.
        ranks: of a fragment, as in "0,1,3" or "0-5".
        slowest_mbit: Mbit/s of the slowest link; needed where no case says it.

    Raises:
        InputError: it is needed, or the ranks are no numbers.
    """
    if ranks is None:
        for case in CASES:
            if spec == case.topology.name:
                return case if slowest_mbit is None else replace(case, slowest_mbit=slowest_mbit)
    if slowest_mbit is None:
        raise InputError(f"{spec}: needs --mbit, the rate of its slowest link")
    return Case(spec, slowest_mbit, None if ranks is None else rank_list(ranks))


@dataclass(frozen=True)
class Target:
    """What a topology and a collective are to reach, from `FROM_BYTES` on.

    Attributes:
        topology: its name; None for all that have no target of their own.
        collective: its kind.
        column: of the row.
        value: the least that it may hold.
    """

    topology: str | None
    collective: Kind
    column: str
    value: float


SHARE, OVER_GLOO = "share_of_optimum", "speed_up_over_gloo"
WORDS = {SHARE: "share of the optimum at delivered rates", OVER_GLOO: "speed-up over gloo"}
FROM_BYTES = 8 * MIB
METHOD = "selection"
"""What the targets are for: what the process group runs where nothing is said."""

TARGETS = (
    Target("full:4", Kind.ALLREDUCE, SHARE, 0.97),
    Target("full:4", Kind.BROADCAST, SHARE, 0.97),
    Target("star:4", Kind.ALLREDUCE, SHARE, 0.95),
    Target("star:4", Kind.BROADCAST, SHARE, 0.95),
    Target("dgx1[0,1,2,3,4,5]", Kind.ALLREDUCE, SHARE, 0.95),
    Target("dgx1[0,1,2,3,4,5]", Kind.BROADCAST, SHARE, 0.95),
    Target("dgx1", Kind.ALLREDUCE, SHARE, 0.95),
    Target("dgx1", Kind.BROADCAST, SHARE, 0.93),
    Target(None, Kind.ALLREDUCE, SHARE, 0.90),
    Target(None, Kind.BROADCAST, SHARE, 0.90),
    Target("full:4", Kind.ALLREDUCE, OVER_GLOO, 2.9),
    Target("dgx1[0,1,2,3,4,5]", Kind.ALLREDUCE, OVER_GLOO, 3.7),
    Target("dgx1", Kind.ALLREDUCE, OVER_GLOO, 5.5),
)


def targets_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each target of each topology that was measured, with what was reached; for the results file.

    Where other methods ran and the one that the targets are for did not, they are listed as not measured.
    """
    found = []
    named = {(target.topology, target.collective, target.column) for target in TARGETS}
    for row in _rows_of_targets(rows):
        kind = Kind(row["collective"])
        for target in TARGETS:
            is_own = target.topology == row["topology"]
            is_general = target.topology is None and (row["topology"], kind, target.column) not in named
            if target.collective is not kind or not (is_own or is_general):
                continue
            measured = row[target.column]
            found.append(
                {key: row[key] for key in ("topology", "collective", "method", "bytes")}
                | {
                    "what": WORDS[target.column],
                    "target": target.value,
                    "measured": measured,
                    "met": None if measured is None else measured >= target.value,
                }
            )
    return found


def _rows_of_targets(rows: Sequence[Row]) -> list[Row]:
    """Of each topology, collective and size the row of `METHOD`, one without figures where there is none."""
    found: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        if row["bytes"] < FROM_BYTES:
            continue
        case = row["topology"], row["collective"], row["bytes"]
        if row["method"] == METHOD:
            found[case] = row
        elif case not in found:
            keys = {key: row[key] for key in ("topology", "collective", "bytes")}
            found[case] = {**keys, "method": METHOD, SHARE: None, OVER_GLOO: None}
    return list(found.values())
