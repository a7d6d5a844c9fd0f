"""The entry of the tree methods: a topology and a collective in, a schedule out.

Relays become switches, a reduction is turned round, an allreduce gets its links split between gathering
and spreading; then trees are packed, perhaps thinned out to a few, and lifted into a schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, TypeAlias

from arborcast.synth.bounds import bound
from arborcast.synth.bounds.capacity_lp import Split, most_central, split_bandwidth
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import TREE_KINDS, Collective, Kind
from arborcast.synth.deadline import NO_DEADLINE, Deadline
from arborcast.synth.errors import CollectiveError, InfeasibleError, InputError, TimedOutError
from arborcast.synth.packing.array_tree import ArrayTree
from arborcast.synth.packing.bounded_height import pack_shallow, shallow_frontier
from arborcast.synth.packing.carrier import (
    AnyCarrier,
    Carrier,
    Pairing,
    centred,
    merge,
    mirrored,
    pair_up,
    rerooted,
    with_weight,
)
from arborcast.synth.packing.exact import pack_arrays
from arborcast.synth.packing.fewest import DEFAULT_TOLERANCE, fewest_pairs, fewest_trees
from arborcast.synth.packing.lift import lift
from arborcast.synth.packing.mwu import DEFAULT_EPSILON, weigh_pairs, weigh_trees
from arborcast.synth.packing.packer import ArrayPacking
from arborcast.synth.packing.relays import relays_as_switches
from arborcast.synth.packing.splits import best_splits
from arborcast.synth.packing.starting_trees import PartialTree
from arborcast.synth.request import DEFAULTS, Request
from arborcast.synth.routes.reachability import who_is_cut_off
from arborcast.synth.schedule import Method, Schedule, Settings
from arborcast.synth.topology import Topology
from arborcast.synth.tree import Tree

TreeMethod: TypeAlias = Literal["trees", "mwu"]
_Carriers: TypeAlias = Sequence[Carrier] | Sequence[ArrayTree]

_ROUNDS_UP_TO = 128  # roots; above, an arborescence for each would overrun a deadline by too much
_SPREADING = {
    Kind.BROADCAST: Kind.BROADCAST,
    Kind.REDUCE: Kind.BROADCAST,
    Kind.ALLGATHER: Kind.ALLGATHER,
    Kind.REDUCE_SCATTER: Kind.ALLGATHER,
}


@dataclass(frozen=True, slots=True)
class StartingTrees:
    """Trees of an old schedule, over links of the topology in which trees are packed: what to start from.

    Attributes:
        out: for out-trees.
        into: for the in-trees of an allreduce, where those are packed by themselves.
    """

    out: tuple[PartialTree, ...] = ()
    into: tuple[PartialTree, ...] = ()


@dataclass(frozen=True, slots=True)
class _Task:
    """What is asked, after relays became switches; for a reduction the topology is turned round."""

    topology: Topology
    collective: Collective
    limit: Bound
    request: Request
    deadline: Deadline
    method: TreeMethod = "trees"
    known: StartingTrees = StartingTrees()
    has_relays: bool = False

    @property
    def is_allreduce(self) -> bool:
        """Whether pairs of trees are wanted, of any roots."""
        return self.collective.kind is Kind.ALLREDUCE

    @property
    def wants_few(self) -> bool:
        """Whether the packing is to be thinned out."""
        return self.request.max_trees is not None or self.request.tolerance is not None

    @property
    def stays_arrays(self) -> bool:
        """Whether exact trees are lifted as arrays: there is no choice among them and no relay."""
        return not self.wants_few and not self.has_relays

    @property
    def patience(self) -> Deadline:
        """The deadline, a hundredth of a second off where it has passed: small graphs still get an answer."""
        left = self.deadline.left_s
        return Deadline.after(None if left is None else max(left, 0.01))

    @property
    def epsilon(self) -> Fraction:
        """The part of the optimum that multiplicative weights may miss."""
        return DEFAULT_EPSILON if self.request.epsilon is None else self.request.epsilon

    @property
    def roots(self) -> Sequence[int]:
        """Whose trees are wanted, where it is not an allreduce."""
        return self.collective.ranks if self.collective.root is None else (self.collective.root,)

    @property
    def thinnings(self) -> Iterator[tuple[Fraction, int | None]]:
        """What to ask of the choice of few trees, until an answer fits: (tolerance, most trees)."""
        if self.request.tolerance is not None:
            yield self.request.tolerance, None
        if self.request.max_trees is not None:
            yield DEFAULT_TOLERANCE, self.request.max_trees

    def allows(self, carriers: Sequence[Carrier]) -> bool:
        """Whether no root has more carriers than asked for (of an allreduce: whether there are no more)."""
        counts = Counter(0 if self.is_allreduce else carrier.root for carrier in carriers)
        return self.request.max_trees is None or max(counts.values(), default=0) <= self.request.max_trees

    def heaviest(self, carriers: Sequence[AnyCarrier]) -> Sequence[AnyCarrier]:
        """Fallback where no time is left to choose: the heaviest `max_trees` carriers per root."""
        if self.request.max_trees is None:
            return carriers
        taken: Counter[int] = Counter()
        kept = []
        for carrier in sorted(carriers, key=lambda carrier: -carrier.weight):
            group = 0 if self.is_allreduce else carrier.root
            if taken[group] < self.request.max_trees:
                taken[group] += 1
                kept.append(carrier)
        return kept


def solve_by_trees(
    topology: Topology,
    collective: Collective,
    request: Request = DEFAULTS,
    *,
    method: TreeMethod = "trees",
    known: StartingTrees = StartingTrees(),
) -> Schedule:
    """A schedule of a broadcast, reduce, allgather, reduce-scatter or allreduce along trees.

    Args:
        topology: the fabric; ranks that take no part come after those that do and forward.
        collective: what is to be done.
        request: `max_trees` counts per root (of an allreduce: in all); with a tolerance too, that is tried
            first and kept where it needs no more trees. `max_height` is for "trees", `epsilon` for "mwu".
        method: "trees" for an exact packing, "mwu" for multiplicative weights.
        known: trees to start from, for "trees" without a height (see `synth.faults.repair`).

    Returns:
        The schedule; its rate is below its bound where the method, the number of trees or relays that
        cannot pass on all they receive keep it there.

    Raises:
        CollectiveError: a kind that trees cannot do, or relays with lower numbers than the ranks.
        InputError: a number out of its range, or a height together with relays or with "mwu".
        InfeasibleError: some ranks are cut off; carries the bound that proves it. Or no trees are as low.
        TimedOutError: the deadline passed; carries the best schedule found: where no packing was done, one
            round of multiplicative weights, which takes an arborescence per root beyond the deadline.
    """
    deadline = Deadline.after(request.deadline_s)
    _check(topology, collective, request, method)
    limit = bound(topology, collective)
    if limit.rate == 0:
        raise InfeasibleError(who_is_cut_off(topology, collective), limit)
    relays = bool(collective.relays(topology))
    task = _Task(*_spreading(topology, collective), limit, request, deadline, method, known, relays)
    late = f"{collective.kind}: the deadline of {request.deadline_s} s passed"
    try:
        if request.max_height is not None:
            carriers, settings = _shallow(task, request.max_height)
        else:
            carriers, settings = _pairs(task) if task.is_allreduce else _trees(task)
    except TimedOutError as error:
        carriers, settings = _one_round(task)
        best = lift(topology, collective, Method("mwu", request.seed, settings), limit, carriers)
        raise TimedOutError(late, best) from error
    schedule = lift(topology, collective, Method(method, request.seed, settings), limit, carriers)
    if deadline.has_passed:
        raise TimedOutError(late, schedule)
    return schedule


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
    limit = bound(topology, collective)
    flat, among = _spreading(topology, collective)
    roots = None if among.kind is Kind.ALLREDUCE else among.ranks if among.root is None else (among.root,)
    for found in shallow_frontier(flat, roots, below, limit=limit.rate, seed=seed, deadline=deadline):
        yield lift(topology, collective, Method("trees", seed, found.settings), limit, found.carriers)
        deadline.check("the choice of shallow trees")


def _check(topology: Topology, collective: Collective, request: Request, method: TreeMethod) -> None:
    if collective.kind not in TREE_KINDS:
        raise CollectiveError(f"{collective.kind}: trees serve {', '.join(TREE_KINDS)} only")
    if method not in {"trees", "mwu"}:
        raise InputError(f"method {method}: of the tree methods there are trees and mwu")
    if request.max_trees is not None and request.max_trees < 1:
        raise InputError(f"max-trees: must be at least 1, got {request.max_trees}")
    if request.max_height is None:
        return
    if request.max_height < 1:
        raise InputError(f"max-height: must be at least 1, got {request.max_height}")
    if method != "trees":
        raise InputError(f"method {method}: takes no max-height, which is for trees")
    relays = len(collective.relays(topology))
    if relays:
        raise InputError(f"max-height: counts the steps between ranks that take part, got {relays} relays")


def _spreading(topology: Topology, collective: Collective) -> tuple[Topology, Collective]:
    """The question as one of out-trees, without relays; an allreduce stays one."""
    flat, among = relays_as_switches(topology, collective)
    if collective.kind not in _SPREADING:
        return flat, among
    return flat.reversed() if collective.kind.reduces else flat, replace(
        among, kind=_SPREADING[collective.kind]
    )


def _shallow(task: _Task, max_height: int) -> tuple[_Carriers, Settings]:
    """The best rate within a height, with few trees if they are wanted."""
    for tolerance, most in task.thinnings if task.wants_few else [(Fraction(0), None)]:
        found = pack_shallow(
            task.topology,
            None if task.is_allreduce else task.roots,
            max_height,
            limit=task.limit.rate,
            max_trees=most,
            tolerance=tolerance,
            seed=task.request.seed,
            deadline=task.deadline,
        )
        if task.allows(found.carriers):
            break
    return found.carriers, found.settings


def _one_round(task: _Task) -> tuple[Sequence[Carrier], Settings]:
    """Fallback where the deadline passed before any packing: one round of multiplicative weights.

    It costs about one arborescence per root, and for many roots on links that go both ways only one, which
    all of them share. One root's round, or an allreduce's, takes at most a tenth of the time that was given.
    """
    topology, seed = task.topology, task.request.seed
    allowed = task.deadline.allowed_s
    grace = Deadline.after(None if allowed is None else allowed / 10)
    if not task.is_allreduce and len(task.roots) > _ROUNDS_UP_TO and topology.is_symmetric:
        centre = most_central(topology, task.roots)
        shared = weigh_trees(topology, [centre], seed=seed, iterations=1, deadline=grace)
        return [rerooted(shared.trees[0], root) for root in task.roots], (("shared", "one tree"),)
    if not task.is_allreduce:
        packing = weigh_trees(topology, task.roots, seed=seed, iterations=1, deadline=grace)
        return task.heaviest(packing.trees), packing.settings
    if topology.is_symmetric:
        pairing = weigh_pairs(topology, seed=seed, iterations=1, deadline=grace)
        return task.heaviest(pairing.pairs), pairing.settings
    # All roots would cost two arborescences each, at every turn.
    root = most_central(topology, range(topology.ranks))
    out, into = (
        weigh_trees(side, [root], seed=seed, iterations=1, deadline=grace)
        for side in (topology, topology.reversed())
    )
    ins = _scaled(into.trees, sum(tree.weight for tree in out.trees))
    return task.heaviest(pair_up(out.trees, ins)), out.settings


def _scaled(trees: Sequence[Tree], total: Fraction | int) -> list[Tree]:
    """The trees with weights that add up to `total`."""
    whole = sum((tree.weight for tree in trees), Fraction(0))
    return [with_weight(tree, tree.weight * total / whole) for tree in trees]


def _trees(task: _Task) -> tuple[_Carriers, Settings]:
    """Out-trees for a broadcast or an allgather: the rate and the split, the packing, few of its trees."""
    roots, seed = task.roots, task.request.seed
    if task.method == "mwu":
        each = task.limit.rate / len(roots)
        packing = weigh_trees(
            task.topology,
            roots,
            epsilon=task.epsilon,
            seed=seed,
            stop_at=each * (1 - task.epsilon),
            deadline=task.patience,
        )
    else:
        split = split_bandwidth(task.topology, task.collective)
        routed = _pack(task, split.out, split, task.known.out)
        if task.stays_arrays:
            return routed.trees, routed.settings
        packing, each = routed.packing, split.rate / len(roots)
    if not task.wants_few or task.deadline.has_passed:
        return task.heaviest(packing.trees), packing.settings
    for tolerance, most in task.thinnings:
        few = fewest_trees(
            task.topology,
            roots,
            each,
            packing.trees,
            tolerance=tolerance,
            max_trees=most,
            seed=seed,
            deadline=task.patience,
        )
        if task.allows(few.trees):
            break
    return few.trees, (*packing.settings, *few.settings)


def _pairs(task: _Task) -> tuple[_Carriers, Settings]:
    """Pairs of trees for an allreduce, likewise."""
    seed, optimum = task.request.seed, task.limit.rate
    if task.method == "mwu":
        pairing = weigh_pairs(
            task.topology,
            epsilon=task.epsilon,
            seed=seed,
            stop_at=optimum * (1 - task.epsilon),
            deadline=task.patience,
        )
    else:
        splits = best_splits(task.topology, task.collective, optimum)
        if task.stays_arrays and len(splits) == 1 and splits[0].into is None:
            outs = _pack(task, splits[0].out, splits[0], task.known.out)
            return outs.trees, (*outs.settings, _roots_of(task, splits[0]))
        pairing, optimum = _exact_pairs(task, splits), splits[0].rate
    if not task.wants_few or task.deadline.has_passed:
        return task.heaviest(pairing.pairs), pairing.settings
    for tolerance, most in task.thinnings:
        few = fewest_pairs(
            task.topology,
            optimum,
            pairing.pairs,
            tolerance=tolerance,
            max_trees=most,
            seed=seed,
            deadline=task.patience,
        )
        if task.allows(few.pairs):
            break
    return few.pairs, (*pairing.settings, *few.settings)


def _exact_pairs(task: _Task, splits: Sequence[Split]) -> Pairing:
    """The packing with the fewest levels and pairs among the splits."""
    packed: list[Pairing] = []
    for split in splits:
        try:
            outs = _pack(task, split.out, split, task.known.out).packing
            pairs = mirrored(outs.trees)
            if split.into is not None:
                ins = _pack(task, split.into.reversed(), split, task.known.into).packing
                pairs = pair_up(outs.trees, ins.trees)
        except TimedOutError:
            if not packed:
                raise
            continue
        settings = (*outs.settings, _roots_of(task, split))
        packed.append(Pairing(merge(centred(pair) for pair in pairs), settings))
    # A level costs a latency on every way; a pair more only makes messages smaller.
    return min(packed, key=lambda found: len(found.pairs) + 2 * max(pair.height for pair in found.pairs))


def _pack(task: _Task, fabric: Topology, split: Split, known: Sequence[PartialTree]) -> ArrayPacking:
    """The trees of one direction of a split, from what is known of them."""
    return pack_arrays(fabric, split.roots, seed=task.request.seed, deadline=task.patience, known=known)


def _roots_of(task: _Task, split: Split) -> tuple[str, str]:
    """Whether every rank is the root of as much, for the settings."""
    are_equal = len(split.roots) == task.topology.ranks and len(set(split.roots.values())) == 1
    return "roots", "equal" if are_equal else "free"
