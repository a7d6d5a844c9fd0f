"""What commands ask about: a topology with those that take part, a collective on it, a file worth using.

Shared by the commands; the packages that they load are imported inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from synth.errors import InputError
from synth.options import rank_list

if TYPE_CHECKING:
    from synth.collective import Collective
    from synth.faults import Faulty
    from synth.implicit.schedule import AnySchedule
    from synth.topology import Topology


class NotCorrectError(Exception):
    """The answer is no: exit status 1 with this one line."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command is about.

    Attributes:
        topology: the fabric, what is left of it where something failed.
        taking_part: the ranks of it that take part; all others are relays.
        faulty: how it came from a healthy one; None where nothing failed.
    """

    topology: Topology
    taking_part: tuple[int, ...]
    faulty: Faulty | None = None


def load_fabric(
    spec: str,
    ranks: str | None,
    *,
    relays: bool,
    gpu: str | None,
    pcie: bool,
    rates: str,
    without_links: Sequence[str] | None = None,
    without_ranks: Sequence[int] | None = None,
) -> Asked:
    """The topology a command is about, and the ranks that take part in it.

    Failed links and ranks are named as in the fragment; those that are left are numbered 0, 1, 2... again.
    """
    from topologies import load

    chosen = None if ranks is None else rank_list(ranks)
    topology = load(spec, ranks=chosen, relays=relays, gpu=gpu, pcie=pcie, rates=rates)
    members = topology.ranks if chosen is None else len(chosen)
    if not without_links and not without_ranks:
        return Asked(topology, tuple(range(members)))
    from synth.faults import without

    faulty = without(topology, links=without_links or (), ranks=without_ranks or ())
    left = sum(before < members for before in faulty.kept)
    return Asked(faulty.topology, tuple(range(left)), faulty)


def load_topology(
    spec: str,
    ranks: str | None,
    *,
    relays: bool,
    gpu: str | None,
    pcie: bool,
    rates: str,
    without_links: Sequence[str] | None = None,
    without_ranks: Sequence[int] | None = None,
) -> tuple[Topology, tuple[int, ...]]:
    """`load_fabric` for who does not ask how the fabric came to be."""
    asked = load_fabric(
        spec,
        ranks,
        relays=relays,
        gpu=gpu,
        pcie=pcie,
        rates=rates,
        without_links=without_links,
        without_ranks=without_ranks,
    )
    return asked.topology, asked.taking_part


def collective_on(
    name: str, topology: Topology, taking_part: tuple[int, ...], root: int | None
) -> Collective:
    """A kind of collective by name, with root 0 unless asked for; or the custom one in a file.

    Raises:
        InputError: a root where there is none, or a collective that does not fit.
    """
    from synth.api import as_collective
    from synth.collective import Kind
    from synth.formats import read_collective

    in_file = name.lower().endswith((".yaml", ".yml", ".json"))
    if root is not None and (in_file or name in [kind.value for kind in Kind if not kind.has_root]):
        raise InputError(f"--root {root}: {name} has no root")
    if in_file:
        return read_collective(Path(name), topology, ranks=len(taking_part))
    return as_collective(topology, name, root=root or 0, ranks=taking_part)


def read_correct(file: Path) -> AnySchedule:
    """A schedule worth running: a wrong one is an answer of no before any time is spent on it."""
    import synth

    schedule = synth.read_any_schedule(file)
    verdict = synth.verify(schedule)
    if not verdict.correct:
        raise NotCorrectError(f"{file}: not correct: {verdict.errors[0]}")
    return schedule


def check_found(schedule: AnySchedule) -> None:
    """See that the verifier passes a schedule that we found: that it does not is a bug of ours."""
    import synth

    verdict = synth.verify(schedule)
    if not verdict.correct:
        raise AssertionError(f"the schedule found is not correct: {verdict.errors[0]}")


def text_of(path: Path | None) -> str | None:
    """A path as JSON holds it."""
    return None if path is None else str(path)
