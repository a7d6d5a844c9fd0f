"""Check a schedule or a frontier of Arborcast, and all that it proves, without Arborcast or any library.

    python examples/check_certificate.py fast.json
    python examples/check_certificate.py frontier/frontier.json

The transfers are replayed with sets of contributors, links and rounds are counted, and the limits are worked
out from their certificates alone, in exact fractions: a cut, a partition, link lengths (dual), and of times
tolls. Of a file in implicit form all translations are checked, and one of each kind of chunk is replayed.
Exit status: 0 all holds; 1 something does not, and the line says what; 2 the file asks for what is not known
here (parallel links; link lengths by which too many ranks are apart beside relays or switches that add; of
a frontier limits whose trees have many targets beside ranks that relay, or that rest on a search).

How tolls prove a time: cut it into intervals and round latencies down to whole ones. What a rank ends with
depends on what the others gave, so that chains of messages lead from them to it. Each pays the tolls of its
way; a message pays for every rank that it can depend on by then. What all bytes must pay, set against what
links can carry, limits the bytes. docs/explanation/bounds.md says more.

How lengths limit the rounds of so many steps: links have a length in each step, and what all can carry in
one round there costs at most 1. So the cheapest way of each chunk through the steps, by copies or, of an
allreduce, from each rank to each other one, costs no more than there are rounds for it.
"""

import gzip
import heapq
import itertools
import json
import math
import sys
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

SUMS = ("reduce", "reduce-scatter", "allreduce")
WHOLE = ("broadcast", "reduce", "allreduce")
KINDS = (*SUMS, "broadcast", "allgather", "gather", "scatter", "alltoall", "custom")
FORMATS = tuple(f"arborcast.{form}/{version}" for form in ("schedule", "implicit") for version in (1, 2))
FRONTIER = "arborcast.frontier/1"
ABILITIES = ("reduces", "multicasts", "turns", "loopback", "adder", "trees", "stores")
MOST_TARGETS = 10  # of a block, with cheapest trees: the time triples with each one more
NOT_KNOWN, OF_TREES, ROUNDED = "not known here: ", ", along trees", "at rates rounded down"
MOST_SETS = 300_000  # of ranks, for a cheapest tree to all of them: up to ten seconds
MOST_PARTS = 1 << 20  # pairs of parts of a tree that are looked at: a second or two
# By kind, of flows to a rank and from it: does a message count for all that it depends on, and is it about
# the block of that rank alone.
INWARD = {
    "reduce": (True, False),
    "allreduce": (True, False),
    "allgather": (False, False),
    "reduce-scatter": (True, True),
    "alltoall": (False, True),
    "gather": (False, False),
}
OUTWARD = {
    "broadcast": (True, False),
    "allreduce": (True, False),
    "allgather": (True, True),
    "reduce-scatter": (False, False),
    "scatter": (False, False),
}


class WrongError(Exception):
    """Something that the file says does not hold."""


class UnknownError(Exception):
    """The file asks for more than is known here."""


def require(holds, what):
    if not holds:
        raise WrongError(what)


def number(value):
    require(isinstance(value, (int, str)) and not isinstance(value, bool), f"no exact number: {value!r}")
    return Fraction(value)


class Fabric:
    """Vertices are ranks, then switches; `links` has (tail, head, GB/s, latency in us).

    `able` has what each switch that adds or copies can do; these and ranks are `holders`.
    """

    def __init__(self, document):
        self.ranks = document["ranks"]
        switches = [
            {"name": each} if isinstance(each, str) else each for each in document.get("switches", [])
        ]
        self.place = {rank: rank for rank in range(self.ranks)}
        self.place |= {switch["name"]: self.ranks + index for index, switch in enumerate(switches)}
        self.size = len(self.place)
        require(self.size == self.ranks + len(switches), "switches of one name")
        self.able = {}
        for vertex, switch in enumerate(switches, self.ranks):
            adds, copies, turns, loops, adder, trees, stores = map(switch.get, ABILITIES)
            require(not turns or (adds and copies and not loops), f"no such switch: {switch}")
            require(adder is None or adds, f"an adder of a switch that adds not: {switch}")
            require(adds or copies or not (loops or trees or stores), f"no such switch: {switch}")
            require(trees is None or trees >= 1, f"trees out of range: {switch}")
            if adds or copies:
                self.able[vertex] = switch
        self.holders = {*range(self.ranks), *self.able}
        self.adders = {
            v: number(able["adder"]) for v, able in self.able.items() if able.get("adder") is not None
        }
        require(all(speed > 0 for speed in self.adders.values()), "an adder out of range")
        self.links = [
            (
                self.vertex(e["from"]),
                self.vertex(e["to"]),
                number(e["bandwidth"]),
                number(e.get("latency_us", 0)),
            )
            for e in document["links"]
        ]
        self.number = {(link[0], link[1]): index for index, link in enumerate(self.links)}
        if len(self.number) != len(self.links):
            raise UnknownError("parallel links")
        require(
            all(rate > 0 and wait >= 0 for *_, rate, wait in self.links), "a rate or latency out of range"
        )
        streams = document.get("streams", [None] * self.ranks)
        self.streams = [streams] * self.ranks if isinstance(streams, int) else streams
        require(
            len(self.streams) == self.ranks and all(k is None or k >= 1 for k in self.streams),
            "streams out of range",
        )

    def vertex(self, label):
        require(not isinstance(label, bool) and label in self.place, f"no such vertex: {label!r}")
        return self.place[label]

    def distances(self, costs, starts, backwards=False, through=None):
        """Cheapest ways from the nearest of some vertices, or to it; only some may be passed."""
        onward = [[] for _ in range(self.size)]
        for (tail, head, *_), cost in zip(self.links, costs, strict=True):
            onward[head if backwards else tail].append((tail if backwards else head, cost))
        found, queue = {}, [(0, start) for start in starts]
        while queue:
            far, vertex = heapq.heappop(queue)
            if vertex in found:
                continue
            found[vertex] = far
            if (far == 0 and vertex in starts) or through is None or vertex in through:
                for beyond, cost in onward[vertex]:
                    heapq.heappush(queue, (far + cost, beyond))
        return found


class Task:
    """What a collective asks: the share of each block of the buffer, who begins and who ends with it."""

    def __init__(self, collective, fabric):
        self.kind, self.root, self.ranks = collective["kind"], collective.get("root"), collective["ranks"]
        self.members = frozenset(self.ranks)
        n = len(self.ranks)
        require(n == len(self.members) > 0 and self.members <= set(range(fabric.ranks)), "ranks out of range")
        if self.kind not in KINDS:
            raise UnknownError(f"collective {self.kind!r}")
        rooted = self.kind in ("broadcast", "reduce", "gather", "scatter")
        require(self.root in self.members if rooted else self.root is None, "a root where none is, or none")
        self.sizes, self.demands = collective.get("sizes"), collective.get("demands", [])
        require(not self.sizes or self.kind == "alltoall", "blocks that differ in what is no alltoall")
        require(bool(self.demands) == (self.kind == "custom"), "demands in what is not custom, or none")
        ends = [(set(each["at"]), set(each["to"])) for each in self.demands]
        require(all(at and to and not at & to for at, to in ends), "a demand of nobody, or of who has it")
        named = sum(len(each["at"]) + len(each["to"]) for each in self.demands)
        require(named == sum(len(at) + len(to) for at, to in ends), "a demand that names a rank twice")
        require(
            not ends or set().union(*(at | to for at, to in ends)) == self.members, "ranks without a demand"
        )
        others = [rank for rank in self.ranks if rank != self.root]
        equal = Fraction(1, n)
        self.blocks = {
            "broadcast": {(self.root, None): Fraction(1)},
            "reduce": {(self.root, None): Fraction(1)},
            "allreduce": {(None, None): Fraction(1)},
            "allgather": {(rank, None): equal for rank in self.ranks},
            "reduce-scatter": {(rank, None): equal for rank in self.ranks},
            "gather": {(rank, self.root): equal for rank in others},
            "scatter": {(self.root, rank): equal for rank in others},
            "alltoall": dict.fromkeys(itertools.permutations(self.ranks, 2), equal),
            "custom": {(None, index): Fraction(1, len(self.demands)) for index in range(len(self.demands))},
        }[self.kind]
        if self.sizes:
            rows = dict(
                zip(self.ranks, (dict(zip(self.ranks, row, strict=True)) for row in self.sizes), strict=True)
            )
            require(all(size >= 0 for row in self.sizes for size in row), "a size out of range")
            total = sum(map(sum, self.sizes))
            shares = {pair: Fraction(rows[pair[0]][pair[1]] * n, total) for pair in self.blocks}
            self.blocks = {pair: share for pair, share in shares.items() if share}

    def block(self, chunk):
        if self.kind == "custom":
            require(chunk["owner"] == min(self.demands[chunk["demand"]]["at"]), "a chunk of another owner")
            require(chunk.get("target") is None, "a chunk with a demand and a target")
            return None, chunk["demand"]
        return None if self.kind == "allreduce" else chunk["owner"], chunk.get("target")

    def begins(self, block):
        """Who has something of a block at first, and what."""
        if self.kind == "custom":
            return {rank: {"all"} for rank in self.demands[block[1]]["at"]}
        return {rank: {rank} for rank in self.members} if self.kind in SUMS else {block[0]: {block[0]}}

    def ends(self, block):
        """Who must end with all of it."""
        if self.kind == "custom":
            return self.demands[block[1]]["to"]
        if block[1] is not None:
            return [block[1]]
        return [block[0]] if self.kind in ("reduce", "reduce-scatter") else self.members

    def leaving(self, side):
        """The share of the buffer that must leave some vertices."""
        inside = self.members & side
        n, within, rooted = len(self.members), len(inside), self.root in inside
        outside = n - within
        if self.kind == "custom":
            forced = [set(d["at"]) <= side and not set(d["to"]) <= side for d in self.demands]
            return Fraction(sum(forced), len(forced))
        if self.kind in ("gather", "scatter", "alltoall"):
            crossing = (
                share for (one, other), share in self.blocks.items() if one in side and other not in side
            )
            return sum(crossing, Fraction(0))
        return {
            "broadcast": Fraction(int(rooted and outside > 0)),
            "reduce": Fraction(int(not rooted and within > 0)),
            "allreduce": Fraction(int(within > 0 and outside > 0)),
            "allgather": Fraction(within if outside else 0, n),
            "reduce-scatter": Fraction(outside if within else 0, n),
        }[self.kind]


def with_ports(document, streams):
    """The fabric that limits are about: what a rank of k streams sends, or gets, passes a switch.

    At most its k fastest links are busy at once, so that the link to the switch is as fast as these together.
    """
    links = [dict(link) for link in document["links"]]
    names = list(document.get("switches", []))
    for near, far, word in (("from", "to", "sends"), ("to", "from", "receives")):
        for rank, count in enumerate(streams):
            own = [link for link in links if link[near] == rank]
            if count is None or count >= len(own):
                continue
            port = f"{rank} {word}"
            while any(
                port in (name, dict(name).get("name") if isinstance(name, dict) else None) for name in names
            ):
                port += "-"
            names.append(port)
            fastest = sorted((number(link["bandwidth"]) for link in own), reverse=True)
            for link in own:
                link[near] = port
            links.append({near: rank, far: port, "bandwidth": str(sum(fastest[:count]))})
    return Fabric({"ranks": document["ranks"], "switches": names, "links": links})


def check_schedule(file, fabric, task, symmetry):
    """Replay and count; the rate."""
    blocks = {}
    for chunk in file["chunks"]:
        require(number(chunk["share"]) > 0 and chunk["owner"] in range(fabric.ranks), "a chunk out of range")
        require(
            symmetry.vertices[chunk["owner"]] == chunk["owner"], "an owner that is not the first of its orbit"
        )
        require(task.kind == "custom" or chunk.get("demand") is None, "a chunk of a demand")
        for image in symmetry.images(task.block(chunk)):
            blocks[image] = blocks.get(image, 0) + number(chunk["share"])
    require(blocks == task.blocks, "the chunks are not the blocks of the collective")
    of_chunk = [[] for _ in file["chunks"]]
    for each in file["transfers"]:
        transfer = {**each, "from": fabric.vertex(each["from"]), "to": fabric.vertex(each["to"])}
        require(0 <= transfer["chunk"] < len(of_chunk) and transfer["step"] >= 0, "a transfer out of range")
        require({transfer["from"], transfer["to"]} <= fabric.holders, "a transfer of what only forwards")
        of_chunk[transfer["chunk"]].append(transfer)
    busy, trees = {}, {}
    for index, chunk in enumerate(file["chunks"]):
        of_chunk[index].sort(key=lambda transfer: transfer["step"])
        steps = [list(part) for _, part in itertools.groupby(of_chunk[index], key=lambda each: each["step"])]
        at_work = {}
        for vertex, sums in used_switches(index, steps, fabric.able):
            at_work[vertex] = at_work.get(vertex, 0) + sums
        replay(index, task, task.block(chunk), steps)
        for vertex, sums in at_work.items():
            trees[symmetry.vertices[vertex]] = trees.get(symmetry.vertices[vertex], 0) + 1
            if vertex in fabric.adders:
                time = sums * number(chunk["share"]) / fabric.adders[vertex]
                busy[symmetry.vertices[vertex]] = busy.get(symmetry.vertices[vertex], 0) + time
    alike = {part: Fraction(symmetry.order, symmetry.vertices.count(part)) for part in {*trees, *busy}}
    for vertex, able in fabric.able.items():
        most, part = able.get("trees"), symmetry.vertices[vertex]
        require(
            most is None or trees.get(part, 0) * alike.get(part, 0) <= most, "a switch with too many trees"
        )
    return rate_of(file, fabric, symmetry, [time * alike[part] for part, time in busy.items()])


def replay(index, task, block, steps):
    """Follow who has which contributions to a chunk."""
    held = task.begins(block)
    for together in steps:
        arrived, copied = {}, set()
        for transfer in together:
            tail, head = transfer["from"], transfer["to"]
            sent = held.get(tail)
            require(sent and tail != head, f"chunk {index} is sent by {tail}, which has none of it")
            require(head not in copied, f"chunk {index} comes twice")
            if transfer.get("reduce", False):
                there = arrived.get(head, held.get(head, set()))
                require(not there & sent, f"chunk {index} counts a contribution twice")
                arrived[head] = there | sent
            else:
                require(head not in arrived, f"chunk {index} comes twice")
                arrived[head] = sent
                copied.add(head)
        held.update(arrived)
    needed = set().union(*task.begins(block).values())
    require(
        all(held.get(rank) == needed for rank in task.ends(block)),
        f"chunk {index} does not end where it must",
    )


def used_switches(index, steps, able):
    """Each switch that adds or copies a chunk, once for every sum or copy of it, and whether it is a sum."""
    contents = {vertex: [] for vertex in able}
    for together in steps:
        for transfer in together:
            if transfer["from"] in able and contents[transfer["from"]]:
                contents[transfer["from"]][-1][1].append(transfer["to"])
        for transfer in together:
            if transfer["to"] not in able:
                continue
            held = contents[transfer["to"]]
            if held and transfer.get("reduce", False):
                require(not held[-1][1], f"chunk {index}: a switch adds to what has gone on")
                held[-1][0].append(transfer["from"])
            else:
                held.append(([transfer["from"]], []))
    for vertex, each in contents.items():
        can = able[vertex]
        for inputs, outputs in each:
            adds, copies = len(inputs) > 1, len(outputs) > 1
            require(can.get("reduces") or not adds, f"chunk {index}: a switch adds that cannot")
            require(can.get("multicasts") or not copies, f"chunk {index}: a switch copies that cannot")
            require(can.get("turns") or not (adds and copies), f"chunk {index}: a switch turns that cannot")
            if can.get("loopback"):  # from and to ranks, which come before all switches
                back = (outputs, inputs) if adds else (inputs, outputs) if copies else ([], [])
                missing = [end for end in back[0] if end < min(able) and end not in back[1]]
                require(not missing, f"chunk {index}: nothing loops back to rank {missing}")
            if adds or copies:
                yield vertex, int(adds)


def rate_of(file, fabric, symmetry, adding):
    loads, steps, held = [Fraction(0)] * len(fabric.links), {}, {}
    for transfer in file["transfers"]:
        way = [fabric.vertex(label) for label in (transfer["from"], *transfer.get("via", []), transfer["to"])]
        require(all(vertex >= fabric.ranks for vertex in way[1:-1]), "a way through a rank")
        for hop in itertools.pairwise(way):
            require(hop in fabric.number, f"there is no link {hop}")
            link = fabric.number[hop]
            loads[symmetry.links[link]] += number(file["chunks"][transfer["chunk"]]["share"])
            steps[transfer["step"], link] = steps.get((transfer["step"], link), 0) + 1
        slowest = min(fabric.links[fabric.number[hop]][2] for hop in itertools.pairwise(way))
        for end in ((way[0], "sends"), (way[-1], "receives")):
            if end[0] < fabric.ranks and fabric.streams[end[0]] is not None:
                busy = number(file["chunks"][transfer["chunk"]]["share"]) / slowest / fabric.streams[end[0]]
                of_end = held.setdefault(end, {})
                of_end[transfer["step"]] = of_end.get(transfer["step"], 0) + busy
    rounds = file.get("rounds")
    rates = [rate for *_, rate, _ in fabric.links]
    if rounds is None:
        sizes = {part: symmetry.links.count(part) for part in set(symmetry.links)}
        spread = (load * symmetry.order / sizes.get(part, 1) for part, load in enumerate(loads))
        slowest = max(load / rate for load, rate in zip(spread, rates, strict=True))
        slowest = max([slowest, *adding, *(sum(times.values()) for times in held.values())])
        require(slowest > 0, "nothing moves")
        rate = 1 / slowest
        require(rate == number(file["rate"]), f"a rate of {rate} GB/s, the file says {file['rate']}")
        return rate
    unit = unit_of(file, rates)
    shares = {number(chunk["share"]) for chunk in file["chunks"]}
    require(len(shares) == 1 and unit > 0 and sum(rounds) > 0, "rounds of chunks that differ")
    require(
        len(rounds) == 1 + max(transfer["step"] for transfer in file["transfers"]), "rounds of other steps"
    )
    for (step, link), count in steps.items():
        require(count <= rounds[step] * int(rates[link] / unit), f"step {step} needs more rounds")
    share = shares.pop()
    for end, times in held.items():
        for step, busy in times.items():
            require(busy * unit <= rounds[step] * share, f"rank {end[0]} {end[1]} too much in step {step}")
    rate = unit / (sum(rounds) * share)
    require(rate == number(file["rate"]), f"a rate of {rate} GB/s, the file says {file['rate']}")
    return rate


def unit_of(file, rates):
    """The GB/s of a link that takes one chunk a round: as the file says, or what divides all rates."""
    if "unit" in file:
        return number(file["unit"])
    scale = math.lcm(*(rate.denominator for rate in rates))
    return Fraction(math.gcd(*(int(rate * scale) for rate in rates)), scale)


class Proof(NamedTuple):
    """Link lengths: what a byte travels, what links and adders offer, adders alone; who sends, who gets."""

    lengths: list
    distance: Fraction
    offered: Fraction
    adding: Fraction
    sources: set
    targets: set


def lengths_of(certificate, fabric, task):
    """Link lengths of any certificate, and what they prove."""
    ranks, root = task.members, task.root
    sources = {"broadcast": {root}, "scatter": {root}, "reduce": ranks - {root}, "gather": ranks - {root}}
    targets = {"reduce": {root}, "gather": {root}, "broadcast": ranks - {root}, "scatter": ranks - {root}}
    sources, targets = sources.get(task.kind, ranks), targets.get(task.kind, ranks)
    capacity, adding = number(certificate["capacity"]), Fraction(0)
    if certificate["kind"] == "cut":
        side = {fabric.vertex(label) for label in certificate["side"]}
        lengths = [int(tail in side and head not in side) for tail, head, *_ in fabric.links]
        distance = task.leaving(side)
        sources, targets = set(sources) & side, set(targets) - side
    elif certificate["kind"] == "partition":
        require(task.kind == "allreduce", "a partition limits an allreduce")
        blocks = [{fabric.vertex(label) for label in block} for block in certificate["blocks"]]
        every = [vertex for block in blocks for vertex in block]
        require(sorted(every) == list(range(fabric.size)), "blocks that are no partition")
        require(len(blocks) > 1 and all(block & ranks for block in blocks), "blocks without ranks")
        block_of = {vertex: index for index, block in enumerate(blocks) for vertex in block}
        lengths = [int(block_of[tail] != block_of[head]) for tail, head, *_ in fabric.links]
        capacity, distance = 2 * capacity, Fraction(2 * (len(blocks) - 1))
    else:
        require(certificate["kind"] == "dual", "an unknown certificate")
        named = {
            (fabric.vertex(e["from"]), fabric.vertex(e["to"])): number(e["length"])
            for e in certificate["lengths"]
        }
        require(named.keys() == fabric.number.keys(), "lengths of other links")
        require(len(named) == len(certificate["lengths"]), "a link with two lengths")
        lengths = [named[tail, head] for tail, head, *_ in fabric.links]
        named = {fabric.vertex(e["switch"]): number(e["price"]) for e in certificate.get("adders", [])}
        require(len(named) == len(certificate.get("adders", [])), "an adder with two prices")
        require(named.keys() <= fabric.adders.keys(), "a price of no adder")
        require(min([*lengths, *named.values()]) >= 0, "a negative length or price")
        distance = travelled(fabric, lengths, named, task)
        require(distance == number(certificate["distance"]), f"lengths prove a distance of {distance}")
        adding = sum((price * fabric.adders[switch] for switch, price in named.items()), Fraction(0))
    offered = adding + sum(length * link[2] for length, link in zip(lengths, fabric.links, strict=True))
    require(offered == capacity, f"links offer {offered}, the certificate says {capacity}")
    require(distance > 0, "the certificate proves nothing")
    return Proof(lengths, distance, offered, adding, sources, targets)


def travelled(fabric, lengths, prices, task):
    """How far each byte must travel, where an allreduce follows trees; no link, no way."""
    if task.kind not in (*WHOLE, "allgather", "reduce-scatter"):
        return straight(fabric, lengths, task)
    roots = [task.root] if task.root is not None else task.ranks
    if len(task.members) < len(fabric.holders):
        gather, spread = (
            None if unused else Junctions(fabric, lengths, prices, task, backwards)
            for backwards, unused in (
                (True, task.kind in ("broadcast", "allgather")),
                (False, task.kind in SUMS[:2]),
            )
        )
        if task.kind == "allreduce":
            return reachable(cheapest_pair(gather, spread))
        return reachable(sum(Fraction((gather or spread).from_rank(root)) for root in roots) / len(roots))
    inner = range(fabric.ranks, fabric.size)
    found = [fabric.distances(lengths, [rank], through=inner) for rank in range(fabric.ranks)]
    ways = [[row.get(other, math.inf) for other in range(fabric.ranks)] for row in found]
    back = [list(column) for column in zip(*ways, strict=True)]
    if ways == back:  # the same tree, whatever the root
        return (1 + (task.kind == "allreduce")) * cheapest_tree(ways, 0)
    if task.kind == "allreduce":
        return min(cheapest_tree(ways, rank) + cheapest_tree(back, rank) for rank in roots)
    of_kind = back if task.kind in SUMS else ways
    return sum(cheapest_tree(of_kind, rank) for rank in roots) / len(roots)


def straight(fabric, lengths, task):
    """The same of blocks that need no tree; of a custom one, to the farthest of those that get it."""
    total, found = Fraction(0), {}
    for block, share in task.blocks.items():
        starts, ends = tuple(task.begins(block)), task.ends(block)
        if starts not in found:
            found[starts] = fabric.distances(lengths, starts)
        require(set(ends) <= found[starts].keys(), "ranks that cannot reach each other")
        total += share * max(found[starts][end] for end in ends)
    return total


def reachable(distance):
    require(distance < math.inf, "ranks that cannot reach each other")
    return Fraction(distance)


def either_way(fabric, lengths, task):
    """What an allreduce costs at least if it need not follow trees.

    Join all holders with ways shorter than t: of k groups with ranks that take part, each learns from all
    others only if 2 (k - 1) messages pass between groups. Summed over all t these are two spanning trees, of
    which what joins no two such groups is free.
    """
    inner = set(range(fabric.size)) - fabric.holders
    found = {one: fabric.distances(lengths, [one], through=inner) for one in fabric.holders}
    ways = [
        (min(found[a].get(b, math.inf), found[b].get(a, math.inf)), a, b)
        for a, b in itertools.combinations(sorted(fabric.holders), 2)
    ]
    group = {holder: {holder} for holder in fabric.holders}
    total = 0
    for cost, one, other in sorted(ways):
        if group[one] is not group[other] and cost < math.inf:
            if group[one] & task.members and group[other] & task.members:
                total += cost
            joined = group[one] | group[other]
            group.update(dict.fromkeys(joined, joined))
    return 2 * total


class Junctions:
    """Cheapest trees that also join or fork at ranks that only relay and at switches (Dreyfus, Wagner 1971).

    Those that gather spread `backwards`, over the links turned round.
    Points are groups of vertices with ways of no length between them that have a rank, and other switches
    that add or copy. Ranks that take part and may be exchanged are of one class, of which numbers count.
    """

    def __init__(self, fabric, lengths, prices, task, backwards):
        self.fabric, self.prices = fabric, prices if backwards else {}
        switches = set(range(fabric.ranks, fabric.size))
        self.ways = [fabric.distances(lengths, [one], backwards) for one in range(fabric.size)]
        self.near = {one: fabric.distances(lengths, [one], backwards, switches) for one in fabric.holders}
        self.head = [
            next(w for w in range(v + 1) if self.ways[v].get(w) == 0 == self.ways[w].get(v))
            for v in range(fabric.size)
        ]
        ends = sorted({self.head[rank] for rank in task.members})
        self.relays = sorted({self.head[rank] for rank in range(fabric.ranks)} - set(ends))
        word = "reduces" if backwards else "multicasts"
        self.forks = [v for v, able in fabric.able.items() if able.get(word) and self.head[v] >= fabric.ranks]
        self.one, self.many = {}, {}  # by numbers and point: the cheapest with one branch, with more
        if not self.forks and not self.relays:
            self.matrix = [[self.ways[p].get(q, math.inf) for q in ends] for p in ends]
            self.kind = {end: index for index, end in enumerate(ends)}
            return
        points = [*ends, *self.relays, *self.forks]
        step = {(p, q): self.entering(p, q) for p in points for q in points if p != q}
        self.classes = classes_of(ends, step)
        self.kind = {end: index for index, known in enumerate(self.classes) for end in known}
        self.all = tuple(len(known) for known in self.classes)
        points = [*(known[0] for known in self.classes), *self.relays, *self.forks]
        if math.prod((size + 1) * (size + 2) // 2 for size in self.all) * len(points) > MOST_PARTS:
            raise UnknownError(f"link lengths by which {len(ends)} ranks are apart beside others that join")
        self.onward = {point: [] for point in points}
        for point, other in itertools.product(points, points):
            last = self.classes[self.kind[other]][-1] if other in self.kind else other
            if last != point:  # of a class of one, there is no other
                self.onward[point].append((other, step[point, last if other == point else other]))
        for wanted in itertools.product(*(range(size + 1) for size in self.all)):
            if any(wanted):
                self.fill(wanted, points)

    def entering(self, point, other):
        """The way to where a tree may go on in several directions."""
        fabric = self.fabric
        if other not in self.forks or not fabric.able[other].get("loopback"):
            return self.ways[point].get(other, math.inf)
        others = [switch for switch in fabric.able if switch != other]
        costs = [self.near[point].get(other, math.inf)] if point in self.forks else []
        for rank in range(fabric.ranks):
            loop = self.near[rank].get(other, math.inf) + self.near[other].get(rank, math.inf)
            by_others = (self.near[rank].get(v, math.inf) + self.near[v].get(other, math.inf) for v in others)
            costs.append(self.ways[point].get(rank, math.inf) + min([loop, *by_others]))
        return min(costs)

    def least(self, wanted, point):
        at = (wanted, point)
        return min(self.one.get(at, math.inf), self.many.get(at, math.inf)) if any(wanted) else 0

    def fill(self, wanted, points):
        halves = [part for part in itertools.product(*(range(count + 1) for count in wanted)) if any(part)]
        halves = [(part, tuple(a - b for a, b in zip(wanted, part, strict=True))) for part in halves]
        halves = [(part, rest) for part, rest in halves if any(rest) and part <= rest]
        for point in points:
            splits = (self.least(part, point) + self.least(rest, point) for part, rest in halves)
            self.many[wanted, point] = min(splits, default=math.inf)
        for point in points:
            best = math.inf
            for other, cost in self.onward[point]:
                if other in self.kind:
                    place = self.kind[other]
                    if wanted[place]:
                        rest = (*wanted[:place], wanted[place] - 1, *wanted[place + 1 :])
                        best = min(best, cost + self.least(rest, other))
                else:
                    best = min(best, cost + self.many[wanted, other] + self.prices.get(other, 0))
            self.one[wanted, point] = best

    def from_rank(self, rank):
        """What the cheapest tree from a rank to all that take part costs."""
        end = self.head[rank]
        if end not in self.kind:
            return self.least(self.all, end) if self.one else math.inf
        place = self.kind[end]
        if not self.one:
            return cheapest_tree(self.matrix, place)
        rest = (*self.all[:place], self.all[place] - 1, *self.all[place + 1 :])
        return self.least(rest, self.classes[place][0])

    def from_switch(self, switch):
        """The same from a switch at which it forks."""
        return self.many.get((self.all, switch), math.inf) + self.prices.get(switch, 0)


def classes_of(ends, step):
    """Those that may be exchanged without any step from one point to another costing something else."""
    classes = []
    for end in ends:
        for known in classes:
            swap = {known[0]: end, end: known[0]}
            if all(cost == step[swap.get(p, p), swap.get(q, q)] for (p, q), cost in step.items()):
                known.append(end)
                break
        else:
            classes.append([end])
    return classes


def cheapest_pair(gather, spread):
    """A tree to somewhere and one from there: a rank, a switch that may turn, or two switches and a way."""
    points = {gather.head[rank] for rank in range(gather.fabric.ranks)}
    costs = [gather.from_rank(rank) + spread.from_rank(rank) for rank in sorted(points)]
    for one, other in itertools.product(gather.forks, spread.forks):
        if one != other or gather.fabric.able[one].get("turns"):
            between = spread.near[one].get(other, math.inf) if one != other else 0
            costs.append(gather.from_switch(one) + between + spread.from_switch(other))
    return min(costs)


def cheapest_tree(ways, root):
    """The cost of the cheapest arborescence (Edmonds 1967), joining the vertices of a cycle into one."""
    total = Fraction(0)
    edges = [
        (u, v, cost) for u, row in enumerate(ways) for v, cost in enumerate(row) if u != v and cost < math.inf
    ]
    size = len(ways)
    while True:
        cheapest = {}
        for u, v, cost in edges:
            if v != root and (v not in cheapest or cost < cheapest[v][1]):
                cheapest[v] = (u, cost)
        require(len(cheapest) == size - 1, "ranks that cannot reach each other")
        total += sum(cost for _, cost in cheapest.values())
        mark, group, cycles = {}, {}, 0
        for start in range(size):
            vertex = start
            while vertex != root and vertex not in mark:
                mark[vertex] = start
                vertex = cheapest[vertex][0]
            if vertex != root and mark[vertex] == start and vertex not in group:
                while vertex not in group:
                    group[vertex] = cycles
                    vertex = cheapest[vertex][0]
                cycles += 1
        if not cycles:
            return total
        count = cycles
        for vertex in range(size):
            if vertex not in group:
                group[vertex] = count
                count += 1
        edges = [
            (group[u], group[v], cost - (cheapest[v][1] if v != root else 0))
            for u, v, cost in edges
            if group[u] != group[v]
        ]
        root, size = group[root], count


def check_tolls(tolls, fabric, task, proof):
    """The bytes that nothing can deliver in the time."""
    step, intervals, weight = number(tolls["step_us"]), tolls["intervals"], number(tolls["weight"])
    require(tolls["kind"] == "tolls" and step > 0 and intervals > 0 and weight >= 0, "tolls out of range")
    wait = [latency // step for *_, latency in fabric.links]
    kind, root = task.kind, task.root
    require(not task.sizes, "tolls for blocks that differ")
    vertices, links = symmetric(tolls["symmetries"], fabric, task)
    part = Fraction(1) if kind in WHOLE else Fraction(1, len(task.members))
    paid, charged, own, known = Fraction(0), {}, {}, {}
    for flow in tolls["flows"]:
        outward, terminal, others = flow["direction"] == "out", flow["terminal"], flow["others"]
        rules = OUTWARD if outward else INWARD
        require(flow["direction"] in ("in", "out") and kind in rules, "a flow that says nothing of the kind")
        everyone = task.members
        require(terminal in everyone and (root is None or terminal == root), "a flow of another rank")
        require(
            len(set(others)) == len(others) and set(others) <= everyone - {terminal}, "a flow of no ranks"
        )
        counts, is_own = rules[kind]
        toll = {}
        for entry in flow["links"]:
            hop = (fabric.vertex(entry["from"]), fabric.vertex(entry["to"]))
            require(hop in fabric.number, "a toll on no link")
            require(len(entry["intervals"]) == len(entry["tolls"]), "intervals without tolls")
            for interval, price in zip(entry["intervals"], entry["tolls"], strict=True):
                place = (fabric.number[hop], interval)
                require(0 <= interval < intervals and price > 0 and place not in toll, "a toll out of range")
                toll[place] = price
        paid += part * cheapest_ways(fabric, wait, intervals, toll, terminal, others, outward)
        for (link, interval), price in toll.items():
            head = fabric.links[link][int(outward)]
            left = intervals - 1 - wait[link] - interval if outward else interval
            units = dependence(fabric, wait, head, left, others, outward, known)
            charge = price * (units if counts else min(units, 1))
            at = (terminal, link, interval) if is_own else (link, interval)
            where = own if is_own else charged
            where[at] = where.get(at, 0) + charge
    if weight:
        lengths, distance, _, _, sources, targets = proof
        before, after = fabric.distances(wait, sources), fabric.distances(wait, targets, backwards=True)
        paid += weight * distance
        for link, (tail, head, *_) in enumerate(fabric.links):
            if lengths[link] and tail in before and head in after:
                for interval in range(before[tail], intervals - wait[link] - after[head]):
                    charged[link, interval] = charged.get((link, interval), 0) + weight * lengths[link]
    offered = sum((charge * fabric.links[link][2] for (link, _), charge in charged.items()), Fraction(0))
    offered += to_the_dearest(own, fabric, vertices, links)
    offered += weight * proof.adding * intervals  # of adders, which may work all the time
    require(paid > 0, "tolls that nobody pays")
    found = offered * step * 1000 / paid
    require(found == number(tolls["bytes"]), f"tolls prove {found} bytes, the file says {tolls['bytes']}")
    return found, step * intervals


def to_the_dearest(own, fabric, vertices, links):
    """What links carry of blocks that pay for themselves, one of each orbit standing for all."""
    of_block, of_orbit, dearest = {}, {}, {}
    for (block, link, interval), charge in own.items():
        place = (block, links[link], interval)
        of_block[place] = max(charge, of_block.get(place, 0))
    for (block, link, interval), charge in of_block.items():
        place = (vertices[block], link, interval)
        of_orbit[place] = of_orbit.get(place, 0) + Fraction(charge, vertices.count(vertices[block]))
    for (_, link, interval), charge in of_orbit.items():
        dearest[link, interval] = max(charge, dearest.get((link, interval), 0))
    return sum(charge * fabric.links[link][2] * links.count(link) for (link, _), charge in dearest.items())


def symmetric(symmetries, fabric, task):
    """The orbit of each vertex and of each link, once all symmetries are seen to be some."""
    vertices, links = list(range(fabric.size)), list(range(len(fabric.links)))
    for labels in symmetries:
        image = [fabric.vertex(label) for label in labels]
        require(
            not task or task.root is None or image[task.root] == task.root, "a symmetry that moves the root"
        )
        check_image(image, fabric, task)
        moved = []
        for tail, head, rate, wait in fabric.links:
            other = fabric.number.get((image[tail], image[head]))
            require(
                other is not None and fabric.links[other][2:] == (rate, wait), "a symmetry that moves links"
            )
            moved.append(other)
        for parts, to in ((vertices, image), (links, moved)):
            for each, other in enumerate(to):
                one, two = parts[each], parts[other]
                if one != two:
                    parts[:] = [min(one, two) if part in (one, two) else part for part in parts]
    return vertices, links


def check_image(image, fabric, task):
    """Vertices to vertices of their kind, those that take part to others that do."""
    require(sorted(image) == list(range(fabric.size)), "a symmetry that is no permutation")
    what = [
        (
            vertex < fabric.ranks and (fabric.streams[vertex], not task or vertex in task.members),
            {**fabric.able.get(vertex, {}), "name": None},
        )
        for vertex in range(fabric.size)
    ]
    same = all(what[one] == what[other] for one, other in enumerate(image))
    require(same, "a symmetry that moves a vertex to one of another kind")


class Symmetry:
    """What a file in implicit form says of its translations: how many there are, and what they take where.

    They commute, so that all products of their powers are a group, and the images of anything are spread
    evenly over its orbit. Without translations each vertex and link is an orbit.
    """

    def __init__(self, fabric, task, links, translations=()):
        self.steps, self.order = [], 1
        for each in translations:
            image, order = runs(each["images"]), each["order"]
            check_image(image, fabric, task)
            power, count = image, 1
            while power != list(range(fabric.size)) and count < fabric.size * fabric.size:
                power, count = [image[vertex] for vertex in power], count + 1
            require(count == order > 1, f"a translation of order {count}, the file says {order}")
            require(
                all(
                    image[other[v]] == other[image[v]] for other, _ in self.steps for v in range(fabric.size)
                ),
                "translations that do not commute",
            )
            self.steps.append((image, order))
            self.order *= order
        self.links, self.vertices = links, list(range(fabric.size))
        for vertex in range(fabric.size):
            if self.vertices[vertex] == vertex:
                for (image,) in set(self.images((vertex,))):
                    self.vertices[image] = vertex
        for index, (tail, head, rate, wait) in enumerate(fabric.links):
            for image, _ in self.steps:
                other = fabric.number.get((image[tail], image[head]))
                require(other is not None and links[other] == links[index], "a translation that moves links")
                require(fabric.links[other][2:] == (rate, wait), "a translation to links of another rate")

    def images(self, vertices):
        """Of some vertices, one after another under each translation; None stays."""
        return images_of(vertices, self.steps)


def images_of(vertices, steps):
    found = [vertices]
    for image, order in steps:
        for turn in range(len(found) * (order - 1)):
            found.append(tuple(vertex if vertex is None else image[vertex] for vertex in found[turn]))
    return found


def runs(entries):
    """Numbers of which some are written as "first..last"."""
    found = []
    for entry in entries:
        first, last = map(int, entry.split("..")) if isinstance(entry, str) else (entry, entry)
        require(entry in (first, f"{first}..{last}") and first <= last, f"no run: {entry}")
        found.extend(range(first, last + 1))
    return found


def expanded(file):
    """A file in implicit form with all links and lengths, and the orbit of each link."""
    size = file["topology"]["ranks"] + len(file["topology"].get("switches", []))
    fabric = Fabric({**file["topology"], "streams": [None] * file["topology"]["ranks"]})
    require("streams" not in file["topology"], "streams in implicit form")
    label = {vertex: name for name, vertex in fabric.place.items()}
    steps = [(runs(each["images"]), each["order"]) for each in file["translations"]]
    require(
        all(sorted(image) == list(range(size)) for image, _ in steps), "a translation that is no permutation"
    )
    require(math.prod(order for _, order in steps) <= fabric.ranks, "more translations than ranks")
    links, orbit_of = [], {}
    for link, entry in zip(fabric.links, file["topology"]["links"], strict=True):
        images = set(images_of(link[:2], steps))
        require(not images & orbit_of.keys(), "two links of one orbit")
        for tail, head in sorted(images):
            orbit_of[tail, head] = len(links) if (tail, head) == min(images) else orbit_of[min(images)]
            links.append({**entry, "from": label[tail], "to": label[head]})
    certificate = file["bound"]["certificate"]
    if certificate["kind"] == "dual" and len(certificate["lengths"]) < len(links):
        ends = [(fabric.vertex(e["from"]), fabric.vertex(e["to"])) for e in certificate["lengths"]]
        length_of = {orbit_of[end]: e["length"] for end, e in zip(ends, certificate["lengths"], strict=True)}
        require(len(length_of) == len(certificate["lengths"]), "two lengths of one orbit")
        lengths = [
            {"from": label[tail], "to": label[head], "length": length_of[orbit]}
            for (tail, head), orbit in orbit_of.items()
        ]
        certificate = {**certificate, "lengths": lengths}
    whole = {
        **file,
        "topology": {
            **file["topology"],
            "links": links,
            "symmetries": [[label[v] for v in runs(each)] for each in file["topology"].get("symmetries", [])],
        },
        "collective": {**file["collective"], "ranks": runs(file["collective"]["ranks"])},
        "bound": {**file["bound"], "certificate": certificate},
        "rounds": None,
    }
    return whole, list(orbit_of.values())


def cheapest_ways(fabric, wait, intervals, toll, terminal, others, outward):
    """The sum of the cheapest ways between the terminal and others, from the first interval to the last."""
    leaving = [[] for _ in range(fabric.size)]
    for link, (tail, head, *_) in enumerate(fabric.links):
        leaving[tail if outward else head].append((link, head if outward else tail))
    step = 1 if outward else -1
    found, queue = {}, [(0, 0 if outward else intervals - 1, terminal)]
    while queue:
        cost, interval, vertex = heapq.heappop(queue)
        if (vertex, interval) in found or not 0 <= interval < intervals:
            continue
        found[vertex, interval] = cost
        heapq.heappush(queue, (cost, interval + step, vertex))
        for link, beyond in leaving[vertex]:
            entered = interval if outward else interval - wait[link]
            if entered >= 0:
                heapq.heappush(
                    queue, (cost + toll.get((link, entered), 0), interval + step * wait[link], beyond)
                )
    last = intervals - 1 if outward else 0
    require(all((other, last) in found for other in others), "too few intervals for any way")
    return sum(found[other, last] for other in others)


def dependence(fabric, wait, vertex, left, others, outward, known):
    """How many of the others what leaves a vertex after so many intervals can depend on.

    Outward: how many what enters it can still reach in as many. A switch passes on what one rank sent.
    """

    def near(start, through):
        if (start, through, outward) not in known:
            known[start, through, outward] = fabric.distances(
                wait, [start], not outward, set(range(fabric.size)) - fabric.holders if through else None
            )
        return known[start, through, outward]

    makers = {vertex: 0} if vertex in fabric.holders else near(vertex, True)
    return max(
        (
            sum(ago + near(maker, False).get(other, left + 1) <= left for other in others)
            for maker, ago in makers.items()
            if maker in fabric.holders
        ),
        default=0,
    )


def check(file):
    """All that a file claims, as lines."""
    if file.get("format") not in FORMATS:
        raise UnknownError(f"format {file.get('format')!r}")
    if "implicit" in file["format"]:
        file, orbits = expanded(file)
    else:
        orbits = list(range(len(file["topology"]["links"])))
    fabric = Fabric(file["topology"])
    task = Task(file["collective"], fabric)
    symmetry = Symmetry(fabric, task, orbits, file.get("translations", []))
    require(
        not symmetry.steps or (task.root is None and task.kind != "custom"), "translations of what has a root"
    )
    ends = {end for transfer in file["transfers"] for end in (transfer["from"], transfer["to"])}
    require(file["format"][-1] == "2" or ends <= set(range(fabric.ranks)), "switches take part, by format 1")
    rate = check_schedule(file, fabric, task, symmetry)
    symmetric(file["topology"].get("symmetries", []), fabric, None)
    bound = file["bound"]
    fabric = with_ports(file["topology"], fabric.streams)  # limits are about that one
    proof = lengths_of(bound["certificate"], fabric, task)
    limit = proof.offered / proof.distance
    require(limit == number(bound["rate"]), f"the certificate proves {limit} GB/s, not {bound['rate']}")
    every = bound.get("scope", "every schedule") == "every schedule"
    if task.kind == "allreduce" and bound["certificate"]["kind"] == "dual" and every:
        either = either_way(fabric, proof.lengths, task)
        require(either >= proof.distance, "lengths that only limit schedules along trees")
    require(not every or rate <= limit, "a schedule faster than its limit")
    lines = [f"{rate} GB/s, correct", f"no schedule exceeds {limit} GB/s: {bound['certificate']['kind']}"]
    for tolls in bound.get("times", []):
        require(every or not number(tolls["weight"]), "tolls that stand on a limit of trees alone")
        most, time_us = check_tolls(tolls, fabric, task, proof)
        lines.append(f"more than {float(most):.0f} bytes take more than {float(time_us):.4g} us: tolls")
    return lines


def check_frontier(frontier, read):
    """What a frontier claims of its points and limits, as lines; `read` gives a point's file by its name."""
    lines, fabric, task, unit, asked = [], None, None, None, None
    for point in frontier["frontier"]:
        file = read(point["file"])
        asked = asked or file
        same = all(file[key] == asked[key] for key in ("topology", "collective"))
        require(same, f"{point['file']}: of another fabric or collective than the first")
        shape = chunks, steps, rounds = point["chunks"], point["steps"], point["rounds"]
        lines.append(f"{shape}: {check(file)[0]}")
        stated = Fabric(file["topology"])
        rates = [rate for *_, rate, _ in stated.links]
        unit = unit_of(file, rates)
        rounded = [
            {**link, "bandwidth": str(rate // unit * unit)}
            for link, rate in zip(file["topology"]["links"], rates, strict=True)
            if rate >= unit
        ]
        fabric = with_ports({**file["topology"], "links": rounded}, stated.streams)
        task = Task(file["collective"], fabric)
        exact = all(rate % unit == 0 for rate in rates)
        require(exact or ROUNDED in point["scope"], f"{shape}: a limit at rates rounded down")
        found = Fraction(len(file["chunks"]), len(task.blocks)), len(file["rounds"]), sum(file["rounds"])
        require(found == shape, f"{shape}: the schedule has {found}")
        require(number(point["ratio"]) == Fraction(rounds, chunks), f"{shape}: another ratio")
        require((task.kind, task.root) == (frontier["collective"], frontier["root"]), f"{shape}: for others")
        least = Fraction(0)
        for limit in point["certificates"]:
            require(limit["steps"] >= steps, f"{shape}: a limit of fewer steps")
            least = max(least, number(limit["ratio"]))
            said = limit_of(limit, fabric, task, unit)
            every = point["scope"].startswith("every schedule")
            require(not every or OF_TREES not in said, f"{shape}: {said}")
            lines.append(f"{shape}: {said}")
        require(least == number(point["least"]) <= Fraction(rounds, chunks), f"{shape}: its limit is {least}")
        if point["proved"] and point["proved_by"] != ["exact limit"]:
            lines.append(f"{shape}: {NOT_KNOWN}what was proved by {', '.join(point['proved_by'])}")
        elif point["proved"]:
            require(least == Fraction(rounds, chunks), f"{shape}: a limit of {least} proves it not")
            at_limit = [fewer * least for fewer in range(1, chunks)]
            whole = [each for each in at_limit if each.denominator == 1 and each >= steps]
            require(not whole, f"{shape}: {whole[:1]} rounds would do")
    if frontier["limits"] and not fabric:
        lines.append(f"{NOT_KNOWN}limits without a schedule, whose fabric they would be of")
    for entry in frontier["limits"] if fabric else []:
        limit = entry["certificate"]
        same = limit["steps"] >= entry["steps"] and limit["ratio"] == entry["least"]
        require(same, f"{entry['steps']} steps: another limit")
        lines.append(limit_of(limit, fabric, task, unit))
    return list(dict.fromkeys(lines))


def limit_of(limit, fabric, task, unit):
    """What the certificate of a number of steps proves, in words."""
    certificate, steps, ratio = limit["certificate"], limit["steps"], number(limit["ratio"])
    kind = certificate["kind"]
    said = f"no schedule in {steps} steps has less than {ratio} rounds per chunk: {kind}"
    if kind == "static":
        proof = lengths_of(certificate["bound"]["certificate"], fabric, task)
        found = unit * proof.distance / proof.offered / min(task.blocks.values())
        is_dual = task.kind == "allreduce" and certificate["bound"]["certificate"]["kind"] == "dual"
        if is_dual and either_way(fabric, proof.lengths, task) < proof.distance:
            said += OF_TREES
    elif kind == "messages":
        return f"{NOT_KNOWN}{said}"
    else:
        units = [int(rate / unit) for *_, rate, _ in fabric.links]
        try:
            found = {"trees": of_trees, "flows": of_flows}[kind](certificate, steps, fabric, task, units)
        except UnknownError:
            return f"{NOT_KNOWN}{said}"
    require(found == ratio, f"the {kind} of {steps} steps prove {found}, the file says {ratio}")
    return said


def lengths_in_steps(table, steps, fabric):
    """By step and link."""
    require(len(table) == steps, f"lengths of {len(table)} steps, not {steps}")
    rows = []
    for row in table:
        named = {(fabric.vertex(tail), fabric.vertex(head)): number(length) for tail, head, length in row}
        require(len(named) == len(row) and named.keys() <= fabric.number.keys(), "lengths of other links")
        require(min(named.values(), default=0) >= 0, "a negative length")
        rows.append([named.get(link[:2], Fraction(0)) for link in fabric.links])
    return rows


def within_rounds(rows, units):
    for step, row in enumerate(rows):
        used = sum(length * each for length, each in zip(row, units, strict=True))
        require(used <= 1, f"step {step}: a round costs {used}, more than 1")


def sends_in(rows, fabric, backwards):
    """By step and rank, what a message to each other rank costs; backwards in time, and along links."""
    inner = set(range(fabric.ranks, fabric.size))
    return [
        [fabric.distances(row, [rank], backwards, inner) for rank in range(fabric.ranks)]
        for row in (rows[::-1] if backwards else rows)
    ]


def copied(task):
    """From whom each block goes to whom; what is added up goes backwards."""
    pairs = [(set(task.begins(block)), set(task.ends(block))) for block in task.blocks]
    pairs = [(ends, begins) for begins, ends in pairs] if task.kind in SUMS else pairs
    return [(begins, sorted(ends - begins)) for begins, ends in pairs]


def cheapest_way(sends, starts, ends):
    """Step by step, each of which waits or sends."""
    reached = dict.fromkeys(starts, Fraction(0))
    for of_step in sends:
        after = dict(reached)
        for rank, cost in reached.items():
            for other, more in of_step[rank].items():
                if other < len(of_step):
                    after[other] = min(after.get(other, cost + more), cost + more)
        reached = after
    require(reached.keys() & ends, f"ranks {ends} are not reached in {len(sends)} steps")
    return min(reached[end] for end in ends if end in reached)


def cheapest_to_all(sends, begins, ends):
    """The cheapest tree from one rank to all others: which set of them has the block by which step.

    What a set has cost, and the least that each other rank costs in any step to come, is no more than any
    tree that goes on from there: the set of which that is least is next (A*, Hart, Nilsson, Raphael 1968).
    Who can join for no more than it costs in any step to come joins at once. Of all others that might join,
    the cheapest first, the next choice takes one more, or another in place of the last.
    """
    ranks = range(len(sends[0]))
    if len(begins) > 1 or len(ends) + 1 < len(ranks):
        raise UnknownError("cheapest trees of many targets beside ranks that relay")
    price = [[[row.get(rank, math.inf) for row in of_step] for rank in ranks] for of_step in sends]
    later = [[math.inf] * len(ranks)]
    for of_step in reversed(price):
        others = [row[:rank] + row[rank + 1 :] for rank, row in enumerate(of_step)]
        later.append([min([after, *row]) for after, row in zip(later[-1], others, strict=True)])
    later.reverse()
    queue, seen = [(sum(later[0][end] for end in ends), 0, sum(1 << rank for rank in begins), (), -1)], set()
    for _ in range(MOST_SETS):
        cost, before, held, choices, last = heapq.heappop(queue)
        if last + 1 < len(choices):
            more, rank = choices[last + 1]
            less, other = choices[last] if last >= 0 else (0, 0)
            heapq.heappush(queue, (cost + more, before, held | 1 << rank, choices, last + 1))
            if last >= 0:
                instead = held ^ 1 << other | 1 << rank
                heapq.heappush(queue, (cost + more - less, before, instead, choices, last + 1))
        if held + 1 == 1 << len(ranks):
            return reachable(cost)
        if (before, held) in seen:
            continue
        seen.add((before, held))
        holders, after, joined, choices = [rank for rank in ranks if held >> rank & 1], cost, held, []
        for rank in ranks:
            if held >> rank & 1:
                continue
            now = min(price[-before][rank][holder] for holder in holders)
            after += min(now, later[1 - before][rank]) - later[-before][rank]
            if now <= later[1 - before][rank]:
                joined |= 1 << rank
            elif now < math.inf:
                choices.append((now - later[1 - before][rank], rank))
        if after < math.inf:
            heapq.heappush(queue, (after, before - 1, joined, tuple(sorted(choices)), -1))
        require(queue, f"ranks are not reached in {len(sends)} steps")
    raise UnknownError("a cheapest tree for which too many sets of ranks are looked at")


def of_trees(certificate, steps, fabric, task, units):
    """The cheapest trees in time (Dreyfus and Wagner 1971, from the last step to the first)."""
    rows = lengths_in_steps(certificate["lengths"], steps, fabric)
    within_rounds(rows, units)
    if len(task.members) - 1 > MOST_TARGETS:
        sends = sends_in(rows, fabric, task.kind in SUMS)
        return sum(cheapest_to_all(sends, begins, ends) for begins, ends in copied(task))
    ranks, places = range(fabric.ranks), {rank: place for place, rank in enumerate(task.ranks)}
    every = range(1 << len(places))
    costs = [[0 if not wanted else math.inf for _ in ranks] for wanted in every]

    def settle():
        for wanted in every:
            lowest = wanted & -wanted
            for rank in ranks:
                own = 1 << places[rank] if rank in places else 0
                if wanted & own:
                    costs[wanted][rank] = costs[wanted ^ own][rank]
                    continue
                part = (wanted - 1) & wanted
                while part:
                    if part & lowest:
                        both = costs[part][rank] + costs[wanted ^ part][rank]
                        costs[wanted][rank] = min(costs[wanted][rank], both)
                    part = (part - 1) & wanted

    settle()
    for of_step in reversed(sends_in(rows, fabric, task.kind in SUMS)):
        sent = [[(other, more) for other, more in row.items() if other < len(ranks)] for row in of_step]
        for wanted in every[1:]:  # a rank reaches itself for nothing: it waits
            later = costs[wanted]
            costs[wanted] = [min(later[other] + more for other, more in row) for row in sent]
        settle()
    total = Fraction(0)
    for begins, ends in copied(task):
        wanted = sum(1 << places[end] for end in ends)
        served = {0: 0}
        for part in every[1:]:
            if part & wanted == part:
                halves = (half for half in range(1, part) if half & part == half and len(begins) > 1)
                least = min(costs[part][rank] for rank in begins)
                served[part] = min([least, *(served[half] + served[part ^ half] for half in halves)])
        total += reachable(served[wanted])
    return total


def of_flows(certificate, steps, fabric, task, units):
    """What flows take to some ranks, each with lengths of its own of routes: all have room at once.

    One takes several blocks to a rank of each; of an allreduce, where a message carries any number of
    contributions, one of them alone. With symmetries one stands for its orbit, and a route for its own: means
    must keep the rule.
    """
    rows = lengths_in_steps(certificate["links"], steps, fabric)
    within_rounds(rows, units)
    blocks = [({rank}, sorted(task.members - {rank})) for rank in task.ranks]  # contributions
    backwards = task.kind in SUMS[:2]
    blocks = blocks if task.kind == "allreduce" else copied(task)
    images = [[fabric.vertex(label) for label in labels] for labels in certificate["symmetries"]]
    for image in images:
        check_image(image, fabric, task)
        moved = [
            ({image[rank] for rank in begins}, sorted(image[end] for end in ends)) for begins, ends in blocks
        ]
        require(
            all(moved.count(each) == blocks.count(each) for each in blocks), "a symmetry that moves blocks"
        )
        for tail, head, *_ in fabric.links:
            other = fabric.number.get((image[tail], image[head]))
            same = other is not None and units[other] == units[fabric.number[tail, head]]
            require(same, "a symmetry to a link of another rate")
    routes = [route for rank in range(fabric.ranks) for route in routes_from(fabric, [rank])]
    first, used, ratio = {}, {}, Fraction(0)
    for route in routes:
        if route not in first:
            first |= dict.fromkeys(orbit(route, images, moved_route), route)
    for flow in certificate["flows"]:
        require(len({block for block, _ in flow["pairs"]}) == len(flow["pairs"]), "a block twice in a flow")
        require(task.kind != "allreduce" or len(flow["pairs"]) == 1, "contributions that flow together")
        require(all(block >= 0 and end in blocks[block][1] for block, end in flow["pairs"]), "no such flow")
        ends = tuple(sorted((tuple(sorted(blocks[block][0])), end) for block, end in flow["pairs"]))
        count, own = len(orbit(ends, images, moved_ends)), {}
        for step, labels, length in flow["lengths"]:
            route = tuple(fabric.vertex(label) for label in labels)
            require(route in first and 0 <= step < steps and number(length) >= 0, "no such route")
            own[step, route] = own.get((step, route), 0) + number(length)
            place = (step, first[route])
            used[place] = used.get(place, 0) + count * number(length)
        sends = [[{} for _ in range(fabric.ranks)] for _ in range(steps)]
        for step, route in itertools.product(range(steps), routes):
            cost, row = own.get((step, route), 0), sends[step][route[0]]
            row[route[-1]] = min(cost, row.get(route[-1], cost))
        for block, end in flow["pairs"]:
            starts, stops = ([end], blocks[block][0]) if backwards else (blocks[block][0], [end])
            ratio += count * cheapest_way(sends, starts, stops)
    for (step, start), length in used.items():
        alike = [route for route in routes if first[route] == start]
        most = sum(rows[step][fabric.number[hop]] for route in alike for hop in itertools.pairwise(route))
        require(length <= most, f"step {step}: routes like {start} have {length}, their links {most}")
    return ratio


def moved_route(route, image):
    return tuple(image[vertex] for vertex in route)


def moved_ends(ends, image):
    return tuple(sorted((tuple(sorted(image[rank] for rank in begins)), image[end]) for begins, end in ends))


def orbit(thing, images, moved):
    """All to which images take it."""
    found, left = {thing}, [thing]
    while left:
        here = left.pop()
        for image in images:
            other = moved(here, image)
            if other not in found:
                found.add(other)
                left.append(other)
    return found


def routes_from(fabric, path):
    """Simple ways on through switches to a rank."""
    for tail, head in fabric.number:
        if tail == path[-1] and head not in path:
            if head < fabric.ranks:
                yield (*path, head)
            else:
                yield from routes_from(fabric, [*path, head])


def load(path):
    text = path.read_bytes()
    return json.loads(gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text)


def main(path):
    path = Path(path)
    try:
        file = load(path)
        if file.get("format") == FRONTIER:
            lines = check_frontier(file, lambda name: load(path.parent / name))
        else:
            lines = check(file)
        print("\n".join(lines))
    except OSError as error:
        print(f"{path}: cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    except UnknownError as error:
        print(f"{path}: not known here: {error}", file=sys.stderr)
        return 2
    except (WrongError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        print(f"{path}: wrong: {error}", file=sys.stderr)
        return 1
    return 2 if any(NOT_KNOWN in line for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]) if len(sys.argv) == 2 else "usage: check_certificate.py FILE")
