"""Questions of low and of few trees."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from random import Random
from typing import Any

from arborcast.synth.errors import InfeasibleError
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Topology
from tests.fuzzing import all_trees, limits
from tests.fuzzing.fabrics import fabric
from tests.fuzzing.tally import CLOSE, TREES, Tally, draw_collective, spreading

SEARCHED = 1 - Fraction(2, 10**6)  # what an integer program's "best" may miss
MOST_CARRIERS = 16  # all choices of a few of them are tried


def ask_height(rng: Random, tally: Tally) -> None:
    """The best rate within a height is the best of all trees that are as low, or there are none."""
    topology = tally.draw(_small_fabric(rng))
    collective = draw_collective(rng, topology, TREES)
    height = rng.randint(1, max(1, topology.ranks - 1))
    wishes: list[dict[str, Any]] = [
        {},
        {},
        {"tolerance": Fraction(1, 20)},
        {"max_trees": 1},
        {"max_trees": 2},
    ]
    wish = rng.choice(wishes)
    answer = tally.solve(topology, collective, method="trees", max_height=height, **wish)
    graph, roots = spreading(topology, collective)
    best = all_trees.best_of_height(graph, roots, height)
    if isinstance(answer, InfeasibleError):
        tally.label("infeasible: height", best == 0, collective, height, answer)
    if not isinstance(answer, Schedule):
        return
    within = str(dict(answer.method.settings)["within_height"])
    tally.label("height", answer.height <= height, collective, answer.height, height)
    tally.rate(answer, best, collective, height)
    if within.startswith(("best", "the limit")):
        least = best * CLOSE if "to 1e-9" in within else best
        tally.label(
            f"within height: {within}", answer.rate >= least, collective, height, wish, answer.rate, best
        )
    _check_few(tally, graph, roots, answer, best, height)


def ask_few(rng: Random, tally: Tally) -> None:
    """Few trees: fewest, best, or at the limit."""
    topology = tally.draw(_small_fabric(rng))
    collective = draw_collective(rng, topology, TREES)
    wishes: list[dict[str, Any]] = [
        {"max_trees": rng.randint(1, 3)},
        {"tolerance": Fraction(0)},
        {"tolerance": Fraction(1, 20)},
        {"max_trees": 2, "tolerance": Fraction(1, 10)},
    ]
    method = "mwu" if rng.random() < 0.15 else "trees"
    answer = tally.solve(topology, collective, method=method, **rng.choice(wishes))
    best = limits.best_rate(topology, collective)
    if isinstance(answer, InfeasibleError):
        tally.label("infeasible: cut off", best == 0, collective, answer)
    if not isinstance(answer, Schedule):
        return
    tally.rate(answer, best, collective)
    _check_few(tally, *spreading(topology, collective), answer, best, None)


def _small_fabric(rng: Random) -> Topology:
    if rng.random() < 0.75:
        return fabric(rng, ranks=rng.choice([(2, 5), (3, 4)]), switches=0)
    return fabric(rng, ranks=(2, 3), switches=2)


def _check_few(
    tally: Tally,
    graph: Topology,
    roots: tuple[int, ...] | None,
    answer: Schedule,
    best: Fraction,
    height: int | None,
) -> None:
    """What is said of few trees, of all trees that there are within a height."""
    facts = dict(answer.method.settings)
    said = str(facts.get("proved", "none"))
    is_best = height is None or str(facts["within_height"]).startswith(("best", "the limit"))
    counts = Counter(None if roots is None else chunk.owner for chunk in answer.chunks)
    asked = (answer.collective, facts, len(answer.chunks), answer.rate, best)
    wanted = best * (1 - Fraction(str(facts.get("tolerance", 0))))
    if "tolerance" in facts and is_best and not said.startswith("none: the candidates"):
        tally.label("tolerance", answer.rate >= wanted * CLOSE, *asked)
    if "max_trees" in facts:
        tally.label("max trees", max(counts.values()) <= int(str(facts["max_trees"])), *asked)
    if said == "optimal":
        tally.label("few: optimal", answer.rate >= best * CLOSE, *asked)
    elif said.startswith("no fewer"):
        tally.label(f"few: {said}", max(counts.values()) == 1, *asked)
    elif not said.startswith(("none", "found")):
        _check_chosen(tally, graph, roots, answer, wanted, height)


def _check_chosen(
    tally: Tally,
    graph: Topology,
    roots: tuple[int, ...] | None,
    answer: Schedule,
    wanted: Fraction,
    height: int | None,
) -> None:
    """Where there are as many candidates as trees, or the word is of all trees: by trying all choices."""
    facts = dict(answer.method.settings)
    said, count = str(facts["proved"]), len(answer.chunks)
    every = sorted(all_trees.loads(graph, roots[0], height)) if roots is not None and len(roots) == 1 else []
    among_some = "candidates" in said and facts.get("candidates") != len(every)
    if not every or len(every) > MOST_CARRIERS or among_some:
        tally.label(f"few: {said}", None)
        return
    asked = (answer.collective, facts, count, answer.rate)
    if "max_trees" in facts:
        most = all_trees.best_of_few(graph, every, int(str(facts["max_trees"])))
        tally.label(f"few: {said}", answer.rate >= most * SEARCHED, *asked, most)
    else:
        most = Fraction(0) if count == 1 else all_trees.best_of_few(graph, every, count - 1)
        tally.label(f"few: {said}", most * CLOSE < wanted, *asked, most, wanted)
