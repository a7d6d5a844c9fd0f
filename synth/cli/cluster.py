"""`synth cluster`: several hosts, from files or the catalog, joined to a topology file to read and edit."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arborcast.synth.cli.console import Json, answer
from arborcast.synth.cli.description import describe_topology
from arborcast.synth.cli.inputs import above_zero
from arborcast.synth.cli.options import (
    AsJson,
    BetweenSockets,
    Gpu,
    NumaPerSocket,
    Pcie,
    Rates,
    number,
    option,
    target,
)
from arborcast.synth.errors import InputError

if TYPE_CHECKING:
    from arborcast.synth.topology import Link, Topology
    from arborcast.topologies import Machine
    from arborcast.topologies.cluster import Cluster
    from arborcast.topologies.readers.cluster_documents import Hosts

_logger = logging.getLogger(__name__)


def cluster(
    hosts: Annotated[
        list[str],
        typer.Argument(
            help="a file or a name of the catalog, once for each host; or a file that names hosts and fabric",
            metavar="HOST",
        ),
    ],
    count: Annotated[int, number("--hosts", "so many hosts like the one that is named")] = 1,
    fabric: Annotated[
        str | None,
        option(
            "--fabric",
            "full: one switch that blocks nothing; rail: a switch for NIC i of all hosts (rail:N: NICs are "
            "dealt to N switches); fat-tree:RATIO: leaf switches whose way up is RATIO times thinner "
            "(fat-tree:RATIO:HOSTS: so many hosts under each); rail-tree:RATIO: a leaf for NIC i of hosts "
            "(rail-tree:RATIO:HOSTS: of so many each) under one core; :RATIO:LEAVES behind: under spines of "
            "so many leaves each; by default full",
            metavar="FABRIC",
        ),
    ] = None,
    nic: Annotated[
        str | None,
        option(
            "--nic",
            "GB/s each way of every NIC; where a host shows none, one for each GPU",
            metavar="GB/S",
        ),
    ] = None,
    nics: Annotated[
        str | None,
        option(
            "--nics",
            "which NICs: near (to each GPU), all, so many of a host, or names; by default the fastest, with "
            "--nic those near",
            metavar="NICS",
        ),
    ] = None,
    link_rates: Annotated[
        str | None,
        option(
            "--link-rates",
            "of one file of InfraGraph, topograph or Slurm, which is a whole fabric: GB/s each way of links "
            "by name, where it has none; of the others by layer, 1 from hosts up",
            metavar="NAME=GB/S,...",
        ),
    ] = None,
    output: Annotated[Path | None, target("-o", "--output", "write the topology file here (YAML)")] = None,
    gpu: Gpu = None,
    pcie: Pcie = None,
    between_sockets: BetweenSockets = None,
    numa_per_socket: NumaPerSocket = None,
    rates: Rates = "datasheet",
    as_json: AsJson = False,
) -> None:
    """Join hosts by their NICs to one topology file.

    Without -o it is printed.
    """
    from arborcast.topologies import load_machine
    from arborcast.topologies.cluster import join, with_nics
    from arborcast.topologies.fabrics import fabric_named
    from arborcast.topologies.rates import Rates
    from arborcast.topologies.readers.cluster_documents import Hosts, read_cluster

    if link_rates is not None:
        _write_rated(hosts, link_rates, output, as_json)
        return
    if count < 1 or (count > 1 and len(hosts) > 1):
        rule = "goes with one HOST" if count > 1 else "must be at least 1"
        raise InputError(f"--hosts {count}: {rule}, got {len(hosts)}")
    speed, crossing = above_zero("--nic", nic), above_zero("--between-sockets", between_sockets)
    asked = Hosts(hosts[0], count, speed, nics, gpu, pcie, crossing, numa_per_socket)
    in_file = read_cluster(Path(hosts[0])) if len(hosts) == 1 else None
    if in_file is None:
        alike = tuple(replace(asked, spec=spec) for spec in hosts)
    elif asked != Hosts(hosts[0]) or fabric is not None:
        raise InputError(f"{hosts[0]}: a cluster file says itself what hosts and fabric are, options may not")
    else:
        fabric, alike = in_file
    fabric = fabric or "full"
    network = fabric_named(fabric)
    machines: dict[Hosts, Machine] = {}
    for own in dict.fromkeys(alike):
        machine = load_machine(
            own.spec,
            gpu=own.gpu,
            pcie=own.pcie,
            between_sockets=own.between_sockets,
            numa_per_socket=own.numa_per_socket,
            rates=rates,
        )
        named = replace(machine, topology=replace(machine.topology, name=_short(own.spec)))
        machines[own] = with_nics(named, own.nic, chosen=own.nics, option="nic" if in_file else "--nic")
        for note in machines[own].notes[len(machine.notes) :]:
            _logger.warning("%s", note)
    members = [own for own in alike for _ in range(own.count)]
    specs = [own.spec for own in members]
    name = f"{_named(specs)}, {fabric}"
    found = join(name, [machines[own] for own in members], network, rates=Rates.of(rates))
    told_before = {note for machine in machines.values() for note in machine.notes}
    for note in (note for note in found.machine.notes if note not in told_before):
        _logger.warning("%s", note)
    told = {"gpu": list(found.machine.gpus), "notes": list(found.machine.notes)}
    _tell(found.machine.topology, _file(found, specs, fabric, speed), output, told, as_json)


def _write_rated(specs: Sequence[str], said: str, output: Path | None, as_json: bool) -> None:
    """A fabric that a file holds whole, with the rates that it does not say."""
    from arborcast.synth.formats.topology_text import topology_to_yaml
    from arborcast.topologies.files import load_rated

    pairs = [part.partition("=") for part in said.split(",")]
    rates = {name: above_zero(f"--link-rates {name}", rate) for name, _, rate in pairs}
    if len(specs) > 1:
        raise InputError(f"--link-rates: goes with one file, got {len(specs)}")
    machine = load_rated(specs[0], {name: rate for name, rate in rates.items() if rate is not None})
    head = [f"{specs[0]}, as `synth cluster` read it; by --link-rates, GB/s each way: {said}"]
    _tell(machine.topology, topology_to_yaml(machine.topology, head=head), output, {}, as_json)


def _tell(topology: Topology, text: str, output: Path | None, told: Json, as_json: bool) -> None:
    """Write the file of a topology, or print it; its document has what is `told` beside."""
    from arborcast.synth.formats import topology_to_document
    from arborcast.synth.formats.atomic import write_atomically

    if output is not None:
        write_atomically(output, text)
    answer(
        as_json,
        {**topology_to_document(topology), **told} if as_json else {},
        lambda: (
            [text.removesuffix("\n")]
            if output is None
            else [*describe_topology(topology), f"written   {output}"]
        ),
    )


def _short(spec: str) -> str:
    """A host by its file's name without folder and suffix, or as the catalog calls it."""
    from arborcast.topologies.files import SUFFIXES

    return Path(spec).stem if "/" in spec or Path(spec).suffix.lower() in SUFFIXES else spec


def _named(specs: Sequence[str]) -> str:
    return " + ".join(f"{number} x {_short(spec)}" for spec, number in Counter(specs).items())


def _file(found: Cluster, specs: Sequence[str], fabric: str, nic: Fraction | None) -> str:
    """The YAML: what it was made of, then the links host by host."""
    from arborcast.synth.formats.topology_text import topology_to_yaml

    topology, owners = found.machine.topology, found.owners
    head = [
        f"Made by `synth cluster`, fabric {fabric}. Bandwidths are GB/s each way (1e9 bytes), latencies us.",
        *([f"Every NIC has {float(nic):g} GB/s, as --nic says."] if nic is not None else []),
    ]
    ranks: dict[int | None, list[int]] = {}
    for rank in range(topology.ranks):
        ranks.setdefault(owners[rank], []).append(rank)
    for spec, alike in groupby(range(len(specs)), key=specs.__getitem__):
        run = list(alike)
        named = f"host{run[0]}" if len(run) == 1 else f"host{run[0]} to host{run[-1]}"
        head.append(f"{named}: ranks {ranks[run[0]][0]}-{ranks[run[-1]][-1]}, {spec}")
    head += [f"Assumed: {note}" for note in found.machine.notes]

    def group(link: Link) -> str:
        ends = {owners[link.src], owners[link.dst]}
        inside = [end for end in ends if end is not None]
        if not inside:
            return "between switches of the fabric"
        return f"host{inside[0]} to the fabric" if None in ends else f"inside host{inside[0]}"

    machine = found.machine
    return topology_to_yaml(topology, head=head, gpu=machine.gpus, notes=machine.notes, group=group)
