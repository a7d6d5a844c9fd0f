"""The tree methods: a topology and a collective in, a schedule out.

`solve_by_trees` is ForestColl's three steps: the rate with its certificate, what each link carries in each
direction, then trees that fit, perhaps thinned out to a few; `in_network` has what it does where switches can
reduce or multicast. Before them relays become switches and a
reduction is turned round; `lift` undoes both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from arborcast.synth.bounds import bound
from arborcast.synth.bounds.capacity_lp import SplitCapacities, most_central
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import TREE_KINDS, Collective, Kind
from arborcast.synth.deadline import NO_DEADLINE, Deadline
from arborcast.synth.errors import CollectiveError, InfeasibleError, InputError, TimedOutError
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.packing.exact import pack_split
from arborcast.synth.packing.fewest import fewest
from arborcast.synth.packing.mwu import DEFAULT_EPSILON, weigh
from arborcast.synth.packing.relays import relays_as_switches
from arborcast.synth.packing.splits import best_splits
from arborcast.synth.packing.to_schedule import lift
from arborcast.synth.packing.warm_start import NOTHING_KNOWN, StartingTrees
from arborcast.synth.packing.weighted_tree import Packing, WeightedTree, pair_up, rerooted
from arborcast.synth.routes.reachability import who_is_cut_off
from arborcast.synth.schedule import Method, Schedule
from arborcast.synth.solve_options import DEFAULTS, SolveOptions
from arborcast.synth.topology import Topology

_ROUNDS_UP_TO = 128  # roots; above, an arborescence for each would overrun a deadline by too much
_SPREADING = {Kind.REDUCE: Kind.BROADCAST, Kind.REDUCE_SCATTER: Kind.ALLGATHER}


def solve_by_trees(
    topology: Topology,
    collective: Collective,
    options: SolveOptions = DEFAULTS,
    *,
    known: StartingTrees = NOTHING_KNOWN,
) -> Schedule:
    """A broadcast, reduce, allgather, reduce-scatter or allreduce along an exact packing of trees.

    Args:
        topology: the fabric; ranks that take no part come after those that do and forward.
        collective: what is to be done.
        options: `max_trees` counts per root (of an allreduce: in all); with a tolerance too, that is tried
            first and kept where it needs no more trees. With `max_height` the best rate within it is found.
        known: trees to start from, where no height is asked for (see `synth.faults.repair`).

    Returns:
        The schedule; its rate is below its bound where the number of trees, their height or relays that
        cannot pass on all they receive keep it there.

    Raises:
        CollectiveError: a kind that trees cannot do, or relays with lower numbers than the ranks.
        InputError: a number out of its range, or a height together with relays.
        InfeasibleError: some ranks are cut off; carries the bound that proves it. Or no trees are as low.
        TimedOutError: the deadline passed; carries the best schedule found: where no packing was done, one
            round of multiplicative weights, which takes an arborescence per root beyond the deadline.
    """
    if topology.forwarding is not topology:
        from arborcast.synth.in_network.switch_schedules import solve_in_network

        _check(topology, collective, options)
        limit = bound(topology, collective, Deadline.after(options.deadline_s))
        return solve_in_network(topology, collective, options, limit, solve_by_trees)
    task = _Task.of(topology, collective, options)  # 1. the rate, with its certificate
    try:
        if options.max_height is None:
            splits = best_splits(task.graph, task.spreading, task.limit.rate)  # 2. what each link carries
            packing = min(_packings(task, splits, known), key=_latency)  # 3. trees that use all of it
            packing = _thinned(task, packing, splits[0].rate)
        else:
            from arborcast.synth.packing.bounded_height import pack_shallow

            packing = pack_shallow(task.graph, task.roots, task.limit.rate, options, task.deadline)
    except TimedOutError as error:
        raise task.too_late(task.schedule("mwu", _one_round(task)), error) from error
    return task.in_time(task.schedule("trees", packing))


def solve_by_weights(
    topology: Topology, collective: Collective, options: SolveOptions = DEFAULTS
) -> Schedule:
    """The same along trees from multiplicative weights, which miss at most `options.epsilon` of the rate.

    Raises:
        InputError: a number out of its range, or a height.
        CollectiveError: see `solve_by_trees`, as the others.
    """
    if options.max_height is not None:
        raise InputError("method mwu: takes no max-height, which is for trees")
    task = _Task.of(topology, collective, options)
    epsilon = DEFAULT_EPSILON if options.epsilon is None else options.epsilon
    enough = task.of_each_root(task.limit.rate) * (1 - epsilon)
    try:
        packing = weigh(
            task.graph, task.roots, epsilon=epsilon, seed=options.seed, stop_at=enough, deadline=task.patience
        )
        packing = _thinned(task, packing, task.limit.rate)
    except TimedOutError as error:
        raise task.too_late(task.schedule("mwu", _one_round(task)), error) from error
    return task.in_time(task.schedule("mwu", packing))


def shallow_schedules(
    topology: Topology,
    collective: Collective,
    *,
    below: int,
    seed: int = 0,
    deadline: Deadline = NO_DEADLINE,
) -> Iterator[Schedule]:
    """Schedules along lower and lower rates of lower trees, as `solve_by_trees` finds them with a height.

    Args:
        topology: the fabric, all of whose ranks take part.
        collective: as in `solve_by_trees`, and possible.
        below: the height that is not worth looking at any more, as another packing has it.
        seed: breaks ties.
        deadline: when to stop.

    Raises:
        TimedOutError: the deadline passed.
    """
    from arborcast.synth.packing.bounded_height import shallow_frontier

    task = _Task.of(topology, collective, SolveOptions(seed=seed))
    limit = task.limit.rate
    for found in shallow_frontier(task.graph, task.roots, below, limit=limit, seed=seed, deadline=deadline):
        yield task.schedule("trees", found)
        deadline.check("the choice of shallow trees")


@dataclass(frozen=True, slots=True)
class _Task:
    """What is asked, as one of out-trees without relays.

    Attributes:
        topology: as it was given.
        collective: likewise.
        options: likewise.
        deadline: of the options.
        limit: of the rate.
        graph: where trees are packed: relays are switches, for a reduction all links are turned round.
        spreading: on it, a broadcast, an allgather or an allreduce.
    """

    topology: Topology
    collective: Collective
    options: SolveOptions
    deadline: Deadline
    limit: Bound
    graph: Topology
    spreading: Collective

    @classmethod
    def of(cls, topology: Topology, collective: Collective, options: SolveOptions) -> _Task:
        """Check what is asked and find its limit; see `solve_by_trees` for what is raised."""
        deadline = Deadline.after(options.deadline_s)
        _check(topology, collective, options)
        limit = bound(topology, collective, deadline)
        if limit.rate == 0:
            raise InfeasibleError(who_is_cut_off(topology, collective), limit)
        graph, spreading = relays_as_switches(topology, collective)
        if collective.kind in _SPREADING:
            graph, spreading = graph.reversed(), replace(spreading, kind=_SPREADING[collective.kind])
        return cls(topology, collective, options, deadline, limit, graph, spreading)

    @property
    def roots(self) -> Sequence[int] | None:
        """Whose trees are wanted; None for the pairs of an allreduce, of any roots."""
        if self.spreading.kind is Kind.ALLREDUCE:
            return None
        return self.spreading.ranks if self.spreading.root is None else (self.spreading.root,)

    def of_each_root(self, rate: Fraction) -> Fraction:
        """The part of a rate that the trees of one root carry."""
        return rate / len(self.roots or (0,))

    @property
    def patience(self) -> Deadline:
        """The deadline, a hundredth of a second off where it has passed: small graphs still get an answer."""
        return self.deadline.at_least(0.01)

    def heaviest(self, packing: Packing) -> Packing:
        """Fallback where no time is left to choose: the heaviest `max_trees` carriers per root."""
        if self.options.max_trees is None:
            return packing
        taken: Counter[int] = Counter()
        kept = []
        for carrier in sorted(packing.carriers, key=lambda carrier: -carrier.weight):
            group = 0 if self.roots is None else carrier.root
            if taken[group] < self.options.max_trees:
                taken[group] += 1
                kept.append(carrier)
        return replace(packing, carriers=tuple(kept))

    def schedule(self, method: str, packing: Packing) -> Schedule:
        """The packing on the topology as it was given."""
        how = Method(method, self.options.seed, packing.settings)
        return lift(self.topology, self.collective, how, self.limit, packing.carriers)

    def in_time(self, schedule: Schedule) -> Schedule:
        """The schedule, or the error that carries it where the deadline has passed."""
        if self.deadline.has_passed:
            raise self.too_late(schedule)
        return schedule

    def too_late(self, best: Schedule, why: TimedOutError | None = None) -> TimedOutError:
        """That the deadline passed, or why no more was done in time."""
        return TimedOutError(f"{self.collective.kind}: {why or f'{self.deadline} passed'}", best)


def _check(topology: Topology, collective: Collective, options: SolveOptions) -> None:
    if collective.kind not in TREE_KINDS:
        raise CollectiveError(f"{collective.kind}: trees serve {', '.join(TREE_KINDS)} only")
    if options.max_trees is not None and options.max_trees < 1:
        raise InputError(f"max-trees: must be at least 1, got {options.max_trees}")
    if options.max_height is None:
        return
    if options.max_height < 1:
        raise InputError(f"max-height: must be at least 1, got {options.max_height}")
    relays = len(collective.relays(topology))
    if relays:
        raise InputError(f"max-height: counts the steps between ranks that take part, got {relays} relays")


def _packings(task: _Task, splits: Sequence[SplitCapacities], known: StartingTrees) -> Iterator[Packing]:
    """Trees that use all of each split, for an allreduce pairs; as many as the deadline leaves time for."""
    graph, in_pairs = LinkGraph(task.graph), task.roots is None
    for number, split in enumerate(splits):
        try:
            packing = pack_split(
                graph, split, in_pairs=in_pairs, seed=task.options.seed, deadline=task.patience, known=known
            )
        except TimedOutError:
            if number == 0:
                raise
            continue
        if in_pairs:
            are_equal = len(split.roots) == task.graph.ranks and len(set(split.roots.values())) == 1
            roots = ("roots", "equal" if are_equal else "free")
            packing = replace(packing, settings=(*packing.settings, roots))
        yield packing


def _latency(packing: Packing) -> int:
    """A level costs a latency on every way; a carrier more only makes messages smaller."""
    return len(packing.carriers) + 2 * max(carrier.height for carrier in packing.carriers)


def _thinned(task: _Task, packing: Packing, rate: Fraction) -> Packing:
    """As few of the trees, and of others, as are wanted; of `rate` a tolerance may give up a part."""
    if task.deadline.has_passed:
        return task.heaviest(packing)
    if (task.options.tolerance, task.options.max_trees) == (None, None):
        return packing
    optimum = task.of_each_root(rate)
    few = fewest(task.graph, task.roots, optimum, packing.carriers, task.options, task.patience)
    return replace(few, settings=(*packing.settings, *few.settings))


def _one_round(task: _Task) -> Packing:
    """Fallback where the deadline passed before any packing: one round of multiplicative weights.

    It costs about one arborescence per root, and for many roots on links that go both ways only one, which
    all of them share. One root's round, or an allreduce's, takes at most a tenth of the time that was given.
    """
    graph, roots, allowed = task.graph, task.roots, task.deadline.allowed_s
    grace = Deadline.after(None if allowed is None else allowed / 10)
    one_round = partial(weigh, seed=task.options.seed, iterations=1, deadline=grace)
    if roots is not None and len(roots) > _ROUNDS_UP_TO and graph.is_symmetric:
        tree = one_round(graph, [most_central(graph, roots)]).carriers[0]
        shared = tuple(WeightedTree(root, tree.weight, rerooted(tree.out, root)) for root in roots)
        return Packing(shared, (("shared", "one tree"),))
    if roots is not None or graph.is_symmetric:
        return task.heaviest(one_round(graph, roots))
    # All roots would cost two arborescences each, at every turn.
    root = [most_central(graph, range(graph.ranks))]
    out, into = (one_round(side, root) for side in (graph, graph.reversed()))
    spread, gathered = (sum((one.weight for one in side.carriers), Fraction(0)) for side in (out, into))
    ins = [replace(tree, weight=tree.weight * spread / gathered) for tree in into.carriers]
    return task.heaviest(replace(out, carriers=pair_up(out.carriers, ins)))
