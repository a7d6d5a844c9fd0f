"""Topology files: which kind a file is, and the reader that goes with it."""

from __future__ import annotations

import re
from pathlib import Path

from arborcast.synth.errors import InputError, TopologyError
from arborcast.synth.formats.documents import topology_from_document
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.formats.reading import parse_json, read_text, shorten_path
from arborcast.synth.topology import Topology
from arborcast.topologies.rates import Rates

MAX_TOPOLOGY_BYTES = 16 << 20

_MATRIX_HEADER = re.compile(r"^(?:[ \t]|\x1b\[[0-9;]*[A-Za-z])*GPU[0-9]+\s", re.MULTILINE)


def load_file(
    path: Path | str,
    *,
    gpu: str | None = None,
    pcie: bool = False,
    rates: Rates = Rates.DATASHEET,
    max_bytes: int = MAX_TOPOLOGY_BYTES,
) -> Topology:
    """The topology in a file: YAML, JSON, the text of `nvidia-smi topo -m`, or NCCL's XML.

    The suffixes .json, .yaml, .yml and .xml decide. Under any other name, text that begins with `<` is XML,
    with `{` JSON; text with a line that begins with a GPU's name is nvidia-smi's; the rest is YAML.

    Args:
        path: the file.
        gpu: GPU generation, for nvidia-smi text only.
        pcie: PCIe paths become links, for nvidia-smi text and XML only.
        rates: data sheet or NCCL's constants; for YAML and JSON, which hold their rates, data sheet only.
        max_bytes: larger files are refused.

    Raises:
        InputError: the file cannot be read, or breaks a rule of its kind; one line that begins with its name.
    """
    text = read_text(path, max_bytes=max_bytes)
    place = shorten_path(path)
    kind = _kind(Path(path).suffix.lower(), text)
    try:
        if gpu is not None and kind != "nvidia-smi":
            raise TopologyError(f"{place}: gpu is for nvidia-smi text only, and this is {kind}")
        if kind == "nvidia-smi":
            from arborcast.topologies.nvidia_smi import parse_nvidia_smi

            return parse_nvidia_smi(text, place, gpu=gpu, pcie=pcie, rates=rates)
        if kind == "XML":
            from arborcast.topologies.nccl_xml import parse_nccl_xml

            return parse_nccl_xml(text, place, pcie=pcie, rates=rates)
        if pcie or rates is not Rates.DATASHEET:
            option = "pcie" if pcie else f"rates {rates.value}"
            instead = "" if pcie else f"; take rates {Rates.DATASHEET.value}"
            raise TopologyError(
                f"{place}: {option} does not go with {kind}, which holds its own links{instead}"
            )
        return _from_document(text, place, kind)
    except MemoryError as error:
        raise InputError(f"{place}: does not fit into memory") from error


def _kind(suffix: str, text: str) -> str:
    by_suffix = {".json": "JSON", ".yaml": "YAML", ".yml": "YAML", ".xml": "XML"}
    if suffix in by_suffix:
        return by_suffix[suffix]
    start = text.lstrip()[:1]
    if start == "<":
        return "XML"
    if start == "{":
        return "JSON"
    return "nvidia-smi" if _MATRIX_HEADER.search(text) else "YAML"


def _from_document(text: str, place: str, kind: str) -> Topology:
    if kind == "JSON":
        document = parse_json(text, place)
    else:
        from arborcast.synth.formats.yaml_text import parse_yaml

        document = parse_yaml(text, place)
    if not isinstance(document, dict):
        raise TopologyError(
            f"{place}: must be a mapping with the keys ranks and links (or nvidia-smi text, or NCCL's XML), "
            f"got {shorten(document)}"
        )
    if "format" in document:
        raise TopologyError(
            f"{place}: must be a topology, got a file of format {shorten(document['format'])}"
        )
    return topology_from_document(document, place)
