"""Limits of R/C in S steps that hold for every number of chunks, as certificates, and their exact check.

`certificate` holds the values, `check` recomputes them and imports no builder; the others build.
"""
