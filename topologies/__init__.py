"""Topologies: the catalog of machines and the readers of files that describe them."""
