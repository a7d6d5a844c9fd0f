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
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import CollectiveError, InfeasibleError, InputError, TimedOutError
from arborcast.synth.kernels.arborescence import LogicalGraph
from arborcast.synth.packing.bounded_height import NO_DEADLINE, Shallow, pack_shallow, shallow_frontier
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
from arborcast.synth.packing.exact import pack_routed
from arborcast.synth.packing.fewest import DEFAULT_TOLERANCE, fewest_pairs, fewest_trees
from arborcast.synth.packing.lift import lift
from arborcast.synth.packing.mwu import DEFAULT_EPSILON, weigh_pairs, weigh_trees
from arborcast.synth.packing.packer import RoutedPacking
from arborcast.synth.packing.relays import relays_as_switches
from arborcast.synth.packing.routed import RoutedTree
from arborcast.synth.packing.routed_lift import lift_routed
from arborcast.synth.packing.splits import best_splits
from arborcast.synth.packing.warm_start import Stump, rebound
from arborcast.synth.routes.reachability import who_is_cut_off
from arborcast.synth.schedule import Method, Schedule, Settings
from arborcast.synth.topology import Topology
from arborcast.synth.tree import Packing, Tree

TreeMethod: TypeAlias = Literal["trees", "mwu"]
_Carriers: TypeAlias = Sequence[Carrier] | Sequence[RoutedTree]

_ROUNDS_UP_TO = 128  # roots; above, an arborescence for each would overrun a deadline by too much
_SPREADING = {
    Kind.BROADCAST: Kind.BROADCAST,
    Kind.REDUCE: Kind.BROADCAST,
    Kind.ALLGATHER: Kind.ALLGATHER,
    Kind.REDUCE_SCATTER: Kind.ALLGATHER,
}


@dataclass(frozen=True, slots=True)
class Known:
    """Trees of an old schedule, over links of the topology in which trees are packed: what to start from.

    Attributes:
        out: for out-trees.
        into: for the in-trees of an allreduce, where those are packed by themselves.
    """

    out: tuple[Stump, ...] = ()
    into: tuple[Stump, ...] = ()


@dataclass(frozen=True, slots=True)
class _Task:
    """What is asked, after relays became switches; for a reduction the topology is turned round."""

    topology: Topology
    collective: Collective
    limit: Bound
    method: TreeMethod
    max_trees: int | None
    tolerance: Fraction | None
    epsilon: Fraction
    seed: int
    deadline: Deadline
    max_height: int | None = None
    known: Known = Known()
    has_relays: bool = False

    @property
    def wants_few(self) -> bool:
        """Whether the packing is to be thinned out."""
        return self.max_trees is not None or self.tolerance is not None

    @property
    def stays_routed(self) -> bool:
        """Whether exact trees are lifted as they are: nobody chooses among them, no relay has to be seen."""
        return not self.wants_few and not self.has_relays

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline; a hundredth where it has passed: small graphs still get an answer."""
        left = self.deadline.left_s
        return None if left is None else max(left, 0.01)

    @property
    def roots(self) -> Sequence[int]:
        """Whose trees are wanted, where it is not an allreduce."""
        return self.collective.ranks if self.collective.root is None else (self.collective.root,)

    def heaviest(self, carriers: Sequence[AnyCarrier]) -> Sequence[AnyCarrier]:
        """Not more carriers than allowed, for who has no time to choose well; each root keeps a part."""
        if self.max_trees is None:
            return carriers
        per_root = self.collective.kind is not Kind.ALLREDUCE
        taken: Counter[int] = Counter()
        kept = []
        for carrier in sorted(carriers, key=lambda carrier: -carrier.weight):
            group = carrier.root if per_root else 0
            if taken[group] < self.max_trees:
                taken[group] += 1
                kept.append(carrier)
        return kept


def solve_by_trees(
    topology: Topology,
    collective: Collective,
    *,
    method: TreeMethod = "trees",
    max_trees: int | None = None,
    tolerance: Fraction | None = None,
    seed: int = 0,
    deadline_s: float | None = None,
    epsilon: Fraction = DEFAULT_EPSILON,
    max_height: int | None = None,
    known: Known = Known(),
) -> Schedule:
    """A schedule of a broadcast, reduce, allgather, reduce-scatter or allreduce along trees.

    Args:
        topology: the fabric; ranks that take no part come after those that do and forward.
        collective: what is to be done.
        method: "trees" for an exact packing, "mwu" for multiplicative weights.
        max_trees: at most so many trees per root (of an allreduce: in all), at the best rate.
        tolerance: the part of the optimum that may be given up for fewer trees; None for no thinning out.
            With `max_trees`: tried first, and kept where it needs no more trees than that.
        seed: breaks ties; the same seed gives the same schedule on any machine.
        deadline_s: seconds from now.
        epsilon: the part of the optimum that "mwu" may miss.
        max_height: the most edges between a root and a rank, for "trees"; edges pass switches. None for any.
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
    deadline = Deadline.after(deadline_s)
    if collective.kind not in TREE_KINDS:
        kinds = ", ".join(kind.value for kind in TREE_KINDS)
        raise CollectiveError(f"{collective.kind}: trees serve {kinds} only")
    if method not in {"trees", "mwu"}:
        raise InputError(f"method {method}: of the tree methods there are trees and mwu")
    if max_trees is not None and max_trees < 1:
        raise InputError(f"max-trees: must be at least 1, got {max_trees}")
    if max_height is not None:
        _check_height(topology, collective, method, max_height)
    limit = bound(topology, collective)
    if limit.rate == 0:
        raise InfeasibleError(who_is_cut_off(topology, collective), limit)
    flat, among = _spreading(topology, collective)
    task = _Task(
        flat,
        among,
        limit,
        method,
        max_trees,
        tolerance,
        epsilon,
        seed,
        deadline,
        max_height,
        known,
        bool(collective.relays(topology)),
    )
    late = f"{collective.kind}: the deadline of {deadline_s} s passed"
    try:
        carriers, settings = _packed(task)
    except TimedOutError as error:
        carriers, settings = _one_round(task)
        best = lift(topology, collective, Method("mwu", seed, settings), limit, carriers)
        raise TimedOutError(late, best) from error
    schedule = _lifted(topology, collective, Method(method, seed, settings), limit, carriers)
    if task.deadline.has_passed:
        raise TimedOutError(late, schedule)
    return schedule


def _lifted(
    topology: Topology, collective: Collective, method: Method, limit: Bound, carriers: _Carriers
) -> Schedule:
    routed = [carrier for carrier in carriers if isinstance(carrier, RoutedTree)]
    if routed:
        return lift_routed(topology, collective, method, limit, routed)
    return lift(
        topology,
        collective,
        method,
        limit,
        (carrier for carrier in carriers if not isinstance(carrier, RoutedTree)),
    )


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
    task = _Task(flat, among, limit, "trees", None, None, DEFAULT_EPSILON, seed, deadline)
    roots = None if collective.kind is Kind.ALLREDUCE else task.roots
    for found in shallow_frontier(flat, roots, below, limit=limit.rate, seed=seed, deadline=deadline):
        yield lift(topology, collective, Method("trees", seed, found.settings), limit, found.carriers)
        deadline.check("the choice of shallow trees")


def _check_height(topology: Topology, collective: Collective, method: TreeMethod, max_height: int) -> None:
    if max_height < 1:
        raise InputError(f"max-height: must be at least 1, got {max_height}")
    if method != "trees":
        raise InputError(f"method {method}: takes no max-height, which is for trees")
    relays = topology.ranks - len(collective.ranks)
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


def _packed(task: _Task) -> tuple[_Carriers, Settings]:
    if task.max_height is not None:
        found = _shallow(task, task.max_height)
        return found.carriers, found.settings
    return _pairs(task) if task.collective.kind is Kind.ALLREDUCE else _trees(task)


def _shallow(task: _Task, max_height: int) -> Shallow:
    """The best rate within a height, with few trees if they are wanted."""
    for tolerance, most in _requests(task) if task.wants_few else [(Fraction(0), None)]:
        found = pack_shallow(
            task.topology,
            None if task.collective.kind is Kind.ALLREDUCE else task.roots,
            max_height,
            limit=task.limit.rate,
            max_trees=most,
            tolerance=tolerance,
            seed=task.seed,
            deadline=task.deadline,
        )
        if task.max_trees is None or found.most_per_root <= task.max_trees:
            break
    return found


def _one_round(task: _Task) -> tuple[Sequence[Carrier], Settings]:
    """What multiplicative weights find in one round: for whoever ran out of time with nothing in hand.

    It costs about one arborescence per root, and for many roots on links that go both ways only one, which
    all of them share. One root's round, or an allreduce's, takes at most a tenth of the time that was given.
    """
    topology, seed = task.topology, task.seed
    grace = None if task.deadline.allowed_s is None else task.deadline.allowed_s / 10
    if (
        len(task.roots) > _ROUNDS_UP_TO
        and task.collective.kind is not Kind.ALLREDUCE
        and topology.is_symmetric
    ):
        centre = most_central(topology, task.roots)
        shared = weigh_trees(topology, [centre], seed=seed, iterations=1, deadline_s=grace)
        return [rerooted(shared.trees[0], root) for root in task.roots], (("shared", "one tree"),)
    if task.collective.kind is not Kind.ALLREDUCE:
        packing = weigh_trees(topology, task.roots, seed=seed, iterations=1, deadline_s=grace)
        return task.heaviest(packing.trees), packing.settings
    if topology.is_symmetric:
        pairing = weigh_pairs(topology, seed=seed, iterations=1, deadline_s=grace)
        return task.heaviest(pairing.pairs), pairing.settings
    # All roots would cost two arborescences each, at every turn.
    root = most_central(topology, range(topology.ranks))
    out, into = (
        weigh_trees(side, [root], seed=seed, iterations=1, deadline_s=grace)
        for side in (topology, topology.reversed())
    )
    ins = _scaled(into.trees, sum(tree.weight for tree in out.trees))
    return task.heaviest(pair_up(out.trees, ins)), out.settings


def _scaled(trees: Sequence[Tree], total: Fraction | int) -> list[Tree]:
    """The trees with weights that add up to `total`."""
    whole = sum((tree.weight for tree in trees), Fraction(0))
    return [with_weight(tree, tree.weight * total / whole) for tree in trees]


def _trees(task: _Task) -> tuple[_Carriers, Settings]:
    """Out-trees for a broadcast or an allgather."""
    roots = task.roots
    if task.method == "mwu":
        enough = task.limit.rate * (1 - task.epsilon) / len(roots)
        packing = weigh_trees(
            task.topology,
            roots,
            epsilon=task.epsilon,
            seed=task.seed,
            stop_at=enough,
            deadline_s=task.left_s,
        )
        each = task.limit.rate / len(roots)
    else:
        split = split_bandwidth(task.topology, task.collective)
        routed = _pack_out(task, split)
        if task.stays_routed:
            return routed.trees, routed.settings
        packing = routed.packing
        each = split.rate / len(roots)
    if task.wants_few and not task.deadline.has_passed:
        few = _few_trees(task, roots, each, packing)
        return few.trees, (*packing.settings, *few.settings)
    return task.heaviest(packing.trees), packing.settings


def _pack_out(task: _Task, split: Split) -> RoutedPacking:
    """The out-trees of a split, from what is known of them."""
    graph = LogicalGraph(split.out)
    return pack_routed(
        graph,
        split.roots,
        seed=task.seed,
        deadline_s=task.left_s,
        stumps=[rebound(stump, graph) for stump in task.known.out],
    )


def _few_trees(task: _Task, roots: Sequence[int], optimum: Fraction, packing: Packing) -> Packing:
    for tolerance, most in _requests(task):
        few = fewest_trees(
            task.topology,
            roots,
            optimum,
            packing.trees,
            tolerance=tolerance,
            max_trees=most,
            seed=task.seed,
            deadline_s=task.left_s,
        )
        if task.max_trees is None or all(
            sum(tree.root == root for tree in few.trees) <= task.max_trees for root in roots
        ):
            break
    return few


def _pairs(task: _Task) -> tuple[_Carriers, Settings]:
    """Pairs of trees for an allreduce."""
    splits = best_splits(task.topology, task.collective, task.limit.rate) if task.method == "trees" else []
    if task.stays_routed and len(splits) == 1 and splits[0].into is None:
        outs = _pack_out(task, splits[0])
        return outs.trees, (*outs.settings, _roots_of(task, splits[0]))
    if task.method == "mwu":
        pairing = weigh_pairs(
            task.topology,
            epsilon=task.epsilon,
            seed=task.seed,
            stop_at=task.limit.rate * (1 - task.epsilon),
            deadline_s=task.left_s,
        )
        optimum = task.limit.rate
    else:
        pairing, optimum = _exact_pairs(task, splits)
    if task.wants_few and not task.deadline.has_passed:
        few = _few_pairs(task, optimum, pairing)
        return few.pairs, (*pairing.settings, *few.settings)
    return task.heaviest(pairing.pairs), pairing.settings


def _few_pairs(task: _Task, optimum: Fraction, pairing: Pairing) -> Pairing:
    for tolerance, most in _requests(task):
        few = fewest_pairs(
            task.topology,
            optimum,
            pairing.pairs,
            tolerance=tolerance,
            max_trees=most,
            seed=task.seed,
            deadline_s=task.left_s,
        )
        if task.max_trees is None or len(few.pairs) <= task.max_trees:
            break
    return few


def _requests(task: _Task) -> Iterator[tuple[Fraction, int | None]]:
    """What to ask of the choice of few trees, until an answer fits: (tolerance, most trees)."""
    if task.tolerance is not None:
        yield task.tolerance, None
    if task.max_trees is not None:
        yield DEFAULT_TOLERANCE, task.max_trees


def _exact_pairs(task: _Task, splits: Sequence[Split]) -> tuple[Pairing, Fraction]:
    """The packing with the fewest levels and pairs among the splits."""
    packed: list[Pairing] = []
    for split in splits:
        try:
            packed.append(_pack_split(task, split))
        except TimedOutError:
            if not packed:
                raise
    # A level costs a latency on every way; a pair more only makes messages smaller.
    return min(packed, key=lambda pairing: len(pairing.pairs) + 2 * _height(pairing)), splits[0].rate


def _pack_split(task: _Task, split: Split) -> Pairing:
    outs = _pack_out(task, split).packing
    if split.into is None:
        pairs = mirrored(outs.trees)
    else:
        graph = LogicalGraph(split.into.reversed())
        ins = pack_routed(
            graph,
            split.roots,
            seed=task.seed,
            deadline_s=task.left_s,
            stumps=[rebound(stump, graph) for stump in task.known.into],
        ).packing
        pairs = pair_up(outs.trees, ins.trees)
    return Pairing(merge(centred(pair) for pair in pairs), (*outs.settings, _roots_of(task, split)))


def _roots_of(task: _Task, split: Split) -> tuple[str, str]:
    """Whether every rank is the root of as much, for the settings."""
    are_equal = len(split.roots) == task.topology.ranks and len(set(split.roots.values())) == 1
    return "roots", "equal" if are_equal else "free"


def _height(pairing: Pairing) -> int:
    return max(pair.height for pair in pairing.pairs)
