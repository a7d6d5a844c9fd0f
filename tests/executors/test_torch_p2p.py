"""The executor on real gloo connections, with one thread per rank instead of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from tests.support.drawn_schedules import (
    allgather_over_relay,
    custom_exchange,
    direct,
    make,
    recursive_doubling,
    ring_allreduce,
    tree_broadcast,
    uneven_allreduce,
)

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from arborcast.backends.errors import ExecutionError  # noqa: E402
from arborcast.backends.executors import torch_p2p as p2p  # noqa: E402
from arborcast.backends.executors.torch_p2p import Executor  # noqa: E402
from arborcast.synth.errors import InputError  # noqa: E402
from arborcast.synth.schedule import Chunk, Schedule, Transfer  # noqa: E402

Group = Any


class _Group:
    """As much of a process group as the executor needs, so that many fit into one process."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def size(self) -> int:
        return int(self._backend.size())

    def rank(self) -> int:
        return int(self._backend.rank())

    def _get_backend(self, device: Any) -> Any:
        return self._backend


def on_ranks(count: int, job: Callable[[int, Group], Any], timeout_s: float = 30) -> list[Any]:
    """What `job(rank, group)` returns, or the exception it raises, on `count` connected ranks."""
    store = dist.HashStore()
    results: list[Any] = [None] * count
    connected = threading.Barrier(count)  # a rank that goes at once is missed when others connect to it

    def run(rank: int) -> None:
        try:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=timeout_s)
            group = _Group(dist.ProcessGroupGloo(store, rank, count, options))
            connected.wait(timeout_s)
            results[rank] = job(rank, group)
        except Exception as error:  # the test looks at it
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def all_equal(results: Sequence[Any], expected: Any) -> None:
    for result in results:
        if isinstance(result, Exception):
            raise result
        assert torch.equal(result, expected)


@pytest.mark.parametrize("schedule", [ring_allreduce(4), recursive_doubling(), uneven_allreduce()])
@pytest.mark.parametrize("pieces", [1, 3])
def test_allreduce(schedule: Schedule, pieces: int) -> None:
    ranks = schedule.topology.ranks

    def job(rank: int, group: Group) -> Any:
        executor = Executor(schedule, group, pieces=pieces, window=1)
        for size in (0, 1, 5, 1001):
            tensor = torch.arange(size) * 10**rank
            executor.allreduce(tensor)
            assert torch.equal(tensor, torch.arange(size) * sum(10**other for other in range(ranks)))
        return tensor

    all_equal(on_ranks(ranks, job), torch.arange(1001) * sum(10**other for other in range(ranks)))


def test_every_other_call() -> None:
    pair = [
        Chunk(f, o)
        for f, o in ((ring_allreduce(2).chunks[0].share, 0), (ring_allreduce(2).chunks[0].share, 1))
    ]
    gathers = make("allgather", pair, [Transfer(0, 0, 1, 0), Transfer(1, 1, 0, 0)], total=2)
    scatters = make("reduce-scatter", pair, [Transfer(0, 1, 0, 0, True), Transfer(1, 0, 1, 0, True)], total=2)
    reduces = make(
        "reduce", [Chunk(sum(c.share for c in pair), 1)], [Transfer(0, 0, 1, 0, True)], total=2, root=1
    )

    def job(rank: int, group: Group) -> Any:
        own = torch.tensor([1.0, 2.0]) + 10 * rank
        both = torch.zeros(4)
        Executor(gathers, group).allgather(both, own)
        assert both.tolist() == [1, 2, 11, 12]
        both[2 * (1 - rank) :][:2] = 0  # now in place: the input is the own block of the output
        Executor(gathers, group).allgather(both, both[2 * rank :][:2])
        assert both.tolist() == [1, 2, 11, 12]
        Executor(scatters, group).reduce_scatter(own, both * (rank + 1))
        assert own.tolist() == ([3, 6] if rank == 0 else [33, 36])
        whole = torch.full((3,), float(rank + 1))
        Executor(reduces, group).reduce(whole, dist.ReduceOp.PRODUCT)
        assert whole.tolist() == ([1, 1, 1] if rank == 0 else [2, 2, 2])
        Executor(direct("gather", 2), group).gather(both if rank == 0 else None, own)
        assert rank or both.tolist() == [3, 6, 33, 36]
        Executor(direct("scatter", 2), group).scatter(own, both if rank == 0 else None)
        assert own.tolist() == ([3, 6] if rank == 0 else [33, 36])
        swapped = torch.zeros(4)
        Executor(direct("alltoall", 2), group).alltoall(swapped, torch.arange(4.0) + 10 * rank)
        assert swapped.tolist() == ([0, 1, 10, 11] if rank == 0 else [2, 3, 12, 13])
        return torch.ones(1)

    all_equal(on_ranks(2, job), torch.ones(1))


@pytest.mark.parametrize(
    ("op", "expected"), [("AVG", [-1, 1]), ("MIN", [-3, 1]), ("MAX", [0, 3]), ("PRODUCT", [0, 3])]
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_reductions(op: str, expected: list[int], dtype: Any) -> None:
    data = [[-3, 1], [0, 3], [0, 1]]
    if op == "AVG" and dtype is torch.int64:
        data[1][1] = 2  # 4 / 3 rounds towards zero
    elif op == "AVG":
        data[2][1] = -1

    def job(rank: int, group: Group) -> Any:
        tensor = torch.tensor(data[rank], dtype=dtype)
        Executor(uneven_allreduce(), group).allreduce(tensor, getattr(dist.ReduceOp, op))
        return tensor

    all_equal(on_ranks(3, job), torch.tensor(expected, dtype=dtype))


def test_broadcast_of_a_matrix_with_a_gradient() -> None:
    def job(rank: int, group: Group) -> Any:
        tensor = torch.full((3, 7), float(rank), requires_grad=True)
        Executor(tree_broadcast(), group, pieces=2).broadcast(tensor)
        return tensor.detach()

    all_equal(on_ranks(5, job), torch.full((3, 7), 1.0))


def test_relays_take_part_without_tensors() -> None:
    def job(rank: int, group: Group) -> Any:
        executor = Executor(allgather_over_relay(), group)
        output = torch.zeros(6, dtype=torch.int64)
        if rank == 1:
            with pytest.raises(InputError, match=r"rank 1: takes no part in the allgather; call run"):
                executor.allgather(output, output[:3])
            executor.run(6, torch.int64)
            return torch.tensor([20, 20, 20, 0, 0, 0])
        executor.allgather(output, torch.full((3,), 10 * rank))
        return output

    all_equal(on_ranks(3, job), torch.tensor([20, 20, 20, 0, 0, 0]))


def test_a_custom_collective_fills_what_is_wanted_and_leaves_the_rest() -> None:
    """Blocks of two elements; rank r starts with r, a block that it holds with 10 times its number."""
    held = [(0,), (0,), (2,), (1,)]
    filled = [(0, 1), (0, 2), (0, 2), (0, 1, 2)]

    def start(rank: int, blocks: tuple[int, ...]) -> Any:
        return torch.tensor([10.0 * b if b in blocks else float(rank) for b in (0, 0, 1, 1, 2, 2)])

    def job(rank: int, group: Group) -> Any:
        executor = Executor(custom_exchange(), group, pieces=2)
        if rank == 4:
            with pytest.raises(InputError, match=r"rank 4: takes no part in the custom; call run"):
                executor.custom(torch.zeros(6))
            executor.run(6, torch.float32)
            return None
        tensor = start(rank, held[rank])
        executor.custom(tensor)
        with pytest.raises(InputError, match=r"its schedule is for custom, not for allreduce"):
            executor.allreduce(tensor)
        return tensor

    results = on_ranks(5, job)
    for rank, wanted in enumerate(filled):
        assert torch.equal(results[rank], start(rank, wanted)), rank


def test_programs_are_compiled_once_per_length_and_type(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[tuple[int, int]] = []
    lower_rank = p2p.lower_rank

    def counting(schedule: Schedule, rank: int, count: int, **knobs: int) -> Any:
        lowered.append((rank, count))
        return lower_rank(schedule, rank, count, **knobs)

    monkeypatch.setattr(p2p, "lower_rank", counting)

    def job(rank: int, group: Group) -> Any:
        executor = Executor(ring_allreduce(2), group, cache=2)
        for size in (8, 8, 9, 8, 10, 9):  # 10 drives out 9, which was used before 8
            executor.allreduce(torch.zeros(size))
        return None

    assert on_ranks(2, job) == [None, None]
    assert sorted(lowered) == sorted((rank, count) for rank in range(2) for count in (8, 9, 10, 9))


class _Unconnected:
    """A backend that must not be called."""

    def __init__(self, size: int, name: str = "gloo") -> None:
        self._size = size
        self._name = name

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0

    def name(self) -> str:
        return self._name


def unconnected(schedule: Schedule) -> Executor:
    group: Any = _Group(_Unconnected(schedule.topology.ranks))
    return Executor(schedule, group)


def test_groups_that_do_not_fit_are_refused() -> None:
    three: Any = _Group(_Unconnected(3))
    with pytest.raises(InputError, match="full-4 has 4 ranks, the process group has 3"):
        Executor(ring_allreduce(4), three)
    other: Any = _Group(_Unconnected(4, "nccl"))
    with pytest.raises(InputError, match="needs a gloo process group, got nccl"):
        Executor(ring_allreduce(4), other)


def test_tensors_that_do_not_fit_are_refused() -> None:
    executor = unconnected(ring_allreduce(2))
    with pytest.raises(InputError, match=r"contiguous, got shape \(2, 3\) with strides \(1, 2\)"):
        executor.allreduce(torch.zeros(3, 2).T)
    with pytest.raises(InputError, match="its schedule is for allreduce, not for broadcast"):
        executor.broadcast(torch.zeros(3))
    with pytest.raises(InputError, match=r"output must have 4 elements on this rank, got 3"):
        executor.run(4, torch.float32, output=torch.zeros(3))
    with pytest.raises(InputError, match=r"output must have 4 elements on this rank, got None"):
        executor.run(4, torch.float32)
    with pytest.raises(InputError, match=r"of type torch\.int64, got torch\.float32"):
        executor.run(4, torch.int64, output=torch.zeros(4))
    with pytest.raises(InputError, match="must be on cpu, got meta"):
        executor.allreduce(torch.zeros(4, device="meta"))
    with pytest.raises(InputError, match=r"reduction .*BAND: must be SUM, AVG"):
        executor.allreduce(torch.zeros(4), dist.ReduceOp.BAND)
    with pytest.raises(InputError, match=r"needs a real floating or integer type, got torch\.complex64"):
        executor.allreduce(torch.zeros(4, dtype=torch.complex64))
    whole = torch.zeros(6)
    with pytest.raises(InputError, match="must not overlap the input"):
        unconnected(direct("alltoall", 2)).alltoall(whole[:4], whole[2:])


def test_pieces_grow_with_the_largest_chunk() -> None:
    group: Any = _Group(_Unconnected(4))
    executor = Executor(ring_allreduce(4), group, piece_bytes=1024, max_pieces=6)
    found = [executor.pieces_for(count, torch.float32) for count in (0, 1, 1023, 2048, 5000, 10**6)]
    assert found == [1, 1, 1, 2, 4, 6]


def test_a_peer_that_does_not_come_is_an_error_and_not_a_hang() -> None:
    def job(rank: int, group: Group) -> Any:
        if rank == 0:
            return None
        executor = Executor(ring_allreduce(2), group, timeout_s=0.3)
        with pytest.raises(ExecutionError, match=r"rank 1: (send|receive) .* rank 0"):
            executor.allreduce(torch.zeros(100))
        with pytest.raises(ExecutionError, match="an earlier call failed: rank 1"):
            executor.allreduce(torch.zeros(100))
        return None

    assert on_ranks(2, job) == [None, None]
