"""Topologies: the catalog of machines and the readers of files that describe them.

topologies.load("dgx-a100:boxes=2")
topologies.load("cluster.yaml", ranks=[0, 1, 3])
"""

from __future__ import annotations

from arborcast.topologies.catalog import Entry, Parameter, catalog
from arborcast.topologies.files import load
from arborcast.topologies.rates import GPUS, Rates

__all__ = ["GPUS", "Entry", "Parameter", "Rates", "catalog", "load"]
