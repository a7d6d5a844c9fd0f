"""Questions of rings, of groups, of sizes, of topologies that are one by renumbering, and of the command."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from typer.testing import CliRunner

from arborcast.synth.api import approach
from arborcast.synth.cli.app import app
from arborcast.synth.collective import NAMED_KINDS, Collective, Kind
from arborcast.synth.crossings import KEPT, NEAR
from arborcast.synth.errors import InfeasibleError, TimedOutError
from arborcast.synth.formats import topology_to_document
from arborcast.synth.groups.fair_solver import solve_groups
from arborcast.synth.groups.shared_verifier import verify_groups
from arborcast.synth.selection import SIZES
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.sweeps.table import renumbered
from arborcast.synth.symmetry.isomorphism import ComparableTopology
from arborcast.synth.topology import Topology
from tests.fuzzing import all_rings, limits, sharing
from tests.fuzzing.fabrics import fabric, shuffled
from tests.fuzzing.tally import FLOWS, ROUNDED, TREES, Tally, draw_collective


def ask_rings(rng: Random, tally: Tally) -> None:
    """The widest ring, the largest set of rings, the hypercube, and that there is none of them."""
    topology = tally.draw(
        fabric(rng, ranks=(2, 6), switches=0) if rng.random() < 0.6 else fabric(rng, ranks=(2, 4))
    )
    collective = draw_collective(rng, topology, (Kind.ALLGATHER, Kind.ALLREDUCE, Kind.BROADCAST))
    every = all_rings.rings(topology, collective.ranks)
    for method in ("ring", "multiring", "halving-doubling"):
        if method == "halving-doubling" and (collective.root is not None or topology.ranks not in {2, 4}):
            continue
        answer = tally.solve(topology, collective, method=method)
        if isinstance(answer, InfeasibleError):
            _check_no_pattern(tally, topology, collective, every, method, str(answer))
        elif answer is not None and every is not None and method != "halving-doubling":
            _check_rings(tally, topology, collective, every, dict(answer.method.settings), answer.rate)


def _check_no_pattern(
    tally: Tally,
    topology: Topology,
    collective: Collective,
    every: set[all_rings.Ring] | None,
    method: str,
    said: str,
) -> None:
    if "cut off" in said:
        tally.label("infeasible: cut off", limits.least_cut(topology, collective) == 0, collective, said)
    elif "no ring exists" in said:
        tally.label(f"infeasible: {method}", None if every is None else not every, collective, said)
    elif "does not fit" in said and method == "halving-doubling":
        tally.label(f"infeasible: {method}", not all_rings.has_hypercube(topology), collective, said)


def _check_rings(
    tally: Tally,
    topology: Topology,
    collective: Collective,
    every: set[all_rings.Ring],
    facts: dict[str, Any],
    rate: Fraction,
) -> None:
    count = len(collective.ranks)
    if facts.get("proved_widest") == "yes":
        width = all_rings.widest(topology, every)
        factor = {
            Kind.ALLGATHER: Fraction(count, count - 1),
            Kind.ALLREDUCE: Fraction(count, 2 * (count - 1)),
        }
        # A broadcast leaves one edge of the ring out, and may be faster for it.
        wide = rate >= width * factor.get(collective.kind, 1)
        tally.label("proved widest", wide, collective, rate, width)
    for fact in ("rings", "rings_at_most"):
        if fact in facts and (fact != "rings" or facts["proved_largest"] not in {"no"}):
            more = all_rings.more_than(topology, every, int(facts[fact]))
            name = f"proved largest: {facts['proved_largest']}" if fact == "rings" else "rings at most"
            tally.label(name, None if more is None else not more, collective, facts)


def ask_groups(rng: Random, tally: Tally) -> None:
    """Groups that share the links: no sharing is fairer, and all of them fit."""
    topology = tally.draw(fabric(rng, ranks=(2, 5), switches=1))
    groups = []
    for _ in range(rng.randint(1, 3)):
        ranks = rng.sample(range(topology.ranks), rng.randint(2, min(4, topology.ranks)))
        kind = rng.choice(NAMED_KINDS)
        groups.append(Collective(kind, tuple(sorted(ranks)), rng.choice(ranks) if kind.has_root else None))
    weights = [Fraction(rng.choice([1, 1, 2])) for _ in groups]
    relays = rng.random() < 0.7
    asked = (groups, weights, relays)
    with tally.no_crash(*asked):
        try:
            found = solve_groups(topology, groups, weights=weights, relays=relays)
        except InfeasibleError as error:
            cut = min(
                limits.least_cut(sharing.seen(topology, group, relays=relays), group) for group in groups
            )
            tally.label("infeasible: groups", cut == 0, *asked, error)
            return
        verdict = verify_groups(found)
    tally.label("verified (groups)", verdict.correct, *asked, verdict.errors[:2])
    if found.certificate.is_exact:
        able = sharing.who_can_gain(topology, groups, weights, found.rates, relays=relays)
        tally.label("groups: no sharing is fairer", not able, *asked, found.rates, able)
    for group, answer in zip(groups, found.groups, strict=True):
        alone = sharing.who_can_gain(topology, [group], [Fraction(1)], [answer.alone], relays=relays)
        tally.label("groups: best alone", not alone, group, relays, answer.alone)


def ask_fastest(rng: Random, tally: Tally) -> None:
    """The choice at a size is the fastest of its candidates by simulation; so is the table where it looks."""
    topology = tally.draw(fabric(rng, ranks=(2, 4), switches=1, decimals=1, largest=3))
    collective = draw_collective(rng, topology)
    options = SolveOptions(cache=False, deadline_s=30)
    with tally.no_crash(collective, options):
        try:
            selection = approach(topology, collective, options=options).selection()
        except (InfeasibleError, TimedOutError):
            return
        if selection.out_of_time is not None:
            tally.unknown["in time"] += 1
            return
        choices = selection.choices()
        time = {size: [simulate(each, size).time_us for each in selection.schedules] for size in SIZES}
    size = rng.choice(SIZES)
    taken = simulate(selection.fastest(size), size).time_us
    tally.label("fastest at a size", taken == min(time[size]), collective, size)
    serving = [[each for each in choices if each.from_bytes <= size][-1].schedule for size in SIZES]
    for place, (size, chosen) in enumerate(zip(SIZES, serving, strict=True)):
        allowed = 1 + (NEAR if place % 2 else KEPT / 2)  # every second size is looked at
        taken, least = time[size][selection.schedules.index(chosen)], min(time[size])
        tally.label("fastest by simulation (table)", taken <= least * allowed, collective, size, taken, least)


def ask_renumbered(rng: Random, tally: Tally) -> None:
    """Two topologies are one by renumbering or they are not; a schedule goes over with its proof."""
    topology = tally.draw(fabric(rng, ranks=(2, 5), switches=2, decimals=1, largest=rng.choice([1, 3])))
    other, _ = shuffled(rng, topology, spoil=rng.random() < 0.5)
    with tally.no_crash("isomorphism", topology_to_document(other)):
        images = ComparableTopology(topology).isomorphism(ComparableTopology(other))
    if images is None:
        are_one = any(_maps(topology, other, order) for order in _orders(topology))
        tally.label("not one by renumbering", not are_one, topology_to_document(other))
        return
    tally.label(
        "one by renumbering", _maps(topology, other, tuple(images)), images, topology_to_document(other)
    )
    collective = Collective(rng.choice(TREES), tuple(range(topology.ranks)))
    collective = draw_collective(rng, topology, (collective.kind,))
    answer = tally.solve(topology, Collective(collective.kind, tuple(range(topology.ranks)), collective.root))
    if answer is not None and not isinstance(answer, InfeasibleError):
        tally.replay(renumbered(answer, other, tuple(images)), collective, images)


def _orders(topology: Topology) -> list[tuple[int, ...]]:
    ranks, switches = range(topology.ranks), range(topology.ranks, topology.size)
    return [(*some, *more) for some in permutations(ranks) for more in permutations(switches)]


def _maps(topology: Topology, other: Topology, images: tuple[int, ...]) -> bool:
    moved = {(images[src], images[dst]): rate for (src, dst), rate in topology.bandwidth.items()}
    return moved == other.bandwidth


def ask_command(rng: Random, tally: Tally) -> None:
    """What `synth` prints as JSON: "optimal", "infeasible" and the exit status."""
    topology = tally.draw(fabric(rng, ranks=(2, 5), switches=1))
    kind = rng.choice((*TREES[:4], *FLOWS))
    collective = Collective(kind, tuple(range(topology.ranks)), 0 if kind.has_root else None)
    with TemporaryDirectory() as folder:
        file = Path(folder, "fabric.json")
        file.write_text(json.dumps(topology_to_document(topology)))
        words = [rng.choice(["solve", "bound"]), str(file), kind.value, "--json"]
        said = CliRunner().invoke(app, words)
    with tally.no_crash(*words):
        if said.exception is not None and not isinstance(said.exception, (SystemExit, InfeasibleError)):
            raise said.exception
        document = json.loads(said.stdout)
    best = limits.best_rate(topology, collective)
    if "infeasible" in document:
        tally.label("command: infeasible", best == 0, *words, document)
    elif words[0] == "bound":
        near = best <= Fraction(document["rate"]) <= best * ROUNDED
        tally.label("command: bound", near, *words, document["rate"], best)
    else:
        true = document["optimal"] == (Fraction(document["rate"]) == best) or kind is Kind.ALLTOALL
        tally.label("command: optimal", true, *words, document["rate"], best)
