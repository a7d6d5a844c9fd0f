"""Ranks of one group that call differently, or were told differently, are refused at once: real processes.

One rank is odd, and no rank may compute anything or wait for the deadline.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from arborcast.backends import ExecutionError
from arborcast.backends.transport.fingerprint import CollectiveFingerprint
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from tests.support.faults import (
    PATIENCE_S,
    RANKS,
    SMALL,
    Ended,
    allreduce,
    begin,
    broadcast,
    check_failed,
    check_right,
    ended,
    launch,
)
from tests.support.ranks import StandingRanks


@dataclass(frozen=True)
class Odd:
    """One rank calls otherwise than the rest: the calls, and what messages must show of each.

    Where `sends`, some ranks only send in their call, wait for nobody, and hear of it at the next.
    """

    usual: Callable[[], Any]
    odd: Callable[[], Any]
    words: tuple[str, ...]
    sends: bool = False


def _reduces(
    count: int = SMALL, dtype: Any = torch.float32, op: Any = dist.ReduceOp.SUM, group: Any = None
) -> None:
    dist.all_reduce(torch.ones(count, dtype=dtype), op=op, group=group)


def _spreads(root: int) -> None:
    dist.broadcast(torch.ones(SMALL), root)


DISAGREEMENTS = {
    "sizes": Odd(_reduces, lambda: _reduces(SMALL + 1), (f"{SMALL} elements", f"{SMALL + 1} elements")),
    "types": Odd(_reduces, lambda: _reduces(dtype=torch.int32), ("float32", "int32")),
    "types of one width": Odd(
        lambda: _reduces(dtype=torch.bfloat16), lambda: _reduces(dtype=torch.float16), ("bfloat16", "float16")
    ),
    "operations": Odd(_reduces, lambda: _reduces(op=dist.ReduceOp.MAX), ("sum", "max")),
    "roots": Odd(lambda: _spreads(0), lambda: _spreads(3), ("from rank 0", "from rank 3")),
    "kinds": Odd(_reduces, lambda: _spreads(0), ("allreduce", "broadcast")),
    "a barrier": Odd(_reduces, dist.barrier, ("float32 sum", "barrier")),
    "sizes to a root": Odd(
        lambda: dist.reduce(torch.ones(SMALL), 0),
        lambda: dist.reduce(torch.ones(SMALL + 1), 0),
        (f"{SMALL} elements", f"{SMALL + 1} elements"),
        sends=True,
    ),
    "kinds, one to a root": Odd(
        lambda: dist.all_to_all_single(torch.empty(SMALL), torch.ones(SMALL)),
        lambda: dist.gather(torch.ones(SMALL), dst=1),
        ("alltoall", "gather"),
        sends=True,
    ),
    "sizes, by gloo": Odd(
        lambda: dist.reduce(torch.ones(SMALL, dtype=torch.complex64), 0),
        lambda: dist.reduce(torch.ones(SMALL + 1, dtype=torch.complex64), 0),
        (f"{SMALL} elements", f"{SMALL + 1} elements"),
    ),
    "kinds, by gloo": Odd(
        lambda: dist.reduce(torch.ones(SMALL, dtype=torch.complex64), 2),
        lambda: dist.all_reduce(torch.ones(SMALL).to_sparse()),
        ("reduce", "allreduce"),
    ),
}


def _disagree(rank: int, size: int) -> dict[str, tuple[Ended, Ended]]:
    results = {}
    for number, (name, case) in enumerate(DISAGREEMENTS.items()):
        begin(rank, size, name, PATIENCE_S)
        is_odd = rank == number % size

        def calls(last: Callable[[], Any] = case.odd if is_odd else case.usual) -> None:
            for call in (_reduces, _reduces, last):  # some ranks may still be busy with the last good one
                call()

        results[name] = (ended(calls), ended(_reduces))
        dist.destroy_process_group()
    begin(rank, size, "after all", PATIENCE_S)
    results["after all"] = (allreduce(rank, size, SMALL), broadcast(rank, 3, SMALL))
    return results


@pytest.mark.parametrize("gloo_below", ["0", "1GiB"])
def test_ranks_that_call_differently_are_refused_at_once(gloo_below: str) -> None:
    results = launch(_disagree, gloo_below=gloo_below, transport="auto", has_group=False)
    for result in results:
        assert isinstance(result, dict), result
        for after in result.pop("after all"):
            check_right(after)
    for name, case in DISAGREEMENTS.items():
        ends = [result[name] for result in results]
        for first, later in ends:
            if not case.sends:
                check_failed(first)
            check_failed(later)
        with_both = [first for first, _ in ends if all(word in first.message for word in case.words)]
        assert with_both, f"{name}: nobody shows {case.words}: {ends}"


ranks = StandingRanks(
    RANKS, backend="gloo", environ={"ARBORCAST_TOPOLOGY": "full:4", "ARBORCAST_TRANSPORT": "sockets"}
)


def _differ_in_environment(rank: int, size: int, variable: str, values: tuple[str, str]) -> str:
    with (
        mock.patch.dict(os.environ, {variable: values[rank == 1]}),
        pytest.raises((InputError, ExecutionError)) as caught,
    ):
        _reduces(10_000, group=dist.new_group(backend="synth"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("variable", "values", "words"),
    [
        ("ARBORCAST_TOPOLOGY", ("full:4", "ring:4"), ("full", "ring")),
        ("ARBORCAST_GLOO_BELOW", ("0", "1MiB"), ("gloo_below", "0 on rank", "1048576 on rank")),
        ("ARBORCAST_TRANSPORT", ("sockets", "shared memory"), ("sockets", "shared memory")),
        ("ARBORCAST_BITS", ("alike", "any"), ("bits: ", "alike on rank 0", "any on rank 1")),
        ("ARBORCAST_START", ("at once", "wait"), ("start: ", "at once on rank 0", "wait on rank 1")),
        ("TORCH_FR_BUFFER_SIZE", ("9", "9" * 30), ("rank 1: TORCH_FR_BUFFER_SIZE: must be", "got '9999")),
    ],
)
def test_ranks_with_different_settings_are_refused_at_once(
    variable: str, values: tuple[str, str], words: tuple[str, ...]
) -> None:
    said = ranks(_differ_in_environment, variable, values)
    assert any(all(word in it for word in words) for it in said), said


def test_calls_in_words() -> None:
    """As errors show them; before schedules are found nothing is known but what they are for."""
    assert str(CollectiveFingerprint(3, 0, 1, Kind.BROADCAST, "")) == "schedules of broadcast from rank 1"
    call = CollectiveFingerprint(3, 64, -1, Kind.ALLREDUCE, "float32 sum")
    assert str(call) == "allreduce of 64 elements (float32 sum) by gloo"
