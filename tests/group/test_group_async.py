"""Work in flight on the group "synth": order, futures, errors, threads, memory."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from arborcast.backends import ExecutionError
from arborcast.backends.group import profiling
from tests.support.group_cases import OPS, counted, values
from tests.support.ranks import StandingRanks

ENVIRON = {
    "ARBORCAST_TOPOLOGY": "ring:3",
    "ARBORCAST_GLOO_BELOW": "0",
    "ARBORCAST_METHOD": "trees",
    "ARBORCAST_DEADLINE": "100",
}
"""Every message runs a schedule, one that is quick to find."""

ranks = StandingRanks(3, environ=ENVIRON)


def total(size: int, count: int, salt: int = 0) -> Tensor:
    return torch.stack([values(rank, count, salt=salt) for rank in range(size)]).sum(0)


# One call -----------------------------------------------------------------------------------------


@ranks.check
def test_handles_and_futures(rank: int, size: int) -> None:
    tensor = values(rank, 5000)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait() is True
    assert work.is_completed()
    assert work.wait(timedelta(seconds=5)) is True, "waiting again is allowed"
    assert torch.equal(tensor, total(size, 5000))
    assert torch.equal(work.result()[0], tensor)

    tensor = values(rank, 5000, salt=1)
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert torch.equal(doubled.wait(), 2 * total(size, 5000, 1))
    chained = work.get_future().then(lambda future: future.value()[0].sum()).then(lambda f: f.value().item())
    assert chained.wait() == total(size, 5000, 1).sum().item()

    # Futures of every kind hold what was filled.
    broadcast = dist.broadcast(values(rank, 30), 1, async_op=True).get_future()
    assert torch.equal(flat(broadcast.wait()), values(1, 30))
    gathered = [torch.empty(30) for _ in range(size)]
    gathering = dist.all_gather(gathered, values(rank, 30), async_op=True).get_future()
    assert torch.equal(flat(gathering.wait()), torch.cat([values(other, 30) for other in range(size)]))
    output = torch.empty(30 * size)
    gathering = dist.all_gather_into_tensor(output, values(rank, 30), async_op=True).get_future()
    assert torch.equal(flat(gathering.wait()), output)
    scattered = torch.empty(30)
    scattering = dist.reduce_scatter_tensor(scattered, values(rank, 30 * size), async_op=True).get_future()
    assert torch.equal(flat(scattering.wait()), total(size, 30 * size)[30 * rank :][:30])
    tensors = [values(rank, 30, salt=salt) for salt in range(3)]
    coalesced = dist.all_reduce_coalesced(tensors, async_op=True)
    coalesced.wait()
    assert torch.equal(torch.cat(tensors), torch.cat([total(size, 30, salt) for salt in range(3)]))


def flat(held: Any) -> Tensor:
    """What a future holds, in any of the nestings that torch uses."""
    if isinstance(held, Tensor):
        return held.reshape(-1)
    return torch.cat([flat(part) for part in held])


@ranks.check
def test_completes_without_a_wait(rank: int, size: int) -> None:
    tensor = values(rank, 100_000)
    done = threading.Event()
    work = dist.all_reduce(tensor, async_op=True)
    work.get_future().add_done_callback(lambda future: done.set())
    assert done.wait(90)
    assert torch.equal(tensor, total(size, 100_000))
    assert work.is_completed()


# Many in flight -----------------------------------------------------------------------------------


def eight_kinds(rank: int, size: int, salt: int, count: int) -> list[tuple[Any, Callable[[], None]]]:
    """Begins eight calls; for each the work and a check of what it gave."""
    begun: list[tuple[Any, Callable[[], None]]] = []

    def begin(work: Any, got: Sequence[Tensor], expected: Sequence[Tensor], name: str) -> None:
        def check() -> None:
            for mine, right in zip(got, expected, strict=True):
                assert torch.equal(mine, right), f"{name} of {count}"

        begun.append((work, check))

    whole = [values(other, count * size, salt=salt) for other in range(size)]
    own = [values(other, count, salt=salt + 1) for other in range(size)]
    blocks = [[part.clone() for part in other.view(size, count)] for other in whole]
    gathered, single = [torch.empty(count) for _ in range(size)], torch.empty(count * size)
    scattered, listed = torch.empty(count), torch.empty(count)
    summed, greatest = own[rank].clone(), own[rank].clone()
    sent, together = own[rank].clone(), [own[rank].clone(), whole[rank].clone()]
    begin(dist.all_reduce(summed, async_op=True), [summed], [sum(own)], "allreduce")
    begin(dist.broadcast(sent, size - 1, async_op=True), [sent], [own[-1]], "broadcast")
    begin(dist.all_gather(gathered, own[rank], async_op=True), gathered, own, "allgather")
    begin(
        dist.all_gather_into_tensor(single, own[rank], async_op=True), [single], [torch.cat(own)], "allgather"
    )
    right = sum(whole).view(size, count)[rank]
    begin(dist.reduce_scatter_tensor(scattered, whole[rank], async_op=True), [scattered], [right], "scatter")
    begin(dist.reduce_scatter(listed, blocks[rank], async_op=True), [listed], [right], "scatter of a list")
    begin(dist.all_reduce(greatest, OPS["MAX"], async_op=True), [greatest], [torch.stack(own).amax(0)], "max")
    begin(dist.all_reduce_coalesced(together, async_op=True), together, [sum(own), sum(whole)], "coalesced")
    return begun


@ranks.check
def test_eight_kinds_in_flight(rank: int, size: int) -> None:
    chance = random.Random(3 + rank)  # each rank waits in an order of its own
    for salt, count in enumerate((1, 1000, 50_000, 7)):
        begun = eight_kinds(rank, size, 10 * salt, count)
        chance.shuffle(begun)
        for work, check in begun:
            work.wait()
            check()
    before = counted(dist.group.WORLD)
    begun = [one for salt in range(8) for one in eight_kinds(rank, size, 10 * salt, 3000 + salt)]
    for work, check in reversed(begun):
        work.wait()
        check()
    assert counted(dist.group.WORLD) == before + 64


@ranks.check
def test_calls_take_effect_in_their_order(rank: int, size: int) -> None:
    """Two tensors go through many calls of which none is waited for; another order gives another result."""
    chance = random.Random(5)
    count = 1000
    tensors = [values(other, count, torch.float64) for other in range(size)]
    wholes = [values(other, count * size, torch.float64, salt=1) for other in range(size)]
    tensor, whole = tensors[rank].clone(), wholes[rank].clone()
    works = []
    for _ in range(40):
        # What the call does, and what it does to the tensors of all ranks.
        match chance.randrange(4):
            case 0:
                works.append(dist.all_gather_into_tensor(whole, tensor, async_op=True))
                wholes = [torch.cat(tensors)] * size
            case 1:
                works.append(dist.reduce_scatter_tensor(tensor, whole, OPS["AVG"], async_op=True))
                tensors = list((sum(wholes) / size).view(size, count))
            case 2:
                root = chance.randrange(size)
                works.append(dist.broadcast(whole[:count], root, async_op=True))
                wholes = [torch.cat([wholes[root][:count], each[count:]]) for each in wholes]
            case _:
                works.append(dist.all_reduce(tensor[: count // 2], OPS["SUM"], async_op=True))
                half = sum(each[: count // 2] for each in tensors)
                tensors = [torch.cat([half, each[count // 2 :]]) for each in tensors]
    works[-1].wait()
    torch.testing.assert_close(tensor, tensors[rank])
    torch.testing.assert_close(whole, wholes[rank])


@ranks.check
def test_barriers_among_calls(rank: int, size: int) -> None:
    """After a barrier every rank's calls are complete; barriers keep their place among calls of gloo's."""
    for salt in range(10):
        tensor, truths = values(rank, 60_000, salt=salt), torch.tensor([rank == 0, False])
        begun = [
            dist.all_reduce(tensor, async_op=True),
            dist.barrier(async_op=True),
            dist.all_reduce(truths, async_op=True),  # gloo's
            dist.barrier(async_op=True),
            dist.all_gather(gathered := [torch.empty(2, dtype=torch.bool)] * size, truths, async_op=True),
        ]
        dist.barrier()
        assert all(work.is_completed() for work in begun[:2])
        assert torch.equal(tensor, total(size, 60_000, salt))
        for work in begun:
            work.wait()
        assert truths.tolist() == gathered[0].tolist() == [True, False]


@ranks.check
def test_callbacks_may_call(rank: int, size: int) -> None:
    """A callback may call and wait, as PowerSGD's does, or send off another call."""

    def again(future: Any) -> Tensor:
        tensor = future.value()[0]
        dist.all_reduce(tensor)
        return tensor

    tensor = values(rank, 2000)
    work = dist.all_reduce(tensor, async_op=True)
    result = work.get_future().then(again)
    assert torch.equal(result.wait(), size * total(size, 2000))
    nested = (
        dist.all_reduce(values(rank, 9), async_op=True)
        .get_future()
        .then(lambda future: dist.all_reduce(future.value()[0], async_op=True).get_future())
    )
    assert torch.equal(flat(nested.wait().wait()), size * total(size, 9))


# Lifetimes ----------------------------------------------------------------------------------------


@ranks.check
def test_dropped_tensors_live_until_completion(rank: int, size: int) -> None:
    futures = []
    for salt in range(6):
        work = dist.all_reduce(values(rank, 100_000, salt=salt), async_op=True)
        futures.append(work.get_future())
        del work
        gc.collect()
    for salt, future in enumerate(futures):
        assert torch.equal(flat(future.wait()), total(size, 100_000, salt))

    gone = []
    for salt in range(6):
        tensor = values(rank, 50_000, salt=salt)
        gone.append(weakref.ref(tensor))
        dist.all_reduce(tensor, async_op=True)  # nobody keeps anything
        del tensor
    last = dist.all_reduce(torch.ones(1), async_op=True)
    last.wait()
    del futures, future, last
    dist.all_reduce(torch.ones(1))
    gc.collect()
    assert [ref() for ref in gone] == [None] * 6, "tensors are released"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def growth(rank: int, size: int, warm_up: int, calls: int) -> int:
    begun = counted(dist.group.WORLD)
    chance = random.Random(1)
    # Few enough lengths that their graphs are kept.
    tensors = [torch.ones(chance.randrange(256, 16_384)) for _ in range(12)]
    outputs = [torch.empty(tensor.numel() * size) for tensor in tensors]

    def call(index: int) -> None:
        tensor, output = tensors[index % 12], outputs[index % 12]
        match index % 4:
            case 0:
                dist.all_reduce(tensor)
            case 1:
                dist.broadcast(tensor, 1)
            case 2:
                dist.all_gather_into_tensor(output, tensor)
            case _:
                dist.reduce_scatter_tensor(tensor, output)
        tensor.fill_(1)

    for index in range(warm_up):
        call(index)
    gc.collect()
    before = resident_bytes()
    for index in range(calls):
        call(index)
    gc.collect()
    assert counted(dist.group.WORLD) == begun + warm_up + calls
    return resident_bytes() - before


@pytest.mark.parametrize(
    ("warm_up", "calls"), [(200, 1000), pytest.param(1000, 10_000, marks=pytest.mark.long)]
)
def test_memory_stays(warm_up: int, calls: int) -> None:
    assert max(ranks(growth, warm_up, calls)) < 3 << 20


@ranks.check
def test_compiled_once_for_all_lengths_types_and_operations(rank: int, size: int) -> None:
    from arborcast.backends.dataflow import graph_template

    compiled = mock.patch.object(graph_template, "compile_graph", wraps=graph_template.compile_graph)  # type: ignore[attr-defined]
    with compiled as compile_graph:
        for count in range(1_003, 3_000, 17):
            for dtype in (torch.float32, torch.int32):
                given = torch.arange(count, dtype=dtype) + rank
                dist.all_reduce(given)
                assert torch.equal(given, size * torch.arange(count, dtype=dtype) + sum(range(size)))
                dist.all_reduce(given, OPS["MAX"])
                told = torch.arange(count, dtype=dtype) * (rank + 1)
                dist.broadcast(told, 1)
                assert torch.equal(told, 2 * torch.arange(count, dtype=dtype))
        assert compile_graph.call_count <= len(("allreduce", "broadcast"))


# Errors -------------------------------------------------------------------------------------------


@ranks.check
def test_what_gloo_refuses_ends_nothing(rank: int, size: int) -> None:
    """Gloo fails on its own thread when it averages truth values."""
    work = dist.all_reduce(torch.ones(4, dtype=torch.bool), OPS["AVG"], async_op=True)
    with pytest.raises(RuntimeError, match="can't be cast"):
        work.wait()
    assert isinstance(work.exception(), RuntimeError)
    dist.all_reduce(tensor := torch.ones(4))
    assert tensor.tolist() == [size] * 4, "the group goes on"


def disagreeing(rank: int, size: int) -> str:
    """Rank 0 has another length; everybody's wait raises, and every future holds it."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(7), group=group)
    work = dist.all_reduce(torch.ones(100 if rank else 101), group=group, async_op=True)
    future = work.get_future()
    late = dist.all_reduce(torch.ones(9), group=group, async_op=True)
    handled = future.then(lambda done: done.value())
    later = partial(dist.all_reduce, torch.ones(2), group=group)
    for wait in (future.wait, handled.wait, late.wait, later):
        with pytest.raises(RuntimeError, match="101 elements"):  # the first cause
            wait()
    with pytest.raises(ExecutionError) as caught:
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(RuntimeError, match=r"(Disagreement|Execution)Error: rank"):
        future.value()
    with pytest.raises(ExecutionError):
        raise work.exception()
    return type(caught.value).__name__


def test_errors_reach_the_caller() -> None:
    raised = set(ranks(disagreeing))
    assert "DisagreementError" in raised and raised <= {"DisagreementError", "ExecutionError"}


@ranks.check
def test_timeout_of_a_group(rank: int, size: int) -> None:
    """One rank does not call: the others give up after the group's timeout."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.all_reduce(torch.ones(3), group=group)
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait(["0 gave up", "2 gave up"], timedelta(seconds=60))
    else:
        with pytest.raises(RuntimeError, match="rank 1"):
            dist.all_reduce(torch.ones(300), group=group)
        store.set(f"{rank} gave up", "yes")


# Inside training ----------------------------------------------------------------------------------


@ranks.check
def test_calls_inside_backward(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))
    inputs = [values(other, 80).view(4, 20) for other in range(size)]
    wanted = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for each in inputs:
        model.zero_grad()
        model(each).square().sum().backward()
        for parameter, added in zip(model.parameters(), wanted, strict=True):
            added.add_(parameter.grad)
    works = []
    for index, parameter in enumerate(model.parameters()):

        def reduce(parameter: Any, index: int = index) -> None:
            if index % 2:
                works.append(dist.all_reduce(parameter.grad, async_op=True))
            else:
                dist.all_reduce(parameter.grad)

        parameter.register_post_accumulate_grad_hook(reduce)
    for _ in range(3):
        model.zero_grad()
        model(inputs[rank]).square().sum().backward()
        for work in works:
            work.wait()
        for parameter, added in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, added)


@ranks.check
def test_differentiable_collectives(rank: int, size: int) -> None:
    from torch.distributed.nn import functional

    reference = dist.new_group(backend="gloo")
    gradients = []
    for group in (dist.group.WORLD, reference):
        given = values(rank, 12).requires_grad_()
        scale = torch.arange(12.0)
        reduced = functional.all_reduce(given * scale, group=group)
        gathered = torch.cat(functional.all_gather(reduced.square(), group=group))
        received = functional.broadcast(gathered, 1, group=group)
        (received * torch.arange(12.0 * size)).sum().backward()
        gradients.append(given.grad)
    assert torch.equal(*gradients)
    assert gradients[0].any()


@ranks.check
def test_profiler(rank: int, size: int) -> None:
    from torch.autograd.profiler import profile

    tensor, reduced = values(rank, 1000), torch.ones(7)
    with profile(record_shapes=True) as recorded:
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        tensor.add_(0)
        dist.broadcast(tensor, 0)
        dist.reduce(reduced, 0)
        if rank < 2:
            (dist.send if rank else dist.recv)(reduced, 1 - rank)
        dist.barrier()
    assert torch.equal(tensor, total(size, 1000))
    found = {event.name: event for event in recorded.function_events if event.name.startswith("synth:")}
    peer = [("synth:recv", "synth:send")[rank]] if rank < 2 else []
    assert {*found} == {"synth:all_reduce", "synth:broadcast", "synth:reduce", "synth:barrier", *peer}
    assert all(event.is_async for event in found.values())
    assert found["synth:all_reduce"].input_shapes == found["synth:broadcast"].input_shapes == [[1000]]
    assert found["synth:reduce"].input_shapes == [[7]]
    # What ends the events records nothing itself: its frames end when the profiler may be gone.
    assert not [event.name for event in recorded.function_events if "_end_event" in event.name]


@ranks.check
def test_inference_mode(rank: int, size: int) -> None:
    """Tensors of the inference mode may be written to in that mode only, and threads do not inherit it."""
    with torch.inference_mode():
        for count in (1000, 3):
            for begun in eight_kinds(rank, size, 0, count):
                work, check = begun
                work.wait()
                check()
        whole = values(rank, 100).view(10, 10).t()
        dist.all_reduce(whole)
        assert torch.equal(whole, total(size, 100).view(10, 10).t())
    with torch.no_grad():
        dist.all_reduce(tensor := values(rank, 9))
    assert torch.equal(tensor, total(size, 9))
    weights = values(rank, 9).requires_grad_()
    dist.all_reduce(weights)
    (weights * 2).sum().backward()
    assert weights.grad.tolist() == [2] * 9, "an ordinary tensor stays one"


@ranks.check
def test_events_of_a_profiler_end_with_works_that_nobody_ends(rank: int, size: int) -> None:
    """After a receive that nobody waits for and a call that a queue refuses."""
    group: Any = dist.new_group([rank], use_local_synchronization=True)
    with torch.profiler.profile():
        work = group.recv_anysource([torch.ones(1)], 3)
        assert len(profiling._open) == 1
        del work
        gc.collect()
        assert not profiling._open
        group._queue.close("no more", wait_s=0)
        work = group.allreduce([torch.ones(1)])
        assert not profiling._open
    assert work.exception() is not None


@ranks.check
def test_a_call_ends_when_no_thread_writes_to_its_profiler_any_more(rank: int, size: int) -> None:
    """Else the profiler, which may be gone when the call has ended, crashes the process."""
    with torch.profiler.profile():
        event = profiling.Event("synth:test", [torch.ones(1)])
        order, close = [], event.close

        def slowly() -> None:  # in the script's thread, which goes on when this returns
            close()
            time.sleep(0.2)
            order.append("the script's last step")

        event.close = slowly  # type: ignore[method-assign]
        event.end()
        order.append("the end of the call")
    assert order == ["the script's last step", "the end of the call"]
