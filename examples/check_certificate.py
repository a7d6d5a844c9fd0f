"""Check a schedule file of Arborcast, and all that it proves, without Arborcast: standard library only.

    python examples/check_certificate.py fast.json

The transfers are replayed with sets of contributors, links and rounds are counted, and the limits are worked
out from their certificates alone, in exact fractions: a cut, a partition, link lengths (dual), and of times
tolls. Exit status: 0 all holds; 1 something does not, and the line says what; 2 the file asks for what this
short checker does not know (implicit form, able switches, ranks that do not take part, blocks that differ).

How tolls prove a time: cut it into intervals and round latencies down to whole ones. What a rank ends with
depends on what the others gave, so that chains of messages lead from them to it. Each pays the tolls of its
way; a message pays for every rank that it can depend on by then. What all bytes must pay, set against what
links can carry, limits the bytes. docs/explanation/bounds.md says more.
"""

import gzip
import heapq
import itertools
import json
import math
import sys
from fractions import Fraction
from pathlib import Path

SUMS = ("reduce", "reduce-scatter", "allreduce")
WHOLE = ("broadcast", "reduce", "allreduce")
KINDS = (*SUMS, "broadcast", "allgather", "gather", "scatter", "alltoall")
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
    """Vertices are ranks, then switches; `links` has (tail, head, GB/s, latency in us)."""

    def __init__(self, document):
        self.ranks = document["ranks"]
        names = []
        for switch in document.get("switches", []):
            if not isinstance(switch, str) and any(value for key, value in switch.items() if key != "name"):
                raise UnknownError("switches that add or copy")
            names.append(switch if isinstance(switch, str) else switch["name"])
        self.place = {rank: rank for rank in range(self.ranks)}
        self.place |= {name: self.ranks + index for index, name in enumerate(names)}
        self.size = len(self.place)
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
            while port in names:
                port += "-"
            names.append(port)
            fastest = sorted((number(link["bandwidth"]) for link in own), reverse=True)
            for link in own:
                link[near] = port
            links.append({near: rank, far: port, "bandwidth": str(sum(fastest[:count]))})
    return Fabric({"ranks": document["ranks"], "switches": names, "links": links})


def check_schedule(file, fabric, kind, root):
    """Replay and count; the rate."""
    ranks = range(fabric.ranks)
    everyone = frozenset(ranks)
    blocks = {}
    for chunk in file["chunks"]:
        require(number(chunk["share"]) > 0 and chunk["owner"] in everyone, "a chunk out of range")
        block = (None if kind == "allreduce" else chunk["owner"], chunk.get("target"))
        blocks[block] = blocks.get(block, 0) + number(chunk["share"])
    n = fabric.ranks
    others = [rank for rank in ranks if rank != root]
    asked = {
        "broadcast": {(root, None): 1},
        "reduce": {(root, None): 1},
        "allreduce": {(None, None): 1},
        "allgather": {(rank, None): Fraction(1, n) for rank in ranks},
        "reduce-scatter": {(rank, None): Fraction(1, n) for rank in ranks},
        "gather": {(rank, root): Fraction(1, n) for rank in others},
        "scatter": {(root, rank): Fraction(1, n) for rank in others},
        "alltoall": {pair: Fraction(1, n) for pair in itertools.permutations(ranks, 2)},
    }[kind]
    require(blocks == asked, "the chunks are not the blocks of the collective")
    of_chunk = [[] for _ in file["chunks"]]
    for transfer in file["transfers"]:
        require(0 <= transfer["chunk"] < len(of_chunk) and transfer["step"] >= 0, "a transfer out of range")
        require(transfer["from"] in everyone and transfer["to"] in everyone, "a transfer of no rank")
        of_chunk[transfer["chunk"]].append(transfer)
    for index, chunk in enumerate(file["chunks"]):
        held = {rank: {rank} for rank in ranks} if kind in SUMS else {chunk["owner"]: {chunk["owner"]}}
        of_chunk[index].sort(key=lambda transfer: transfer["step"])
        for _, together in itertools.groupby(of_chunk[index], key=lambda transfer: transfer["step"]):
            arrived, copied = {}, set()
            for transfer in together:
                tail, head = transfer["from"], transfer["to"]
                sent = held.get(tail)
                require(sent and tail != head, f"chunk {index} is sent by rank {tail}, which has none of it")
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
        ends = {"reduce": [root], "reduce-scatter": [chunk["owner"]]}.get(kind, ranks)
        ends = [chunk["target"]] if kind in ("gather", "scatter", "alltoall") else ends
        needed = set(ranks) if kind in SUMS else {chunk["owner"]}
        require(all(held.get(rank) == needed for rank in ends), f"chunk {index} does not end where it must")
    return rate_of(file, fabric)


def rate_of(file, fabric):
    loads, steps, held = [Fraction(0)] * len(fabric.links), {}, {}
    for transfer in file["transfers"]:
        way = [transfer["from"], *(fabric.vertex(name) for name in transfer.get("via", [])), transfer["to"]]
        require(all(vertex >= fabric.ranks for vertex in way[1:-1]), "a way through a rank")
        for hop in itertools.pairwise(way):
            require(hop in fabric.number, f"there is no link {hop}")
            link = fabric.number[hop]
            loads[link] += number(file["chunks"][transfer["chunk"]]["share"])
            steps[transfer["step"], link] = steps.get((transfer["step"], link), 0) + 1
        slowest = min(fabric.links[fabric.number[hop]][2] for hop in itertools.pairwise(way))
        for end in ((way[0], "sends"), (way[-1], "receives")):
            if fabric.streams[end[0]] is not None:
                busy = number(file["chunks"][transfer["chunk"]]["share"]) / slowest / fabric.streams[end[0]]
                of_end = held.setdefault(end, {})
                of_end[transfer["step"]] = of_end.get(transfer["step"], 0) + busy
    rounds = file.get("rounds")
    rates = [rate for *_, rate, _ in fabric.links]
    if rounds is None:
        slowest = max(load / rate for load, rate in zip(loads, rates, strict=True))
        slowest = max([slowest, *(sum(times.values()) for times in held.values())])
        require(slowest > 0, "nothing moves")
        rate = 1 / slowest
        require(rate == number(file["rate"]), f"a rate of {rate} GB/s, the file says {file['rate']}")
        return rate
    scale = math.lcm(*(rate.denominator for rate in rates))
    unit = Fraction(math.gcd(*(int(rate * scale) for rate in rates)), scale)
    unit = number(file["unit"]) if "unit" in file else unit
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


def lengths_of(certificate, fabric, kind, root):
    """Link lengths and what they add up to for each byte, of any certificate; and sources and targets."""
    ranks = frozenset(range(fabric.ranks))
    sources = {"broadcast": {root}, "scatter": {root}, "reduce": ranks - {root}, "gather": ranks - {root}}
    targets = {"reduce": {root}, "gather": {root}, "broadcast": ranks - {root}, "scatter": ranks - {root}}
    sources, targets = sources.get(kind, ranks), targets.get(kind, ranks)
    capacity = number(certificate["capacity"])
    if certificate["kind"] == "cut":
        side = {fabric.vertex(label) for label in certificate["side"]}
        lengths = [int(tail in side and head not in side) for tail, head, *_ in fabric.links]
        distance = share_leaving(side & ranks, ranks, kind, root)
        sources, targets = set(sources) & side, set(targets) - side
    elif certificate["kind"] == "partition":
        require(kind == "allreduce", "a partition limits an allreduce")
        blocks = [{fabric.vertex(label) for label in block} for block in certificate["blocks"]]
        every = [vertex for block in blocks for vertex in block]
        require(sorted(every) == list(range(fabric.size)), "blocks that are no partition")
        require(len(blocks) > 1 and all(block & ranks for block in blocks), "blocks without ranks")
        block_of = {vertex: index for index, block in enumerate(blocks) for vertex in block}
        lengths = [int(block_of[tail] != block_of[head]) for tail, head, *_ in fabric.links]
        capacity, distance = 2 * capacity, Fraction(2 * (len(blocks) - 1))
    else:
        require(certificate["kind"] == "dual" and not certificate.get("adders"), "an unknown certificate")
        named = {
            (fabric.vertex(e["from"]), fabric.vertex(e["to"])): number(e["length"])
            for e in certificate["lengths"]
        }
        require(named.keys() == fabric.number.keys(), "lengths of other links")
        require(len(named) == len(certificate["lengths"]), "a link with two lengths")
        lengths = [named[tail, head] for tail, head, *_ in fabric.links]
        require(min(lengths) >= 0, "a negative length")
        distance = travelled(fabric, lengths, kind, root)[0]
        require(distance == number(certificate["distance"]), f"lengths prove a distance of {distance}")
    offered = sum(length * link[2] for length, link in zip(lengths, fabric.links, strict=True))
    require(offered == capacity, f"links offer {offered}, the certificate says {capacity}")
    require(distance > 0, "the certificate proves nothing")
    return lengths, distance, sources, targets


def share_leaving(inside, ranks, kind, root):
    n, within, rooted = len(ranks), len(inside), root in inside
    outside = n - within
    return {
        "broadcast": Fraction(int(rooted and outside > 0)),
        "reduce": Fraction(int(not rooted and within > 0)),
        "allreduce": Fraction(int(within > 0 and outside > 0)),
        "allgather": Fraction(within if outside else 0, n),
        "reduce-scatter": Fraction(outside if within else 0, n),
        "gather": Fraction(0 if rooted else within, n),
        "scatter": Fraction(outside if rooted else 0, n),
        "alltoall": Fraction(within * outside, n),
    }[kind]


def travelled(fabric, lengths, kind, root):
    """How far each byte must travel, and how far if an allreduce need not follow trees; no link, no way."""
    ranks = range(fabric.ranks)
    inner = range(fabric.ranks, fabric.size)
    routes = kind in ("gather", "scatter", "alltoall")
    ways = []
    for rank in ranks:
        found = fabric.distances(lengths, [rank], through=None if routes else inner)
        ways.append([found.get(other, math.inf) for other in ranks])
    back = [list(column) for column in zip(*ways, strict=True)]
    n = fabric.ranks
    if routes:
        chosen = (
            {"gather": [row[root : root + 1] for row in ways], "scatter": [ways[root]]}
            if root is not None
            else {}
        )
        total = sum(map(sum, chosen.get(kind, ways)))
        require(total < math.inf, "ranks that cannot reach each other")
        return Fraction(total) / n, None
    if kind == "broadcast":
        return cheapest_tree(ways, root), None
    if kind == "reduce":
        return cheapest_tree(back, root), None
    if kind == "allgather":
        return Fraction(sum(cheapest_tree(ways, rank) for rank in ranks)) / n, None
    if kind == "reduce-scatter":
        return Fraction(sum(cheapest_tree(back, rank) for rank in ranks)) / n, None
    pairs = min(cheapest_tree(ways, rank) + cheapest_tree(back, rank) for rank in ranks)
    either = [[min(a, b) for a, b in zip(*rows, strict=True)] for rows in zip(ways, back, strict=True)]
    return pairs, 2 * cheapest_tree(either, 0)


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


def check_tolls(tolls, fabric, kind, root, proof):
    """The bytes that nothing can deliver in the time."""
    step, intervals, weight = number(tolls["step_us"]), tolls["intervals"], number(tolls["weight"])
    require(tolls["kind"] == "tolls" and step > 0 and intervals > 0 and weight >= 0, "tolls out of range")
    wait = [latency // step for *_, latency in fabric.links]
    vertices, links = symmetric(tolls["symmetries"], fabric, root)
    part = Fraction(1) if kind in WHOLE else Fraction(1, fabric.ranks)
    paid, charged, own, known = Fraction(0), {}, {}, {}
    for flow in tolls["flows"]:
        outward, terminal, others = flow["direction"] == "out", flow["terminal"], flow["others"]
        rules = OUTWARD if outward else INWARD
        require(flow["direction"] in ("in", "out") and kind in rules, "a flow that says nothing of the kind")
        everyone = set(range(fabric.ranks))
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
        lengths, distance, sources, targets = proof
        before, after = fabric.distances(wait, sources), fabric.distances(wait, targets, backwards=True)
        paid += weight * distance
        for link, (tail, head, *_) in enumerate(fabric.links):
            if lengths[link] and tail in before and head in after:
                for interval in range(before[tail], intervals - wait[link] - after[head]):
                    charged[link, interval] = charged.get((link, interval), 0) + weight * lengths[link]
    offered = sum((charge * fabric.links[link][2] for (link, _), charge in charged.items()), Fraction(0))
    offered += to_the_dearest(own, fabric, vertices, links)
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


def symmetric(symmetries, fabric, root):
    """The orbit of each vertex and of each link, once all symmetries are seen to be some."""
    vertices, links = list(range(fabric.size)), list(range(len(fabric.links)))
    for labels in symmetries:
        image = [fabric.vertex(label) for label in labels]
        require(sorted(image) == list(range(fabric.size)), "a symmetry that is no permutation")
        require(
            all((v < fabric.ranks) == (w < fabric.ranks) for v, w in enumerate(image)), "ranks to switches"
        )
        require(root is None or image[root] == root, "a symmetry that moves the root")
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
                wait, [start], not outward, range(fabric.ranks, fabric.size) if through else None
            )
        return known[start, through, outward]

    makers = {vertex: 0} if vertex < fabric.ranks else near(vertex, True)
    return max(
        (
            sum(ago + near(maker, False).get(other, left + 1) <= left for other in others)
            for maker, ago in makers.items()
            if maker < fabric.ranks
        ),
        default=0,
    )


def check(file):
    """All that a file claims, as lines."""
    if file.get("format") not in ("arborcast.schedule/1",):
        raise UnknownError(f"format {file.get('format')!r}")
    fabric, collective = Fabric(file["topology"]), file["collective"]
    kind, root = collective["kind"], collective.get("root")
    if (
        kind not in KINDS
        or collective.get("sizes")
        or sorted(collective["ranks"]) != list(range(fabric.ranks))
    ):
        raise UnknownError("other collectives, blocks that differ, or ranks that do not take part")
    has_root = kind in ("broadcast", "reduce", "gather", "scatter")
    require(root in range(fabric.ranks) if has_root else root is None, "a root where none is, or none")
    rate = check_schedule(file, fabric, kind, root)
    bound = file["bound"]
    fabric = with_ports(file["topology"], fabric.streams)  # limits are about that one
    proof = lengths_of(bound["certificate"], fabric, kind, root)
    offered = sum(length * link[2] for length, link in zip(proof[0], fabric.links, strict=True))
    limit = offered / proof[1]
    require(limit == number(bound["rate"]), f"the certificate proves {limit} GB/s, not {bound['rate']}")
    every = bound.get("scope", "every schedule") == "every schedule"
    if kind == "allreduce" and bound["certificate"]["kind"] == "dual" and every:
        either = travelled(fabric, proof[0], kind, root)[1]
        require(either >= proof[1], "lengths that only limit schedules along trees")
    require(not every or rate <= limit, "a schedule faster than its limit")
    lines = [f"{rate} GB/s, correct", f"no schedule exceeds {limit} GB/s: {bound['certificate']['kind']}"]
    for tolls in bound.get("times", []):
        most, time_us = check_tolls(tolls, fabric, kind, root, proof)
        lines.append(f"more than {float(most):.0f} bytes take more than {float(time_us):.4g} us: tolls")
    return lines


def main(path):
    try:
        text = Path(path).read_bytes()
        print("\n".join(check(json.loads(gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text))))
    except OSError as error:
        print(f"{path}: cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    except UnknownError as error:
        print(f"{path}: not known here: {error}", file=sys.stderr)
        return 2
    except (WrongError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        print(f"{path}: wrong: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]) if len(sys.argv) == 2 else "usage: check_certificate.py FILE")
