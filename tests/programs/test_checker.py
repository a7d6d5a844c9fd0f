"""The checker of programs of steps and of puts: what is right, each thing that may be wrong, and mutants."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from arborcast.backends.programs.checking.check import check_program
from arborcast.backends.programs.exporting.export import export_program
from arborcast.backends.programs.exporting.one_sided import export_one_sided
from arborcast.backends.programs.mscclpp.writer import KINDS
from arborcast.backends.programs.program import GlobalProgram, ProgramError
from arborcast.synth import solve
from arborcast.synth.collective import TREE_KINDS, Kind
from arborcast.synth.nccl_protocol import Protocol
from arborcast.topologies import load
from tests.programs.drawn import drawn
from tests.support.program_mutants import interpret_all, judge, mutants

PAIR = """
    0>1: s i0 !
    0<1: r i0 @0.0
    1<0: rrc i0 i0 !
    1>0: s i0 @0.0
"""
RING = """
    0>1<2: s i0; rrs i2; rrcs i1 i1; rcs i0; r i2
    1>2<0: s i1; rrs i0; rrcs i2 i2; rcs i1; r i0
    2>0<1: s i2; rrs i1; rrcs i0 i0; rcs i2; r i1
"""
TWO_INPUTS = """
    0<1: rrc i0 i0 !
    0<2: rrc i0 i0 {after} !
    1>0: s i0
    2>0: s i0
"""


# Each rank tells the other that its call has begun, then puts its block there.
EXCHANGE = """
0: rsig 1; rwait 1; nop; cpy i0 -> o0; put i0 -> o0@1; nop; sig 1; wait 1
1: rsig 0; rwait 0; nop; cpy i0 -> o1; put i0 -> o1@0; nop; sig 0; wait 0
"""

SUMS = """
0: rsig 1; rwait 1; nop; put i1 -> s0@1; nop; sig 1; wait 1; nop; add i0 + s0 -> o0
1: rsig 0; rwait 0; nop; put i0 -> s0@0; nop; sig 0; wait 0; nop; add i1 + s0 -> o0
"""

PACKETS = """
0: cpy i0 -> o0; put i0 -> s0p@1; nop; cpy s1p -> o1
1: cpy i0 -> o1; put i0 -> s1p@0; nop; cpy s0p -> o0
"""

PROXIES = """
0: sig 1; wait 1; nop; proxy i0 -> o0@1; psig 1; cpy i0 -> o0; pwait 1; flush 1
1: sig 0; wait 0; nop; proxy i0 -> o1@0; psig 0; cpy i0 -> o1; pwait 0; flush 0
"""


BLOCKS = """
0: cpy i0 -> s0; nop; give 0
0: rsig 1; rwait 1; take 0; nop; put s0 -> o0@1; cpy i0 -> o0; nop; sig 1; wait 1
1: cpy i0 -> s0; nop; barrier 0/2
1: rsig 0; rwait 0; barrier 0/2; put s0 -> o1@0; cpy i0 -> o1; nop; sig 0; wait 0
"""
"""One block copies, the other puts what was copied: a semaphore, then a barrier."""


def gathered(text: str, **told: Any) -> GlobalProgram:
    return drawn(text, Kind.ALLGATHER, chunks=2, in_place=False, **told)


@pytest.mark.parametrize(
    "program",
    [
        drawn(PAIR),
        drawn(RING, chunks=3),
        drawn(TWO_INPUTS.format(after="@0.0"), Kind.REDUCE, root=0),
        drawn(
            "0>1: s i0:2\n0: cpy i0:2 o0:2\n0<1: r o2:2\n1>0: s i0:2\n1: cpy i0:2 o2:2\n1<0: r o0:2",
            Kind.ALLGATHER, chunks=4, in_place=False,
        ),
        drawn("0>1: s i0:2\n0<1: r o2:2\n1>0: s i0:2\n1<0: r o0:2", Kind.ALLGATHER, chunks=4),
        drawn(
            "0>1: s i1\n0: cpy i0 o0\n0<1: r o1\n1>0: s i0\n1<0: r o0\n1: cpy i1 o1",
            Kind.ALLTOALL, chunks=2, in_place=False,
        ),
        drawn("1>0: s i0\n0<1: r i0", Kind.BROADCAST, root=1),
        drawn("0>1: s i1\n0<1: rrc i0 o0\n1>0: s i0\n1<0: rrc i1 o0", Kind.REDUCE_SCATTER, chunks=2),
    ],
    ids=lambda program: str(program.kind),
)  # fmt: skip
@pytest.mark.parametrize("protocol", list(Protocol))
def test_right_steps_pass(program: GlobalProgram, protocol: Protocol) -> None:
    check_right(replace(program, protocol=protocol))


@pytest.mark.parametrize(
    "program",
    [
        gathered(EXCHANGE),
        drawn(SUMS, Kind.REDUCE_SCATTER, chunks=2, in_place=False, scratch=1),
        gathered(PACKETS, protocol=Protocol.LL, scratch=2, double_scratch=True),
        gathered(PROXIES),
        gathered(BLOCKS, scratch=1, semaphores=(0,)),
    ],
    ids=["exchange", "sums", "packets", "proxies", "blocks"],
)
def test_right_puts_pass(program: GlobalProgram) -> None:
    check_right(program)


def check_right(program: GlobalProgram) -> None:
    assert check_program(program).errors == ()
    assert interpret_all(program, range(10)).correct


LATE = "1>0: s i0 @0.0"
IN_TWO = {"chunks": 2}
SEPARATE = {"in_place": False}
WRONG = {
    # Without its dependency rank 1 sends what it may not have added to yet.
    "race": (PAIR.replace(LATE, "1>0: s i0"), {}, "race", "nothing orders rank 1 block 0 step 0"),
    "nobody posts": (PAIR.replace("rrc i0 i0 !", "rrc i0 i0"), {}, "deadlock", "none from there on posts"),
    "not added": (PAIR.replace("rrc i0 i0", "r i0"), {}, "value", "is chunk 0 of rank 0"),
    "added twice": (
        "0>1: s i0; s i0 !\n0<1: r i0 @0.1\n1<0: rrc i0 i0; rrc i0 i0 !\n1>0: s i0 @0.1",
        {},
        "value",
        "which overlap",
    ),
    "never received": (
        "0>1: s i0; s i0 !\n0<1: r i0 @0.1\n1<0: rrc i0 i0 !\n1>0: s i0 @0.0",
        {},
        "message",
        "2 messages sent, 1 received; unmatched from rank 0 block 0 step 1 (s i0) on",
    ),
    "of two lengths": (
        "0>1: s i0:2 !\n0<1: r i0:2 @0.0\n1<0: rrc i0 i0; rrc i1 i1 !\n1>0: s i0:2 @0.1",
        IN_TWO,
        "message",
        "is sent as 2 chunks",
    ),
    "beyond the buffer": (PAIR.replace(LATE, "1>0: s i1"), {}, "buffer", "i has 1 chunks in a call"),
    "one FIFO for two": (
        "0>1: s i0\n0>1: s i0\n1<0: r i0; r i0",
        {},
        "shared",
        "2 blocks send to rank 1 on channel 0",
    ),
    "both wait": (
        "0>1<1: r i0; s i0\n1>0<0: r i0; s i0",
        {},
        "deadlock",
        "of rank 1 on channel 0; rank 1 block 0 step 0 (r i0) waits for a message of rank 0 on",
    ),
    "no such block": ("0>1: s i0 @7.0\n1<0: r i0", {}, "deadlock", "block 7, which does not exist"),
    "writes input": (
        "0>1: s i0\n0<1: r i0\n1<0: rrc i0 o0 !\n1>0: s o0 @0.0\n0: cpy i0 o0",
        SEPARATE,
        "race",
        "both touch i0 of rank 0",
    ),
    "channel too high": ("0>1#32: s i0\n1<0#32: r i0", {}, "limit", "channel 32, there are 0 to 31"),
    "never chosen": (PAIR, {"in_place": False, "out_of_place": False}, "fault", "it is never chosen"),
    "overlaps itself": ("0: cpy i0:2 i1:2\n1: cpy i0 i0", {"chunks": 3}, "race", "reads what it writes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_steps_are_told_apart(name: str) -> None:
    text, details, kind, message = WRONG[name]
    verdict = check_program(drawn(text, **details))  # type: ignore[arg-type]
    assert kind in verdict.kinds
    assert any(message in error for error in verdict.errors), verdict.errors


WRONG_PUTS = [
    # text replaced, by what, kind of the objection, words of it
    (EXCHANGE, "; sig 1", "", "deadlock", "waits for a signal of rank 0 on memory channel 0, and nobody"),
    (
        EXCHANGE,
        "put i0 -> o0@1; nop; sig 1",
        "sig 1; put i0 -> o0@1; nop",
        "call",
        "caller of rank 1 after its",
    ),
    (EXCHANGE, "o0@1; nop; sig", "o0@1; sig", "call", "caller of rank 1 after its call"),
    (EXCHANGE, "rsig 1; rwait 1; nop; cpy", "cpy", "message", "1 signals, 2 waits"),
    (
        EXCHANGE,
        "put i0 -> o0@1",
        "put i0 -> o1@1",
        "value",
        "o0 must be chunk 0 of rank 0, is nothing defined",
    ),
    (EXCHANGE, "put i0 -> o0@1", "put i0 -> o2@1", "buffer", "o has 2 chunks in a call"),
    (EXCHANGE, "sig 1; wait 1", "rsig 1; wait 1", "relaxed", "relaxed ones order no memory"),
    (PROXIES, "; flush 1", "", "call", "by its proxy and the caller of rank 0 after its call"),
    (PROXIES, "nop; proxy i0 -> o0@1", "proxy i0 -> o1@1", "race", "nothing orders"),
]


@pytest.mark.parametrize(("text", "old", "new", "kind", "message"), WRONG_PUTS)
def test_wrong_puts_are_told_apart(text: str, old: str, new: str, kind: str, message: str) -> None:
    assert old in text
    verdict = check_program(gathered(text.replace(old, new, 1)))
    assert kind in verdict.kinds
    assert any(message in error for error in verdict.errors), verdict.errors
    assert verdict.trace or kind in {"buffer", "message", "value"}


def test_who_signals_later_than_the_other_waits_for_nobody_s_harm() -> None:
    assert check_program(gathered(EXCHANGE.replace("sig 1; wait 1", "wait 1; sig 1", 1))).correct


def exchange(messages: int) -> str:
    """Two ranks that both send so many messages before they receive."""
    sends = "; ".join(f"s i{at}" for at in range(messages))
    receives = sends.replace("s i", "r o")
    return f"0>1<1: {sends}; {receives}\n1>0<0: {sends}; {receives}"


@pytest.mark.parametrize(("protocol", "depth"), [(Protocol.SIMPLE, 2), (Protocol.LL, 8), (Protocol.LL128, 8)])
def test_a_fifo_holds_so_many_messages_and_no_more(protocol: Protocol, depth: int) -> None:
    for messages, hangs in ((depth, False), (depth + 1, True)):
        program = drawn(
            exchange(messages), Kind.ALLTOALL, chunks=20, in_place=False, out_of_place=True, protocol=protocol
        )  # fmt: skip
        verdict = check_program(program)
        assert ("deadlock" in verdict.kinds) is hangs
        assert (interpret_all(program, range(3)).hangs is not None) is hangs
    assert verdict.circle
    assert [(wait.rank, wait.block) for wait in verdict.trace] == [(0, 0), (1, 0)]
    assert f"which holds {depth} messages" in verdict.trace[0].text


def test_chunks_of_a_step_share_a_message_where_the_largest_size_allows() -> None:
    text = "0>1<1: s i0:8 !; r s0:8\n0: re s0:8 i0:8 @0.1\n1>0<0: s i0:8 !; r s0:8\n1: re s0:8 i0:8 @0.1"
    text = text.replace("r s0:8", "r s0:8 !")
    small = drawn(text, chunks=8, scratch=8, most_bytes=1 << 20)
    assert check_program(small).correct
    verdict = check_program(replace(small, most_bytes=None))
    # Two messages of four chunks still fit: 2 MiB for four chunks of eight are 4 MiB.
    assert "hangs above 4194304 bytes, where less than 4 chunks fit a message" in verdict.errors[0]


def test_what_comes_round_piece_by_piece_overtakes_nothing_but_other_chunks() -> None:
    # Rank 0 sends chunks 0 and 1, which come back through rank 1 while it may still be reading the second.
    right = "0>1: s i0:2\n0<1: r i0:2\n1>0<0: rcs i0:2"
    assert "race" not in check_program(drawn(right, Kind.BROADCAST, chunks=2, root=0)).kinds
    shifted = right.replace("0<1: r i0:2", "0<1: r i1:2")
    assert "race" in check_program(drawn(shifted, Kind.BROADCAST, chunks=3, root=0)).kinds


def test_adding_steps_of_ll_read_before_their_message_comes() -> None:
    # Rank 0 writes i0 and sends it on; that rank 1's answer comes later orders nothing for LL.
    text = "0<1: r i0 !\n0>1: s i0 @0.0\n0<1#1: rrc i0 i0\n1>0: s i0\n1<0: r s0 !\n1>0#1: s i0 @1.0"
    simple = drawn(text, Kind.BROADCAST, root=1, scratch=1)
    assert "race" not in check_program(simple).kinds
    assert "race" in check_program(replace(simple, protocol=Protocol.LL)).kinds


def test_steps_of_ll_pass_on_before_they_write() -> None:
    # Rank 1 writes what it passes on; that its message comes back tells so with Simple alone.
    text = "0>1: s i0\n1>0<0: rcs i0\n0<1: r s0 !\n0>1#1: s s0 @1.0\n1<0#1: r s0; cpy i0 s1"
    simple = drawn(text, Kind.BROADCAST, root=0, scratch=2)
    assert check_program(simple).correct
    assert check_program(replace(simple, protocol=Protocol.LL)).kinds == {"race"}


@pytest.mark.parametrize("double", [False, True])
def test_packets_without_an_answer_may_be_overwritten(double: bool) -> None:
    text = "0: put i0:2 -> s0p:2@1; cpy i0:2 -> o0:2\n1: cpy s0p:2 -> o0:2"
    program = drawn(
        text,
        Kind.BROADCAST,
        chunks=2,
        root=0,
        in_place=False,
        protocol=Protocol.LL,
        scratch=2,
        double_scratch=double,
    )
    verdict = check_program(program)
    assert verdict.kinds == {"call"}
    assert (
        f"of the {'call after the next' if double else 'next call'}: both touch s0 of rank 1"
        in verdict.errors[0]
    )


@pytest.mark.parametrize(
    ("text", "lines", "said"),
    [
        ("0: wait 1; sig 1\n1: wait 0; sig 0", [(0, 0), (1, 0)], "waits for a signal of rank 1 on memory"),
        (
            "0: cpy s1p -> o1; put i0 -> s0p@1\n1: cpy s0p -> o0; put i0 -> s1p@0",
            [(0, 0), (1, 0)],
            "(s1 -> o1) waits for packets",
        ),
        ("0: barrier 0/2; give 0\n0: take 0; barrier 0/2\n1: nop", [(0, 0), (0, 1)], "waits at barrier 0"),
        ("0: nop; cpy s1p -> o1\n1: nop", [(0, 0)], "waits for packets that nobody is to write"),
    ],
)
def test_who_waits_for_whom_is_traced(text: str, lines: list[tuple[int, int]], said: str) -> None:
    verdict = check_program(gathered(text, protocol=Protocol.LL, scratch=2, semaphores=(0,)))
    assert verdict.kinds == {"deadlock"}
    assert verdict.circle is (len(lines) > 1)
    assert [(line.rank, line.block) for line in verdict.trace] == lines
    assert said in verdict.trace[0].text


FEW = (("ring:3", Kind.ALLREDUCE), ("ring:4", Kind.ALLGATHER), ("star:3", Kind.REDUCE_SCATTER))
SPECS = ("ring:3", "ring:4", "star:4", "full:4", "torus:3x3", "dgx1")
MANY = (*itertools.product(SPECS, TREE_KINDS), *((spec, Kind.ALLTOALL) for spec in SPECS if spec != "dgx1"))
"""An alltoall on a DGX-1 waits in the FIFOs of MSCCL, and is no program."""


def share_rejected(programs: Sequence[GlobalProgram], count: int, orders: int) -> float:
    """The part of mutants that the checker rejects; it passes none that some order shows to be wrong."""
    rejected = 0
    for program in programs:
        for name, mutant in itertools.islice(mutants(program, 1), count):
            outcome = judge(name, mutant, orders)
            assert not outcome.missed, (program.name, name)
            rejected += bool(outcome.rejected)
    return rejected / (count * len(programs))


@pytest.mark.parametrize(
    ("cases", "count", "orders"),
    [
        pytest.param(FEW, 40, 8, id="few"),
        pytest.param(FEW, 1000, 50, id="many", marks=pytest.mark.long),
        pytest.param(MANY, 20, 20, id="machines", marks=pytest.mark.long),
    ],
)
def test_mutants_of_steps_are_rejected_or_equivalent(
    cases: tuple[tuple[str, Kind], ...], count: int, orders: int
) -> None:
    programs = [export_program(solve(load(spec), kind, form="explicit")) for spec, kind in cases]
    assert share_rejected(programs, count, orders) > 0.6


@pytest.mark.parametrize(("count", "orders"), [(8, 1), pytest.param(200, 20, marks=pytest.mark.long)])
def test_mutants_of_puts_are_rejected_or_equivalent(count: int, orders: int) -> None:
    full = solve(load("full:3"), "allreduce")
    trees = solve(load("ring:4"), "allreduce", method="trees", max_trees=2)
    programs = [
        export_one_sided(full),
        export_one_sided(full, protocol=Protocol.LL),
        export_one_sided(solve(load("ring:4"), "allgather"), ranks_per_host=2),
        export_one_sided(trees, most_bytes=1 << 22),
    ]
    assert programs[-1].loops
    for program in programs:
        assert share_rejected([program], count, orders) > 1 / 8


@pytest.mark.long
@pytest.mark.parametrize("spec", ["ring:3", "star:4", "star:4,in-network=loopback", "torus:3x3", "dgx1"])
def test_mutants_of_puts_on_machines_are_rejected_or_equivalent(spec: str) -> None:
    programs = []
    for kind, protocol in itertools.product(KINDS, (Protocol.SIMPLE, Protocol.LL)):
        try:
            programs.append(export_one_sided(solve(load(spec), kind, form="explicit"), protocol=protocol))
        except ProgramError:  # does not fit, or switches would have to do what they cannot
            continue
    assert share_rejected(programs, 8, 4) > 1 / 8
