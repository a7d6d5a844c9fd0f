"""Which algorithm, protocol and channels of NCCL serve which sizes, as the file that a tuner plugin reads.

From measurements: tables of nccl-tests, each of a run that was held to one algorithm and protocol. Or from
NCCL's own planning model (`nccl_model`), whose times are lines over the size: the lowest of them, exactly.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import isqrt

from arborcast.synth.baselines.nccl_model import MODELLED, nccl_times
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.nccl_protocol import Protocol
from arborcast.synth.topology import Topology

ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
"""As files of tuners call them."""
KINDS: Mapping[str, Kind] = {
    "broadcast": Kind.BROADCAST,
    "reduce": Kind.REDUCE,
    "all_gather": Kind.ALLGATHER,
    "reduce_scatter": Kind.REDUCE_SCATTER,
    "all_reduce": Kind.ALLREDUCE,
}
"""By the name of the program of nccl-tests."""
MOST_BYTES = (1 << 63) - 1
_ROW = re.compile(r"^\s*(\d+)\s+\d+\s+[a-z]\w*\s+\w+\s+-?\d+\s+(\d+(?:\.\d+)?)\s")
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device\b")
_PROGRAM = re.compile(r"\b(all_reduce|all_gather|reduce_scatter|broadcast|reduce)_perf\b")


@dataclass(frozen=True, slots=True)
class NcclSetting:
    """What NCCL is held to: an algorithm of `ALGORITHMS`, a protocol, and channels, 0 for its own number."""

    algorithm: str
    protocol: Protocol
    channels: int = 0

    @classmethod
    def of(cls, text: str) -> NcclSetting:
        """From "ring/ll128" or "ring/ll128/8".

        Raises:
            InputError: words that NCCL does not know.
        """
        algorithm, _, rest = text.lower().partition("/")
        protocol, _, channels = rest.partition("/")
        protocols = {it.value.lower(): it for it in Protocol}
        if algorithm not in ALGORITHMS:
            raise InputError(
                f"{text}: the algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}"
            )
        if protocol not in protocols:
            raise InputError(f"{text}: the protocol must be one of {', '.join(protocols)}, got {protocol!r}")
        if channels and not (channels.isdecimal() and 1 <= int(channels) <= 64):
            raise InputError(f"{text}: channels must be a number from 1 to 64, got {channels!r}")
        return cls(algorithm, protocols[protocol], int(channels or 0))


@dataclass(frozen=True, slots=True)
class TuningRow:
    """Which setting serves a collective from one size to another, both included; on these hosts and ranks."""

    kind: Kind
    least_bytes: int
    most_bytes: int
    setting: NcclSetting
    hosts: int
    ranks: int


@dataclass(frozen=True)
class Measured:
    """A table of nccl-tests.

    Attributes:
        kind: of the collective.
        hosts: over which it ran.
        ranks: that took part.
        times_us: out of place, by bytes of the whole buffer.
        setting: what NCCL was held to; None where it chose for itself.
    """

    kind: Kind
    hosts: int
    ranks: int
    times_us: Mapping[int, float] = field(default_factory=dict)
    setting: NcclSetting | None = None


def read_table(text: str, place: str, setting: NcclSetting | None) -> Measured:
    """What nccl-tests printed.

    Raises:
        InputError: no table, or nothing that says of what; the line names the place.
    """
    hosts: dict[int, str] = {}
    times: dict[int, float] = {}
    program = None
    for line in text.splitlines():
        if rank := _RANK.match(line):
            hosts[int(rank[1])] = rank[2]
        elif row := _ROW.match(line):
            size, time = int(row[1]), float(row[2])
            if size in times:
                raise InputError(f"{place}: {size} bytes stand twice, as in two tables")
            times[size] = time
        elif program is None and (said := _PROGRAM.search(line)):
            program = said[1]
    if not times:
        raise InputError(f"{place}: has no row of nccl-tests (size, count, type, redop, root, time)")
    if program is None:
        raise InputError(
            f"{place}: does not say which collective, as {'_perf, '.join(KINDS)}_perf in its first lines"
        )
    if len(hosts) < 2 or sorted(hosts) != list(range(len(hosts))):
        raise InputError(
            f"{place}: must list its ranks ('#  Rank  0 ... on HOST device'), got {len(hosts)} of them"
        )
    return Measured(KINDS[program], len(set(hosts.values())), len(hosts), times, setting)


def rows_of_tables(tables: Iterable[Measured], *, gain: Fraction = Fraction(1, 50)) -> list[TuningRow]:
    """Between the least and the largest size that was measured, the fastest setting at each.

    Between two sizes with unequal answers a row ends at their geometric mean. Where NCCL's own choice was
    measured, a setting must be faster by `gain` of its time; else there is no row, which leaves the size to
    NCCL. Of sizes that were not measured with all settings, nothing is said.

    Raises:
        InputError: no table of a setting, or two of one.
    """
    together: dict[tuple[Kind, int, int], dict[NcclSetting | None, Mapping[int, float]]] = defaultdict(dict)
    for table in tables:
        group = together[table.kind, table.hosts, table.ranks]
        if table.setting in group:
            raise InputError(f"{table.kind} on {table.ranks} ranks: two tables of {_named(table.setting)}")
        group[table.setting] = table.times_us
    rows: list[TuningRow] = []
    for (kind, hosts, ranks), group in together.items():
        settings = [it for it in group if it is not None]
        if not settings:
            raise InputError(
                f"{kind} on {ranks} ranks: no table of a setting such as ring/ll128, only NCCL's choice"
            )
        sizes = sorted(set.intersection(*(set(times) for times in group.values())))
        best: list[NcclSetting | None] = []
        for size in sizes:
            fastest = min(settings, key=lambda it: group[it][size])
            own = group.get(None, {}).get(size)
            worth = own is None or group[fastest][size] < own * float(1 - gain)
            best.append(fastest if worth else None)
        rows += [
            TuningRow(kind, least, most, setting, hosts, ranks)
            for least, most, setting in _ranges(sizes, best)
            if setting is not None
        ]
    return rows


def _ranges(
    sizes: Sequence[int], best: Sequence[NcclSetting | None]
) -> Iterator[tuple[int, int, NcclSetting | None]]:
    """Sizes of one answer together, from the first to the last."""
    start = 0
    while start < len(sizes):
        end = start
        while end + 1 < len(sizes) and best[end + 1] == best[start]:
            end += 1
        least = sizes[start] if start == 0 else _between(sizes[start - 1], sizes[start]) + 1
        most = sizes[end] if end + 1 == len(sizes) else _between(sizes[end], sizes[end + 1])
        yield least, most, best[start]
        start = end + 1


def _between(small: int, large: int) -> int:
    return min(max(isqrt(small * large), small), large - 1)


def rows_of_model(topology: Topology, *, seed: int = 0) -> list[TuningRow]:
    """What NCCL's planning model takes at each size of an allreduce, allgather and reduce-scatter.

    Build the topology with NCCL's planning constants (`rates="nccl"`).

    Raises:
        CollectiveError: as `nccl_times`.
        InfeasibleError: likewise.
    """
    rows: list[TuningRow] = []
    hosts = 1
    for kind in MODELLED:
        collective = Collective.on(topology, kind)
        lines: dict[NcclSetting, tuple[Fraction, Fraction]] = {}
        for protocol in Protocol:
            for row in nccl_times(topology, collective, [0], protocol=protocol, seed=seed):
                hosts = row.plan.hosts
                lines[NcclSetting(row.algorithm, protocol)] = Fraction(row.latency_us), 1 / (1000 * row.rate)
        rows += [
            TuningRow(kind, least, most, setting, hosts, topology.ranks)
            for least, most, setting in _lowest(lines)
        ]
    return rows


def _lowest(lines: Mapping[NcclSetting, tuple[Fraction, Fraction]]) -> Iterator[tuple[int, int, NcclSetting]]:
    """The lowest of lines `latency + size * slope` at each whole size, by ranges."""
    least = 0
    while True:
        current = min(lines, key=lambda it: (lines[it][0] + least * lines[it][1], lines[it][1]))
        latency, slope = lines[current]
        # A flatter line is the lower one from the first whole size behind the crossing on.
        crossings = [
            int((other - latency) / (slope - flatter)) + 1
            for other, flatter in lines.values()
            if flatter < slope
        ]
        following = min(crossings, default=MOST_BYTES + 1)
        yield least, min(following - 1, MOST_BYTES), current
        if following > MOST_BYTES:
            return
        least = following


def written(rows: Iterable[TuningRow], source: str, to: str = "nccl") -> str:
    """The file's text.

    Args:
        rows: what it says.
        source: of the rows, for its first line.
        to: "nccl" for tuner plugins of NCCL and RCCL, "ncclx" for the tuner in NCCLX, which counts bytes of
            each rank.
    """

    def line(row: TuningRow) -> str:
        setting, protocol = row.setting, row.setting.protocol.value.lower()
        if to == "ncclx":
            each = f"[{-(-row.least_bytes // row.ranks)},{row.most_bytes // row.ranks}]"
            channels, ranks = setting.channels or -1, row.ranks // row.hosts
        else:
            each, channels, ranks = f"{row.least_bytes},{row.most_bytes}", setting.channels, row.ranks
        return f"{_word(row.kind)},{each},{setting.algorithm},{protocol},{channels},{row.hosts},{ranks}"

    head = "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks"
    if to == "ncclx":
        head = "collective,bytesPerRank,algorithm,protocol,channels,nNodes,nLocalRanks"
        rows = [it for it in rows if -(-it.least_bytes // it.ranks) <= it.most_bytes // it.ranks]
    return "\n".join([f"# {source}", f"# {head}", *map(line, rows), ""])


def _word(kind: Kind) -> str:
    return kind.value.replace("-", "")


def _named(setting: NcclSetting | None) -> str:
    if setting is None:
        return "NCCL's own choice"
    return f"{setting.algorithm}/{setting.protocol.value.lower()}" + (
        f"/{setting.channels}" if setting.channels else ""
    )
