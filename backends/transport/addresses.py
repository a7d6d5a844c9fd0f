"""By which address other ranks reach this process, and whether two processes run on one host."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TypeAlias

from torch._C import _distributed_c10d as c10d

from arborcast.backends.errors import ExecutionError
from arborcast.backends.tensors.shared_store import SharedStore
from arborcast.backends.tensors.torch_compat import INTERFACE_VARIABLE, PrefixStore, Store

Ends: TypeAlias = tuple[str, str]
"""The addresses of the ends of a cable."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_SIOCGIFADDR = 0x8915  # Linux: the first IPv4 address of an interface
# Of a block kept for documentation (RFC 5737), so that the default route leads there; nothing is sent.
_ELSEWHERE = ("192.0.2.1", 9)


@cache
def boot_id() -> str | None:
    """What all processes under one running kernel share, containers included; None where it is not told."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None


def listening_addresses(
    store: Store, address: str | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """The numeric addresses to listen at.

    It is `address`, or several with commas between; else those of the interfaces named by GLOO_SOCKET_IFNAME;
    else the one by which the store's host is reached; else the one that the host's name stands for; else
    127.0.0.1.

    Raises:
        ExecutionError: `address` cannot be resolved or an interface has none.
    """
    if address is not None:
        try:
            return tuple(_resolve(each.strip()) for each in address.split(","))
        except OSError as error:
            raise ExecutionError(f"address {address!r} to listen at cannot be resolved: {error}") from error
    if names := list(filter(None, environ.get(INTERFACE_VARIABLE, "").split(","))):
        return tuple(dict.fromkeys(map(address_of_interface, names)))
    for found in _guesses(store):
        if can_be_bound(found):
            return (found,)
    return ("127.0.0.1",)


def address_of_interface(name: str) -> str:
    """The first IPv4 address of a network interface, else its first IPv6 address that is not link-local.

    Raises:
        ExecutionError: it has none.
    """
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(OSError):
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            digits, *_, interface = line.split()
            found = ipaddress.IPv6Address(bytes.fromhex(digits))
            if interface == name and not found.is_link_local:
                return str(found)
    raise ExecutionError(f"{INTERFACE_VARIABLE}: interface {name!r} has no address on this host")


def _guesses(store: Store) -> Iterator[str]:
    """Addresses that may do, the likeliest first."""
    host = _store_host(store)
    if host is not None:
        with contextlib.suppress(OSError):
            towards_store = _source_address(*host)
            # Where the host's own name stands for a loopback address, others could not reach that one.
            if not _is_loopback(towards_store) or _is_loopback(host[0]):
                yield towards_store
    if host is None or not _is_loopback(host[0]):
        with contextlib.suppress(OSError):
            yield _source_address(*_ELSEWHERE)
    with contextlib.suppress(OSError):
        yield _resolve(socket.gethostname())


def _store_host(store: Store) -> tuple[str, int] | None:
    """Host and port of the TCP store below any prefixes, None for other kinds."""
    while isinstance(store, PrefixStore | SharedStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, c10d.TCPStore) else None


def _source_address(host: str, port: int) -> str:
    """This host's address on the way to another; a datagram socket is connected, but nothing sent."""
    family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(target)
        return str(sock.getsockname()[0])


def _resolve(host: str) -> str:
    return str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def can_be_bound(address: str) -> bool:
    """Whether a process of this host can listen at a numeric address."""
    try:
        listening_socket(address).close()
    except OSError:
        return False
    return True


def listening_socket(address: str) -> socket.socket:
    """A TCP socket that listens at any free port of a numeric address."""
    family, *_, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind(target)
        sock.listen(socket.SOMAXCONN)
    except OSError:
        sock.close()
        raise
    return sock
