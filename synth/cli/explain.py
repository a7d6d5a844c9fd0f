"""`synth explain`: what stock NCCL does with a collective on this fabric, what is possible, and what to do.

What NCCL chooses is its planning model's word (`baselines.nccl_model`), its rings are the largest set of
link-disjoint rings of the graph (`baselines.multiring`); NCCL itself is not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from shlex import quote
from typing import TYPE_CHECKING, Annotated

from arborcast.synth.cli.console import Json, answer, progress
from arborcast.synth.cli.description import assumptions_document, describe_assumptions, describe_bound
from arborcast.synth.cli.inputs import (
    FabricRequest,
    collective_on,
    failing_as_json,
    load_fabric,
    planned_by_nccl,
    text_of,
)
from arborcast.synth.cli.options import (
    AsJson,
    CollectiveName,
    Deadline,
    FabricOptions,
    NoCache,
    Picture,
    Root,
    Seed,
    about_a_fabric,
    option,
)
from arborcast.synth.errors import CollectiveError, InfeasibleError, InputError
from arborcast.synth.formats.documents import picked
from arborcast.synth.formats.sizes import format_size, parse_size
from arborcast.synth.formats.words import MOST_NAMED, at_most, every_schedule, gigabytes, share
from arborcast.synth.topology import Hop, Topology

if TYPE_CHECKING:
    from arborcast.synth.baselines.nccl_model import ModelTime
    from arborcast.synth.certificate import Bound
    from arborcast.synth.collective import Collective
    from arborcast.synth.implicit_schedule import AnySchedule

WORTH = 0.01
"""The part of its time that a change must save to be told of."""


@dataclass(frozen=True)
class LinkUse:
    """A schedule on the links of a fabric.

    Attributes:
        time_us: priced (`synth.simulation.prices`), of the size that was asked for.
        rate: algbw of large messages.
        used: the part of the bandwidth of all links together that carries something at that rate.
        idle: the links that carry nothing.
    """

    time_us: float
    rate: Fraction
    used: Fraction
    idle: tuple[Hop, ...]

    @classmethod
    def of(cls, schedule: AnySchedule, size_bytes: int) -> LinkUse:
        """Of a correct schedule: the loads are those that the verifier counts."""
        from arborcast import synth

        loads, links = synth.verify(schedule).loads, schedule.topology.bandwidth
        carried = sum(loads.values(), Fraction(0)) * schedule.rate
        idle = tuple(hop for hop in links if not loads.get(hop))
        time_us = synth.simulate(schedule, size_bytes, priced=True).time_us
        return cls(time_us, schedule.rate, carried / sum(links.values()), idle)


@dataclass(frozen=True)
class Advice:
    """One thing to do.

    Attributes:
        what: in a word.
        gain: what it brings, in words.
        commands: that do it.
    """

    what: str
    gain: str
    commands: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """What is told.

    Attributes:
        nccl: by its model, what NCCL takes at this size by each of its algorithms, the one it chooses first;
            none where the model knows nothing of the collective or the fabric.
        rings: the link-disjoint rings of the graph; None where there are none.
        least_us: what every schedule takes at least, priced like these, in the bound's scope.
        best: the schedule that is the fastest at this size.
        method: of that.
        advice: what to do, the least effort first.
        unknown: by "nccl" and "rings", why there are none.
    """

    nccl: Sequence[ModelTime]
    rings: LinkUse | None
    least_us: float
    best: LinkUse
    method: str
    advice: Sequence[Advice]
    unknown: Mapping[str, str] = field(default_factory=dict)


@about_a_fabric()
def explain(
    fabric: FabricOptions,
    collective: CollectiveName,
    size: Annotated[str, option("--size", "of the whole buffer, such as 16MiB")] = "64MiB",
    root: Root = None,
    picture: Picture = None,
    deadline: Deadline = None,
    seed: Seed = 0,
    no_cache: NoCache = False,
    as_json: AsJson = False,
) -> None:
    """Explain what stock NCCL does here, and what to do.

    What it chooses by its planning model, the proven limit, the gap, which links its rings leave idle, and
    what to do about it: an order of hosts, a graph file, a schedule.
    """
    from arborcast import synth
    from arborcast.synth.api import approach
    from arborcast.synth.selection import PricedLimit
    from arborcast.synth.solve_options import SolveOptions

    size_bytes = parse_size(size)
    on = load_fabric(fabric)
    asked = collective_on(collective, on, root)
    with (
        progress(f"explaining {collective} on {on.topology.name}", quiet=as_json),
        failing_as_json(on, collective, as_json),
    ):
        bound = synth.bound(on.topology, asked)
        options = SolveOptions(seed=seed, deadline_s=deadline, size_bytes=size_bytes, cache=not no_cache)
        question = approach(on.faulty or on.topology, asked, "auto", options)
        best = question.selection().fastest_in_time(size_bytes)
        least_us = PricedLimit.of(best).at(size_bytes)
        unknown: dict[str, str] = {}
        rings = _rings(on.topology, asked, seed, size_bytes, unknown)
        nccl = _nccl(on, asked, seed, size_bytes, unknown)
        ours = LinkUse.of(best, size_bytes)
        advice = tuple(_advice(on, collective, root, size, nccl, rings, ours))
    found = Explanation(nccl, rings, least_us, ours, best.method.name, advice, unknown)
    if picture is not None:
        from arborcast.synth.pictures import draw_topology

        draw_topology(on.topology, picture, idle=() if rings is None else rings.idle)
    head = f"{on.topology.name} {asked.kind} of {format_size(size_bytes)}"
    answer(
        as_json,
        {
            "topology": on.topology.name,
            "collective": collective,
            "size": size_bytes,
            **_document(found, on.topology),
            "limit": str(bound.rate),
            "picture": text_of(picture),
            "assumed": assumptions_document(on.topology),
        },
        lambda: [
            head,
            *_lines(found, on.topology, bound),
            f"  limit    {at_most(bound.rate, on.topology)}",
            *describe_bound(bound, on.topology),
            *describe_assumptions(on.topology)[1:],
            *_told(found.advice),
            *([] if picture is None else ["", f"drawn    {picture}"]),
        ],
    )


def _rings(
    topology: Topology, asked: Collective, seed: int, size_bytes: int, unknown: dict[str, str]
) -> LinkUse | None:
    from arborcast.synth.baselines import solve_baseline

    try:
        return LinkUse.of(solve_baseline(topology, asked, "multiring", seed=seed), size_bytes)
    except (InfeasibleError, CollectiveError) as error:
        unknown["rings"] = str(error).removeprefix("multiring: ")
        return None


def _nccl(
    on: FabricRequest, asked: Collective, seed: int, size_bytes: int, unknown: dict[str, str]
) -> tuple[ModelTime, ...]:
    """Its model's rows, the fastest first."""
    from arborcast.synth.baselines.nccl_model import nccl_times

    try:
        rows = nccl_times(planned_by_nccl(on), asked, [size_bytes], seed=seed)
    except (InfeasibleError, CollectiveError) as error:
        unknown["nccl"] = str(error)
        return ()
    return tuple(sorted(rows, key=lambda row: row.time_us))


def _advice(
    on: FabricRequest,
    collective: str,
    root: int | None,
    size: str,
    nccl: Sequence[ModelTime],
    rings: LinkUse | None,
    best: LinkUse,
) -> Iterator[Advice]:
    """What to do, the least effort first; what would save nothing is left out."""
    words = " ".join(words_of(on.options))
    of = f"{words} {quote(collective)}" + ("" if root is None else f" --root {root}")
    if (gain := _gain_of_order(on)) is not None:
        yield Advice("order", gain, (f"synth order {quote(on.options.spec)} -o hosts",))
    hosts = nccl[0].plan.hosts if nccl else 1
    if rings is not None and hosts == 1 and not on.topology.switches:
        yield Advice(
            "graph",
            f"NCCL takes these rings, {gigabytes(rings.rate)} of algbw; its own search may find fewer",
            (
                f"synth solve {of} --method multiring -o rings.json",
                "synth export rings.json --to nccl-graph -o graph.xml",
                "NCCL_GRAPH_FILE=graph.xml NCCL_ALGO=Ring torchrun ...",
            ),
        )
    if rings is None or best.time_us < (1 - WORTH) * rings.time_us:
        than = "" if rings is None else f", {rings.time_us / best.time_us:.3g}x as fast as the rings"
        yield Advice(
            "schedule",
            f"{best.time_us:.4g} us {told_as(on.topology)}{than}",
            (
                f"synth solve {of} --size {size} -o fast.json",
                "synth export fast.json --to mscclpp -o fast/   # or in PyTorch: init_process_group('synth')",
            ),
        )


def _gain_of_order(on: FabricRequest) -> str | None:
    """What another order of hosts brings to the rings across them; None where there is none to gain."""
    from arborcast.synth.baselines.host_network import HostNetwork
    from arborcast.synth.baselines.host_orders import best_order
    from arborcast.synth.cli.order import hosts_of

    if on.options.ranks is not None or on.faulty is not None:
        return None
    try:
        topology, hosts, _ = hosts_of(on.options.spec, None, None)
    except InputError:  # nothing says which ranks are a host
        return None
    if len(hosts) < 2:
        return None
    found = best_order(HostNetwork(topology, hosts))
    if found.given is None:
        return f"rings of {gigabytes(found.cost.ring)} where today's order has none"
    if found.cost.ring <= found.given.ring:
        return None
    today = f"today's order has {gigabytes(found.given.ring)}"
    return f"rings across hosts of {gigabytes(found.cost.ring)} where {today}"


def words_of(options: FabricOptions) -> Iterator[str]:
    """The fabric as it was asked for on the command line."""
    yield quote(options.spec)
    for each in fields(options):
        value, name = getattr(options, each.name), each.name.replace("_", "-")
        if each.name == "spec" or value == each.default:
            continue
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        else:
            yield from (f"--{name} {one}" for one in (value if isinstance(value, list) else [value]))


def _traffic_document(traffic: LinkUse | None) -> Json | None:
    if traffic is None:
        return None
    return {**picked(traffic, "time_us", "rate", "idle"), "used": float(traffic.used)}


def _document(found: Explanation, topology: Topology) -> Json:
    from arborcast.synth.baselines.nccl_model import NOT_RUN

    rows = [
        {
            **picked(row, "method", "protocol", "time_us", "rate"),
            **picked(row.plan, "channels", "source"),
            "channel_gbps": float(row.plan.channel_rate),
        }
        for row in found.nccl
    ]
    return {
        "nccl": {"model": NOT_RUN, "rows": rows},
        "rings": _traffic_document(found.rings),
        "least_us": found.least_us,
        "best": {"method": found.method, **(_traffic_document(found.best) or {})},
        "unknown": dict(found.unknown),
        "advice": [picked(it, "what", "gain", "commands") for it in found.advice],
    }


def _lines(found: Explanation, topology: Topology, bound: Bound) -> Iterator[str]:
    from arborcast.synth.baselines.nccl_model import NOT_RUN

    how = told_as(topology)
    if found.nccl:
        first, *others = found.nccl
        plan = first.plan
        yield (
            f"  NCCL     {_algorithm(first)} over {plan.channels} channels of {gigabytes(plan.channel_rate)} "
            f"({plan.source}): {first.time_us:.4g} us"
        )
        yield from (f"           its {_algorithm(row)} would take {row.time_us:.4g} us" for row in others)
        yield f"           {NOT_RUN}"
    else:
        yield f"  NCCL     its model knows nothing of this: {found.unknown['nccl']}"
    if found.rings is None:
        yield f"  rings    none: {found.unknown['rings']}"
    else:
        yield f"  rings    {found.rings.time_us:.4g} us {how}, {_use(found.rings, topology)}"
    yield f"  best     {found.best.time_us:.4g} us {how} by {found.method}, {_use(found.best, topology)}"
    yield f"  least    {found.least_us:.4g} us {how} for {every_schedule(bound)}; {_gaps(found)}"


def told_as(topology: Topology) -> str:
    """What its times are."""
    from arborcast.synth.simulation.prices import is_priced

    return "priced" if is_priced(topology) else "simulated"


def _gaps(found: Explanation) -> str:
    """How many times the least time each takes."""
    times = [] if found.rings is None else [f"rings take {found.rings.time_us / found.least_us:.3g}x"]
    return ", ".join([*times, f"the best found {found.best.time_us / found.least_us:.3g}x"])


def _use(traffic: LinkUse, topology: Topology) -> str:
    """Of the bandwidth of all links, and which are left idle."""
    of_all = f"{gigabytes(traffic.rate)} on {share(traffic.used, Fraction(1))} of all bandwidth"
    idle = traffic.idle
    if not idle:
        return f"{of_all}, no link idle"
    named = ", ".join(f"{topology.label(a)}->{topology.label(b)}" for a, b in idle[:MOST_NAMED])
    more = f" and {len(idle) - MOST_NAMED} more" if len(idle) > MOST_NAMED else ""
    return f"{of_all}, {len(idle)} of {len(topology.bandwidth)} links idle: {named}{more}"


def _algorithm(row: ModelTime) -> str:
    return f"{row.algorithm} in {row.protocol.value}"


def _told(advice: Sequence[Advice]) -> Iterator[str]:
    yield ""
    if not advice:
        yield "nothing to do: no order, graph file or schedule is known to be faster"
        return
    yield "what to do, the least effort first"
    for it in advice:
        yield f"  {it.what:<9}{it.gain}"
        yield from (f"             {command}" for command in it.commands)
