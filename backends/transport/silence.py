"""Hosts that are gone without a word: power lost, a cable cut. Their kernel closes no connection.

Kernels of living hosts acknowledge whatever their processes do, stopped ones too. So a peer is lost when its
kernel has answered nothing for a time, though this one asked: by data, by probes of a window that is closed,
or by keepalives where there was nothing to send. TCP_USER_TIMEOUT would not do: it also ends connections to
processes that are alive and read nothing for that time, as ranks do that write a checkpoint.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from arborcast.backends.errors import ChannelClosedError

if TYPE_CHECKING:
    from arborcast.backends.transport.socket_channel import SocketChannel

LOST_AFTER_S = 60.0
"""After how long without any answer a peer on another host counts as lost where nobody says otherwise."""

MOST_S = 86400
"""The longest such time: the kernel knows no longer pauses between keepalives than 9 hours."""

_PROBES = 8  # the kernel's own end comes after ours, which says why
_UNANSWERED = struct.Struct("xxBB")  # tcp_info: retransmissions, probes
_HEARD = struct.Struct("52xII")  # tcp_info: ms since the last data, since the last acknowledgement


def keep_asking(sock: socket.socket, lost_after_s: float) -> None:
    """Have the kernel ask the other end of an idle TCP connection for signs of life; 0 for never."""
    if sock.family == socket.AF_UNIX or not lost_after_s:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(lost_after_s / 3)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(lost_after_s / 6)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def unheard_s(sock: socket.socket) -> float:
    """For how long the other end's kernel has been silent; 0 where nothing waits for its answer."""
    if sock.family == socket.AF_UNIX:
        return 0.0
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _HEARD.size)
    except OSError:  # closed
        return 0.0
    return min(_HEARD.unpack(info)) / 1000 if any(_UNANSWERED.unpack_from(info)) else 0.0


class SilenceWatch:
    """Finds the peers of one rank that are lost.

    Args:
        lost_after_s: how long a peer may be silent; 0 for ever.

    Attributes:
        look_every_s: how often to look.
    """

    def __init__(self, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self.look_every_s = max(0.25, lost_after_s / 4) if lost_after_s else MOST_S
        self._suspected: dict[int, float] = {}

    def look(self, channels: Mapping[int, SocketChannel]) -> None:
        """Look at all channels.

        A probe may just be on its way to a peer that was not asked for minutes: a peer is lost when it stays
        silent while it is suspected, too.

        Raises:
            ChannelClosedError: a peer is lost.
        """
        if not self._lost_after_s:
            return
        now = time.monotonic()
        for number, channel in channels.items():
            if channel.unheard_s() <= self._lost_after_s:
                self._suspected.pop(number, None)
            elif now - self._suspected.setdefault(number, now) >= min(1.0, self.look_every_s):
                silence = f"{self._lost_after_s:g} s: its host or the way to it is gone"
                raise ChannelClosedError(channel.peer, f"has acknowledged nothing for {silence}")
