"""`load`: a topology by its name in the catalog or from a file, whose kind says which reader goes with it.

`load_machine` gives what else is known of it: GPUs, NICs, hosts, what was assumed.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from importlib import import_module
from pathlib import Path

from arborcast.synth.errors import InputError, TopologyError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.formats.reading import read_text, shorten_path
from arborcast.synth.topology import PLANNED, Topology
from arborcast.topologies.builders import assumed
from arborcast.topologies.catalog import catalog, entry_named
from arborcast.topologies.machine import Machine
from arborcast.topologies.rates import Rates
from arborcast.topologies.readers.kinds import UNDERSTOOD, is_json, kind_of, seems
from arborcast.topologies.readers.options import Reader, Said

_log = logging.getLogger(__name__)

MAX_TOPOLOGY_BYTES = 16 << 20


def load_file(path: Path | str, said: Said | None = None, *, max_bytes: int = MAX_TOPOLOGY_BYTES) -> Machine:
    """The machine in a file: YAML, JSON, XML of NCCL or lstopo, text of nvidia-smi, rocm-smi or amd-smi.

    The content decides which, under the suffixes .yaml, .yml and .xml the suffix (`readers.kinds`).

    For the options see `load`.

    Raises:
        InputError: the file cannot be read, or breaks a rule of its kind; one line that begins with its name.
    """
    said = said or Said()
    text = read_text(path, max_bytes=max_bytes)
    place = shorten_path(path)
    kind = kind_of(Path(path).suffix.lower(), text)
    try:
        if kind in {"YAML", "JSON"}:
            option = said.first
            if option is not None or said.rates is not Rates.DATASHEET:
                wrong = option or f"rates {said.rates.value} (--rates)"
                instead = "" if option else f"; take rates {Rates.DATASHEET.value}"
                raise TopologyError(
                    f"{place}: {wrong} does not go with {kind}, which holds its own links{instead}"
                )
            from arborcast.topologies.readers.topology_documents import parse_document

            return parse_document(text, place, kind)
        options = {each.name: getattr(said, each.name) for each in fields(Said)}
        return _reader(kind)(text, place, **options)
    except MemoryError as error:
        raise InputError(f"{place}: does not fit into memory") from error
    except InputError as error:
        held = kind_of("", text)
        if held != kind and held in {"nvidia-smi", "rocm-smi"}:
            raise TopologyError(
                f"{place}: by its suffix {kind}, but it looks like what {held} prints; call it .txt"
            ) from error
        other = seems(text) if kind in {"YAML", "JSON", "XML"} else None
        if other is None:
            raise
        raise TopologyError(f"{place}: looks like {other}; understood are {UNDERSTOOD}") from error


_READERS = {"XML": "nccl_xml", "lstopo": "lstopo", "rocm-smi": "rocm_smi", "nvidia-smi": "nvidia_smi"}
"""Modules of `readers`, imported where a file needs one."""


def _reader(kind: str) -> Reader:
    module = import_module(f"arborcast.topologies.readers.{_READERS[kind]}")
    found: Reader = getattr(module, f"parse_{_READERS[kind]}")
    return found


SUFFIXES = {".yaml", ".yml", ".json", ".xml", ".txt"}
"""By which a spec is a path, whether it exists or not."""


def load(
    spec: str,
    *,
    ranks: Sequence[int] | None = None,
    relays: bool = False,
    gpu: str | None = None,
    pcie: bool | None = None,
    between_sockets: Fraction | int | None = None,
    numa_per_socket: int | None = None,
    rates: str = "datasheet",
) -> Topology:
    """The topology that a spec names: the graph of `load_machine`, which takes and raises the same.

    Examples:
        >>> topologies.load("dgx-h100:boxes=2").ranks
        16
    """
    return load_machine(
        spec,
        ranks=ranks,
        relays=relays,
        gpu=gpu,
        pcie=pcie,
        between_sockets=between_sockets,
        numa_per_socket=numa_per_socket,
        rates=rates,
    ).topology


def load_machine(
    spec: str,
    *,
    ranks: Sequence[int] | None = None,
    relays: bool = False,
    gpu: str | None = None,
    pcie: bool | None = None,
    between_sockets: Fraction | int | None = None,
    numa_per_socket: int | None = None,
    rates: str = "datasheet",
) -> Machine:
    """The machine that a spec names.

    What stands before the first colon decides. If it is a name of the catalog (`DGX1` is `dgx1`), the catalog
    counts (a file of that name is reached as `./dgx1`). Otherwise the spec is a path when it contains a
    separator, ends in .yaml, .yml, .json, .xml or .txt, or exists. Anything else is unknown. What a file
    holds is seen from its content: see `topologies.files.load_file`.

    Args:
        spec: `dgx1`, `dgx-a100:boxes=2`, `torus:4x4,bandwidth=25`, ... (see `catalog`), or a path to a YAML
            or JSON topology file, the saved text of `nvidia-smi topo -m`, `rocm-smi --showtopo` or
            `amd-smi topology`, or an NCCL topology XML.
        ranks: the ranks that take part; they are renumbered 0, 1, 2... in this order.
        relays: keep the other ranks, behind those that take part, instead of leaving them out.
        gpu: what the GPUs are where a tool's text does not say it, or says otherwise (see `GPUS`).
        pcie: take the PCIe paths of a tool's text or NCCL XML as links too (True), or only where there are no
            others (False); by default, where others do not join all GPUs.
        between_sockets: GB/s each way between two CPU sockets; see `topologies.processors` for the default.
        numa_per_socket: NUMA nodes of one CPU socket; see `topologies.readers.sockets` for the default.
        rates: "datasheet", or "nccl" for NCCL's planning constants.

    Raises:
        TopologyError: the spec is unknown or wrong, or an argument does not go with it.
        InputError: the file cannot be read.

    Examples:
        >>> machine = topologies.load_machine("torus:2x2,bandwidth=25")
        >>> machine.topology.ranks, machine.hosts
        (4, (0, 0, 0, 0))
    """
    chosen = Rates.of(rates)
    crossing = None if between_sockets is None else Fraction(between_sockets)
    if crossing is not None and crossing <= 0:
        raise TopologyError(f"between_sockets: must be above 0 GB/s, got {crossing}")
    if numa_per_socket is not None and numa_per_socket < 1:
        raise TopologyError(f"numa_per_socket: must be at least 1, got {numa_per_socket}")
    said = Said(gpu, pcie, crossing, numa_per_socket, chosen)
    name, _, arguments = spec.partition(":")
    entry = entry_named(name)
    if entry is not None:
        if said.first is not None:
            rule = f"{said.first} is for files of tools"
            raise TopologyError(f"{shorten(spec)}: {rule}, and this is in the catalog")
        machine = entry.machine(arguments, chosen)
        for note in machine.notes:
            _log.warning("%s", note)
    elif arguments and Path(name).suffix.lower() in SUFFIXES and not _exists(spec):
        raise TopologyError(
            f"{shorten(spec)}: a file takes no arguments; synth cluster {shorten_path(name)} --hosts N joins "
            "several hosts"
        )
    elif _is_path(spec):
        machine = load_file(spec, said)
        for note in machine.notes:
            _log.warning("%s: %s", shorten_path(spec), note)
    else:
        raise TopologyError(_unknown(spec, name))
    if chosen is Rates.NCCL:
        machine = replace(machine, topology=assumed(machine.topology, rate=PLANNED))
    if ranks is None:
        if relays:
            raise TopologyError(f"{shorten(spec)}: relays need ranks that take part, got none")
        return machine
    return machine.reordered(ranks, relays=relays)


def load_rated(spec: str, rates: Mapping[str, Fraction]) -> Machine:
    """The fabric that a file of InfraGraph, topograph or Slurm holds, with rates that it does not say.

    Args:
        spec: the file.
        rates: GB/s each way by the names of links, or of layers.

    Raises:
        InputError: it is none of these, breaks a rule, or still lacks a rate.
    """
    from arborcast.topologies.readers.infragraph import is_infragraph, of_infragraph
    from arborcast.topologies.readers.schedulers import rated, read_host_tree
    from arborcast.topologies.readers.topology_documents import read_document

    tree, place = read_host_tree(Path(spec)), shorten_path(spec)
    if tree is not None:
        return rated(tree, rates)
    text = read_text(spec, max_bytes=MAX_TOPOLOGY_BYTES)
    document = read_document(text, place, "JSON" if is_json(text) else "YAML")
    if not is_infragraph(document):
        raise TopologyError(
            f"{place}: must be a file of InfraGraph, topograph or Slurm, which have links by name"
        )
    return of_infragraph(document, place, rates)


def _is_path(spec: str) -> bool:
    if not spec:  # pathlib takes this for the folder it is in
        return False
    return "/" in spec or "\\" in spec or Path(spec).suffix.lower() in SUFFIXES or _exists(spec)


def _exists(spec: str) -> bool:
    try:
        return Path(spec).exists()
    except (OSError, ValueError):  # no name the file system could have
        return False


def _unknown(spec: str, name: str) -> str:
    names = [entry.name for entry in catalog()]
    near = difflib.get_close_matches(name.lower().replace("_", "-"), names, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "synth topologies lists the catalog"
    return f"topology {shorten(spec)}: is neither in the catalog nor a file; {hint}"
