"""What is said of a machine beside the text of a tool, which readers take by keyword."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import wraps
from typing import Any, Protocol

from arborcast.synth.errors import InputError, TopologyError
from arborcast.topologies.machine import Machine
from arborcast.topologies.rates import Rates


@dataclass(frozen=True, slots=True)
class Said:
    """See `topologies.load_machine`; None is what nobody said."""

    gpu: str | None = None
    pcie: bool | None = None
    between_sockets: Fraction | None = None
    numa_per_socket: int | None = None
    rates: Rates = Rates.DATASHEET

    @property
    def first(self) -> str | None:
        """One of these that is said, rates apart, as options of Python and of the command."""
        options = (
            ("gpu= (--gpu)", self.gpu),
            (f"pcie={self.pcie} (--{'' if self.pcie else 'no-'}pcie)", self.pcie),
            ("between_sockets= (--between-sockets)", self.between_sockets),
            ("numa_per_socket= (--numa-per-socket)", self.numa_per_socket),
        )
        return next((option for option, value in options if value is not None), None)


class Reader(Protocol):
    """What reads the text of a tool."""

    def __call__(self, text: str, place: str, **said: Any) -> Machine: ...


def reader(read: Callable[[str, str, Said], Machine]) -> Reader:
    """A reader that takes the fields of `Said` by keyword, and whose errors begin with the place."""

    @wraps(read)
    def named(text: str, place: str, **said: Any) -> Machine:
        try:
            return read(text, place, Said(**said))
        except InputError as error:
            raise TopologyError(f"{place}: {error}") from error

    return named
