"""One fabric, one question, and every label of the answer beside an exact reference.

Each question draws the fabrics on which its reference is exact in reasonable time. The labels: where they
are said, what they mean, = the reference, which shares no code with whoever says so.

    rate of a bound         bounds.bound: nothing in its scope is faster, something is as fast
                            = limits (a program over all sets of ranks; cuts; flows)
      with relays           nothing is faster = all_trees.best_with_relays, flows
      of blocks of one's own                  = chunk_search.best_rate
      of able switches   nothing is faster along trees, something is as fast = able_limits.best_rate
    certificate             Bound.certificate: proves the rate = counted again, under all trees
    scope: every schedule   of an allreduce: along trees or not = all_trees.crossings, chunk_search.exists
    optimal                 is_optimal, solve, JSON: no rate is larger = limits.best_rate
    verified                verify, all commands: does what it says at the rate it says = replay
    infeasible: cut off     all methods: a rank cannot be reached = limits.least_cut
    within_height           packing.shallow: no trees as low are faster, or any trees = all_trees
    infeasible: height      packing.shallow, implicit: no tree is as low = the same
    proved: optimal         packing.fewest: at the limit = the limit
    proved: no fewer ...    packing.fewest: one for each root = counted
    proved: fewest, best    packing.fewest, among its candidates = all choices, where they are all trees
    tolerance, max_trees    packing.fewest: kept = the limit; counted
    limit                   packing.mwu: of the rate of a root = limits.best_rate
    stopped: guarantee, enough   packing.mwu: epsilon is kept = limits.best_rate
    best_trees: proved      implicit form: no trees as low are faster = all_trees
    infeasible: (C, S, R)   chunks.solver: there is none = chunk_search.exists (Glucose; sums as sets)
    infeasible: steps       chunks.frontier: too few for anything = chunk_search
    least, limit of steps   Point.least, StepBound: no R/C is less = chunk_search.least_ratio, trees in steps
    proved, complete, open  chunks.frontier: least R/C, smallest C, nothing missing = both
    proved_widest, proved_largest, rings_at_most, no ring exists   baselines = all_rings, all of them
    does not fit            halving-doubling: no order of the ranks is a hypercube = all orders
    levels are exact, alone groups: no sharing is fairer, nothing is faster alone = sharing
    repaired                repair: as exact as anew = limits.best_rate of what is left
    fastest by simulation   selection: at a size, and where the table looks = all candidates simulated
    one by renumbering      isomorphism: or not = all renumberings; a schedule goes over = replay
    (units)                 bandwidths 10**k as large change no label and no share = each other

Whatever is raised that is no answer (input, infeasible, out of time) counts as false, too. Not compared: what
says "found", "none" or names a float solver; plans of pipelines, which have tests of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from random import Random

from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError
from tests.fuzzing.chunk_questions import ask_allreduce, ask_frontier, ask_size
from tests.fuzzing.other_questions import ask_command, ask_fastest, ask_groups, ask_renumbered, ask_rings
from tests.fuzzing.rate_questions import (
    ask_able,
    ask_bound,
    ask_custom,
    ask_implicit,
    ask_mwu,
    ask_relays,
    ask_repair,
    ask_units,
)
from tests.fuzzing.tally import CrashedError, Tally
from tests.fuzzing.tree_questions import ask_few, ask_height

QUESTIONS: dict[str, Callable[[Random, Tally], None]] = {
    "bound": ask_bound,
    "relays": ask_relays,
    "able": ask_able,
    "custom": ask_custom,
    "height": ask_height,
    "few": ask_few,
    "mwu": ask_mwu,
    "size": ask_size,
    "frontier": ask_frontier,
    "allreduce": ask_allreduce,
    "rings": ask_rings,
    "groups": ask_groups,
    "repair": ask_repair,
    "implicit": ask_implicit,
    "fastest": ask_fastest,
    "renumbered": ask_renumbered,
    "command": ask_command,
    "units": ask_units,
}

OFTEN: dict[str, int] = {
    "bound": 45,
    "relays": 10,
    "able": 4,
    "custom": 6,
    "height": 20,
    "few": 15,
    "mwu": 7,
    "size": 8,
    "frontier": 3,
    "allreduce": 3,
    "rings": 12,
    "groups": 8,
    "repair": 9,
    "implicit": 7,
    "fastest": 1,
    "renumbered": 5,
    "command": 3,
    "units": 8,
}
"""How often each question is asked, of all together: slow ones seldom."""


def compare(seed: int, tally: Tally, often: Mapping[str, int] = OFTEN) -> None:
    """Ask one fabric one question, both chosen by the seed."""
    rng = Random(seed)
    name = rng.choices(list(often), list(often.values()))[0]
    tally.seed, tally.question, tally.topology = seed, name, None
    tally.fabrics += 1
    with suppress(CrashedError):  # noted already
        try:
            QUESTIONS[name](rng, tally)
        except (InputError, InfeasibleError, TimedOutError) as error:  # none that the question reckons with
            tally.note(f"crash: {type(error).__name__}: {error}")
