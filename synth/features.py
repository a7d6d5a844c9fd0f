"""What a topology has beyond ranks, links and bandwidths, and who understands it.

A rate, a proof or a verdict is worth nothing where its maker overlooks an attribute of a link, a switch or a
topology. So every attribute that is set is a feature (`Topology.features`), each maker and checker calls
`check_features` first, and what `UNDERSTOOD` does not say of it is refused. A new attribute is refused by all
until it has a row here.
"""

from __future__ import annotations

from collections.abc import Mapping

from arborcast.synth.errors import TopologyError
from arborcast.synth.topology import Topology

METHODS = frozenset(
    f"method {name}"
    for name in (
        *("auto", "trees", "mwu", "routes", "sat", "smt", "ilp"),
        *("ring", "multiring", "binary-tree", "levels", "halving-doubling", "multiport", "swing"),
        *("recursive-doubling", "rotated-doubling", "bruck", "pat", "bine"),
    )
)
"""The methods of `synth.methods` as consumers."""

SOLVERS = METHODS | {"solver of implicit form", "frontier of chunks", "groups", "alltoallv", "repair"}
BOUNDS = frozenset({"bound", "certificate check"})
CHECKERS = frozenset({"verifier", "simulator"})
EXPORTERS = frozenset({"lowering", "export"})
EVERYBODY = SOLVERS | BOUNDS | CHECKERS | EXPORTERS | {"pipeline planning", "order of hosts"}
"""All who ask."""

UNDERSTOOD: Mapping[str, frozenset[str]] = {
    "link latency_us": EVERYBODY,
    "topology switches": EVERYBODY,
    "topology symmetries": EVERYBODY,
    "topology message_us": EVERYBODY,
    # Where a cable is reached changes neither rates nor what is right; the process group connects by it.
    "link addresses": EVERYBODY,
    "link lanes": EVERYBODY,
    # By the graph with ports (`synth.ports`). What runs a schedule need not keep to them: it stays right.
    "topology streams": BOUNDS | CHECKERS | METHODS | EXPORTERS | {"frontier of chunks", "repair"},
    # Methods that only forward answer on `Topology.forwarding`, which is slower and right.
    "switch reduces": EVERYBODY,
    "switch multicasts": EVERYBODY,
    "switch turns": EVERYBODY,
    "switch loopback": EVERYBODY,
    "switch adder": EVERYBODY,
    "switch trees": EVERYBODY,
    "switch latency_us": EVERYBODY,
    "switch stores": EVERYBODY,
}
"""Who takes a feature into account, or gives what is right and safe without it."""


def check_features(topology: Topology, consumer: str) -> None:
    """Refuse a topology that has what the consumer does not understand.

    Args:
        topology: what is to be solved, bounded, checked or exported.
        consumer: one of `EVERYBODY`.

    Raises:
        TopologyError: names the first feature that it does not serve, and who does.
    """
    assert consumer in EVERYBODY, f"{consumer} is to be named in synth.features"
    for feature, where in topology.features.items():
        serving = UNDERSTOOD.get(feature, frozenset())
        if consumer not in serving:
            others = f"it is for {', '.join(sorted(serving))}" if serving else "nobody does"
            what = f"{consumer} does not understand {feature}, set at {where}"
            raise TopologyError(f"topology {topology.name}: {what}; {others}")
