"""Topologies: the catalog of machines and the readers of files that describe them.

topologies.load("dgx-a100:boxes=2")
topologies.load("cluster.yaml", ranks=[0, 1, 3])
"""

from __future__ import annotations

from arborcast.topologies.catalog import catalog
from arborcast.topologies.entries import Entry, Parameter
from arborcast.topologies.files import load, load_machine
from arborcast.topologies.gpus import GPUS
from arborcast.topologies.machine import Machine, Nic
from arborcast.topologies.rates import Rates

__all__ = ["GPUS", "Entry", "Machine", "Nic", "Parameter", "Rates", "catalog", "load", "load_machine"]
