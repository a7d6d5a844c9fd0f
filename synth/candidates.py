"""Which schedules are worth comparing for a collective on a fabric: all methods that apply, each in its turn.

Each is made only when the one before it is taken, so that a comparison can end early. What is not made is
noted with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from arborcast.synth.baselines import BASELINES
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import NO_DEADLINE, Deadline
from arborcast.synth.errors import CollectiveError, InfeasibleError
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.methods import (
    IMPLICIT_KINDS,
    MOST_ORBITS,
    implicit_method_for,
    method_for,
    natural_method,
)
from arborcast.synth.schedule import Chunk, Schedule, Transfer
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Topology

FEW_TREES = (1, 2)
"""Tree counts that are tried besides the full packing: few trees are shallow and start fast."""

LARGEST_SHALLOW = 16
"""Ranks up to which packings of lower trees of any shape are among the candidates: seconds. Above it, those
that are alike under the symmetries of the fabric."""

LARGEST_FRONTIER = 16
"""Ranks up to which the frontier of chunk schedules is among the candidates: seconds."""

FEWEST_PLACED = 16
"""Ranks from which on trees placed in time are compared: on fewer, chunk schedules are as fast or faster."""

EXTRA_STEPS = 2
"""How many steps beyond the latency its candidates may take; more of them serve large messages only, where
trees are as fast and pipelined."""


@dataclass(frozen=True)
class Candidates:
    """What is compared for one question.

    Where something is asked of trees, only those that keep to it are: other schedules have none. The deadline
    of the question is one for all of them: each iterator ends with TimedOutError once it has passed.

    Attributes:
        topology: the fabric.
        collective: what to do on it.
        options: their knobs are handed to every method.
        deadline: of the question.
        left_out: methods that were not compared, and why; filled while candidates are made.
    """

    topology: Topology
    collective: Collective
    options: SolveOptions
    deadline: Deadline = NO_DEADLINE
    left_out: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, topology: Topology, collective: Collective, options: SolveOptions) -> Candidates:
        """For these wishes, whose deadline begins now."""
        deadline = Deadline.after(options.deadline_s)
        return cls(topology, collective, replace(options, deadline_s=deadline), deadline)

    # ------------------------------------------------------------------------------------ the two orders

    def explicit(self, of_best_rate: Callable[[], AnySchedule]) -> Iterator[AnySchedule]:
        """Every schedule worth comparing, the one of the highest rate first (a custom collective: last).

        Args:
            of_best_rate: makes the first one.

        Raises:
            InfeasibleError: the first one, which reaches the bound wherever anything can, does not exist.
            TooManyRoutesError: only chunk schedules apply, and the topology is beyond them.
        """
        height, only_forward = 0, False
        if self.collective.kind is not Kind.CUSTOM:
            fastest_rate = of_best_rate()
            height = fastest_rate.height
            yield fastest_rate
            if self._is_able and self._is_of_trees:
                self._check()
                if fastest_rate.uses_switches:
                    solve = method_for("trees", self.topology, self.collective, only_forward=True)
                    yield solve(self.topology, self.collective, self.options)
                only_forward = self._need_no_able_switch(fastest_rate.bound)
        yield from self._by_name(only_forward)
        if self._may_be_low and self.topology.ranks > LARGEST_SHALLOW:
            yield from self.shallow_by_symmetry()
        yield from self._on(self._that_forward(height)) if self._is_able else self._that_forward(height)
        if not self.options.is_about_trees:
            yield from self.exchanges_written_out()
            yield from self.by_levels()

    def implicit(self, translations: Translations) -> Iterator[AnySchedule]:
        """Every schedule worth comparing on many ranks, the one of the highest rate first; raises the same.

        All are in implicit form but for a few trees by levels, which no translation maps to each other.
        """
        topology, collective = self.topology, self.collective
        solve_implicitly = implicit_method_for(topology, collective)
        best = solve_implicitly(topology, collective, self.options, translations=translations)
        yield best
        self.left_out["others without symmetry"] = (
            f"the answer is in implicit form, for {topology.ranks} ranks"
        )
        if collective.kind is Kind.ALLTOALL or self.options.is_about_trees:
            return
        from arborcast.synth.packing.symmetric.height_frontier import symmetric_frontier

        self._check()
        forwarding, options = topology.forwarding, self.options
        for lower in symmetric_frontier(forwarding, collective, options, translations=translations):
            yield replace(lower, topology=topology, bound=best.bound)
        from arborcast.synth.baselines.bidirectional_rings import implicit_two_way_rings
        from arborcast.synth.baselines.mixed_radix_butterfly import exchange_schedules
        from arborcast.synth.baselines.square_rings import implicit_square_rings

        yield from exchange_schedules(topology, collective, best.bound, translations, self.deadline)
        yield from self.by_levels(best.bound)
        for along_rings in (implicit_square_rings, implicit_two_way_rings):
            if (rings := along_rings(topology, collective, best.bound, translations)) is not None:
                yield rings

    # --------------------------------------------------------------------------------------- their parts

    def exchanges_written_out(self) -> Iterator[Schedule]:
        """Exchanges by digits on few ranks, where switches join them."""
        if not self._is_of_all_alike:
            return
        from arborcast.synth.baselines.mixed_radix_butterfly import exchange_schedules
        from arborcast.synth.symmetry.translation_search import translations_of

        translations = translations_of(self.topology, seed=self.options.seed)
        for found in exchange_schedules(
            self.topology, self.collective, self._bound(), translations, self.deadline
        ):
            yield found if isinstance(found, Schedule) else found.expand()

    def by_levels(self, limit: Bound | None = None) -> Iterator[Schedule]:
        """Trees by levels of several shapes; a bound that is known is not worked out again."""
        if self.collective.kind not in BASELINES["levels"].kinds:
            return
        from arborcast.synth.baselines.hierarchical_trees import level_schedules

        try:
            yield from level_schedules(self.topology, self.collective, limit or self._bound(), self.deadline)
        except InfeasibleError as error:  # no boxes that are joined rank by rank
            self._leave_out("levels", error)

    def shallow_by_symmetry(self) -> Iterator[Schedule]:
        """Few and low trees that the fabric's translations map to each other, written out."""
        if self.collective.kind not in IMPLICIT_KINDS:
            return
        from arborcast.synth.in_network.switch_schedules import on_able_switches
        from arborcast.synth.packing.symmetric.height_frontier import symmetric_frontier
        from arborcast.synth.symmetry.translation_search import translations_of

        self._check()
        topology, options = self.topology, self.options
        translations = translations_of(topology, seed=options.seed)
        if translations.order == 1 or len(translations.representatives) > MOST_ORBITS:
            reason = f"more than {LARGEST_SHALLOW} ranks, and no symmetry leaves few of them"
            self.left_out["lower trees"] = reason
            return
        limit = self._bound() if self._is_able else None
        lower = symmetric_frontier(topology.forwarding, self.collective, options, translations=translations)
        for found in lower:
            if options.max_height is None or found.height <= options.max_height:
                # Whose form it was expanded from is what it is simulated by, so that it is changed before.
                yield (found if limit is None else on_able_switches(found, topology, limit)).expand()

    def _by_name(self, only_forward: bool) -> Iterator[AnySchedule]:
        """Patterns of the field, and few trees; each schedule once."""
        from arborcast.synth.baselines.bidirectional_rings import both_ways

        options, kind = self.options, self.collective.kind
        wanted = [
            (name, options) for name, row in BASELINES.items() if name != "levels" and kind in row.kinds
        ]
        if options.is_about_trees:
            self.left_out["all but trees"] = "something is asked of trees"
            wanted = []
        if self._is_of_trees and options.tolerance is None:
            counts = [few for few in FEW_TREES if options.max_trees is None or few < options.max_trees]
            wanted += [("trees", replace(options, max_trees=few)) for few in counts]
        made: dict[tuple[tuple[Chunk, ...], tuple[Transfer, ...]], str] = {}
        for name, its_options in wanted:
            try:
                self._check()
                solve = method_for(name, self.topology, self.collective, only_forward=only_forward)
                found = solve(self.topology, self.collective, its_options)
                same = (found.chunks, tuple(found.transfers))
                if same in made:
                    if name != "trees":  # of which others are compared
                        self.left_out[name] = f"the same schedule as by {made[same]}"
                    continue
                made[same] = name
                yield found
                if name == "multiring" and (joined := both_ways(found)) is not None:
                    yield joined
            except (InfeasibleError, CollectiveError) as error:
                self._leave_out(name, error)  # it does not fit this graph; the others still may

    def _that_forward(self, height: int) -> Iterator[Schedule]:
        """What asks switches only to forward: lower trees than of `height`, placed ones, chunk schedules."""
        topology, collective, options = self.topology.forwarding, self.collective, self.options
        if self._may_be_low and topology.ranks <= LARGEST_SHALLOW:
            from arborcast.synth.packing.tree_solver import shallow_schedules

            self._check()
            seed, deadline = options.seed, self.deadline
            yield from shallow_schedules(topology, collective, below=height, seed=seed, deadline=deadline)
        if options.is_about_trees:
            return
        if topology.ranks >= FEWEST_PLACED:
            from arborcast.synth.baselines.placed_trees import placed_schedules

            yield from placed_schedules(topology, collective, self.deadline)
        if collective.kind is Kind.CUSTOM or topology.ranks <= LARGEST_FRONTIER:
            yield from self._frontier(topology)
        else:
            self.left_out["pareto"] = f"more than {LARGEST_FRONTIER} ranks"

    def _frontier(self, topology: Topology) -> Iterator[Schedule]:
        """Chunk schedules of few steps, found with little effort and therefore unproved."""
        from arborcast.synth.chunks.allreduce.halves import latency_of_parts
        from arborcast.synth.chunks.frontier import pareto
        from arborcast.synth.chunks.problem.instance import TooManyRoutesError

        self._check()
        options = self.options
        try:
            frontier = pareto(
                topology,
                self.collective,
                max_steps=(latency_of_parts(topology, self.collective) or 0) + EXTRA_STEPS,
                rate_tolerance=options.rate_tolerance,
                deadline_s=self.deadline,
                seed=options.seed,
                cache=options.cache,
                proofs=False,
            )
        except TooManyRoutesError as error:
            if self.collective.kind is Kind.CUSTOM:
                raise
            self._leave_out("pareto", error)  # trees serve such a fabric
            return
        yield from (point.schedule for point in frontier.points)
        if frontier.timed_out:
            raise self.deadline.missed_by("the comparison of methods")

    def _on(self, found: Iterator[Schedule]) -> Iterator[Schedule]:
        """The same schedules, also the one of an error, where switches may do more than they ask of them."""
        from arborcast.synth.in_network.switch_schedules import lifted, on_able_switches

        limit = self._bound()
        return lifted(found, lambda schedule: on_able_switches(schedule, self.topology, limit))

    # ------------------------------------------------------------------------------------- what they ask

    @property
    def _is_able(self) -> bool:
        return self.topology.forwarding is not self.topology

    @property
    def _is_of_trees(self) -> bool:
        return natural_method(self.collective) == "trees"

    @property
    def _may_be_low(self) -> bool:
        """Whether packings of lower trees are worth comparing: no number is asked for, no rank relays."""
        is_free = self.options.max_trees is None and self.options.tolerance is None
        return self._is_of_trees and is_free and len(self.collective.ranks) == self.topology.ranks

    @property
    def _is_of_all_alike(self) -> bool:
        kind, ranks = self.collective.kind, self.collective.ranks
        return kind in IMPLICIT_KINDS and len(ranks) == self.topology.ranks

    def _need_no_able_switch(self, limit: Bound) -> bool:
        """Whether few trees through able switches are not looked for: many ranks, others reach the limit."""
        from arborcast.synth.bounds import bound
        from arborcast.synth.in_network.switch_schedules import LARGEST_STEINER

        if self.topology.ranks <= LARGEST_STEINER:
            return False
        return bound(self.topology.forwarding, self.collective, self.deadline).rate == limit.rate

    def _bound(self) -> Bound:
        from arborcast.synth.bounds import bound

        return bound(self.topology, self.collective)

    def _check(self) -> None:
        self.deadline.check("the comparison of methods")

    def _leave_out(self, name: str, error: Exception) -> None:
        """For the reason in a message "WHAT: reason; what serves instead"."""
        self.left_out[name] = str(error).partition(": ")[2].partition(";")[0]
