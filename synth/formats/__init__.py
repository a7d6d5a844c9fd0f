"""Topologies, collectives, bounds, certificates and schedules to files and back, one line for every error."""

from arborcast.synth.formats.collectives import (
    MAX_COLLECTIVE_BYTES,
    collective_from_document,
    read_collective,
)
from arborcast.synth.formats.documents import (
    bound_from_document,
    bound_to_document,
    certificate_from_document,
    certificate_to_document,
    topology_from_document,
    topology_to_document,
)
from arborcast.synth.formats.schedules import (
    MAX_SCHEDULE_BYTES,
    SCHEDULE_FORMAT,
    read_explicit,
    schedule_from_document,
    schedule_to_document,
    write_explicit,
)

__all__ = [
    "MAX_COLLECTIVE_BYTES",
    "MAX_SCHEDULE_BYTES",
    "SCHEDULE_FORMAT",
    "bound_from_document",
    "bound_to_document",
    "certificate_from_document",
    "certificate_to_document",
    "collective_from_document",
    "read_collective",
    "read_explicit",
    "schedule_from_document",
    "schedule_to_document",
    "topology_from_document",
    "topology_to_document",
    "write_explicit",
]
