"""What the checker says of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One line of a counterexample: who is where, and waits for what."""

    rank: int
    block: int
    step: int
    text: str


@dataclass(frozen=True)
class ProgramVerdict:
    """What was found.

    Attributes:
        errors: one line each, at most as many as were asked for; none means correct.
        kinds: which sorts of errors there are: fault, limit, buffer, shared, message, deadlock, race, value.
        notes: what is not wrong and yet worth knowing.
        trace: who waits for whom, or the two steps that race.
        circle: whether the last one of the trace waits for the first.
        messages: the share of the buffer that each rank sends to each other.
    """

    errors: tuple[str, ...]
    kinds: frozenset[str]
    notes: tuple[str, ...]
    trace: tuple[TraceLine, ...] = ()
    circle: bool = False
    messages: Mapping[tuple[int, int], Fraction] = field(default_factory=dict)

    @property
    def correct(self) -> bool:
        """Whether there is nothing to object to."""
        return not self.errors
