"""Cluster files (YAML or JSON): which hosts a fabric joins, so many of each, with what is said of each."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from arborcast.synth.formats.reading import parse_json, read_text
from arborcast.synth.formats.shapes import MAPPING, MAX_RANKS, Bandwidth, Name, check_shape
from arborcast.synth.formats.yaml_text import parse_yaml

MAX_BYTES = 1 << 24
Count = Annotated[int, Field(ge=1, le=MAX_RANKS)]


@MAPPING
class HostsShape(TypedDict):
    """See `Hosts`."""

    machine: Name
    count: NotRequired[Count]
    nic: NotRequired[Bandwidth]
    nics: NotRequired[Name | Count]
    gpu: NotRequired[Name]
    pcie: NotRequired[bool]
    between_sockets: NotRequired[Bandwidth]
    numa_per_socket: NotRequired[Count]


@MAPPING
class ClusterShape(TypedDict):
    """A cluster file."""

    fabric: NotRequired[Name]
    hosts: Annotated[list[HostsShape], Field(min_length=1, max_length=MAX_RANKS)]


@dataclass(frozen=True, slots=True)
class Hosts:
    """Equal hosts of a cluster.

    Attributes:
        spec: what one is, as `topologies.load_machine` takes it.
        count: how many.
        nic: GB/s each way of every NIC; None for what the machine says.
        nics: which of them join, as `cluster.chosen_nics` reads it; None for its own choice.
        gpu, pcie, between_sockets, numa_per_socket: see `topologies.load_machine`.
    """

    spec: str
    count: int = 1
    nic: Fraction | None = None
    nics: str | None = None
    gpu: str | None = None
    pcie: bool | None = None
    between_sockets: Fraction | None = None
    numa_per_socket: int | None = None


def read_cluster(path: Path) -> tuple[str | None, tuple[Hosts, ...]] | None:
    """The fabric and the hosts of a cluster file; None where the file is something else.

    Machines are names of the catalog, or files beside the cluster file.

    Raises:
        InputError: it has hosts that are no numbers, as a cluster file has, but breaks a rule.
    """
    if path.suffix.lower() not in {".yaml", ".yml", ".json"} or not path.is_file():
        return None
    text = read_text(path, max_bytes=MAX_BYTES)
    if "hosts" not in text:  # most files of one host, which whoever reads them parses
        return None
    document = parse_json(text, str(path)) if path.suffix.lower() == ".json" else parse_yaml(text, str(path))
    if not isinstance(document, dict) or "hosts" not in document or "links" in document:
        return None
    said = check_shape(ClusterShape, document, str(path))
    hosts: list[Hosts] = []
    for entry in said["hosts"]:
        beside = path.parent / entry["machine"]
        spec = str(beside) if beside.is_file() else entry["machine"]
        nics = entry.get("nics")
        rest = {key: value for key, value in entry.items() if key not in {"machine", "nics"}}
        hosts.append(Hosts(spec, nics=None if nics is None else str(nics), **rest))
    return said.get("fabric"), tuple(hosts)
