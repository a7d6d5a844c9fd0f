"""The topology XML of NCCL and RCCL (NCCL_TOPO_DUMP_FILE, NCCL_TOPO_FILE) to a machine.

The file nests system > cpu > pci > ... > gpu > nvlink (AMD's: xgmi). The parts are read in `readers/nccl`;
this module puts the machine together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.topology import Topology
from arborcast.topologies.builders import with_obvious_symmetries
from arborcast.topologies.machine import Machine
from arborcast.topologies.readers.nccl.xml_gpus import Device, NcclFile
from arborcast.topologies.readers.nccl.xml_links import find_wiring, links_of, links_to_cpus
from arborcast.topologies.readers.nccl.xml_nics import find_nics
from arborcast.topologies.readers.nccl.xml_pcie import PcieTree, pcie_links
from arborcast.topologies.readers.options import Said, reader
from arborcast.topologies.readers.pcie_wanted import wants_pcie

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element


@reader
def parse_nccl_xml(text: str, place: str, said: Said) -> Machine:
    """The machine that the XML describes; the hosts of a multi-node NVLink domain are one machine.

    Ranks are the GPUs by host, then by `dev`. GPUs are told by PCI device, else AMD's by `gcn`, NVIDIA's by
    compute capability and number of NVLinks. The NVSwitches of a host are one switch, as in NCCL, and those
    behind the fabric's address (fffffff:ff:ff.0) one of all hosts. Where these do not join all GPUs, PCIe
    paths do. A file with the slots of GPUs alone leaves NVLinks to be detected: then those of the
    board that the GPU is sold on are assumed (SXM, OAM), as they are where `gpu` names such a GPU and the
    file shows no links.

    Args:
        text: the XML; a DTD and entities are refused.
        place: what errors begin with.
        said: what else is said of it:
            gpu: what all GPUs are, whatever the file says of it.
            pcie: whether PCIe paths become links beside NVLinks: a tree of switches with the speed and width
                of each slot, GPUs joined to their CPU by C2C where they are, the CPUs of a host joined in
                pairs; False leaves GPUs apart that links do not join.
            between_sockets: GB/s each way between two CPUs; by default NCCL's figure for their model.
            numa_per_socket: NUMA nodes (`cpu` elements) of a CPU (see `readers.sockets`).
            rates: those of data sheets, or NCCL's and RCCL's constants.

    Raises:
        TopologyError: not such an XML, attributes missing or wrong, links not alike in both directions, GPUs
            whose links would be a guess.
    """
    return machine_of(parse_xml(text, "system", "NCCL's"), said, "nccl")


def machine_of(root: Element, said: Said, name: str) -> Machine:
    """The machine of this name in a `system` element; see `parse_nccl_xml`."""
    file = NcclFile.of(root, said)
    devices, notes = file.devices, file.notes
    wiring = find_wiring(file)
    links, switches = links_of(file, wiring)
    paths = PcieTree([], [], {})
    if wants_pcie(said, len(devices), links, _why_pcie(devices), notes):
        paths = pcie_links(file, len(devices) + len(switches), links_to_cpus(file, wiring))
    if not links and not paths.links:
        raise TopologyError("shows neither NVLinks nor PCIe paths between its gpus")
    nics = find_nics(file, paths.over)
    topology = Topology.build(name, len(devices), [*links, *paths.links], [*switches, *paths.names])
    return Machine(
        with_obvious_symmetries(topology),
        gpus=tuple(None if device.kind is None else device.kind.name for device in devices),
        devices=tuple(device.name for device in devices),
        hosts=tuple(device.host for device in devices),
        nics=nics,
        notes=tuple(notes),
    )


def parse_xml(text: str, tag: str, whose: str) -> Element:
    """The root of an XML without DTD and entities, which must have this tag.

    Raises:
        TopologyError: it is none, or another one.
    """
    import defusedxml
    from defusedxml.ElementTree import ParseError, fromstring

    try:
        root: Element = fromstring(text.strip(), forbid_dtd=True)
    except ParseError as error:
        line, column = error.position
        rule = str(error).partition(": line ")[0]  # the rest repeats the place, with columns from 0
        raise TopologyError(f"line {line}, column {column + 1}: must be XML: {rule}") from error
    except defusedxml.DefusedXmlException as error:
        raise TopologyError("must not hold a DTD or entities") from error
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"must be XML: {shorten(str(error))}") from error
    if root.tag in {"graphs", "algo"}:
        kind = "the result of NCCL's search (NCCL_GRAPH_DUMP_FILE)" if root.tag == "graphs" else "MSCCL's XML"
        raise TopologyError(f"must be a topology (NCCL_TOPO_DUMP_FILE), got {kind}")
    if root.tag != tag:
        raise TopologyError(f"must be {whose} XML, whose root is {tag}, got {shorten(root.tag)}")
    return root


def _why_pcie(devices: list[Device]) -> str:
    """The note that PCIe paths became the links, and what may be missing."""
    linked = {device.kind.name for device in devices if device.kind is not None and device.kind.links}
    doubt = f", which {', '.join(sorted(linked))} can have" if linked else ""
    return f"shows no NVLinks or xGMI{doubt}: its PCIe paths are the links; --pcie says so"
