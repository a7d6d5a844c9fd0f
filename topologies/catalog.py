"""The catalog: which topologies have a name.

A catalog spec is a name with arguments: `torus:4x4,bandwidth=25`. The first argument may stand without its
key; all others are key=value, separated by commas.
"""

from __future__ import annotations

from arborcast.topologies import grids
from arborcast.topologies.entries import Entry
from arborcast.topologies.machines import (
    amd,
    aws,
    boxes,
    cabled,
    clouds,
    google,
    intel,
    nvidia,
    pcie,
    slingshot,
)

_ENTRIES = (
    *nvidia.ENTRIES,
    *amd.ENTRIES,
    *intel.ENTRIES,
    *google.ENTRIES,
    *aws.ENTRIES,
    *clouds.ENTRIES,
    *slingshot.ENTRIES,
    *pcie.ENTRIES,
    *cabled.ENTRIES,
    boxes.GENERIC,
    *grids.ENTRIES,
)


def catalog() -> tuple[Entry, ...]:
    """All topologies that have a name, machines first, those of a vendor together.

    Examples:
        >>> [entry.name for entry in topologies.catalog()][:3]
        ['dgx1', 'dgx1-p100', 'dgx2']
    """
    return _ENTRIES


def entry_named(name: str) -> Entry | None:
    """The entry of this name, in whatever case and with `_` for `-`; None where there is none."""
    plain = name.lower().replace("_", "-")
    return next((entry for entry in _ENTRIES if entry.name == plain), None)
