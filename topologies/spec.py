"""From what a user writes to a topology: a catalog name with arguments, or a file of any kind known here."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.topology import Topology
from arborcast.topologies.catalog import catalog, entry_named
from arborcast.topologies.rates import Rates

_SUFFIXES = {".yaml", ".yml", ".json", ".xml", ".txt"}


def load(
    spec: str,
    *,
    ranks: Sequence[int] | None = None,
    relays: bool = False,
    gpu: str | None = None,
    pcie: bool = False,
    rates: str = "datasheet",
) -> Topology:
    """The topology that a spec names.

    What stands before the first colon decides. If it is a name of the catalog (`DGX1` is `dgx1`), the catalog
    counts (a file of that name is reached as `./dgx1`). Otherwise the spec is a path when it contains a
    separator, ends in .yaml, .yml, .json, .xml or .txt, or exists. Anything else is unknown. What a file
    holds is seen from its content: see `topologies.files.load_file`.

    Args:
        spec: `dgx1`, `dgx-a100:boxes=2`, `torus:4x4,bandwidth=25`, ... (see `catalog`), or a path to a YAML
            or JSON topology file, the saved text of `nvidia-smi topo -m`, or an NCCL topology XML.
        ranks: the ranks that take part; they are renumbered 0, 1, 2... in this order.
        relays: keep the other ranks, behind those that take part, instead of leaving them out.
        gpu: GPU generation of nvidia-smi text, which does not say it (v100, a100, h100, ...).
        pcie: take the PCIe paths of nvidia-smi text or NCCL XML as links too.
        rates: "datasheet", or "nccl" for NCCL's planning constants.

    Raises:
        TopologyError: the spec is unknown or wrong, or an argument does not go with it.
        InputError: the file cannot be read.
    """
    chosen = Rates.of(rates)
    name, _, arguments = spec.partition(":")
    entry = entry_named(name)
    if entry is not None:
        if gpu is not None or pcie:
            rule = (
                "gpu is for nvidia-smi text"
                if gpu is not None
                else "pcie is for nvidia-smi text and NCCL XML"
            )
            raise TopologyError(f"{shorten(spec)}: {rule}, and this is in the catalog")
        topology = entry.build(arguments, chosen)
    elif _is_path(spec):
        from arborcast.topologies.files import load_file

        topology = load_file(spec, gpu=gpu, pcie=pcie, rates=chosen)
    else:
        raise TopologyError(_unknown(spec, name))
    if ranks is None:
        if relays:
            raise TopologyError(f"{shorten(spec)}: relays need ranks that take part, got none")
        return topology
    return topology.reordered(ranks) if relays else topology.subset(ranks)


def _is_path(spec: str) -> bool:
    path = Path(spec)
    if not spec:  # pathlib takes this for the folder it is in
        return False
    if "/" in spec or "\\" in spec or path.suffix.lower() in _SUFFIXES:
        return True
    try:
        return path.exists()
    except (OSError, ValueError):  # no name the file system could have
        return False


def _unknown(spec: str, name: str) -> str:
    names = [entry.name for entry in catalog()]
    near = difflib.get_close_matches(name.lower().replace("_", "-"), names, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"the catalog has {', '.join(names)}"
    return f"topology {shorten(spec)}: is neither in the catalog nor a file; {hint}"
