"""The network interfaces of this host that carry something, as Linux tells of them: no tool is asked."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import struct
import sys
from dataclasses import dataclass

from arborcast.backends.errors import ExecutionError

_FLAGS, _ADDRESS, _MASK, _MTU, _ETHTOOL = 0x8913, 0x8915, 0x891B, 0x8921, 0x8946  # SIOCGIF..., SIOCETHTOOL
_IS_UP, _IS_LOOPBACK, _IS_RUNNING = 0x1, 0x8, 0x40
_GET_SETTINGS = struct.pack("=I", 1)  # ETHTOOL_GSET
_SETTINGS_BYTES = 44
_UNKNOWN_MBIT = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Interface:
    """An interface with its first IPv4 address.

    Attributes:
        name: as the host calls it.
        address: numeric.
        prefix: bits of the subnet.
        mtu: bytes of the longest packet.
        mbit: its speed as the driver tells it; None where it does not.
    """

    name: str
    address: str
    prefix: int
    mtu: int
    mbit: int | None

    @property
    def subnet(self) -> str:
        """As in 10.1.0.0/24."""
        return str(ipaddress.ip_interface(f"{self.address}/{self.prefix}").network)

    def __str__(self) -> str:
        """As messages name it."""
        speed = "" if self.mbit is None else f", {self.mbit / 1000:g} Gbit/s by its driver"
        return f"{self.name} ({self.address}/{self.prefix}, MTU {self.mtu}{speed})"


def interfaces() -> list[Interface]:
    """Those that are up and have a carrier, loopback aside, in the order of their addresses.

    Raises:
        ExecutionError: another system than Linux.
    """
    if sys.platform != "linux":
        raise ExecutionError(f"interfaces can be listed on Linux only, and this is {sys.platform}")
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                flags = struct.unpack("H", _asked(sock, name, _FLAGS)[:2])[0]
                if flags & _IS_LOOPBACK or not (flags & _IS_UP and flags & _IS_RUNNING):
                    continue
                mask = int.from_bytes(_asked(sock, name, _MASK)[4:8], "big")
                address = socket.inet_ntoa(_asked(sock, name, _ADDRESS)[4:8])
                mtu = struct.unpack("i", _asked(sock, name, _MTU)[:4])[0]
                found.append(Interface(name, address, mask.bit_count(), mtu, _speed(sock, name)))
    return sorted(found, key=lambda each: ipaddress.IPv4Address(each.address))


def _asked(sock: socket.socket, name: str, question: int, given: bytes = b"") -> bytes:
    """What the kernel answers about an interface, behind its name."""
    import fcntl

    return fcntl.ioctl(sock, question, struct.pack("16s24s", name.encode()[:15], given))[16:]


def _speed(sock: socket.socket, name: str) -> int | None:
    settings = ctypes.create_string_buffer(_GET_SETTINGS, _SETTINGS_BYTES)
    with contextlib.suppress(OSError):
        _asked(sock, name, _ETHTOOL, struct.pack("P", ctypes.addressof(settings)))
        low, high = struct.unpack_from("=H", settings, 12)[0], struct.unpack_from("=H", settings, 28)[0]
        mbit = int(high << 16 | low)
        return mbit if 0 < mbit < _UNKNOWN_MBIT else None
    return None
