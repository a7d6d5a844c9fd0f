"""One fabric, some questions, and every label of the answers beside the exact reference.

Each question is a function of a random generator and a `Tally`; which fabrics it gets is its own choice, since
what is exact in reasonable time differs. `QUESTIONS` says how often each is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random

from fuzzing import all_rings, all_trees, chunk_search, limits, sharing
from fuzzing.fabrics import fabric, times
from fuzzing.replay import objections

import synth
from synth.certificate import Bound, Cut, Dual, Partition, Scope
from synth.chunks.step_bound import StepBound
from synth.collective import NAMED_KINDS, Collective, Kind
from synth.errors import InfeasibleError, InputError, TimedOutError
from synth.formats import topology_to_document
from synth.schedule import Schedule
from synth.topology import Topology

CLOSE = 1 - Fraction(2, 10**9)  # what labels that say "to 1e-9" may miss, with the rounding of that figure
ROUNDED = 1 + Fraction(1, 10**6)  # how loose a bound of rounded prices may be


@dataclass
class Tally:
    """What was compared, and what was false."""

    seed: int = 0
    question: str = ""
    topology: Topology | None = None
    fabrics: int = 0
    compared: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    false: list[str] = field(default_factory=list)

    def label(self, name: str, is_true: bool | None, *shown: object) -> None:
        """Note a label; None where the reference did not find out."""
        if is_true is None:
            self.unknown[name] += 1
            return
        self.compared[name] += 1
        if not is_true:
            self._note(f"{name}: {', '.join(map(str, shown))}")

    @contextmanager
    def no_crash(self, *asked: object) -> Iterator[None]:
        """Whatever is no answer of the product is a finding, too."""
        try:
            yield
        except (InputError, InfeasibleError, TimedOutError):
            raise
        except Exception as error:
            self._note(f"crash: {type(error).__name__}: {error}; asked {', '.join(map(str, asked))}")
            raise _CrashedError from error

    def _note(self, line: str) -> None:
        fabric_of = "" if self.topology is None else topology_to_document(self.topology)
        self.false.append(f"seed {self.seed} {self.question}: {line}\n    on {fabric_of}")


class _CrashedError(Exception):
    """Noted already."""


def compare(seed: int, tally: Tally, questions: dict[str, int] | None = None) -> None:
    """Ask one fabric one question, chosen by the seed, and some fabrics more."""
    rng = Random(seed)
    weights = {name: weight for name, (weight, _) in QUESTIONS.items()} if questions is None else questions
    name = rng.choices(list(weights), list(weights.values()))[0]
    tally.seed, tally.question, tally.topology = seed, name, None
    tally.fabrics += 1
    try:
        QUESTIONS[name][1](rng, tally)
    except _CrashedError:
        pass


def _drawn(tally: Tally, topology: Topology) -> Topology:
    tally.topology = topology
    return topology


def _asked(rng: Random, topology: Topology, kinds: tuple[Kind, ...] = NAMED_KINDS, *, relays: bool = False) -> Collective:
    ranks = list(range(topology.ranks))
    if relays and topology.ranks > 2:
        ranks = ranks[: rng.randint(2, topology.ranks - 1)]
    kind = rng.choice(kinds)
    return Collective(kind, tuple(ranks), rng.choice(ranks) if kind.has_root else None)


def _solved(tally: Tally, topology: Topology, collective: Collective, **request: object) -> Schedule | InfeasibleError | None:
    """The answer, replayed; None where it ran out of time."""
    with tally.no_crash(collective.kind, collective.root, request):
        try:
            schedule = synth.solve(topology, collective, **request)  # type: ignore[arg-type]
        except InfeasibleError as error:
            return error
        except TimedOutError:
            tally.unknown["in time"] += 1
            return None
        verdict = synth.verify(schedule)
        tally.label("verified", verdict.correct, verdict.errors[:2])
        wrong = objections(schedule)
        tally.label("verified (own replay)", not wrong, collective, request, wrong[:2])
        return schedule


# bounds


def ask_bound(rng: Random, tally: Tally) -> None:
    """The limit is what the best schedule reaches, its certificate proves it, and an exact method reaches it."""
    topology = _drawn(tally, fabric(rng))
    collective = _asked(rng, topology)
    hubs = len(topology.switches)
    if collective.kind is Kind.ALLREDUCE and topology.ranks + 2 * hubs > 7:
        collective = _asked(rng, topology, limits.TREES[:4])
    with tally.no_crash("bound", collective.kind, collective.root):
        bound = synth.bound(topology, collective)
    cut = limits.least_cut(topology, collective)
    _check_certificate(tally, topology, collective, bound)
    if collective.kind in {Kind.GATHER, Kind.SCATTER}:
        best = cut
    elif collective.kind in limits.TREES[:4] and not hubs:
        best = cut
    else:
        best = limits.best_rate(topology, collective)
    near = bound.rate == best
    if not near and isinstance(bound.certificate, Dual):
        near = best < bound.rate <= best * ROUNDED
        tally.compared["bound (prices rounded)"] += near
    tally.label(f"bound of {collective.kind} is exact", near, collective, bound.rate, best)
    answer = _solved(tally, topology, collective)
    if isinstance(answer, InfeasibleError):
        tally.label("infeasible: cut off", best == 0, collective, answer)
    elif answer is not None:
        tally.label("rate is possible", answer.rate <= best, collective, answer.rate, best)
        tally.label("optimal", not answer.is_optimal or answer.rate == best, collective, answer.rate, best)
        if collective.kind is not Kind.ALLTOALL:
            tally.label("exact methods reach the limit", answer.is_optimal or near and answer.rate * ROUNDED > best, collective, answer.rate, best)


def ask_relays(rng: Random, tally: Tally) -> None:
    """With relays the limit holds: above what trees through relays reach, and no cut is below it."""
    topology = _drawn(tally, fabric(rng, ranks=(3, 5), switches=1))
    collective = _asked(rng, topology, relays=True)
    with tally.no_crash("bound", collective):
        bound = synth.bound(topology, collective)
    _check_certificate(tally, topology, collective, bound)
    cut, reached = limits.least_cut(topology, collective), limits.best_rate(topology, collective)
    tally.label("bound with relays", reached <= bound.rate <= cut, collective, reached, bound.rate, cut)
    if collective.kind in limits.FLOWS:
        tally.label("bound of flows with relays", reached <= bound.rate <= reached * ROUNDED, collective, reached, bound.rate)
    elif not topology.switches and topology.ranks <= 5:
        best = all_trees.best_with_relays(topology, collective)
        tally.label("bound with relays holds", best <= bound.rate, collective, best, bound.rate)
    answer = _solved(tally, topology, collective)
    if isinstance(answer, InfeasibleError):
        tally.label("infeasible: cut off", cut == 0, collective, answer)
    elif answer is not None:
        tally.label("optimal", answer.rate <= bound.rate == answer.bound.rate, answer.rate, bound.rate)


def _check_certificate(tally: Tally, topology: Topology, collective: Collective, bound: Bound) -> None:
    """What the certificate says, counted again; and whether its scope is what it proves."""
    match bound.certificate:
        case Cut(side, capacity):
            counted = limits.leaving(topology, side)
            proved = capacity == counted and bound.rate * limits.must_leave(collective, side) == counted
            tally.label("certificate: cut", proved, collective, bound)
        case Partition(blocks, capacity):
            inside = sum((limits.leaving(topology, block) for block in blocks), Fraction(0))
            proved = sorted(v for block in blocks for v in block) == list(range(topology.size))
            proved &= inside / 2 == capacity == bound.rate * (len(blocks) - 1)
            tally.label("certificate: partition", proved, collective, bound)
        case Dual(lengths, capacity, distance):
            offered = sum((link.bandwidth * length for link, length in zip(topology.links, lengths, strict=True)), Fraction(0))
            tally.label("certificate: offered", offered == capacity == bound.rate * distance, bound)
            if topology.ranks <= 5 and not collective.relays(topology):
                needed = all_trees.distance(topology, collective, lengths)
                tally.label("certificate: needed", needed == distance, collective, needed, distance)
            if collective.kind is Kind.ALLREDUCE and bound.scope is Scope.EVERY_SCHEDULE:
                least = all_trees.crossings(topology, lengths)
                tally.label("scope: every schedule", least >= distance, collective, least, distance)


# trees of a height, few trees


def ask_height(rng: Random, tally: Tally) -> None:
    """The best rate within a height is the best of all trees that are as low, or there are none."""
    few_ways = rng.random() < 0.7
    topology = _drawn(tally, fabric(rng, ranks=(2, 5), switches=0) if few_ways else fabric(rng, ranks=(2, 3)))
    collective = _asked(rng, topology, limits.TREES)
    height = rng.randint(1, max(1, topology.ranks - 1))
    graph = topology.reversed() if collective.kind in chunk_search.MIRRORED else topology
    roots = None if collective.kind is Kind.ALLREDUCE else collective.ranks if collective.root is None else (collective.root,)
    tolerance = rng.choice([None, None, Fraction(1, 20)])
    max_trees = rng.choice([None, None, 1, 2]) if tolerance is None else None
    request = {"max_height": height, "tolerance": tolerance, "max_trees": max_trees}
    answer = _solved(tally, topology, collective, method="trees", **request)
    best = all_trees.best_of_height(graph, roots, height)
    if isinstance(answer, InfeasibleError):
        tally.label("infeasible: height", best == 0, collective, height, answer)
    if not isinstance(answer, Schedule):
        return
    facts = dict(answer.method.settings)
    # Each direction of an allreduce has its own height.
    tally.label("height", answer.height <= height, collective, answer.height, height)
    tally.label("rate is possible", answer.rate <= best, collective, answer.rate, best)
    tally.label("optimal", not answer.is_optimal or answer.rate == best, collective, answer.rate, best)
    within = str(facts.get("within_height"))
    if not within.startswith("none") and tolerance is None and max_trees is None:
        tally.label(f"within height: {within}", answer.rate >= best * CLOSE, collective, height, answer.rate, best)
    elif tolerance is not None and not within.startswith("none"):
        tally.label("within height, to a tolerance", answer.rate >= best * (1 - tolerance) * CLOSE, height, answer.rate, best)
    _check_few(tally, graph, roots, answer, height)


def ask_few(rng: Random, tally: Tally) -> None:
    """Few trees: fewest, best, or at the limit."""
    topology = _drawn(tally, fabric(rng, ranks=(2, 5), switches=0) if rng.random() < 0.8 else fabric(rng, ranks=(2, 3)))
    collective = _asked(rng, topology, limits.TREES)
    graph = topology.reversed() if collective.kind in chunk_search.MIRRORED else topology
    roots = None if collective.kind is Kind.ALLREDUCE else collective.ranks if collective.root is None else (collective.root,)
    request: dict[str, object] = rng.choice(
        [{"max_trees": 1}, {"max_trees": 2}, {"max_trees": 3}, {"tolerance": Fraction(0)}, {"tolerance": Fraction(1, 20)}]
    )
    answer = _solved(tally, topology, collective, method="trees", **request)
    best = limits.best_rate(topology, collective)
    if isinstance(answer, InfeasibleError):
        tally.label("infeasible: cut off", best == 0, collective, answer)
    if not isinstance(answer, Schedule):
        return
    tally.label("rate is possible", answer.rate <= best, collective, answer.rate, best)
    tally.label("optimal", not answer.is_optimal or answer.rate == best, collective, answer.rate, best)
    _check_few(tally, graph, roots, answer, None)


def _check_few(tally: Tally, graph: Topology, roots: tuple[int, ...] | None, answer: Schedule, height: int | None) -> None:
    """What is said of few trees; `candidates` that are as many as there are trees are all of them."""
    facts = dict(answer.method.settings)
    said = str(facts.get("proved", "none"))
    trees = Counter(None if roots is None else chunk.owner for chunk in answer.chunks)
    best = limits.best_rate(graph, _of_roots(graph, roots)) if height is None else all_trees.best_of_height(graph, roots, height)
    wanted = best
    if "tolerance" in facts:
        wanted = best * (1 - Fraction(str(facts["tolerance"])))
        if not said.startswith("none: the candidates"):
            tally.label("tolerance", answer.rate >= wanted * CLOSE, facts, answer.rate, best)
    if "max_trees" in facts:
        tally.label("max trees", max(trees.values()) <= int(str(facts["max_trees"])), facts, trees)
    if said == "optimal":
        tally.label("few: optimal", answer.rate >= best * CLOSE, facts, answer.rate, best)
    elif said == "no fewer trees are possible":
        tally.label(f"few: {said}", max(trees.values()) == 1, facts, trees)
    elif said.endswith("among the candidates") and roots is not None and len(roots) == 1:
        every = sorted(all_trees.loads(graph, roots[0], height))
        if facts["candidates"] != len(every) or len(every) > 16:
            return
        count = len(answer.chunks)
        if said.startswith("fewest"):
            fewer = count > 1 and all_trees.best_of_few(graph, every, count - 1) >= wanted * (2 - CLOSE)
            tally.label(f"few: {said}", not fewer, facts, count)
        else:
            most = all_trees.best_of_few(graph, every, int(str(facts["max_trees"])))
            tally.label(f"few: {said}", answer.rate >= most * (1 - Fraction(2, 10**6)), facts, answer.rate, most)


def _of_roots(graph: Topology, roots: tuple[int, ...] | None) -> Collective:
    everyone = tuple(range(graph.ranks))
    if roots is None:
        return Collective(Kind.ALLREDUCE, everyone)
    return Collective(Kind.BROADCAST, everyone, roots[0]) if len(roots) == 1 else Collective(Kind.ALLGATHER, everyone)


def ask_mwu(rng: Random, tally: Tally) -> None:
    """Multiplicative weights: the limit that they prove, and the part of the optimum that they promise."""
    topology = _drawn(tally, fabric(rng, ranks=(2, 6), switches=1))
    collective = _asked(rng, topology, limits.TREES[:4] if topology.ranks > 5 else limits.TREES)
    epsilon = rng.choice([Fraction(1, 10), Fraction(1, 20)])
    answer = _solved(tally, topology, collective, method="mwu", epsilon=epsilon)
    best = limits.best_rate(topology, collective)
    if isinstance(answer, InfeasibleError):
        tally.label("infeasible: cut off", best == 0, collective, answer)
    if not isinstance(answer, Schedule):
        return
    facts = dict(answer.method.settings)
    roots = len(collective.ranks) if collective.kind in {Kind.ALLGATHER, Kind.REDUCE_SCATTER} else 1
    if facts["limit"] is not None:
        tally.label("mwu: limit", Fraction(str(facts["limit"])) * roots >= best, collective, facts, best)
    if facts["stopped"] in {"guarantee", "enough"}:
        tally.label(f"mwu: {facts['stopped']}", answer.rate >= best * (1 - epsilon), collective, facts, answer.rate, best)
    tally.label("optimal", not answer.is_optimal or answer.rate == best, collective, answer.rate, best)


# chunk schedules


def ask_size(rng: Random, tally: Tally) -> None:
    """One (C, S, R): there is one, or there is none."""
    topology = _drawn(tally, fabric(rng, ranks=(2, 4), switches=1, decimals=0, largest=2))
    collective = _asked(rng, topology)
    chunks, steps = rng.randint(1, 2), rng.randint(1, 3)
    if collective.kind is Kind.ALLREDUCE:
        chunks = rng.randint(1, 2) * topology.ranks if rng.random() < 0.7 else rng.randint(1, 3)
        steps = rng.randint(1, 4)
    rounds = rng.randint(steps, steps + 2)
    method = rng.choice(["smt", "ilp", "sat"])
    asked = (collective, method, chunks, steps, rounds)
    try:
        answer = _solved(
            tally, topology, collective, method=method, chunks=chunks, steps=steps, rounds=rounds, cache=False, deadline_s=20
        )
    except InputError as error:
        assert "multiple" in str(error), error
        return
    exists = chunk_search.exists(topology, collective, chunks, steps, rounds)
    if isinstance(answer, InfeasibleError):
        among = "compos" in str(answer) or "as a reduce-scatter and an allgather" in str(answer)
        if not among:
            tally.label(f"infeasible: chunks of {collective.kind}", None if exists is None else not exists, *asked, answer)
        if isinstance(answer.proof, StepBound) and collective.kind is not Kind.ALLREDUCE:
            least = _least(topology, collective, steps)
            tally.label("infeasible: limit of steps", least is None or least >= answer.proof.ratio > Fraction(rounds, chunks), *asked, least, answer.proof)
    elif answer is not None:
        tally.label("found (reference finds one)", None if exists is None else exists, *asked)


def ask_frontier(rng: Random, tally: Tally) -> None:
    """Every point is the least R/C of its steps with the smallest C, and none is missing."""
    topology = _drawn(tally, fabric(rng, ranks=(2, 4), switches=1, decimals=0, largest=2))
    kinds = tuple(kind for kind in NAMED_KINDS if kind is not Kind.ALLREDUCE)
    collective = _asked(rng, topology, kinds)
    most = rng.randint(2, 4) if topology.ranks + len(topology.switches) <= 3 else 3
    with tally.no_crash("pareto", collective, most):
        try:
            found = synth.pareto(topology, collective, max_steps=most, cache=False, deadline_s=15)
        except InfeasibleError as error:
            least = _least(topology, collective, most)
            tally.label("infeasible: steps", least is None, collective, most, error)
            return
        except TimedOutError:
            tally.unknown["in time"] += 1
            return
    ratios = {steps: _least(topology, collective, steps) for steps in range(1, most + 1)}
    for point in found.points:
        wrong = objections(point.schedule)
        tally.label("verified (own replay)", not wrong, collective, wrong[:2])
        exact = ratios[point.steps]
        tally.label("frontier: least", exact is None or point.least <= exact, collective, point.steps, point.least, exact)
        if point.is_proved:
            tally.label("frontier: proved", point.ratio == exact, collective, point.steps, point.ratio, exact)
            smaller = [
                chunk_search.exists(topology, collective, chunks, point.steps, int(chunks * point.ratio))
                for chunks in range(1, point.chunks)
                if (chunks * point.ratio).denominator == 1 and chunks * point.ratio >= point.steps
            ]
            tally.label("frontier: smallest C", None if None in smaller else True not in smaller, collective, point.chunks, point.steps, smaller)
    if found.complete:
        best = min((ratio for ratio in ratios.values() if ratio is not None), default=None)
        tally.label("complete", best is not None and found.points[-1].ratio <= best and found.points[-1].ratio == found.static_ratio, collective, best)
    for steps in range(1, most + 1):
        if steps in found.open_steps or found.timed_out or not found.points or steps > found.points[-1].steps and not found.complete:
            continue
        known = min((point.ratio for point in found.points if point.steps <= steps), default=None)
        tally.label("frontier: nothing missing", (known is None) == (ratios[steps] is None) and (known is None or known <= ratios[steps]), collective, steps, known, ratios[steps])


def ask_allreduce_frontier(rng: Random, tally: Tally) -> None:
    """What is said of an allreduce over every schedule is true of all that add partial sums."""
    topology = _drawn(tally, fabric(rng, ranks=(2, 3), switches=1, decimals=0, largest=2))
    collective = Collective(Kind.ALLREDUCE, tuple(range(topology.ranks)))
    most = rng.randint(1, 4)
    with tally.no_crash("pareto", collective, most):
        try:
            found = synth.pareto(topology, collective, max_steps=most, cache=False, deadline_s=15)
        except InfeasibleError as error:
            if "compos" not in str(error):
                exists = chunk_search.exists(topology, collective, 1, most, 12)
                tally.label("infeasible: steps of allreduce", None if exists is None else not exists, most, error)
            return
        except TimedOutError:
            tally.unknown["in time"] += 1
            return
    for point in found.points:
        wrong = objections(point.schedule)
        tally.label("verified (own replay)", not wrong, wrong[:2])
        if not _says_every_schedule(point):
            continue
        for chunks in range(1, min(4, point.chunks) + 1):
            # One round fewer than this point needs for as many chunks; and a smaller C of the same ratio.
            better = -(-point.ratio.numerator * chunks // point.ratio.denominator) - 1
            if better >= point.steps:
                exists = chunk_search.exists(topology, collective, chunks, point.steps, better)
                tally.label("allreduce frontier: proved", None if exists is None else not exists, chunks, point.steps, better, point.proof)
            if chunks < point.chunks and (chunks * point.ratio).denominator == 1 and chunks * point.ratio >= point.steps:
                exists = chunk_search.exists(topology, collective, chunks, point.steps, int(chunks * point.ratio))
                tally.label("allreduce frontier: smallest C", None if exists is None else not exists, chunks, point.steps, point.ratio, point.proof)


def _says_every_schedule(point: object) -> bool:
    scope = str(getattr(point, "scope", "every schedule"))
    return bool(getattr(point, "is_proved", False)) and "composition" not in scope


def _least(topology: Topology, collective: Collective, steps: int) -> Fraction | None:
    return chunk_search.least_ratio(topology, collective, steps)


# rings, groups, faults, symmetries, sizes, units


def ask_rings(rng: Random, tally: Tally) -> None:
    """The widest ring, the largest set of rings, and that there is none."""
    topology = _drawn(tally, fabric(rng, ranks=(2, 6), switches=2))
    if topology.ranks == 6 and topology.switches:
        topology = _drawn(tally, fabric(rng, ranks=(2, 4), switches=2))
    collective = _asked(rng, topology, (Kind.ALLGATHER, Kind.ALLREDUCE, Kind.BROADCAST))
    every = all_rings.rings(topology, collective.ranks)
    for method in ("ring", "multiring"):
        answer = _solved(tally, topology, collective, method=method)
        if every is None or answer is None:
            continue
        if isinstance(answer, InfeasibleError):
            if "no ring exists" in str(answer):
                tally.label(f"infeasible: {method}", not every, answer)
            elif "cut off" in str(answer):
                tally.label("infeasible: cut off", limits.least_cut(topology, collective) == 0, answer)
            continue
        facts = dict(answer.method.settings)
        if facts.get("proved_widest") == "yes":
            width = all_rings.widest(topology, every)
            count = len(collective.ranks)
            rate = {Kind.ALLGATHER: width * count / (count - 1), Kind.ALLREDUCE: width * count / (count - 1) / 2}
            wide = answer.rate == rate.get(collective.kind, answer.rate)
            tally.label("proved widest", wide, collective, answer.rate, width)
        if facts.get("proved_largest") == "yes":
            more = all_rings.more_than(topology, every, int(str(facts["rings"])))
            tally.label("proved largest", None if more is None else not more, collective, facts)
        if "rings_at_most" in facts:
            more = all_rings.more_than(topology, every, int(str(facts["rings_at_most"])))
            tally.label("rings at most", None if more is None else not more, collective, facts)


def ask_groups(rng: Random, tally: Tally) -> None:
    """Groups that share the links: no sharing is fairer, and all of them fit."""
    from synth.groups.solver import solve_groups
    from synth.groups.verifier import verify_groups

    topology = _drawn(tally, fabric(rng, ranks=(2, 5), switches=1))
    groups = []
    for _ in range(rng.randint(1, 3)):
        ranks = sorted(rng.sample(range(topology.ranks), rng.randint(2, min(4, topology.ranks))))
        kind = rng.choice(NAMED_KINDS)
        groups.append(Collective(kind, tuple(ranks), rng.choice(ranks) if kind.has_root else None))
    weights = [Fraction(rng.choice([1, 1, 2])) for _ in groups]
    relays = rng.random() < 0.7
    with tally.no_crash("groups", groups, weights, relays):
        try:
            found = solve_groups(topology, groups, weights=weights, relays=relays)
        except InfeasibleError as error:
            tally.label("infeasible: groups", _some_group_is_cut_off(topology, groups, relays=relays), groups, error)
            return
        except ArithmeticError as error:
            assert "int64" in str(error), error
            tally.unknown["groups: too fine for int64"] += 1
            return
        verdict = verify_groups(found)
    tally.label("verified", verdict.correct, groups, weights, relays, verdict.errors[:2])
    if found.certificate.is_exact:
        able = sharing.who_can_gain(topology, groups, weights, found.rates, relays=relays)
        tally.label("groups: no sharing is fairer", not able, groups, weights, relays, found.rates, able)
    alone = sharing.who_can_gain(topology, groups[:1], weights[:1], [found.groups[0].alone], relays=relays)
    tally.label("groups: alone", not alone, groups, relays, found.groups[0].alone)


def _some_group_is_cut_off(topology: Topology, groups: list[Collective], *, relays: bool) -> bool:
    for group in groups:
        inner = set(range(topology.size if relays else topology.ranks)) | set(range(topology.ranks, topology.size))
        inner -= set() if relays else set(range(topology.ranks)) - set(group.ranks)
        links = [link for link in topology.links if {link.src, link.dst} <= inner]
        seen = Topology.build("seen", topology.ranks, links, topology.switches)
        if limits.least_cut(seen, group) == 0:
            return True
    return False


def ask_repair(rng: Random, tally: Tally) -> None:
    """What is repaired is as fast as anything on what is left."""
    from synth.repair import repair

    topology = _drawn(tally, fabric(rng, ranks=(3, 6), switches=1))
    collective = _asked(rng, topology, limits.TREES if topology.ranks <= 5 else limits.TREES[:4])
    answer = _solved(tally, topology, collective)
    if not isinstance(answer, Schedule):
        return
    link = rng.choice(topology.links)
    hop = (link.src, link.dst)
    faults: dict[str, object] = rng.choice(
        [
            {"without_links": [hop]},
            {"slower_links": {hop: link.bandwidth * Fraction(rng.randint(1, 9), 10)}},
            {"without_ranks": [rng.randrange(topology.ranks)]},
        ]
    )
    if faults.get("without_ranks") == [collective.root]:
        return
    with tally.no_crash("repair", collective, faults):
        try:
            repaired = repair(answer, **faults)  # type: ignore[arg-type]
        except InfeasibleError as error:
            left = _left(topology, faults)
            asked = _without_rank(collective, faults)
            tally.label("infeasible: repair", limits.least_cut(left, asked) == 0, collective, faults, error)
            return
    best = limits.best_rate(repaired.topology, repaired.collective)
    wrong = objections(repaired)
    tally.label("verified (own replay)", not wrong, collective, faults, wrong[:2])
    tally.label("repair: as exact as anew", repaired.rate == best or best < repaired.bound.rate <= best * ROUNDED, collective, faults, repaired.rate, best)
    tally.label("optimal", not repaired.is_optimal or repaired.rate == best, collective, faults, repaired.rate, best)


def _left(topology: Topology, faults: dict[str, object]) -> Topology:
    from synth.faults import without

    return without(
        topology,
        links=faults.get("without_links", ()),  # type: ignore[arg-type]
        ranks=faults.get("without_ranks", ()),  # type: ignore[arg-type]
        slower=faults.get("slower_links"),  # type: ignore[arg-type]
    ).topology


def _without_rank(collective: Collective, faults: dict[str, object]) -> Collective:
    gone = faults.get("without_ranks", ())
    kept = [rank for rank in collective.ranks if rank not in gone]  # type: ignore[operator]
    root = None if collective.root is None else kept.index(collective.root)
    return Collective(collective.kind, tuple(range(len(kept))), root)


def ask_implicit(rng: Random, tally: Tally) -> None:
    """The implicit form reaches the same limit, with a height the best of all trees that are as low."""
    from synth.implicit.methods import solve_implicit

    topology = _drawn(tally, fabric(rng, ranks=(2, 5), regular=True, switches=1))
    kinds = (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE, Kind.ALLTOALL)
    collective = _asked(rng, topology, kinds)
    height = rng.choice([None, rng.randint(1, topology.ranks)]) if collective.kind is not Kind.ALLTOALL else None
    with tally.no_crash("implicit", collective.kind, height):
        try:
            found = solve_implicit(topology, collective, max_height=height)
        except InfeasibleError as error:
            least = Fraction(0) if height is None else _best_of_height(topology, collective, height)
            tally.label("infeasible: implicit", least == 0, collective.kind, height, error)
            return
        verdict = synth.verify(found, every_translate=True)
        written = found.expand()
    tally.label("verified", verdict.correct, collective.kind, verdict.errors[:2])
    wrong = objections(written)
    tally.label("verified (own replay)", not wrong, collective.kind, wrong[:2])
    best = limits.best_rate(topology, collective)
    tally.label("implicit: the same limit", best <= found.bound.rate <= best * ROUNDED, collective.kind, found.bound.rate, best)
    tally.label("optimal", not found.is_optimal or found.rate == best, collective.kind, found.rate, best)
    if height is not None and topology.ranks <= (3 if topology.switches else 5):
        lowest = _best_of_height(topology, collective, height)
        tally.label("rate is possible", found.rate <= lowest, collective.kind, height, found.rate, lowest)
        if dict(found.method.settings).get("best_trees") == "proved":
            tally.label("implicit: best trees proved", found.rate >= lowest * CLOSE, collective.kind, height, found.rate, lowest)


def _best_of_height(topology: Topology, collective: Collective, height: int) -> Fraction:
    graph = topology.reversed() if collective.kind is Kind.REDUCE_SCATTER else topology
    return all_trees.best_of_height(graph, None if collective.kind is Kind.ALLREDUCE else collective.ranks, height)


def ask_fastest(rng: Random, tally: Tally) -> None:
    """The choice at a size is the fastest of its candidates by simulation; so is the table at every size."""
    from synth.methods import Request, select
    from synth.selection import SIZES
    from synth.simulator import simulate

    topology = _drawn(tally, fabric(rng, ranks=(2, 4), switches=1, decimals=1, largest=3))
    collective = _asked(rng, topology)
    with tally.no_crash("select", collective):
        try:
            selection = select(topology, collective, Request(cache=False, deadline_s=30))
        except (InfeasibleError, TimedOutError):
            return
        if selection.out_of_time is not None:
            tally.unknown["in time"] += 1
            return
        choices = selection.choices()
    size = rng.choice(SIZES)
    time = {size: [simulate(each, size).time_us for each in selection.schedules] for size in {size, *SIZES}}
    tally.label("fastest at a size", simulate(selection.fastest(size), size).time_us == min(time[size]), collective, size)
    for size in SIZES:
        chosen = [choice for choice in choices if choice.from_bytes <= size][-1].schedule
        taken = simulate(chosen, size).time_us
        tally.label("fastest by simulation (table)", taken <= min(time[size]), collective, size, taken, min(time[size]))


def ask_units(rng: Random, tally: Tally) -> None:
    """All bandwidths a power of ten larger: every label and share the same, every rate as much larger."""
    topology = _drawn(tally, fabric(rng, ranks=(2, 6), switches=1, decimals=4))
    collective = _asked(rng, topology)
    factor = Fraction(10) ** rng.randint(-9, 9)
    request: dict[str, object] = {}
    if collective.kind in limits.TREES:
        request = rng.choice(
            [{}, {"method": "trees", "max_height": 2}, {"method": "trees", "max_trees": 2}, {"method": "trees", "tolerance": Fraction(1, 20)}, {"method": "mwu"}]
        )
    with tally.no_crash(collective, request, factor):
        try:
            here = synth.solve(topology, collective, **request)  # type: ignore[arg-type]
        except InfeasibleError:
            return
        there = synth.solve(times(topology, factor), collective, **request)  # type: ignore[arg-type]
    asked = (collective, request, factor)
    tally.label("scaled: rate", there.rate == here.rate * factor, *asked, here.rate, there.rate)
    tally.label("scaled: bound", there.bound.rate == here.bound.rate * factor, *asked)
    tally.label("scaled: shares", there.chunks == here.chunks and there.transfers == here.transfers, *asked)
    labels = [{key: value for key, value in each.method.settings if key not in {"limit", "unit"}} for each in (here, there)]
    tally.label("scaled: labels", labels[0] == labels[1], *asked, *labels)


QUESTIONS: dict[str, tuple[int, Callable[[Random, Tally], None]]] = {
    "bound": (50, ask_bound),
    "relays": (10, ask_relays),
    "height": (20, ask_height),
    "few": (15, ask_few),
    "mwu": (8, ask_mwu),
    "size": (8, ask_size),
    "frontier": (3, ask_frontier),
    "allreduce": (2, ask_allreduce_frontier),
    "rings": (15, ask_rings),
    "groups": (8, ask_groups),
    "repair": (10, ask_repair),
    "implicit": (6, ask_implicit),
    "fastest": (1, ask_fastest),
    "units": (10, ask_units),
}
"""How often each question is asked, of all together."""
