"""Schedules as Python modules for JAX: rounds of `lax.ppermute` and sums, for use under `shard_map`.

All ranks run the same code; tables, which a rank looks up by its place on the axis, say what it sends. The
buffer is rows of equal length, of which every share is a whole number. What one rank sends another at a time
is one message; in a round each rank sends one and receives one (`colouring`), all as long as the longest.
Sums and their order are those of the process group (`backends.lowering`): results have the same bits.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from arborcast.backends.lowering.groups import groups_of
from arborcast.backends.lowering.layout import Buffer, BufferSlice, blocks_in
from arborcast.backends.lowering.lower import lower
from arborcast.backends.lowering.program import Copy, Program, Receive, Reduce, Send
from arborcast.backends.lowering.rank_view import refuse_switches
from arborcast.backends.programs.colouring import colours_of
from arborcast.backends.programs.exporting.export import in_units
from arborcast.backends.programs.formats import Files
from arborcast.backends.programs.program import ProgramError
from arborcast.synth.collective import Kind
from arborcast.synth.implicit_schedule import AnySchedule

MOST_NUMBERS = 1 << 22
"""Of all tables together; such a module has some 20 MB."""

Pair: TypeAlias = tuple[int, int]
Moves: TypeAlias = dict[Pair, tuple[list[int], list[int]]]
"""By two ranks, perhaps the same, the rows that the first reads and those that the second writes."""

_GIVES = {
    Kind.BROADCAST: "What x is on rank {root}",
    Kind.REDUCE: "On rank {root} lax.psum(x, axis_name), elsewhere zeros",
    Kind.ALLGATHER: "As lax.all_gather(x, axis_name)",
    Kind.REDUCE_SCATTER: "As lax.psum_scatter(x, axis_name): x has a block for each rank",
    Kind.ALLREDUCE: "As lax.psum(x, axis_name)",
    Kind.GATHER: "On rank {root} lax.all_gather(x, axis_name), elsewhere zeros",
    Kind.SCATTER: "The block for this rank of those that x has on rank {root}",
    Kind.ALLTOALL: "As lax.all_to_all(x, axis_name, 0, 0): x has a block for each rank",
    Kind.CUSTOM: "All blocks of x, in place of some of them what other ranks have there",
}

_TAKES_BLOCKS = {Kind.REDUCE_SCATTER, Kind.SCATTER, Kind.ALLTOALL, Kind.CUSTOM}
_GIVES_BLOCKS = {Kind.ALLGATHER, Kind.GATHER, Kind.ALLTOALL, Kind.CUSTOM}
"""Those whose x, or result, has several blocks along its first axis."""

_MODULE = '''"""{kind} on {topology} by rounds of lax.ppermute: {said}.

    jax.shard_map(lambda x: {name}(x, "ranks"), mesh=mesh, in_specs=P("ranks"), out_specs=P("ranks"))

The devices of the axis are the ranks in their order. Written by Arborcast from a schedule of method {method}.
"""

import math

import jax.numpy as jnp
from jax import lax

RANKS = {ranks}
UNITS = {units}  # rows that a block is cut into
ROWS = {rows}  # of a rank's memory: what it is given, what it gives, what waits
SPARE = {spare}  # rows behind them, which stand for none in tables

# For each step: copies and sums, one after the other (whether it adds; for each rank the rows read, those
# written), then rounds, all at once ((sender, receiver), ...; for each rank the rows sent, those written).
STEPS = [
{steps}
]


def {name}(x, axis_name):
    """{gives}."""
    if lax.psum(1, axis_name) != RANKS:
        raise ValueError(f"axis {{axis_name!r}} must have {{RANKS}} devices, got {{lax.psum(1, axis_name)}}")
    me = lax.axis_index(axis_name)
    block = x.shape{block}
    length = math.prod(block)
    width = -(-length // UNITS)
    given = jnp.pad(x.reshape({blocks}, length), ((0, 0), (0, UNITS * width - length)))
    rest = jnp.zeros((ROWS + SPARE - {given}, width), x.dtype)
    memory = jnp.concatenate([given.reshape({given}, width), rest])
    sure = {{"mode": "promise_in_bounds", "unique_indices": True}}

    def rows(table):
        return memory.at[jnp.array(table)[me]]

    for local, rounds in STEPS:
        for adds, source, target in local:
            part = rows(source).get(**sure)
            memory = rows(target).add(part, **sure) if adds else rows(target).set(part, **sure)
        arrived = [lax.ppermute(rows(sent).get(**sure), axis_name, pairs) for pairs, sent, _ in rounds]
        for (_, _, target), part in zip(rounds, arrived):
            memory = rows(target).set(part, **sure)
    return memory[{output}].reshape(-1, UNITS * width)[:, :length].reshape({shape})
'''


def export(schedule: AnySchedule, *, chunks: int | None = None, pieces: int = 1) -> Files:
    """The module.

    Args:
        schedule: a correct one, in either form; relays are devices of the axis, too.
        chunks: rows of the whole buffer, to which shares are rounded; None for the least exact number.
        pieces: into which each chunk is cut, so that trees are pipelined.

    Raises:
        InputError: a switch adds or copies, or the tables are too large.
    """
    refuse_switches(schedule, "jax")
    explicit, units = in_units(schedule, chunks)
    collective, units, ranks = explicit.collective, units * pieces, explicit.topology.ranks
    kind, root = collective.kind, collective.root or 0
    moved = sum(int(explicit.chunks[it.chunk].share * units) for it in explicit.transfers)
    if (moved + units) * ranks > MOST_NUMBERS:
        raise ProgramError(
            f"jax: {units} rows for {ranks} ranks make tables of more than {MOST_NUMBERS} numbers; "
            "--chunks (chunks=) rounds the shares to fewer rows"
        )
    programs = lower(explicit, units, pieces=pieces, grouped=True)
    given, output, scratch = (max(it.elements(buffer) for it in programs) for buffer in Buffer)
    starts = {Buffer.INPUT: 0, Buffer.OUTPUT: given, Buffer.SCRATCH: given + output}
    memory = given + output + scratch

    def rows(part: BufferSlice) -> range:
        return range(starts[part.buffer] + part.start, starts[part.buffer] + part.stop)

    local, messages = _local(programs, rows), _messages(programs, rows)
    if kind is Kind.REDUCE:  # which alone works in place on one rank and not on the others
        local[-1, 0, False] = {(root, root): ([*range(given)], [*range(given, 2 * given)])}
    steps, rounds = [], []
    for time in sorted({*messages, *(time for time, _, _ in local)}):
        sums = [_line(key[2], local[key], ranks, memory) for key in sorted(local) if key[0] == time]
        now = _rounds(messages.get(time, {}))
        steps += [
            "    ([",
            *sums,
            "    ], [",
            *(_line(sorted(it), it, ranks, memory) for it in now),
            "    ]),",
        ]
        rounds += now
    more = sum(map(_width, rounds)) / max(1, sum(map(_busiest, messages.values()))) - 1
    said = f"{len(rounds)} rounds in {len(messages)} steps, {more:.0%} longer than the busiest ranks need"
    unit, many = units // blocks_in(collective), len(collective.demands or collective.ranks)
    taken = many if kind in _TAKES_BLOCKS else 1
    text = _MODULE.format(
        kind=kind,
        topology=_plain(explicit.topology.name),
        method=_plain(explicit.method.name),
        said=said,
        name=kind.replace("-", "_"),
        ranks=ranks,
        units=unit,
        rows=memory,
        spare=max(map(_width, [*local.values(), *rounds]), default=0),
        steps="\n".join(steps),
        gives=_GIVES[kind].format(root=root),
        block="[1:]" if kind in _TAKES_BLOCKS else "",
        blocks=taken,
        given=taken * unit,
        output=f"{given}:{given + output}",
        shape=f"{many}, *block" if kind in _GIVES_BLOCKS else "block",
    )
    return Files({"": text}, said)


def _plain(name: str) -> str:
    """A name as a docstring may hold it."""
    return re.sub(r"[^\w .,:=+-]", "_", name)


def _width(moves: Moves) -> int:
    return max(len(read) for read, _ in moves.values())


def _busiest(moves: Moves) -> int:
    """Rows that the rank sends, or receives, that has most to do."""
    rows: Counter[tuple[int, int]] = Counter()
    for pair, (read, _) in moves.items():
        for end in enumerate(pair):
            rows[end] += len(read)
    return max(rows.values())


def _line(head: bool | list[Pair], moves: Moves, ranks: int, none: int) -> str:
    """A line of a step: each rank has as many rows as the fullest one, from `none` on spare ones."""
    tables = []
    for side in (0, 1):
        of_rank = {pair[side]: rows[side] for pair, rows in moves.items()}
        own = [of_rank.get(rank, []) for rank in range(ranks)]
        tables.append([[*rows, *range(none + len(rows), none + _width(moves))] for rows in own])
    return f"        ({head}, {tables[0]}, {tables[1]}),"


def _add(moves: Moves, pair: Pair, read: Iterable[int], written: Iterable[int]) -> None:
    of_pair = moves.setdefault(pair, ([], []))
    of_pair[0].extend(read)
    of_pair[1].extend(written)


def _local(
    programs: Sequence[Program], rows: Callable[[BufferSlice], range]
) -> dict[tuple[float, int, bool], Moves]:
    """Copies and sums: before the messages of which time, in which turn there, whether they add."""
    found: dict[tuple[float, int, bool], Moves] = defaultdict(dict)
    for program in programs:
        for group in groups_of(program):
            time = group.time if group.messages else math.inf
            turns: dict[int, int] = {}
            for index in group.before:
                it = program.operations[index]
                assert isinstance(it, Reduce | Copy), "messages are what groups consist of"
                turns[index] = 1 + max((turns.get(before, -1) for before in it.after), default=-1)
                moves = found[time, turns[index], isinstance(it, Reduce)]
                _add(moves, (program.rank, program.rank), rows(it.source), rows(it.into))
    return found


def _messages(programs: Sequence[Program], rows: Callable[[BufferSlice], range]) -> dict[float, Moves]:
    """What ranks send each other at each time."""
    every = [(program.rank, it) for program in programs for it in program.operations]
    into = {it.tag: it.into for _, it in every if isinstance(it, Receive)}
    found: dict[float, Moves] = defaultdict(dict)
    for rank, it in every:
        if isinstance(it, Send):
            _add(found[it.time], (rank, it.peer), rows(it.source), rows(into[it.tag]))
    return found


def _rounds(moves: Moves) -> list[Moves]:
    """Messages by rounds; those of like lengths are coloured one after another, which keeps them together."""
    pairs = sorted(moves, key=lambda pair: (-len(moves[pair][0]), pair))
    found: dict[int, Moves] = defaultdict(dict)
    for pair, colour in zip(pairs, colours_of(pairs), strict=True):
        found[colour][pair] = moves[pair]
    return [*found.values()]
