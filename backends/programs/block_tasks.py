"""What operations of puts and signals wait for and tell; `interpreter` runs them on data, `pacing` in time.

Threads of blocks and proxies are tasks. All that happens is counted, and nothing is ever counted down: who
takes a signal or a unit of a semaphore waits for one more than were taken before, and who meets others until
their number is full. What moves and signals do, and when a task goes on, is for the runs to say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Generator, Hashable
from typing import Any, NamedTuple, TypeAlias

from arborcast.backends.programs.program import (
    Acquire,
    Barrier,
    Connection,
    Flush,
    GlobalProgram,
    Move,
    Operation,
    Release,
    Signal,
    Synchronize,
    Wait,
)

Until: TypeAlias = tuple[Hashable, int]
"""That something has happened so many times."""

Task: TypeAlias = Generator[Any, None, None]
"""Stops at what it waits for: `Until`, what else the run knows, or None, for nothing."""


class BlockThread(NamedTuple):
    """One of the threads of a block, in a call."""

    rank: int
    block: int
    number: int = 0
    call: int = 0


class BlockTasks(ABC):
    """The operations of a program's blocks; `counts` of what has happened, `taken` of what was waited for."""

    def __init__(self, program: GlobalProgram, threads: int = 1) -> None:
        """So many threads do what a block does; operations on several channels are dealt over them."""
        self.program = program
        self.threads = threads
        self.counts: dict[Hashable, int] = defaultdict(int)
        self.taken: dict[Hashable, int] = defaultdict(int)
        for rank, part in enumerate(program.parts):
            self.counts |= {(rank, at): value for at, value in enumerate(part.semaphores)}
        self._orders: dict[Hashable, deque[tuple[BlockThread, Move | Connection]]] = {}

    @abstractmethod
    def start(self, task: Task) -> None:
        """Let a task go on beside the others."""

    @abstractmethod
    def put(self, by: BlockThread, move: Move, proxy: Hashable | None) -> Task:
        """What a move does, or the part of a thread in it where no proxy was told to do it."""

    @abstractmethod
    def signal(self, by: BlockThread, end: Connection, proxy: Hashable | None) -> None:
        """What a signal does, which in the end tells the other end."""

    def tell(self, key: Hashable) -> None:
        """Something has happened once more."""
        self.counts[key] += 1

    def next(self, key: Hashable) -> Until:
        """That it happens once more than was waited for until now."""
        self.taken[key] += 1
        return key, self.taken[key]

    def operation(self, by: BlockThread, operation: Operation) -> Task:  # noqa: PLR0912  (a table of cases)
        """One operation of a thread."""
        rank, block = by.rank, self.program.parts[by.rank].blocks[by.block]
        own = slice(by.number, None, self.threads)
        match operation:
            case Move(channel=None):
                yield from self.put(by, operation, None)
            case Move(channel=channel) if operation.thread % self.threads == by.number:
                self._order(by, block.connections[channel or 0], operation)
            case Signal(channels=channels):
                for end in (block.connections[at] for at in channels[own]):
                    if end.kind == "port":
                        self._order(by, end, end)
                    else:
                        self.signal(by, end, None)
                    yield None
            case Release():
                for counted in block.posts(rank, operation)[own]:
                    self.tell(counted)
                    yield None
            case Wait() | Acquire():
                for counted in block.takes(rank, operation)[own]:
                    yield self.next(counted)
            case Flush(channels=channels):
                for end in (block.connections[at] for at in channels[own]):
                    proxy = rank, end.peer, end.number
                    yield ("done", proxy), self.counts["told", proxy]
            case Synchronize():
                yield from self._gathered(by)
            case Barrier(number=number, blocks=blocks):
                yield from self._gathered(by)
                if not by.number:
                    yield self._meeting(("barrier", rank, number), blocks)
                yield from self._gathered(by)

    def _gathered(self, by: BlockThread) -> Task:
        if self.threads > 1:
            yield self._meeting(("threads", by.rank, by.block), self.threads)

    def _meeting(self, key: Hashable, many: int) -> Until:
        """That the next so many have come."""
        self.tell(key)
        return key, -(-self.counts[key] // many) * many

    def _order(self, by: BlockThread, end: Connection, what: Move | Connection) -> None:
        """Tell a proxy what to do: a move, or a signal to the other end."""
        proxy = by.rank, end.peer, end.number
        if proxy not in self._orders:
            self._orders[proxy] = deque()
            self.start(self._proxy(proxy))
        self._orders[proxy].append((by, what))
        self.tell(("told", proxy))

    def _proxy(self, proxy: Hashable) -> Task:
        """Never ends."""
        while True:
            yield self.next(("told", proxy))
            by, what = self._orders[proxy].popleft()
            if isinstance(what, Move):
                yield from self.put(by, what, proxy)
            else:
                self.signal(by, what, proxy)
            self.tell(("done", proxy))
