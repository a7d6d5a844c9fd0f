"""Schedules as Chakra traces, which ASTRA-sim runs in place of its own collectives: one file a vertex.

Switches, which it does not have between ranks, are ranks after the others.

A file is messages of protobuf, each after its length: first `GlobalMetadata {version = 1}`, then for each
send and receive a `Node {id = 1, name = 2, type = 3, data_deps = 5, attr = 10}`; types 5 and 6 are sends
and receives; an attribute is `{name = 1, int32 = 7 | int64 = 9}`, and those are comm_src, comm_dst,
comm_tag and comm_size (bytes). Of protobuf's wire format that takes numbers (kind 0, seven bits a byte, the
least first) and what has a length (kind 2). Read in mlcommons/chakra, schema/protobuf/et_def.proto, and
ASTRA-sim's CustomAlgorithm.cc.

Its analytical backend has one rate for all links; slower ones get proportionally larger messages.
"""

from __future__ import annotations

from collections.abc import Iterable

from arborcast.backends.programs.formats import Files
from arborcast.backends.programs.messages import messages_of, one_size
from arborcast.synth.implicit_schedule import AnySchedule

_SEND, _RECEIVE, _COLLECTIVE = 5, 6, 7
_NAMES = {_SEND: "send", _RECEIVE: "receive", _COLLECTIVE: "call"}
_NUMBER, _BYTES = 0, 2
_INT32, _INT64 = 7, 9


def export(
    schedule: AnySchedule, *, least_bytes: int = 0, most_bytes: int | None = None, pieces: int = 1
) -> Files:
    """The files for one size, whose names end in `.RANK.et` as ASTRA-sim wants them.

    Raises:
        ProgramError: several sizes, or too many messages.
    """
    files = write(schedule, one_size("chakra", least_bytes, most_bytes), pieces=pieces)
    return Files({f".{rank}.et": content for rank, content in enumerate(files)})


def write(schedule: AnySchedule, size_bytes: int, *, pieces: int = 1, in_order: bool = False) -> list[bytes]:
    """The file of each vertex, ranks first, for a whole buffer of so many bytes.

    Links serve first what was first ready. With `in_order` they serve in the planned order: a send waits
    until the one before it on its link has arrived, which costs a latency each time, so it is for links
    without latency.

    Raises:
        ProgramError: too many messages.
    """
    explicit, messages, _ = messages_of(schedule, size_bytes, pieces)
    rows: list[list[bytes]] = [[_field(1, b"0.0.4")] for _ in range(explicit.topology.size)]
    for number, message in enumerate(messages):
        ends = (("comm_src", message.src), ("comm_dst", message.dst), ("comm_tag", number))
        attributes = [_attribute(name, _INT32, value) for name, value in ends]
        attributes.append(_attribute("comm_size", _INT64, message.nbytes))
        # A vertex' nodes are numbered by message: it has one end of each.
        before = (message.before,) if in_order and message.before is not None else ()
        rows[message.src].append(_node(number, _SEND, (*message.after, *before), attributes))
        rows[message.dst].append(_node(number, _RECEIVE, (), attributes))
    return [b"".join(_varint(len(entry)) + entry for entry in row) for row in rows]


def write_call(size_bytes: int) -> bytes:
    """A rank's workload of one allreduce, in whose place ASTRA-sim runs the files of a schedule."""
    attributes = [_attribute("comm_type", _INT64, 0), _attribute("comm_size", _INT64, size_bytes)]
    rows = [_field(1, b"0.0.4"), _node(1, _COLLECTIVE, (), attributes)]
    return b"".join(_varint(len(entry)) + entry for entry in rows)


def _node(number: int, kind: int, after: Iterable[int], attributes: Iterable[bytes]) -> bytes:
    name = f"{_NAMES[kind]} {number}"
    entry = _number(1, number) + _field(2, name.encode()) + _number(3, kind)
    waits = b"".join(map(_varint, after))
    return entry + (_field(5, waits) if waits else b"") + b"".join(_field(10, one) for one in attributes)


def _attribute(name: str, kind: int, value: int) -> bytes:
    return _field(1, name.encode()) + _number(kind, value)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _NUMBER) + _varint(value)


def _field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Seven bits a byte, the least first; the eighth says that more follow."""
    row = bytearray()
    while value > 0x7F:
        row.append(value & 0x7F | 0x80)
        value >>= 7
    row.append(value)
    return bytes(row)
