"""The entry of every question: a fabric and a collective in, a bound, a schedule or a frontier out.

`approach` is the one rule that decides in which form and by which method a question is answered, at every
number of ranks. `solve`, the command, sweeps and the process group all ask it: all get the same schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args, overload

from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Question, as_collective
from arborcast.synth.deadline import Deadline, run_until
from arborcast.synth.errors import InputError, TimedOutError
from arborcast.synth.faults.faulty import Faulty, left_of
from arborcast.synth.features import check_features
from arborcast.synth.methods import (
    IMPLICIT_KINDS,
    MOST_ORBITS,
    SERVES,
    check_knobs,
    implicit_method_for,
    method_for,
    natural_method,
)
from arborcast.synth.ports import Ports
from arborcast.synth.solve_options import SolveKeywords, SolveOptions
from arborcast.synth.topology import Topology

if TYPE_CHECKING:
    from typing import Unpack

    from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
    from arborcast.synth.schedule import Schedule
    from arborcast.synth.selection import Selection
    from arborcast.synth.symmetry.translations import Translations

Form: TypeAlias = Literal["auto", "explicit", "implicit"]
"""How a schedule is written: every chunk, or representatives and the translations that make the others."""

OnDeadline: TypeAlias = Literal["raise", "best"]
"""What becomes of the best schedule so far once the deadline has passed."""

LARGEST_EXPLICIT = 64
"""Ranks up to which schedules are written out unless asked otherwise: they are small, and easier to read."""


class QuestionKeywords(SolveKeywords, total=False):
    """What `solve` takes beside the form; its docstring says what each means."""

    method: str
    root: int
    ranks: Sequence[int] | None
    on_deadline: OnDeadline


@overload
def solve(
    topology: Topology | Faulty,
    collective: Question,
    *,
    form: Literal["explicit"],
    **told: Unpack[QuestionKeywords],
) -> Schedule: ...


@overload
def solve(
    topology: Topology | Faulty,
    collective: Question,
    *,
    form: Literal["implicit"],
    **told: Unpack[QuestionKeywords],
) -> ImplicitSchedule: ...


@overload
def solve(
    topology: Topology | Faulty,
    collective: Question,
    *,
    form: Form = "auto",
    **told: Unpack[QuestionKeywords],
) -> AnySchedule: ...


def solve(
    topology: Topology | Faulty,
    collective: Question,
    *,
    form: Form = "auto",
    method: str = "auto",
    root: int = 0,
    ranks: Sequence[int] | None = None,
    on_deadline: OnDeadline = "raise",
    **options: Unpack[SolveKeywords],
) -> AnySchedule:
    """A schedule of a collective on a fabric: the same that `synth solve` writes.

    Args:
        topology: the fabric; where something failed, what `synth.without` makes of the healthy one, from
            whose schedule a large regular fabric is then repaired.
        collective: a kind by name, or a whole `Collective` (then `root` and `ranks` are not used).
        form: "explicit" for a `Schedule`, in which every chunk is written out; "implicit" for an
            `ImplicitSchedule`, representatives and translations; "auto" decides as `approach` says, and is
            explicit for up to `LARGEST_EXPLICIT` ranks.
        method: "auto" or one of `synth.methods.METHODS`.
        root: for kinds that have one.
        ranks: those that take part; the others may forward, copy and reduce on the way. None for all.
        on_deadline: "raise" a `TimedOutError`, which carries the best schedule so far; or return the "best",
            whose `gap` says what it misses of the bound. Where there is none yet the error is raised.
        **options: fields of `synth.solve_options.SolveOptions`: `size_bytes`, `max_trees`, `deadline_s`, ...

    Raises:
        InputError: an unknown method, an option it does not have, a collective that does not fit, or a form
            that the question has no answer in; says why.
        InfeasibleError: there is no such schedule; carries the proof.
        TimedOutError: the deadline passed; carries the best schedule so far.

    Examples:
        >>> fabric = topologies.load("dgx1").subset([1, 4, 5, 6])
        >>> schedule = synth.solve(fabric, "allreduce")
        >>> schedule.rate == synth.bound(fabric, "allreduce").rate
        True
    """
    if on_deadline not in get_args(OnDeadline):
        raise InputError(f"on_deadline {on_deadline}: must be one of {', '.join(get_args(OnDeadline))}")
    asked = approach(topology, collective, method, SolveOptions(**options), form, root=root, ranks=ranks)
    try:
        return asked.answer()
    except TimedOutError as late:
        if on_deadline == "raise" or late.best is None:
            raise
        return late.best


@dataclass(frozen=True, slots=True)
class Approach:
    """How a question is answered; `approach` makes it.

    Attributes:
        topology: the fabric, or what is left of it.
        collective: on it.
        method: "auto" or one of `synth.methods.METHODS`.
        options: what the method is told.
        translations: those by which it is answered, in implicit form; None where chunks are written out.
        faulty: given where the healthy fabric's schedule is repaired; else None.
        only_implicit: whether schedules that are written out are no answer.
    """

    topology: Topology
    collective: Collective
    method: str
    options: SolveOptions
    translations: Translations | None = None
    faulty: Faulty | None = None
    only_implicit: bool = False

    def answer(self) -> AnySchedule:
        """The fastest at the size that was asked for; without one by the named method, or of the best rate.

        Raises as `solve`.
        """
        if self.options.size_bytes is not None:
            return self.selection().fastest_in_time(self.options.size_bytes)
        with run_until(Deadline.after(self.options.deadline_s)):
            return self._of_best_rate()

    def _of_best_rate(self) -> AnySchedule:
        topology, collective, options = self.topology, self.collective, self.options
        if self.translations is not None:
            solve_implicitly = implicit_method_for(topology, collective)
            return solve_implicitly(topology, collective, options, translations=self.translations)
        if self.faulty is not None:
            from arborcast.synth.faults.repair import solve_partly_symmetric

            return solve_partly_symmetric(self.faulty, collective.kind, options)
        return method_for(self.method, topology, collective)(topology, collective, options)

    def candidates(self, left_out: dict[str, str] | None = None) -> Iterator[AnySchedule]:
        """Every schedule worth comparing over sizes, as they are found; raises as `solve`, in between.

        Args:
            left_out: is filled with the methods that were not compared, and why.
        """
        from arborcast.synth.candidates import Candidates
        from arborcast.synth.schedule import Schedule

        left_out = {} if left_out is None else left_out
        if self.topology.streams:
            return self._through_ports(left_out)
        options = replace(self.options, size_bytes=None)
        of_all = replace(Candidates.of(self.topology, self.collective, options), left_out=left_out)
        if self.translations is not None:
            found = of_all.implicit(self.translations)
            return (each for each in found if not (self.only_implicit and isinstance(each, Schedule)))
        return of_all.explicit(replace(self, options=of_all.options).answer)

    def _through_ports(self, left_out: dict[str, str]) -> Iterator[AnySchedule]:
        from arborcast.synth.in_network.switch_schedules import lifted

        ports = Ports.of(self.topology)
        found = cast("Iterator[Schedule]", replace(self, topology=ports.fabric).candidates(left_out))
        return lifted(found, ports.lift)

    def selection(self) -> Selection:
        """All candidates, of which the simulator knows the fastest at each size.

        Where the options name a size, those that it takes to find a fast one there (see `compared`).

        Raises:
            InfeasibleError: no method has a schedule.
            TimedOutError: the deadline passed before there was any schedule.
        """
        from arborcast.synth.selection import compared

        left_out: dict[str, str] = {}
        return compared(
            self.candidates(left_out),
            self.collective.kind,
            size_bytes=self.options.size_bytes,
            deadline=Deadline.after(self.options.deadline_s),
            least_piece=self.options.min_piece_bytes,
            left_out=left_out,
        )


def approach(
    topology: Topology | Faulty,
    collective: Question,
    method: str = "auto",
    options: SolveOptions | None = None,
    form: str = "auto",
    *,
    root: int = 0,
    ranks: Sequence[int] | None = None,
) -> Approach:
    """In which form and by which method a question is answered; arguments as in `solve`.

    1. The form "implicit" is answered by the translations of the fabric.
    2. So is "auto" where the fabric has more than `LARGEST_EXPLICIT` ranks in at most `MOST_ORBITS` orbits,
       all of them take part, none has streams, the collective has no root, and the method is "auto" or its
       `natural_method`.
    3. "auto" on what faults left of such a fabric is answered by repairing the healthy one's schedule, where
       neither few trees nor low ones are asked for; the repaired one is written out.
    4. Everything else is written out: by the method that is named; by "auto" with a size, by the fastest of
       all that apply; by "auto" without one, by the `natural_method`, or by chunks where it is custom.

    Raises:
        InputError: an unknown method or form, an option that the method does not have, a collective that does
            not fit, or a form that the question has no answer in.
    """
    options = options or SolveOptions()
    if form not in get_args(Form):
        raise InputError(f"form {form}: must be one of {', '.join(get_args(Form))}")
    left = left_of(topology)
    asked = as_collective(left, collective, root=root, ranks=ranks)
    check_knobs(method, asked, options)
    check_features(left, f"method {method}")
    options = replace(options, deadline_s=Deadline.after(options.deadline_s))
    translations = _translations(left, asked, method, options, form)
    faulty = None
    if isinstance(topology, Faulty) and translations is None and form == "auto":
        faulty = topology if _is_better_repaired(topology, asked, method, options) else None
    return Approach(left, asked, method, options, translations, faulty, form == "implicit")


def _translations(
    topology: Topology, collective: Collective, method: str, options: SolveOptions, form: str
) -> Translations | None:
    """Those by which a question is answered; None where chunks are written out.

    Raises:
        InputError: the implicit form is asked for and there is none.
    """
    natural = natural_method(collective)
    if form == "implicit" and method not in {"auto", natural}:
        raise InputError(
            f"method {method}: the implicit form of {collective.kind} is made by {natural} (or auto)"
        )
    if form == "explicit" or method not in {"auto", natural}:
        return None
    kind, relays = collective.kind, topology.ranks - len(collective.ranks)
    if form == "implicit" and kind not in IMPLICIT_KINDS:
        raise InputError(f"{kind}: has no implicit form, which is for {', '.join(IMPLICIT_KINDS)}")
    if form == "implicit" and relays:
        raise InputError(f"{kind}: the implicit form is for all ranks of a topology, got {relays} relays")
    if form == "auto" and (topology.streams or kind not in IMPLICIT_KINDS or relays):
        return None
    if form == "auto" and topology.ranks <= LARGEST_EXPLICIT:
        return None
    from arborcast.synth.symmetry.translation_search import translations_of

    found = translations_of(topology, seed=options.seed)
    if form == "implicit" and found.order == 1:
        raise InputError(
            f"topology {topology.name}: the implicit form needs a symmetry that moves every rank, found none"
        )
    if form == "auto" and (found.order == 1 or len(found.representatives) > MOST_ORBITS):
        return None
    return found


def _is_better_repaired(faulty: Faulty, collective: Collective, method: str, options: SolveOptions) -> bool:
    """Whether what is left is solved from the schedule of the healthy fabric."""
    from arborcast.synth.faults.repair import SERVED

    if collective.kind not in SERVED or len(collective.ranks) < faulty.topology.ranks:
        return False
    if any(getattr(options, name) is not None for name in SERVES if name != "size_bytes"):
        return False
    healthy = Collective.on(faulty.healthy, collective.kind)
    return _translations(faulty.healthy, healthy, method, options, "auto") is not None


def bound(
    topology: Topology,
    collective: Question,
    *,
    root: int = 0,
    ranks: Sequence[int] | None = None,
) -> Bound:
    """The proven limit of a collective's rate on a topology, with its certificate.

    Args:
        topology: the fabric.
        collective: a kind by name, or a whole `Collective` (then `root` and `ranks` are not used).
        root: for kinds that have one.
        ranks: those that take part; the others may forward, copy and reduce on the way. None for all.

    Raises:
        CollectiveError: the collective does not fit the topology.

    Examples:
        >>> limit = synth.bound(topologies.load("ring:4"), "allreduce")
        >>> limit.rate, limit.certificate.capacity  # GB/s, the latter between four sets of one rank
        (Fraction(4, 3), Fraction(4, 1))
    """
    from arborcast.synth import bounds

    return bounds.bound(topology, as_collective(topology, collective, root=root, ranks=ranks))
