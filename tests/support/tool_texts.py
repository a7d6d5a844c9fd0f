"""Machines that are drawn, as the tools of vendors print them, and damage to such text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from hypothesis import strategies as st

from arborcast.synth.topology import Topology

Tree = tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
"""GPUs under switches, under bridges, under sockets."""


@dataclass(frozen=True)
class Machine:
    """A host.

    Attributes:
        tree: where its GPUs hang, numbered in order.
        nics: of each one the socket, the bridge and the switch it hangs on, as places in the tree.
        nvlinks: how many join two GPUs, the smaller number first; those that none joins are left out.
    """

    tree: Tree
    nics: tuple[tuple[int, int, int], ...]
    nvlinks: dict[tuple[int, int], int]

    def places(self) -> dict[int, tuple[int, int, int]]:
        """Socket, bridge and switch of each GPU."""
        return {
            gpu: (s, b, w)
            for s, bridges in enumerate(self.tree)
            for b, switches in enumerate(bridges)
            for w, gpus in enumerate(switches)
            for gpu in gpus
        }

    @property
    def gpus(self) -> int:
        return len(self.places())

    def way(self, one: tuple[int, int, int], other: tuple[int, int, int]) -> str:
        """How two places are joined over PCIe."""
        if one[0] != other[0]:
            return "SYS"
        return "NODE" if one[1] != other[1] else "PXB" if one[2] != other[2] else "PIX"


@st.composite
def machines(draw: st.DrawFn, *, nvlinks: int = 0, most: int = 8) -> Machine:
    """Hosts of 2 GPUs up to about `most`; up to so many NVLinks a GPU, each pair's own."""
    sizes = draw(
        st.lists(
            st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=2), min_size=1, max_size=2),
            min_size=1,
            max_size=2,
        ).filter(lambda tree: 2 <= sum(n for socket in tree for bridge in socket for n in bridge) <= most)
    )
    numbers = iter(range(most))
    tree = tuple(
        tuple(tuple(tuple(next(numbers) for _ in range(n)) for n in bridge) for bridge in socket)
        for socket in sizes
    )
    switches = [
        (s, b, w) for s, bridges in enumerate(tree) for b, x in enumerate(bridges) for w in range(len(x))
    ]
    nics = tuple(draw(st.lists(st.sampled_from(switches), max_size=3)))
    count = sum(len(gpus) for socket in tree for bridge in socket for gpus in bridge)
    left = dict.fromkeys(range(count), nvlinks)
    joined = {}
    for one, other in combinations(range(count), 2) if nvlinks else ():
        links = draw(st.integers(0, min(left[one], left[other], 4)))
        if links:
            joined[one, other] = links
            left[one] -= links
            left[other] -= links
    return Machine(tree, nics, joined)


def nvidia_smi(machine: Machine, *, legend: bool = True) -> str:
    """What `nvidia-smi topo -m` prints."""
    places = machine.places()
    names = [f"GPU{gpu}" for gpu in sorted(places)] + [f"NIC{nic}" for nic in range(len(machine.nics))]
    where = [places[gpu] for gpu in sorted(places)] + list(machine.nics)
    lines = ["\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for row, name in enumerate(names):
        cells = []
        for column in range(len(names)):
            links = machine.nvlinks.get((min(row, column), max(row, column)))
            way = machine.way(where[row], where[column])
            cells.append(" X " if row == column else f"NV{links}" if links else way)
        socket = where[row][0]
        rest = [f"{8 * socket}-{8 * socket + 7}", str(socket), "", "N/A"] if name.startswith("GPU") else []
        lines.append("\t".join([name, *cells, *rest]))
    if legend:
        lines += [
            "",
            "Legend:",
            "",
            "  X    = Self",
            "  NV#  = Connection traversing a bonded set of # NVLinks",
        ]
        lines += ["", "NIC Legend:", "", *(f"  NIC{nic}: mlx5_{nic}" for nic in range(len(machine.nics)))]
    return "\n".join(lines) + "\n"


def cables(topology: Topology) -> dict[tuple[int | str, int | str], str]:
    """GB/s by the names of the ends, the lower vertex first."""
    assert topology.is_symmetric
    return {
        (topology.label(link.src), topology.label(link.dst)): str(link.bandwidth)
        for link in topology.links
        if link.src < link.dst
    }


def tree_links(machine: Machine, slot: str, between: str) -> list[tuple[tuple[int, ...], str]]:
    """The links of the PCIe tree, sorted: the GPUs below the lower end (none: between sockets), GB/s."""
    links: list[tuple[tuple[int, ...], str]] = []
    several = len(machine.tree) > 1

    def joined(below: Iterable[tuple[int, ...]], always: bool = False) -> tuple[int, ...]:
        below = list(below)
        if len(below) > 1 or always:
            links.extend((gpus, slot) for gpus in below)
        return tuple(sorted(gpu for gpus in below for gpu in gpus))

    for socket in machine.tree:
        joined(
            (joined(joined([(gpu,) for gpu in gpus]) for gpus in bridge) for bridge in socket), always=several
        )
    links += [((), between)] * (len(machine.tree) * (len(machine.tree) - 1) // 2)
    return sorted(links)


def shown_links(topology: Topology, first: int) -> list[tuple[tuple[int, ...], str]]:
    """The same of a topology, whose tree has the vertices from `first` on."""
    parents = [link for link in topology.links if link.src < link.dst and link.dst >= first]
    below: dict[int, set[int]] = {gpu: {gpu} for gpu in range(topology.ranks)}
    for link in sorted(parents, key=lambda link: link.dst):
        if topology.label(link.src) not in range(topology.ranks) and _is_cpu(topology, link.src):
            continue
        below.setdefault(link.dst, set()).update(below[link.src])
    return sorted(
        ((), str(link.bandwidth))
        if link.src >= first and _is_cpu(topology, link.src)
        else (tuple(sorted(below[link.src])), str(link.bandwidth))
        for link in parents
    )


def _is_cpu(topology: Topology, vertex: int) -> bool:
    return str(topology.label(vertex)).startswith("cpu")


@st.composite
def damaged(draw: st.DrawFn, text: str, *, most: int = 2) -> str:
    """A text that was cut, glued, wrapped, or changed at a few places."""
    for _ in range(draw(st.integers(1, most))):
        kind = draw(st.sampled_from(sorted(_DAMAGE)))
        where = draw(st.integers(0, max(0, len(text) - 1)))
        text = _DAMAGE[kind](text, where, draw(st.integers(1, 60)))
    return text


def _lines(text: str, where: int) -> tuple[list[str], int]:
    return text.split("\n"), text[:where].count("\n")


def _drop_line(text: str, where: int, _size: int) -> str:
    lines, line = _lines(text, where)
    return "\n".join(lines[:line] + lines[line + 1 :])


def _repeat_line(text: str, where: int, _size: int) -> str:
    lines, line = _lines(text, where)
    return "\n".join([*lines[: line + 1], *lines[line:]])


def _words(text: str, where: int) -> tuple[list[str], int]:
    """The words and the spaces between them in turn, and the place of a word."""
    pieces: list[str] = [""]
    for letter in text:
        if pieces[-1] and pieces[-1][-1].isspace() != letter.isspace():
            pieces.append("")
        pieces[-1] += letter
    solid = [place for place, piece in enumerate(pieces) if not piece.isspace()]
    return pieces, solid[where % len(solid)] if solid else 0


def _drop_word(text: str, where: int, _size: int) -> str:
    pieces, place = _words(text, where)
    return "".join(pieces[:place] + pieces[place + 1 :])


def _swap_words(text: str, where: int, _size: int) -> str:
    pieces, place = _words(text, where)
    if place + 2 < len(pieces):
        pieces[place], pieces[place + 2] = pieces[place + 2], pieces[place]
    return "".join(pieces)


def _glue(text: str, where: int, _size: int) -> str:
    pieces, place = _words(text, where)
    return "".join(pieces[: place + 1] + pieces[place + 2 :])


def _put(text: str, where: int, what: str) -> str:
    return text[:where] + what + text[where:]


def _wrap(text: str, _where: int, size: int) -> str:
    width = 20 + size
    return "\n".join(
        line[at : at + width] for line in text.split("\n") for at in range(0, max(1, len(line)), width)
    )


def _swap_columns(text: str, where: int, _size: int) -> str:
    rows = [line.split("\t") for line in text.split("\n")]
    for row in rows:
        column = where % 9
        if len(row) > column + 2:
            row[column], row[column + 1] = row[column + 1], row[column]
    return "\n".join("\t".join(row) for row in rows)


JUNK = ["\x1b[4m", "\u200b", "é", "|", "`", "NV", "X", "7", "\ufeff", "\n", "\t", "GPU0", "// "]

_DAMAGE = {
    "cut the end": lambda text, where, _size: text[:where],
    "cut the beginning": lambda text, where, _size: text[where:],
    "cut letters": lambda text, where, size: text[:where] + text[where + 1 + size % 4 :],
    "cut columns": lambda text, _where, size: "\n".join(line[: 10 + size] for line in text.split("\n")),
    "drop a line": _drop_line,
    "repeat a line": _repeat_line,
    "drop a word": _drop_word,
    "swap words": _swap_words,
    "swap columns": _swap_columns,
    "glue": _glue,
    "glue all": lambda text, _where, _size: text.replace("\t", ""),
    "wrap": _wrap,
    "junk": lambda text, where, size: _put(text, where, JUNK[size % len(JUNK)]),
    "frame": lambda text, _where, _size: "\n".join(
        "| " + line.replace("\t", " | ") for line in text.split("\n")
    ),
    "quote": lambda text, _where, _size: "\n".join("> " + line for line in text.split("\n")),
    "upper half twice": lambda text, where, _size: text[:where] + "\n" + text,
}
