"""A step of training, played through event by event on the links of a topology.

Every rank does its stage's passes strictly in order, each as soon as its input is there; results leave at
once and share links with what else is under way. It stands between orders and predictions: planners compare
plans by it, and pictures set it above what was measured.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.order.actions import Action, Passes, Phase
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.simulation.clock import Clock
from arborcast.pipeline.simulation.deliveries import Deliveries, Pair
from arborcast.pipeline.simulation.synchronisation import BucketRun, bucket_runs, ties_us, updates_us
from arborcast.pipeline.simulation.timeline import Interval, Timeline, waiting
from arborcast.pipeline.stages import Overlap, Plan, StageWorker, check_topology, overlaps, shares


def simulate(
    plan: Plan,
    profile: Profile,
    network: LinkCosts,
    *,
    batch: int | None = None,
) -> Timeline:
    """What every rank of a plan does when in a step.

    Between two stages of one worker nothing is sent. Messages between two ranks keep their order: each
    occupies the pair for `network.message_us` and for its bytes at its max-min fair share of its links, and
    is there after their latency. The replicas of a stage sum gradients bucket by bucket, each once the last
    backward passes of all of them have come to it; once all ranks are through their passes and know the loss,
    stages sum the gradients of parameters that they share with others, then update; each allreduce takes
    `network.allreduce_us` whatever else is on the links. With recomputation each backward pass takes longer
    by the forward time of what is recomputed, on the last stage too, as the trainer does it;
    `costs.activations` says what offload adds. Where the order splits backward passes, their second half
    takes the second of `profile.halves_us`.

    Args:
        plan: what to do.
        profile: of the plan's model.
        network: the topology whose ranks the plan names.
        batch: samples of a step; None for those of the profile.

    Raises:
        PlanError: the plan does not fit the profile or the topology, no path leads from one stage to the
            next, or replicas are not connected.
        BatchError: the batch does not split into microbatches and replicas.

    Examples:
        >>> profile = pipeline.profile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(8, 8))
        >>> plan = pipeline.Plan([(0, 1, [0]), (1, 2, [1])], microbatches=4)
        >>> costs = pipeline.LinkCosts(topologies.load("full:2"))
        >>> pipeline.simulate(plan, profile, costs).time_us > 0
        True
    """
    check_fit(plan, profile, network)
    return _Simulation(plan, profile, network, profile.samples if batch is None else batch).run()


def check_fit(plan: Plan, profile: Profile, network: LinkCosts) -> None:
    """Whether a plan is for this model and this topology (links may be of other bandwidths).

    Raises:
        PlanError: it is not.
    """
    if plan.is_divided:
        raise PlanError("plan: divides operators, of which a profile of layers alone does not say the costs")
    if plan.depth != profile.depth:
        raise PlanError(
            f"plan: must hold the {profile.depth} layers of profile {profile.model}, got {plan.depth}"
        )
    if plan.model and profile.model and plan.model != profile.model:
        raise PlanError(f"plan: is for model {plan.model}, got the profile of {profile.model}")
    check_topology(plan, network.topology)


KIND_OF = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.WEIGHTS: "weights"}
"""What an interval of each phase is called."""


class _ReplicaShare(NamedTuple):
    """What one replica gives to one of a neighbouring stage for a microbatch of some size."""

    pair: Pair | None  # None where both are one rank
    size_bytes: float


class _Pass(NamedTuple):
    """A pass of one replica for a microbatch of some size."""

    duration_us: float
    inputs: int  # parts
    outputs: tuple[_ReplicaShare, ...]
    messages: int  # of both, those from and to other ranks


class _RankState:
    """What a rank does, by position in its worker's order, and where it stands."""

    def __init__(self, rank: int, worker: int, actions: tuple[Action, ...], passes: list[_Pass]) -> None:
        self.rank = rank
        self.worker = worker
        self.actions = actions
        self.passes = passes
        self.missing = [it.inputs for it in passes]
        self.at = 0
        self.busy = False
        self.spans: list[tuple[float, float]] = []  # in which it was not waiting
        self.begun = 0.0  # its pass
        self.left = 0.0  # of its pass as of `since`, at full speed
        self.since = 0.0
        self.version = 0  # of the end of its pass that was foretold


class _Simulation:
    """One run."""

    def __init__(self, plan: Plan, profile: Profile, network: LinkCosts, batch: int) -> None:
        self.plan, order = plan, plan.passes
        self.profile = profile
        self.network = network
        self.clock = Clock()
        self.pairs: dict[tuple[int, int], Pair] = {}
        self.splits = any(action.phase is Phase.WEIGHTS for actions in order for action in actions)
        self.sizes = plan.microbatch_sizes(batch)
        self.ranks = self._ranks(self.sizes, order)
        # Where in its receiver's order the pass stands that a message is for.
        self.places = [{action: place for place, action in enumerate(actions)} for actions in order]
        # By rank and stage: microbatch and end of its last pass, and how many times as long that took.
        self.last: dict[tuple[int, int], tuple[int, float, float]] = {}
        self.computing: dict[int, _RankState] = {}
        self.slowdown = 1.0
        self.bucket_runs = [bucket_runs(plan, profile, network, worker) for worker in plan.workers]
        self.ties_us = ties_us(plan, profile, network)
        self.updates_us = updates_us(plan, profile)
        self.deliveries = Deliveries(network, self.clock, list(self.pairs.values()))
        self.intervals: list[Interval] = []

    def run(self) -> Timeline:
        """Play the passes, then the allreduces and the updates."""
        for rank in self.ranks.values():
            self._compute(rank, 0.0)
        self.clock.run()
        self._check_finished()
        self._synchronise()
        made = self.intervals + self.deliveries.intervals
        end = max(interval.end_us for interval in made)
        for rank in self.ranks.values():
            made += waiting(rank.rank, rank.spans, end)
        return Timeline(tuple(sorted(made, key=lambda it: (it.start_us, it.rank))))

    def _ranks(self, sizes: tuple[int, ...], order: Passes) -> dict[int, _RankState]:
        passes = {samples: self._passes(samples) for samples in dict.fromkeys(sizes)}
        ranks = {}
        for index, (worker, actions) in enumerate(zip(self.plan.workers, order, strict=True)):
            for rank in worker.ranks:
                own = [passes[sizes[it.microbatch]][rank, it.stage, it.phase] for it in actions]
                ranks[rank] = _RankState(rank, index, actions, own)
        return ranks

    def _passes(self, samples: int) -> dict[tuple[int, int, Phase], _Pass]:
        """By rank, stage and phase, the passes for a microbatch of so many samples."""
        stages, profile = self.plan.stages, self.profile
        crossings = [overlaps(samples, a.replicas, b.replicas) for a, b in pairwise(stages)]
        passes: dict[tuple[int, int, Phase], _Pass] = {}
        for index, stage in enumerate(stages):
            onward = crossings[index] if index < len(crossings) else ()
            back = crossings[index - 1] if index else ()
            for replica, (start, stop) in enumerate(shares(samples, stage.replicas)):
                (forward, backward), weights = self.plan.pass_us(profile, index, stop - start), 0.0
                if self.splits:
                    backward, weights = profile.halves_us(stage.start, stage.end, stop - start)
                ours = [it for it in onward if it.sender == replica]
                theirs = [it for it in back if it.receiver == replica]
                forth = tuple(self._part(index, it, Phase.FORWARD) for it in ours)
                home = tuple(self._part(index - 1, it, Phase.BACKWARD) for it in theirs)
                # What is sent over a boundary one way is received over it the other way.
                messages = sum(it.pair is not None for it in (*forth, *home))
                rank = stage.ranks[replica]
                for phase, time, inputs, outputs in (
                    (Phase.FORWARD, forward, len(theirs), forth),
                    (Phase.BACKWARD, backward, len(ours), home),
                    (Phase.WEIGHTS, weights, 0, ()),
                ):
                    handled = messages if phase is not Phase.WEIGHTS else 0
                    passes[rank, index, phase] = _Pass(time, inputs, outputs, handled)
        return passes

    def _part(self, before: int, overlap: Overlap, phase: Phase) -> _ReplicaShare:
        """A message over the boundary behind stage `before`; to the rank itself where both are there."""
        ours, theirs = self.plan.stages[before], self.plan.stages[before + 1]
        src, dst = ours.ranks[overlap.sender], theirs.ranks[overlap.receiver]
        if phase is Phase.BACKWARD:
            src, dst = dst, src
        if src != dst and (src, dst) not in self.pairs:
            self.pairs[src, dst] = Pair(src, dst, self.network)
        size = self.profile.output_bytes(theirs.start, overlap.stop - overlap.start)
        return _ReplicaShare(self.pairs.get((src, dst)), size)

    def _compute(self, rank: _RankState, now: float) -> None:
        """Begin a rank's next pass if the rank is free and the input is there."""
        place = rank.at
        if rank.busy or place == len(rank.actions) or rank.missing[place]:
            return
        rank.busy = True
        rank.begun, rank.left, rank.since = now, rank.passes[place].duration_us, now
        self.computing[rank.rank] = rank
        self._foretell(now, rank)

    def _foretell(self, now: float, *begun: _RankState) -> None:
        """When passes end: those that have just begun, and all where ranks are now slowed down otherwise."""
        others = (len(self.computing) - 1) / max(len(self.ranks) - 1, 1)
        before, self.slowdown = self.slowdown, 1 + (self.profile.crowding - 1) * max(others, 0.0)
        for it in begun if self.slowdown == before else tuple(self.computing.values()):
            it.left, it.since = it.left - (now - it.since) / before, now
            it.version += 1
            self.clock.at(now + it.left * self.slowdown, self._finish, (it, it.version))

    def _finish(self, now: float, foretold: tuple[_RankState, int]) -> None:
        """Send the result of a pass, see to its messages and go on."""
        rank, version = foretold
        if version != rank.version:  # it is slower or faster since
            return
        del self.computing[rank.rank]
        self._foretell(now)
        place = rank.at
        rank.at += 1
        done = rank.passes[place]
        action = rank.actions[place]
        kind = KIND_OF[action.phase]
        self.intervals.append(
            Interval(rank.rank, kind, action.microbatch, rank.begun, now, stage=action.stage)
        )
        rank.spans.append((rank.begun, now))
        if action.phase is not Phase.FORWARD:
            stretch = (now - rank.begun) / done.duration_us if done.duration_us else 1.0
            self.last[rank.rank, action.stage] = action.microbatch, now, stretch
        taker = action.taker(len(self.plan.stages))
        for pair, size_bytes in done.outputs:
            assert taker is not None, "the pass has an output"
            receiver = rank if pair is None else self.ranks[pair.dst]
            place = self.places[receiver.worker][taker]
            if pair is None:
                receiver.missing[place] -= 1
            else:
                self.deliveries.send(
                    pair, size_bytes, action.microbatch, now, self._arrive, (receiver, place)
                )
        handling_us = self.network.handling_us * done.messages
        if handling_us:
            rank.spans.append((now, now + handling_us))
            self.clock.at(now + handling_us, self._go_on, rank)
        else:
            self._go_on(now, rank)

    def _go_on(self, now: float, rank: _RankState) -> None:
        rank.busy = False
        self._compute(rank, now)

    def _arrive(self, now: float, message: tuple[_RankState, int]) -> None:
        receiver, place = message
        receiver.missing[place] -= 1
        self._compute(receiver, now)

    def _check_finished(self) -> None:
        stuck = {
            rank.worker: rank.actions[rank.at] for rank in self.ranks.values() if rank.at < len(rank.actions)
        }
        if stuck:
            waits = ", ".join(f"stage {it.stage} before {it}" for _, it in sorted(stuck.items()))
            raise PlanError(f"order: passes must not wait for each other in a circle, got {waits}")

    def _synchronise(self) -> None:
        """The allreduces of all stages, those of shared parameters behind them, and the updates.

        No worker updates before all ranks are through: they hear of the loss first (`run.executor`).
        """
        workers = self.plan.workers
        ready = [max(it.spans[-1][1] for it in self.ranks.values())] * len(workers)
        for index, (worker, runs) in enumerate(zip(workers, self.bucket_runs, strict=True)):
            done = 0.0
            for run in runs:
                start = max(done, *(self._there_us(worker, rank, run) for rank in worker.ranks))
                done = start + run.time_us
                self._busy(worker.ranks, "allreduce", start, done)
            ready[index] = max(ready[index], done)
        for users, time in self.ties_us.items():
            start = max(ready[worker] for worker in users)
            for index in users:
                self._busy(workers[index].ranks, "allreduce", start, start + time)
                ready[index] = start + time
        for it, start, time in zip(workers, ready, self.updates_us, strict=True):
            self._busy(it.ranks, "update", start, start + time)

    def _there_us(self, worker: StageWorker, rank: int, run: BucketRun) -> float:
        """When a rank has all gradients of some buckets: only layers before them are still to be passed."""
        there = 0.0
        for stage, first in run.firsts.items():
            microbatch, end, stretch = self.last[rank, stage]
            start, stop = shares(self.sizes[microbatch], len(worker.ranks))[worker.ranks.index(rank)]
            rest = self.plan.stages[stage].start, first, stop - start
            rest_us = self.profile.halves_us(*rest)[1] if self.splits else self.profile.backward_us(*rest)
            there = max(there, end - rest_us * stretch)
        return there

    def _busy(self, ranks: tuple[int, ...], kind: str, start: float, end: float) -> None:
        if end > start:
            for rank in ranks:
                self.intervals.append(Interval(rank, kind, None, start, end))
                self.ranks[rank].spans.append((start, end))
