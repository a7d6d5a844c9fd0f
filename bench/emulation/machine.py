"""Namespaces of the kernel, made without names, so that nothing is left when this process goes.

A namespace lives as long as somebody holds its descriptor or runs in it. What is done inside of it is done by
a thread that enters it and ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from arborcast.bench.harness.script import CannotMeasureError
from arborcast.synth.errors import InputError

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
_T = TypeVar("_T")


REAL_TIME_PRIORITY = 1
"""Of `real_time`, the least there is."""

_TRIAL = {
    "ip": "link add a0 type veth peer name a1",
    "tc": "qdisc add dev a0 root tbf rate 10mbit burst 20kb limit 1mb",
}
"""What a kernel must be able to do, by tool."""


class EmulationError(CannotMeasureError):
    """The machine refused something; the message is its own, in one line."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network namespace.

    Attributes:
        descriptor: keeps it alive.
    """

    descriptor: int

    @property
    def path(self) -> str:
        """By which other processes find it while this one holds it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def close(self) -> None:
        """Let go of it; it ends with the last process in it, and its devices with it."""
        os.close(self.descriptor)

    def run(self, function: Callable[[], _T]) -> _T:
        """What a function gives when it is called inside."""

        def inside() -> _T:
            enter_descriptor(self.descriptor)
            return function()

        return _in_a_thread(inside)

    def batch(self, tool: str, lines: Iterable[str]) -> None:
        """Hand lines to `ip` or `tc` inside.

        Raises:
            EmulationError: the tool refuses one.
        """
        text = "".join(line + "\n" for line in lines)
        if not text:
            return
        done = self.run(
            lambda: subprocess.run(
                [tool, "-batch", "-"], input=text, capture_output=True, text=True, check=False
            )
        )
        if done.returncode:
            said = " ".join(done.stderr.split())
            raise EmulationError(f"{tool}: {said or f'status {done.returncode}'}")

    def set(self, name: str, value: str) -> None:
        """Write a kernel setting such as `net/ipv4/ip_forward` inside."""
        self.run(lambda: _write(f"/proc/sys/{name}", value))


def new_namespace() -> Namespace:
    """An empty one.

    Raises:
        EmulationError: the kernel refuses.
    """

    def make() -> int:
        if _LIBC.unshare(_CLONE_NEWNET):
            raise EmulationError(f"network namespace: {os.strerror(ctypes.get_errno())}")
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return Namespace(_in_a_thread(make))


def enter(path: str) -> None:
    """Move this thread, and the threads and processes that it starts later, into a namespace."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter_descriptor(descriptor)
    finally:
        os.close(descriptor)


def enter_descriptor(descriptor: int) -> None:
    """The same by an open descriptor.

    Raises:
        EmulationError: the kernel refuses.
    """
    if _LIBC.setns(descriptor, _CLONE_NEWNET):
        raise EmulationError(f"enter a network namespace: {os.strerror(ctypes.get_errno())}")


def why_not() -> str | None:
    """Why nothing can be emulated on this machine, in one line; None where it can."""
    if not hasattr(os, "geteuid") or not os.path.exists("/proc/thread-self/ns/net"):  # noqa: PTH110
        return "links can be emulated on Linux only"
    if os.geteuid():
        return "links can be emulated by root only (network namespaces): run as root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return (
                f"links can be emulated with iproute2 only, and there is no command {tool}: install iproute2"
            )
    try:
        namespace = new_namespace()
    except EmulationError as error:
        return f"links cannot be emulated here: {error}"
    try:
        for tool, line in _TRIAL.items():
            namespace.batch(tool, [line])
    except EmulationError as error:
        return f"links cannot be emulated here: {error}"
    finally:
        namespace.close()
    return None


def check_machine() -> None:
    """Raise InputError with the reason where nothing can be emulated on this machine."""
    if reason := why_not():
        raise InputError(reason)


@contextmanager
def real_time() -> Iterator[bool]:
    """Run this thread, and those that it starts, before all ordinary work of the machine.

    What else the machine does would otherwise hold up each message of a chain by some milliseconds.

    Yields:
        whether that was allowed; where it was not, nothing has changed.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REAL_TIME_PRIORITY))
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, policy, parameters)


def _write(path: str, value: str) -> None:
    try:
        with open(path, "w", encoding="ascii") as file:  # noqa: PTH123 - of the thread's own namespace
            file.write(value)
    except OSError as error:
        raise EmulationError(f"{path}: {value}: {error.strerror}") from error


def _in_a_thread(function: Callable[[], _T]) -> _T:
    """A thread may change its namespace without the rest of the process changing its own."""
    result: list[Any] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            result.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]  # type: ignore[no-any-return]


if __name__ == "__main__":
    if why := why_not():
        print(f"emulated links will be left out, and the command will end with status 2: {why}")
    else:
        print("emulated links: can be had here")
