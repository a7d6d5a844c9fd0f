"""Calling another rank: a connection over which the greeting has gone out, and the answer to it."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

from arborcast.backends.transport.handshake import ANSWER_BYTES, Greeting, refusal_length
from arborcast.backends.transport.shared_memory import create_memory

_RETRY_S = 0.01  # where the other's queue of callers is full


@dataclass(frozen=True, slots=True)
class Call:
    """A connection to a rank that has not answered yet.

    Attributes:
        sock: the connection.
        memory: descriptor of the memory that was sent along, None over TCP.
    """

    sock: socket.socket
    memory: int | None = None

    def close(self) -> None:
        """Give up."""
        self.sock.close()
        if self.memory is not None:
            os.close(self.memory)


def dial_unix(name: str, greeting: Greeting, deadline: float) -> Call | None:
    """Call by an abstract name; None where nobody has it here, as in another network namespace.

    Raises:
        OSError: there is no memory, or the other rank ended (BrokenPipeError).
        TimeoutError: its queue stayed full until `deadline` (of `time.monotonic`).
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        while True:
            sock.settimeout(seconds_until(deadline))
            try:
                sock.connect(f"\0{name}")
                break
            except BlockingIOError:  # never a wait: the kernel says at once that a queue is full
                if time.monotonic() >= deadline:
                    raise TimeoutError from None
                time.sleep(_RETRY_S)
            except (ConnectionRefusedError, PermissionError):
                sock.close()
                return None
        memory = create_memory(greeting.slot_bytes, greeting.slots)
        try:
            socket.send_fds(sock, [greeting.to_bytes()], [memory])
        except BaseException:
            os.close(memory)
            raise
    except BaseException:
        sock.close()
        raise
    return Call(sock, memory)


def dial_tcp(host: str, port: int, greeting: Greeting, deadline: float) -> Call:
    """Call by an address.

    Raises:
        OSError: nobody is there.
        TimeoutError: nothing came back until `deadline` (of `time.monotonic`).
    """
    sock = socket.create_connection((host, port), seconds_until(deadline))
    try:
        sock.sendall(greeting.to_bytes())
    except BaseException:
        sock.close()
        raise
    return Call(sock)


def hear(sock: socket.socket, peer: int, deadline: float) -> str:
    """The refusal that a rank answers, empty where this rank is welcome.

    Raises:
        ExecutionError: who answered is not a rank.
        OSError: the connection ended.
        TimeoutError: no answer came until `deadline` (of `time.monotonic`).
    """
    head = _read(sock, ANSWER_BYTES, deadline)
    return _read(sock, refusal_length(head, peer), deadline).decode(errors="replace")


def _read(sock: socket.socket, length: int, deadline: float) -> bytes:
    data = b""
    while len(data) < length:
        sock.settimeout(seconds_until(deadline))
        got = sock.recv(length - len(data))
        if not got:
            raise ConnectionResetError
        data += got
    return data


def seconds_until(deadline: float) -> float:
    """For a timeout, which must not be 0: that would mean not to wait and not to say so."""
    return max(0.001, deadline - time.monotonic())
