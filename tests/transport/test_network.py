"""How ranks find each other through a store, on real processes: absentees, strangers and mixed transports."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import itertools
import json
import logging
import os
import platform
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from arborcast.backends.errors import ChannelClosedError, ExecutionError, PeerLeftError
from arborcast.backends.transport import addresses
from arborcast.backends.transport.addresses import address_of_interface, listening_addresses
from arborcast.backends.transport.handshake import Handshake, UnansweredCall, dial_unix
from arborcast.backends.transport.listener import Listener, PendingConnection
from arborcast.backends.transport.network import Network
from arborcast.backends.transport.reception import LEAST_SILENT
from arborcast.backends.transport.shared_memory import SLOT_BYTES, SLOTS, create_memory, memory_bytes
from arborcast.backends.transport.socket_channel import SocketChannel
from tests.support.ranks import Failure, StandingRanks, run_ranks, store_path
from tests.support.waiting import any_inside, mark_inside, until, wait_for_end

MESSAGE = 1_500_000


two, three = (StandingRanks(size, backend="gloo") for size in (2, 3))
_numbers = itertools.count()


def new_store() -> dist.Store:
    """A part of the default group's store for one network; all ranks ask for as many."""
    return dist.PrefixStore(f"network {next(_numbers)}", dist.distributed_c10d._get_default_store())


def message(src: int, dst: int) -> torch.Tensor:
    return (torch.arange(MESSAGE) * (3 + src) + dst).to(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


def exchange(network: Network) -> None:
    """A message each way between this rank and all it is connected with, at once."""
    channels = network.channels
    out = {peer: message(network.rank, peer) for peer in channels}
    into = {peer: torch.zeros(MESSAGE, dtype=torch.uint8) for peer in channels}
    sent, received = dict.fromkeys(channels, 0), dict.fromkeys(channels, 0)
    while any(sent[peer] + received[peer] < 2 * MESSAGE for peer in channels):
        poll = select.poll()
        moved = 0
        for peer, channel in channels.items():
            count = channel.send(bytes_of(out[peer])[sent[peer] :]) if sent[peer] < MESSAGE else 0
            sent[peer] += count
            moved += count
            count = channel.receive(bytes_of(into[peer])[received[peer] :]) if received[peer] < MESSAGE else 0
            received[peer] += count
            moved += count
            wanted = channel.wanted(reads=received[peer] < MESSAGE)
            poll.register(channel.fileno(), wanted or 0)
            moved += wanted is None
            if wanted is None:
                channel.on_ready()
        if not moved:
            assert poll.poll(90_000), "nothing came"
            for channel in channels.values():
                channel.on_ready()
    for peer in channels:
        assert torch.equal(into[peer], message(peer, network.rank))


def transports(network: Network) -> dict[int, str]:
    return {peer: channel.transport for peer, channel in sorted(network.channels.items())}


def everybody(rank: int, size: int, choices: list[str]) -> dict[int, str]:
    network = Network(new_store(), rank, size, timeout_s=90, transport=choices[rank])
    network.connect(range(size))
    exchange(network)
    network.connect(range(size))
    network.close()
    return transports(network)


@pytest.mark.parametrize(
    "choices", [["auto", "auto", "sockets"], *([way] * 3 for way in ("sockets", "shared memory"))]
)
def test_transport_is_chosen_per_pair(choices: list[str]) -> None:
    for rank, found in enumerate(three(everybody, choices)):
        far = {peer: "sockets" in (choices[rank], choices[peer]) for peer in {0, 1, 2} - {rank}}
        assert found == {peer: "sockets" if it else "shared memory" for peer, it in far.items()}


@three.check
def test_early_callers_are_kept_until_their_turn(rank: int, size: int) -> None:
    """A chain first; then 0 and 2, of which 2 calls while 0 still waits for 1; then all."""
    network = Network(new_store(), rank, size, timeout_s=90)
    has_called = store_path().with_name("called")
    if rank == 1:
        until(has_called.exists)
    network.connect({1} if rank == 0 else {0, 2} if rank == 1 else ())
    if rank == 2:
        mark_inside("_read_reply", has_called)
        network.connect({0})
        network.connect({1})
    elif rank == 0:
        network.connect({2})
    exchange(network)
    network.close()
    assert network.channels.keys() == {0, 1, 2} - {rank}


@pytest.mark.parametrize("is_silent", [True, False])
def test_rank_that_does_not_come_is_named(is_silent: bool) -> None:
    three(without_rank_1, is_silent)


def without_rank_1(rank: int, size: int, is_silent: bool) -> None:
    """Rank 1 publishes nothing, or publishes and never connects."""
    store = new_store()
    if rank == 1:
        if not is_silent:
            network = Network(store, rank, size, timeout_s=1)
        store.wait(["0 ends", "2 ends"])
        if not is_silent:
            network.close()
        return
    network = Network(store, rank, size, timeout_s=1)
    with pytest.raises(ExecutionError) as caught:
        network.connect({1})
    store.set(f"{rank} ends", "")
    said = "waited 1 s to connect with rank 1, which did not come"
    other = 2 - rank  # which may have told it
    assert str(caught.value) in (
        f"rank {rank} {said}",
        f"rank {other} could not connect: rank {other} {said}",
    )


@three.check
def test_strangers_are_dropped(rank: int, size: int) -> None:
    store = new_store()
    network = Network(store, rank, size, timeout_s=90)
    kept = []
    if rank == 0:
        listener = network._reception
        for at in range(6):
            if at % 2:
                stranger = socket.create_connection(listener.doors[0])
            else:
                stranger = socket.socket(socket.AF_UNIX)
                stranger.connect(f"\0{listener.name}")
            wrong = Handshake(b"another token!!!", 1, 0, 1, 1, False)
            stranger.sendall(
                [wrong.to_bytes(), b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n" * 3, b"\0"][at // 2]
            )
            kept.append(stranger)
        store.set("strangers are in", "")
    store.wait(["strangers are in"])
    network.connect(range(size))
    exchange(network)
    for stranger in kept[:4]:
        stranger.settimeout(90)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b"", "a stranger was answered"
    network.close()
    assert set(transports(network).values()) == {"shared memory"}


@two.check
def test_strangers_who_come_again_and_again_hold_nobody_up(rank: int, size: int) -> None:
    """Rank 0 gives up in time, though somebody connects again and again, and rank 1 does not."""
    store = new_store()
    if rank:
        store.wait(["ended"])
        return
    network = Network(store, rank, size, timeout_s=0.5)
    where = network._reception.doors[0]
    ended = threading.Event()

    def connect_for_ever() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):
                socket.create_connection(where).close()

    stranger = threading.Thread(target=connect_for_ever)
    stranger.start()
    try:
        with pytest.raises(ExecutionError, match=r"connect with rank 1, which did not come"):
            network.connect({1})
        assert stranger.is_alive()
    finally:
        ended.set()
        stranger.join()
        store.set("ended", "")


def test_connections_that_stay_silent_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 64
    listening = Listener(("127.0.0.1",), is_local=False, most_silent=most)
    where = listening.doors[0]
    silent = [socket.create_connection(where) for _ in range(most + 3)]
    until(lambda: not listening.wait(0.05))  # all are accepted, the oldest 3 are too many
    assert [sock.recv(1) for sock in silent[:3]] == [b""] * 3
    late = Handshake(bytes(16), 1, 0, 1, 1, wants_memory=False).to_bytes()
    silent[3].sendall(late)
    monkeypatch.setattr("arborcast.backends.transport.listener.HANDSHAKE_S", 0.0)
    listening.wait(90)  # who speaks in time is heard before others are dropped
    assert [one.handshake for one in listening.pending] == [Handshake.from_bytes(late)]
    assert [sock.recv(1) for sock in silent[4:]] == [b""] * (most - 1)
    listening.close()
    for sock in silent:
        sock.close()


def test_as_many_may_be_silent_as_the_largest_group_needs() -> None:
    store = dist.HashStore()
    small, large = (Network(dist.PrefixStore(str(size), store), 0, size, timeout_s=90) for size in (2, 40))
    shared = small._reception._mine
    assert shared is not None and shared is large._reception._mine
    assert shared.listener.most_silent == 80
    large.close()
    assert shared.listener.most_silent == LEAST_SILENT
    small.close()


@two.check
def test_different_slots_are_refused_on_both_sides(rank: int, size: int) -> None:
    network = Network(new_store(), rank, size, timeout_s=90, slot_bytes=4096 << rank, slots=4)
    expected = "rank 1 has 4 slots of 8192 bytes, but rank 0 has 4 of 4096: all ranks need the same"
    with pytest.raises(ExecutionError, match=f"^{expected}$"):
        network.connect({1 - rank})


CANNOT_SHARE = (
    "ranks 0 and 1 cannot share memory as asked: "
    "they are on two hosts or in two network namespaces, or one of them takes sockets only"
)


@two.check
def test_memory_that_cannot_be_shared_is_an_error_that_names_the_pair(rank: int, size: int) -> None:
    for who in range(2):
        transport = "shared memory" if rank == who else "sockets"
        network = Network(new_store(), rank, size, timeout_s=90, transport=transport)
        with pytest.raises(ExecutionError, match=f"^{CANNOT_SHARE}$"):
            network.connect({1 - rank})


@three.check
def test_abort_reaches_all_peers_whatever_the_transport(rank: int, size: int) -> None:
    transport = "sockets" if rank == 2 else "auto"
    network = Network(new_store(), rank, size, timeout_s=90, transport=transport)
    network.connect(range(size))
    exchange(network)
    if rank == 0:
        network.abort("gave up: out of paper")
        return
    channel = network.channels[0]
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    with pytest.raises(ChannelClosedError, match=r"^rank 0 gave up: out of paper$"):
        while poll.poll(90_000):  # bytes that wake may come before
            channel.on_ready()
    network.close()


@two.check
def test_leaving_is_said(rank: int, size: int) -> None:
    network = Network(new_store(), rank, size, timeout_s=90)
    network.connect(range(size))
    if rank == 1:
        network.close()
        network.close()
        with pytest.raises(ExecutionError, match=r"rank 1 connects to ranks \[7\] after it left the group"):
            network.connect({7})
        return
    channel = network.channels[1]
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    assert poll.poll(90_000)
    with pytest.raises(PeerLeftError, match=r"^rank 1 has left the group$"):
        channel.on_ready()
    network.close()


def dies_before_connecting(rank: int, size: int) -> str:
    store = new_store()
    network = Network(store, rank, size, timeout_s=90)
    if rank == 0:
        store.set("0 will go", str(os.getpid()))
        os._exit(1)
    wait_for_end(int(store.get("0 will go")))
    with pytest.raises(ExecutionError) as caught:
        network.connect({0})
    return str(caught.value)


def test_dead_rank_is_noticed_at_once() -> None:
    dead, caller = run_ranks(2, dies_before_connecting, may_fail=True)
    assert dead == Failure("killed", "ended without an answer")
    assert caller.startswith(("rank 1 cannot reach rank 0 at", "rank 0 ended while rank 1 was connecting"))


@two.check
def test_networks_leave_nothing_open(rank: int, size: int) -> None:
    def once(number: int) -> None:
        transport = "sockets" if number % 2 else "auto"
        network = Network(new_store(), rank, size, timeout_s=90, transport=transport)
        network.connect(range(size))
        exchange(network)
        network.close()

    def held() -> int:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("memfd:arborcast")
        return len(list(Path("/proc/self/fd").iterdir())) + maps

    once(0)
    before = held()
    for number in range(1, 5):
        once(number)
    assert held() == before


@contextlib.contextmanager
def in_threads(stores: list[dist.Store], **settings: object) -> Iterator[list[Network]]:
    """Networks of a group whose ranks are threads of this process."""
    size = len(stores)
    networks = [Network(store, rank, size, timeout_s=90, **settings) for rank, store in enumerate(stores)]  # type: ignore[arg-type]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda network: network.connect(range(size)), networks))
    try:
        yield networks
    finally:
        for network in networks:
            network.close()


def passes_a_message(channels: Mapping[int, SocketChannel], back: Mapping[int, SocketChannel]) -> None:
    data = torch.arange(100, dtype=torch.uint8)
    assert channels[1].send(bytes_of(data)) == 100
    into = memoryview(bytearray(100))
    until(lambda: back[0].receive(into) == 100)
    assert into == bytes(data)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_groups_of_a_process_share_a_listener_and_connect_at_once() -> None:
    """Ten groups of two ranks in one process, each rank's from ten threads: two listening sockets in all."""
    store, of_rank = dist.HashStore(), []
    Network(dist.PrefixStore("first", store), 0, 2, timeout_s=90).close()  # what a process opens once
    before = descriptors()
    for rank in range(2):
        prefixes = [dist.PrefixStore(str(group), store) for group in range(10)]
        of_rank.append([Network(prefix, rank, 2, timeout_s=90) for prefix in prefixes])
    networks = [network for of in of_rank for network in of]
    assert len({network._reception.name for network in networks}) == 1
    assert descriptors() == before + 2
    with ThreadPoolExecutor(20) as pool:
        first = [pool.submit(network.connect, {1}) for network in of_rank[0]]
        second = [pool.submit(network.connect, {0}) for network in reversed(of_rank[1])]
        for connected in first + second:
            connected.result(90)
    assert {network.channels[1].transport for network in of_rank[0]} == {"shared memory"}
    assert descriptors() == before + 2 + len(networks), "one for each end of a channel, none for memory"
    for low, high in zip(*of_rank, strict=True):
        passes_a_message(low.channels, high.channels)
    for network in networks[1:]:
        network.close()
    with socket.create_connection(networks[0]._reception.doors[0]):
        networks[0].close()  # the last one ends the listening
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(networks[0]._reception.doors[0])
    assert descriptors() == before


def test_any_store_will_do() -> None:
    hash_store = dist.HashStore()
    tcp_store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", tcp_store.port)
    for stores in (
        [hash_store, hash_store],
        [dist.PrefixStore("a", tcp_store), dist.PrefixStore("a", client)],
    ):
        with in_threads(list(stores)) as (first, second):
            passes_a_message(first.channels, second.channels)


def test_ipv6() -> None:
    try:
        addresses.listening_socket("::1").close()
    except OSError:
        pytest.skip("no IPv6 here")
    store = dist.HashStore()
    with in_threads([store, store], transport="sockets", address="::1") as (first, second):
        assert first._reception.doors[0][0] == "::1"
        passes_a_message(first.channels, second.channels)


def test_pairs_share_several_addresses_and_each_finds_another_where_one_is_closed() -> None:
    two = "127.0.0.1", "127.0.0.2"
    with (
        socket.socket() as closed,
        in_threads([dist.HashStore()] * 3, transport="sockets", address=",".join(two)) as networks,
    ):
        reached = {
            (network.rank, peer): channel._socket.getpeername()[0]
            for network in networks
            for peer, channel in network.channels.items()
            if peer < network.rank
        }
        assert reached == {(1, 0): two[1], (2, 0): two[0], (2, 1): two[1]}
        closed.bind((two[0], 0))  # and does not listen
        store = dist.HashStore()
        with ThreadPoolExecutor() as pool:
            pair = [
                Network(store, rank, 2, timeout_s=90, transport="sockets", address=",".join(two))
                for rank in (0, 1)
            ]
            entry = json.loads(store.get("arborcast/channels/0"))
            entry["listeners"][1] = closed.getsockname()
            store.set("arborcast/channels/0", json.dumps(entry))
            list(pool.map(lambda network: network.connect({0, 1}), pair))
        assert pair[1].channels[0]._socket.getpeername()[0] == two[0]
        passes_a_message(pair[0].channels, pair[1].channels)
        for network in pair:
            network.close()


def test_what_cannot_be() -> None:
    store = dist.HashStore()
    with pytest.raises(
        ExecutionError, match="transport 'pigeons': there are 'auto', 'sockets', 'shared memory'"
    ):
        Network(store, 0, 2, timeout_s=1, transport="pigeons")
    with pytest.raises(
        ExecutionError, match=r"rank 0 cannot listen at 192\.0\.2\.1: .*assign requested address"
    ):
        Network(store, 0, 2, timeout_s=1, address="192.0.2.1")
    with pytest.raises(
        ExecutionError, match=r"address 'no\.such\.host\.invalid' to listen at cannot be resolved"
    ):
        Network(store, 0, 2, timeout_s=1, address="no.such.host.invalid")


def test_where_memory_cannot_be_passed_sockets_serve_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    store = dist.HashStore()
    with in_threads([store, store]) as (first, second):
        assert first.channels[1].transport == second.channels[0].transport == "sockets"
        assert first.why_no_shared_memory == "this system has no anonymous shared memory (memfd_create)"
    with pytest.raises(ExecutionError, match="rank 0 cannot use shared memory: this system has no anonymous"):
        Network(store, 0, 2, timeout_s=1, transport="shared memory")


def under_a_filter(rank: int, size: int, filtered: int) -> tuple[dict[int, str], int]:
    """A rank to which the kernel refuses anonymous memory, as sandboxes do; how often it says so."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("arborcast.backends.transport.network").addHandler(handler)
    if rank == filtered and not refuse_calls(MEMFD_CREATE):
        return {}, -1
    found = []
    for _ in range(2):
        network = Network(new_store(), rank, size, timeout_s=90)
        network.connect(range(size))
        exchange(network)
        found.append(transports(network))
        network.close()
    assert found[0] == found[1]
    return found[0], sum("Operation not permitted" in line for line in said)


MEMFD_CREATE = 319
"""Its number on x86-64."""


def refuse_calls(number: int) -> bool:
    """Have the kernel answer EPERM to a system call of this process from now on; False where it may not."""
    refuse, allow, of_call, prctl = 0x00050000 | errno.EPERM, 0x7FFF0000, 0, ctypes.CDLL(None).prctl
    rules = [(0x20, 0, 0, of_call), (0x15, 0, 1, number), (0x06, 0, 0, refuse), (0x06, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
    no_new_privileges, seccomp, by_filter = 38, 22, 2
    return not prctl(no_new_privileges, 1, 0, 0, 0) and not prctl(seccomp, by_filter, program)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="knows the number of the call on x86-64 alone")
@pytest.mark.parametrize("filtered", [0, 2])
def test_where_a_filter_forbids_memory_sockets_serve_and_it_is_said_once(filtered: int) -> None:
    got = run_ranks(3, under_a_filter, filtered)
    if got[filtered] == ({}, -1):
        pytest.skip("no filters of system calls here")
    for rank, (by_peer, said) in enumerate(got):
        is_near = {peer: filtered not in (rank, peer) for peer in range(3) if peer != rank}
        assert by_peer == {peer: "shared memory" if near else "sockets" for peer, near in is_near.items()}
        assert said == (rank == filtered)


def in_a_namespace_of_its_own(rank: int, size: int) -> tuple[dict[int, str], str]:
    """Two ranks joined by one link; `lo` has only the rank's address, and nowhere is 127.0.0.1."""
    unshare_network = 0x40000000  # CLONE_NEWNET
    if ctypes.CDLL(None).unshare(unshare_network):
        return {}, "not allowed"
    store = new_store()

    def shell(*commands: str) -> None:
        for command in commands:
            subprocess.run(command.split(), check=True)

    shell("ip link set lo up", "ip addr del 127.0.0.1/8 dev lo", f"ip addr add 10.99.0.{rank + 1}/32 dev lo")
    store.set(f"{rank} is there", str(os.getpid()))
    if rank == 0:
        shell(f"ip link add link0 type veth peer name link1 netns {store.get('1 is there').decode()}")
        store.set("link", "")
    store.wait(["link"])
    shell(
        f"ip link set link{rank} up",
        f"ip route add 10.99.0.{2 - rank}/32 dev link{rank} scope link src 10.99.0.{rank + 1}",
    )
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    network = Network(store, rank, size, timeout_s=90)
    network.connect(range(size))
    exchange(network)
    network.close()
    return transports(network), network._reception.doors[0][0]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")
def test_ranks_in_network_namespaces_of_their_own() -> None:
    got = run_ranks(2, in_a_namespace_of_its_own)
    if got[0] == ({}, "not allowed"):
        pytest.skip("no new network namespaces here")
    assert got == [({1: "sockets"}, "10.99.0.1"), ({0: "sockets"}, "10.99.0.2")]


def test_other_hosts_have_another_boot_id(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    boots = iter(["one kernel", "another kernel"])
    monkeypatch.setattr("arborcast.backends.transport.network.boot_id", lambda: next(boots))
    with in_threads([store, store]) as (first, second):
        assert first.channels[1].transport == second.channels[0].transport == "sockets"


def test_unix_socket_of_another_network_namespace_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is not known there, which looks just like one that nobody has."""
    rightly = Listener.__init__

    def renamed(self: Listener, *arguments: Any, **named: Any) -> None:
        rightly(self, *arguments, **named)
        self.name = "arborcast-nobody-has-this-name"

    monkeypatch.setattr(Listener, "__init__", renamed)
    store = dist.HashStore()
    with in_threads([store, store]) as (first, second):
        assert first.channels[1].transport == second.channels[0].transport == "sockets"
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        networks = [Network(store, rank, 2, timeout_s=90, transport="shared memory") for rank in range(2)]
        for future in [pool.submit(network.connect, {0, 1}) for network in networks]:
            with pytest.raises(ExecutionError) as caught:
                future.result()
            assert str(caught.value) == CANNOT_SHARE


def test_address_comes_from_argument_variable_or_store() -> None:
    store = dist.HashStore()
    lo = {"GLOO_SOCKET_IFNAME": "lo,,lo"}
    assert listening_addresses(store, "127.0.0.5", lo) == ("127.0.0.5",)
    assert listening_addresses(store, None, lo) == (address_of_interface("lo"),)
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert listening_addresses(dist.PrefixStore("a", dist.PrefixStore("b", tcp)), None, {}) == ("127.0.0.1",)
    with pytest.raises(
        ExecutionError, match="GLOO_SOCKET_IFNAME: interface 'eth77' has no address on this host"
    ):
        listening_addresses(store, None, {"GLOO_SOCKET_IFNAME": "lo,eth77"})


def test_name_that_leads_back_here_is_no_address_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many hosts resolve their own name to a loopback address, at which nobody else finds them."""
    monkeypatch.setattr(addresses, "_store_host", lambda store: ("this-host", 29500))
    ways = {"this-host": "127.0.1.1", "192.0.2.1": "127.0.0.9"}  # stands for the default route's address
    monkeypatch.setattr(addresses, "_source_address", lambda host, port: ways[host])
    assert listening_addresses(dist.HashStore(), None, {}) == ("127.0.0.9",)
    monkeypatch.setattr(addresses, "_store_host", lambda store: ("localhost", 29500))
    ways["localhost"] = "127.0.0.1"
    assert listening_addresses(dist.HashStore(), None, {}) == ("127.0.0.1",)


def test_interface_with_ipv6_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe800000000000000000000000000001 02 40 20 80   fabric0\n"
        "20010db8000000000000000000000007 02 40 00 80   fabric0\n"
    )
    monkeypatch.setattr(addresses, "_IPV6_ADDRESSES", table)
    assert address_of_interface("fabric0") == "2001:db8::7"


def test_memory_that_arrives_is_not_for_programs_that_this_one_starts() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    memory = create_memory(4096, 2)
    socket.send_fds(ours, [b"some of a handshake"], [memory])
    connection = PendingConnection(theirs)
    assert connection.listen()
    assert [os.get_inheritable(descriptor) for descriptor in connection.descriptors] == [False]
    connection.close()
    ours.close()
    os.close(memory)


def test_memory_of_a_rank_is_sealed_and_what_is_not_is_refused(tmp_path: Path) -> None:
    """Who shrinks memory kills all that read it: with SIGBUS, at any moment."""
    memory = create_memory(4096, 2)
    with pytest.raises(PermissionError):
        os.truncate(memory, 4096)
    store = dist.HashStore()
    network = Network(store, 0, 2, timeout_s=90, slot_bytes=4096, slots=2)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with (tmp_path / "file").open("wb+") as file:
        os.truncate(file.fileno(), memory_bytes(4096, 2))
        handshake = Handshake(network._token, 1, 0, 4096, 2, wants_memory=True)
        shelf, short = network._own_shelf().descriptor, create_memory(4096, 1)
        for descriptors, refusal in (
            ([memory, shelf], ""),
            ([file.fileno(), shelf], "is not sealed"),
            ([memory, file.fileno()], "is not sealed"),
            ([memory, short], "which needs"),
            ([memory], "sent rank 0 1 pieces of memory, not 2"),
        ):
            connection = PendingConnection(theirs)
            connection.descriptors += descriptors
            assert refusal in network._refusal(connection, handshake)
            assert bool(refusal) == bool(network._refusal(connection, handshake))
    network.close()
    os.close(short)
    for sock in (ours, theirs):
        sock.close()
    os.close(memory)


def test_a_forked_child_keeps_no_connection_that_is_not_yet_a_channel() -> None:
    """Neither of a rank that came early, nor one of this rank that has not been answered yet."""
    store = dist.HashStore()
    network = Network(store, 0, 3, timeout_s=90, transport="sockets")
    early = socket.create_connection(network._reception.doors[0])
    early.sendall(Handshake(network._token, 2, 0, SLOT_BYTES, SLOTS, wants_memory=False).to_bytes())
    while not network._early:
        network._reception.wait(0.05)
        network._seat(set())
    answering, dialing = socket.socketpair()
    call = UnansweredCall(dialing)
    lives, ends = os.pipe()
    child = os.fork()
    if not child:
        os.close(ends)
        os.read(lives, 1)
        os._exit(0)
    try:
        network.close()
        call.close()
        for other in (early, answering):
            other.settimeout(30)
            assert other.recv(1) == b""
            other.close()
    finally:
        os.close(ends)
        os.close(lives)
        os.waitpid(child, 0)


def test_one_piece_of_memory_too_many_ends_a_handshake() -> None:
    """Else the one would be looked at, and the other used: memory that can be taken away."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    sealed, other = create_memory(4096, 2), os.memfd_create("not sealed")
    hello = Handshake(bytes(16), 1, 0, 4096, 2, wants_memory=True).to_bytes()
    connection = PendingConnection(theirs)
    socket.send_fds(ours, [hello[:10]], [sealed, sealed])
    assert connection.listen()
    socket.send_fds(ours, [hello[10:]], [other])
    assert not connection.listen()
    connection.close()
    ours.close()
    os.close(sealed)
    os.close(other)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
def test_other_users_of_the_host_do_not_get_in_by_the_unix_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    listening = Listener(("127.0.0.1",), is_local=True, most_silent=16)
    assert listening.name is not None
    hello = Handshake(bytes(16), 1, 0, 4096, 2, wants_memory=False)
    nobody = 65534
    child = os.fork()
    if not child:
        os.seteuid(nobody)
        with contextlib.suppress(OSError):  # dropped as soon as it is accepted
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(f"\0{listening.name}")
            stranger.sendall(hello.to_bytes())
            stranger.recv(1)
        # Nor does it send its own memory to who listens as somebody else.
        os._exit(dial_unix(listening.name, hello, 0, time.monotonic() + 90) is not None)
    ended = os.pidfd_open(child)
    while not select.select([ended], [], [], 0)[0]:
        listening.wait(0.1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not listening.pending
    call = dial_unix(listening.name, hello, 0, time.monotonic() + 90)
    assert call is not None
    until(lambda: listening.wait(1) and listening.pending)
    call.close()
    listening.close()
    os.close(ended)


@two.check
def test_a_rank_without_descriptors_says_so_in_time_or_goes_on_when_it_has_some(rank: int, size: int) -> None:
    """Rank 0 has no descriptor left when rank 1 dials; the second time it then closes some."""
    for is_for_good in (True, False):
        store = new_store()
        network = Network(store, rank, size, timeout_s=1 if is_for_good and not rank else 90)
        if rank == 0:
            network._reception.wait(0)
            kept: list[int] = []
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    kept.append(os.open("/dev/null", os.O_RDONLY))
            if not is_for_good:
                threading.Timer(0.5, lambda kept=kept: list(map(os.close, kept))).start()
        else:
            until(lambda store=store: store.check(["arborcast/channels/0"]))
        said = ""
        try:
            network.connect({1 - rank})
            exchange(network)
        except ExecutionError as error:
            said = str(error)
        if rank == 0 and is_for_good:
            for one in kept:
                os.close(one)
        network.close()
        late = "rank 0 waited 1 s to connect with rank 1, which did not come in"
        if not is_for_good:
            assert not said
        elif rank == 0:
            assert said == f"{late}: Too many open files (see ulimit -n)"
        else:
            assert said.startswith(("rank 0 ended while rank 1 was connecting", "rank 1 cannot reach rank 0"))


@two.check
def test_a_rank_that_connects_can_be_told_to_end(rank: int, size: int) -> None:
    """However long it may wait for one that never comes: more than sockets and `poll` know, here."""
    for reason, said in ((None, "left the group"), ("gave up: of a whim", "gave up: of a whim")):
        store = new_store()
        if rank == 1:
            store.wait(["ended"])
            continue
        network = Network(store, rank, size, timeout_s=1e8)

        def end(network: Network = network, reason: str | None = reason) -> None:
            until(lambda: any_inside("_connect"))
            network.close() if reason is None else network.abort(reason)

        ending = threading.Thread(target=end)
        ending.start()
        with pytest.raises(ExecutionError, match=f"^rank 0 was connecting when it {said}$"):
            network.connect({1})
        ending.join()
        store.set("ended", "")
