"""A program as text of MSCCL's XML, in the letters that its hand-written parser takes.

That parser knows no XML declaration, no tabs, no single quotes and no line ends within an element.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import quoteattr

from arborcast.backends.programs.program import (
    After,
    GlobalProgram,
    Memory,
    ProgramError,
    RankPart,
    Span,
    Step,
    ThreadBlock,
    plain_name,
)
from arborcast.synth.collective import NAMED_KINDS, Kind

KINDS = NAMED_KINDS
"""Those that MSCCL knows."""


def chunks_per_loop(program: GlobalProgram) -> int:
    """The file's unit: of gather and scatter MSCCL counts the block of one rank, else the whole buffer."""
    per_block = program.kind in {Kind.GATHER, Kind.SCATTER}
    return program.chunks // program.ranks if per_block else program.chunks


def write(program: GlobalProgram) -> str:
    """The file's text.

    Raises:
        ProgramError: the collective has no name there, or an operation is not two-sided.
    """
    if program.kind not in KINDS:
        raise ProgramError(f"{program.kind}: MSCCL knows {', '.join(KINDS)}")
    return "\n".join([*_lines(program), ""])


def _lines(program: GlobalProgram) -> Iterator[str]:
    yield _open(
        "algo",
        name="".join(
            letter
            for letter in program.name
            if letter.isascii() and letter.isprintable() and letter not in '"<&'
        )[:200],
        proto=program.protocol,
        nchannels=program.channels,
        nchunksperloop=chunks_per_loop(program),
        ngpus=program.ranks,
        coll=plain_name(program.kind),
        inplace=int(program.in_place),
        outofplace=int(program.out_of_place),
        minBytes=program.least_bytes,
        maxBytes=program.most_bytes or 0,
    )
    for rank, part in enumerate(program.parts):
        yield from _rank_lines(rank, part)
    yield "</algo>"


def _rank_lines(rank: int, part: RankPart) -> Iterator[str]:
    numbers = [_numbers(block) for block in part.blocks]
    yield "  " + _open(
        "gpu", id=rank, i_chunks=part.input_chunks, o_chunks=part.output_chunks, s_chunks=part.scratch_chunks
    )
    for index, block in enumerate(part.blocks):
        yield "    " + _open(
            "tb", id=index, send=_peer(block.send), recv=_peer(block.receive), chan=block.channel
        )
        for operation, number in zip(block.operations, numbers[index], strict=True):
            assert isinstance(operation, Step), "numbers are for steps"
            *before, last = operation.after or (None,)
            for place, after in enumerate(before, number - len(before)):
                yield "      " + _step(place, "nop", None, None, after, False, numbers)
            yield "      " + _step(
                number, operation.code, operation.source, operation.target, last, operation.posts, numbers
            )
        yield "    </tb>"
    yield "  </gpu>"


def _numbers(block: ThreadBlock) -> list[int]:
    """The number of each step in the file, where dependencies but the last take a step of their own."""
    numbers, number = [], -1
    for operation in block.operations:
        if not isinstance(operation, Step):
            raise ProgramError(f"MSCCL has no {type(operation).__name__.lower()}; its steps are two-sided")
        number += max(1, len(operation.after))
        numbers.append(number)
    return numbers


def file_steps(block: ThreadBlock) -> int:
    """Steps that the block takes in a file."""
    return 1 + max(_numbers(block), default=-1)


def elements_of(part: RankPart, ranks: int) -> int:
    """Elements that the parser keeps of a rank: its own part, and one for the part of each rank."""
    return 1 + ranks + len(part.blocks) + sum(map(file_steps, part.blocks))


def _step(
    number: int,
    code: str,
    source: Span | None,
    target: Span | None,
    after: After | None,
    posts: bool,
    numbers: list[list[int]],
) -> str:
    # The parser wants both ends of every step; it looks at those that the step has.
    ends = [end for end in (source, target) if end is not None] or [Span(Memory.INPUT, 0, 0)]
    source, target = ends[0], ends[-1]
    return (
        _open(
            "step",
            s=number,
            type=code,
            srcbuf=source.memory,
            srcoff=source.start,
            dstbuf=target.memory,
            dstoff=target.start,
            cnt=source.count,
            depid=-1 if after is None else after.block,
            deps=-1 if after is None else numbers[after.block][after.step],
            hasdep=int(posts),
        )[:-1]
        + "/>"
    )


def _peer(rank: int | None) -> int:
    return -1 if rank is None else rank


def _open(element: str, **attributes: object) -> str:
    text = " ".join(f"{name}={quoteattr(str(value))}" for name, value in attributes.items())
    return f"<{element} {text}>"
