"""Fields of a plan's JSON, each refused in one line where it is not what it must be; what is told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from arborcast.backends.programs.program import Memory, ProgramError
from arborcast.synth.formats.numerals import shorten

Entry: TypeAlias = Mapping[str, Any]

MAX_CELLS = 1 << 22
MAX_OPERATIONS = 1 << 18
MAX_NUMBER = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Reading:
    """What is found while a plan is read.

    Attributes:
        finer: in how many parts chunks are cut, so that groups of blocks and pipelines handle whole ones.
        iterations: how often pipelines are gone through.
        faults: what the runtime breaks on.
        notes: what it passes over.
    """

    finer: int
    iterations: int
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def fault(self, text: str) -> None:
        """The runtime breaks on it."""
        self.faults.append(text)

    def note(self, text: str) -> None:
        """The runtime passes over it."""
        self.notes.append(text)

    def ignored(self, entry: Entry, known: set[str], where: str) -> None:
        """Fields that nobody reads."""
        strange = sorted(set(entry) - known)
        if strange:
            self.note(f"{where}: {', '.join(map(shorten, strange[:8]))} passed over by the runtime")


def an_object(value: object, where: str) -> Entry:
    """An object."""
    if not isinstance(value, dict):
        raise ProgramError(f"{where}: must be an object, got {shorten(value)}")
    return value


def a_list(entry: Entry, name: str, where: str, most: int, *, default: bool = False) -> list[Any]:
    """A list of at most so many entries; where there is none, an empty one if that is the default."""
    value = entry.get(name, [] if default else None)
    if not isinstance(value, list):
        raise ProgramError(f"{where}: {name} must be a list, got {shorten(value)}")
    if len(value) > most:
        raise ProgramError(f"{where}: {name} has {len(value)} entries, at most {most} are read")
    return value


def a_number(
    entry: Entry, name: str, where: str, least: int, most: int, *, default: int | None = None
) -> int:
    """A whole number within a range."""
    value = entry.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ProgramError(
            f"{where}: {name} must be a whole number from {least} to {most}, got {shorten(value)}"
        )
    return value


def numbers_of(entry: Entry, name: str, where: str, beyond: int) -> tuple[int, ...]:
    """A list of whole numbers below one."""
    values = a_list(entry, name, where, 4096)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < beyond:
            raise ProgramError(
                f"{where}: {name} must be whole numbers from 0 to {beyond - 1}, got {shorten(value)}"
            )
    return tuple(values)


def a_text(entry: Entry, name: str, where: str) -> str:
    """A text."""
    value = entry.get(name)
    if not isinstance(value, str):
        raise ProgramError(f"{where}: {name} must be a text, got {shorten(value)}")
    return value


def a_flag(entry: Entry, name: str, where: str, *, default: bool | None = None) -> bool:
    """True or false."""
    value = entry.get(name, default)
    if not isinstance(value, bool):
        raise ProgramError(f"{where}: {name} must be true or false, got {shorten(value)}")
    return value


def a_memory(value: object, where: str) -> Memory:
    """One of the buffers."""
    if not isinstance(value, str) or value not in set(Memory):
        raise ProgramError(f"{where} must be i, o or s, got {shorten(value)}")
    return Memory(str(value))


def shown(numbers: Sequence[int]) -> str:
    """The first of some numbers, as messages show them."""
    return ", ".join(map(str, numbers[:8]))
