"""One-sided programs: what orders what, and what the checker says where nothing does; drawn, and mutated."""

from __future__ import annotations

import itertools

import pytest

from arborcast.backends.programs.checking.check import check_program
from arborcast.backends.programs.exporting.one_sided import export_one_sided
from arborcast.backends.programs.interpreter import interpret
from arborcast.backends.programs.mscclpp.writer import KINDS
from arborcast.backends.programs.program import GlobalProgram, ProgramError
from arborcast.synth import solve
from arborcast.synth.collective import Kind
from arborcast.synth.nccl_protocol import Protocol
from arborcast.topologies import load
from tests.programs.drawn_one_sided import drawn
from tests.support.one_sided_mutants import judge, mutants

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


def gathered(text: str, **told: object) -> GlobalProgram:
    return drawn(text, Kind.ALLGATHER, **told)  # type: ignore[arg-type]


def packed(text: str) -> GlobalProgram:
    return drawn(text, Kind.ALLGATHER, protocol=Protocol.LL, scratch=2, double_scratch=True)


RIGHT = [
    gathered(EXCHANGE),
    drawn(SUMS, Kind.REDUCE_SCATTER, scratch=1),
    packed(PACKETS),
    gathered(PROXIES),
    # One block copies, the other puts what was copied: a semaphore, then a barrier.
    gathered(
        """
        0: cpy i0 -> s0; nop; give 0
        0: rsig 1; rwait 1; take 0; nop; put s0 -> o0@1; cpy i0 -> o0; nop; sig 1; wait 1
        1: cpy i0 -> s0; nop; barrier 0/2
        1: rsig 0; rwait 0; barrier 0/2; put s0 -> o1@0; cpy i0 -> o1; nop; sig 0; wait 0
        """,
        scratch=1,
        semaphores=(0,),
    ),
]


@pytest.mark.parametrize("program", RIGHT, ids=["exchange", "sums", "packets", "proxies", "blocks"])
def test_right_programs_are_right(program: GlobalProgram) -> None:
    assert check_program(program).errors == ()
    assert all(interpret(program, in_place=False, seed=seed, calls=3).correct for seed in range(5))


WRONG = [
    # text replaced, by what, kind of the objection, words of it
    (EXCHANGE, "sig 1; wait 1", "wait 1; sig 1", "", ""),  # the other one signals first
    (EXCHANGE, "; sig 1", "", "deadlock", r"waits for a signal of rank 0 on memory channel 0, and nobody"),
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


@pytest.mark.parametrize(("text", "old", "new", "kind", "words"), WRONG)
def test_what_is_not_ordered_is_told(text: str, old: str, new: str, kind: str, words: str) -> None:
    assert old in text
    verdict = check_program(gathered(text.replace(old, new, 1)))
    if not kind:
        assert verdict.correct
        return
    assert kind in verdict.kinds
    assert any(words in line for line in verdict.errors) or __import__("re").search(
        words, " ".join(verdict.errors)
    )
    assert verdict.trace or kind in {"buffer", "message", "value"}


@pytest.mark.parametrize("double", [False, True])
def test_packets_without_an_answer_may_be_overwritten(double: bool) -> None:
    text = "0: put i0:2 -> s0p:2@1; cpy i0:2 -> o0:2\n1: cpy s0p:2 -> o0:2"
    program = drawn(text, Kind.BROADCAST, root=0, protocol=Protocol.LL, scratch=2, double_scratch=double)
    verdict = check_program(program)
    assert verdict.kinds == {"call"}
    assert (
        f"of the {'call after the next' if double else 'next call'}: both touch s0 of rank 1"
        in verdict.errors[0]
    )


def test_who_waits_for_whom_is_traced() -> None:
    verdict = check_program(gathered("0: wait 1; sig 1\n1: wait 0; sig 0"))
    assert verdict.kinds == {"deadlock"}
    assert verdict.circle
    assert [(line.rank, line.step) for line in verdict.trace] == [(0, 0), (1, 0)]


def _mutated(count: int, orders: int) -> None:
    programs = [
        export_one_sided(solve(load(spec), kind), protocol=protocol, ranks_per_host=hosts)
        for spec, kind, protocol, hosts in (
            ("full:3", "allreduce", Protocol.SIMPLE, None),
            ("full:3", "allreduce", Protocol.LL, None),
            ("ring:4", "allgather", Protocol.SIMPLE, 2),
        )
    ]
    trees = solve(load("ring:4"), "allreduce", method="trees", max_trees=2)
    programs.append(export_one_sided(trees, most_bytes=1 << 22))
    assert programs[-1].loops
    for program in programs:
        assert _rejected(program, count, orders) > count // 8


def _rejected(program: GlobalProgram, count: int, orders: int) -> int:
    """How many mutants the checker rejects; it passes none that some order shows to be wrong."""
    found = [judge(name, mutant, orders) for name, mutant in itertools.islice(mutants(program, 0), count)]
    assert not [outcome for outcome in found if outcome.missed]
    return sum(bool(outcome.rejected) for outcome in found)


def test_mutants_are_rejected_or_equivalent() -> None:
    _mutated(8, 1)


@pytest.mark.long
def test_many_mutants_are_rejected_or_equivalent() -> None:
    _mutated(200, 20)


@pytest.mark.long
@pytest.mark.parametrize("spec", ["ring:3", "star:4", "star:4,in-network=loopback", "torus:3x3", "dgx1"])
def test_mutants_on_machines_are_rejected_or_equivalent(spec: str) -> None:
    rejected = 0
    for kind, protocol in itertools.product(KINDS, (Protocol.SIMPLE, Protocol.LL)):
        try:
            program = export_one_sided(solve(load(spec), kind, form="explicit"), protocol=protocol)
        except ProgramError:  # does not fit, or switches would have to do what they cannot
            continue
        rejected += _rejected(program, 8, 4)
    assert rejected > 8
