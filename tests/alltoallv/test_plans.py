"""Plans of an alltoall of blocks of any sizes: right by replay, as fast as proved, the best by an LP."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.backends.lowering.lower import lower
from arborcast.synth.alltoallv.block_plan import ExchangePlan, pieces_of
from arborcast.synth.alltoallv.block_planner import AlltoallvPlanner
from arborcast.synth.alltoallv.rounds import decompose
from arborcast.synth.certificate import Cut
from arborcast.synth.certification import certified_rate
from arborcast.synth.collective import Collective
from arborcast.synth.errors import CollectiveError, InfeasibleError
from arborcast.synth.formats.schedules import schedule_from_document, schedule_to_document
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.topology import Link, Topology
from arborcast.synth.verification.verifier import verify
from tests.fuzzing.exact_lp import Program
from tests.support import strategies
from tests.support.interpreter import Freedom, interpret

Sizes = list[list[int]]


@st.composite
def matrices(draw: st.DrawFn, ranks: int) -> Sizes:
    """Any sizes, one hot expert, Zipf's law in another order on each rank, or one pair alone."""
    match draw(st.sampled_from(["any", "hot", "zipf", "pair"])):
        case "any":
            size = st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 1 << 30))
            found = [draw(st.lists(size, min_size=ranks, max_size=ranks)) for _ in range(ranks)]
        case "hot":
            hot = draw(st.integers(0, ranks - 1))
            found = [[1000 if target == hot else 10 for target in range(ranks)] for _ in range(ranks)]
        case "zipf":
            shares = [5040 // (place + 1) for place in range(ranks)]
            found = [list(draw(st.permutations(shares))) for _ in range(ranks)]
        case _:
            found = [[0] * ranks for _ in range(ranks)]
    source = draw(st.integers(0, ranks - 1))
    found[source][(source + draw(st.integers(1, ranks - 1))) % ranks] += 77
    return found


@st.composite
def questions(draw: st.DrawFn, max_ranks: int = 5) -> tuple[Topology, Sizes]:
    """A fabric of any kind, and what its ranks have for each other."""
    topology = draw(strategies.topologies(max_ranks=max_ranks, symmetric=draw(st.booleans())))
    return topology, draw(matrices(topology.ranks))


def best_time(topology: Topology, sizes: Sizes) -> Fraction:
    """Bytes per GB/s of the fastest flows, by an exact linear program with a flow for each target."""
    program = Program()
    for link in topology.links:
        through = {(target, link): 1 for target in range(topology.ranks)}
        program.at_most(through, link.bandwidth)
    for target in range(topology.ranks):
        for vertex in range(topology.size):
            if vertex == target:
                continue
            row: dict[object, Fraction | int] = {}
            for link in topology.links:
                if vertex in (link.src, link.dst):
                    row[target, link] = 1 if link.src == vertex else -1
            row["speed"] = -sizes[vertex][target] if vertex < topology.ranks else 0
            program.equal(row)
    return 1 / program.maximum("speed")


def check(plan: ExchangePlan) -> None:
    """What holds of every plan: its schedule is right, its rate is recounted, its proof is."""
    schedule = plan.schedule()
    verdict = verify(schedule)
    assert verdict.correct, verdict.errors
    assert verdict.rate == schedule.rate == plan.rate
    assert certified_rate(plan.topology, plan.collective, plan.bound.certificate) == plan.bound.rate
    assert plan.rate <= plan.bound.rate
    assert schedule.is_optimal == (plan.gap == 0)


@pytest.mark.few(8)
@settings(max_examples=60)
@given(questions())
def test_plans_are_the_best_that_a_linear_program_finds(question: tuple[Topology, Sizes]):
    topology, sizes = question
    plan = AlltoallvPlanner(topology).plan(sizes)
    check(plan)
    best = best_time(topology, sizes)
    assert plan.time_us * 1000 >= best
    assert plan.gap < Fraction(1, 10**6), "what the program's flows lose by rounding"
    if plan.gap == 0:
        assert plan.time_us * 1000 == best


@settings(max_examples=30)
@given(questions(max_ranks=6))
def test_plans_without_a_program_say_what_is_missing(question: tuple[Topology, Sizes]):
    topology, sizes = question
    plan = AlltoallvPlanner(topology, largest_program=0).plan(sizes)
    check(plan)
    best = best_time(topology, sizes)
    limit = Fraction(plan.collective.total, topology.ranks) / plan.bound.rate
    assert limit <= best <= plan.time_us * 1000


@pytest.mark.parametrize("spec", ["dgx1", "dgx-a100", "dgx-a100:boxes=2", "mi250"])
def test_one_planner_serves_many_steps(spec: str):
    topology = topologies.load(spec)
    planner, draw = AlltoallvPlanner(topology), np.random.default_rng(3)
    for hot in range(3):
        sizes = draw.integers(0, 1 << 20, (topology.ranks, topology.ranks))
        sizes[:, hot] *= 8
        plan = planner.plan(sizes.tolist())
        check(plan)
        assert plan.gap == 0
        simulated = simulate(plan.schedule(), plan.collective.mean_bytes)
        assert float(plan.time_us) <= simulated.time_us <= 1.2 * float(plan.time_us)


def test_what_a_hot_box_sends_is_spread_over_its_ports():
    """Rank 0 has 8 times 100 for the ranks of the other box: its port of 25 GB/s is one of eight."""
    sizes = [[100 * (target > 7 and source == 0) for target in range(16)] for source in range(16)]
    plan = AlltoallvPlanner(topologies.load("dgx-a100:boxes=2")).plan(sizes)
    check(plan)
    assert isinstance(plan.bound.certificate, Cut)
    assert plan.time_us * 1000 == Fraction(8 * 100, 8 * 25)
    # In order: to the port that sends on, over the fabric, and inside the other box.
    assert max(len(piece.path) for piece in pieces_of(plan)) > 3


@settings(max_examples=25)
@given(questions(), st.integers(1, 3), st.sampled_from(Freedom), st.integers(1, 4))
def test_programs_move_every_byte(
    question: tuple[Topology, Sizes], scale: int, freedom: Freedom, pieces: int
):
    topology, drawn = question
    sizes = [[min(size, 40) for size in row] for row in drawn]
    plan = AlltoallvPlanner(topology).plan(sizes)
    ranks = range(topology.ranks)
    blocks = [
        [np.arange(scale * sizes[i][j]) + 10_000 * i + 1000 * j for j in ranks] for i in ranks
    ]  # what rank i has for rank j
    count = -(-scale * plan.collective.total // topology.ranks)
    programs = lower(plan.schedule(), count, pieces=pieces)
    inputs = [np.concatenate(row) for row in blocks]
    outputs = interpret(programs, inputs, freedom=freedom, seed=scale)
    for rank, output in enumerate(outputs):
        assert output.tolist() == np.concatenate([row[rank] for row in blocks]).tolist()


def test_relays_forward_and_do_not_take_part():
    square = topologies.load("ring:4")
    planner = AlltoallvPlanner(square, ranks=[0, 2])
    plan = planner.plan([[5, 8], [0, 5]])
    check(plan)
    assert plan.time_us * 1000 == Fraction(8, 2 * int(square.links[0].bandwidth))


def test_rounds_have_no_port_twice():
    """
    3 ports; row 0 has 6 and row 1 has 2 for port 2, column 2 is the longest with 8:

        round 0   0 -> 2   1 -> 0
        ...       and never two senders for port 2
    """
    sizes = np.array([[0, 1, 6], [3, 0, 2], [0, 1, 0]])
    rounds, rows, columns, amounts = (column.tolist() for column in decompose(sizes))
    total = np.zeros_like(sizes)
    np.add.at(total, (rows, columns), amounts)
    assert (total == sizes).all()
    assert max(Counter(zip(rounds, rows, strict=True)).values()) == 1
    assert max(Counter(zip(rounds, columns, strict=True)).values()) == 1
    longest = [max(a for r, a in zip(rounds, amounts, strict=True) if r == turn) for turn in set(rounds)]
    assert sum(longest) == 8


@given(st.integers(2, 9).flatmap(matrices))
def test_rounds_are_as_long_as_the_busiest_port(sizes: Sizes):
    amounts = np.array(sizes, dtype=np.int64)
    np.fill_diagonal(amounts, 0)
    rounds, rows, columns, parts = decompose(amounts)
    total = np.zeros_like(amounts)
    np.add.at(total, (rows, columns), parts)
    assert (total == amounts).all()
    for ends in (rows, columns):
        assert len(set(zip(rounds.tolist(), ends.tolist(), strict=True))) == len(rounds)
    longest = np.zeros(int(rounds.max()) + 1, dtype=np.int64)
    np.maximum.at(longest, rounds, parts)
    busiest = max(amounts.sum(axis=0).max(), amounts.sum(axis=1).max())
    assert busiest <= longest.sum() <= 1.05 * busiest + 2 * len(amounts)


def test_a_schedule_file_keeps_the_sizes():
    plan = AlltoallvPlanner(topologies.load("ring:3")).plan([[0, 7, 0], [1, 0, 2], [0, 0, 0]])
    document = schedule_to_document(plan.schedule())
    read = schedule_from_document(document, "file")
    assert read == plan.schedule()
    assert verify(read).correct


def test_a_forged_certificate_is_found_out():
    plan = AlltoallvPlanner(topologies.load("ring:3")).plan([[0, 7, 0], [1, 0, 2], [0, 0, 0]])
    document = schedule_to_document(plan.schedule())
    document["collective"]["sizes"][0][1] = 8
    assert not verify(schedule_from_document(document, "file")).correct


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([[0, 1]], "sizes: must be 2 rows of 2, got 1 rows, one of 2"),
        ([[0, 1], [1, 2, 3]], "sizes: must be 2 rows of 2, got 2 rows, one of 3"),
        ([[0, -1], [1, 0]], "sizes: must not be negative, got -1 bytes"),
        ([[4, 0], [0, 4]], "sizes: must send something from one rank to another, got 0 bytes"),
        ([[0, 1 << 51], [0, 0]], f"sizes: must not add up to more than {1 << 50} bytes"),
    ],
)
def test_sizes_that_do_not_fit(sizes: Sizes, message: str):
    with pytest.raises(CollectiveError, match=message):
        AlltoallvPlanner(topologies.load("ring:2")).plan(sizes)


@pytest.mark.parametrize("cells", [np.uint8, np.int64, object])
def test_an_array_means_what_its_numbers_mean(cells: type) -> None:
    fabric = topologies.load("full:4")
    numbers = [[10 * row + 50 * column for column in range(4)] for row in range(4)]
    plain, plan = (AlltoallvPlanner(fabric).plan(it) for it in (numbers, np.array(numbers, dtype=cells)))
    assert plan.rate == plain.rate
    assert schedule_to_document(plan.schedule()) == schedule_to_document(plain.schedule())


@pytest.mark.parametrize("cell", [1.5, 1.0, "1", None])
def test_what_is_no_whole_number_is_named(cell: object) -> None:
    planner = AlltoallvPlanner(topologies.load("full:2"))
    for ask in (planner.plan, planner.outlook):
        with pytest.raises(CollectiveError, match=r"^sizes: row 1, column 0 must be a whole number, got "):
            ask([[0, 1], [cell, 0]])  # type: ignore[list-item]
        with pytest.raises(CollectiveError, match=r"^sizes: row 0 must be whole numbers, got 3$"):
            ask([3, 4])  # type: ignore[list-item]
        with pytest.raises(CollectiveError, match=r"^sizes: must be 2 rows of 2, got 3 rows, one of 3$"):
            ask([[1] * 3] * 3)


def test_fabrics_on_which_nothing_can_be_sent() -> None:
    with pytest.raises(CollectiveError, match="at least 2 ranks, got 1"):
        AlltoallvPlanner(Topology.build("one", 1, []))
    with pytest.raises(InfeasibleError, match="there are no links"):
        AlltoallvPlanner(Topology.build("two", 2, []))


def test_who_cannot_be_reached():
    one_way = Topology.build("one-way", 2, [Link(0, 1, Fraction(1))])
    assert AlltoallvPlanner(one_way).plan([[0, 3], [0, 0]]).gap == 0
    with pytest.raises(InfeasibleError, match="rank 1 has something for rank 0 and no way there"):
        AlltoallvPlanner(one_way).plan([[0, 3], [1, 0]])
    links = [Link(a, b, Fraction(1)) for a, b in ((0, 1), (1, 0), (2, 3), (3, 2))]
    islands = AlltoallvPlanner(Topology.build("islands", 4, links))
    assert islands.plan([[0, 3, 0, 0], [1, 0, 0, 0], [0, 0, 0, 9], [0, 0, 0, 0]]).time_us * 1000 == 9
    with pytest.raises(InfeasibleError, match="rank 0 has something for rank 2 and no way there"):
        islands.plan([[0, 3, 1, 0], [0] * 4, [0] * 4, [0] * 4])


def test_blocks_of_one_size_are_a_plain_alltoall():
    topology = topologies.load("dgx1")
    even = Collective.alltoallv(topology, [[5] * 8] * 8)
    assert even.blocks() == Collective.on(topology, "alltoall").blocks()
