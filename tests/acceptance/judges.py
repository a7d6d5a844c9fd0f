"""The judges: a replay of schedule files in exact numbers, and linear programs for the best rate.

Nothing of the product is imported here. A schedule is the JSON of its file, in explicit form. Rates are
GB/s of the whole buffer, as nccl-tests counts it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import highspy

Document = Mapping[str, Any]
Link = tuple[Any, Any]


class Wrong(Exception):  # noqa: N818 - a verdict
    """What a schedule does wrong."""


def links_of(topology: Document) -> dict[Link, Fraction]:
    """GB/s from vertex to vertex; links side by side add up."""
    links: dict[Link, Fraction] = defaultdict(Fraction)
    for link in topology["links"]:
        links[link["from"], link["to"]] += Fraction(link["bandwidth"])
    return dict(links)


def _asked(collective: Document, chunk: Document) -> tuple[Sequence[int], Sequence[int], Any]:
    """Of a chunk the ranks that hold or contribute, those that must get all of it, and its block."""
    ranks, root, owner, target = collective["ranks"], collective["root"], chunk["owner"], chunk["target"]
    asked: dict[str, tuple[Sequence[int], Sequence[int], Any]] = {
        "broadcast": ([root], ranks, "all"),
        "allreduce": (ranks, ranks, "all"),
        "allgather": ([owner], ranks, owner),
        "reduce-scatter": (ranks, [owner], owner),
        "alltoall": ([owner], [target], (owner, target)),
    }
    return asked[collective["kind"]]


def replay(schedule: Document) -> Fraction:
    """The rate of a schedule that does what its collective asks; raises `Wrong` where it does not.

    All transfers of a step start from the state before it. A sum is given each contribution once.
    """
    chunks, links = schedule["chunks"], links_of(schedule["topology"])
    asked = [_asked(schedule["collective"], chunk) for chunk in chunks]
    held = [{rank: frozenset([rank]) for rank in sources} for sources, _, _ in asked]
    loads: dict[int, Counter[Link]] = defaultdict(Counter)
    for step in sorted({it["step"] for it in schedule["transfers"]}):
        arrivals = []
        for it in (it for it in schedule["transfers"] if it["step"] == step):
            chunk, sender, to = it["chunk"], it["from"], it["to"]
            if sender not in held[chunk]:
                raise Wrong(f"step {step}: {sender} sends chunk {chunk}, which it does not hold")
            arrivals.append((chunk, to, held[chunk][sender], it["reduce"]))
            for link in pairwise([sender, *it["via"], to]):
                if link not in links:
                    raise Wrong(f"step {step}: there is no link {link}")
                loads[step][link] += Fraction(chunks[chunk]["share"])  # type: ignore[assignment]
        for chunk, to, data, adds in arrivals:
            before = held[chunk].get(to, frozenset()) if adds else frozenset()
            if before & data:
                raise Wrong(f"step {step}: {to} adds {sorted(before & data)} to chunk {chunk} twice")
            held[chunk][to] = before | data
    _check_ends(schedule, asked, held)
    if schedule["rounds"] is None:  # links are shared by all steps
        total = sum(loads.values(), Counter())
        return min(links[link] / load for link, load in total.items())
    # In a round the slowest link sends one chunk at most, others as many more as they are faster.
    (share,) = {Fraction(chunk["share"]) for chunk in chunks}
    scale = math.lcm(*(it.denominator for it in links.values()))
    unit = Fraction(math.gcd(*(int(it * scale) for it in links.values())), scale)
    for step, link, load in ((step, *it) for step, of_step in loads.items() for it in of_step.items()):
        if load / share > schedule["rounds"][step] * links[link] / unit:
            raise Wrong(f"step {step}: link {link} carries {load / share} chunks in its rounds")
    return unit / (sum(schedule["rounds"]) * share)


def _check_ends(schedule: Document, asked: Sequence[Any], held: Sequence[Mapping[Any, Any]]) -> None:
    shares: dict[Any, Fraction] = defaultdict(Fraction)
    for number, (sources, sinks, block) in enumerate(asked):
        shares[block] += Fraction(schedule["chunks"][number]["share"])
        for rank in sinks:
            if held[number].get(rank) != frozenset(sources):
                raise Wrong(f"chunk {number}: rank {rank} ends with {held[number].get(rank)}")
    size = len(schedule["collective"]["ranks"])
    blocks = size * (size - 1) if schedule["collective"]["kind"] == "alltoall" else size
    if shares != {"all": 1} and (len(shares) != blocks or set(shares.values()) != {Fraction(1, size)}):
        raise Wrong(f"shares of the blocks are {dict(shares)}")


def messages(schedule: Document, nbytes: int) -> Counter[Link]:
    """Bytes that each rank sends to each other where the buffer has so many."""
    sent: Counter[Link] = Counter()
    for it in schedule["transfers"]:
        sent[it["from"], it["to"]] += Fraction(schedule["chunks"][it["chunk"]]["share"]) * nbytes  # type: ignore[assignment]
    return sent


def best_rate(schedule: Document) -> float:
    """The fastest rate there can be of what a schedule is for, where switches only forward.

    What is copied reaches all sinks at the rate that a flow to each alone has (Edmonds); through a switch,
    too, as long as no more leaves it than comes in (Mader). Sums are gathered as if spread with time turned
    round. An allreduce does both on the same links, with the weights of its roots free.
    """
    links, program = links_of(schedule["topology"]), highspy.Highs()
    kind, ranks = schedule["collective"]["kind"], schedule["collective"]["ranks"]
    program.silent()

    def variables(names: Iterable[Any]) -> dict[Any, Any]:
        return {name: program.addVariable() for name in names}

    def balance(flow: Mapping[Link, Any], vertex: Any) -> Any:
        return program.qsum((1 if link[0] == vertex else -1) * flow[link] for link in flow if vertex in link)

    vertices = {end for link in links for end in link}
    weights = variables([schedule["collective"]["root"]] if kind == "broadcast" else ranks)
    for one, other in pairwise(weights.values()):
        if kind != "allreduce":  # all give alike
            program.addConstr(one == other)
    used = []  # of each link, once for all the flows that carry copies of the same
    for way in [1] * (kind != "reduce-scatter") + [-1] * ("reduce" in kind):
        used.append(variables(links))
        for end in ranks:
            flow = variables(links)
            if kind == "alltoall":  # from one to all others, and nothing is copied
                asked = {rank: -weights[end] for rank in ranks if rank != end}
                asked[end] = (len(ranks) - 1) * weights[end]
            else:  # from all, or back to all
                asked = {rank: way * it for rank, it in weights.items() if rank != end}
                asked[end] = program.qsum(-it for it in asked.values())
            for vertex in vertices:
                program.addConstr(balance(flow, vertex) - asked.get(vertex, 0) == 0)
            if kind == "alltoall":
                used.append(flow)
                continue
            for link in links:
                program.addConstr(flow[link] <= used[-1][link])
        for switch in (it for it in vertices if isinstance(it, str)):
            program.addConstr(balance(used[-1], switch) == 0)
    for link, most in links.items():
        program.addConstr(program.qsum(it[link] for it in used) <= float(most))
    program.maximize(program.qsum(weights.values()))
    assert program.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return float(program.getObjectiveValue())
