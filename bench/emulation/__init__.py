"""Any topology as network namespaces of this machine, with a rate-limited pair of devices for every link.

Real processes, real TCP, and links that are slow enough for the processors to keep up with all of them.
"""
