"""What a page of the atlas says of one machine, worked out by what the commands ask, and its document.

    synth bound      limit, certificate and scope          synth verify     what is proved
    synth solve      the schedule of the best rate; with --size the table of choices, priced times
    synth explain    the best rings, NCCL's planning model

All of it depends on the topology alone: no date, no seconds of this machine, the same bytes each time. What a
question did not reach before its deadline is said, not shown in part.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import inf
from typing import Annotated, TypeAlias

from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from arborcast.synth.api import approach, bound
from arborcast.synth.baselines import solve_baseline
from arborcast.synth.baselines.nccl_model import ModelTime, nccl_times
from arborcast.synth.collective import NAMED_KINDS, Collective, Kind
from arborcast.synth.errors import CollectiveError, InfeasibleError, InputError, NumericalError, TimedOutError
from arborcast.synth.formats.reading import shorten_path
from arborcast.synth.formats.words import proof
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.progress import report
from arborcast.synth.routes.reachability import who_is_cut_off
from arborcast.synth.selection import SIZES, PricedLimit
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Topology
from arborcast.synth.verification.verifier import verify

FORMAT = "arborcast.atlas/1"
ANSWERS = 1
"""Raised where the answers of the code changed, so that `synth atlas --catalog` works all out again."""

CURVES = (Kind.ALLREDUCE, Kind.ALLGATHER)
KINDS = (*CURVES, *(kind for kind in NAMED_KINDS if kind not in CURVES))
SMALL = 1 << 20
"""Bytes up to which a buffer is small: latencies count there."""

SAMPLE = 1 << 16
"""Bytes of a small buffer whose schedule can be taken along."""

Exact: TypeAlias = Annotated[Fraction, PlainValidator(Fraction), PlainSerializer(str)]


@dataclass(frozen=True)
class KindRates:
    """What a collective of large buffers reaches; rates are algbw in GB/s.

    Attributes:
        kind: of the collective, with root 0 where it has one.
        limit: no schedule is faster, in the scope.
        proof: the certificate in words.
        scope: over which schedules.
        forwarding: the limit where switches only forward; None where they can do no more.
        rate: of the schedule found; None where `why` says why there is none.
        method: that found it.
        proved: whether the verifier found it correct and its certificate to prove exactly this rate.
        ring: of the best set of rings, None where `why_no_ring`.
        nccl: by NCCL's planning model for the largest buffer, None where `why_no_nccl`.
    """

    kind: str
    limit: Exact
    proof: str
    scope: str
    forwarding: Exact | None = None
    rate: Exact | None = None
    method: str = ""
    proved: bool = False
    why: str = ""
    ring: Exact | None = None
    why_no_ring: str = ""
    nccl: Exact | None = None
    why_no_nccl: str = ""


@dataclass(frozen=True)
class SizeTimes:
    """What a buffer takes, in us: by the schedule chosen, at least, by the best rings, by NCCL's model."""

    bytes: int
    method: str
    steps: int
    time_us: float
    least_us: float
    ring_us: float | None = None
    nccl_us: float | None = None

    @property
    def gap(self) -> float:
        """Part of the least time by which the chosen schedule may be too slow."""
        return self.time_us / self.least_us - 1


@dataclass(frozen=True)
class SizeCurve:
    """Least times over sizes, or why there are none."""

    kind: str
    points: tuple[SizeTimes, ...] = ()
    why: str = ""

    @property
    def small(self) -> Sequence[SizeTimes]:
        """Of small buffers."""
        return [each for each in self.points if each.bytes <= SMALL]

    @property
    def promised(self) -> bool:
        """Whether NCCL's model promises less than the least time anywhere."""
        return any(each.nccl_us is not None and each.nccl_us < each.least_us for each in self.points)

    def worst_gap(self) -> float | None:
        """Of small buffers."""
        return max((each.gap for each in self.small), default=None)


@dataclass(frozen=True)
class QuotedFigure:
    """What others published: algbw of a large buffer and its part of the limit, or a time and the least."""

    kind: str
    size: str
    who: str
    source: str
    rate: float | None = None
    share: float | None = None
    time_us: float | None = None
    least_us: float | None = None


@dataclass(frozen=True)
class Download:
    """A file beside the page; where `name` is empty, the command that makes it and why it is not there."""

    what: str
    command: str
    name: str = ""
    bytes: int = 0
    why: str = ""


@dataclass(frozen=True)
class Figures:
    """A page.

    Attributes:
        key: of what it was worked out from; another key is another page.
        name: of the topology.
        spec: as `synth atlas` was asked.
        about: what it is, in a line; empty for a file.
        vendor: whose it is.
        shape: ranks, switches and links in words.
        granted: what limits rest on: the model of switches, the source of rates, which of them are assumed.
        priced: whether times are of links as fast as they were measured to be.
        deadline_s: of each question.
        no_picture: why the fabric is not drawn; where empty, the picture lies beside the figures.
    """

    key: str
    name: str
    spec: str
    ranks: int
    shape: str
    vendor: str = ""
    about: str = ""
    granted: tuple[str, ...] = ()
    priced: bool = False
    deadline_s: float | None = None
    no_picture: str = ""
    rates: tuple[KindRates, ...] = ()
    curves: tuple[SizeCurve, ...] = ()
    measured: tuple[QuotedFigure, ...] = ()
    downloads: tuple[Download, ...] = ()
    format: str = FORMAT

    @property
    def folder(self) -> str:
        """The name of its folder, of the topology's name."""
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-.") or "machine"

    def of(self, kind: str) -> KindRates:
        """The rates of a kind."""
        return next(each for each in self.rates if each.kind == kind)

    def curve(self, kind: str) -> SizeCurve:
        """The times of a kind."""
        return next(each for each in self.curves if each.kind == kind)

    def to_document(self) -> bytes:
        """As JSON, rates as exact fractions."""
        return _ADAPTER.dump_json(self, exclude_defaults=True) + b"\n"

    @classmethod
    def from_document(cls, text: bytes, place: str) -> Figures:
        """Of JSON.

        Raises:
            InputError: it holds no figures.
        """
        try:
            return _ADAPTER.validate_json(text)
        except (ValidationError, ValueError, ZeroDivisionError) as error:
            raise InputError(f"{shorten_path(place)}: must hold figures of the atlas ({FORMAT})") from error


_ADAPTER = TypeAdapter(Figures)


@dataclass
class WorkedOut:
    """What was worked out: `schedules` of the best rates and `small` ones for `SAMPLE`, by kind."""

    rates: list[KindRates] = field(default_factory=list)
    curves: list[SizeCurve] = field(default_factory=list)
    schedules: dict[str, AnySchedule] = field(default_factory=dict)
    small: dict[str, AnySchedule] = field(default_factory=dict)


def work_out(topology: Topology, planned: Topology | None, options: SolveOptions) -> WorkedOut:
    """All rates and curves of a fabric.

    Args:
        topology: the fabric, all of whose ranks take part.
        planned: the same with the rates that NCCL plans with, where these are known; None where NCCL does
            not run on such ranks.
        options: `deadline_s` is that of each question.

    Raises:
        InfeasibleError: ranks cannot reach each other.
    """
    found = WorkedOut()
    for number, kind in enumerate(KINDS):
        report(f"{kind} on {topology.name}", number, len(KINDS))
        question = _Question(topology, planned, Collective.on(topology, kind), options)
        found.rates.append(question.rates(found.schedules))
        if kind in CURVES:
            found.curves.append(question.curve(found.small))
    return found


@dataclass(frozen=True)
class _Question:
    """A collective on a fabric."""

    topology: Topology
    planned: Topology | None
    asked: Collective
    options: SolveOptions

    def rates(self, schedules: dict[str, AnySchedule]) -> KindRates:
        """Its row of the table; the schedule goes to `schedules`."""
        kind = self.asked.kind.value
        limit = bound(self.topology, self.asked)
        if not limit.rate:
            raise InfeasibleError(who_is_cut_off(self.topology, self.asked), limit)
        row = KindRates(kind, limit.rate, proof(limit, self.topology), limit.scope.value)
        if self.topology.forwarding is not self.topology:
            row = replace(row, forwarding=bound(self.topology.forwarding, self.asked).rate)
        try:
            schedule = approach(self.topology, self.asked, "auto", self.options).answer()
            rate = _verified(schedule)
            schedules[kind] = schedule
            proved = rate == schedule.bound.rate  # which the verifier recomputed
            row = replace(row, rate=rate, method=schedule.method.name, proved=proved)
        except (TimedOutError, InputError, NumericalError) as error:
            row = replace(row, why=self._said(error))
        if isinstance(self.rings, str):
            row = replace(row, why_no_ring=self.rings)
        else:
            row = replace(row, ring=self.rings.rate)
        try:
            best = min(self._nccl([SIZES[-1]]), key=lambda each: each.time_us)
            return replace(row, nccl=best.rate)
        except (InfeasibleError, InputError) as error:
            return replace(row, why_no_nccl=str(error))

    def curve(self, small: dict[str, AnySchedule]) -> SizeCurve:
        """At every size what the table of `synth solve --size` chooses, by its priced time."""
        kind = self.asked.kind.value
        try:
            selection = approach(self.topology, self.asked, "auto", self.options).selection()
            if selection.out_of_time is not None:
                raise selection.out_of_time
            choices = selection.choices()
        except (TimedOutError, InputError, NumericalError) as error:
            return SizeCurve(kind, why=self._said(error))
        least = PricedLimit.of(choices[0].schedule)
        nccl: dict[int, float] = {}
        with suppress(InfeasibleError, InputError):  # the table of rates says why
            for row in self._nccl(SIZES):
                nccl[row.bytes] = min(rounded(row.time_us), nccl.get(row.bytes, inf))
        points = []
        for size in SIZES:
            chosen = next(each.schedule for each in reversed(choices) if each.from_bytes <= size)
            ring_us = None if isinstance(self.rings, str) else _time_us(self.rings, size)
            least_us, time_us = rounded(least.at(size)), _time_us(chosen, size)
            name, steps = chosen.method.name, chosen.steps
            points.append(SizeTimes(size, name, steps, time_us, least_us, ring_us, nccl.get(size)))
            if size == SAMPLE:
                _verified(chosen)
                small[kind] = chosen
        return SizeCurve(kind, tuple(points))

    @cached_property
    def rings(self) -> AnySchedule | str:
        """The best set of rings, or why there is none."""
        try:
            return solve_baseline(self.topology, self.asked, "multiring")
        except (InfeasibleError, InputError) as error:
            return str(error).removeprefix("multiring: ").removeprefix(f"{self.asked.kind}: ")

    def _nccl(self, sizes: Sequence[int]) -> Sequence[ModelTime]:
        if self.planned is None:
            raise CollectiveError("neither NCCL nor RCCL runs on such ranks")
        return nccl_times(self.planned, Collective.on(self.planned, self.asked.kind), sizes)

    def _said(self, error: Exception) -> str:
        late = isinstance(error, TimedOutError)
        return f"not reached in {self.options.deadline_s} s" if late else str(error)


def _verified(schedule: AnySchedule) -> Fraction:
    """The rate that a replay measures, the certificate checked: a schedule that fails it is a bug of ours."""
    verdict = verify(schedule)
    if not verdict.correct:
        raise AssertionError(f"{schedule.topology.name} {schedule.collective.kind}: {verdict.errors[0]}")
    return verdict.rate


def _time_us(schedule: AnySchedule, size: int) -> float:
    return rounded(simulate(schedule, size, priced=True).time_us)


def rounded(time_us: float) -> float:
    """To the nanosecond."""
    return round(time_us, 3)
