"""What commands ask about: a topology with those that take part, a collective on it, a file worth using.

Shared by the commands; the packages that they load are imported inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from arborcast.synth.cli.console import Json, print_json, print_lines
from arborcast.synth.cli.options import FabricOptions, number_of, rank_list
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError

if TYPE_CHECKING:
    from arborcast.synth.collective import Collective
    from arborcast.synth.faults.faulty import Faulty
    from arborcast.synth.implicit_schedule import AnySchedule
    from arborcast.synth.routes.reachability import Components
    from arborcast.synth.topology import Topology
    from arborcast.topologies.machine import Machine

MOST_LEFT_OUT = 8
"""Parts that are named to be left out by --without-rank."""


class NotCorrectError(Exception):
    """The answer is no: exit status 1 with this one line."""


@dataclass(frozen=True, slots=True)
class FabricRequest:
    """What a command is about.

    Attributes:
        topology: the fabric, what is left of it where something failed.
        taking_part: the ranks of it that take part; all others are relays.
        machine: what else is known of what the spec names, before anything failed.
        options: how it was asked for.
        faulty: how it came from a healthy one; None where nothing failed.
    """

    topology: Topology
    taking_part: tuple[int, ...]
    machine: Machine
    options: FabricOptions
    faulty: Faulty | None = None

    def parts(self) -> Components | None:
        """The parts into which those that take part fall; None where all reach each other."""
        from arborcast.synth.routes.reachability import parts_of

        found = parts_of(self.topology, self.taking_part)
        return found if len(found.ranks) > 1 else None

    def help_for(self, parts: Components) -> tuple[str, ...]:
        """Which options would help where the fabric falls into parts, as whoever asked numbers its ranks."""
        from arborcast.synth.routes.reachability import rank_ranges

        told = [*self._pcie_helps(parts)]
        largest = parts.largest
        if self.faulty is None and len(largest) > 1:
            given = self.options.ranks
            names = largest if given is None else [rank_list(given)[rank] for rank in largest]
            told.append(f"--ranks {rank_ranges(names)} takes the largest part")
        outside = [ranks for ranks in parts.ranks if ranks != largest]
        kept = range(self.topology.ranks) if self.faulty is None else self.faulty.kept
        alone = all(len(ranks) == 1 for ranks in outside) and len(largest) > 1
        if len(outside) <= MOST_LEFT_OUT and (alone or self.faulty is not None):
            lost = [f"--without-rank {kept[rank]}" for ranks in outside for rank in ranks]
            told.append(f"{' '.join(lost)} leaves {'it' if len(lost) == 1 else 'them'} out")
        return tuple(told)

    def _pcie_helps(self, parts: Components) -> Iterator[str]:
        from arborcast.topologies.files import load_file
        from arborcast.topologies.rates import Rates
        from arborcast.topologies.readers.options import Said

        options = self.options
        if options.pcie:
            return
        with suppress(InputError):  # of the catalog, or a file that holds its own links
            said = Said(options.gpu, pcie=True, rates=Rates.of(options.rates))
            machine = load_file(options.spec, said)
            if options.ranks is not None:
                machine = machine.reordered(rank_list(options.ranks), relays=options.relays)
            joined = _left(machine, options).parts()
            if joined is None:
                yield "--pcie joins them"
            elif len(joined.ranks) < len(parts.ranks):
                yield f"--pcie leaves {len(joined.ranks)} parts"

    @property
    def machine_left(self) -> Machine:
        """What is known of the ranks that are left; its graph still has the links that failed."""
        if self.faulty is None:
            return self.machine
        return self.machine.reordered(self.faulty.kept[: self.topology.ranks])


def load_fabric(options: FabricOptions) -> FabricRequest:
    """The topology a command is about, and the ranks that take part in it.

    Failed links and ranks are named as in the fragment; those that are left are numbered 0, 1, 2... again.
    """
    from arborcast.topologies import load_machine

    chosen = None if options.ranks is None else rank_list(options.ranks)
    machine = load_machine(
        options.spec,
        ranks=chosen,
        relays=options.relays,
        gpu=options.gpu,
        pcie=options.pcie,
        between_sockets=above_zero("--between-sockets", options.between_sockets),
        numa_per_socket=options.numa_per_socket,
        rates=options.rates,
    )
    if options.no_in_network:
        machine = replace(machine, topology=machine.topology.forwarding)
    return _left(machine, options)


def _left(machine: Machine, options: FabricOptions) -> FabricRequest:
    """What is left of a machine, the fragment already taken."""
    topology = machine.topology
    members = topology.ranks if options.ranks is None else len(rank_list(options.ranks))
    if not options.without_link and not options.without_rank:
        return FabricRequest(topology, tuple(range(members)), machine, options)
    from arborcast.synth.faults.faulty import without

    faulty = without(topology, links=options.without_link or (), ranks=options.without_rank or ())
    left = sum(before < members for before in faulty.kept)
    return FabricRequest(faulty.topology, tuple(range(left)), machine, options, faulty)


def planned_by_nccl(on: FabricRequest) -> Topology:
    """The same fabric with the rates that NCCL plans with; its own where a file or arguments state them."""
    try:
        return load_fabric(replace(on.options, rates="nccl")).topology
    except InputError:
        return on.topology


def above_zero(option: str, text: str | None) -> Fraction | None:
    """An option's GB/s; None where it was not given."""
    if text is None:
        return None
    return number_of(option, text, lambda rate: rate > 0, "must be above 0 GB/s")


def collective_on(name: str, on: FabricRequest, root: int | None) -> Collective:
    """A kind of collective by name, with root 0 unless asked for; or the custom one in a file.

    Raises:
        InputError: a root where there is none, or a collective that does not fit.
    """
    from arborcast.synth.collective import Kind, as_collective
    from arborcast.synth.formats import read_collective

    in_file = name.lower().endswith((".yaml", ".yml", ".json"))
    kind = Kind.named(name)
    if root is not None and (in_file or (kind is not None and not kind.has_root)):
        raise InputError(f"--root {root}: {name} has no root")
    if in_file:
        return read_collective(Path(name), on.topology, ranks=len(on.taking_part))
    return as_collective(on.topology, name, root=root or 0, ranks=on.taking_part)


def read_correct(file: Path) -> AnySchedule:
    """A schedule worth running: a wrong one is an answer of no before any time is spent on it."""
    from arborcast import synth

    schedule = synth.read_schedule(file)
    verdict = synth.verify(schedule)
    if not verdict.correct:
        raise NotCorrectError(f"{file}: not correct: {verdict.errors[0]}")
    return schedule


def conclude(
    file: Path, errors: Sequence[str], as_json: bool, document: Json, lines: Callable[[], Iterable[str]]
) -> None:
    """Say a verdict on a file: the document, or that it is correct and the lines.

    Raises:
        NotCorrectError: there are errors.
    """
    if as_json:
        print_json({"correct": not errors, **document})
    elif not errors:
        print_lines([f"{file}: correct", *lines()])
    if errors:
        raise NotCorrectError(f"{file}: not correct: {'; '.join(errors)}")


def check_found(schedule: AnySchedule) -> None:
    """See that the verifier passes a schedule that we found: that it does not is a bug of ours."""
    from arborcast import synth

    verdict = synth.verify(schedule)
    if not verdict.correct:
        raise AssertionError(f"the schedule found is not correct: {verdict.errors[0]}")


def kept(schedule: AnySchedule, seconds: float, output: Path | None) -> Json:
    """What is said of a schedule that was found; it is verified first, then written."""
    from arborcast import synth
    from arborcast.synth.cli.description import solution_document

    check_found(schedule)
    if output is not None:
        synth.write_schedule(schedule, output)
    return solution_document(schedule, seconds, output)


@contextmanager
def failing_as_json(on: FabricRequest, collective: str, as_json: bool) -> Iterator[None]:
    """Say why there is no answer, as one JSON object where that is asked for; the error goes on."""
    try:
        yield
    except InfeasibleError as error:
        say_infeasible(error, on, collective, as_json)
        raise
    except TimedOutError as error:
        if as_json:
            print_json({"timed_out": True, "why": str(error)})
        raise


def say_infeasible(
    error: InfeasibleError, on: FabricRequest, collective: str, as_json: bool, more: Json | None = None
) -> None:
    """Note what would help on an error that goes on, and print it as one JSON object, with `more`."""
    from arborcast.synth.cli.description import infeasible_document, is_cut_off

    parts = on.parts() if is_cut_off(error) else None
    for line in () if parts is None else on.help_for(parts):
        error.add_note(line)
    if as_json:
        print_json({**infeasible_document(error, on.topology, collective, parts), **(more or {})})


def text_of(path: Path | None) -> str | None:
    """A path as JSON holds it."""
    return None if path is None else str(path)
