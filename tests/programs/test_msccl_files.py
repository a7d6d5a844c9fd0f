"""MSCCL's XML: written as drawn, read back, and what its own parser does not take or passes over."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.backends.programs.checking.check import check_program
from arborcast.backends.programs.msccl.reader import read
from arborcast.backends.programs.msccl.writer import write
from arborcast.backends.programs.program import After, Code, ProgramError
from arborcast.synth.collective import Kind
from tests.programs.drawn import drawn

PAIR = drawn("0>1: s i0:2\n1<0: r i0:2", Kind.BROADCAST, chunks=2, root=0)
AS_TEXT = """\
<algo name="drawn" proto="Simple" nchannels="1" nchunksperloop="2" ngpus="2" coll="broadcast" inplace="1" outofplace="0" minBytes="0" maxBytes="0">
  <gpu id="0" i_chunks="2" o_chunks="2" s_chunks="0">
    <tb id="0" send="1" recv="-1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="2" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="2" o_chunks="2" s_chunks="0">
    <tb id="0" send="-1" recv="0" chan="0">
      <step s="0" type="r" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="2" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""  # noqa: E501  (a file as it is)


def test_a_program_is_written_as_drawn_and_read_back() -> None:
    assert write(PAIR) == AS_TEXT
    assert read(AS_TEXT).parts == PAIR.parts


def test_several_dependencies_take_steps_of_their_own() -> None:
    program = drawn(
        "0: cpy i0 i0 !; cpy i0 i0\n0: cpy i1 i1 !\n0: cpy i0 i1 @0.0 @1.0; cpy i1 i0 @0.1 !", chunks=2
    )
    text = write(program)
    nop, step, last = text[text.index("nop") - 20 :].splitlines()[:3]
    assert 's="0" type="nop"' in nop and 'depid="0" deps="0"' in nop
    assert 's="1" type="cpy"' in step and 'depid="1" deps="0"' in step
    assert 's="2"' in last
    assert read(text).parts[0] == program.parts[0]


def test_numbers_of_dependencies_count_what_the_device_counts() -> None:
    # Waiting for number 1, a nop of block 1, means the step that it belongs to.
    text = write(drawn("0: cpy i0 i0 !\n0: cpy i0 i0 !; cpy i0 i0 @0.0 !\n0: cpy i0 i0 @1.1\n1: cpy i0 i0"))
    block = read(text).parts[0].blocks[2]
    assert block.operations[0].after == (After(1, 1),)  # type: ignore[union-attr]
    assert block.operations[0].code is Code.COPY  # type: ignore[union-attr]


REFUSED = [
    ('<?xml version="1.0"?>', "takes no XML declaration", True),
    ('<!DOCTYPE a [<!ENTITY b "c">]>', "takes no DTD", True),
    ('type="s"', "type='s'", "line 4: MSCCL's parser takes no single quotes"),
    (' srcbuf="i"', '\tsrcbuf="i"', "line 4: MSCCL's parser takes no tabs"),
    (' type="s"', '\n type="s"', "takes no line ends within an element"),
    ('type="s"', 'type="ra"', "gpu 0, tb 0, step 0: type must be s, r, rcs"),
    ('nchunksperloop="2"', 'nchunksperloop="99999999"', "nchunksperloop must be in 1..32767, got 99999999"),
    ('ngpus="2"', 'ngpus="4096"', "ngpus is 4096, gpu 2 is missing"),
    ('cnt="2"', 'cnt="two"', "cnt must be a whole number, got 'two'"),
    ('cnt="2"', 'cnt="1000000"', "cnt must be in -1..32767"),
    ('coll="broadcast"', 'coll="custom"', "--collective says what it is"),
    ('proto="Simple"', 'proto="Slow"', "proto must be LL, LL128, Simple, got 'Slow'"),
    ('send="1"', 'send="0"', "gpu 0, tb 0: send must be another rank, got 0"),
    (' hasdep="0"', "", "gpu 0, tb 0, step 0: hasdep is missing"),
    ("</algo>", "", "'algo' is not closed"),
    ('id="1"', 'id="0"', "gpu 0: must stand once"),
    ('<tb id="0"', '<tb id="1"', "gpu 0: tb 0 is missing"),
]


@pytest.mark.parametrize(("old", "new", "message"), REFUSED)
def test_what_cannot_be_told_is_refused_in_one_line(old: str, new: str, message: str | bool) -> None:
    text = f"{old}\n{AS_TEXT}" if message is True else AS_TEXT.replace(old, new, 1)
    with pytest.raises(ProgramError) as refusal:
        read(text, "file.xml")
    assert str(refusal.value).startswith("file.xml: ") and "\n" not in str(refusal.value)
    assert (new if message is True else message) in str(refusal.value)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('s="0"', 's="64"', "step 64, MSCCL is built for 0 to 63"),
        ('cnt="2"', 'cnt="72"', "cnt is 72, the runtime takes 1 to 71"),
        ('cnt="2"', 'cnt="0"', "cnt is 0, moves nothing"),
    ],
)
def test_what_the_runtime_refuses_is_a_fault(old: str, new: str, fault: str) -> None:
    program = read(AS_TEXT.replace(old, new))
    assert any(fault in found for found in program.faults)
    assert "fault" in check_program(program).kinds


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        (' minBytes="0"', "", "minBytes missing: the first MSCCL runs it"),
        ('type="r"', 'type="r" colour="red"', None),
        ("<tb", "<thing/><tb", "element 'thing' is ignored"),
        ('id="0" send', 'id="0" send', "the file does not name its root"),
    ],
)
def test_what_the_runtime_passes_over_is_noted(old: str, new: str, note: str | None) -> None:
    program = read(AS_TEXT.replace(old, new, 1))
    assert note is None or any(note in found for found in program.notes)
    assert check_program(program).correct


def test_fused_reductions_have_room_for_sixteen() -> None:
    steps = "; ".join(f"re s{at} i0" for at in range(17))
    program = read(write(drawn(f"0: {steps}\n1: cpy i0 i0", scratch=17)))
    assert program.faults == ("gpu 0, tb 0: 17 reductions into one place are fused, room is for 16",)


@settings(max_examples=60)
@given(st.data())
def test_damaged_files_are_refused_or_judged(data: st.DataObject) -> None:
    text = write(
        drawn(
            "0>1<1: s i0; rrc i1 s0 !; re s0 o0\n1>0<0: rrs i0; cpy i0 o0\n1: cpy i1 o1 @0.1",
            chunks=2,
            scratch=1,
        )
    )
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        what = data.draw(
            st.sampled_from(["", "9", "-1", "0", '"', "<", "s", "\n", "\t", "rrcs", "&", "\u2603"])
        )
        text = text[:at] + what + text[at + data.draw(st.integers(0, 2)) :]
    try:
        program = read(text)
    except ProgramError as error:
        assert "\n" not in str(error)
        return
    check_program(program)
