"""What keeps one rank from connecting reaches all others while a group is made: real processes.

Groups have half an hour for it, so that what ends sooner was told. How long that takes is not asserted.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from arborcast.backends import ExecutionError
from arborcast.backends.transport.network import Network
from arborcast.synth.errors import InputError
from tests.support.ranks import Failure, StandingRanks, run_ranks

RANKS, VICTIM, LONG_S = 4, 2, 1800.0


def _strike(number: int) -> None:
    os.kill(os.getpid(), number)


def _before(number: int) -> None:
    _strike(number)


def _while_connecting(number: int) -> None:
    """When the others have been told that it is there."""
    Network.connect = lambda *_: _strike(number)  # type: ignore[method-assign]


def _between(number: int) -> None:
    """After the ranks have found each other, before this one can be called."""
    Network.__init__ = lambda *_, **__: _strike(number)  # type: ignore[assignment,misc]


def _new_group(rank: int, size: int, spoil: Callable[[int], None], number: int, timeout_s: float) -> str:
    if rank == VICTIM:
        spoil(number)
    try:
        dist.new_group(timeout=timedelta(seconds=timeout_s))
    except (ExecutionError, InputError) as error:
        return str(error)
    return "made"


@pytest.mark.parametrize("spoil", [_before, _while_connecting, _between])
def test_the_death_of_a_rank_reaches_all_who_wait_for_it(spoil: Callable[[int], None]) -> None:
    results = run_ranks(
        RANKS,
        _new_group,
        spoil,
        signal.SIGKILL,
        LONG_S,
        backend="synth",
        group_timeout_s=LONG_S,
        may_fail=True,
    )
    assert isinstance(results.pop(VICTIM), Failure)
    for said in results:
        assert f"rank {VICTIM}" in said and re.search("ended|cannot reach", said), said


@pytest.mark.parametrize("spoil", [_before, _while_connecting])
def test_who_waits_for_a_stopped_rank_names_it_when_the_time_is_over(spoil: Callable[[int], None]) -> None:
    """A process that is stopped cannot be told from a slow one before that.

    Rank 0, which is no neighbour of it, may have made its group by then and wait for a neighbour in a call;
    if its time is over first, that is the cause that all are told.
    """
    results = run_ranks(RANKS, _stopped, spoil, backend="synth", group_timeout_s=LONG_S, may_fail=True)
    named = rf"waited 2 s .* rank {VICTIM}\b"
    in_a_call = r"rank 0: .* \(begin together\) .* rank [13]: nothing happened for 2 s"
    for rank in (0, 1, 3):
        assert re.search(named if spoil is _before else f"{named}|{in_a_call}", results[rank]), results[rank]


def _stopped(rank: int, size: int, spoil: Callable[[int], None]) -> str:
    """The first of the others ends the stopped one, when all are done."""
    store: Any = dist.distributed_c10d._get_default_store()
    store.set(f"process of {rank}", str(os.getpid()))
    said = _new_group(rank, size, spoil, signal.SIGSTOP, 2.0)
    store.set(f"done {rank}", "")
    if rank == 0:
        store.wait([f"done {other}" for other in range(size) if other != VICTIM])
        os.kill(int(store.get(f"process of {VICTIM}")), signal.SIGKILL)
    return said


@StandingRanks(RANKS).check
def test_a_rank_that_cannot_listen_is_named_by_all(rank: int, size: int) -> None:
    with mock.patch.dict(os.environ):
        if rank == VICTIM:
            os.environ["GLOO_SOCKET_IFNAME"] = "no-such-interface"
        with pytest.raises(
            (ExecutionError, InputError), match="interface 'no-such-interface' has no address"
        ):
            dist.new_group(timeout=timedelta(seconds=LONG_S))


def _later(rank: int, size: int) -> str:
    if rank == VICTIM:
        _while_connecting(signal.SIGKILL)
    try:
        dist.all_to_all_single(torch.empty(size), torch.ones(size))
    except ExecutionError as error:
        return str(error)
    return "served"


def test_a_death_while_ranks_connect_for_a_schedule_reaches_all() -> None:
    results = run_ranks(RANKS, _later, backend="synth", group_timeout_s=LONG_S, may_fail=True)
    assert isinstance(results.pop(VICTIM), Failure)
    for said in results:
        assert f"rank {VICTIM}" in said, said
