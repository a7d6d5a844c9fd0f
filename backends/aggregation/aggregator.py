"""The process of a switch: it listens, admits groups and passes their ranks' connections to their jobs.

Only who knows the service's token may enlist it, and only who knows the token of a group joins that group's
job (`backends.schedules.enlistment`). Connections that say neither are dropped: at once, or when they have
been silent for some seconds; what they do holds up no job, since each runs on a thread of its own.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time

from arborcast.backends.aggregation.job import Abilities, Job, check_enlistment
from arborcast.backends.errors import ExecutionError
from arborcast.backends.schedules.enlistment import ANSWER_S, LENGTH, Enlistment
from arborcast.backends.schedules.table import MAX_TABLE_BYTES
from arborcast.backends.transport.handshake import TOKEN_BYTES, answer, seconds_until
from arborcast.backends.transport.listener import Listener, PendingConnection
from arborcast.synth.errors import InputError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""How often silent connections are looked at."""

MOST_ENLISTING = 8
"""Groups that tell of their schedules at the same time; of more, the latest are refused."""


class Aggregator:
    """A switch that executes programs, for one group or for several at once.

    Args:
        host: numeric, where to listen.
        port: any free one where 0.
        token: of the service; a new one where None.
        abilities: its limits.

    Attributes:
        host, port: where it listens.
        token: of the service, `TOKEN_BYTES` long.
        served: jobs that have ended.

    Raises:
        ExecutionError: there is no listening at that address.
    """

    def __init__(
        self, host: str, port: int = 0, *, token: bytes | None = None, abilities: Abilities | None = None
    ) -> None:
        try:
            self._listener = Listener(host, is_local=False, port=port)
        except OSError as error:
            raise ExecutionError(f"cannot listen at {host}:{port}: {error}") from error
        self.host, self.port = self._listener.host, self._listener.port
        self.token = secrets.token_bytes(TOKEN_BYTES) if token is None else token
        self.served = 0
        self._abilities = abilities or Abilities()
        self._jobs: dict[bytes, Job] = {}
        self._lock = threading.Lock()
        self._enlisting = 0
        self._is_closed = False

    def serve(self) -> None:
        """Serve until `close` is called, from another thread or a signal's handler."""
        try:
            while not self._is_closed:
                self._listener.wait(LOOK_EVERY_S)
                while self._listener.pending:
                    self._match(self._listener.pending.pop())
        finally:
            self._listener.close()
            with self._lock:
                jobs = list(self._jobs.values())
            for job in jobs:
                job.stop()

    def close(self) -> None:
        """Make `serve` end all jobs, whose ranks are told, and return within a second."""
        self._is_closed = True

    def _match(self, connection: PendingConnection) -> None:
        handshake = connection.handshake
        assert handshake is not None, "the listener waits for it"
        if hmac.compare_digest(handshake.token, self.token):
            with self._lock:
                may = self._enlisting < MOST_ENLISTING
                self._enlisting += may
            if may:
                threading.Thread(target=self._enlist, args=(connection, handshake.to), daemon=True).start()
                return
        with self._lock:
            job = self._jobs.get(handshake.token)
        if job is None:
            connection.close()
        else:
            job.admit(connection)

    def _enlist(self, connection: PendingConnection, vertex: int) -> None:
        """Hear a group out, on a thread of its own, and answer."""
        sock = connection.sock
        try:
            enlistment = Enlistment.from_bytes(_message(sock))
            check_enlistment(enlistment, vertex, self._abilities)
            self._begin(vertex, enlistment)
            refusal = ""
        except InputError as error:
            refusal = str(error)
            log.warning("a group is refused: %s", refusal)
        except OSError:  # it went, or took too long
            refusal = "took too long to say what for"
        except Exception as error:
            log.exception("a group's schedules")
            refusal = f"{type(error).__name__}: {error}"
        finally:
            with self._lock:
                self._enlisting -= 1
        try:
            sock.sendall(answer(refusal))
        except OSError:
            pass  # whom it went to is gone, and with it the group
        finally:
            connection.close()

    def _begin(self, vertex: int, enlistment: Enlistment) -> None:
        with self._lock:
            job = self._jobs.get(enlistment.token)
            if job is None:
                if self._is_closed or len(self._jobs) >= self._abilities.jobs:
                    raise InputError(f"at most {self._abilities.jobs} groups are served at a time")
                job = Job(vertex, enlistment, self._abilities, self._ended)
                self._jobs[enlistment.token] = job
                log.info("switch %s of %s: a group begins", job.name, enlistment.table.topology.name)
                return
        job.extend(vertex, enlistment)

    def _ended(self, job: Job) -> None:
        with self._lock:
            self._jobs.pop(job.token, None)
            self.served += 1
        if job.failure is None:
            log.info("switch %s: the group has left", job.name)
        else:
            log.warning("switch %s: the group failed: %s", job.name, job.failure)


def _message(sock: socket.socket) -> bytes:
    """What follows a handshake with the service's token.

    Raises:
        InputError: it is longer than an enlistment can be.
        OSError: it ended, or was not all here in time.
    """
    deadline = time.monotonic() + ANSWER_S
    (length,) = LENGTH.unpack(_exactly(sock, LENGTH.size, deadline))
    if length > 2 * MAX_TABLE_BYTES:
        raise InputError(f"enlistment: must be at most {2 * MAX_TABLE_BYTES} bytes, got {length}")
    return _exactly(sock, length, deadline)


def _exactly(sock: socket.socket, length: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < length:
        sock.settimeout(seconds_until(deadline))
        got = sock.recv(min(length - len(data), 1 << 20))
        if not got:
            raise ConnectionResetError
        data += got
    return bytes(data)
