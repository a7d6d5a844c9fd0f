"""Alltoall of blocks of any sizes."""
