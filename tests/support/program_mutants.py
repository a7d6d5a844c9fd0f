"""Right programs with one thing wrong: what a checker of programs must reject, or show to be equivalent.

Each mutation stands for a mistake of a generator: a step dropped or doubled, steps in another order, offsets
swapped or off by one, another count, a dependency left out or pointed elsewhere, a flag not posted, another
peer, channel or operation, scratch too small.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from arborcast.backends.programs.checking.check import check_program
from arborcast.backends.programs.interpreter import CALLS, Interpretation, interpret
from arborcast.backends.programs.limits import chunks_together
from arborcast.backends.programs.program import (
    After,
    Code,
    GlobalProgram,
    Memory,
    ProgramError,
    Span,
    Step,
    ThreadBlock,
)

Steps: TypeAlias = list[Step]


def interpret_all(program: GlobalProgram, seeds: Sequence[int], *, elements: int = 4) -> Interpretation:
    """Runs under several orders, in every way of calling that the program is for; the first that is wrong."""
    result = Interpretation(0)
    together = chunks_together(program)
    for seed in seeds:
        for in_place in (True, False):
            if program.in_place if in_place else program.out_of_place:
                result = interpret(
                    program,
                    in_place=in_place,
                    seed=seed,
                    elements=elements,
                    calls=CALLS if program.one_sided else 1,
                    # A chunk that does not fit a slot is gone through in several loops.
                    loops=1 + seed % 2 if together == 1 and not program.one_sided else 1,
                    together=together,
                )
                if not result.correct:
                    return result
    return result


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one mutant.

    Attributes:
        mutation: which mistake.
        rejected: the kinds of the checker's objections; empty where it has none.
        orders: random orders under which it was interpreted.
        wrong: whether one of them gave a wrong element or did not end.
    """

    mutation: str
    rejected: frozenset[str]
    orders: int
    wrong: bool

    @property
    def missed(self) -> bool:
        """Whether the checker passed what some order shows to be wrong."""
        return not self.rejected and self.wrong


def mutants(program: GlobalProgram, seed: int) -> Iterator[tuple[str, GlobalProgram]]:
    """Mutants of a program without end, each with the name of its mistake."""
    chance = random.Random(seed)
    while True:
        name = chance.choice(list(_MUTATIONS))
        rank = chance.randrange(program.ranks)
        part = program.parts[rank]
        number = chance.randrange(len(part.blocks))
        changed = _MUTATIONS[name](part.blocks[number], program, chance)
        if changed is None or changed == part.blocks[number]:
            continue
        blocks = [*part.blocks[:number], changed, *part.blocks[number + 1 :]]
        if name in {"drop", "double"} and chance.random() < 0.5:
            blocks = _renumbered(blocks, number, part.blocks[number], changed)
        parts = list(program.parts)
        parts[rank] = replace(part, blocks=tuple(blocks))
        yield name, replace(program, parts=tuple(parts))


def judge(mutation: str, mutant: GlobalProgram, orders: int) -> Outcome:
    """Ask the checker, and run the mutant under random orders."""
    verdict = check_program(mutant)
    try:
        wrong = not interpret_all(mutant, range(orders), elements=2).correct
    except ProgramError:
        wrong = True
    return Outcome(mutation, verdict.kinds, orders, wrong)


def _renumbered(
    blocks: list[ThreadBlock], number: int, before: ThreadBlock, now: ThreadBlock
) -> list[ThreadBlock]:
    """Dependencies on steps behind the change follow them."""
    shift = len(now.operations) - len(before.operations)
    at = next(
        (
            place
            for place, pair in enumerate(zip(before.operations, now.operations, strict=False))
            if pair[0] != pair[1]
        ),
        min(len(before.operations), len(now.operations)),
    )

    def follow(step: Step) -> Step:
        return replace(
            step,
            after=tuple(
                After(after.block, max(0, after.step + shift))
                if after.block == number and after.step >= at
                else after
                for after in step.after
            ),
        )

    return [
        replace(block, operations=tuple(follow(step) for step in block.operations if isinstance(step, Step)))
        for block in blocks
    ]


def _steps(block: ThreadBlock) -> Steps:
    return [step for step in block.operations if isinstance(step, Step)]


def _drop(block: ThreadBlock, program: GlobalProgram, chance: random.Random) -> ThreadBlock | None:
    steps = _steps(block)
    if not steps:
        return None
    del steps[chance.randrange(len(steps))]
    return replace(block, operations=tuple(steps))


def _double(block: ThreadBlock, program: GlobalProgram, chance: random.Random) -> ThreadBlock | None:
    steps = _steps(block)
    if not steps:
        return None
    at = chance.randrange(len(steps))
    return replace(block, operations=(*steps[: at + 1], *steps[at:]))


def _reorder(block: ThreadBlock, program: GlobalProgram, chance: random.Random) -> ThreadBlock | None:
    steps = _steps(block)
    if len(steps) < 2:
        return None
    one, other = chance.sample(range(len(steps)), 2)
    steps[one], steps[other] = steps[other], steps[one]
    return replace(block, operations=tuple(steps))


def _on_a_step(change: Callable[[Step, GlobalProgram, random.Random], Step | None]) -> Mutation:
    def mutate(block: ThreadBlock, program: GlobalProgram, chance: random.Random) -> ThreadBlock | None:
        steps = _steps(block)
        if not steps:
            return None
        at = chance.randrange(len(steps))
        changed = change(steps[at], program, chance)
        if changed is None:
            return None
        return replace(block, operations=(*steps[:at], changed, *steps[at + 1 :]))

    return mutate


def _offset(step: Step, program: GlobalProgram, chance: random.Random) -> Step | None:
    by = chance.choice((-1, 1, chance.randrange(-4, 5)))
    if step.target is not None and (step.source is None or chance.random() < 0.5):
        return replace(step, target=replace(step.target, start=step.target.start + by))
    assert step.source is not None, "one end or the other"
    return replace(step, source=replace(step.source, start=step.source.start + by))


def _count(step: Step, program: GlobalProgram, chance: random.Random) -> Step | None:
    count = max(1, step.count + chance.choice((-1, 1)))

    def longer(span: Span | None) -> Span | None:
        return None if span is None else replace(span, count=count)

    return replace(step, source=longer(step.source), target=longer(step.target))


def _memory(step: Step, program: GlobalProgram, chance: random.Random) -> Step | None:
    def other(span: Span | None) -> Span | None:
        return None if span is None else replace(span, memory=chance.choice(list(Memory)))

    return replace(step, source=other(step.source), target=other(step.target))


def _forget(step: Step, program: GlobalProgram, chance: random.Random) -> Step | None:
    if not step.after:
        return None
    left = list(step.after)
    del left[chance.randrange(len(left))]
    return replace(step, after=tuple(left))


def _misdirect(step: Step, program: GlobalProgram, chance: random.Random) -> Step | None:
    if not step.after:
        return None
    at = chance.randrange(len(step.after))
    named = step.after[at]
    if chance.random() < 0.5:
        wrong = replace(named, step=max(0, named.step + chance.choice((-1, 1))))
    else:
        wrong = replace(named, block=max(0, named.block + chance.choice((-1, 1))))
    return replace(step, after=(*step.after[:at], wrong, *step.after[at + 1 :]))


def _quiet(step: Step, program: GlobalProgram, chance: random.Random) -> Step | None:
    return replace(step, posts=False) if step.posts else None


_NEIGHBOURS = {
    Code.RECEIVE_REDUCE_COPY: Code.RECEIVE,
    Code.RECEIVE_COPY_SEND: Code.RECEIVE,
    Code.RECEIVE_REDUCE_COPY_SEND: Code.RECEIVE_REDUCE_SEND,
    Code.RECEIVE_REDUCE_SEND: Code.RECEIVE_COPY_SEND,
    Code.RECEIVE: Code.RECEIVE_REDUCE_COPY,
    Code.COPY: Code.REDUCE,
}


def _operation(step: Step, program: GlobalProgram, chance: random.Random) -> Step | None:
    code = _NEIGHBOURS.get(step.code)
    if code is None:
        return None
    span = step.target or step.source
    return replace(
        step,
        code=code,
        source=(step.source or span) if code.reads else None,
        target=(step.target or span) if code.writes else None,
    )


def _peer(block: ThreadBlock, program: GlobalProgram, chance: random.Random) -> ThreadBlock | None:
    if block.send is not None and (block.receive is None or chance.random() < 0.5):
        return replace(block, send=chance.randrange(program.ranks))
    if block.receive is None:
        return None
    return replace(block, receive=chance.randrange(program.ranks))


def _channel(block: ThreadBlock, program: GlobalProgram, chance: random.Random) -> ThreadBlock | None:
    return (
        None
        if block.send is None and block.receive is None
        else replace(block, channel=chance.randrange(program.channels + 1))
    )


def _swap(block: ThreadBlock, program: GlobalProgram, chance: random.Random) -> ThreadBlock | None:
    """The offsets of two steps."""
    steps = _steps(block)
    targets = [at for at, step in enumerate(steps) if step.target is not None]
    sources = [at for at, step in enumerate(steps) if step.source is not None]
    end, among = ("target", targets) if chance.random() < 0.5 else ("source", sources)
    if len(among) < 2:
        return None
    one, other = chance.sample(among, 2)
    spans = getattr(steps[one], end), getattr(steps[other], end)
    steps[one] = replace(steps[one], **{end: spans[1]})
    steps[other] = replace(steps[other], **{end: spans[0]})
    if (
        len(
            {span.count for step in (steps[one], steps[other]) for span in (step.source, step.target) if span}
        )
        > 1
    ):
        return None
    return replace(block, operations=tuple(steps))


Mutation: TypeAlias = Callable[[ThreadBlock, GlobalProgram, random.Random], ThreadBlock | None]

_MUTATIONS: dict[str, Mutation] = {
    "drop": _drop,
    "double": _double,
    "reorder": _reorder,
    "swap offsets": _swap,
    "offset": _on_a_step(_offset),
    "count": _on_a_step(_count),
    "memory": _on_a_step(_memory),
    "forget dependency": _on_a_step(_forget),
    "wrong dependency": _on_a_step(_misdirect),
    "post nothing": _on_a_step(_quiet),
    "operation": _on_a_step(_operation),
    "peer": _peer,
    "channel": _channel,
}
