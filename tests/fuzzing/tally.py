"""What was compared, what was false, and how questions are drawn and answers played again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random
from typing import Any

from arborcast import synth
from arborcast.synth.collective import NAMED_KINDS, Collective, Kind
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError
from arborcast.synth.formats import topology_to_document
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Topology
from tests.fuzzing.replay import objections

CLOSE = 1 - Fraction(1, 10**9)  # what labels that say "to 1e-9" may miss
ROUNDED = 1 + Fraction(1, 10**6)  # how loose a bound of rounded prices may be
TREES = (Kind.BROADCAST, Kind.REDUCE, Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE)
FLOWS = (Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL)
TURNED = (Kind.REDUCE, Kind.REDUCE_SCATTER)


class CrashedError(Exception):
    """The product raised what is no answer; it is noted."""


@dataclass
class Tally:
    """What was compared, and what was false.

    Attributes:
        compared: how often each label was compared with its reference.
        unknown: how often the reference, or the product in its time, did not find out.
        false: a line for each false label or crash, with the seed and the fabric.
    """

    seed: int = 0
    question: str = ""
    topology: Topology | None = None
    fabrics: int = 0
    compared: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    false: list[str] = field(default_factory=list)

    def draw(self, topology: Topology) -> Topology:
        """Note which fabric is asked about."""
        self.topology = topology
        return topology

    def label(self, name: str, is_true: bool | None, *shown: object) -> None:
        """Note a label; None where the reference did not find out."""
        if is_true is None:
            self.unknown[name] += 1
            return
        self.compared[name] += 1
        if not is_true:
            self.note(f"{name}: {', '.join(map(str, shown))}")

    @contextmanager
    def no_crash(self, *asked: object) -> Iterator[None]:
        """Whatever is no answer of the product is a finding, too."""
        try:
            yield
        except (InputError, InfeasibleError, TimedOutError):
            raise
        except Exception as error:
            self.note(f"crash: {type(error).__name__}: {error}; asked {', '.join(map(str, asked))}")
            raise CrashedError from error

    def note(self, line: str) -> None:
        """Note what is false."""
        shown = "" if self.topology is None else topology_to_document(self.topology)
        self.false.append(f"seed {self.seed} {self.question}: {line}\n    on {shown}")

    def replay(self, schedule: Schedule, *asked: object) -> None:
        """Hold the product's verdict and that of our own replay against a schedule."""
        with self.no_crash("verify", *asked):
            verdict = synth.verify(schedule)
        self.label("verified", verdict.correct, *asked, verdict.errors[:2])
        wrong = objections(schedule)
        self.label("verified (own replay)", not wrong, *asked, wrong[:2])

    def solve(
        self, topology: Topology, collective: Collective, **request: Any
    ) -> Schedule | InfeasibleError | None:
        """The answer, replayed, or why there is none; None where it ran out of time."""
        with self.no_crash(collective, request):
            try:
                schedule = synth.solve(topology, collective, **request)
            except InfeasibleError as error:
                return error
            except TimedOutError:
                self.unknown["in time"] += 1
                return None
        self.replay(schedule, collective, request)
        return schedule

    def rate(self, schedule: Schedule, best: Fraction, *asked: object) -> None:
        """Hold the best rate there is against a schedule, and against its word "optimal"."""
        self.label("rate is possible", schedule.rate <= best, *asked, schedule.rate, best)
        said = not schedule.is_optimal or schedule.rate == best
        self.label("optimal", said, *asked, schedule.rate, best)


def draw_collective(
    rng: Random, topology: Topology, kinds: tuple[Kind, ...] = NAMED_KINDS, *, relays: bool = False
) -> Collective:
    """A collective among all ranks in any order or, with relays, among the first of them."""
    ranks = list(range(topology.ranks))
    if relays and topology.ranks > 2:
        ranks = ranks[: rng.randint(2, topology.ranks - 1)]
    if rng.random() < 0.1:
        rng.shuffle(ranks)
    kind = rng.choice(kinds)
    return Collective(kind, tuple(ranks), rng.choice(ranks) if kind.has_root else None)


def spreading(topology: Topology, collective: Collective) -> tuple[Topology, tuple[int, ...] | None]:
    """A question of trees as one of out-trees: the graph, and the roots; None where an allreduce chooses."""
    graph = topology.reversed() if collective.kind in TURNED else topology
    if collective.kind is Kind.ALLREDUCE:
        return graph, None
    return graph, collective.ranks if collective.root is None else (collective.root,)
