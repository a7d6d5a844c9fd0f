"""How the ranks of a group get the help of switches that execute programs (`backends.aggregation`).

Before ranks run schedules whose transfers end at switches, rank 0 tells the process of each such switch:

    rank 0 -> switch   handshake with the service's token | length | enlistment: tables, other switches, token
    switch -> rank 0   welcome, or why not: it has verified every schedule and what is asked of the switch
    rank 0 -> store    address of the switch, token of the group: so all ranks dial it (`transport.network`)

The service's token admits groups, the group's token admits their ranks and switches. As everywhere here both
travel in clear: whoever reads the network can speak for the group.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict  # pydantic refuses typing's own before Python 3.12

from arborcast.backends.errors import ExecutionError
from arborcast.backends.options import Address, Options
from arborcast.backends.schedules.table import Table
from arborcast.backends.transport.handshake import TOKEN_BYTES, Handshake, dial_tcp, read_reply, seconds_until
from arborcast.backends.transport.network import Network
from arborcast.synth.errors import InputError
from arborcast.synth.formats.reading import parse_json
from arborcast.synth.formats.shapes import MAPPING, check_shape
from arborcast.synth.simulation.pieces import PieceRule, switches_in
from arborcast.synth.topology import Topology

ENLISTMENT_FORMAT = "arborcast.enlistment/1"
LENGTH = struct.Struct("<Q")
ANSWER_S = 60.0
"""How long a switch may take to verify the schedules that it is told of."""


@MAPPING
class _CutShape(TypedDict):
    piece_bytes: Annotated[int, Field(ge=1)]
    least: Annotated[int, Field(ge=1)]
    per_step: Annotated[int, Field(ge=0)]
    work: Annotated[str, Field(pattern=r"^[0-9]{1,9}(/[1-9][0-9]{0,8})?$")]


@MAPPING
class _Shape(TypedDict):
    format: str
    token: Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * TOKEN_BYTES}}}$")]
    timeout_ms: Annotated[int, Field(ge=1)]
    addresses: dict[str, list[Any]]
    cut: _CutShape
    digests: list[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]]
    table: str


@dataclass(frozen=True)
class Enlistment:
    """What a switch is told of a group.

    Attributes:
        token: of the group.
        timeout_s: as the ranks have it.
        addresses: of all switches that serve the group, by vertex.
        cut: into how many pieces chunks are cut.
        digests: what calls name the schedules of the table by, in their order.
        table: the schedules.
    """

    token: bytes
    timeout_s: float
    addresses: Mapping[int, Address]
    cut: PieceRule
    digests: tuple[bytes, ...]
    table: Table

    def to_bytes(self) -> bytes:
        """For `from_bytes`."""
        cut = self.cut
        return json.dumps(
            {
                "format": ENLISTMENT_FORMAT,
                "token": self.token.hex(),
                "timeout_ms": max(1, int(self.timeout_s * 1000)),
                "addresses": {str(vertex): list(where) for vertex, where in self.addresses.items()},
                "cut": {
                    "piece_bytes": cut.piece_bytes,
                    "least": cut.least,
                    "per_step": cut.per_step,
                    "work": str(cut.work),
                },
                "digests": [digest.hex() for digest in self.digests],
                "table": self.table.to_bytes().decode(),
            }
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Enlistment:
        """What `to_bytes` made; whether its schedules are right is not checked here.

        Raises:
            InputError: it is something else.
        """
        source = "enlistment"
        try:
            document = parse_json(data.decode(), source)
        except UnicodeDecodeError as error:
            raise InputError(f"{source}: must be UTF-8 text") from error
        found = document.get("format") if isinstance(document, dict) else None
        if found != ENLISTMENT_FORMAT:
            raise InputError(f"{source}: format: must be {ENLISTMENT_FORMAT}, got {found!r:.60}")
        shape = check_shape(_Shape, document, source)
        table = Table.from_bytes(shape["table"].encode(), f"{source}: table")
        if len(shape["digests"]) != len(table.entries):
            raise InputError(
                f"{source}: digests: must be one for each of {len(table.entries)} schedules, "
                f"got {len(shape['digests'])}"
            )
        return cls(
            bytes.fromhex(shape["token"]),
            shape["timeout_ms"] / 1000,
            _addresses(shape["addresses"], table.topology, source),
            PieceRule(**{**shape["cut"], "work": Fraction(shape["cut"]["work"])}),
            tuple(bytes.fromhex(digest) for digest in shape["digests"]),
            table,
        )


def _addresses(shape: Mapping[str, list[Any]], topology: Topology, source: str) -> dict[int, Address]:
    found = {}
    for key, where in shape.items():
        vertex = int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else -1
        if not topology.ranks <= vertex < topology.holders:
            raise InputError(
                f"{source}: addresses: must be of switches that can hold chunks, got {key!r:.60}"
            )
        match where:
            case [str(host), int(port)] if 0 < port < 1 << 16:
                found[vertex] = (host, port)
            case _:
                raise InputError(f"{source}: addresses: must be a host and a port, got {where!r:.60}")
    return found


class Switches:
    """The switches that serve a group, as its ranks see them.

    Args:
        topology: of the group: its rank i is rank i of the group.
        addresses: of its able switches, by vertex; all of them, or none where ranks do without.
        options: `aggregator_token` counts here.
    """

    def __init__(self, topology: Topology, addresses: Mapping[int, Address], options: Options) -> None:
        self.addresses = dict(addresses)
        self.names = {
            vertex: f"switch {topology.label(vertex)} ({host}:{port})"
            for vertex, (host, port) in self.addresses.items()
        }
        self._service = bytes.fromhex(options.aggregator_token or "")
        self._token = secrets.token_bytes(TOKEN_BYTES)

    def enlist(
        self, network: Network, table: Table, digests: Sequence[bytes], cut: PieceRule, timeout_s: float
    ) -> None:
        """Tell all switches that the table needs; on rank 0, before any rank connects to them.

        Raises:
            ExecutionError: one cannot be reached, or refuses.
        """
        used = self.used_by(table)
        addresses = {vertex: self.addresses[vertex] for vertex in used}
        data = Enlistment(self._token, timeout_s, addresses, cut, tuple(digests), table).to_bytes()
        for vertex in used:  # in this order: each dials those before it
            self._tell(vertex, data, timeout_s)
        for vertex in used:
            network.publish_switch(vertex, *self.addresses[vertex], self._token)

    def used_by(self, table: Table) -> list[int]:
        """The switches at which transfers of any of its schedules end, in ascending order.

        Raises:
            ExecutionError: one has no address.
        """
        used = sorted(frozenset[int]().union(*(switches_in(entry.schedule) for entry in table.entries)))
        for vertex in used:
            if vertex not in self.addresses:
                raise ExecutionError(
                    f"schedules need switch {table.topology.label(vertex)} to execute a program, and nobody "
                    "says where: ARBORCAST_AGGREGATORS must name its process (synth aggregate)"
                )
        return used

    def _tell(self, vertex: int, data: bytes, timeout_s: float) -> None:
        who, (host, port) = self.names[vertex], self.addresses[vertex]
        deadline = time.monotonic() + min(timeout_s, ANSWER_S)
        handshake = Handshake(self._service, 0, vertex, 0, 0, wants_memory=False)
        try:
            call = dial_tcp(host, port, handshake, deadline)
            try:
                call.sock.settimeout(seconds_until(deadline))
                call.sock.sendall(LENGTH.pack(len(data)) + data)
                refusal = read_reply(call.sock, vertex, deadline)
            finally:
                call.close()
        except TimeoutError as error:
            raise ExecutionError(f"{who} did not answer within {min(timeout_s, ANSWER_S):g} s") from error
        except (ConnectionResetError, BrokenPipeError) as error:
            raise ExecutionError(
                f"{who} hung up: ARBORCAST_AGGREGATOR_TOKEN must be the token of its process"
            ) from error
        except (OSError, socket.gaierror) as error:
            raise ExecutionError(f"{who} cannot be reached: {error}") from error
        except ExecutionError as error:
            raise ExecutionError(f"{who}: what listens there is not synth aggregate") from error
        if refusal:
            raise ExecutionError(f"{who} refuses: {refusal}")
