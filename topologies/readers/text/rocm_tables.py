"""The tables of `rocm-smi --showtopo` and `amd-smi topology`, out of their text, JSON or CSV.

Text may stand among other text; a table is a title, a header with the names of the GPUs, and a row for each.
A table that is broken is refused, not left out: each may say what another one leaves open.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.formats.reading import parse_json
from arborcast.topologies.readers.kinds import is_json
from arborcast.topologies.readers.text.pasted import lines_of

MAX_GPUS = 64
MAX_CHARACTERS = 4 << 20

Table = dict[tuple[int, int], str]
"""What a table says of ordered pairs of different GPUs."""


@dataclass(frozen=True, slots=True)
class RocmTables:
    """What was printed; tables that were not are empty.

    Attributes:
        names: of the GPUs in order: GPU0 or a PCI address.
        kind: link types.
        hops: abstract distances.
        weight: costs of the ways.
        bandwidth: "min-max" in MB/s.
        numa: the NUMA node of each GPU, where it is known.
    """

    names: tuple[str, ...]
    kind: Table = field(default_factory=dict)
    hops: Table = field(default_factory=dict)
    weight: Table = field(default_factory=dict)
    bandwidth: Table = field(default_factory=dict)
    numa: Mapping[int, int] = field(default_factory=dict)

    def pair(self, one: int, other: int) -> str:
        """Two GPUs by their names, for messages."""
        return f"{self.names[one]} to {self.names[other]}"


def read_tables(text: str) -> RocmTables:
    """The tables of the text, or of the JSON or CSV that it is.

    Raises:
        TopologyError: a table with rows missing, or not alike in both directions.
    """
    if len(text) > MAX_CHARACTERS:
        raise TopologyError(
            f"must be at most {MAX_CHARACTERS} characters, got {len(text)}; cut the tables out"
        )
    if is_json(text):
        tables = _from_json(text)
    elif _CSV.match(text.lstrip()):
        tables = _from_csv(text)
    else:
        tables = _from_text(lines_of(text))
    for title, table in (
        ("link type", tables.kind),
        ("hops", tables.hops),
        ("weight", tables.weight),
        ("bandwidth", tables.bandwidth),
    ):
        for (one, other), word in table.items():
            if table[other, one] != word:
                raise TopologyError(
                    f"{title} of {tables.pair(one, other)} is {shorten(word)}, must be alike back, "
                    f"got {shorten(table[other, one])}"
                )
    return tables


_TITLES = {
    re.compile(r"\W*Link Type between two GPUs\W*|LINK TYPE TABLE:?", re.IGNORECASE): "kind",
    re.compile(r"\W*Hops between two GPUs\W*|HOPS TABLE:?", re.IGNORECASE): "hops",
    re.compile(r"\W*Weight between two GPUs\W*|WEIGHT TABLE:?", re.IGNORECASE): "weight",
    re.compile(r"=+ *(?:Numa b|B)andwidth(?: between two GPUs)? *=*|NUMA BW TABLE:?"): "bandwidth",
}
_OTHER_TITLE = re.compile(r"={3,}.*|[A-Z][A-Z -]* TABLE:?|Legend:?")
_NAME = re.compile(r"GPU[0-9]{1,3}|(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]")
_WORDS = {
    "kind": re.compile(r"XGMI|PCIE|XXXX|N/A|UNKNOWN"),
    "hops": re.compile(r"[0-9]{1,4}|N/A"),
    "weight": re.compile(r"[0-9]{1,6}|N/A"),
    "bandwidth": re.compile(r"[0-9]{1,9}-[0-9]{1,9}|N/A"),
}
_NUMA = re.compile(r"\W*GPU\[([0-9]{1,3})\]\s*:\s*\(Topology\) Numa Node:\s*([0-9]{1,4})\s*$")


def _from_text(lines: Sequence[str]) -> RocmTables:
    found: dict[str, tuple[tuple[str, ...], Table]] = {}
    titles: list[tuple[int, str]] = []
    for number, line in enumerate(lines):
        title = line.strip()
        known = next((name for pattern, name in _TITLES.items() if pattern.fullmatch(title)), None)
        if known is not None or _OTHER_TITLE.fullmatch(title):
            titles.append((number, known or ""))
    for (start, section), (end, _) in zip(titles, [*titles[1:], (len(lines), "")], strict=False):
        if section and section not in found:
            table = _table(section, lines, start, end)
            if table is not None:
                found[section] = table
    names = {names for names, _ in found.values()}
    if len(names) > 1:
        raise TopologyError("its tables must show the same GPUs, got others in another")
    if not found:
        raise TopologyError("must hold a table of rocm-smi --showtopo or amd-smi topology")
    numa = {int(match[1]): int(match[2]) for match in map(_NUMA.match, lines) if match}
    (gpus,) = names
    by_place = {
        place: numa[int(name[3:])]
        for place, name in enumerate(gpus)
        if name[3:].isdecimal() and int(name[3:]) in numa
    }
    return RocmTables(gpus, numa=by_place, **{name: table for name, (_, table) in found.items()})


def _table(section: str, lines: Sequence[str], start: int, end: int) -> tuple[tuple[str, ...], Table] | None:
    """The GPUs and cells of the table under a title; None where there is no header."""
    words = [
        (number, word)
        for number in range(start + 1, end)
        for word in lines[number].split()
        if not _RULE.fullmatch(word)
    ]
    place = next((i for i, (_, word) in enumerate(words) if _NAME.fullmatch(word)), len(words))
    names: list[str] = []
    while place < len(words) and _NAME.fullmatch(words[place][1]) and words[place][1] not in names:
        names.append(words[place][1])
        place += 1
    if not names:
        return None
    if len(names) > MAX_GPUS:
        raise TopologyError(f"must show 2 to {MAX_GPUS} GPUs, got more")
    where = f"line {start + 1}: {lines[start].strip(' =:')}"
    table: Table = {}
    for row, name in enumerate(names):
        if place >= len(words) or words[place][1] != name:
            raise TopologyError(f"{where}: row {name} is missing")
        cells = words[place + 1 : place + 1 + len(names)]
        place += 1 + len(cells)
        for column, other in enumerate(names):
            line, word = cells[column] if column < len(cells) else (end, "nothing")
            if column != row:
                if not _WORDS[section].fullmatch(word):
                    raise TopologyError(
                        f"line {line + 1}: {name} to {other}: {section} cannot be {shorten(word)}"
                    )
                table[row, column] = word
            elif word not in {"0", "SELF", "N/A", "X"}:
                raise TopologyError(
                    f"line {line + 1}: {name} to itself must be 0 or SELF, got {shorten(word)}"
                )
    if place < len(words) and _NAME.fullmatch(words[place][1]):
        raise TopologyError(f"line {words[place][0] + 1}: row {shorten(words[place][1])} has no column")
    return tuple(names), table


_RULE = re.compile(r":?-+:?")
"""Under the header of a table of markdown."""

_PAIR = re.compile(r"\(Topology\) (Link type|Hops|Weight) between DRM devices ([0-9]{1,3}) and ([0-9]{1,3})")


def _from_json(text: str) -> RocmTables:
    """rocm-smi's has each pair once, by numbers; amd-smi's a list of GPUs, each with its links."""
    document = parse_json(text, "its JSON")
    if isinstance(document, dict):
        return _from_pairs(document)
    if not isinstance(document, list) or not all(isinstance(gpu, dict) for gpu in document):
        raise TopologyError("must be the JSON of rocm-smi --showtopo or amd-smi topology")
    if len(document) > MAX_GPUS:
        raise TopologyError(f"must show 2 to {MAX_GPUS} GPUs, got {len(document)}")
    names = _addresses([str(gpu.get("bdf", f"GPU{place}")) for place, gpu in enumerate(document)])
    columns = {"kind": "link_type", "hops": "num_hops", "weight": "weight", "bandwidth": "bandwidth"}
    cells: list[_Cell] = []
    for row, gpu in enumerate(document):
        links = gpu.get("links")
        if (
            not isinstance(links, list)
            or len(links) != len(names)
            or not all(isinstance(x, dict) for x in links)
        ):
            raise TopologyError(f"{names[row]}: links must be a list of {len(names)}")
        for column, link in enumerate(links):
            if link.get("bdf", names[column]) != names[column]:
                raise TopologyError(f"{names[row]}: links must be in the order of the GPUs")
            cells += [(name, row, column, link[key]) for name, key in columns.items() if key in link]
    return _tables(names, cells)


def _from_pairs(document: Mapping[str, object]) -> RocmTables:
    system = document.get("system", document)
    cells: list[_Cell] = []
    for key, value in system.items() if isinstance(system, dict) else ():
        match = _PAIR.fullmatch(key)
        if match:
            name = {"Link type": "kind", "Hops": "hops", "Weight": "weight"}[match[1]]
            one, other = int(match[2]), int(match[3])
            cells += [(name, one, other, value), (name, other, one, value)]
    count = 1 + max((max(one, other) for _, one, other, _ in cells), default=-1)
    if count > MAX_GPUS:
        raise TopologyError(f"must show 2 to {MAX_GPUS} GPUs, got {count}")
    numa = {}
    for place in range(count):
        card = document.get(f"card{place}")
        node = card.get("(Topology) Numa Node") if isinstance(card, dict) else None
        if isinstance(node, str | int) and re.fullmatch("[0-9]{1,4}", str(node)):
            numa[place] = int(node)
    names = tuple(f"GPU{place}" for place in range(count))
    return _tables(names, cells, numa)


_CSV = re.compile(r"gpu,(?:bdf,)?.*_gpu_[0-9]+")


def _from_csv(text: str) -> RocmTables:
    """amd-smi's: a row for each GPU, a column for each property of its pair with each other."""
    rows = list(csv.DictReader(text.strip().splitlines()))
    if len(rows) > MAX_GPUS:
        raise TopologyError(f"must show 2 to {MAX_GPUS} GPUs, got {len(rows)}")
    names = _addresses([row.get("bdf") or f"GPU{place}" for place, row in enumerate(rows)])
    columns = {"kind": "link_type", "hops": "hops", "weight": "weight", "bandwidth": "numa_bandwidth"}
    cells = [
        (name, one, other, word)
        for one, row in enumerate(rows)
        for name, column in columns.items()
        for other in range(len(rows))
        if (word := row.get(f"{column}_gpu_{other}")) is not None
    ]
    return _tables(names, cells)


def _addresses(names: Sequence[str]) -> tuple[str, ...]:
    """The names of GPUs in a document, which are PCI addresses, each once."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise TopologyError(f"bdf must be such as 0000:0c:00.0, got {shorten(name)}")
        if names.count(name) > 1:
            raise TopologyError(f"GPUs must differ in bdf, got {name} twice")
    return tuple(names)


_Cell = tuple[str, int, int, object]
"""Of which table, for which GPU beside which other, and what stands there."""


def _tables(
    names: tuple[str, ...], cells: Iterable[_Cell], numa: Mapping[int, int] | None = None
) -> RocmTables:
    """The tables of these cells, each of which has all pairs or none.

    Raises:
        TopologyError: a word that its table cannot hold, or a pair that is missing.
    """
    tables: dict[str, Table] = {}
    for name, one, other, value in cells:
        word = str(value)
        if one == other:
            continue
        if not _WORDS[name].fullmatch(word):
            raise TopologyError(f"{names[one]} and {names[other]}: {name} cannot be {shorten(word)}")
        tables.setdefault(name, {})[one, other] = word
    for name, table in tables.items():
        missing = [pair for pair in permutations(range(len(names)), 2) if pair not in table]
        if missing:
            raise TopologyError(f"{name} of GPUs {missing[0][0]} and {missing[0][1]} is missing")
    return RocmTables(names, numa=numa or {}, **tables)
