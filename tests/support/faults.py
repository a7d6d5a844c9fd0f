"""What tests of faults share: calls whose end is recorded, blows that strike inside a collective, and checks.

`strike_after` counts the bytes that pass through the channels of a process, so that a fault can strike in the
middle of a message whatever the machine's speed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from arborcast.backends.dataflow.run import GraphRun
from arborcast.backends.transport import socket_channel
from tests.support.ranks import run_ranks

RANKS = 4
MIB = 1 << 20
LARGE = 16 * MIB // 4  # elements
SMALL = 1000
TIMEOUT_S = 5.0  # of groups where a deadline has to pass
LIMIT_S = 100.0  # of the ranks of a test: one that is still at work then has no answer
PATIENCE_S = 10 * LIMIT_S  # of groups that must fail at once: who waits for this deadline has no answer
WAYS = ("sockets", "shared memory")
PIECE = r"(output|input|scratch)\[\d+:\d+\]"  # how messages show what was to be sent or received


@dataclass(frozen=True)
class Ended:
    """How one call ended on one rank.

    Attributes:
        error: class of what it raised, None where it returned.
        message: of the error.
        is_right: whether the result is; None where there is none.
    """

    error: str | None
    message: str
    is_right: bool | None


# ---------------------------------------------------------------------------------- what the ranks do


def contribution(rank: int, count: int = LARGE, salt: int = 0) -> Tensor:
    """Depends on rank, index and call; sums over 8 ranks are exact."""
    return torch.arange(count, dtype=torch.float32).remainder_(1021).add_(7 * rank + salt)


def total(ranks: int, count: int = LARGE, salt: int = 0) -> Tensor:
    whole = torch.arange(count, dtype=torch.float32).remainder_(1021)
    return whole.mul_(ranks).add_(7 * ranks * (ranks - 1) // 2 + salt * ranks)


def ended(call: Callable[[], Any], is_right: Callable[[], bool] = lambda: True) -> Ended:
    try:
        call()
    except Exception as error:
        return Ended(type(error).__name__, str(error), None)
    return Ended(None, "", is_right())


def allreduce(rank: int, size: int, count: int = LARGE, salt: int = 0) -> Ended:
    tensor = contribution(rank, count, salt)
    return ended(lambda: dist.all_reduce(tensor), lambda: torch.equal(tensor, total(size, count, salt)))


def broadcast(rank: int, root: int = 0, count: int = LARGE) -> Ended:
    tensor = contribution(rank, count)
    return ended(lambda: dist.broadcast(tensor, root), lambda: torch.equal(tensor, contribution(root, count)))


def strike_after(nbytes: int, strike: Callable[[], Any]) -> None:
    """Have something happen to this process once so many bytes went in or out of all its channels."""
    advance, passed = GraphRun._advance, 0

    def counted(run: GraphRun, patience_s: float, lingers: bool) -> int:
        nonlocal passed
        run._state.steps = 1  # come back whenever something has moved
        event = advance(run, patience_s, lingers)
        before, passed = passed, sum(channel.state.moved for channel in socket_channel._open)
        if before < nbytes <= passed:
            strike()
        return event

    GraphRun._advance = counted  # type: ignore[method-assign]


def signal_self(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def begin(rank: int, size: int, name: str, timeout_s: float = TIMEOUT_S) -> None:
    """The default group, anew, under a name of its own."""
    import arborcast.torch_backend  # noqa: F401

    store = dist.FileStore(f"{os.environ['TEST_STORE']}-{name}", size)
    dist.init_process_group(
        "synth", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )


def pids(rank: int, size: int) -> list[int]:
    """Of all ranks, exchanged by a store so that no group takes part."""
    store = dist.FileStore(f"{os.environ['TEST_STORE']}-pids", size)
    store.set(str(rank), str(os.getpid()))
    return [int(store.get(str(other))) for other in range(size)]


# ---------------------------------------------------------------------------------- how tests run them


def launch(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int = RANKS,
    topology: str = "full:4",
    transport: str = "sockets",
    gloo_below: str = "0",
    group_timeout_s: float = TIMEOUT_S,
    has_group: bool = True,
    environ: Mapping[str, str] | None = None,
) -> list[Any]:
    told = {
        "ARBORCAST_TOPOLOGY": topology,
        "ARBORCAST_TRANSPORT": transport,
        "ARBORCAST_GLOO_BELOW": gloo_below,
        **(environ or {}),
    }
    return run_ranks(
        ranks,
        function,
        *arguments,
        backend="synth" if has_group else None,
        environ=told,
        group_timeout_s=group_timeout_s,
        timeout_s=LIMIT_S,
        may_fail=True,
    )


def check_failed(result: Any, *words: str) -> None:
    assert isinstance(result, Ended), result
    assert result.error is not None, f"returned, right: {result.is_right}"
    for word in words:
        assert re.search(word, result.message), f"{word!r} is missing: {result.message}"


def check_right(result: Any) -> None:
    assert isinstance(result, Ended), result
    assert result.error is None, result
    assert result.is_right, "returned, but the result is wrong"
