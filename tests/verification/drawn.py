"""Schedules drawn by hand in `drawn.yaml`, right ones and what is said of broken ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from arborcast.synth.bounds import bound
from arborcast.synth.collective import Collective, Demand, Kind
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Link, Switch, Topology
from arborcast.synth.verification.verifier import verify
from tests.support.drawn_in_network import (
    BOTH,
    NVLS,
    TURNS,
    drawn,
    drawn_transfers,
    star,
    two_stars,
)

CASES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
SWITCHES = {
    "turns": TURNS,
    "both": BOTH,
    "loops": NVLS,
    "adds": Switch("hub", reduces=True),
    "copies": Switch("hub", multicasts=True),
}
WHAT_IS_DRAWN = ("fabric", "kind", "root", "ranks", "blocks", "chunks", "steps")


@cache
def fabric(name: str) -> Topology:
    """By its name in a case."""
    if name in CASES["fabrics"]:
        said = CASES["fabrics"][name]
        ends = [tuple(map(int, cable.split("-"))) for cable in said["cables"]]
        links = [Link(*pair, Fraction(1)) for a, b in ends for pair in ((a, b), (b, a))]
        return Topology.build(name, said["ranks"], links, said.get("switches", ()))
    *shape, switch = name.split()
    return two_stars(SWITCHES[switch]) if shape[0] == "two" else star(int(shape[1]), SWITCHES[switch])


def custom(topology: Topology, *blocks: Sequence[Sequence[int]]) -> Collective:
    """Each block as (who holds it, who must get it)."""
    return Collective.custom(topology, [Demand(frozenset(at), frozenset(to)) for at, to in blocks])


def draw(
    topology: Topology,
    collective: Collective,
    chunks: Sequence[Chunk],
    steps: Sequence[str],
    *,
    rounds: Sequence[int] | None = None,
) -> Schedule:
    """Steps as `drawn_transfers` has them, under the limit of the collective."""
    proven = bound(topology, collective)
    return Schedule.build(
        topology, collective, Method("drawn"), proven, chunks, drawn_transfers(steps), rounds
    )


def right(name: str, table: str = "right") -> tuple[Schedule, Fraction]:
    """A right schedule and the rate that it was drawn for."""
    return _drawn(CASES[table][name]), Fraction(CASES[table][name]["rate"])


def check_objections(name: str, table: str) -> None:
    """That of a case is said what it says."""
    case = CASES[table][name]
    errors = verify(_changed(table, case)).errors
    if "says" in case:
        assert errors == tuple(case["says"])
    assert set(case.get("among", ())) <= set(errors), errors


def with_abilities(schedule: Schedule, **fields: Any) -> Schedule:
    """The schedule where all switches can do other things; an adder may be a text."""
    if isinstance(fields.get("adder"), str):
        fields["adder"] = Fraction(fields["adder"])
    topology = schedule.topology
    able = tuple(replace(switch, **fields) for switch in topology.switches)
    return replace(schedule, topology=replace(topology, switches=able))


def without(schedule: Schedule, position: int) -> Schedule:
    """The schedule without one of its transfers."""
    kept = tuple(t for index, t in enumerate(schedule.transfers) if index != position)
    return replace(schedule, transfers=kept)


def _drawn(case: Mapping[str, Any]) -> Schedule:
    topology = fabric(case["fabric"])
    chunks = list(map(_chunk, str(case["chunks"]).split(",")))
    if topology.holders > topology.ranks:
        return drawn(topology, Kind(case["kind"]), chunks, case["steps"])
    if "blocks" in case:
        collective = custom(topology, *case["blocks"])
    else:
        collective = Collective.on(topology, case["kind"], root=case.get("root", 0), ranks=case.get("ranks"))
    return draw(topology, collective, chunks, case["steps"], rounds=case.get("rounds"))


def _chunk(text: str) -> Chunk:
    share, place = text.split()
    owner, _, demand = place.partition("#")
    owner, _, target = owner.partition(">")
    return Chunk(
        Fraction(share), int(owner), int(target) if target else None, int(demand) if demand else None
    )


def _changed(table: str, case: Mapping[str, Any]) -> Schedule:
    """A right schedule of the table beside it changed, or one that is drawn itself."""
    origin = CASES[table.replace("broken", "right")].get(case.get("of"), {})
    # What is drawn anew has the rate that it then has; what is only declared otherwise keeps all else.
    anew = {key: case[key] for key in WHAT_IS_DRAWN if key in case and key != "chunks"}
    schedule = _drawn({**origin, **anew, **({"chunks": case["chunks"]} if anew and "chunks" in case else {})})
    changes: dict[str, Any] = {key: Fraction(case[key]) for key in ("rate", "unit") if key in case}
    if "rounds" in case:
        changes["rounds"] = tuple(case["rounds"])
    if "chunks" in case:
        changes["chunks"] = tuple(map(_chunk, str(case["chunks"]).split(",")))
    if case.get("backwards"):
        last = schedule.steps - 1
        changes["transfers"] = tuple(replace(t, step=last - t.step) for t in schedule.transfers)
    schedule = with_abilities(replace(schedule, **changes), **case.get("able", {}))
    return without(schedule, case["without"]) if "without" in case else schedule


class SlowReplay:
    """Plain sets, and the transfers into and out of each switch in groups between two replacements."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.topology = schedule.topology

    def is_right(self) -> bool:
        sums: dict[int, Fraction] = {}
        trees: dict[int, int] = {}
        for index in range(len(self.schedule.chunks)):
            groups = self._groups(index)
            if groups is None:
                return False
            busy = set()
            for vertex, inputs, outputs in groups:
                if not self._may(vertex, inputs, outputs):
                    return False
                if len(inputs) > 1 or len(outputs) > 1:
                    busy.add(vertex)
                if len(inputs) > 1:
                    sums[vertex] = sums.get(vertex, Fraction(0)) + self.schedule.chunks[index].share
            for vertex in busy:
                trees[vertex] = trees.get(vertex, 0) + 1
        for vertex, switch in self._able():
            if switch.trees is not None and trees.get(vertex, 0) > switch.trees:
                return False
            if switch.adder is not None and sums.get(vertex, 0) * self.schedule.rate > switch.adder:
                return False
        return True

    def _able(self) -> list[tuple[int, Switch]]:
        return [(self.topology.ranks + place, switch) for place, switch in enumerate(self.topology.switches)]

    def _may(self, vertex: int, inputs: list[Transfer], outputs: list[Transfer]) -> bool:
        switch = dict(self._able())[vertex]
        adds, copies = len(inputs) > 1, len(outputs) > 1
        senders, receivers = {t.src for t in inputs}, {t.dst for t in outputs}
        ranks = set(range(self.topology.ranks))
        if (adds and not switch.reduces) or (copies and not switch.multicasts):
            return False
        if adds and copies:
            return switch.turns
        if switch.loopback and adds:
            return all(self._gave_before(out, inputs) for out in outputs if out.dst in ranks)
        return not (switch.loopback and copies) or (senders & ranks) <= receivers

    def _gave_before(self, out: Transfer, inputs: list[Transfer]) -> bool:
        earlier = [t.src for t in inputs if t.step < out.step]
        return len(earlier) < 2 or out.dst in earlier

    def _groups(self, index: int) -> list[tuple[int, list[Transfer], list[Transfer]]] | None:
        """Inputs and outputs of each switch between two replacements; None where the replay is wrong."""
        collective = self.schedule.collective
        chunk = self.schedule.chunks[index]
        block = collective.block_of(chunk.owner, chunk.target, chunk.demand)
        held = {rank: set(collective.before(rank, block)) for rank in range(self.topology.ranks)}
        held |= {vertex: set() for vertex, _ in self._able()}
        open_groups: dict[int, tuple[int, list[Transfer], list[Transfer]]] = {}
        groups: list[tuple[int, list[Transfer], list[Transfer]]] = []
        for step in range(self.schedule.steps):
            of_step = [t for t in self.schedule.transfers if t.step == step and t.chunk == index]
            now = {vertex: set(ranks) for vertex, ranks in held.items()}
            kinds: dict[int, list[bool]] = {}
            for t in of_step:
                if not held[t.src] or (t.reduce and held[t.src] & now[t.dst]):
                    return None
                now[t.dst] = now[t.dst] | held[t.src] if t.reduce else set(held[t.src])
                kinds.setdefault(t.dst, []).append(t.reduce)
                if t.src in open_groups:
                    open_groups[t.src][2].append(t)
            if any(len(these) > 1 and not all(these) for these in kinds.values()):
                return None
            for t in (t for t in of_step if self.topology.is_switch(t.dst)):
                if t.dst not in open_groups or not t.reduce:
                    open_groups[t.dst] = (t.dst, [], [])
                    groups.append(open_groups[t.dst])
                open_groups[t.dst][1].append(t)
            held = now
        wanted = ((rank, collective.after(rank, block)) for rank in range(self.topology.ranks))
        return groups if all(want is None or held[rank] == want for rank, want in wanted) else None
