"""The matrix of `nvidia-smi topo -m` out of text that was pasted, wrapped, framed or damaged.

Lines mean little in such text, so it is read as words: the header is a run of names that begins with GPUs
and ends where one of these names stands again with a cell behind it; there the rows begin. A row has the
name, a cell for each column, and affinities. Cells that lost the space between them are taken apart, since
their words cannot be mistaken. Nothing is made up: the cells of every pair of GPUs must be there, X in the
own column, and alike in both directions, or the text is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.numerals import shorten
from arborcast.topologies.readers.text.pasted import lines_of
from arborcast.topologies.readers.text.pcie_paths import LEVELS

MAX_DEVICES = 256
MAX_CHARACTERS = 4 << 20

Spans = tuple[tuple[int, int], ...]
"""Cores or NUMA nodes as ranges, first and last: 0-31,64-95."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """What the text says.

    Attributes:
        gpus: their names by their numbers, whatever the order of columns.
        nics: names of the other devices in order.
        cells: NV#, PIX, PXB, PHB, NODE or SYS for ordered pairs of different devices; every pair of GPUs.
        cores: the CPU affinity of each GPU, where it can be read.
        numa: the NUMA affinity of each GPU, likewise.
        called: what the legend calls devices: NIC0 is mlx5_0.
        notes: what is damaged, and what was made of it.
    """

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    cells: dict[tuple[str, str], str]
    cores: dict[str, Spans]
    numa: dict[str, Spans]
    called: dict[str, str]
    notes: tuple[str, ...] = ()

    def nvlinks(self, first: int, second: int) -> int:
        """NVLinks between two GPUs, by their numbers."""
        cell = self.cells.get((self.gpus[first], self.gpus[second]), "")
        return int(cell[2:]) if cell.startswith("NV") else 0

    def together(self, one: str, other: str) -> bool | None:
        """Whether two GPUs are at one NUMA node, by their affinities; None where the text has none.

        Raises:
            TopologyError: it has some, but not those of these two, or NUMA and CPU affinities disagree.
        """
        verdicts = {
            any(here[0] <= there[1] and there[0] <= here[1] for here in spans[one] for there in spans[other])
            for spans in (self.numa, self.cores)
            if one in spans and other in spans
        }
        if len(verdicts) == 1:
            return verdicts.pop()
        if verdicts:
            raise TopologyError(f"CPU and NUMA affinities must agree whether {one} and {other} are near")
        if self.cores or self.numa:
            name = other if one in self.cores or one in self.numa else one
            raise TopologyError(f"the affinity of {name}, which tells its PCIe path, cannot be read")
        return None

    def nodes(self) -> tuple[dict[str, int], int]:
        """The NUMA node of each GPU that is at one, and how many nodes the host shows at least.

        Without NUMA affinities, those with the same cores are at one, counted in the order of cores. Cores in
        two ranges are those of a processor with two threads a core, whose second ones follow all first ones.
        """
        if self.numa:
            at = {
                gpu: spans[0][0]
                for gpu, spans in self.numa.items()
                if len(spans) == 1 and spans[0][0] == spans[0][1]
            }
        else:
            order = sorted(set(self.cores.values()))
            at = {gpu: order.index(spans) for gpu, spans in self.cores.items()}
        pairs = [spans for spans in self.cores.values() if len(spans) == 2]
        total = max(((two[0] - one[0]) // (one[1] - one[0] + 1) for one, two in pairs), default=0)
        return at, total

    def has_whole_processors(self, cores: int) -> bool:
        """Whether each GPU has the affinity of one whole processor with so many cores."""
        spans = [self.cores.get(name, ()) for name in self.gpus]
        return all(
            len(each) == 1 and each[0][0] % cores == 0 and each[0][1] - each[0][0] == cores - 1
            for each in spans
        )


def read_matrix(text: str) -> Matrix:
    """The first whole matrix of the text.

    Raises:
        TopologyError: there is none; the error is that of the first broken one.
    """
    if len(text) > MAX_CHARACTERS:
        raise TopologyError(f"must be at most {MAX_CHARACTERS} characters, got {len(text)}; keep the matrix")
    lines = lines_of(text)
    words = list(_words(lines))
    starts = [index for index in range(len(words)) if _begins_header(words, index)]
    found: Matrix | None = None
    broken: TopologyError | None = None
    notes: list[str] = []
    for start, end in zip(starts, [*starts[1:], len(words)], strict=False):
        place = f"line {words[start].line}"
        try:
            block = _Block.read(words[start:end])
            matrix = None if block is None else _matrix(block, lines)
        except TopologyError as error:
            if found is None and broken is None:
                broken = error
            continue
        if matrix is None:
            continue
        if found is None:
            found = matrix
            if broken is not None:
                notes.append(f"its first matrix is broken ({broken}); the one of {place} is taken")
        elif (matrix.gpus, matrix.cells) != (found.gpus, found.cells):
            notes.append(f"holds several matrices; the first one is taken, that of {place} is not")
            break
    if found is not None:
        return replace(found, notes=(*found.notes, *notes))
    if broken is not None:
        raise broken
    got = f"names of GPUs in line {words[starts[0]].line} without rows" if starts else "no names of GPUs"
    lost = [word.text for word, after in pairwise(words) if _GPU.fullmatch(word.text) and after.is_cell]
    if lost and not starts:
        got = f"the rows of {', '.join(dict.fromkeys(lost))} without the header that names columns"
    raise TopologyError(f"must hold the matrix of nvidia-smi topo -m, got {got}")


# --- words --------------------------------------------------------------------------------------------

_CELL = "NV[0-9]{1,2}|PIX|PXB|PHB|NODE|SYS|SOC|X"
_IS_CELL = re.compile(_CELL)
_PIECE = rf"GPU[0-9]{{1,3}}|NIC[0-9]{{1,3}}|mlx[0-9]_[0-9]{{1,2}}|CPU|NUMA|{_CELL}"
_GLUED = re.compile(rf"(?:{_PIECE}){{2,300}}")
# "NODE0-31" is a cell and an affinity; where a cell ends in a digit this could be anything
_GLUED_TO_NUMBERS = re.compile(rf"((?:{_PIECE})*(?:PIX|PXB|PHB|NODE|SYS|SOC|X))([0-9][0-9,-]*(?:N/A)?)")
_PIECES = re.compile(_PIECE)
_CUT = {
    word[:end] for word in ("NODE", "SYS", "SOC", "PIX", "PXB", "PHB", "GPU0") for end in range(1, len(word))
}
_CUT |= {"NV", "NI", "NIC"}
_GPU = re.compile(r"GPU[0-9]{1,3}")
_BEHIND = re.compile(r"CPU|NIC[0-9]{1,3}|mlx[0-9]_[0-9]{1,2}")
"""What may follow the only GPU of a header."""

_MARK = re.compile(r"[^A-Za-z0-9]+")


@dataclass(frozen=True, slots=True)
class _Word:
    text: str
    line: int

    @property
    def is_cell(self) -> bool:
        return _IS_CELL.fullmatch(self.text) is not None


def _words(lines: Sequence[str]) -> Iterator[_Word]:
    """The words of the lines, taken apart where they are glued and joined where a line was broken in one."""
    split = [line.split() for line in lines]
    for number, (here, following) in enumerate(zip(split, [*split[1:], []], strict=True), 1):
        if here and following and here[-1] in _CUT and following[0] not in _CUT:
            joined = here[-1] + following[0]
            if _PIECES.fullmatch(joined) or _GLUED.fullmatch(joined):
                here[-1] = joined
                del following[0]
        for word in here:
            if _MARK.fullmatch(word):
                continue
            numbers = _GLUED_TO_NUMBERS.fullmatch(word)
            if numbers:
                for piece in _PIECES.findall(numbers[1]):
                    yield _Word(piece, number)
                yield _Word(numbers[2], number)
            elif _GLUED.fullmatch(word):
                for piece in _PIECES.findall(word):
                    yield _Word(piece, number)
            else:
                yield _Word(word, number)


def _begins_header(words: Sequence[_Word], index: int) -> bool:
    def is_gpu(place: int) -> bool:
        return 0 <= place < len(words) and _GPU.fullmatch(words[place].text) is not None

    after = words[index + 1].text if index + 1 < len(words) else ""
    return is_gpu(index) and not is_gpu(index - 1) and (is_gpu(index + 1) or bool(_BEHIND.fullmatch(after)))


# --- a matrix -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    cells: tuple[str, ...]
    rest: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Block:
    """A header and its rows, as words."""

    columns: tuple[str, ...]
    affinities: str
    rows: dict[str, _Row]

    @classmethod
    def read(cls, words: Sequence[_Word]) -> _Block | None:
        """The header that the words begin with and its rows; None where they are no matrix."""
        end = cls._header_end(words)
        if end is None:
            return None
        header = [word.text for word in words[:end]]
        stop = next((i for i, word in enumerate(header) if word in {"CPU", "NUMA", "GPU"}), end)
        columns = tuple(header[:stop])
        if len(columns) > MAX_DEVICES:
            raise TopologyError(f"must have at most {MAX_DEVICES} columns, got {len(columns)}")
        if len(set(columns)) < len(columns):
            raise TopologyError("columns must have different names, got one twice")
        return cls(columns, " ".join(header[stop:]), cls._rows(words, end, columns))

    @staticmethod
    def _header_end(words: Sequence[_Word]) -> int | None:
        """Where the first row begins: a GPU of the header again, and then a cell or what should be one."""
        seen: set[str] = set()
        for index, word in enumerate(words):
            if word.is_cell:
                return None
            following = words[index + 1] if index + 1 < len(words) else None
            if word.text in seen and following is not None:
                if following.is_cell:
                    return index
                if following.line == word.line and not _PIECES.fullmatch(following.text):
                    return index
            if _GPU.fullmatch(word.text):
                seen.add(word.text)
        return None

    @staticmethod
    def _rows(words: Sequence[_Word], start: int, columns: Sequence[str]) -> dict[str, _Row]:
        known = set(columns)
        later = range(start + 1, len(words) - 1)
        begins = [start, *(index for index in later if _begins_row(words, index, known))]
        rows: dict[str, _Row] = {}
        for index, stop in zip(begins, [*begins[1:], len(words)], strict=True):
            name, line = words[index].text, words[index].line
            if name not in known:
                raise TopologyError(f"line {line}: row {name} has no column")
            run = index + 1
            while run < stop and words[run].is_cell and run - index <= len(columns) + 1:
                is_full = run - index > len(columns)
                if is_full and words[run].line > words[run - 1].line:  # prose follows the row
                    break
                run += 1
            last = words[run - 1].line
            rest = tuple(word.text for word in words[run:stop] if word.line == last)
            row = _Row(line, tuple(word.text for word in words[index + 1 : run]), rest)
            if name in rows:
                if len(row.cells) < 2 or row.cells == rows[name].cells:  # prose, or the same again
                    continue
                raise TopologyError(f"line {line}: {name} must have one row, got another")
            rows[name] = row
        return rows


def _begins_row(words: Sequence[_Word], index: int, known: Collection[str]) -> bool:
    """Whether a word is a name with a cell behind it, or a known name that begins a line."""
    name, after = words[index], words[index + 1]
    if name.text not in known:
        return after.is_cell and _GPU.fullmatch(name.text) is not None
    return after.is_cell or words[index - 1].line < name.line == after.line


def _matrix(block: _Block, lines: Sequence[str]) -> Matrix:
    columns, rows = block.columns, block.rows
    count = next((i for i, name in enumerate(columns) if not _GPU.fullmatch(name)), len(columns))
    gpus, nics = columns[:count], columns[count:]
    if any(_GPU.fullmatch(name) for name in nics):
        raise TopologyError(f"columns of GPUs must stand first, got {shorten(' '.join(columns))}")
    cells, notes = _cells_of_gpus(gpus, nics, rows)
    damage = _damage_of_nics(gpus, nics, rows)
    if damage:
        notes.append(f"its columns of NICs are damaged ({damage}) and left out")
        nics = ()
    else:
        cells.update(_cells_of_nics(gpus, nics, rows))
    cores, numa = _affinities(block, gpus)
    gpus = tuple(sorted(gpus, key=lambda name: int(name[3:])))
    return Matrix(gpus, nics, cells, cores, numa, _legend(lines, nics), tuple(notes))


def _cells_of_gpus(
    gpus: Sequence[str], nics: Sequence[str], rows: dict[str, _Row]
) -> tuple[dict[tuple[str, str], str], list[str]]:
    """The cell of every ordered pair of GPUs; a row that is missing is known from the other rows."""
    cells: dict[tuple[str, str], str] = {}
    for name in gpus:
        if name in rows:
            words = zip(gpus, _checked(name, gpus, nics, rows[name]), strict=True)
            cells.update({(name, other): _modern(word) for other, word in words if other != name})
    notes = []
    missing = [name for name in gpus if name not in rows]
    if len(missing) == 1 and len(gpus) > 2:
        notes.append(f"row {missing[0]} is missing: its connections are those that the other rows show")
        cells.update({(missing[0], name): cells[name, missing[0]] for name in gpus if name != missing[0]})
    elif missing:
        raise TopologyError(f"row {missing[0]} is missing")
    for first, second in combinations(gpus, 2):
        there, back = cells[first, second], cells[second, first]
        if there != back:
            raise TopologyError(f"{first} to {second} shows {there}, must be alike back, got {back}")
    return cells, notes


def _modern(word: str) -> str:
    """SYS was called SOC."""
    return "SYS" if word == "SOC" else word


def _cells_of_nics(
    gpus: Sequence[str], nics: Sequence[str], rows: dict[str, _Row]
) -> dict[tuple[str, str], str]:
    cells: dict[tuple[str, str], str] = {}
    for gpu in gpus:
        for nic, word in zip(nics, rows[gpu].cells[len(gpus) :], strict=True) if nics else ():
            cells[gpu, nic] = cells[nic, gpu] = _modern(word)
    for place, nic in enumerate(nics):
        words = rows[nic].cells[len(gpus) :] if nic in rows else ()
        if len(words) == len(nics) and words[place] == "X":  # what is cut is known from the GPUs' rows
            cells.update({(nic, other): _modern(word) for other, word in zip(nics, words, strict=True)})
    return cells


def _checked(name: str, gpus: Sequence[str], nics: Sequence[str], row: _Row) -> Sequence[str]:
    """The cells of a row for the GPUs."""
    words = row.cells
    where = f"line {row.line}: {name}"
    for other, word in zip(gpus, (*words, *row.rest[:1]), strict=False):
        if not _IS_CELL.fullmatch(word) or (word == "X") != (other == name) or word in {"NV0", "NV00"}:
            rule = "must be X" if other == name else f"must be NV# or one of {', '.join(LEVELS)}"
            if word in _PEER:
                rule += " as topo -m prints, not topo -p2p"
            raise TopologyError(f"{where} to {other}: {rule}, got {shorten(word)}")
    total = len(gpus) + len(nics)
    if len(words) < len(gpus) or len(words) > total:  # fewer are NICs' columns, which are left out
        raise TopologyError(f"{where} must have {total} entries, got {len(words)}")
    if any(word.startswith("NV") or word == "X" for word in words[len(gpus) :]):
        raise TopologyError(f"{where} must have {len(gpus)} entries for GPUs, got NVLinks to others")
    return words[: len(gpus)]


def _damage_of_nics(gpus: Sequence[str], nics: Sequence[str], rows: dict[str, _Row]) -> str:
    """What is wrong with the columns of NICs in the rows of GPUs; "" where nothing is."""
    total = len(gpus) + len(nics)
    for name in gpus if nics else ():
        if name not in rows:
            return f"row {name} is missing"
        if len(rows[name].cells) != total:
            return f"line {rows[name].line}: {len(rows[name].cells)} entries for {total} columns"
    for nic in nics:
        if nic in rows:
            cells = rows[nic].cells
            for gpu, word in zip(gpus, cells, strict=False):
                if word != rows[gpu].cells[len(gpus) + nics.index(nic)]:
                    return f"{gpu} to {nic} differs from {nic} to {gpu}"
    return ""


_PEER = {"OK", "NS", "CNS", "GNS", "TNS", "DR", "U"}
"""What nvidia-smi topo -p2p prints."""

_SPANS = re.compile(r"[0-9]{1,5}(?:-[0-9]{1,5})?(?:,[0-9]{1,5}(?:-[0-9]{1,5})?){0,300}")


def _affinities(block: _Block, gpus: Sequence[str]) -> tuple[dict[str, Spans], dict[str, Spans]]:
    """Cores and NUMA nodes of each GPU, where rows show as many affinities as the header names.

    Of cores a container may leave none: then a number and the GPU's own NUMA node (N/A) are all there is.
    """
    has_cores = "CPU" in block.affinities
    has_numa = re.search("NUMA(?! *ID)", block.affinities) is not None
    expected = has_cores + has_numa + ("NUMA ID" in block.affinities)
    cores: dict[str, Spans] = {}
    numa: dict[str, Spans] = {}
    for name in gpus:
        rest = block.rows[name].rest if name in block.rows else ()
        shown = {"cores": rest[0], "numa": rest[1]} if len(rest) == expected and expected > 1 else {}
        if len(rest) == 1 == expected:
            shown = {"cores" if has_cores else "numa": rest[0]}
        elif len(rest) == 2 and expected == 3:
            shown = {"numa" if rest[0].isdecimal() else "cores": rest[0]}
        for known, word in ((cores, shown.get("cores", "")), (numa, shown.get("numa", ""))):
            if _SPANS.fullmatch(word):
                known[name] = tuple(
                    (int(span.split("-")[0]), int(span.split("-")[-1])) for span in word.split(",")
                )
    return cores, numa


def _legend(lines: Sequence[str], nics: Sequence[str]) -> dict[str, str]:
    """What the NIC legend calls each of these."""
    called: dict[str, str] = {}
    for line in lines:
        match = re.match(r"\s*(NIC[0-9]{1,3})\s*:\s*([A-Za-z0-9_.-]{1,60})\s*$", line)
        if match and match[1] in nics:
            called.setdefault(match[1], match[2])
    return called
