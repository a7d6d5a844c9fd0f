"""MSCCL++'s plans: written, read back, what the runtime passes over, what is refused; exports."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.backends.programs.as_schedule import as_schedule
from arborcast.backends.programs.checking.check import check_program
from arborcast.backends.programs.exporting.one_sided import export_one_sided
from arborcast.backends.programs.interpreter import interpret
from arborcast.backends.programs.mscclpp import read, write
from arborcast.backends.programs.program import (
    Barrier,
    Flush,
    GlobalProgram,
    Memory,
    Move,
    ProgramError,
    Signal,
    Span,
    Wait,
)
from arborcast.backends.programs.traffic import traffic
from arborcast.synth.collective import Kind
from arborcast.synth.nccl_protocol import Protocol
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.topologies import load


def block(*operations: dict[str, Any], kind: str = "memory") -> dict[str, Any]:
    """One thread block with one channel and one remote buffer."""
    return {
        "id": 0,
        "ops": list(operations),
        "channels": [{"channel_type": kind, "channel_ids": [0]}],
        "remote_buffer_refs": [{"access_channel_type": kind, "remote_buffer_ids": [0]}],
    }


def near(memory: str, index: int, size: int = 1) -> dict[str, Any]:
    return {"type": memory, "index": index, "size": size}


def far(index: int, size: int = 1) -> dict[str, Any]:
    return {"buffer_id": 0, "index": index, "size": size}


def move(name: str, source: dict[str, Any], target: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "src_buff": [source], "dst_buff": [target], **more}


BY_MEMORY = {"channel_type": "memory", "channel_ids": [0]}
NOP = {"name": "nop"}


def pair(rank: int) -> dict[str, Any]:
    """A rank of the allgather of a pair: greet, put, signal, wait."""
    greet = [{"name": "rlxsignal", **BY_MEMORY}, {"name": "rlxwait", **BY_MEMORY}, NOP]
    moves = [
        move("copy", near("i", 0), near("o", rank)),
        move("put", near("i", 0), far(rank), channel_type="memory"),
    ]
    return {
        "id": rank,
        "input_chunks": 1,
        "output_chunks": 2,
        "scratch_chunks": 0,
        "semaphores": [],
        "channels": [{"channel_type": "memory", "connected_to": [1 - rank]}],
        "remote_buffers": [{"rank": 1 - rank, "type": "o", "access_channel_types": ["memory"]}],
        "threadblocks": [
            block(*greet, *moves, NOP, {"name": "signal", **BY_MEMORY}, {"name": "wait", **BY_MEMORY})
        ],
    }


def plan(**changes: Any) -> dict[str, Any]:
    """The allgather of a pair, which is right."""
    base = {
        "name": "pair",
        "collective": "allgather",
        "protocol": "Simple",
        "inplace": False,
        "gpus": [pair(0), pair(1)],
    }
    return {**base, **changes}


def operations(rank: int, document: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = document["gpus"][rank]["threadblocks"][0]["ops"]
    return found


def test_a_plan_drawn_by_hand_is_right() -> None:
    program = read(json.dumps(plan()))
    assert check_program(program).errors == ()
    assert read(write(program)) == replace(program, faults=(), notes=())
    put = program.parts[1].blocks[0].operations[4]
    assert put == Move((Span(Memory.INPUT, 0),), (Span(Memory.OUTPUT, 1, 1, 0),))


def changed(**operation: Any) -> GlobalProgram:
    """The plan with another put on rank 0."""
    document = plan()
    operations(0, document)[4] = {**operations(0, document)[4], **operation}
    return read(json.dumps(document))


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        ({"name": "pws"}, "signals nothing on memory channels"),
        ({"channel_type": "none"}, "does nothing with channel_type none"),
        ({"shape": 3}, "'shape' passed over by the runtime"),
        ({"name": "flush"}, "flushes nothing"),
        ({"dst_buff": [far(0), far(1)]}, "others begin at 0"),
        ({"name": "copy", "dst_buff": [near("o", 0), near("o", 1)]}, "only the first"),
        ({"name": "re", "reduce_op": "max", "dst_buff": [near("o", 0)]}, "the runtime adds"),
        (
            {"name": "get", "src_buff": [far(1)], "dst_buff": [near("o", 0)]},
            "exchanges where source and target begin",
        ),
    ],
)
def test_what_the_runtime_passes_over_is_named(operation: dict[str, Any], said: str) -> None:
    assert any(said in note for note in changed(**operation).notes)


def test_a_get_is_read_as_the_runtime_does_it() -> None:
    program = changed(name="get", src_buff=[far(1)], dst_buff=[near("o", 0)])
    assert program.parts[0].blocks[0].operations[4] == Move(
        (Span(Memory.OUTPUT, 0, 1, 1),), (Span(Memory.OUTPUT, 1),)
    )


def test_groups_of_blocks_and_pipelines_become_whole_chunks() -> None:
    program = changed(tbg_info={"tb_id": 1, "tbg_size": 2})
    assert program.chunks == 4
    assert program.parts[0].blocks[0].operations[4] == Move(
        (Span(Memory.INPUT, 1),), (Span(Memory.OUTPUT, 1, 1, 1),)
    )
    assert "value" in check_program(program).kinds  # nobody puts the other half
    document = plan()
    for rank in (0, 1):
        row = operations(rank, document)
        row[4] = {"name": "pipeline", "iter_context": {"unit_size": 1024, "num_chunks": 1}, "ops": [row[4]]}
    looped = read(json.dumps(document))
    assert [(loop.chunks, loop.piece_bytes) for loop in looped.loops] == [(1, 1024), (1, 1024)]
    assert check_program(looped).errors == ()
    for thirds in (1, 3):
        in_turns = looped.unrolled(thirds, Fraction(1024))
        assert (in_turns.loops, in_turns.chunks) == ((), looped.chunks * thirds)
        assert check_program(in_turns).errors == ()


def test_a_put_by_proxy_becomes_three_operations() -> None:
    document = plan()
    gpu = document["gpus"][0]
    gpu["channels"][0]["channel_type"] = "port"
    gpu["remote_buffers"][0]["access_channel_types"] = ["port"]
    gpu["threadblocks"] = [
        block(move("pwsf", near("i", 0), far(0), channel_type="port", channel_ids=[0]), kind="port")
    ]
    found = read(json.dumps(document)).parts[0].blocks[0].operations
    assert found == (
        Move((Span(Memory.INPUT, 0),), (Span(Memory.OUTPUT, 0, 1, 1),), 0),
        Signal((0,)),
        Flush((0,)),
    )


SEVENTEENTH = {"name": "barrier", "barrier_id": 16, "num_threadblocks": 1}


def by_switch(name: str) -> dict[str, Any]:
    """An allreduce of a pair, each half added and multicast by the switch; the last signals so named."""
    gpus = []
    for rank in (0, 1):
        half = {"switch_channel_id": 0, "index": rank, "size": 1}
        greet = [{"name": "signal", **BY_MEMORY}, {"name": "wait", **BY_MEMORY}, NOP]
        end = [NOP, {"name": f"{name}signal", **BY_MEMORY}, {"name": f"{name}wait", **BY_MEMORY}]
        row = block(*greet, move("glres", half, half, channel_type="switch"), *end)
        row["channels"].append({"channel_type": "switch", "channel_ids": [0]})
        row["remote_buffer_refs"] = []
        both = [{"size": 1, "ranks": [0, 1]}]
        group = {"channel_type": "switch", "buffer_type": "i", "rank_groups": both}
        gpu = {**pair(rank), "input_chunks": 2, "threadblocks": [row], "remote_buffers": []}
        gpu["channels"] = [*gpu["channels"], group]
        gpus.append(gpu)
    return plan(collective="allreduce", inplace=True, gpus=gpus)


def test_switches_add_and_multicast() -> None:
    program = read(json.dumps(by_switch("")))
    assert check_program(program).errors == ()
    assert read(write(program)) == program
    assert all(interpret(program, in_place=True, seed=seed, calls=3).correct for seed in range(5))
    star = load("star:2,in-network=loopback,bandwidth=2")
    schedule = as_schedule(program, star)
    assert [(move.src, move.dst, move.step) for move in schedule.transfers if move.chunk == 0] == [
        (0, 2, 0), (1, 2, 0), (2, 0, 1), (0, 2, 2), (2, 0, 3), (2, 1, 3),
    ]  # fmt: skip
    assert schedule.rate == Fraction(4, 3)  # each link carries three halves of the buffer at 2 GB/s
    with pytest.raises(ProgramError, match="full:2 has no switch that adds or multicasts at ranks 0, 1"):
        as_schedule(program, load("full:2"))
    relaxed = check_program(read(json.dumps(by_switch("rlx"))))
    assert relaxed.kinds == {"relaxed"}
    assert "relaxed ones order no memory" in relaxed.errors[0]


BOX = "star:3,in-network=loopback,bandwidth=2"


def through_switch(spec: str, kind: str) -> Schedule:
    """A schedule whose sums and multicasts are the switch's, whether others are as fast or not."""
    topology = load(spec)
    ranks, switch = range(topology.ranks), topology.ranks
    collective = synth.Collective.on(topology, kind)
    steps: list[tuple[int, int, int, bool]] = []
    if kind != "broadcast":
        steps += [(rank, switch, 0, True) for rank in ranks]
        steps.append((switch, 0, 1, False))
    if kind != "reduce":
        steps.append((0, switch, 2, False))
        steps += [(switch, rank, 3, False) for rank in ranks if rank or "loopback" in spec]
    transfers = [Transfer(0, src, dst, step, adds) for src, dst, step, adds in steps]
    return Schedule.build(
        topology, collective, Method("drawn"), synth.bound(topology, kind), [Chunk(Fraction(1), 0)], transfers
    )


def test_sums_and_multicasts_of_switches_are_exported() -> None:
    schedule = through_switch(BOX, "allreduce")
    program = export_one_sided(schedule, in_place=False, channels=2)
    meet = [Signal((0,)), Wait((0,)), Barrier(0, 2)]
    halves = [
        Move(
            tuple(Span(Memory.INPUT, half, 1, rank) for rank in range(3)),
            tuple(Span(Memory.OUTPUT, half, 1, rank) for rank in range(3)),
            switch=True,
        )
        for half in range(2)
    ]
    for rank, part in enumerate(program.parts):
        for half, row in enumerate(part.blocks):
            done = [halves[half]] if rank == 0 else []
            assert list(row.operations) == [*meet, *done, *reversed(meet[2:]), *meet[:2]]
    for kind, protocol in (
        ("allreduce", Protocol.SIMPLE),
        ("broadcast", Protocol.SIMPLE),
        ("broadcast", Protocol.LL),
    ):
        schedule = through_switch(BOX, kind)
        for in_place in (True, False):
            program = export_one_sided(schedule, in_place=in_place, protocol=protocol)
            back = read(write(program))
            assert back == replace(program, channels=1)
            assert check_program(back).errors == ()
            for seed in range(3):
                assert interpret(back, in_place=in_place, seed=seed, calls=3).correct
            assert as_schedule(back, schedule.topology).rate == schedule.rate
            loads = traffic(back, check_program(back).messages, schedule.topology)
            assert loads.loads == schedule.load


@pytest.mark.parametrize(
    ("schedule", "wishes", "said"),
    [
        (through_switch(BOX, "reduce"), {}, "adds for rank 0 alone.*; solve with --no-in-network"),
        (through_switch(BOX, "allreduce"), {"protocol": Protocol.LL}, "switches add no packets"),
        (
            through_switch(BOX, "allreduce"),
            {"ranks_per_host": 2},
            "ranks whose memory one switch reaches, all 3",
        ),
        (
            through_switch("star:3,in-network=both", "broadcast"),
            {},
            "must be of the group.*; solve with --no-in-network",
        ),
    ],
)
def test_what_switch_channels_cannot_do_is_refused(schedule: Any, wishes: Any, said: str) -> None:
    with pytest.raises(ProgramError, match=said):
        export_one_sided(schedule, **wishes)


def test_switches_that_multicast_their_own_sums_are_not_nvlink_sharp() -> None:
    schedule = synth.solve(load("star:3,in-network=turn"), "allreduce")
    with pytest.raises(ProgramError, match=r"multicasts its own sum.*; solve with --no-in-network"):
        export_one_sided(schedule)


FAULTS = [
    (lambda document: operations(0, document).extend([NOP] * 60), "68 operations, the executor takes 64"),
    (lambda document: document["gpus"][1].update(output_chunks=3), "output_chunks is 3, allgather of 2"),
    (lambda document: document.update(num_threads_per_block=2048), "num_threads_per_block is 2048"),
    (lambda document: operations(0, document)[1].update(channel_ids=[0] * 9), "more than 8 channels"),
    (lambda document: operations(0, document).append(SEVENTEENTH), "barrier 16, the executor has 16"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), FAULTS)
def test_what_breaks_the_runtime_is_a_fault(change: Any, said: str) -> None:
    document = plan()
    change(document)
    verdict = check_program(read(json.dumps(document)))
    assert "fault" in verdict.kinds
    assert any(said in error for error in verdict.errors)


PUT_NOWHERE = block(move("put", near("i", 0), far(0), channel_type="port", channel_ids=[]))
PUT_NOWHERE["remote_buffer_refs"][0]["access_channel_type"] = "port"
"""The one channel of the block is by memory."""

REFUSED = [
    ("[1]", "plan: must be a mapping, got [1]"),
    ("{", "plan: "),
    (json.dumps(plan(collective="sendrecv")), "collective 'sendrecv' is none of"),
    (json.dumps(plan(gpus=[pair(0)])), "gpus: must have at least 2 entries, got 1"),
    (json.dumps(plan(gpus=[pair(1), pair(0)])), "entry 0 has id 1"),
    (
        json.dumps(plan(gpus=[{**pair(0), "output_chunks": 1 << 40}, pair(1)])),
        "gpus[0].output_chunks: must be at most 4194304, got",
    ),
    (
        json.dumps(plan(gpus=[{**pair(0), "threadblocks": [block({"name": "teleport"})]}, pair(1)])),
        "gpus[0].threadblocks[0].ops[0].name: input should be 'nop'",
    ),
    (
        json.dumps(plan(gpus=[{**pair(0), "channels": [{"channel_type": "wave"}]}, pair(1)])),
        "channels[0].channel_type: input should be 'memory', 'port' or 'switch', got 'wave'",
    ),
    (
        json.dumps(plan(gpus=[{**pair(rank), "scratch_chunks": 1 << 22} for rank in (0, 1)])),
        "at most 4194304 chunks of scratch on all ranks are read, got 8388608",
    ),
    *(
        (json.dumps(plan(gpus=[{**pair(0), "threadblocks": [it]}, pair(1)])), "needs a port channel")
        for it in (PUT_NOWHERE, {**PUT_NOWHERE, "channels": []})
    ),
    (json.dumps(plan(inplace=1)), "inplace: must be true or false, got 1"),
]


@pytest.mark.parametrize(("text", "said"), REFUSED)
def test_what_is_no_plan_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ProgramError) as refusal:
        read(text)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_what_a_plan_says_itself_is_not_said_otherwise() -> None:
    text = json.dumps(plan())
    assert read(text, kind=Kind.ALLGATHER).kind is Kind.ALLGATHER
    assert read(json.dumps(plan(collective="gossip")), kind=Kind.ALLGATHER) == read(text)
    with pytest.raises(ProgramError, match="plan: collective is allgather, --collective says allreduce"):
        read(text, kind=Kind.ALLREDUCE)
    with pytest.raises(ProgramError, match="root 0: allgather has no root"):
        read(text, root=0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_plans_are_refused_or_judged(data: st.DataObject) -> None:
    text = write(read(json.dumps(plan())))
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:at] + data.draw(st.sampled_from(["", "0", "9", "-", '"', "[", "{}"])) + text[at + 1 :]
    try:
        program = read(damaged)
    except ProgramError:
        return
    check_program(program)


def test_what_has_no_plan_is_refused() -> None:
    ring = load("ring:4")
    with pytest.raises(ProgramError, match="ranks besides the root have but one"):
        export_one_sided(synth.solve(ring, "gather"))
    with pytest.raises(ProgramError, match="has protocols Simple and LL"):
        export_one_sided(synth.solve(ring, "allgather"), protocol=Protocol.LL128)
