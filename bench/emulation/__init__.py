"""Any topology as network namespaces on this machine: one per vertex, one rate-limited pair of devices per link.

Real processes, real TCP, and links that are slow enough for the processors to keep up with all of them.
"""
