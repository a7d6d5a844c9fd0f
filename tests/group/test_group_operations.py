"""What the group "synth" gives, call by call, beside gloo on the same processes with the same data."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from arborcast import topologies
from arborcast.backends.tensors.torch_reduction import operator_of
from tests.support.group_cases import (
    DTYPES,
    FACTOR,
    OPS,
    Case,
    assert_equal,
    check_same,
    counted,
    outcome,
    values,
)
from tests.support.ranks import StandingRanks, run_ranks


def environ(path: str = "schedule", fabric: str = "ring:3") -> dict[str, str]:
    """Every message runs a schedule, one that is quick to find; or gloo serves them as small ones.

    Grouped ones run a schedule by groups of messages, as tensors on GPUs do.
    """
    return {
        "ARBORCAST_P2P": "cpu" if path == "grouped" else "off",
        "ARBORCAST_TOPOLOGY": fabric,
        "ARBORCAST_GLOO_BELOW": "1GiB" if path == "gloo" else "0",
        "ARBORCAST_METHOD": "trees",
        "ARBORCAST_DEADLINE": "100",
    }


RANKS = {path: StandingRanks(3, environ=environ(path)) for path in ("schedule", "gloo", "grouped")}
ranks = RANKS["schedule"]


@functools.cache
def groups() -> tuple[Any, Any]:
    """The tested group, and gloo beside it."""
    return dist.group.WORLD, dist.new_group(backend="gloo")


# Every reduction and type -------------------------------------------------------------------------

REFUSED = {
    *((op, dtype) for op in ("BAND", "BOR", "BXOR", "PREMUL_SUM") for dtype in ("bool", "complex64")),
    *((op, dtype) for op in ("BAND", "BOR", "BXOR") for dtype in DTYPES if "float" in dtype),
    *((op, dtype) for op in ("AVG", "PREMUL_SUM") for dtype in DTYPES if "int" in dtype),
    *((op, "complex64") for op in ("PRODUCT", "MIN", "MAX")),
    ("AVG", "bool"),
} - {(op, "bool") for op in ("BAND", "BOR", "BXOR")}
"""What gloo refuses; of it schedules serve averages of integers."""


def reducing(kind: str, op: str, dtype: Any, count: int, salt: int) -> Case:
    """A call of that kind as a case: it makes its data, calls, and returns what it got."""

    def case(group: Any) -> Sequence[Tensor]:
        rank, size = group.rank(), group.size()
        output = torch.empty(count, dtype=dtype)
        match kind:
            case "all_reduce":
                output = values(rank, count, dtype, op, salt)
                dist.all_reduce(output, OPS[op], group=group)
            case "all_reduce_coalesced":
                tensors = [values(rank, count + more, dtype, op, salt + more) for more in (0, 3)]
                dist.all_reduce_coalesced(tensors, OPS[op], group=group)
                return tensors
            case "reduce":
                output, root = values(rank, count, dtype, op, salt), salt % size
                dist.reduce(output, root, OPS[op], group=group)
                return [output] if rank == root else []
            case "reduce_scatter":
                blocks = [values(rank, count, dtype, op, salt + other) for other in range(size)]
                dist.reduce_scatter(output, blocks, OPS[op], group=group)
            case "reduce_scatter_tensor":
                whole = values(rank, count * size, dtype, op, salt)
                dist.reduce_scatter_tensor(output, whole, OPS[op], group=group)
                assert torch.equal(whole, values(rank, count * size, dtype, op, salt)), "input has changed"
        return [output]

    return case


REDUCING = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor")
OF_ONE_TENSOR = ("all_reduce", "reduce", "reduce_scatter_tensor")
"""What those of lists become before anybody serves them."""


AS_REAL = {"SUM", "AVG", "PREMUL_SUM"}


def is_served(kind: str, op: str, dtype: Any) -> bool:
    """Whether a schedule must serve it; torch hands complex numbers to an allreduce as pairs of real ones."""
    as_real = dtype.is_complex and kind.startswith("all_reduce") and op in AS_REAL
    return as_real or operator_of(OPS[op], dtype) is not None


def every_reduction(rank: int, size: int, path: str, kinds: Sequence[str]) -> int:
    tested, reference = groups()
    ran, path = 0, "gloo" if path == "gloo" else "schedule"
    for salt, (op, kind) in enumerate((op, kind) for op in OPS for kind in kinds):
        for name, dtype in DTYPES.items():
            what = f"{kind} {op} {name}"
            case = reducing(kind, op, dtype, 257, salt)
            before = counted(tested, path)
            is_ours = is_served(kind, op, dtype)
            if (op, name) in REFUSED and not is_ours:
                got = outcome(case, tested)
                assert got.error is not None, what
                assert issubclass(got.error, RuntimeError | ValueError), f"{what}: {got.error}"
            elif op == "PREMUL_SUM":  # gloo lacks it
                sums = reducing(kind, "SUM", dtype, 257, salt)(reference)
                assert_equal(case(tested), [total * FACTOR for total in sums], what)
            elif (op, name) in REFUSED:  # averages of integers
                sums = reducing(kind, "SUM", dtype, 257, salt)(reference)
                assert_equal(case(tested), [total.div(size, rounding_mode="trunc") for total in sums], what)
            else:
                expected = check_same(what, case, tested, reference)
                assert expected.error is None, f"{what}: gloo: {expected.message}"
            assert (counted(tested, path) > before) == is_ours, what
            ran += is_ours
    return ran


@pytest.mark.parametrize("path", RANKS)
def test_every_reduction_and_type(path: str) -> None:
    kinds = REDUCING if path == "schedule" else OF_ONE_TENSOR
    ran = RANKS[path](every_reduction, path, kinds)
    assert ran == [sum(is_served(*case) for case in itertools.product(kinds, OPS, DTYPES.values()))] * 3
    # Of the table in test_torch_reduction.py, and complex ones.
    assert ran[0] == len(kinds) * 63 + 3 * sum(kind.startswith("all_reduce") for kind in kinds)


@ranks.check
def test_table_of_refusals_is_gloos(rank: int, size: int) -> None:
    _, reference = groups()
    refused = {
        (op, name)
        for op in OPS
        for name, dtype in DTYPES.items()
        if outcome(reducing("all_reduce", op, dtype, 5, 0), reference).error is not None
    }
    assert refused - REFUSED == {(op, name) for op, name in refused if op == "PREMUL_SUM" and "float" in name}
    assert refused >= REFUSED


# Sizes --------------------------------------------------------------------------------------------


def moving(kind: str, dtype: Any, count: int, salt: int, root: int = 0) -> Case:
    def case(group: Any) -> Sequence[Tensor]:
        rank, size = group.rank(), group.size()
        own = values(rank, count, dtype, "MAX", salt)
        match kind:
            case "broadcast":
                dist.broadcast(own, root, group=group)
                return [own]
            case "gather":
                outputs = [torch.empty(count, dtype=dtype) for _ in range(size)] if rank == root else None
                dist.gather(own, outputs, root, group=group)
                return outputs or []
            case "scatter":
                inputs = [values(other, count, dtype, "MAX", salt) for other in range(size)]
                output = torch.empty(count, dtype=dtype)
                dist.scatter(output, inputs if rank == root else None, root, group=group)
                return [output]
            case "all_gather":
                outputs = [torch.empty(count, dtype=dtype) for _ in range(size)]
                dist.all_gather(outputs, own, group=group)
                return [*outputs, own]
            case _:
                output = torch.empty(count * size, dtype=dtype)
                dist.all_gather_into_tensor(output, own, group=group)
                return [output, own]

    return case


ROOTED = ("broadcast", "gather", "scatter")
MOVING = (*ROOTED, "all_gather", "all_gather_into_tensor")
SIZES = (0, 1, 2, 3, 4, 5, 7, 13, 64, 101, 1009, 4096, 65537)


def every_size(rank: int, size: int) -> None:
    tested, reference = groups()
    chance = random.Random(7)
    dtypes = [torch.float32, torch.int64, torch.uint8, torch.bfloat16]
    for salt, count in enumerate([*SIZES, *(chance.randrange(1, 30_000) for _ in range(5))]):
        for kind in REDUCING:
            op, dtype = chance.choice(["SUM", "MIN", "PRODUCT"]), chance.choice(dtypes)
            case = reducing(kind, op, dtype, count, salt)
            assert check_same(f"{kind} {op} of {count} {dtype}", case, tested, reference).error is None
        for kind in MOVING:
            dtype, root = chance.choice(dtypes), chance.randrange(size)
            case = moving(kind, dtype, count, salt, root)
            assert check_same(f"{kind} of {count} {dtype}", case, tested, reference).error is None


@pytest.mark.parametrize(
    ("fabric", "transport", "method", "path"),
    [
        pytest.param("ring:3", "auto", "auto", "schedule", marks=pytest.mark.long),
        pytest.param("full:4", "auto", "trees", "schedule", marks=pytest.mark.long),
        ("star:3", "sockets", "trees", "schedule"),
        pytest.param("mesh:2x2", "sockets", "trees", "schedule", marks=pytest.mark.long),
        ("full:2", "auto", "trees", "grouped"),
    ],
)
def test_sizes(fabric: str, transport: str, method: str, path: str) -> None:
    told = environ(path, fabric) | {"ARBORCAST_TRANSPORT": transport, "ARBORCAST_METHOD": method}
    run_ranks(topologies.load(fabric).ranks, every_size, backend="synth", environ=told)


def check_moved(kind: str, dtype: Any, count: int, root: int, tested: Any, reference: Any) -> None:
    """With a root, beside gloo, which gathers no complex numbers."""
    case, what = moving(kind, dtype, count, root, root), f"{kind} of {dtype} with root {root}"
    if kind == "gather" and dtype.is_complex:
        size = tested.size()
        wanted = [values(other, count, dtype, "MAX", root) for other in range(size)]
        assert_equal(case(tested), wanted if tested.rank() == root else [], what)
    else:
        assert check_same(what, case, tested, reference).error is None


def every_root(rank: int, size: int, path: str) -> None:
    tested, reference = groups()
    path = "gloo" if path == "gloo" else "schedule"
    for root in range(size):
        for dtype, kind in itertools.product(DTYPES.values(), ROOTED):
            # Trees, which all these calls are told to go by, are not for blocks of one rank.
            served_by = path if kind == "broadcast" else "gloo"
            before = counted(tested, served_by)
            check_moved(kind, dtype, 1000 + root, root, tested, reference)
            assert counted(tested, served_by) == before + 1, "what adds nothing moves bytes of any type"
        tensor = torch.arange(9).to(torch.int16) + rank  # which gloo does not know
        dist.broadcast(tensor, root)
        assert torch.equal(tensor, torch.arange(9).to(torch.int16) + root)
    for name, dtype in DTYPES.items():
        before = counted(tested, path)
        for kind in ("all_gather", "all_gather_into_tensor"):
            assert check_same(f"{kind} {name}", moving(kind, dtype, 99, 5), tested, reference).error is None
        assert counted(tested, path) == before + 2, "and so does an allgather"


@pytest.mark.parametrize("path", RANKS)
def test_every_root_and_type(path: str) -> None:
    RANKS[path](every_root, path)


def with_a_root(rank: int, size: int) -> None:
    tested, reference = groups()
    for root, dtype in itertools.product(range(size), DTYPES.values()):
        before = counted(tested, kind="reduce")
        check_same(f"reduce to {root}", reducing("reduce", "MAX", dtype, 301, root), tested, reference)
        assert counted(tested, kind="reduce") == before + is_served("reduce", "MAX", dtype)
        for kind in ("gather", "scatter"):
            before = counted(tested, kind=kind)
            check_moved(kind, dtype, 301, root, tested, reference)
            assert counted(tested, kind=kind) == before + 1


@pytest.mark.parametrize(("fabric", "path"), [("full:4", "schedule"), ("ring:3", "grouped")])
def test_blocks_of_a_root_by_schedules(fabric: str, path: str) -> None:
    told = environ(path, fabric) | {"ARBORCAST_METHOD": "auto", "ARBORCAST_START": "at once"}
    run_ranks(topologies.load(fabric).ranks, with_a_root, backend="synth", environ=told)


# Tensors ------------------------------------------------------------------------------------------


def shapes_of(rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Tensors of every kind, each with the one that holds its elements."""
    base = {name: values(rank, 4000, salt=salt) for salt, name in enumerate(("a", "b", "c", "d", "e", "f"))}
    leaf = values(rank, 24, salt=9).requires_grad_()
    return {
        "transposed": (base["a"][:600].view(20, 30).t(), base["a"]),
        "every other": (base["b"][::2], base["b"]),
        "columns": (base["c"].view(40, 100)[3:30, 5:64], base["c"]),
        "view with an offset": (base["d"][17:1018], base["d"]),
        "three dimensions": (base["e"].view(10, 20, 20), base["e"]),
        "permuted": (base["f"].view(10, 20, 20).permute(2, 0, 1), base["f"]),
        "of dimension 0": (torch.tensor(float(rank + 1)), torch.empty(0)),
        "empty": (torch.empty(0, 5), torch.empty(0)),
        "one of a stride": (base["b"][6:7:2], base["b"]),
        "one of a column": (base["c"].view(40, 100)[3:4, 5:6], base["c"]),
        "none of a stride": (base["b"][:0:2], base["b"]),
        "leaf with a gradient": (leaf, leaf),
    }


@ranks.check
def test_tensors_of_every_shape(rank: int, size: int) -> None:
    """By definition: gloo leaves a part of tensors that are not dense as they were."""
    for name in shapes_of(0):
        given = [shapes_of(other)[name][0].detach() for other in range(size)]
        total = torch.stack(given).sum(0)

        tensor, base = shapes_of(rank)[name]
        untouched = base.detach().clone()
        dist.all_reduce(tensor)
        assert torch.equal(tensor.detach(), total), f"allreduce of {name}"
        assert tensor.requires_grad == (name == "leaf with a gradient")
        assert tensor.grad_fn is None, f"allreduce of {name}"
        assert int((base != untouched).sum()) <= tensor.numel(), f"allreduce of {name} wrote elsewhere"

        tensor, base = shapes_of(rank)[name]
        dist.broadcast(tensor, 1)
        assert torch.equal(tensor.detach(), given[1]), f"broadcast of {name}"

        tensor, base = shapes_of(rank)[name]
        gathered = [torch.empty_like(tensor).detach() for _ in range(size)]
        dist.all_gather(gathered, tensor.detach())
        for other in range(size):
            assert torch.equal(gathered[other], given[other]), f"allgather of {name}"
    tensors = {name: tensor for name, (tensor, _) in shapes_of(rank).items()}
    dist.all_reduce_coalesced([tensor.detach() for tensor in tensors.values()])
    for name, tensor in tensors.items():
        assert torch.equal(tensor.detach(), sum(shapes_of(other)[name][0].detach() for other in range(size)))


@ranks.check
def test_blocks_of_every_shape(rank: int, size: int) -> None:
    wide = [values(other, 12 * size, salt=3).view(size, 12) for other in range(size)]
    expected = sum(wide)[rank]

    dist.reduce_scatter_tensor(output := torch.zeros(24)[::2], wide[rank].reshape(-1))
    assert torch.equal(output, expected), "output with gaps"
    dist.reduce_scatter_tensor(output := torch.zeros(12), wide[rank].repeat_interleave(2)[::2])
    assert torch.equal(output, expected), "input with gaps"
    dist.reduce_scatter(output := torch.zeros(3, 4).t(), [row.view(4, 3) for row in wide[rank]])
    assert torch.equal(output, expected.view(4, 3)), "transposed output"
    dist.reduce_scatter(output := torch.zeros(24)[::2], [row.repeat_interleave(2)[::2] for row in wide[rank]])
    assert torch.equal(output, expected), "list with gaps"
    buffer = wide[rank].clone()
    dist.reduce_scatter_tensor(buffer[rank], buffer.view(-1))
    assert torch.equal(buffer[rank], expected), "in place"

    own, everything = wide[rank][0], torch.stack([rows[0] for rows in wide])
    dist.all_gather_into_tensor(output := torch.zeros(24 * size)[::2], own)
    assert torch.equal(output, everything.view(-1)), "output with gaps"
    dist.all_gather_into_tensor(output := torch.zeros(12 * size), own.repeat_interleave(2)[::2])
    assert torch.equal(output, everything.view(-1)), "input with gaps"
    dist.all_gather_into_tensor(output := torch.zeros(6 * size, 2), own.view(2, 6).t())
    assert torch.equal(output, torch.cat([row.view(2, 6).t() for row in everything])), "transposed input"
    output = torch.zeros(size, 12)
    output[rank] = own
    dist.all_gather_into_tensor(output.view(-1), output[rank])
    assert torch.equal(output, everything), "in place"
    dist.all_gather(list(output.zero_()), own)
    assert torch.equal(output, everything), "list of views of one tensor"
    with torch.no_grad():
        dist.all_gather_into_tensor(output := torch.zeros(12 * size), own.clone().requires_grad_())
    assert torch.equal(output, everything.view(-1)), "input with a gradient"


# Functional forms, as compilers call them ---------------------------------------------------------


@ranks.check
def test_functional_forms(rank: int, size: int) -> None:
    from torch.distributed import _functional_collectives as functional

    tested, reference = groups()
    for dtype in (torch.float32, torch.int64, torch.bool):
        for count in (1, 60, 5000):

            def case(group: Any, dtype: Any = dtype, count: int = count) -> Sequence[Tensor]:
                own = [values(rank, count + more, dtype, salt=more) for more in (0, 2)]
                whole = [values(rank, (count + more) * size, dtype, salt=more) for more in (0, 2)]
                forms = [
                    functional.all_reduce(own[0], "max", group),
                    functional.broadcast(own[0], 1, group),
                    functional.all_gather_tensor(own[0], 0, group),
                    functional.reduce_scatter_tensor(whole[0], "max", 0, group),
                    *functional.all_reduce_coalesced(own, "sum", group),
                    *functional.all_gather_into_tensor_coalesced(own, group),
                    *functional.reduce_scatter_tensor_coalesced(whole, "sum", [0, 0], group),
                ]
                return [functional.wait_tensor(form) for form in forms]

            assert check_same(f"{count} {dtype}", case, tested, reference).error is None
    assert counted(tested) > 0


# What gloo keeps ----------------------------------------------------------------------------------


def handed_to_gloo() -> dict[str, Case]:
    def send_and_receive(group: Any) -> Sequence[Tensor]:
        rank, size = group.rank(), group.size()
        work = dist.isend(values(rank, 70), (rank + 1) % size, group=group, tag=3)
        dist.recv(received := torch.empty(70), (rank - 1) % size, group=group, tag=3)
        work.wait()
        return [received]

    def batch(group: Any) -> Sequence[Tensor]:
        rank, size = group.rank(), group.size()
        received = torch.empty(70)
        operations = [
            dist.P2POp(dist.isend, values(rank, 70), (rank + 1) % size, group=group),
            dist.P2POp(dist.irecv, received, (rank - 1) % size, group=group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return [received]

    def objects(group: Any) -> Sequence[Tensor]:
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, {"rank": group.rank()}, group=group)
        sent = [group.rank(), "text"]
        dist.broadcast_object_list(sent, 1, group=group)
        return [torch.tensor([entry["rank"] for entry in gathered]), torch.tensor(sent[0])]

    def sparse(group: Any) -> Sequence[Tensor]:
        tensor = torch.sparse_coo_tensor(torch.tensor([[group.rank(), 3]]), torch.tensor([1.0, 2.0]), (5,))
        dist.all_reduce(tensor, group=group)
        return [tensor.to_dense()]

    def barrier(group: Any) -> Sequence[Tensor]:
        dist.barrier(group)
        return []

    known = (send_and_receive, batch, sparse)
    return {case.__name__: case for case in (*known, objects, barrier)}


@ranks.check
def test_what_gloo_keeps(rank: int, size: int) -> None:
    tested, reference = groups()
    for name, case in handed_to_gloo().items():
        before = counted(tested)
        assert check_same(name, case, tested, reference).error is None, name
        assert name == "objects" or counted(tested) == before, f"{name} is gloo's"


# Mistakes -----------------------------------------------------------------------------------------


def mistakes() -> dict[str, Case]:
    """Calls with wrong arguments on every rank, which must be refused before anything is sent."""

    def call(function: Callable[..., Any], *arguments: Callable[[Any], Any], **named: Any) -> Case:
        def case(group: Any) -> Sequence[Tensor]:
            function(*(argument(group) for argument in arguments), group=group, **named)
            return []

        return case

    def zeros(count: int, dtype: Any = torch.float32) -> Callable[[Any], Tensor]:
        return lambda group: torch.zeros(count, dtype=dtype)

    def lists(count: int, more: int = 0, dtype: Any = torch.float32) -> Callable[[Any], list[Tensor]]:
        return lambda group: [torch.zeros(count, dtype=dtype) for _ in range(group.size() + more)]

    double = torch.float64
    return {
        "broadcast from 7": call(dist.broadcast, zeros(3), lambda group: 7),
        "broadcast from -1": call(dist.broadcast, zeros(3), lambda group: -1),
        "broadcast from 5 of the group": call(dist.broadcast, zeros(3), group_src=5),
        "reduce to 9": call(dist.reduce, zeros(3), lambda group: 9),
        "allreduce of a list": call(dist.all_reduce, lists(3)),
        "allreduce by nothing": call(dist.all_reduce, zeros(3), op=None),
        "coalesced nothing": call(dist.all_reduce_coalesced, lambda group: []),
        "coalesced types": call(
            dist.all_reduce_coalesced, lambda group: [torch.zeros(3), torch.zeros(3, dtype=double)]
        ),
        "gather too few": call(dist.all_gather, lists(2, -1), zeros(2)),
        "gather too many": call(dist.all_gather, lists(2, 1), zeros(2)),
        "gather longer ones": call(dist.all_gather, lists(3), zeros(2)),
        "gather another type": call(dist.all_gather, lists(2, 0, double), zeros(2)),
        "gather unequal ones": call(
            dist.all_gather,
            lambda group: [torch.zeros(other + 1) for other in range(group.size())],
            lambda group: torch.zeros(group.rank() + 1),
        ),
        "gather into too little": call(dist.all_gather_into_tensor, zeros(5), zeros(2)),
        "gather into another type": call(dist.all_gather_into_tensor, zeros(6, double), zeros(2)),
        "scatter too little": call(dist.reduce_scatter_tensor, zeros(2), zeros(5)),
        "scatter too much": call(dist.reduce_scatter_tensor, zeros(2), zeros(7)),
        "scatter another type": call(dist.reduce_scatter_tensor, zeros(2, double), zeros(6)),
        "scatter too few": call(dist.reduce_scatter, zeros(2), lists(2, -1)),
        "scatter longer ones": call(dist.reduce_scatter, zeros(2), lists(3)),
        "scatter a list of another type": call(dist.reduce_scatter, zeros(2), lists(2, 0, double)),
        "sparse maximum": call(
            dist.all_reduce,
            lambda group: torch.sparse_coo_tensor([[0, 3]], [1.0, 2.0], (5,)),
            op=dist.ReduceOp.MAX,
        ),
    }


@ranks.check
def test_mistakes_are_refused_and_forgiven(rank: int, size: int) -> None:
    # Both made anew: torch refuses some mistakes differently on the default group.
    tested, reference = dist.new_group(backend="synth"), dist.new_group(backend="gloo")
    for name, case in mistakes().items():
        assert check_same(name, case, tested, reference).error is not None, f"gloo accepts: {name}"
        check_same(f"after {name}", reducing("all_reduce", "SUM", torch.float32, 9, 1), tested, reference)


@ranks.check
def test_calls_that_gloo_does_not_survive(rank: int, size: int) -> None:
    """Calls on which gloo fails or crashes and NCCL does not: right, or refused."""
    tested = dist.group.WORLD
    everything = torch.stack([values(other, 6) for other in range(size)])

    def stacked(group: Any) -> Sequence[Tensor]:
        dist.all_gather_into_tensor(output := torch.zeros(size, 6), values(rank, 6))
        return [output]

    def scalar(group: Any) -> Sequence[Tensor]:
        dist.reduce_scatter_tensor(output := torch.tensor(0.0), values(rank, size))
        return [output]

    def small_integers(group: Any) -> Sequence[Tensor]:
        dist.all_reduce(output := values(rank, 9).to(torch.int16))
        return [output]

    for case, expected in (
        (stacked, everything),
        (scalar, everything[:, rank].sum()),
        (small_integers, sum(values(other, 9) for other in range(size)).to(torch.int16)),
    ):
        got = outcome(case, tested)
        if got.error is None:
            assert_equal(got.tensors, [expected], case.__name__)
        else:
            assert issubclass(got.error, RuntimeError | ValueError), case.__name__
    dist.all_reduce(torch.ones(3))
