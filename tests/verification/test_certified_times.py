"""What certificates say of times, on small drawn fabrics: windows by networkx, tolls by the foreign checker.

Certificates here need not be good ones: what they prove is recomputed, whatever it is.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from types import ModuleType
from typing import Any

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.bounds import bound
from arborcast.synth.certificate import Certificate, Cut, Dual, Partition, TollFlow, Tolls
from arborcast.synth.certification.proven_rates import share_leaving
from arborcast.synth.certification.tolls import INWARD, OUTWARD, certified_bytes, check_tolls
from arborcast.synth.certification.windows import sources_and_targets, window_lines
from arborcast.synth.collective import Collective, Demand, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.formats.documents import tolls_to_document, topology_to_document
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Link, Switch, Topology
from arborcast.synth.verification.verifier import verify

KINDS = [kind for kind in Kind if kind is not Kind.CUSTOM]


@st.composite
def fabrics(draw: st.DrawFn, latencies: st.SearchStrategy[Fraction]) -> Topology:
    """A ring both ways of 2 to 4 ranks, at times with a switch that forwards in it, and a chord."""
    ranks, switches = draw(st.integers(2, 4)), draw(st.integers(0, 1))
    size = ranks + switches
    ends = {(v, (v + step) % size) for v in range(size) for step in (1, size - 1)}
    ends |= {(0, 2)} if size > 3 and draw(st.booleans()) else set()
    links = [Link(*each, Fraction(draw(st.integers(1, 3))), draw(latencies)) for each in sorted(ends)]
    return Topology.build("drawn", ranks, links, ["hub"] * switches)


@st.composite
def certificates(draw: st.DrawFn, fabric: Topology, collective: Collective) -> Certificate:
    """One that says something of the collective, whether its lengths are good or not."""
    size, root = fabric.size, collective.root
    inside = draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1))
    if collective.kind in {Kind.BROADCAST, Kind.SCATTER}:
        inside |= {root or 0}
    if collective.kind in {Kind.REDUCE, Kind.GATHER}:
        inside -= {root or 0}
    side = frozenset(inside)
    ranks = frozenset(collective.ranks)
    if side & ranks and ranks - side and draw(st.booleans()):
        return Cut(side, Fraction(1))
    if collective.kind is Kind.ALLREDUCE and side & ranks and ranks - side and draw(st.booleans()):
        return Partition((side, frozenset(range(size)) - side), Fraction(1))
    lengths = draw(st.lists(st.integers(0, 2), min_size=len(fabric.links), max_size=len(fabric.links)))
    return Dual((*map(Fraction, lengths[:-1]), Fraction(1)), Fraction(1), Fraction(draw(st.integers(1, 3))))


def lengths_of(
    certificate: Certificate, fabric: Topology, collective: Collective
) -> tuple[list[int], Fraction]:
    """Of links, and how far a byte travels, by the definition of each certificate."""
    if isinstance(certificate, Dual):
        return [int(length) for length in certificate.lengths], certificate.distance
    if isinstance(certificate, Cut):
        leaves = [(link.src in certificate.side) > (link.dst in certificate.side) for link in fabric.links]
        return [int(each) for each in leaves], share_leaving(collective, certificate.side)
    first = certificate.blocks[0]
    return [int((link.src in first) != (link.dst in first)) for link in fabric.links], Fraction(2)


@settings(deadline=None, max_examples=120)
@given(st.data())
def test_by_the_least_time_of_the_lines_all_bytes_have_paid(data: st.DataObject) -> None:
    fabric = data.draw(fabrics(st.integers(0, 4).map(Fraction)))
    kind = data.draw(st.sampled_from(KINDS))
    collective = Collective.on(fabric, kind, root=fabric.ranks - 1 if kind.has_root else None)
    certificate = data.draw(certificates(fabric, collective))
    lengths, distance = lengths_of(certificate, fabric, collective)
    graph = networkx.DiGraph()
    for link in fabric.links:
        graph.add_edge(link.src, link.dst, latency=link.latency_us)
    far = dict(networkx.all_pairs_dijkstra_path_length(graph, weight="latency"))
    everyone, root = set(collective.ranks), {collective.root}
    sources = root if kind in {Kind.BROADCAST, Kind.SCATTER} else everyone
    targets = root if kind in {Kind.REDUCE, Kind.GATHER} else everyone
    if kind.has_root:
        sources, targets = (sources, everyone - root) if sources == root else (everyone - root, targets)
    if isinstance(certificate, Cut):
        sources, targets = sources & certificate.side, targets - certificate.side
    assert sources_and_targets(collective, certificate) == (sources, targets)
    lines = window_lines(fabric, collective, certificate)
    for size in (0, 700, 5_000, 90_000):
        time_us = min(line.at(size) for line in lines)
        paid = Fraction(0)
        for link, length in zip(fabric.links, lengths, strict=True):
            wait = link.latency_us + min(far[one][link.src] for one in sources)
            wait += min(far[link.dst][one] for one in targets)
            paid += length * link.bandwidth * max(Fraction(0), time_us - wait)
        assert paid * 1000 == distance * size


def test_an_adder_with_a_price_pays_while_it_is_of_use() -> None:
    hub = Switch("hub", reduces=True, adder=Fraction(3))
    ends = [(0, 2), (2, 0), (1, 2), (2, 1)]
    fabric = Topology.build("star", 2, [Link(*each, Fraction(1), Fraction(2)) for each in ends], [hub])
    collective = Collective.on(fabric, "allreduce")
    nothing = (Fraction(0),) * 4
    for price, lines in ((Fraction(2), ((4, Fraction(1, 2 * 3 * 1000)),)), (Fraction(0), ())):
        found = window_lines(fabric, collective, Dual(nothing, Fraction(6), Fraction(1), (price,)))
        assert tuple((line.latency_us, line.us_per_byte) for line in found) == lines


def test_what_no_way_leads_through_is_of_no_use() -> None:
    """0 to 1 over a link of 2 us. Nothing reaches 2 or the switch 4, and nothing leads on from 3 or 5."""
    hubs = [Switch(name, reduces=True, adder=Fraction(3)) for name in ("before", "after")]
    ends = [(0, 1), (2, 0), (1, 3), (4, 0), (1, 5)]
    fabric = Topology.build("dead ends", 4, [Link(*each, Fraction(1), Fraction(2)) for each in ends], hubs)
    collective = Collective.on(fabric, "broadcast", root=0, ranks=(0, 1))
    lengths = (Fraction(1),) * 5
    for adders in ((), (Fraction(1), Fraction(1))):
        (line,) = window_lines(fabric, collective, Dual(lengths, Fraction(1), Fraction(1), adders))
        assert (line.latency_us, line.us_per_byte) == (2, Fraction(1, 1000))


def test_what_custom_blocks_come_from_and_go_to() -> None:
    fabric = Topology.build(
        "ring", 4, [Link(v, (v + step) % 4, Fraction(1), Fraction(1)) for v in range(4) for step in (1, 3)]
    )
    asked = [Demand(frozenset({0}), frozenset({1})), Demand(frozenset({1, 3}), frozenset({2}))]
    ends = sources_and_targets(Collective.custom(fabric, asked), Dual((), Fraction(1), Fraction(1)))
    assert ends == ({0, 1, 3}, {1, 2})


# --- tolls ----------------------------------------------------------------------------------------------


@st.composite
def tolls_on(draw: st.DrawFn, fabric: Topology, collective: Collective) -> Tolls:
    """Any tolls of the right form, whatever they prove."""
    intervals = draw(st.integers(3, 6))
    directions = [way for way, kinds in ((False, INWARD), (True, OUTWARD)) if collective.kind in kinds]
    root = collective.root
    flows = []
    for _ in range(draw(st.integers(1, 3))):
        terminal = draw(st.sampled_from(collective.ranks)) if root is None else root
        others = draw(st.permutations([rank for rank in collective.ranks if rank != terminal]))
        places = st.tuples(st.integers(0, len(fabric.links) - 1), st.integers(0, intervals - 1))
        priced = draw(st.dictionaries(places, st.integers(1, 5), min_size=4, max_size=40))
        charges = tuple((*place, toll) for place, toll in sorted(priced.items()))
        count = draw(st.integers(1, len(others)))
        flows.append(TollFlow(terminal, draw(st.sampled_from(directions)), tuple(others[:count]), charges))
    step, weight = Fraction(draw(st.integers(1, 2)), 2), Fraction(draw(st.integers(0, 2)))
    return Tolls(step, intervals, tuple(flows), weight, (), Fraction(1))


def by_strangers(
    checker: ModuleType, fabric: Topology, collective: Collective, certificate: Certificate, tolls: Tolls
) -> tuple[Fraction | None, str]:
    """What the foreign checker says that tolls prove; None with its reason where they prove nothing."""
    there = checker.Fabric(topology_to_document(fabric))
    lengths, distance = lengths_of(certificate, fabric, collective)
    task = checker.Task(
        {"kind": collective.kind.value, "root": collective.root, "ranks": list(collective.ranks)}, there
    )
    offered, ends = Fraction(0), sources_and_targets(collective, certificate)  # adders offer nothing
    proof = checker.Proof(lengths, distance, offered, Fraction(0), *ends)
    document: dict[str, Any] = dict(tolls_to_document(tolls, fabric))
    for bytes_said in ("1", None):
        try:
            found, _ = checker.check_tolls(
                {**document, "bytes": bytes_said or document["bytes"]},
                there,
                task,
                proof,
            )
        except checker.WrongError as wrong:
            words = str(wrong).split()
            if words[:2] != ["tolls", "prove"]:
                return None, str(wrong)
            document["bytes"] = words[2]
            continue
        return found, ""
    raise AssertionError("the foreign checker gives two answers")


def proved_here(
    fabric: Topology, collective: Collective, certificate: Certificate, tolls: Tolls
) -> Fraction | None:
    """What the package says that tolls prove; None where they prove nothing."""
    try:
        return certified_bytes(fabric, collective, certificate, tolls)
    except InputError:
        return None


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_tolls_prove_here_what_they_prove_to_strangers(checker: ModuleType, data: st.DataObject) -> None:
    fabric = data.draw(fabrics(st.sampled_from([Fraction(0), Fraction(1, 2), Fraction(1), Fraction(5, 4)])))
    kind = data.draw(st.sampled_from(KINDS))
    collective = Collective.on(fabric, kind, root=fabric.ranks - 1 if kind.has_root else None)
    certificate = data.draw(certificates(fabric, collective))
    tolls = data.draw(tolls_on(fabric, collective))
    there, why = by_strangers(checker, fabric, collective, certificate, tolls)
    assert proved_here(fabric, collective, certificate, tolls) == there, why


UNIFORM = [Link(v, (v + step) % 4, Fraction(1), Fraction(1)) for v in range(4) for step in (1, 3)]
RING = Topology.build("ring", 4, UNIFORM)
NO_LENGTHS = Dual((Fraction(0),) * 8, Fraction(1), Fraction(1))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_symmetries_carry_tolls_as_to_strangers(checker: ModuleType, data: st.DataObject) -> None:
    """Rotations of a ring, or by two only, at times with the links one way round twice as wide."""
    wide = [
        replace(link, bandwidth=Fraction(2)) if (link.dst - link.src) % 4 == 1 else link for link in UNIFORM
    ]
    fabric = data.draw(st.sampled_from([RING, Topology.build("wide", 4, wide)]))
    collective = Collective.on(
        fabric, data.draw(st.sampled_from([kind for kind in KINDS if not kind.has_root]))
    )
    turn = data.draw(st.sampled_from([(1, 2, 3, 0), (2, 3, 0, 1), (0, 1, 2, 3)]))
    tolls = replace(data.draw(tolls_on(fabric, collective)), symmetries=(turn,))
    there, why = by_strangers(checker, fabric, collective, NO_LENGTHS, tolls)
    assert proved_here(fabric, collective, NO_LENGTHS, tolls) == there, why


IN, OUT = (TollFlow(0, outward, (1, 2), ((0, 0, 1),)) for outward in (False, True))
FIT = Tolls(Fraction(1), 4, (IN,), Fraction(0), (), Fraction(1))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("allreduce", {"step_us": Fraction(0)}, "need a positive step and number, got 0, 4"),
        ("allreduce", {"intervals": 0}, "need a positive step and number, got 1, 0"),
        ("allreduce", {"weight": Fraction(-1)}, "weight must not be negative, got -1"),
        ("broadcast", {"flows": (IN,)}, "flow 0: limits no broadcast, inward"),
        ("reduce", {"flows": (IN, OUT)}, "flow 1: limits no reduce, outward"),
        ("allreduce", {"flows": (replace(IN, terminal=4),)}, "flow 0: terminal must take part, got 4"),
        ("reduce", {"flows": (replace(IN, terminal=3),)}, "flow 0: terminal must be the root 0, got 3"),
        ("allreduce", {"flows": (replace(IN, others=(1, 1)),)}, "flow 0: others must be other ranks"),
        ("allreduce", {"flows": (replace(IN, others=(0, 1)),)}, "flow 0: others must be other ranks"),
        ("allreduce", {"flows": (replace(IN, others=(4,)),)}, "flow 0: others must be other ranks"),
        (
            "allreduce",
            {"flows": (replace(IN, tolls=((8, 0, 1),)),)},
            r"8 links, 4 intervals .*, got \(8, 0, 1",
        ),
        ("allreduce", {"flows": (replace(IN, tolls=((-1, 0, 1),)),)}, "flow 0: must keep to 8 links"),
        ("allreduce", {"flows": (replace(IN, tolls=((0, 4, 1),)),)}, "flow 0: must keep to 8 links"),
        ("allreduce", {"flows": (replace(IN, tolls=((0, -1, 1),)),)}, "flow 0: must keep to 8 links"),
        ("allreduce", {"flows": (replace(IN, tolls=((0, 0, 0),)),)}, "flow 0: must keep to 8 links"),
        ("allreduce", {"flows": (replace(IN, tolls=((0, 0, 1), (0, 0, 2))),)}, "must have one toll for each"),
        ("allreduce", {"intervals": 2}, "2 intervals are too few for ranks 2 and 0"),
        ("allreduce", {}, "prove nothing, no byte has to pay any"),
        ("allreduce", {"flows": ()}, "prove nothing, no byte has to pay any"),
        ("allreduce", {"symmetries": ((1, 2, 3),)}, "symmetry 0 does not keep links"),
        ("allreduce", {"symmetries": ((0, 1, 2, 3), (1, 0, 2, 3))}, "symmetry 1 does not keep links"),
        ("reduce", {"symmetries": ((1, 2, 3, 0),)}, "symmetry 0 does not keep links"),
    ],
)
def test_what_is_no_certificate(kind: str, changes: dict[str, Any], message: str) -> None:
    collective = Collective.on(RING, kind, root=0 if Kind(kind).has_root else None)
    with pytest.raises(InputError, match=f"^tolls: .*{message}"):
        certified_bytes(RING, collective, NO_LENGTHS, replace(FIT, **changes))


def test_other_collectives_have_no_tolls() -> None:
    custom = Collective.custom(RING, [Demand(frozenset({0}), frozenset({1}))])
    for collective in (custom, Collective.alltoallv(RING, [[0, 1, 1, 1]] * 4)):
        with pytest.raises(InputError, match="limit collectives of equal blocks"):
            certified_bytes(RING, collective, NO_LENGTHS, FIT)


@pytest.mark.parametrize(
    "change",
    [{"bandwidth": Fraction(2)}, {"latency_us": Fraction(2)}, {}],
    ids=["another rate", "another latency", "one link less"],
)
def test_a_symmetry_keeps_rates_and_latencies(change: dict[str, Any]) -> None:
    links = [replace(UNIFORM[0], **change), *UNIFORM[1:]] if change else UNIFORM[1:]
    fabric = Topology.build("bent", 4, links)
    collective = Collective.on(fabric, "allreduce")
    turned = replace(FIT, symmetries=((1, 2, 3, 0),))
    with pytest.raises(InputError, match="symmetry 0 does not keep links"):
        certified_bytes(fabric, collective, NO_LENGTHS, turned)


@pytest.mark.parametrize(
    ("ranks", "switches", "members", "image"),
    [
        (4, [], (0, 1, 2), (1, 2, 3, 0)),
        (3, [Switch("hub")], (0, 2), (2, 3, 0, 1)),
        (2, [Switch("adds", reduces=True), Switch("hub")], (0, 1), (1, 0, 3, 2)),
    ],
    ids=["to a rank that takes no part", "a rank to a switch", "a switch to another kind"],
)
def test_a_symmetry_keeps_who_takes_part_and_switches(
    ranks: int, switches: list[Switch], members: tuple[int, ...], image: tuple[int, ...]
) -> None:
    fabric = Topology.build("ring", ranks, UNIFORM, switches)
    collective = Collective.on(fabric, "allreduce", ranks=members)
    flow = TollFlow(members[0], False, (members[1],), ((0, 0, 1),))
    turned = replace(FIT, flows=(flow,), symmetries=(image,))
    with pytest.raises(InputError, match="symmetry 0 does not keep links"):
        certified_bytes(fabric, collective, NO_LENGTHS, turned)


def able_star(**abilities: Any) -> Topology:
    """Three ranks around a switch: links up are 0 to 2, links down 3 to 5, each 1 GB/s and 1 us."""
    links = [Link(*ends, Fraction(1), Fraction(1)) for rank in range(3) for ends in ((rank, 3), (3, rank))]
    return Topology.build("star", 3, links, [Switch("hub", **abilities)])


@pytest.mark.parametrize(
    ("kind", "outward", "link", "interval", "abilities", "bytes_proved"),
    [
        # In 3 us each of two others reaches rank 0 over its last link in interval 1, and pays 1 there. An
        # adding switch makes one message of both: 1 GB/s for 1 us is all. Else it carries one of them.
        ("allreduce", False, 3, 1, {"reduces": True}, 1000),
        ("allreduce", False, 3, 1, {"multicasts": True}, 500),
        ("allreduce", False, 3, 1, {}, 500),
        ("reduce", False, 3, 1, {"reduces": True}, 1000),
        ("allreduce", True, 0, 0, {"multicasts": True}, 1000),
        ("allreduce", True, 0, 0, {"reduces": True}, 500),
        ("broadcast", True, 0, 0, {"multicasts": True}, 1000),
        # A rank gets two blocks of a third each from the others, whatever switches can.
        ("allgather", False, 3, 1, {"reduces": True, "multicasts": True}, 1500),
        ("alltoall", False, 3, 1, {"reduces": True, "multicasts": True}, 1500),
        ("gather", False, 3, 1, {"reduces": True, "multicasts": True}, 1500),
        ("reduce-scatter", True, 0, 0, {"reduces": True, "multicasts": True}, 1500),
        ("scatter", True, 0, 0, {"reduces": True, "multicasts": True}, 1500),
        # ... but for sums of its own block.
        ("reduce-scatter", False, 3, 1, {"reduces": True}, 3000),
        ("reduce-scatter", False, 3, 1, {"multicasts": True}, 1500),
    ],
)
def test_messages_of_able_switches_stand_for_many(
    kind: str, outward: bool, link: int, interval: int, abilities: dict[str, bool], bytes_proved: int
) -> None:
    fabric = able_star(**abilities)
    collective = Collective.on(fabric, kind, root=0 if Kind(kind).has_root else None)
    flow = TollFlow(0, outward, (1, 2), ((link, interval, 1),))
    tolls = Tolls(Fraction(1), 3, (flow,), Fraction(0), (), Fraction(bytes_proved))
    assert certified_bytes(fabric, collective, NO_LENGTHS, tolls) == bytes_proved
    check_tolls(fabric, collective, bound(fabric, collective), tolls)
    with pytest.raises(InputError, match=f"prove {bytes_proved} bytes, the certificate says 1"):
        check_tolls(fabric, collective, bound(fabric, collective), replace(tolls, bytes=Fraction(1)))


@pytest.mark.parametrize(
    ("kind", "outward", "bytes_proved"),
    [
        # Two flows pay 1 on one link and in one interval. Of a whole buffer: 2 for each byte, 2 on the link.
        ("allreduce", False, 1000),
        ("allreduce", True, 1000),
        # Of blocks of a third, on which both pay together...
        ("allgather", False, 3000),
        ("reduce-scatter", True, 3000),
        # ... or, where each has blocks of its own, the dearer one alone.
        ("alltoall", False, 1500),
        ("allgather", True, 1500),
        ("reduce-scatter", False, 1500),
    ],
)
def test_flows_of_two_ranks_on_one_link(kind: str, outward: bool, bytes_proved: int) -> None:
    """What goes from 2 to both, or from both to 2, passes its link up, or down, and there alone pays."""
    fabric = able_star()
    collective = Collective.on(fabric, kind)
    place = (5, 1) if outward else (2, 0)
    flows = tuple(TollFlow(terminal, outward, (2,), ((*place, 1),)) for terminal in (0, 1))
    tolls = Tolls(Fraction(1), 3, flows, Fraction(0), (), Fraction(bytes_proved))
    assert certified_bytes(fabric, collective, NO_LENGTHS, tolls) == bytes_proved


@pytest.mark.parametrize(
    ("kind", "bytes_proved"), [("broadcast", 1000), ("reduce", 1000), ("scatter", 4000), ("gather", 4000)]
)
def test_a_symmetry_that_keeps_the_root_leaves_its_flows_where_they_are(kind: str, bytes_proved: int) -> None:
    """In 2 us a byte between 0 and 1 passes their link in the first; that between 0 and 3 pays nothing."""
    outward = Kind(kind) in OUTWARD
    flow = TollFlow(0, outward, (1,), ((0 if outward else 2, 0, 1),))
    tolls = Tolls(Fraction(1), 2, (flow,), Fraction(0), ((0, 3, 2, 1),), Fraction(bytes_proved))
    assert certified_bytes(RING, Collective.on(RING, kind, root=0), NO_LENGTHS, tolls) == bytes_proved


def test_lengths_of_links_that_lead_from_nowhere_or_to_nowhere_are_not_charged() -> None:
    """Of 0 to 1 in 2 us, 5 us leave three intervals of use; the other links have none."""
    ends = [(0, 1), (2, 0), (1, 3)]
    fabric = Topology.build("dead ends", 4, [Link(*each, Fraction(1), Fraction(2)) for each in ends])
    collective = Collective.on(fabric, "broadcast", root=0, ranks=(0, 1))
    lengths = Dual((Fraction(1),) * 3, Fraction(1), Fraction(1))
    alone = Tolls(Fraction(1), 5, (), Fraction(1), (), Fraction(1))
    assert certified_bytes(fabric, collective, lengths, alone) == 3000


def test_prices_of_adders_are_charged_for_the_whole_time() -> None:
    fabric = able_star(reduces=True, adder=Fraction(3))
    collective = Collective.on(fabric, "allreduce")
    priced = Dual((Fraction(0),) * 6, Fraction(6), Fraction(4), (Fraction(2),))
    alone = Tolls(Fraction(1, 2), 5, (), Fraction(3), (), Fraction(1))
    # 3 * 2 * 3 GB/s for 5 halves of a us, against 3 * 4 that each byte pays.
    assert certified_bytes(fabric, collective, priced, alone) == Fraction(18 * 5, 2) * 1000 / 12
    assert certified_bytes(fabric, collective, replace(priced, adders=()), alone) == 0


def test_a_switch_hands_on_what_ranks_before_it_sent() -> None:
    """From 0 over the switch 2, and from there at once or by 3, to 4 and on to 1; nobody sends to 5."""
    ends = {(0, 2): 1, (2, 3): 0, (2, 4): 0, (3, 4): 0, (4, 1): 1, (5, 1): 1}
    links = [Link(*each, Fraction(1), Fraction(wait)) for each, wait in sorted(ends.items())]
    fabric = Topology.build("forwards", 2, links, ["a", "b", "c", "d"])
    collective = Collective.on(fabric, "reduce", root=1)
    last, dead = (4, 1, 1), (5, 1, 1)  # link, interval, toll
    for charges in ((last,), (last, dead)):
        tolls = Tolls(Fraction(1), 3, (TollFlow(1, False, (0,), charges),), Fraction(0), (), Fraction(1))
        lengths = replace(NO_LENGTHS, lengths=(Fraction(0),) * 6)
        assert certified_bytes(fabric, collective, lengths, tolls) == 1000


def test_one_interval_is_enough_where_links_have_no_latency() -> None:
    pair = Topology.build("pair", 2, [Link(*ends, Fraction(1), Fraction(0)) for ends in ((0, 1), (1, 0))])
    tolls = Tolls(Fraction(1), 1, (TollFlow(0, True, (1,), ((0, 0, 1),)),), Fraction(0), (), Fraction(1))
    lengths = replace(NO_LENGTHS, lengths=(Fraction(0),) * 2)
    assert certified_bytes(pair, Collective.on(pair, "broadcast", root=0), lengths, tolls) == 1000


@pytest.mark.parametrize(
    ("said", "errors"), [(1000, ()), (999, ("bound: tolls: prove 1000 bytes, the certificate says 999",))]
)
def test_a_verdict_recomputes_times(said: int, errors: tuple[str, ...]) -> None:
    """Of 2 us the link of 1 us can be entered in the first alone: 1000 bytes."""
    links = [Link(*ends, Fraction(1), Fraction(1)) for ends in ((0, 1), (1, 0))]
    pair = Topology.build("pair", 2, links)
    collective = Collective.on(pair, "broadcast", root=0)
    tolls = Tolls(Fraction(1), 2, (TollFlow(0, True, (1,), ((0, 0, 1),)),), Fraction(0), (), Fraction(said))
    timed = replace(bound(pair, collective), times=(tolls,))
    chunks, transfers = [Chunk(Fraction(1), 0)], [Transfer(0, 0, 1, 0)]
    schedule = Schedule.build(pair, collective, Method("drawn"), timed, chunks, transfers)
    assert verify(schedule).errors == errors
