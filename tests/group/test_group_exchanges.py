"""Alltoalls of the group "synth": for every pair a block of another size, at each call others."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from arborcast.backends import Options
from arborcast.backends.errors import DisagreementError
from arborcast.backends.schedules.exchange import PAIRWISE, PLANNED, Exchanges, pairwise
from arborcast.backends.schedules.group_fabric import without_links
from arborcast.synth.simulation.pieces import ONE_HOST
from arborcast.topologies import load
from tests.support.group_cases import DTYPES, check_same, counted, values
from tests.support.interpreter import Freedom, interpret
from tests.support.ranks import StandingRanks

SIZE = 4
SLOW = "ring:4,bandwidth=0.0001"
"""On links of 100 kB/s a plan pays from kilobytes on: what is two links away goes both ways round."""

QUICK = {"TORCH_FR_BUFFER_SIZE": "500", "ARBORCAST_START": "at once", "NUMBA_DISABLE_JIT": "1"}
"""All calls are kept, sizes are told by schedules that are there at once, and no rank compiles anything."""

Matrix = list[list[int]]

ranks = StandingRanks(SIZE, environ=QUICK)


def new_group(**options: Any) -> Any:
    """A group of all ranks, told more than they are."""
    told: Any = Options(**options)
    return dist.new_group(pg_options=told)


def matrices(seed: int) -> dict[str, Matrix]:
    """Rows from each rank to each."""
    draw = random.Random(seed)
    none = [[0] * SIZE for _ in range(SIZE)]
    hot, own, pair = ([row[:] for row in none] for _ in range(3))
    for rank in range(SIZE):
        hot[rank][2], own[rank][rank] = 300 + rank, 5
    pair[0][2] = 900
    return {
        "any": [[draw.randrange(60) for _ in range(SIZE)] for _ in range(SIZE)],
        "some": [[draw.choice([0, 0, 1, 400]) for _ in range(SIZE)] for _ in range(SIZE)],
        "hot": hot,
        "own": own,
        "pair": pair,
        "none": none,
    }


def block(source: int, target: int, rows: int, dtype: Any = torch.float32) -> Tensor:
    return values(source, rows * 3, dtype, salt=target).view(rows, 3)


def blocks(rank: int, sizes: Matrix, dtype: Any = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """What a rank has for each, and what it must get of each."""
    given = [block(rank, other, sizes[rank][other], dtype) for other in range(SIZE)]
    return given, [block(other, rank, sizes[other][rank], dtype) for other in range(SIZE)]


def rows_of(tensors: Sequence[Tensor]) -> list[int]:
    return [len(tensor) for tensor in tensors]


def exchange(
    rank: int, sizes: Matrix, dtype: Any = torch.float32, **named: Any
) -> tuple[Tensor, Tensor, Any]:
    """What came, what should have come, and the work."""
    given, wanted = blocks(rank, sizes, dtype)
    output = torch.zeros(sum(rows_of(wanted)), 3, dtype=dtype)
    work = dist.all_to_all_single(output, torch.cat(given), rows_of(wanted), rows_of(given), **named)
    return output, torch.cat(wanted), work


def check_forms(rank: int, group: Any) -> None:
    for dtype in DTYPES.values():
        output, wanted, _ = exchange(rank, matrices(1)["any"], dtype, group=group)
        assert torch.equal(output, wanted), dtype
    for name, sizes in matrices(2).items():
        output, wanted, _ = exchange(rank, sizes, group=group)
        assert torch.equal(output, wanted), name
        given, expected = blocks(rank, sizes)
        outputs = [torch.zeros_like(tensor) for tensor in expected]
        dist.all_to_all(outputs, given, group=group)
        assert all(map(torch.equal, outputs, expected)), name
    flying = [exchange(rank, matrices(seed)["some"], group=group, async_op=True) for seed in range(8)]
    for output, wanted, work in reversed(flying):
        assert work.get_future().wait() is not None
        assert torch.equal(output, wanted)
    # Columns of what lies in memory otherwise; splits on one side alone.
    wide, target = values(rank, 8 * 6).view(6, 8).t(), torch.zeros(6, 8).t()
    dist.all_to_all_single(target, wide, None, [2] * SIZE, group=group)
    for other in range(SIZE):
        assert torch.equal(target[2 * other :][:2], values(other, 48).view(6, 8).t()[2 * rank :][:2])


def check_beside_gloo(rank: int, group: Any, reference: Any) -> None:
    def even(group: Any) -> Sequence[Tensor]:
        dist.all_to_all_single(output := torch.empty(60), values(rank, 60), group=group)
        return [output]

    def uneven(group: Any) -> Sequence[Tensor]:
        given, wanted = blocks(rank, matrices(3)["any"])
        output = torch.empty(sum(rows_of(wanted)), 3)
        dist.all_to_all_single(output, torch.cat(given), rows_of(wanted), rows_of(given), group=group)
        return [output]

    def unequal(group: Any) -> Sequence[Tensor]:
        dist.all_to_all_single(torch.empty(4), torch.ones(4), [3], [4], group=group)
        return []

    def wrong_sum(group: Any) -> Sequence[Tensor]:
        dist.all_to_all_single(torch.empty(4), torch.ones(4), [1] * 4, [2] * 4, group=group)
        return []

    def other_type(group: Any) -> Sequence[Tensor]:
        dist.all_to_all_single(torch.empty(4), torch.ones(4, dtype=torch.float64), group=group)
        return []

    for case in (even, uneven, unequal, wrong_sum, other_type):
        check_same(case.__name__, case, group, reference)


def all_forms(rank: int, size: int, fabric: str, gloo_below: int) -> tuple[list[str], int, str]:
    group = new_group(topology=fabric, gloo_below=gloo_below)
    check_beside_gloo(rank, group, dist.new_group(backend="gloo"))
    check_forms(rank, group)
    served = {call["schedule"] for call in _calls(group) if call["collective"] == "alltoall"}
    return (
        sorted(served & {str(PAIRWISE), str(PLANNED)}),
        counted(group, "gloo", "alltoall"),
        group.explain(99, "alltoall"),
    )


def _calls(group: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = group._communicator.history.as_document()["calls"]
    return found


@pytest.mark.parametrize(
    ("fabric", "gloo_below", "served"),
    [("full:4", 0, ["pairwise"]), (SLOW, 0, [str(PAIRWISE), str(PLANNED)]), ("full:4", 1 << 30, [])],
)
def test_all_forms_and_types(fabric: str, gloo_below: int, served: list[str]) -> None:
    for found, by_gloo, said in ranks(all_forms, fabric, gloo_below):
        assert found == served
        assert ("pairwise" if served else "gloo, which serves below 1 GiB") in said
        assert bool(by_gloo) == (not served)


def disagreeing(rank: int, size: int) -> str:
    """Rank 1 sends rank 3 a row more than that expects; then all is well; then rank 2 has another type."""
    group = new_group(topology="full:4")  # whose timeout is longer than that of the test: nobody waits for it
    sent, expected = [2] * size, [2] * size
    sent[3] += rank == 1
    says = rf"^rank {rank}: alltoall \(float32\): rank 1 sends 12 bytes to rank 3, which expects 8$"
    with pytest.raises(DisagreementError, match=says):
        dist.all_to_all_single(torch.empty(sum(expected)), torch.ones(sum(sent)), expected, sent, group=group)
    output, wanted, _ = exchange(rank, matrices(5)["any"], group=group)
    assert torch.equal(output, wanted)
    dist.barrier()  # the group would end a peer's exchange that still runs
    with pytest.raises(RuntimeError, match="alltoall") as caught:
        exchange(rank, matrices(5)["any"], torch.int32 if rank == 2 else torch.float32, group=group)
    return str(caught.value)


def test_ranks_that_know_all_sizes_disagree_and_may_go_on() -> None:
    assert any("float32" in said and "int32" in said for said in ranks(disagreeing))


def disagreeing_in_pairs(rank: int, size: int, case: str, words: str) -> None:
    """Each of two calls may raise: one to which rank 1 brings something else, and an allreduce."""
    group = dist.new_group()
    sent, expected = [2] * size, [2] * size
    match case:
        case "more":
            sent[3] += rank == 1
        case "nothing":
            sent[3] *= rank != 1
        case "expects":
            expected[3] += rank == 1
    dtype = torch.int32 if case == "type" and rank == 1 else torch.float32
    given, output = torch.ones(sum(sent), dtype=dtype), torch.empty(sum(expected), dtype=dtype)
    said = []
    for call in (
        lambda: dist.all_to_all_single(output, given, expected, sent, group=group),
        lambda: dist.all_reduce(torch.ones(3), group=group),
    ):
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    assert said and all(re.search(words, it) for it in said)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("more", "rank 1 sends 12 bytes to rank 3, which expects 8"),
        ("nothing", "rank 1 sends 0 bytes to rank 3, which expects 8"),
        ("expects", "rank 3 sends 8 bytes to rank 1, which expects 12"),
        ("type", r"alltoall \((float|int)32\) here, but alltoall \((float|int)32\) on rank"),
    ],
)
def test_two_ranks_that_disagree_end_the_group_at_once(case: str, words: str) -> None:
    ranks(disagreeing_in_pairs, case, words)


def avoiding(rank: int, size: int, fabric: str | None) -> tuple[bool, list[int]]:
    """Whether all came, and with whom this rank is connected, where 0 and 2 have no link."""
    group = new_group(topology=fabric, without=[(0, 2)])
    output, wanted, _ = exchange(rank, matrices(5)["any"], group=group)
    return torch.equal(output, wanted), sorted(group._communicator.member.network.channels)


@pytest.mark.parametrize("fabric", ["full:4", None])
def test_no_block_goes_by_a_link_that_is_left_out(fabric: str | None) -> None:
    assert ranks(avoiding, fabric) == [(True, peers) for peers in ([1, 3], [0, 2, 3], [1, 3], [0, 1, 2])]


def test_without_another_way_a_link_is_tried_again() -> None:
    sizes = tuple(tuple(8 for _ in range(4)) for _ in range(4))
    for without, gone, served in (
        ([(0, 2)], [(0, 2)], PLANNED),
        ([(0, 1), (0, 2), (0, 3)], [(0, 2)], PAIRWISE),
    ):
        fabric = without_links(load("full:4"), without)
        found = [Exchanges(fabric, rank, ONE_HOST, is_known=False, gone=gone).of(sizes) for rank in range(4)]
        assert {it.served for it in found} == {served}


def test_pairwise_programs_move_every_byte() -> None:
    """Whatever may be reordered, and where sends wait for their receives."""
    for sizes in matrices(7).values():
        rows = tuple(map(tuple, sizes))
        columns = tuple(zip(*rows, strict=True))
        programs = [pairwise(rows[rank], columns[rank], rank) for rank in range(SIZE)]
        inputs = [
            torch.cat([block(i, j, sizes[i][j])[:, 0] for j in range(SIZE)]).numpy() for i in range(SIZE)
        ]
        for freedom in Freedom:
            outputs = interpret(programs, inputs, freedom=freedom, seed=3)
            for rank, output in enumerate(outputs):
                wanted = torch.cat([block(i, rank, sizes[i][rank])[:, 0] for i in range(SIZE)])
                assert output.tolist() == wanted.tolist()


def test_what_pays_is_planned() -> None:
    """Between ranks two links apart a plan takes both ways, in half the time; a switch has one way."""
    far = tuple(tuple(1 << 24 if (i, j) == (0, 2) else 0 for j in range(4)) for i in range(4))
    for spec, served in (
        ("ring:4,bandwidth=1", PLANNED),
        ("ring:4,bandwidth=100", PAIRWISE),
        ("star:4", PAIRWISE),
    ):
        found = [Exchanges(load(spec), rank, ONE_HOST, is_known=True).of(far) for rank in range(4)]
        assert {it.served for it in found} == {served}, spec
        assert len({it.digest for it in found}) == 1
